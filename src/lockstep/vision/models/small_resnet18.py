"""Define ResNet18 for images of a few pixels."""

from typing import Any

from torch import nn

from lockstep.vision.models.classifier import ImageClassifier

NORMS = ("batch", "group")


class SmallResNet18(ImageClassifier):
    """ResNet18 (He et al., Deep Residual Learning, 2016) with a first convolution of 3 x 3, and no max-pool after it.

    Args:
        norm: 'batch' or 'group'. Group norm normalises each sample alone, so the number of pieces has no effect on it.
        classifier_options: options of ImageClassifier.

    Raises:
        ValueError: An option is out of range, or the images are too small.
    """

    def __init__(
        self, *, channels: int, image_size: int, num_classes: int, norm: str = "batch", **classifier_options: Any
    ) -> None:
        from torchvision.models import resnet18  # takes two seconds, which other models need not wait

        if norm not in NORMS:
            raise ValueError(f"norm={norm}: must be one of {', '.join(NORMS)}")
        if norm == "batch" and image_size < 9:
            # The last feature map is 1 x 1. There BatchNorm can't train on one sample, and a short step may have one.
            raise ValueError(
                f"small_resnet18 with norm=batch needs images of at least 9 x 9 pixels, these are {image_size} x "
                f"{image_size}: use norm=group"
            )
        net = resnet18(num_classes=num_classes, norm_layer=_group_norm if norm == "group" else None)
        net.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
        # torchvision initialises the other convolutions like this
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        net.maxpool = nn.Identity()
        super().__init__(net, channels=channels, image_size=image_size, num_classes=num_classes, **classifier_options)

    def stages(self) -> list[nn.Module]:
        """Return the net's layers in order. torchvision's forward() flattens between them."""
        net: Any = self.net
        blocks = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
        return [net.conv1, net.bn1, net.relu, net.maxpool, *blocks, net.avgpool, nn.Flatten(), net.fc]


def _group_norm(channels: int) -> nn.Module:
    """Return a group norm (Wu and He, Group Normalization, 2018).

    It is no lambda, since torchvision's net stores it and must be picklable.
    """
    return nn.GroupNorm(min(32, channels), channels)
