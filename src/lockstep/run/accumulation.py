"""`accumulate_grad_batches=auto`: tries before training into how many pieces a step must be cut to fit the memory."""

import faulthandler
import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from lightning.pytorch.loggers.logger import DummyLogger

from lockstep.arithmetic.layout import Layout
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.config.check import Config
from lockstep.data import Splits
from lockstep.errors import UserError
from lockstep.launch.agent import WorkerFailed, launch
from lockstep.launch.environment import external_workers
from lockstep.run.build import make_data, make_module, make_trainer
from lockstep.run.fast import set_up_worker
from lockstep.step.memory import MIB, limit_memory, out_of_memory, peak_memory
from lockstep.text import plural

STEPS = 3  # the first one has no optimizer state yet
LACKING = "the memory is out"  # how a worker tells its parent
BELOW = ("could not create", "bad_alloc", "can't start new thread", "Resource temporarily unavailable")  # not torch's


def fitted(config: Config, splits: Splits, folder: Path) -> Config:
    """The config with as few pieces as fit, where it asks for that: those of the checkpoint that it goes on from, else
    the first of 1, 2, 4, ... times as many with which a few steps succeed, in workers that leave nothing behind.

    Raises:
        UserError: not even the smallest pieces fit, or there are no workers of its own to try them in.
    """
    if not config.auto_accumulate:
        if config.memory_budget and config.layout.accelerator == "cpu":
            budget = f"memory_budget={config.memory_budget:g}"
            raise UserError(f"{budget}: on a CPU it limits what accumulate_grad_batches=auto tries; give that too")
        return config
    if layout := _kept(config, folder):
        return replace(config, layout=layout)
    if external_workers() or config.layout.num_nodes > 1:
        raise UserError(
            "accumulate_grad_batches=auto tries in workers that it starts on one machine, not under torchrun, in "
            "several SLURM tasks or with num_nodes: give the number that one machine finds for its part of batch_size"
        )
    layouts = [config.layout, *config.layout.finer()]
    for layout in layouts:
        fits, peak = _fits(replace(config, layout=layout), splits, folder)
        found = f"accumulate_grad_batches={layout.accumulate}"
        if fits:
            used = f", in {peak / MIB:.0f} MiB of the first device" if peak else ""
            print(f"{found} fits{used}", file=sys.stderr)
            return replace(config, layout=layout)
        print(f"{found}: out of memory", file=sys.stderr)
    limit = "the memory" if config.memory_budget is None else f"memory_budget={config.memory_budget:g}"
    size = plural(layouts[-1].piece_size, "sample")
    raise UserError(f"accumulate_grad_batches=auto: {limit} does not hold a step in pieces of {size}, the smallest")


def _kept(config: Config, folder: Path) -> Layout | None:
    """The layout with the pieces of the run that goes on; None if there is none, or they don't fit the devices."""
    start = Path(config.resume) if config.resume else paths.last(folder)
    recorded = checkpoint_io.load(start).get("lockstep", {}) if start.exists() else {}
    pieces = recorded.get("pieces", 0)
    fits = pieces >= config.layout.num_devices and not config.layout.batch_size % pieces
    return replace(config.layout, pieces=pieces) if fits else None


def _fits(config: Config, splits: Splits, folder: Path) -> tuple[bool, int | None]:
    """Whether a few steps of the layout succeed, and rank zero's peak in bytes where it is known."""
    try:
        peak = launch(measure, config, splits, folder, layout=config.layout, hang_timeout=config.hang_timeout)
    except UserError as refusal:
        if str(refusal) != LACKING:
            raise
        return False, None
    except WorkerFailed as failed:
        if "traceback" in str(failed):  # another kind of error; libraries that don't ask what malloc said leave none
            raise
        return False, None
    return True, peak


def measure(config: Config, splits: Splits, folder: Path) -> int | None:
    """Takes a few steps, and validates, saves and shows nothing; returns this process's peak in bytes where it is
    known. Every worker of the layout calls it. Without the memory it is the UserError `LACKING`."""
    limited = config.memory_budget is not None and config.layout.accelerator == "cpu"
    try:
        rank = set_up_worker(config, folder)
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        data = make_data(replace(config, num_workers=0), splits, rank)
        trainer = make_trainer(replace(config, max_steps=STEPS + config.late, logger={}, val_every=None), folder, [])
        trainer.loggers = [DummyLogger()]  # for a module that draws by itself
        trainer.limit_val_batches = 0
        if config.memory_budget is not None:
            limit_memory(config.memory_budget, trainer.strategy)
        if limited:
            faulthandler.disable()
        trainer.fit(make_module(config, splits), datamodule=data)
    except Exception as error:
        if out_of_memory(error) or (limited and any(said in str(error) for said in BELOW)):
            raise UserError(LACKING) from error
        raise
    return peak_memory()
