"""The schema of conf/: type, range and default of every key of Lockstep.

What a key means stands beside it in conf/base.yaml, whose defaults are the same: a test compares them. A default here
applies to a program whose config lacks the key. `lockstep.Trainer` checks its arguments by these types, too. A class or
function that a group names by `_target_` checks its own options when it is called.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, with_config
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12

from lockstep.config.pages import options
from lockstep.config.value_checks import (
    Flag,
    Folder,
    Fraction,
    Name,
    NonNegativeInt,
    Place,
    PositiveFloat,
    PositiveInt,
    Text,
)
from lockstep.errors import UserError

# `forbid`: keys that a class does not list are refused. `defer_build`: pydantic builds the checks when they are first
# used, so `--help`, which uses none, does not wait for them.
STRICT = ConfigDict(extra="forbid", defer_build=True)


def empty_for_none(value: Any) -> Any:
    """Return {} for None. A group of which no file is chosen is None in the config."""
    return {} if value is None else value


def device_count(value: Any) -> Any:
    """Return `auto` for -1, Lightning's value for all devices. Refuse a list of devices."""
    if isinstance(value, list | tuple):
        raise ValueError("must be a number of devices, or auto for all; CUDA_VISIBLE_DEVICES=0,1 selects devices")
    return "auto" if value == -1 and not isinstance(value, bool) else value


def refuse_file_name(value: Any) -> Any:
    """Refuse `data.transforms=<name>`: a file of the group is chosen by `data/transforms=<name>`."""
    if isinstance(value, str):
        known = ", ".join(options("data/transforms"))
        raise ValueError(f"must be lists; to choose a file give data/transforms={value}, with a slash; known: {known}")
    return value


Group: TypeAlias = dict[str, Any]
OptionalGroup: TypeAlias = Annotated[dict[str, Any], BeforeValidator(empty_for_none)]
NamedGroups: TypeAlias = Annotated[dict[str, dict[str, Any] | None], BeforeValidator(empty_for_none)]

