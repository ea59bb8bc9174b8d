"""Hydra's plugins of Lockstep: the jobs of a sweep, and what starts them.

Hydra finds plugins in this package only and imports it at every start, so the code is in `lockstep.commands.sweeps`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus


class CheckedSweeper(BasicSweeper):
    """Hydra's own sweeper, which checks all jobs before a launcher, of whatever kind, starts the first one."""

    def sweep(self, arguments: list[str]) -> Any:
        from lockstep.commands.cli import BAD_INPUT
        from lockstep.commands.sweeps import check_jobs, report_jobs
        from lockstep.job.run_folder import FolderBusy, lock_folder, remove_refused_folder
        from lockstep.launch.environment import environment

        assert self.config is not None
        assert self.hydra_context is not None
        HydraConfig.instance().set_config(self.config)  # the checks read the overrides there; Hydra 1.4 sets it itself
        folder = Path(self.config.hydra.sweep.dir)
        try:
            with lock_folder(folder, environment().rank == 0):
                arguments = check_jobs(self.config, self.hydra_context, arguments)
                with report_jobs(folder, self.config):
                    return super().sweep(arguments)
        except BAD_INPUT as refused:
            if environment().rank == 0 and not isinstance(refused, FolderBusy):
                remove_refused_folder(folder)
            raise


class JobLauncher(BasicLauncher):
    """Runs each job as Hydra's own launcher does, in a process and on devices of its own."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from lockstep.commands.sweeps import SweepJob, jobs_of, launch

        assert self.config is not None

        def run(job: SweepJob) -> None:
            (done,) = BasicLauncher.launch(self, [job.overrides], job.number)
            if done.status is JobStatus.FAILED:
                raise done._return_value  # `return_value` would print before it raises

        launch(self.config, jobs_of(self.config, job_overrides, initial_job_idx), run)
        return [JobReturn(status=JobStatus.COMPLETED) for _ in job_overrides]
