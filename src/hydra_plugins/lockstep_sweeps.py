"""Where Hydra looks for plugins: how a sweep's jobs are run, and how a search draws them. It imports this file at every
start, so the work stands in `lockstep.sweeps`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class JobLauncher(Launcher):
    """Runs the jobs that Hydra's own sweeper lists."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.given = (config, hydra_context, task_function)
        HydraConfig.instance().set_config(config)  # where the sweep's folder is, should it be refused

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from lockstep.sweeps.grid import launch

        return launch(*self.given, job_overrides, initial_job_idx)


class OptunaSweeper(Sweeper):
    """Draws jobs with Optuna and runs them.

    Args:
        params: search space by key, in Hydra's syntax of sweeps; the command line wins.
    """

    def __init__(self, params: DictConfig | None = None) -> None:
        self.params = [f"{key!s}={value}" for key, value in (params or {}).items()]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.given = (config, hydra_context, task_function)

    def sweep(self, arguments: list[str]) -> Any:
        from lockstep.sweeps.search import search

        search(*self.given, [*self.params, *arguments])
