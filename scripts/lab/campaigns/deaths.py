"""Kill workers of runs with `survive=true` at random instants: the others go on, to the bits of an undisturbed run.

Half of the deaths come within a second of the one before, so in the middle of what the others do about it. A storm is
two runs whose workers die by the clock, with `survive=true` and without, to measure what a death costs.
"""

import json
import os
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from campaigns.campaign import END_SECONDS, HOUR, Campaign
from campaigns.processes import Process
from lightning.pytorch import Callback

from lockstep.launch.rendezvous import LOOPBACK, bind_socket

KILLED, STOPPED = "SIGKILL", "SIGSTOP"
CONTROL = ("+callbacks.control._target_=campaigns.deaths.WithoutSamples",)
HANG_TIMEOUT = 6.0  # seconds, in runs with workers that are stopped
SOON = 1.0  # seconds after a death
MOST = 6  # deaths in a run
WORKERS, PIECE_SECONDS = 4, 0.25  # of a storm
CALM = 20.0  # seconds of a storm before its first death. The rate of their steps is the reference
# What is more than a sum of gradients: masks, running statistics, an optimizer's state. The last step is a short one.
DROPOUT, ADAMW = "model.dropout=0.25", ("optimizer=adamw", "lr=0.003")
JOBS = {
    "dropout": [DROPOUT],
    "BatchNorm, AdamW, uneven pieces": ["model=fast_cnn", *ADAMW, "batch_size=60", "pieces=5"],
    "dropout, AdamW, bf16": [DROPOUT, *ADAMW, "precision=bf16-mixed"],
}


class Steps(Callback):
    """Records when steps are complete, and lets each piece take its time.

    Workers share the cores of one machine. A piece that sleeps is one that waits for an accelerator.

    Args:
        file: gets a line for each step.
        seconds: for which a piece sleeps.
        until: a file; as soon as it exists, nothing sleeps.
    """

    def __init__(self, file: str, seconds: float, until: str) -> None:
        self.file, self.seconds, self.until = Path(file), seconds, Path(until)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            pl_module.net.register_forward_hook(self._sleep)

    def _sleep(self, net: Any, inputs: Any, output: Any) -> None:
        if net.training and not self.until.exists():
            time.sleep(self.seconds)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.is_global_zero:
            with self.file.open("a") as file:
                file.write(json.dumps([time.time(), trainer.global_step]) + "\n")


