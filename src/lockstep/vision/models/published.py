"""Make any classifier of torchvision or timm by its name, for the images' size, channels and classes."""

import difflib
import inspect
import logging
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.checkpoint.weights import copy_weights, load_weights, weights_message
from lockstep.text import plural
from lockstep.vision.models.classifier import ImageClassifier

LOG = logging.getLogger("lockstep")
RGB = 3  # channels of the images of published weights


class Published(ImageClassifier):
    """A classifier whose net comes from a library.

    Args:
        arch: the net's name in the library.
        smallest_piece: samples of the smallest piece of a step. A net whose BatchNorm needs more samples is refused.
        pretrained: whether the net starts from the library's ImageNet weights. Layers that do not fit, such as the last
            one for other classes, start with new weights.
        weights: a file with other weights to start from; see `lockstep.load_weights`.
        options: further arguments of the architecture, `{dropout: 0.2}`.
        classifier_options: options of ImageClassifier.

    Raises:
        ValueError: There is no such net, it does not fit the images, or its weights can't be loaded.
        TypeError: `options` has a key that the net does not take.
    """

    without_pretrained: ClassVar = {"pretrained": False, "weights": None}

    def __init__(
        self,
        *,
        arch: str,
        channels: int,
        image_size: int,
        num_classes: int,
        smallest_piece: int = 2,
        pretrained: bool = False,
        weights: str | None = None,
        options: Mapping[str, Any] | None = None,
        **classifier_options: Any,
    ) -> None:
        if not isinstance(pretrained, bool) or (pretrained and weights):
            raise ValueError(f"pretrained={pretrained}: must be true or false, and false with weights=<file>")
        images = f"{channels} x {image_size} x {image_size} images"
        try:
            net = self.make(arch, channels, image_size, num_classes, pretrained, dict(options or {}))
            out = _training_output(net, torch.zeros(min(2, smallest_piece), channels, image_size, image_size))
        except (AssertionError, RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
            message = str(error).partition("\n")[0]
            if message.startswith(("arch=", "pretrained=")):
                raise
            if "more than 1 value per channel" in message:
                message = (
                    "its BatchNorm gets one value per channel in a piece of one sample: use larger images, another "
                    "batch_size or fewer pieces"
                )
            raise ValueError(f"arch={arch}: does not take {images}: {message}") from error
        if not isinstance(out, Tensor) or out.shape[1:] != (num_classes,):
            shown = list(out.shape[1:]) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"arch={arch}: returns {shown} for each image in training: it must return logits [n, {num_classes}]"
            )
        if weights:
            LOG.info(load_weights("model.weights", net, weights, adapt=partial(_adapt_weights, net, channels)).message)
        super().__init__(net, channels=channels, image_size=image_size, num_classes=num_classes, **classifier_options)

    def make(
        self, arch: str, channels: int, image_size: int, num_classes: int, pretrained: bool, options: dict[str, Any]
    ) -> nn.Module:
        """Make the net with its library.

        Raises:
            ValueError: The library has no net `arch`, or its pretrained weights can't be loaded.
            TypeError: `options` has a key that the net does not take.
        """
        raise NotImplementedError


class Torchvision(Published):
    """A classifier of torchvision: https://docs.pytorch.org/vision/stable/models.html#classification."""

    def make(
        self, arch: str, channels: int, image_size: int, num_classes: int, pretrained: bool, options: dict[str, Any]
    ) -> nn.Module:
        return torchvision_net(arch, channels, image_size, num_classes, pretrained, options)


