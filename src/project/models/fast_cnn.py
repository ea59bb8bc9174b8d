"""A convolution net that learns MNIST in one pass over the data, in seconds on two CPU cores."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn

from project.models.classifier import ImageClassifier


class FastCNN(ImageClassifier):
    """Four convolutions with BatchNorm, ReLU and, but for the first, a max-pool; one linear layer.

    width has the channels of each convolution. The first is 5 x 5 with stride 2, so that nothing is computed at full
    size, and has no padding: digits leave their edges empty, and 12 x 12 instead of 14 x 14 values per channel are a
    quarter less to compute from there on. The others are 3 x 3. Pooling comes before BatchNorm and ReLU, which then
    have a quarter of the values to pass. Not so at the end: there, digits have one value per channel left, of which a
    tail of one sample could make no statistic, and over several passes the net learns better without
    (docs/results/recipes.md).
    """

    def __init__(
        self,
        *,
        channels: int,
        image_size: int,
        num_classes: int,
        width: Sequence[int] = (16, 32, 64, 128),
        **task: Any,
    ) -> None:
        if not isinstance(width, Sequence) or len(width) != 4 or min(width) < 1:
            raise ValueError(f"width={width}: must be four whole numbers of at least 1, each convolution's channels")
        side = (image_size - 3) // 2 // 2 // 2  # of what the last convolution sees
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
        super().__init__(net, channels=channels, image_size=image_size, num_classes=num_classes, **task)
