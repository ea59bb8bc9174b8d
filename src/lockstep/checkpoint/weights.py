"""Weights from elsewhere, as far as they fit: what a new run begins with."""

import fnmatch
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from lockstep.checkpoint import paths
from lockstep.checkpoint.io import CheckpointError, fault, load_plain, whole_file
from lockstep.errors import UserError
from lockstep.launch import process_group
from lockstep.text import join_names

Tensors: TypeAlias = dict[str, Tensor]
NAMED = 6  # tensors that a message names


def read_weights(key: str, path: str | Path, together: bool = False) -> Tensors:
    """Tensors by name, of a run folder (its best checkpoint, else its last), a checkpoint of Lockstep's, Lightning's or
    torchvision's, or a bare state_dict: what torch.save wrote, read with `weights_only=True`, or .safetensors.

    Args:
        key: where the path was given, for messages.
        together: all ranks call it, and get what rank zero reads.

    Raises:
        CheckpointError: missing, damaged, without weights, or holding code.
    """
    path = _file(path)
    if together:
        path = process_group.broadcast_from_rank_zero(path)
    try:
        source = whole_file(path, together, _fault)
        content = _safe(source, path) if path.suffix == ".safetensors" else load_plain(source, path)
    except CheckpointError as error:
        raise CheckpointError(f"{key}={error}") from error
    for name in ("state_dict", "model"):  # Lightning's and timm's; torchvision's
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    named = content.items() if isinstance(content, Mapping) else ()
    tensors = {str(name): value for name, value in named if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{key}={path}: it holds no weights by name")
    return tensors


def refuse_broken_weights(key: str, path: str | Path) -> None:
    """Refuse in no time what `read_weights` would refuse of a file that is missing, cut off or holds code.

    Raises:
        CheckpointError: naming `key`.
    """
    if wrong := _fault(path := _file(path), checksums=False):
        raise CheckpointError(f"{key}={path}: {wrong}")


def _file(path: str | Path) -> Path:
    path = Path(path).expanduser()
    return paths.best_in(path) or paths.best(path) if path.is_dir() else path


def copy_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Gives a module the tensors that it has too, by name and shape; returns the names of its own that got none. Those
    of a bare net fit the module that holds it: `conv1.weight` is its `net.conv1.weight`."""
    shapes = {name: value.shape for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    holders = ["", *(f"{name}." for name, _ in module.named_children())]
    named = [{holder + name: value for name, value in tensors.items()} for holder in holders]
    fitting = [{name: value for name, value in each.items() if shapes.get(name) == value.shape} for each in named]
    best = max(fitting, key=len)
    whole = module.state_dict()
    whole.update(best)  # with what layers keep beside their tensors
    module.load_state_dict(whole)
    return [name for name in shapes if name not in best]


class LoadedWeights(NamedTuple):
    """What a module has got from a file.

    Attributes:
        message: what a user should know.
        fresh: names of the module's tensors that the file does not have.
    """

    message: str
    fresh: list[str]


def load_weights(
    key: str, module: nn.Module, path: str, together: bool = False, adapt: Callable[[Tensors], Tensors] | None = None
) -> LoadedWeights:
    """Gives a module the weights in the file that `key` names.

    Args:
        together: as of `read_weights`.
        adapt: what is done to the tensors before.

    Raises:
        UserError: they can't be read, or nothing fits.
    """
    tensors = read_weights(key, path, together)
    left = copy_weights(module, adapt(tensors) if adapt else tensors)
    module_tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    if not any(value.ndim > 1 for name, value in module_tensors.items() if name not in left):
        raise UserError(f"{key}={path}: none of its weights fits this model's, {join_names(left)}, by name and shape")
    return LoadedWeights(weights_message(key, len(module_tensors), left), left)


def refuse_frozen(
    key: str, module: nn.Module, fresh: Iterable[str], freeze: Sequence[str], unfrozen: Iterable[str] = ()
) -> None:
    """Refuses parameters that a file has not filled and that `model.freeze` holds: they would stay random for ever.

    Args:
        key: what named the file, `init_from=...`.
        fresh: names of the tensors that the file has not filled.
        freeze, unfrozen: patterns of the names of parameters that are frozen, and that a callback unfreezes later.

    Raises:
        UserError: there are such.
    """
    new = set(fresh)
    unfilled = [name for name, each in module.named_parameters() if name in new and not each.requires_grad]
    unfilled = [name for name in unfilled if _matches(name, freeze) and not _matches(name, unfrozen)]
    if unfilled:
        right = "leave them out of model.freeze, or give callbacks=unfreeze"
        raise UserError(
            f"{key}: has no {join_names(unfilled, NAMED)}, and model.freeze would keep them random: {right}"
        )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, str(pattern)) for pattern in patterns)


def weights_message(key: str, total: int, left: Sequence[str]) -> str:
    """`init_from: 60 of 62 tensors; not net.fc.weight, net.fc.bias`."""
    return f"{key}: {total - len(left)} of {total} tensors" + f"; not {join_names(left, NAMED)}" * bool(left)


def _fault(path: Path, checksums: bool = True) -> str:
    """Return what is wrong with a file, without loading it; one that is no zip file may be torch's older format."""
    return "" if path.is_file() and not zipfile.is_zipfile(path) else fault(path, checksums)


def _safe(source: Any, path: Path) -> Any:
    try:
        from safetensors import SafetensorError
        from safetensors import torch as safetensors
    except ImportError:
        raise CheckpointError(f"{path}: reading it needs `pip install safetensors`") from None
    try:
        return safetensors.load(source.read_bytes() if isinstance(source, Path) else source.read())
    except SafetensorError as error:
        raise CheckpointError(f"{path}: the file is damaged ({error})") from error