def torchvision_net(
    arch: str,
    channels: int,
    image_size: int,
    num_classes: int,
    pretrained: bool = False,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Make a classifier of torchvision: a net with an output of `num_classes` numbers for each image.

    Args:
        arch: the net's name in torchvision.
        channels: channels of the images.
        image_size: pixels of the images.
        num_classes: numbers of the output.
        pretrained: whether all layers that fit start from ImageNet weights.
        options: further arguments of the architecture.

    Raises:
        ValueError: There is no such net, or its pretrained weights can't be loaded.
        TypeError: The net takes no such option.
    """
    from torchvision import models

    _check_arch(arch, models.list_models(module=models), "torchvision")
    options = dict(options or {})
    defaults: dict[str, Any] = {}
    if arch.startswith("vit_"):
        defaults = {"image_size": image_size}
    elif arch.startswith("maxvit_"):
        defaults = {"input_size": (image_size, image_size)}
    elif arch in ("googlenet", "inception_v3"):  # no auxiliary head: its loss is not part of the training step
        defaults = {"aux_logits": False, "init_weights": True}
    net = models.get_model(arch, weights=None, num_classes=num_classes, **{**defaults, **options})
    parameters = inspect.signature(type(net)).parameters
    unknown = sorted(options.keys() - parameters.keys())
    if unknown and "kwargs" in parameters:  # a net with **kwargs accepts a misspelled option without an error
        raise TypeError(f"{arch} takes no option {', '.join(unknown)}: it takes {', '.join(parameters)}")
    if pretrained:
        not_copied = copy_weights(net, downloaded(models.get_model_weights(arch).DEFAULT))
        LOG.info(weights_message("model.pretrained", len(net.state_dict()), not_copied))
    _, first = _first_convolution(net)
    first.in_channels = channels
    first.weight = nn.Parameter(_adapt_convolution(first.weight.detach(), channels))
    return net


def segmentation_net(arch: str, channels: int, num_classes: int, pretrained: bool = False) -> nn.Module:
    """Make a segmentation net of torchvision. It returns a dict, in which `out` has logits [n, num_classes, H, W].

    Args:
        arch: the net's name in torchvision.
        channels: channels of the images, which must be 3.
        num_classes: number of classes.
        pretrained: whether all layers but the last ones start from ImageNet weights.

    Raises:
        ValueError: There is no such net, it does not take the images, or its pretrained weights can't be loaded.
    """
    from torchvision import models

    _check_arch(arch, models.list_models(module=models.segmentation), "torchvision")
    if channels != 3:
        raise ValueError(f"arch={arch}: takes images of 3 channels, and these have {channels}: use data.channels=3")
    net = models.get_model(arch, weights=None, weights_backbone=None, num_classes=num_classes)
    if pretrained:
        backbone = inspect.signature(models.get_model_builder(arch)).parameters["weights_backbone"].default
        copy_weights(net.backbone, downloaded(backbone))
    return net


class Timm(Published):
    """A classifier of timm: https://huggingface.co/timm. A tag in the name chooses weights: resnet18.a1_in1k."""

    def make(
        self, arch: str, channels: int, image_size: int, num_classes: int, pretrained: bool, options: dict[str, Any]
    ) -> nn.Module:
        try:
            import timm
        except ImportError:
            raise ValueError(f"arch={arch}: timm is not installed: pip install timm") from None
        name, _, tag = arch.partition(".")
        _check_arch(name, timm.list_models(), "timm")
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{name}.*")]
        if tag and tag not in tags:
            raise ValueError(f"arch={arch}: {name} has no weights {tag}: known are {', '.join(tags) or 'none'}")
        pretrained_cfg = timm.get_pretrained_cfg(arch)
        if pretrained_cfg is not None and pretrained_cfg.fixed_input_size:
            options = {"img_size": image_size, **options}
        # A key given both here and in `options` is a TypeError. So the config of a stranger's checkpoint can't name a
        # `checkpoint_path`, a file that timm would load.
        required: dict[str, Any] = {"in_chans": channels, "num_classes": num_classes, "checkpoint_path": ""}
        if not pretrained:
            return timm.create_model(arch, pretrained=False, **required, **options)
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would log each of ten attempts
        try:
            return timm.create_model(arch, pretrained=True, **required, **options)
        except Exception as error:  # no network, no such weights, a damaged file: one message for all
            reason = str(error).partition("\n")[0]
            raise ValueError(f"pretrained=true: no usable weights ({reason}): use model.weights=<file>") from error


def downloaded(weights: Any) -> dict[str, Tensor]:
    """Return weights that torchvision publishes, from its cache or the network.

    Args:
        weights: a member of one of torchvision's weights enums.

    Raises:
        ValueError: The weights can't be loaded.
    """
    name = weights.url.rpartition("/")[2]
    try:
        state: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except Exception as error:  # no network, no rights, a full disk, a damaged file: one message for all
        reason = str(error).partition("\n")[0]
        place = f"{torch.hub.get_dir()}/checkpoints/{name}"
        raise ValueError(f"pretrained=true: no usable weights ({reason}): put torchvision's file at {place}") from error
    return state


def _check_arch(arch: str, known: Iterable[str], library: str) -> None:
    """Check that a library has a net with this name.

    Raises:
        ValueError: The library has no such net. The message has the nearest names.
    """
    names = list(known)
    if arch not in names:
        near = difflib.get_close_matches(str(arch), names, n=3)
        hint = (
            f"did you mean {', '.join(near)}?"
            if near
            else f"it has {plural(len(names), 'net')}, {names[0]} for example"
        )
        raise ValueError(f"arch={arch}: {library} has no such net: {hint}")


def _first_convolution(net: nn.Module) -> tuple[str, Any]:
    """Return the name of the first convolution's weight, and the layer."""
    return next((f"{name}.weight", layer) for name, layer in net.named_modules() if isinstance(layer, nn.Conv2d))


def _adapt_weights(net: nn.Module, channels: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights `state`, with the first convolution's weight adapted from RGB to `channels`."""
    name, layer = _first_convolution(net)
    if name not in state or state[name].ndim != layer.weight.ndim:
        return state
    return {**state, name: _adapt_convolution(state[name], channels)}


def _adapt_convolution(weight: Tensor, channels: int) -> Tensor:
    """Adapt a first convolution's weight [out, 3, k, k] to other channels, as timm does.

    For one channel the three channels of the weight are added. For another number they are repeated and scaled, so that
    outputs keep their size.
    """
    if weight.shape[1] != RGB or channels == RGB:
        return weight
    if channels == 1:
        return weight.sum(1, keepdim=True)
    return weight.repeat(1, math.ceil(channels / RGB), 1, 1)[:, :channels] * (RGB / channels)


def _training_output(net: nn.Module, images: Tensor) -> Any:
    """Return a net's output for images in training mode. Its buffers and the random state do not change."""
    before = [buffer.clone() for buffer in net.buffers()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        out = net.train()(images)
        for buffer, value in zip(net.buffers(), before, strict=True):
            buffer.copy_(value)
    return out
