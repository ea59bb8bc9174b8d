"""Define a small convolutional net without BatchNorm, for images of 10 x 10 pixels or more."""

from collections import OrderedDict
from typing import Any

from torch import nn

from lockstep.vision.models.classifier import ImageClassifier


class SmallCNN(ImageClassifier):
    """Two 5 x 5 convolutions of 20 channels, max-pool, 50 hidden units.

    Args:
        dropout: probability that a hidden unit is dropped in training.
        classifier_options: options of ImageClassifier.

    Raises:
        ValueError: An option is out of range, or the images are too small.
    """

    def __init__(
        self, *, channels: int, image_size: int, num_classes: int, dropout: float = 0.0, **classifier_options: Any
    ) -> None:
        side = (image_size - 8) // 2  # each convolution removes 4 pixels, and the pool halves the rest
        if side < 1:
            raise ValueError(f"small_cnn needs images of at least 10 x 10 pixels, not {image_size} x {image_size}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout}: must be at least 0 and below 1")
        net = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 20, 5),
                relu1=nn.ReLU(inplace=True),
                conv2=nn.Conv2d(20, 20, 5),
                relu2=nn.ReLU(inplace=True),
                pool=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                hidden=nn.Linear(20 * side * side, 50),
                relu3=nn.ReLU(inplace=True),
                # Dropout(0) would draw random numbers too.
                dropout=nn.Dropout(dropout) if dropout else nn.Identity(),
                logits=nn.Linear(50, num_classes),
            )
        )
        super().__init__(net, channels=channels, image_size=image_size, num_classes=num_classes, **classifier_options)
