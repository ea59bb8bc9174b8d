"""Record the steps of a run of Lockstep from inside, in the workers of its own layout: no other program is started."""

import base64
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from lockstep import trace
from lockstep.errors import WorkerFailed
from lockstep.programs.sameness.recorded import Run, read_processes


class Ended(Exception):
    """The last step that was asked for is done."""


class Record(pl.Callback):
    """Records the steps of a run into a folder. `read_run` reads them.

    Args:
        folder: the folder for the recorder's files.
        steps: steps to record, from where training starts.
        flip: of each weight, the last bit of every so manyth element is flipped before the first step; 0: none.
        ends: whether the run ends after them, with `Ended`.
    """

    changes_weights = False

    def __init__(self, folder: str, steps: int, flip: int = 0, ends: bool = False) -> None:
        self.variables = {
            "LOCKSTEP_TRACE": folder,
            "LOCKSTEP_TRACE_STEPS": str(steps),
            "LOCKSTEP_TRACE_FLIP": str(flip),
        }
        self.ends = ends
        self.recorder: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.recorder = InTraining(torch, self.variables, trainer, pl_module)
        with self.recorder.recording():
            self.recorder.meet(pl_module)
        trace.attach(self.recorder)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.recorder.ids = [each.ids for each in batch.micro_batches]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.recorder.end_step()
        if self.ends and self.recorder.over:
            raise Ended


class InTraining(trace.Recorder):
    """The recorder in a run whose processes may each have a part of the tensors: rank zero records them whole."""

    def __init__(self, torch: Any, variables: dict[str, str], trainer: Any, module: Any) -> None:
        super().__init__(torch, variables)
        self.strategy, self.module, self.precision = trainer.strategy, module, trainer.precision
        self.ids: list[Any] = []  # of the samples of this process's micro-batches in the step under way
        self.taken: tuple[Any, ...] | None = None  # the step that the optimizer has taken

    def top(self, module: Any) -> Any:
        return self.module

    def computes_in(self) -> str | None:
        return {"bf16-mixed": "bfloat16", "16-mixed": "float16"}.get(str(self.precision))

    def values(self, named: Any) -> dict[str, trace.Value]:
        parts = {name: self.strategy.local_part(value) for name, value in named.items()}
        return self.whole_values(self.strategy.gather_dicts(parts))

    def whole_values(self, named: Any) -> dict[str, trace.Value]:
        return super().values(named) if self.strategy.is_global_zero else {}

    def buffers(self) -> dict[str, trace.Value]:
        state = self.strategy.lightning_module_state_dict()  # each process calls it
        names = [name for name, _ in self.module.named_buffers() if name in state]
        return self.whole_values({name: state[name] for name in names})

    def parameters(self, root: Any) -> dict[str, Any]:
        return {name: value for name, value in super().parameters(root).items() if self.strategy.holds(value)}

    def named(self, optimizer: Any) -> dict[str, Any]:
        return self.parameters(self.module)

    def after_backward(self) -> None:
        """Record a pass, if it is not one that has no effect, for other processes.

        Its samples are known by their numbers: `training_step` may have added noise before the network gets them.
        """
        passes, number = [*self.now["passes"]], len(self.now["norms"]) - 1
        super().after_backward()
        if number >= len(self.ids):
            self.now |= {"passes": passes, "losses": self.now["losses"][: len(self.ids)]}
            return
        ids = np.asarray(self.ids[number], dtype="<i8")
        packed = base64.b64encode(ids.tobytes()).decode()
        for each in self.now["passes"][len(passes) :]:
            if len(each.get("samples", "")) == len(packed):  # as many samples
                each["samples"] = packed

    def after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if self.stepping is optimizer:
            self.taken = optimizer, arguments, options

    def end_step(self) -> None:
        """Record the step, when each process has the new weights."""
        if self.taken is not None:
            taken, self.taken = self.taken, None
            super().after_step(*taken)


def read_run(folder: Path) -> Run:
    """Return a run that `Record` has recorded.

    Raises:
        WorkerFailed: the recorder failed, or recorded no step.
    """
    processes = read_processes(folder)
    errors = [str(line["error"]) for lines in processes for line in lines if "error" in line]
    if errors or not any("step" in line for lines in processes for line in lines):
        raise WorkerFailed(
            f"steps can't be recorded: {' '.join(errors[0].split())[-300:] if errors else 'none was taken'}"
        )
    return Run.of([lines for lines in processes if any("step" in line for line in lines)])
