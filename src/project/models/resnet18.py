"""Adapt torchvision's ResNet18 to images of any size, channels and classes."""

from typing import Any, ClassVar

from torch import nn

from lockstep import copy_weights
from lockstep.vision.models.classifier import ImageClassifier
from lockstep.vision.models.published import downloaded

STEMS, NORMS = ("auto", "small", "imagenet"), ("batch", "group")
SMALL_STEM: dict[str, Any] = {"kernel_size": 3, "padding": 1}
IMAGENET_STEM: dict[str, Any] = {"kernel_size": 7, "stride": 2, "padding": 3}


class ResNet18(ImageClassifier):
    """A ResNet18 (He et al., Deep Residual Learning, 2016).

    Args:
        stem: 'imagenet' (7 x 7, stride 2, max-pool), 'small' (3 x 3, stride 1), or 'auto', which is small for images up
            to 64 pixels.
        norm: 'batch' or 'group'. Group norm normalises each sample alone, so the number of pieces has no effect on it.
        pretrained: start from torchvision's ImageNet weights. Layers that do not fit (small stem, other classes) start
            with new weights.
        classifier_options: options of ImageClassifier.

    Raises:
        ValueError: An option is out of range, the images are too small, or pretrained weights do not fit.
    """

    without_pretrained: ClassVar = {"pretrained": False}  # a run that loads a checkpoint gets this value

    def __init__(
        self,
        *,
        channels: int,
        image_size: int,
        num_classes: int,
        stem: str = "auto",
        norm: str = "batch",
        pretrained: bool = False,
        **classifier_options: Any,
    ) -> None:
        for name, value, known in (("stem", stem, STEMS), ("norm", norm, NORMS)):
            if value not in known:
                raise ValueError(f"{name}={value}: must be one of {', '.join(known)}")
        if not isinstance(pretrained, bool):
            raise ValueError(f"pretrained={pretrained}: must be true or false")
        small = stem == "small" or (stem == "auto" and image_size <= 64)
        least = 9 if small else 33
        if norm == "batch" and image_size < least:
            # The last feature map is 1 x 1. There BatchNorm can't train on one sample, and a short step may have one.
            raise ValueError(
                f"resnet18 with norm=batch and the {'small' if small else 'imagenet'} stem needs images of at least "
                f"{least} x {least} pixels, these are {image_size} x {image_size}: "
                f"use norm=group{'' if small else ' or stem=small'}"
            )
        if pretrained and (channels != 3 or norm != "batch"):
            raise ValueError(
                f"pretrained=true with channels={channels} and norm={norm}: must be channels=3 and norm=batch"
            )
        net = _resnet18(channels, num_classes, small, norm)
        if pretrained:
            from torchvision.models import ResNet18_Weights

            copy_weights(net, downloaded(ResNet18_Weights.DEFAULT))
        super().__init__(net, channels=channels, image_size=image_size, num_classes=num_classes, **classifier_options)

    def stages(self) -> list[nn.Module]:
        """Return the net's layers in order, for strategy=pipeline. torchvision's forward() flattens between them."""
        net: Any = self.net
        blocks = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
        return [net.conv1, net.bn1, net.relu, net.maxpool, *blocks, net.avgpool, nn.Flatten(), net.fc]


def _group_norm(channels: int) -> nn.Module:
    """Return a group norm (Wu and He, Group Normalization, 2018).

    It is no lambda, since torchvision's net stores it and must be picklable.
    """
    return nn.GroupNorm(min(32, channels), channels)


def _resnet18(channels: int, num_classes: int, small: bool, norm: str) -> nn.Module:
    from torchvision.models import resnet18  # takes two seconds, which other models need not wait

    net = resnet18(num_classes=num_classes, norm_layer=_group_norm if norm == "group" else None)
    if small or channels != 3:
        net.conv1 = nn.Conv2d(channels, 64, **(SMALL_STEM if small else IMAGENET_STEM), bias=False)
        # torchvision initialises the other convolutions like this
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    if small:
        net.maxpool = nn.Identity()
    return net
