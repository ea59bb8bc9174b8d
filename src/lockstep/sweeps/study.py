"""An Optuna study that survives kills, is shared by processes, and draws the same trials again.

A trial's job number is the least that no living trial has, and what is drawn follows from the seed, that number and
the trials that have ended. So a trial that a kill has left behind is failed and its number drawn again: one after the
other, a study that was killed and continued makes the same trials as one that was not.
"""

from __future__ import annotations

import fcntl
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lockstep.sweeps.trial import open_storage, optuna


@dataclass
class Drawn:
    """A trial that this process runs."""

    trial: Any
    job: int
    params: dict[str, Any]
    running: IO[bytes]  # locked while it does


class Study:
    """Draws trials and takes their results down.

    Args:
        folder: the sweep's; locks lie there, and the study's file where `storage` names no other place.
        name: of the study in its storage.
        sweep: the checked `sweep` group.
        space: Optuna's distributions by parameter.
    """

    def __init__(self, folder: Path, name: str, sweep: Mapping[str, Any], space: Mapping[str, Any]) -> None:
        self.locks = folder / ".locks"
        self.locks.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self.sweep, self.space = folder, name, sweep, dict(space)
        self.url = sweep["storage"] or f"sqlite:///{folder / 'study.db'}"
        direction = {"max": "maximize", "min": "minimize"}[sweep["mode"]]
        with self.alone():
            self.study = optuna().create_study(
                study_name=name, storage=open_storage(self.url), direction=direction, load_if_exists=True
            )

    def draw(self) -> Drawn | None:
        """The next trial; None when enough are made or being made."""
        with self.alone():
            self._bury()
            living = self.living()
            if len(living) >= self.sweep["trials"]:
                return None
            job = min(set(range(len(living) + 1)) - {trial.user_attrs.get("job") for trial in living})
            sampler = optuna().samplers.TPESampler(seed=self.sweep["seed"] * 100_003 + job, multivariate=True)
            self.study.sampler = sampler
            trial = self.study.ask(self.space)
            running = open(self._lock(job), "wb")  # noqa: SIM115  closed when the trial has ended
            fcntl.flock(running, fcntl.LOCK_EX | fcntl.LOCK_NB)
            trial.set_user_attr("job", job)
            trial.set_user_attr("folder", str(self.folder / str(job)))
            return Drawn(trial, job, dict(trial.params), running)

    def ended(self, drawn: Drawn, summary: Mapping[str, Any]) -> None:
        """Takes down how a trial's run went. One that was asked to end will be drawn again."""
        state = optuna().trial.TrialState
        status, value = summary.get("status"), (summary.get("metrics") or {}).get(self.sweep["metric"])
        if status == "completed" and value is not None and math.isfinite(value):
            self.study.tell(drawn.trial.number, value)
        elif status == "pruned":
            self.study.tell(drawn.trial.number, state=state.PRUNED)
        else:
            if status != "interrupted":
                drawn.trial.set_user_attr("error", str(summary.get("error") or f"no {self.sweep['metric']}"))
            self.study.tell(drawn.trial.number, state=state.FAIL)
        fcntl.flock(drawn.running, fcntl.LOCK_UN)  # for jobs too that were forked meanwhile, and hold it open
        drawn.running.close()

    def living(self) -> list[Any]:
        """All trials but those that were left behind: they count, and are not drawn again."""
        failed = optuna().trial.TrialState.FAIL
        trials = self.study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state != failed or "error" in trial.user_attrs]

    def finished(self) -> list[Any]:
        return [trial for trial in self.living() if trial.state.is_finished()]

    def _bury(self) -> None:
        """Fails trials that nobody runs any more: a process that died holds no lock."""
        state = optuna().trial.TrialState
        for trial in self.study.get_trials(deepcopy=False, states=(state.RUNNING,)):
            folder = trial.user_attrs.get("folder")
            if folder is not None and Path(folder).parent != self.folder:
                continue  # another sweep's, whose locks are elsewhere
            if folder is None or self._free(trial.user_attrs["job"]):
                self.study.tell(trial.number, state=state.FAIL)

    def _lock(self, job: int) -> Path:
        return self.locks / str(job)

    def _free(self, job: int) -> bool:
        with open(self._lock(job), "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time, of those that share the folder."""
        with open(self.locks / "study", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
