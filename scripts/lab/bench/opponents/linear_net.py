"""A linear network for train.py: `model=small_cnn model._target_=linear_net.LinearNet ~model.dropout`."""

from typing import Any

from torch import nn

from lockstep.vision.models import ImageClassifier


class LinearNet(ImageClassifier):
    """Maps the pixels to logits by one matrix, so that nearly all time of a step is that of the program around it."""

    def __init__(self, *, channels: int, image_size: int, num_classes: int, **options: Any) -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size * image_size, num_classes))
        super().__init__(net, channels=channels, image_size=image_size, num_classes=num_classes, **options)
