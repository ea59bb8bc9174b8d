"""Compute parts of a run again, on any layout, and compare the bits of weights and optimizer:

    lockstep verify run=outputs/<name>/<timestamp> steps=3
    lockstep verify run=outputs/<name>/<timestamp> steps=[50,150] strategy=ddp devices=2

The run must have a ledger (`extras=[ledger]`). The program first checks it: each line must have the hash of the line
before, and the samples of all steps must be those that the run's seed gives. Then, for each chosen step, it trains from
the last kept checkpoint before the step up to the step, in a folder that is deleted afterwards. Weights and optimizer
must have the bits that the ledger records. If the run kept no checkpoint before the step (`checkpoint_keep=-1` keeps
all), training starts from the seed; a ledger that begins at a later step than 0 needs a checkpoint.
docs/extras/ledger.md explains what this proves and what it does not.

Exit codes: 0 all bits are the same, 1 something differs, 2 bad input (no ledger, or nothing to start from).
"""

from pathlib import Path
from typing import NoReturn

from lockstep.errors import UserError
from lockstep_extras.ledger import LEDGER_FILE


def main(arguments: list[str]) -> NoReturn:
    """Run the program under Hydra.

    Raises:
        UserError: the run has no ledger.
    """
    runs = [argument.removeprefix("run=").strip("'\"") for argument in arguments if argument.startswith("run=")]
    if runs and not {"--help", "-h"} & set(arguments):
        check_run(Path(runs[-1]).expanduser())

    # These import torch, which takes longer than the check above.
    from lockstep.commands import cli
    from lockstep_extras.ledger.verifying import verify

    cli.command(verify, "verify")


def check_run(run: Path) -> None:
    """Check that a folder exists and has a ledger.

    Raises:
        UserError: it does not.
    """
    if not run.is_dir():
        raise UserError(f"run={run}: there is no such folder: give the folder of a run, outputs/<name>/<timestamp>")
    if not (run / LEDGER_FILE).is_file():
        raise UserError(f"run={run} has no {LEDGER_FILE}: start a run with extras=[ledger]")
