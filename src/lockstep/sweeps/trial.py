"""A trial as its run sees it: what it reports to the study, and whether the study wants it to end."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.arithmetic.layout import Refusal

TRIAL = "LOCKSTEP_TRIAL"  # what a run that a search has started is told by its environment


def optuna() -> Any:
    """The library, quiet.

    Raises:
        Refusal: it is not installed.
    """
    try:
        import optuna as found
    except ImportError:
        raise Refusal("a search needs Optuna: pip install optuna (the project's extra `search`)") from None
    found.logging.set_verbosity(found.logging.WARNING)
    warnings.filterwarnings("ignore", category=found.exceptions.ExperimentalWarning)
    return found


def open_storage(url: str) -> Any:
    """Optuna's storage at `url`. SQLite waits for other writers.

    Raises:
        Refusal: it can't be opened.
    """
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    try:
        return optuna().storages.RDBStorage(url, engine_kwargs=options)
    except Exception as error:  # of SQLAlchemy, or of a driver
        raise Refusal(f"sweep.storage={url}: can't be opened ({' '.join(str(error).split())[:120]})") from error


def make_pruner(name: str) -> Any:
    """The first validation is left out: it says more about the warm-up than about the end."""
    pruners = optuna().pruners
    return pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2) if name == "median" else pruners.NopPruner()


@dataclass
class Trial:
    """A trial as its run sees it, in another process."""

    storage: str
    study: str
    number: int
    metric: str
    prune: str

    def __post_init__(self) -> None:
        self._open: Any = None

    def environment(self) -> dict[str, str]:
        return {TRIAL: json.dumps(asdict(self))}

    def report(self, step: int, value: float) -> None:
        """Tells the study the value at a validation, counted from 1."""
        _, storage, trial = self._opened()
        storage.set_trial_intermediate_value(trial, step, value)

    def behind(self, step: int, value: float) -> bool:
        """Reports, and asks whether the trial should end."""
        self.report(step, value)
        study, storage, trial = self._opened()
        return bool(study.pruner.prune(study, storage.get_trial(trial)))

    def _opened(self) -> tuple[Any, Any, int]:
        if self._open is None:
            storage = open_storage(self.storage)
            study = optuna().load_study(study_name=self.study, storage=storage, pruner=make_pruner(self.prune))
            of = storage.get_study_id_from_name(self.study)
            self._open = study, storage, storage.get_trial_id_from_study_id_trial_number(of, self.number)
        return self._open
