"""How Hydra runs a sweep's jobs. Hydra takes plugins of this package only, and imports it at every start, so the work
stands in `lockstep.sweeps`."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class JobLauncher(Launcher):
    """Runs the jobs that Hydra's own sweeper lists."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.given = (config, hydra_context, task_function)
        HydraConfig.instance().set_config(config)  # where the sweep's folder is, should it be refused
        from lockstep.launch.meeting import keeps_run
        from lockstep.run.lock import locked

        self.lock = ExitStack()  # until the sweep ends: before it has written anything to its folder
        self.lock.enter_context(locked(Path(config.hydra.sweep.dir), keeps_run(config.num_nodes, config.rdzv_endpoint)))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from lockstep.sweeps.grid import launch

        return launch(*self.given, job_overrides, initial_job_idx)
