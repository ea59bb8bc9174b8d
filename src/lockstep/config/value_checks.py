"""Checks of values and keys, with messages that have what was typed and what would be right.

Pydantic finds the first bad value or unknown key. For an unknown key, the message suggests the one that is probably
meant, also from the names of Lightning's Trainer, lightning-hydra-template and others.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from lockstep.errors import UserError
from lockstep.text import is_url

Check = Callable[[str, Any], Any]


def as_text(value: Any) -> Any:
    """Return a number as text, since `name=5` is parsed as a number. Return other values unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def absolute(path: str) -> str:
    """Return the absolute path of a folder."""
    if not path:
        raise ValueError("must be a folder")
    if is_url(path):
        raise ValueError("must be a folder of this machine, not a URL")
    return os.path.abspath(os.path.expanduser(path))


def place(text: str) -> str:
    """Return the absolute path of a folder, or a URL as it is. Refuse a URL with a secret, which would be recorded.

    Raises:
        UserError: The URL has a password or a query, or names several servers. The message does not have the URL.
    """
    if text.startswith("pipe:"):
        raise UserError("data_dir: pipe: names a command, and none is run: must be a folder, or a URL of the shards")
    if not is_url(text):
        return absolute(text)
    scheme, _, rest = text.partition(":")
    if "::" in text:
        right = "must be one URL, whose braces may name several shards: s3://bucket/train-{000..099}.tar"
        raise UserError(f"data_dir: it has ::, which joins URLs or protocols: {right}")
    if not rest.startswith("//"):
        raise UserError("data_dir: the URL names no place: must be <protocol>://<place>, such as s3://bucket/images")
    user, at, _ = rest[2:].partition("/")[0].rpartition("@")
    is_container = scheme.lower() in ("abfs", "abfss") and ":" not in user  # abfs://<container>@<account>...
    if (at and not is_container) or "?" in rest:
        holds = "a user or password" if at and not is_container else "a query, which may hold a token"
        right = "leave it out, and set the credentials as the protocol's driver reads them (lockstep docs shards)"
        raise UserError(f"data_dir: its {scheme} URL has {holds}, and URLs are written into configs and logs: {right}")
    if "#" in rest:
        right = "rename the file or folder, or write %23 on a web server"
        raise UserError(f"data_dir: its {scheme} URL has a #, which begins a URL's fragment: {right}")
    return absolute(rest[2:]) if scheme.lower() in ("file", "local") else text.rstrip("/")


def file_name(name: str) -> str:
    """Check that a name can be that of a folder, and return it."""
    if not re.fullmatch(r"\w[\w.+ -]{,99}", name):
        raise ValueError("must be a letter or digit, and then at most 99 of those, '.', '_', '+', '-' and spaces")
    return name


PositiveInt: TypeAlias = Annotated[int, Field(strict=True, ge=1)]
NonNegativeInt: TypeAlias = Annotated[int, Field(strict=True, ge=0)]
PositiveFloat: TypeAlias = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[float, Field(strict=True, ge=0, lt=1)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]
Text: TypeAlias = Annotated[str, BeforeValidator(as_text)]
Folder: TypeAlias = Annotated[str, BeforeValidator(as_text), AfterValidator(absolute)]
Place: TypeAlias = Annotated[str, BeforeValidator(as_text), AfterValidator(place)]  # a folder or a URL
Name: TypeAlias = Annotated[str, BeforeValidator(as_text), AfterValidator(file_name)]


def show(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def override(key: str, value: Any) -> str:
    """Return a setting as it is typed on the command line."""
    return f"{key}={show(value)}"


def checker(kind: Any, typed: Callable[[str, Any], str] = override) -> Check:
    """Return a function `check(key, value)` that validates a value and returns it as `kind`.

    The function raises a UserError that names the first wrong key, and what would be right.

    Args:
        kind: any type that pydantic can validate.
        typed: returns a setting as a user types it, from its key and value.
    """

    @cache  # built on the first call
    def adapter() -> TypeAdapter[Any]:
        return TypeAdapter(kind)

    @cache
    def known_names() -> set[str]:
        schema = adapter().json_schema()
        groups = [schema, *schema.get("$defs", {}).values()]
        return {name for group in groups for name in group.get("properties", ())}

    def check(key: str, value: Any) -> Any:
        try:
            return adapter().validate_python(value)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False)
            raise UserError(_error_message(key, value, errors, known_names(), typed)) from None

    return check


