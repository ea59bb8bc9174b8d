"""Initial weights of a new run, from any file whose tensors fit."""

import fnmatch
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checkpoint import foreign_files, match, paths
from lockstep.checkpoint.io import CheckpointError, checked_source, damage, fault, fill, find_parts, load_plain
from lockstep.checkpoint.match import Tensors
from lockstep.errors import UserError
from lockstep.launch import process_group
from lockstep.text import join_names, short_path

MAX_NAMES = 6  # how many tensors a message names
OTHER_SETS = 3  # how many other sets of a file a message names


class WeightsFile(NamedTuple):
    """What a file of weights holds.

    Attributes:
        path: the file.
        set_name: the set that the user has named, `model_ema` of `init_from=<file>:model_ema`; empty: any.
        sets: its sets of named tensors, by the keys that lead to them, see `match.sets_of`.
        passed_over: names of the classes of other programs whose objects are not read.
    """

    path: Path
    set_name: str
    sets: dict[str, Tensors]
    passed_over: list[str]


def read_weights(key: str, path: str | Path, broadcast: bool = False) -> WeightsFile:
    """Read the tensors of a file, by name. Nothing in it is executed: see `foreign_files`.

    Args:
        key: the config key of the path, for messages.
        path: a run folder (its best checkpoint, else its last); a checkpoint of any program that torch.save wrote; or a
            file of safetensors. `<path>:<set>` names one of several sets of weights in it.
        broadcast: whether rank zero reads the file and broadcasts its bytes. Then all ranks must call this.

    Raises:
        CheckpointError: the file is missing, damaged, holds no named tensors, or holds code.
    """
    source_file = _read_from(path)
    path, set_name, safetensors = process_group.broadcast_from_rank_zero(source_file) if broadcast else source_file
    foreign: list[str] = []
    try:
        source = checked_source(path, broadcast, _fault)
        if safetensors:
            content = _load_safetensors(source, path)
        else:
            foreign = foreign_files.foreign_names(source)
            content = load_plain(source, path, foreign)
            find_parts(content, path, broadcast)
            fill(content, path, broadcast)
    except CheckpointError as error:
        raise CheckpointError(f"{key}={error}") from error
    if not (sets := match.sets_of(content)):
        raise CheckpointError(f"{key}={path} holds no tensors by name{_objects_instead(content)}")
    return WeightsFile(path, set_name, sets, foreign)


def _objects_instead(content: Any) -> str:
    """Return the end of a message about a file without tensors: what it holds, and what would be right."""
    values = content.values() if type(content) is dict else [content]
    kinds = [each.name for each in values if isinstance(each, foreign_files.StandIn)]
    if not kinds:
        return ": give a run folder, a checkpoint or a state_dict"
    return f", but a whole {join_names(kinds)}, which only its code can read: torch.save its state_dict() instead"


def refuse_broken_weights(key: str, path: str | Path) -> None:
    """Refuse a file that is missing, cut off or holds code. This is fast, because it reads no weights.

    Raises:
        CheckpointError: it names `key` and the file.
    """
    path, _, _ = _read_from(path)
    if wrong := _fault(path, checksums=False):
        raise CheckpointError(f"{key}={path}: {wrong}")


def _read_from(path: str | Path) -> tuple[Path, str, bool]:
    """Return the file that a path means, the name of a set after a colon, and whether the file is of safetensors.

    The file of a run folder is its checkpoint.
    """
    set_name, whole = "", Path(path).expanduser()
    before, colon, after = str(whole).rpartition(":")
    if colon and "/" not in after and not whole.exists():
        whole, set_name = Path(before), after
    file = paths.best_in(whole) or paths.best(whole) if whole.is_dir() else whole
    return file, set_name, file.is_file() and foreign_files.is_safetensors(file)


