"""Define a convolutional net that learns MNIST in one pass over the data, in seconds on two CPU cores."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn

from lockstep.vision.models.classifier import ImageClassifier


class FastCNN(ImageClassifier):
    """Four convolutions with BatchNorm, ReLU and, but for the first, a max-pool; one linear layer.

    The first convolution is 5 x 5 with stride 2, so nothing is computed at full size. It has no padding, since the
    edges of digits are empty; 12 x 12 instead of 14 x 14 values per channel are a quarter less to compute from there
    on. The other convolutions are 3 x 3. Pooling comes before BatchNorm and ReLU, which then process a quarter of the
    values. At the end it comes after them: pooled digits have one value per channel, and BatchNorm can't compute a
    variance from one sample. Over several passes the net also learns better this way (docs/results/recipes.md).

    Args:
        width: channels of each convolution.
        classifier_options: options of ImageClassifier.

    Raises:
        ValueError: An option is out of range, or the images are too small.
    """

    def __init__(
        self,
        *,
        channels: int,
        image_size: int,
        num_classes: int,
        width: Sequence[int] = (16, 32, 64, 128),
        **classifier_options: Any,
    ) -> None:
        if not isinstance(width, Sequence) or len(width) != 4 or min(width) < 1:
            raise ValueError(f"width={width}: must be four whole numbers of at least 1, channels of convolutions")
        side = (image_size - 3) // 2 // 2 // 2  # pixels at the last convolution
        if side < 2:
            raise ValueError(f"fast_cnn needs images of at least 19 x 19 pixels, these are {image_size} x {image_size}")
        one, two, three, four = width
        net = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, one, 5, stride=2, bias=False),
                norm1=nn.BatchNorm2d(one),
                relu1=nn.ReLU(inplace=True),
                conv2=nn.Conv2d(one, two, 3, padding=1, bias=False),
                pool2=nn.MaxPool2d(2),
                norm2=nn.BatchNorm2d(two),
                relu2=nn.ReLU(inplace=True),
                conv3=nn.Conv2d(two, three, 3, padding=1, bias=False),
                pool3=nn.MaxPool2d(2),
                norm3=nn.BatchNorm2d(three),
                relu3=nn.ReLU(inplace=True),
                conv4=nn.Conv2d(three, four, 3, padding=1, bias=False),
                norm4=nn.BatchNorm2d(four),
                relu4=nn.ReLU(inplace=True),
                pool4=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                logits=nn.Linear(four * (side // 2) ** 2, num_classes),
            )
        )
        super().__init__(net, channels=channels, image_size=image_size, num_classes=num_classes, **classifier_options)