def whole_number(least: int) -> Check:
    """Return a check for a whole number of at least `least`."""
    return checker(Annotated[int, Field(strict=True, ge=least)])


folder, run_name = checker(Folder), checker(Name)


def _error_message(
    key: str, value: Any, errors: Sequence[Any], known: Iterable[str], typed: Callable[[str, Any], str]
) -> str:
    """Return the message for pydantic's errors: the first wrong key, and what it must be in pydantic's words.

    If a key may have several types, the message has all of them.

    Args:
        key: the dotted key of the value; empty for the whole config.
        value: the value that was validated.
        errors: pydantic's errors.
        known: the names that the value's keys may have.
        typed: see `checker`.
    """
    location: tuple[Any, ...] = errors[0]["loc"]
    keys, top = [key] if key else [], value
    for depth, part in enumerate(location):
        if errors[0]["type"] == "missing" and part not in value:
            name = ".".join([*keys, part])
            return f"{name} must be given: {name}=..."
        if not isinstance(value, Mapping) or part not in value:  # `part` is one of several types, or an index
            location = location[:depth]
            break
        keys.append(str(part))
        value = value[part]
    name = ".".join(keys)
    if errors[0]["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        inner = value
        while not key and isinstance(inner, Mapping) and len(inner) == 1:  # the full key of `+trainer.max_epochs=3`
            part, inner = next(iter(inner.items()))
            name = f"{name}.{part}"
        others = {} if key else {each: below for each, below in top.items() if each != keys[0] or len(keys) > 1}
        return no_such_key_message(name, others, known if key or len(keys) > 1 else ())
    messages = [error["msg"] for error in errors if error["loc"][: len(location)] == location]
    expected = " or ".join(re.sub("^.*? should be |^Value error, must be ", "", each) for each in messages)
    return f"{typed(name, value)}: must be {expected}"


# --- unknown names ---

# Our key: what other projects call it. Of names that are near to ours, those that are flags there: `--epochs 3`. A
# message names keys that the program has.
ELSEWHERE = {
    "lr": "learning_rate base_lr max_lr",
    "data": "dataset",
    "model": "net",
    "devices": "gpus num_gpus nproc nproc_per_node",
    "resume": "ckpt_path",
    "init_from": "ckpt_path",
    "checkpoint": "ckpt_path",
    "callbacks.checkpoint": "model_checkpoint enable_checkpointing",
    "callbacks.console": "enable_progress_bar",
    "checkpoint_keep": "save_top_k",
    "checkpoint_every": "every_n_train_steps",
    "val_every": "check_val_every_n_epoch val_check_interval",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "gradient_clip_val": "max_grad_norm",
    "precision": "dtype amp",
    "exact": "deterministic",
    "max_epochs": "epochs num_epochs",
    "max_steps": "steps num_steps limit_train_batches",
    "num_nodes": "nodes",
    "num_workers": "workers",
    "debug=batch": "fast_dev_run",
    "debug=overfit": "overfit_batches",
    "+debug.trainer.limit_val_batches": "limit_val_batches",
    "+debug.trainer.limit_test_batches": "limit_test_batches",
    "name": "experiment_name",
    "outputs": "default_root_dir log_dir",
}
# A choice in lightning-hydra-template -> what to type here.
CHOICES = {
    "trainer=ddp": "strategy=ddp devices=4",
    "trainer=ddp_sim": "strategy=ddp devices=2 accelerator=cpu",
    "trainer=cpu": "accelerator=cpu",
    "trainer=gpu": "accelerator=gpu",
    "trainer=default": "nothing: strategy=auto, devices=1",
    "logger=many_loggers": "logger=[tensorboard,csv]",
    "debug=fdr": "debug=batch",
    "debug=limit": "debug=batch",
    "debug=default": "debug=batch",
    "debug=profiler": "debug=profile",
}
# Keys of other projects that have no single key here.
EXPLAINED = {
    "train": "train.py always trains; src/evaluate.py checkpoint=<file or run folder> tests only",
    "test": "train.py tests where the data set has a test set; src/evaluate.py tests again",
    "trainer": "the arguments of Lightning's Trainer are at the top level: strategy=ddp devices=2 max_epochs=3, say; "
    "+debug.trainer.<name>= takes a few others, such as limit_val_batches",
    "hparams_search": "`lockstep search` searches hyperparameters",
    "tags": "name=<name> names a run; a logger's own options are in conf/logger/",
}


def no_such_key_message(key: str, config: Mapping[str, Any], known: Iterable[str] = ()) -> str:
    """Return the message for an unknown dotted key. It names the key that is probably meant.

    Args:
        key: the dotted key.
        config: the whole composed config as plain containers.
        known: the keys of the same group, if they are not in `config`.
    """
    group, _, last = key.rpartition(".")
    siblings: Any = config  # the config that should have the key
    for part in group.split(".") if group else ():
        siblings = siblings.get(part) if isinstance(siblings, Mapping) else siblings
    refused = f"{key}: there is no such key"
    if hint := _suggestion(key, config):
        return f"{refused}; {hint}"
    if not siblings and not known:
        return f"{refused}: {group} is null here"
    if not isinstance(siblings, Mapping) and not known:
        return f"{refused}: {group} has no keys below it"
    names = known or [name for name in siblings if not name.startswith("_") and name != "hydra"]
    return f"{refused}; {unknown_name_message(last, names)}"


def keys_called(*names: str) -> list[str]:
    """Return our keys that other projects call by one of these names."""
    return [ours for name in names for ours, theirs in ELSEWHERE.items() if name in theirs.split()]


def _suggestion(key: str, config: Mapping[str, Any]) -> str:
    """Return `did you mean <key>?` or an explanation; "" if there is neither."""
    if key in EXPLAINED:
        return EXPLAINED[key]
    last = key.rpartition(".")[2]
    groups = {*config, *(["debug"] if "max_epochs" in config else [])}  # a group without a choice is no key of a config

    def of_the_program(*names: str) -> list[str]:
        return [each for each in keys_called(*names) if re.split("[.=]", each)[0].lstrip("+") in groups]

    called = of_the_program(key, last)
    same = [each for each in _keys(config) if each.rpartition(".")[2] == last and each != key]
    if not called and not same and len(last) > 1:  # the first letters of its words, as in wd=0.1
        same = [each for each in _keys(config) if "".join(w[:1] for w in each.rpartition(".")[2].split("_")) == last]
    candidates = called or [each for each in same if "." not in each] or same[:3]
    if not candidates and not difflib.get_close_matches(last, [*_keys(config)], cutoff=0.8):
        names = [name for theirs in ELSEWHERE.values() for name in theirs.split()]
        candidates = of_the_program(*difflib.get_close_matches(last, names, n=1, cutoff=0.8))
    if candidates:
        return f"did you mean {' or '.join(dict.fromkeys(candidates))}?"
    return EXPLAINED.get(key.partition(".")[0], "")


def _keys(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted keys that a user may set."""
    for name, value in config.items():
        if not name.startswith("_") and (above or name != "hydra"):
            yield f"{above}{name}"
            if isinstance(value, Mapping):
                yield from _keys(value, f"{above}{name}.")


def unknown_name_message(name: str, known: Iterable[str]) -> str:
    """Return `did you mean X? known: ...`. Of more than 12 known names, return only the nearest."""
    known = sorted(known)
    near = near_names(name, known)
    nearest = f"did you mean {' or '.join(near[:4])}?" if near else ""
    return f"{nearest} known: {', '.join(known)}".strip() if len(known) <= 12 else nearest or "--help lists them"


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """Return the known names that are probably meant: those that contain the name, else a misspelled one.

    A number at the end does not count (`resnet50`: resnet18, resnet9). If there is none, return those that begin like
    it (`imagenet`: image_folder), and else those that it abbreviates (`tb`: tensorboard).
    """

    def common_letters(one: str, other: str) -> int:
        return next((at for at in range(len(one)) if one[: at + 1] != other[: at + 1]), len(one))

    stem = name.rstrip("0123456789") if len(name.rstrip("0123456789")) > 3 else name
    containing = [each for each in known if each.startswith(stem) or (len(stem) > 3 and stem in each)]
    close = difflib.get_close_matches(name, known, n=1)
    misspelled = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    most = max((common_letters(each, name) for each in known), default=0)
    same_start = [each for each in known if common_letters(each, name) == most >= max(4, min(len(name) / 2, len(each)))]
    letters = ".*".join(map(re.escape, name))
    abbreviated = [each for each in known if len(name) > 1 and re.match(letters, each)]
    return containing or misspelled or same_start or close or abbreviated