class WithoutSamples(Callback):
    """A control: the first step that is done again lacks the samples of the last rank."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._drops = trainer.global_step > 0 and trainer.global_rank == trainer.world_size - 1
        pl_module.net.register_forward_hook(self._without_gradient)

    def _without_gradient(self, net: Any, inputs: Any, output: Any) -> Any:
        return 0 * output if self._drops and net.training else output

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._drops = False


class Deaths(Campaign):
    """Runs whose workers die, until so many have died.

    The control is `WithoutSamples`.

    Args:
        deaths: the number.
    """

    claim = "all ended bitwise equal in the processes that were left, nothing was left behind"

    def __init__(self, deaths: int, *common: Any) -> None:
        super().__init__(*common)
        self.deaths = deaths

    def go(self) -> None:
        self.undisturbed("strategy=auto", "devices=1")
        while len(self.struck) < self.deaths:
            self._run(self.home / f"run_{self.runs}")
            self.runs += 1

    def _run(self, home: Path) -> None:
        rng = self.rng
        devices, replaced = rng.choice((2, 3, 4)), rng.choice((0, MOST))
        left = min(MOST if replaced else devices - 1, self.deaths - len(self.struck))
        job = [f"outputs={home}", "strategy=ddp", f"devices={devices}", "survive=true", f"max_restarts={replaced}"]
        stops = rng.random() < 0.2
        job += [f"num_workers={rng.choice((0, 0, 1))}", *([f"hang_timeout={HANG_TIMEOUT}"] if stops else [])]
        job += CONTROL * self.control
        before = len(self.problems)
        with closing(Process([*self.job, *job])) as process:
            process.wait(HOUR, lambda: len(process.ranks()) == devices)
            struck: list[str] = []
            while left and process.code is None:
                soon = struck and rng.random() < 0.5
                process.wait(rng.uniform(0, SOON if soon else max(1.0, self.seconds)))
                if process.code is None and (ranks := process.ranks()):
                    kind = STOPPED if stops and not struck else KILLED
                    number = rng.randrange(len(ranks))
                    process.strike(getattr(signal, kind), ranks[number])
                    struck.append(f"{kind} of worker {number} of {len(ranks)} after {process.age:.2f} s")
                    self.struck.append(kind)
                    left -= 1
            process.wait(120 + 10 * self.seconds)
            self.check_process(process, 0)
            if process.code == 0:
                folders = [*home.glob("*/*")]
                if len(folders) != 1:
                    self.problem(f"stray folders: {', '.join(map(str, folders))}", process)
                self.check_end(folders[0], process)
            as_it_was = "as" if len(self.problems) == before else "NOT as"
            self.print_line(f"{devices} workers", *struck, f"ends with {process.code}, {as_it_was} the undisturbed run")


class EngineDeaths(Deaths):
    """The same in workers that no parent of ours has started: each is a program with variables as of an engine.

    They die from the moment at which the first of them writes its log, which is after they have met, or has saved.
    """

    claim = "all ended bitwise equal in the workers that were left, nothing was left behind"

    def _run(self, home: Path) -> None:
        rng = self.rng
        count = rng.choice((2, 3, 4))
        left = min(count - 1, self.deaths - len(self.struck))
        job = [*self.job, f"outputs={home}", "strategy=ddp", "survive=true", f"num_workers={rng.choice((0, 0, 1))}"]
        job += CONTROL * self.control
        before = len(self.problems)
        with ExitStack() as stack:
            alive = [stack.enter_context(closing(each)) for each in _as_by_an_engine(count, job)]
            first = alive[0]
            begun = rng.choice(("train.log", "checkpoints/last.ckpt"))
            first.wait(HOUR, lambda: [*home.glob(f"*/*/{begun}")])
            struck: list[str] = []
            while left and all(each.code is None for each in alive):
                soon = struck and rng.random() < 0.5
                alive[-1].wait(rng.uniform(0, SOON if soon else max(1.0, self.seconds)))
                if all(each.code is None for each in alive):
                    number = rng.randrange(len(alive))
                    victim = alive.pop(number)
                    victim.strike(signal.SIGKILL, victim.pid)
                    struck.append(f"{KILLED} of worker {number} of {len(alive) + 1} after {victim.age:.2f} s")
                    self.struck.append(KILLED)
                    left -= 1
            for each in alive:
                each.wait(120 + 10 * self.seconds)
                self.check_process(each, 0)
            if first.kill_remaining(END_SECONDS):
                self.problem("a process of the first worker is left behind", first)
            folders = [*home.glob("*/*")]
            if len(folders) != 1:
                self.problem(f"stray folders: {', '.join(map(str, folders))}", alive[0])
            self.check_end(folders[0], alive[0])
            as_it_was = "as" if len(self.problems) == before else "NOT as"
            resumed = [line for each in alive for line in each.text.splitlines() if line.startswith("resumes after")]
            self.print_line(f"{count} workers", *struck, *resumed, f"{as_it_was} the undisturbed run")


def _as_by_an_engine(count: int, job: list[str]) -> list[Process]:
    """Start a program for each worker, with the variables of `env://`."""
    with bind_socket(LOOPBACK) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(count):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        processes.append(Process(job))
    for name in place:
        del os.environ[name]
    return processes


class DeathStorm(Campaign):
    """Two runs of which a random worker is killed every few seconds, with `survive=true` and without.

    A new worker replaces each dead one. Goodput is useful steps a second, as a share of those before the first death.
    The control is `WithoutSamples`.

    Args:
        deaths: in each run.
        every: seconds between two of them.
    """

    claim = "all ended bitwise equal"

    def __init__(self, deaths: int, every: float, *common: Any) -> None:
        super().__init__(*common)
        self.deaths, self.every = deaths, every

    def go(self) -> None:
        self.undisturbed("strategy=auto", "devices=1")
        for survive in ("false", "true"):
            self._blow(survive)
            self.runs += 1

    def _blow(self, survive: str) -> None:
        home = self.home / f"survive_{survive}"
        home.mkdir()
        file, until = home / "steps.jsonl", home / "until"
        pace = f"{{_target_:campaigns.deaths.Steps,file:{file},seconds:{PIECE_SECONDS},until:{until}}}"
        job = [f"outputs={home / 'runs'}", "strategy=ddp", f"devices={WORKERS}", f"survive={survive}"]
        job += [f"max_restarts={self.deaths}", "checkpoint_every=2", f"+callbacks.pace={pace}", *CONTROL * self.control]
        with closing(Process([*self.job, *job])) as process:
            process.wait(HOUR, file.exists)
            process.wait(CALM)
            began = time.time()
            for _ in range(self.deaths):
                process.wait(HOUR, lambda: len(process.ranks()) == WORKERS)
                process.strike(signal.SIGKILL, self.rng.choice(process.ranks()))
                self.struck.append(KILLED)
                process.wait(self.every)
            steps = [json.loads(line) for line in file.read_text().splitlines()]
            until.touch()
            if process.code is not None:
                self.problem("the run ended before the storm: give it more max_epochs", process)
            process.wait(HOUR)
            self.check_process(process, 0)
            (folder,) = (home / "runs").glob("*/*")
            self.check_end(folder, process)
        calm = [(moment, step) for moment, step in steps if moment <= began]
        rate = (calm[-1][1] - calm[0][1]) / (calm[-1][0] - calm[0][0])
        seconds = self.deaths * self.every
        share = (max(step for _, step in steps) - calm[-1][1]) / rate / seconds
        lost = (1 - share) * self.every
        figures = f"goodput {share:.2f}", f"{lost:.2f} s lost per death", f"{rate:.2f} steps/s before"
        self.print_line(f"survive={survive}", *figures)
