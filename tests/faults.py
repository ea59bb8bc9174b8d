"""Run src/train.py with a fault at a chosen moment: FAULT=kill@saving:4 python tests/faults.py outputs=/tmp/o ...

A fault is `<what>@<moment>:<step>`, and of a sweep `<what>@<moment>:<step>/<job>`.

What: `kill` (SIGKILL to the process group of the program), `job` (to that of a sweep's job), `worker` (to the last
rank, unless it is a restart already), `term` (SIGTERM to the group), `disk` (no file can grow above 1,000 bytes),
`fail` (an error).

Moments: `start` (before the first step), `step` (after an optimizer step, before it is saved), `validation` (before
one), `saving` (half of last.ckpt is written), `saved` (last.ckpt is replaced), `end` (after the last step).

Three faults are planted ones, for controls: `skip@resumed` takes back the first step of a start that resumes,
`forget@resumed` starts the optimizer's state again, and `unlisted@resumed` reads checkpoints without the ledger's line.
"""

import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOMENTS = {
    "start": "on_train_start",
    "step": "on_train_batch_end",
    "validation": "on_validation_start",
    "end": "on_train_end",
}
FULL_DISK_BYTES = 1000
FIRST = os.getpid()


class Fault:
    """The fault that the environment asks for."""

    def __init__(self, text: str) -> None:
        self.what, _, moment = text.partition("@")
        self.moment, _, where = moment.partition(":")
        step, _, job = where.partition("/")
        self.step, self.job = int(step or -1), int(job or -1)

    def is_now(self, moment: str, step: int) -> bool:
        from hydra.core.hydra_config import HydraConfig

        is_now = (moment, step) == (self.moment, self.step)
        return is_now and (self.job < 0 or self.job == HydraConfig.get().job.num)  # only a sweep's job has a number

    def strike(self, rank: int = 0, world_size: int = 1) -> None:
        from lockstep.launch.environment import environment

        match self.what:
            case "kill":
                os.killpg(os.getpgid(FIRST), signal.SIGKILL)
            case "job":
                os.killpg(0, signal.SIGKILL)
            case "worker" if rank == world_size - 1 and not environment().restarts:
                os.kill(os.getpid(), signal.SIGKILL)
            case "term" if rank == 0:
                os.killpg(os.getpgid(FIRST), signal.SIGTERM)
            case "disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, resource.RLIM_INFINITY))
            case "fail":
                raise RuntimeError("a planted error")


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call `action` with the same arguments before each call of a method."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, call)


def plant(fault: Fault) -> None:
    """Make the program strike when the moment comes."""
    import torch

    from lockstep.callbacks import Checkpoint

    def hook(moment: str) -> Callable[..., None]:
        def strike(callback: Any, trainer: Any, *args: Any) -> None:
            if not trainer.sanity_checking and fault.is_now(moment, trainer.global_step):
                fault.strike(trainer.global_rank, trainer.world_size)

        return strike

    for moment, method in MOMENTS.items():
        before(Checkpoint, method, hook(moment))
    written, save, replace = -1, torch.save, os.replace

    def save_half(checkpoint: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal written
        if Path(str(getattr(file, "name", ""))).name == ".last.ckpt.tmp":
            written = checkpoint["global_step"]
            if fault.is_now("saving", written):
                if fault.what != "disk":
                    file.write(bytes(FULL_DISK_BYTES))
                    file.flush()
                fault.strike()
        save(checkpoint, file, *args, **kwargs)

    def replace_and_strike(source: Any, path: Any) -> None:
        replace(source, path)
        if Path(path).name == "last.ckpt" and fault.is_now("saved", written):
            fault.strike()

    torch.save, os.replace = save_half, replace_and_strike  # type: ignore[assignment]
    if (fault.moment, fault.what) == ("resumed", "unlisted"):
        load = torch.load
        torch.load = lambda *args, **kwargs: without_line(load(*args, **kwargs))
    elif fault.moment == "resumed":
        plant_wrong_resume(Checkpoint, fault.what)


def without_line(checkpoint: Any) -> Any:
    """Take the ledger's line out of what a checkpoint file has."""
    return {key: value for key, value in checkpoint.items() if key != "ledger"}


def plant_wrong_resume(checkpoint: Any, what: str) -> None:
    """Make a start that resumes go on wrongly."""
    weights: list[Any] = []

    def at_start(callback: Any, trainer: Any, module: Any) -> None:
        if trainer.global_step and what == "skip":
            weights.extend(each.detach().clone() for each in module.parameters())
        elif trainer.global_step:
            for optimizer in trainer.optimizers:
                optimizer.state.clear()

    def after_a_step(callback: Any, trainer: Any, module: Any, *args: Any) -> None:
        for parameter, before_the_step in zip(module.parameters(), weights, strict=False):
            parameter.data.copy_(before_the_step)
        weights.clear()

    before(checkpoint, "on_train_start", at_start)
    before(checkpoint, "on_train_batch_end", after_a_step)


if __name__ == "__main__":
    if os.getpgrp() != FIRST:  # in a script: `kill` means this program, not the shell
        os.setpgrp()
    sys.path[0] = str(ROOT / "src")
    sys.argv[0] = str(ROOT / "src" / "train.py")
    if "FAULT" in os.environ:
        plant(Fault(os.environ["FAULT"]))
    runpy.run_path(sys.argv[0], run_name="__main__")
