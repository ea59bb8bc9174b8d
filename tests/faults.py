"""Run src/train.py with a fault at a chosen moment: FAULT=kill@saving:4 python tests/faults.py outputs=/tmp/o ...

A fault is `<what>@<moment>:<step>`, and of a sweep `<what>@<moment>:<step>/<job>`. Several have commas between them.

What: `kill` (SIGKILL to the process group of the program), `job` (to that of a sweep's job), `worker` and `zero` (to
the last rank and to rank zero; the second of several faults after one restart, and so on), `term` (SIGTERM to the
group), `disk` (no file can grow above 1,000 bytes), `fail` (an error).

Moments: `start` (before the first step), `piece` (after a backward pass), `sum` (in the sum of
gradients), `summed` (before the optimizer's step), `step` (after it, before it is saved), `validation` (before one),
`saving` (half of last.ckpt is written), `saved` (last.ckpt is replaced), `end` (after the last step), `test` (before
it).

Four faults are planted ones, for controls: `skip@resumed` takes back the first step of a start that resumes,
`without@resumed` takes it without the samples of the last rank, `forget@resumed` starts the optimizer's state again,
and `unlisted@resumed` reads checkpoints without the ledger's line. `count@trainers` prints at each start how many
Trainers of before are alive in the process, and `keep@trainers` keeps them alive.
"""

import os
import resource
import runpy
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOMENTS = {
    "start": "on_train_start",
    "summed": "on_before_optimizer_step",
    "step": "on_train_batch_end",
    "validation": "on_validation_start",
    "end": "on_train_end",
    "test": "on_test_start",
}
FULL_DISK_BYTES = 1000
FIRST = os.getpid()


class Fault:
    """A fault that the environment asks for; `restarts` is the number of those before it."""

    def __init__(self, text: str, restarts: int = 0) -> None:
        self.restarts = restarts
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
            case "worker" if rank == world_size - 1 and environment().restarts == self.restarts:
                os.kill(os.getpid(), signal.SIGKILL)
            case "zero" if rank == 0 and environment().restarts == self.restarts:
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
    if fault.moment in ("piece", "sum"):
        plant_in_step(fault)
    if (fault.moment, fault.what) == ("resumed", "unlisted"):
        load = torch.load
        torch.load = lambda *args, **kwargs: without_line(load(*args, **kwargs))
    elif fault.moment == "resumed":
        plant_wrong_resume(Checkpoint, fault.what)
    elif fault.moment == "trainers":
        plant_count(Checkpoint, keeps=fault.what == "keep")


def plant_in_step(fault: Fault) -> None:
    """Strike where no hook is: after a piece's passes, or when the sum of exact gradients is under way."""
    import torch
    import torch.distributed as dist

    from lockstep.callbacks import Checkpoint
    from lockstep.step.gradients import ExactGradientSum

    place: list[int] = []  # the steps that are complete, this rank, the number of ranks
    all_reduce = dist.all_reduce

    def note(callback: Any, trainer: Any, *args: Any) -> None:
        place[:] = trainer.global_step, trainer.global_rank, trainer.world_size

    def strike(*args: Any) -> None:
        if fault.is_now(fault.moment, place[0]):
            fault.strike(*place[1:])

    def reduce_and_strike(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        if place and tensor.dtype == torch.int64:
            strike()
        return work

    before(Checkpoint, "on_train_batch_start", note)
    if fault.moment == "piece":
        before(ExactGradientSum, "collect", strike)
    else:
        dist.all_reduce = reduce_and_strike


def plant_count(checkpoint: Any, keeps: bool) -> None:
    """Print at each start how many Trainers of before are alive in this process, and maybe keep them alive."""
    earlier: list[Any] = []
    alive: list[Any] = []

    def at_start(callback: Any, trainer: Any, module: Any) -> None:
        count = sum(each() is not None for each in earlier)
        print(f"{count} of {len(earlier)} earlier Trainers are alive", file=sys.stderr, flush=True)
        earlier.append(weakref.ref(trainer))
        alive.extend([trainer] * keeps)

    before(checkpoint, "on_train_start", at_start)


def without_line(checkpoint: Any) -> Any:
    """Take the ledger's line out of what a checkpoint file has."""
    return {key: value for key, value in checkpoint.items() if key != "ledger"}


def plant_wrong_resume(checkpoint: Any, what: str) -> None:
    """Make a start that resumes go on wrongly."""
    from lockstep.step.gradients import ExactGradientSum

    weights: list[Any] = []

    drops: list[bool] = []  # whether this rank drops its gradients, if that is decided

    def at_start(callback: Any, trainer: Any, module: Any) -> None:
        drops[:] = [trainer.global_step > 0 and trainer.global_rank == trainer.world_size - 1]
        if trainer.global_step and what == "skip":
            weights.extend(each.detach().clone() for each in module.parameters())
        elif trainer.global_step and what == "forget":
            for optimizer in trainer.optimizers:
                optimizer.state.clear()

    def after_a_step(callback: Any, trainer: Any, module: Any, *args: Any) -> None:
        drops.clear()
        for parameter, before_the_step in zip(module.parameters(), weights, strict=False):
            parameter.data.copy_(before_the_step)
        weights.clear()

    def without_samples(gradients: Any) -> None:
        for parameter in gradients.trained.values() if drops == [True] else ():
            parameter.grad.zero_()

    before(checkpoint, "on_train_start", at_start)
    if what == "without":
        before(ExactGradientSum, "collect", without_samples)
    before(checkpoint, "on_train_batch_end", after_a_step)


if __name__ == "__main__":
    if os.getpgrp() != FIRST:  # in a script: `kill` means this program, not the shell
        os.setpgrp()
    sys.path[0] = str(ROOT / "src")
    sys.argv[0] = str(ROOT / "src" / "train.py")
    if "FAULT" in os.environ:
        for number, text in enumerate(os.environ["FAULT"].split(",")):
            plant(Fault(text, number))
    runpy.run_path(sys.argv[0], run_name="__main__")
