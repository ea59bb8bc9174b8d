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
from typing import TYPE_CHECKING, Any

from lockstep.arithmetic.layout import Layout
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
