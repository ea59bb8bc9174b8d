"""`checkpoint_keep`: checkpoints that stay beside last.ckpt."""

import re
from pathlib import Path

from lockstep.files import same_file


def steps_kept(folder: Path) -> dict[int, Path]:
    """The checkpoints `step_<n>.ckpt` in a folder, by step, in order."""
    names = {
        int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(r"step_(\d+)\.ckpt", path.name))
    }
    return dict(sorted(names.items()))


def keep(last: Path, step: int, number: int) -> None:
    """Gives `last`, saved after `step`, a name that stays. The `number` newest stay, all where it is -1; of later steps
    none: a run that has gone back behind them makes them anew."""
    same_file(last, last.with_name(f"step_{step}.ckpt"))
    kept = steps_kept(last.parent)
    upto = [found for found in kept if found <= step]
    for found in kept.keys() - set(upto if number < 0 else upto[-number:]):
        kept[found].unlink()
