"""ResNet18 for images of any size: a net of torchvision, trained as `ImageClassifier` trains any net."""

from torch import nn

from lockstep.vision.models import ImageClassifier


class ResNet18(ImageClassifier):
    """torchvision's ResNet18. Its first layers keep the pixels of small images, up to 64 x 64.

    The loss, the scores and the optimizer are those of ImageClassifier, and so are the other options.
    """

    def __init__(self, *, channels, image_size, num_classes, **options):
        from torchvision.models import resnet18  # takes two seconds, which other models need not wait

        net = resnet18(num_classes=num_classes)
        if image_size > 64:
            net.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        else:
            net.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
            net.maxpool = nn.Identity()
        super().__init__(net, channels=channels, image_size=image_size, num_classes=num_classes, **options)
