"""The judge in a run: it tries the pieces of the first step, and refuses or names what it finds."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lockstep.errors import StepRefused
from lockstep.guards.check import MEANS, Finding, Piece, check
from lockstep.step.batch import MicroBatch, copied
from lockstep.step.hook import StepHook
from lockstep.step.step import Step
from lockstep.step.strategy import proxy
from lockstep.step.trial import Saved, trial_passes

LOG = logging.getLogger("lockstep")
FILE = "findings.json"


class FirstStepCheck(StepHook):
    """Check before a new run's first step what a module must respect so that its steps can be cut into pieces.

    A run that continues from a checkpoint is not checked, nor is a process without a sample, nor a network whose passes
    communicate (stages, SyncBatchNorm, fsdp with reshard), nor, as a line says, a run that `lockstep same` records.

    Args:
        compiled: whether torch compiles the networks. These passes run them uncompiled.

    Attributes:
        findings: what was found, where it is collected instead of refused or named; see `CollectFindings`.
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.findings: list[Finding] | None = None
        self._done = False

    def before_step(self, step: Step) -> None:
        """Run the trial passes before step 0.

        Raises:
            StepRefused: the module breaks one of the rules.
        """
        if self._done or step.number:
            return
        self._done = True
        if os.environ.get(
            "LOCKSTEP_TRACE"
        ):  # the recorder may flip bits in a first pass, which a trial pass would restore
            if step.trainer.is_global_zero:
                LOG.warning("the steps are recorded for lockstep same, so the first one is not checked")
            return
        if step.strategy.passes_communicate():
            LOG.debug("the first step is not checked, since a pass needs other processes")
            return
        layout, findings = step.data.layout, []
        with step.strategy.whole_weights():  # every process enters it, also one without a sample
            if pieces := [StepPiece(step, each, self.compiled) for each in step.batch.micro_batches[:MEANS]]:
                findings = check(step.module, pieces, exact=bool(layout.exact), several=layout.pieces > 1)
        if self.findings is not None:
            self.findings += findings
            return
        for finding in findings:
            if finding.is_refused(bool(layout.exact)):
                raise StepRefused("exact=true: " * (finding.refused == "exact") + finding.text)
            if step.trainer.is_global_zero:
                LOG.warning(finding.text)


class StepPiece(Piece):
    """A piece of a step, computed as the step computes it.

    Args:
        step: the step.
        micro_batch: the piece.
        compiled: see `FirstStepCheck`.
    """

    def __init__(self, step: Step, micro_batch: MicroBatch, compiled: bool) -> None:
        self.step, self.micro_batch, self.compiled = step, micro_batch, compiled
        self.module, self.number, self.size = step.module, micro_batch.piece, micro_batch.size
        self.half = "16" in str(step.trainer.precision)

    def trial_passes(self) -> AbstractContextManager[Saved]:
        """Return the context of passes that leave no trace."""
        return trial_passes(self.module, self.step.trainer, self.compiled)

    def prepared(self) -> Any:
        """Return the batch for `training_step`."""
        return self.step.prepared(replace(self.micro_batch, batch=copied(self.micro_batch.batch)))

    def compute(self, batch: Any, number: int | None = None, graph: bool = False) -> tuple[Tensor, float | None]:
        """Return the loss of some samples, and the weight beside it."""
        number = self.number if number is None else number
        loss, numbers, _ = self.step.training_step(batch, replace(self.micro_batch, piece=number))
        weight = float(numbers["weight"]) * self.size if "weight" in numbers else None
        return (loss if graph else numbers["loss"]), weight

    @contextmanager
    def on_other_rank(self) -> Iterator[None]:
        """Return a context in which the module's trainer is that of another rank."""
        trainer = self.module.trainer
        self.module.trainer = proxy(trainer, OtherRank)
        try:
            yield
        finally:
            self.module.trainer = trainer


class OtherRank:
    """Properties for `proxy`: those of a trainer on another rank."""

    strategy: Any

    @property
    def global_rank(self) -> int:
        """A number that is not this process's."""
        return int(self.strategy.global_rank) + 1

    local_rank = global_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether it is rank zero."""
        return not self.strategy.is_global_zero


class CollectFindings(pl.Callback):
    """Writes what the first step's check finds into FILE of the run's folder; nothing is refused."""

    changes_weights = False  # so the record of settings that affect the weights leaves this callback out

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Let the check collect."""
        for hook in trainer.fit_loop.epoch_loop.passes.hooks:
            if isinstance(hook, FirstStepCheck):
                hook.findings = self.findings

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write what was found, after the first step."""
        if trainer.global_step == 1 and trainer.is_global_zero:
            Path(trainer.default_root_dir, FILE).write_text(json.dumps([asdict(each) for each in self.findings]))


def read_findings(folder: Path) -> Sequence[Finding]:
    """Return what `CollectFindings` has written in a run's folder."""
    return [Finding(**each) for each in json.loads((folder / FILE).read_text())]
