"""The formats of what Lockstep adds to a checkpoint.

| format | what it is |
|---|---|
| 2 | one file |
| 3 | some tensors have their parts in a folder beside the file (`strategy.checkpoint=sharded`) |
"""

from collections.abc import Mapping
from typing import Any

from lockstep.errors import UserError

FORMAT = 2  # of new checkpoints
WITH_PARTS = 3  # of new ones with a folder of parts


def check_format(record: Mapping[str, Any], path: object) -> None:
    """Check that this Lockstep reads a checkpoint.

    Args:
        record: the entry `lockstep` of the checkpoint.
        path: the checkpoint's file, for the message.

    Raises:
        UserError: another Lockstep wrote it, in a format of its own.
    """
    number = record.get("format")
    if type(number) is not int or number not in (FORMAT, WITH_PARTS):
        raise UserError(
            f"{path}: checkpoint format {number}, this Lockstep reads {FORMAT} and {WITH_PARTS}: install the Lockstep "
            "that wrote it"
        )
