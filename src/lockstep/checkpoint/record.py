"""What a checkpoint says about the run that has saved it. This module imports no torch: the parent needs it.

The entry `lockstep` of a checkpoint has

| key | what it is |
|---|---|
| format | of what Lockstep adds to a checkpoint |
| trainer | what a run counts its steps by, and what decides their bits; see `make_record` |
| config | the config; without one, `max_epochs` and `max_steps` |
| others | of a config's run `spec` and `versions`; of a program without one `command` |
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12

from lockstep.arithmetic.layout import Layout
from lockstep.config.value_checks import PositiveInt
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.data.splits import Split

FORMAT = 4


def make_record(
    train: "Split", layout: Layout, seed: int, precision: str, facts: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """Return the entry `lockstep` of a run's checkpoints, without metrics, as plain data.

    Args:
        train: the training set, and how its samples are drawn.
        layout: the run's layout.
        seed: its seed.
        precision: its precision, resolved.
        facts: more of the training set: `samples`, `fingerprint`, `content`, `order`.
        others: the other entries.
    """
    trainer = {
        "batch_size": layout.batch_size,
        "pieces": layout.pieces,
        "exact": layout.exact,
        "seed": seed,
        "precision": precision,
        "shuffle": train.shuffle,
        "drop_last": train.drop_last,
        "weighted": train.weights is not None,
        **facts,
    }
    return {"format": FORMAT, "trainer": trainer, **others}


def check_format(record: Mapping[str, Any], path: object) -> None:
    """Check that this Lockstep reads a checkpoint.

    Args:
        record: the entry `lockstep` of the checkpoint.
        path: the checkpoint's file, for the message.

    Raises:
        UserError: another Lockstep wrote it, in a format of its own.
    """
    number = record.get("format")
    if type(number) is not int or number != FORMAT:
        raise UserError(
            f"{path}: checkpoint format {number}, this Lockstep reads {FORMAT}: install the Lockstep that wrote it"
        )


# --- what a run reads of a checkpoint, as pydantic checks it ---


@with_config(ConfigDict(extra="forbid"))
class SpecRecord(TypedDict):
    """A checkpoint's record of the images that it was trained on."""

    channels: PositiveInt
    image_size: PositiveInt
    classes: list[str] | tuple[str, ...]
    mean: list[float] | tuple[float, ...]
    std: list[float] | tuple[float, ...]
    task: str


@with_config(ConfigDict(extra="allow"))
class TargetRecord(TypedDict):
    """A group of a checkpoint's config, which names a class or a function."""

    _target_: str | None  # an optimizer of the module itself has none


@with_config(ConfigDict(extra="allow"))
class ConfigRecord(TypedDict):
    """What a resumed run reads of its checkpoint's config."""

    model: TargetRecord
    data: TargetRecord
    optimizer: TargetRecord
    batch_size: PositiveInt


@with_config(ConfigDict(extra="allow"))
class TrainerRecord(TypedDict):
    """What a run counts its steps by, and what decides their bits."""

    batch_size: PositiveInt
    samples: PositiveInt | None  # None: a stream without an end
    fingerprint: str | None
    precision: str


@with_config(ConfigDict(extra="allow"))
class TrainingRecord(TypedDict):
    """A checkpoint's record of the run that has saved it."""

    trainer: TrainerRecord
    config: dict[str, Any]


@with_config(ConfigDict(extra="allow"))
class RunRecord(TypedDict):
    """A checkpoint's record of a run with a config."""

    trainer: TrainerRecord
    config: ConfigRecord
    spec: SpecRecord


class LeftOutRecord(TypedDict):
    """What the module's state_dict leaves out: the tensors that have changed, and hashes of the others, by name."""

    changed: dict[str, Any]
    sha256: dict[str, str]


@with_config(ConfigDict(extra="allow"))
class ContinuationRecord(TypedDict):
    """What Lightning does not save in a checkpoint."""

    stopped: bool
    length: dict[str, Any]
    trained: dict[str, bool]
    settings: dict[str, Any]
    left_out: NotRequired[LeftOutRecord]


@with_config(ConfigDict(extra="allow"))
class ResumableCheckpoint(TypedDict):
    """The entries of a checkpoint from which a run can continue, beside weights and states."""

    global_step: Annotated[int, Field(strict=True, ge=0)]
    lockstep: TrainingRecord
    continuation: ContinuationRecord


@with_config(ConfigDict(extra="allow"))
class ResumableRun(ResumableCheckpoint):
    """The same of a run with a config."""

    lockstep: RunRecord  # type: ignore[misc]
