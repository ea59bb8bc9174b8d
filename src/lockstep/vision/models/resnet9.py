"""Define a small residual net that learns photographs of 32 x 32 pixels in minutes on two CPU cores."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lockstep.vision.models.classifier import ImageClassifier


class ResNet9(ImageClassifier):
    """A net of eight convolutions, each with BatchNorm and ReLU, and one linear layer.

    After David Page, How to train your ResNet, 2018. Four convolutions form the trunk, the last three of them with a
    max-pool. The second and the fourth are followed by a residual block of two convolutions. The linear layer gets the
    mean over all positions. Pooling comes before BatchNorm and ReLU, which then process a quarter of the values.

    Args:
        width: channels of the four convolutions of the trunk.
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
        width: Sequence[int] = (24, 48, 96, 192),
        **classifier_options: Any,
    ) -> None:
        if not isinstance(width, Sequence) or len(width) != 4 or min(width) < 1:
            raise ValueError(f"width={width}: must be four whole numbers of at least 1, channels of convolutions")
        if image_size < 8:
            raise ValueError(f"resnet9 needs images of at least 8 x 8 pixels, these are {image_size} x {image_size}")
        one, two, three, four = width
        net = nn.Sequential(
            OrderedDict(
                stem=_convolution(channels, one),
                layer1=_convolution(one, two, pool=True),
                block1=Residual(two),
                layer2=_convolution(two, three, pool=True),
                layer3=_convolution(three, four, pool=True),
                block3=Residual(four),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                logits=nn.Linear(four, num_classes),
            )
        )
        super().__init__(net, channels=channels, image_size=image_size, num_classes=num_classes, **classifier_options)


class Residual(nn.Module):
    """Two convolutions whose output is added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(_convolution(channels, channels), _convolution(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolutions(x)


def _convolution(channels: int, width: int, pool: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
    if pool:
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
