"""A convolution net that learns MNIST in one pass over the data, in seconds on two CPU cores."""

from collections import OrderedDict
from typing import Any

from torch import nn

from lockstep.layout import Refusal
from lockstep.models.classifier import ImageClassifier


class FastCNN(ImageClassifier):
    """Three convolutions with BatchNorm, one linear layer; 29,194 parameters for MNIST.

    The first convolution is 5 x 5 with stride 2 and has width[0] channels; the others are 3 x 3, each followed by a
    2 x 2 max-pool. Pooling comes before BatchNorm and ReLU, which then have a quarter of the values to pass.

    Refusal: width is not three whole numbers of at least 1; an image of less than 8 x 8.
    """

    def __init__(
        self, *, channels: int, image_size: int, num_classes: int, width: tuple[int, int, int] = (16, 32, 64), **task: Any
    ) -> None:
        if len(width) != 3 or not all(isinstance(n, int) and n >= 1 for n in width):
            raise Refusal(f"width={list(width)}: three whole numbers of at least 1, the channels of each convolution")
        if image_size < 8:
            raise Refusal(f"fast_cnn needs images of at least 8 x 8 pixels, these are {image_size} x {image_size}")
        first, second, third = width
        side = (image_size + 1) // 2 // 2 // 2
        net = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, first, 5, stride=2, padding=2, bias=False),
                norm1=nn.BatchNorm2d(first),
                relu1=nn.ReLU(inplace=True),
                conv2=nn.Conv2d(first, second, 3, padding=1, bias=False),
                pool2=nn.MaxPool2d(2),
                norm2=nn.BatchNorm2d(second),
                relu2=nn.ReLU(inplace=True),
                conv3=nn.Conv2d(second, third, 3, padding=1, bias=False),
                pool3=nn.MaxPool2d(2),
                norm3=nn.BatchNorm2d(third),
                relu3=nn.ReLU(inplace=True),
                flatten=nn.Flatten(),
                logits=nn.Linear(third * side * side, num_classes),
            )
        )
        super().__init__(net, channels=channels, image_size=image_size, num_classes=num_classes, **task)
