"""Initial weights of a new run, from any file whose tensors fit."""

import fnmatch
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from lockstep.checkpoint import paths
from lockstep.checkpoint.io import CheckpointError, checked_source, fault, load_plain
from lockstep.config.check import Config
from lockstep.errors import UserError
from lockstep.launch import process_group
from lockstep.text import join_names

Tensors: TypeAlias = dict[str, Tensor]
MAX_NAMES = 6  # how many tensors a message names


def read_weights(key: str, path: str | Path, broadcast: bool = False) -> Tensors:
    """Read the tensors of a file, by name.

    Args:
        key: the config key of the path, for messages.
        path: a run folder (its best checkpoint, else its last); a checkpoint of Lockstep, Lightning or torchvision, or
            a state_dict, that torch.save wrote; or a .safetensors file. All are read with `weights_only=True`.
        broadcast: whether rank zero reads the file and broadcasts its bytes. Then all ranks must call this.

    Raises:
        CheckpointError: the file is missing, damaged, holds no named tensors, or holds code.
    """
    path = _file(path)
    if broadcast:
        path = process_group.broadcast_from_rank_zero(path)
    try:
        source = checked_source(path, broadcast, _fault)
        content = _load_safetensors(source, path) if path.suffix == ".safetensors" else load_plain(source, path)
    except CheckpointError as error:
        raise CheckpointError(f"{key}={error}") from error
    for name in ("state_dict", "model"):  # the keys of Lightning and timm, and of torchvision
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    named = content.items() if isinstance(content, Mapping) else ()
    tensors = {str(name): value for name, value in named if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{key}={path} holds no tensors by name: give a run folder, a checkpoint or a state_dict")
    return tensors


def refuse_broken_weights(key: str, path: str | Path) -> None:
    """Refuse a file that is missing, cut off or holds code. This is fast, because it reads no weights.

    Raises:
        CheckpointError: it names `key` and the file.
    """
    if wrong := _fault(path := _file(path), checksums=False):
        raise CheckpointError(f"{key}={path}: {wrong}")


def _file(path: str | Path) -> Path:
    """Return the file that a path means: for a run folder, the path of its checkpoint."""
    path = Path(path).expanduser()
    return paths.best_in(path) or paths.best(path) if path.is_dir() else path


def copy_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Copy into a module the tensors that fit it by name and shape. Return the names of its other tensors.

    The tensors of a net also fit a module that contains the net: `conv1.weight` is copied to `net.conv1.weight`.

    Args:
        module: it is changed.
        tensors: the tensors of a file, by name, of any shapes.

    Returns:
        The names of the module's tensors that are not in `tensors` or have another shape there.
    """
    shapes = {name: value.shape for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    prefixes = ["", *(f"{name}." for name, _ in module.named_children())]
    named = [{prefix + name: value for name, value in tensors.items()} for prefix in prefixes]
    fitting = [{name: value for name, value in each.items() if shapes.get(name) == value.shape} for each in named]
    best = max(fitting, key=len)
    whole = module.state_dict()
    whole.update(best)  # `whole` also has entries that are no tensors (`get_extra_state`)
    module.load_state_dict(whole)
    return [name for name in shapes if name not in best]


class LoadedWeights(NamedTuple):
    """The result of loading a file into a module.

    Attributes:
        message: a line for the log.
        not_loaded: names of the module's tensors that the file does not have.
    """

    message: str
    not_loaded: list[str]


def load_weights(
    key: str, module: nn.Module, path: str, broadcast: bool = False, adapt: Callable[[Tensors], Tensors] | None = None
) -> LoadedWeights:
    """Copy the weights of a file into a module.

    Args:
        key: the config key of the path, for messages.
        module: it is changed.
        path: as in `read_weights`.
        broadcast: as in `read_weights`.
        adapt: a function that changes the tensors before they are copied.

    Raises:
        UserError: the file can't be read, or none of its tensors of two or more dimensions fits.
    """
    tensors = read_weights(key, path, broadcast)
    not_loaded = copy_weights(module, adapt(tensors) if adapt else tensors)
    module_tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    if not any(value.ndim > 1 for name, value in module_tensors.items() if name not in not_loaded):
        model = f"the model has {join_names(not_loaded)}"
        raise UserError(f"{key}={path}: none of its weights fits this model by name and shape: {model}")
    return LoadedWeights(weights_message(key, len(module_tensors), not_loaded), not_loaded)


def load_initial_weights(config: Config, module: nn.Module) -> LoadedWeights:
    """Load rank zero's file `init_from` into the module of a new run. All workers must call it.

    Returns:
        The result; empty for a run without `init_from`, and for one that continues from a checkpoint.

    Raises:
        UserError: as in `load_weights` and `refuse_frozen_unloaded`.
    """
    if config.resume or not config.init_from:
        return LoadedWeights("", [])
    loaded = load_weights("init_from", module, config.init_from, broadcast=True)
    freeze = config.model.get("freeze") or ("*" if config.model.get("train_only") else ())
    setting = f"init_from={config.init_from}"
    refuse_frozen_unloaded(setting, module, loaded.not_loaded, freeze, _unfrozen_later(config))
    return loaded


def _unfrozen_later(config: Config) -> list[str]:
    """Return the patterns of the parameter names that `callbacks.unfreeze` trains from some epoch on."""
    options = config.callbacks.get("unfreeze")
    if not options:
        return []
    epochs = options.get("epoch")
    return [str(pattern) for pattern in epochs] if isinstance(epochs, dict) else ["*"]


def refuse_frozen_unloaded(
    key: str, module: nn.Module, not_loaded: Iterable[str], freeze: Sequence[str], unfrozen: Iterable[str] = ()
) -> None:
    """Refuse frozen parameters that a file has not set: they would keep their random values.

    Args:
        key: the setting that names the file, `init_from=...`.
        module: its frozen parameters have `requires_grad=False`.
        not_loaded: names of the tensors that the file has not set.
        freeze: patterns of the names of frozen parameters.
        unfrozen: patterns of the names that a callback unfreezes later.

    Raises:
        UserError: there are such parameters.
    """
    new = set(not_loaded)
    unfilled = [name for name, each in module.named_parameters() if name in new and not each.requires_grad]
    unfilled = [name for name in unfilled if _matches(name, freeze) and not _matches(name, unfrozen)]
    if unfilled:
        raise UserError(
            f"{key}: has no {join_names(unfilled, MAX_NAMES)}, which are frozen and would stay random: train them too, "
            "or give callbacks=unfreeze"
        )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, str(pattern)) for pattern in patterns)


def weights_message(key: str, total: int, left: Sequence[str]) -> str:
    """Return a line such as `init_from: 60 of 62 tensors; not net.fc.weight, net.fc.bias`.

    Args:
        key: the config key of the file.
        total: how many tensors the module has.
        left: the names of the tensors that the file has not set.
    """
    return f"{key}: {total - len(left)} of {total} tensors" + f"; not {join_names(left, MAX_NAMES)}" * bool(left)


def _fault(path: Path, checksums: bool = True) -> str:
    """Return what is wrong with a file. Accept files that are not zip files: torch's older format, for example."""
    return "" if path.is_file() and not zipfile.is_zipfile(path) else fault(path, checksums)


def _load_safetensors(source: Any, path: Path) -> Any:
    """Return the tensors of a .safetensors file, by name."""
    try:
        from safetensors import SafetensorError
        from safetensors import torch as safetensors
    except ImportError:
        raise CheckpointError(f"{path}: the package safetensors is not installed: pip install safetensors") from None
    try:
        return safetensors.load(source.read_bytes() if isinstance(source, Path) else source.read())
    except SafetensorError as error:
        raise CheckpointError(f"{path}: the file is damaged ({error})") from error