PRECISIONS: TypeAlias = Literal["auto", "64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]


@with_config(STRICT)
class Augment(TypedDict, total=False):
    """`data.augment`. `crop` is compared with the image size when the data is opened."""

    crop: NonNegativeInt
    flip: Flag
    fill: Literal["zero", "reflect"]


@with_config(STRICT)
class Transforms(TypedDict, total=False):
    """`data.transforms`: transforms named by `_target_`, in the order in which they are applied."""

    train: list[Group] | None
    eval: list[Group] | None


CACHE_KEYS = ("cache", "cache_gb", "retry_seconds")  # of data=shards: they decide how shards are fetched, not which


@with_config(ConfigDict(extra="allow"))
class Data(TypedDict, total=False):
    """The keys that every data set has. Other keys are options of the function that opens it."""

    val_fraction: Fraction
    split_seed: NonNegativeInt
    folds: Annotated[int, Field(strict=True, ge=2)] | None
    fold: NonNegativeInt | None
    augment: Augment | None
    transforms: Annotated[Transforms | None, BeforeValidator(refuse_file_name)]
    mix: Literal["mixup", "cutmix"] | None
    mix_alpha: PositiveFloat | None
    sampling: Literal["balanced"] | None


def chosen_fold(data: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the number of folds and the fold for validation of a `data` group; None without folds.

    Raises:
        UserError: only one of the two is given, or there is no such fold.
    """
    folds, fold = data.get("folds"), data.get("fold")
    if folds is None:
        if fold is not None:
            raise UserError(f"data.fold={fold} has no effect without data.folds: give data.folds=5, say")
        return None
    all_folds = ",".join(map(str, range(folds))) if folds <= 10 else f"range({folds})"
    if fold is None:
        raise UserError(f"data.folds={folds} needs data.fold, 0 to {folds - 1}: -m data.fold={all_folds} runs them all")
    if fold >= folds:
        raise UserError(f"data.fold={fold}: must be 0 to {folds - 1}, since data.folds={folds}")
    return folds, fold


@with_config(ConfigDict(extra="allow"))
class Optimizer(TypedDict, total=False):
    """The keys that Lockstep reads. Other keys are options of the optimizer.

    If the user gives no `lr` for the run, the run has this one. The optimizer gets the run's.
    """

    lr: PositiveFloat
    # Factors of `lr` for groups of parameters. (The key `lr_scaling` of a run is another thing: the rule by which `lr`
    # follows from the batch size.) Checkpoints contain the name, so it can't be changed.
    lr_scale: dict[str, PositiveFloat] | None
    param_groups: dict[str, Any] | None


@with_config(ConfigDict(extra="allow"))
class Scheduler(TypedDict, total=False):
    """The keys that Lightning reads. Other keys are options of the schedule."""

    interval: Literal["step", "epoch"]
    frequency: PositiveInt
    monitor: Text
    strict: Flag


# Arguments of Lightning's Trainer that `debug.trainer` may have. It may have no others: most follow from other keys.
TRAINER_OPTIONS: TypeAlias = Literal[
    "benchmark",
    "deterministic",
    "detect_anomaly",
    "inference_mode",
    "limit_test_batches",
    "limit_val_batches",
    "max_time",
    "min_epochs",
    "min_steps",
    "profiler",
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Debug:
    """`debug`: settings for looking into a run."""

    one_batch: Flag = False
    trainer: Annotated[dict[TRAINER_OPTIONS, Any], BeforeValidator(empty_for_none)] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Speed:
    """`speed`: settings that change the speed and not the result."""

    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    allocator: Literal["auto", "system"] = "auto"
    resident: Flag | Literal["auto"] = "auto"
    tf32: Flag | Literal["auto"] = "auto"
    cuda_graphs: Flag = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sweep:
    """`sweep`: settings of a command that makes several runs."""

    jobs: PositiveInt = 1  # number of runs at the same time
    resume: Text | None = None
    metric: Text = "val/acc"
    mode: Literal["max", "min"] | None = None  # None: that of the metric; see config/metrics.py


# Two classes are derived from this one: `Keys` checks the values, and `Config` (config/check.py) gets the checked ones.
# It is a dataclass of the standard library, not of pydantic, so that `Config` does not check them again.
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunKeys:
    """The keys that `Keys` and `Config` share, with the same values, except that `Config` has no precision `auto`."""

    name: Name
    outputs: Folder
    seed: Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)] = 0  # numpy's limits
    model: Group = field(default_factory=dict)
    data_dir: Place
    num_workers: NonNegativeInt | None = None
    max_restarts: NonNegativeInt = 0
    elastic: Flag = False
    survive: Flag = False
    hang_timeout: PositiveFloat = 300.0
    nonfinite: Literal["stop", "skip"] = "stop"
    precision: PRECISIONS
    threads: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    compile: Flag = False
    speed: Annotated[Speed, BeforeValidator(empty_for_none)] = field(default_factory=Speed)
    max_epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    val_every: PositiveInt | None = None
    lr: PositiveFloat = 1.0
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    reference_batch_size: PositiveInt = 64
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    gradient_clip_val: PositiveFloat | None = None
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    checkpoint_every: PositiveInt | None = None
    checkpoint_keep: Annotated[int, Field(strict=True, ge=-1)] = 0
    log_every: PositiveInt = 50
    init_from: Text | None = None
    resume: Text | None = None
    checkpoint: Text | None = None
    callbacks: NamedGroups = field(default_factory=dict)
    logger: NamedGroups = field(default_factory=dict)
    debug: Annotated[Debug, BeforeValidator(empty_for_none)] = field(default_factory=Debug)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Keys(RunKeys):
    """All keys as the user gives them. Most of the keys below become the run's layout."""

    data: Data
    strategy: Group
    extras: NamedGroups = field(default_factory=dict)
    accelerator: Literal["auto", "cpu", "gpu"]
    devices: Annotated[PositiveInt | Literal["auto"], BeforeValidator(device_count)]
    num_nodes: PositiveInt
    batch_size: PositiveInt
    pieces: PositiveInt | None = None
    accumulate_grad_batches: PositiveInt | None = None
    exact: Flag | Literal["portable"] = False
    sweep: Annotated[Sweep, BeforeValidator(empty_for_none)] = field(default_factory=Sweep)