def copy_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Copy into a module the tensors that fit it by name and shape. Return the names of its other tensors.

    The tensors of a net also fit a module that contains the net: `conv1.weight` is copied to `net.conv1.weight`. Other
    prefixes are handled as in `match.matches`.

    Args:
        module: it is changed.
        tensors: the tensors of a file, by name, of any shapes.

    Returns:
        The names of the module's tensors that are not in `tensors` or have another shape there.
    """
    candidates = match.matches(_shapes(module.state_dict()), {"": dict(tensors)})
    return _copy(module, candidates[0].tensors if candidates else tensors)


def _shapes(tensors: Mapping[str, Any]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tensors.items() if isinstance(value, Tensor)}


def _copy(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Copy tensors into a module by its own names. Return the names of its other tensors."""
    whole = module.state_dict()  # it also has entries that are no tensors
    shapes = _shapes(whole)
    fitting = {name: value for name, value in tensors.items() if shapes.get(name) == value.shape}
    whole.update(fitting)
    module.load_state_dict(whole)
    return [name for name in shapes if name not in fitting]


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
        adapt: a function that changes the tensors before they are copied. They have the module's names.

    Raises:
        UserError: the file can't be read, none of its tensors of two or more dimensions fits, or one has no numbers.
    """
    file = read_weights(key, path, broadcast)
    setting, shapes = f"{key}={file.path}", _shapes(module.state_dict())
    candidates = _of_set(setting, file, match.matches(shapes, file.sets))
    if not candidates:
        theirs = max((file.sets[name] for name in _named(file, file.sets)), key=len)
        sides = f"the file has {_with_shapes(_shapes(theirs))}; the model has {_with_shapes(shapes)}"
        raise UserError(f"{setting}: none of its weights fits this model by name and shape: {sides}")
    best = candidates[0]
    not_loaded = _copy(module, adapt(best.tensors) if adapt else best.tensors)
    _refuse_nan(setting, module, not_loaded)
    message = weights_message(key, len(shapes), not_loaded) + _about(key, file, best, candidates[1:])
    return LoadedWeights(message, not_loaded)


def _named(file: WeightsFile, labels: Iterable[str]) -> list[str]:
    """Return those of a file's labels that the user's `:<set>` means; all without one."""
    set_name = file.set_name
    return [each for each in labels if not set_name or each == set_name or each.startswith(f"{set_name}.")]


def _of_set(setting: str, file: WeightsFile, candidates: list[match.Match]) -> list[match.Match]:
    """Return the matches of the set that the user has named.

    Raises:
        UserError: the file has no such set.
    """
    labels = list(dict.fromkeys([*(each.label for each in candidates), *file.sets]))
    if not _named(file, labels):
        known = join_names(filter(None, labels), MAX_NAMES) or "one set without a name"
        raise UserError(f"{setting}:{file.set_name}: the file has no set {file.set_name}: it has {known}")
    chosen = set(_named(file, labels))
    return [each for each in candidates if each.label in chosen]


def _about(key: str, file: WeightsFile, best: match.Match, others: Sequence[match.Match]) -> str:
    """Return the end of the line about loaded weights: which set they are, and what else the file holds."""
    parts = []
    if best.is_average:
        parts.append(f"averaged weights: {best.label}")
    elif best.prefix:
        parts.append(f"without the prefix {best.prefix}")
    similar = [each for each in others if each.is_average and 2 * each.num_weights >= best.num_weights]
    similar += [each for each in others if not each.is_average and each.num_fitting == best.num_fitting]
    other_paths = {each.path for each in similar} - {"", best.path}
    labels = list(dict.fromkeys(each.path if each.path in other_paths else each.label for each in similar))
    labels = [label for label in labels if label not in ("", best.label)]
    if labels:
        names = join_names(labels, OTHER_SETS)
        parts.append(f"the file also has {names}: {key}={short_path(file.path)}:{labels[0]} takes it")
    if file.passed_over:
        parts.append(f"not read: {join_names(file.passed_over)}")
    return "".join(f"; {part}" for part in parts)


def _with_shapes(shapes: Mapping[str, torch.Size]) -> str:
    """Return names with their shapes as text: `conv1.weight 64x3x7x7, fc.bias 10 and 2 more`."""
    return join_names(f"{name} {'x'.join(map(str, shape))}".strip() for name, shape in shapes.items())


def _refuse_nan(setting: str, module: nn.Module, not_loaded: Iterable[str]) -> None:
    """Refuse loaded weights that are not a number.

    Raises:
        UserError: it names the tensors.
    """
    loaded = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    loaded = {name: loaded[name] for name in loaded.keys() - set(not_loaded) if loaded[name].is_floating_point()}
    if broken := sorted(name for name, value in loaded.items() if bool(value.isnan().any())):
        raise UserError(f"{setting}: NaN in {join_names(broken)}: give weights from before the loss became NaN")


def refuse_frozen_unloaded(
    key: str, module: nn.Module, not_loaded: Iterable[str], callbacks: Iterable[object] = ()
) -> None:
    """Refuse frozen parameters, and buffers of frozen layers, that a file has not set: they would stay as they are.

    A parameter that the module's own code has frozen may be one that it has computed, so it is not refused. A buffer
    such as `running_mean` is, if the file has set a parameter of the same layer.

    Args:
        key: the setting that names the file, `init_from=...`.
        module: its frozen parameters have `requires_grad=False`, and `frozen_parameters` has the names of those that
            an option has frozen.
        not_loaded: names of the tensors that the file has not set.
        callbacks: those with `trains_later` unfreeze the parameters whose names match one of these patterns.

    Raises:
        UserError: there are such parameters or buffers.
    """
    new, frozen_by_option = set(not_loaded), set(getattr(module, "frozen_parameters", ()))
    later = [pattern for callback in callbacks for pattern in getattr(callback, "trains_later", ())]
    unfilled = [name for name, each in module.named_parameters() if name in new and not each.requires_grad]
    unfilled = [name for name in unfilled if name in frozen_by_option and not _matches(name, later)]
    if unfilled:
        raise UserError(
            f"{key}: has no {join_names(unfilled, MAX_NAMES)}, which are frozen and would stay random: train them, "
            "from the beginning or from a later epoch on"
        )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, buffer in module.named_buffers(remove_duplicate=False):
        # Integers are counters (num_batches_tracked), or tables that the constructor computes (in Swin).
        if name not in new or not buffer.is_floating_point():
            continue
        layer = _parameters_of_layer(name, parameters)
        if not layer or any(parameters[each].requires_grad or _matches(each, later) for each in layer):
            continue
        if frozen_by_option.issuperset(layer) or not new.issuperset(layer):
            unfilled.append(name)
    if unfilled:
        raise UserError(
            f"{key}: has no {join_names(unfilled, MAX_NAMES)}, which frozen layers compute with: give a file that has "
            "the layers' buffers too (a whole state_dict), or train these layers"
        )


def _parameters_of_layer(buffer: str, parameters: Iterable[str]) -> list[str]:
    """Return the names of the parameters in the smallest layer or block that has a buffer and parameters."""
    names, prefix = list(parameters), buffer
    while prefix:
        prefix = prefix.rpartition(".")[0]
        if inside := [name for name in names if not prefix or name.startswith(f"{prefix}.")]:
            return inside
    return []


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
    """Return what is wrong with a file of weights; empty if nothing is."""
    if not path.is_file():
        return fault(path)
    try:
        if foreign_files.is_safetensors(path):
            return ""
        if kind := foreign_files.not_of_torch(path):
            return kind
        if zipfile.is_zipfile(path) and (wrong := damage(path, checksums)):  # else it has torch's older format
            return wrong
        names = foreign_files.foreign_names(path)
    except OSError as error:
        return f"can't be read ({error.strerror})"
    if code := foreign_files.names_of_code(names):
        return f"refused, because it holds code, not only data: {join_names(code)}: torch.save a state_dict instead"
    return ""


def _load_safetensors(source: Any, path: Path) -> Any:
    """Return the tensors of a .safetensors file, by name."""
    from safetensors import SafetensorError
    from safetensors import torch as safetensors

    try:
        return safetensors.load(source.read_bytes() if isinstance(source, Path) else source.read())
    except SafetensorError as error:
        raise CheckpointError(f"{path}: the file is damaged ({error})") from error
