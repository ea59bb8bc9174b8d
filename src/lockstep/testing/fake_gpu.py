"""A GPU that is not there: tensors on it have a shape, dtype and device, but no numbers.

It finds, on any machine, the lines for which the host would wait for a GPU, and tensors that were left on the CPU. What
touches only tensors of the CPU is computed as usual. Backward passes do not run on it.

The private names of torch here are used in this file only; tests/testing/test_fake_gpu.py fails when they change.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lockstep.data import Splits, StepData
from lockstep.data.datasets import fetch
from lockstep.lightning.hooks import overrides_method
from lockstep.step.batch import MicroBatch

DEVICE = torch.device("cuda:0")
WAITS, ON_CPU = "waits", "on_cpu"  # kinds of faults
UNKNOWN = (DynamicOutputShapeException, DataDependentOutputException)  # what only the GPU's numbers could tell
SAMPLES = 8  # of the batch that is tried
MIXED = ("to be on the same device", "found two different devices", "at least two devices")  # in torch's error
Line = tuple[str, int]


class FakeGPU(TorchDispatchMode):
    """Records which lines a GPU would be waited for, and which mix devices.

    Attributes:
        faults: the kind of fault of each line, by `src/project/mine.py:12`.
        copies: whether a copy to the GPU that is not asynchronous is a fault, too.
        ignored: the name of a library whose reads are no faults; "" for none.
    """

    def __init__(self, copies: bool = False) -> None:
        super().__init__()
        self.faults: dict[str, str] = {}
        self.copies = copies
        self.ignored = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, and record whether the host waits for its result."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if DEVICE not in leaves and not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            with _disable_current_modes():
                return func(*args, **kwargs)
        name = func.overloadpacket._qualified_op_name
        if name in ("aten::equal", "aten::is_nonzero"):
            return self._read(True)
        if name in ("aten::item", "aten::_local_scalar_dense"):
            return self._read(torch.ones((), dtype=args[0].dtype))
        if name == "aten::_to_copy":
            self._copy(args[0], kwargs.get("device") or args[0].device, kwargs.get("non_blocking"))
        elif name == "aten::copy_":
            self._copy(args[1], args[0].device, args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        try:
            return func(*args, **kwargs)
        except UNKNOWN:
            self._add(WAITS)
            raise

    def _read(self, value: Any) -> Any:
        """Record that the host reads a number, and return any."""
        self._add(WAITS)
        with _disable_current_modes():
            return value.item() if isinstance(value, Tensor) else value

    def _copy(self, source: Tensor, target: torch.device, is_asynchronous: bool | None) -> None:
        leaves_gpu = source.device.type == "cuda" and target.type == "cpu"
        if not is_asynchronous and (leaves_gpu or (self.copies and source.device.type != target.type)):
            self._add(WAITS)

    def _add(self, kind: str) -> None:
        lines = list(_frames(sys._getframe(2)))
        if not self.ignored or not any(_library(file) == self.ignored for file, _ in lines):
            self.faults.setdefault(_user_line(lines), kind)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record errors about tensors of two devices, or about shapes that only the GPU knows; they end the block."""
        try:
            yield
        except UNKNOWN:
            pass
        except Exception as error:
            if not any(text in str(error) for text in MIXED):
                raise
            self.faults.setdefault(_user_line(list(_trace(error.__traceback__))[::-1]), ON_CPU)


@contextmanager
def fake_gpu(copies: bool = False) -> Iterator[FakeGPU]:
    """Give this process a GPU without numbers inside the `with` block: `torch.zeros(3, device=DEVICE)`.

    Args:
        copies: see `FakeGPU`.
    """
    was_initialized = torch.cuda._initialized
    torch.cuda._initialized = True  # else torch would look for a driver
    gpu = FakeGPU(copies)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), gpu:
            yield gpu
    finally:
        torch.cuda._initialized = was_initialized


def move(module: nn.Module) -> None:
    """Move a module to the GPU of `fake_gpu`, in place. Its numbers are lost."""
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        module.to(DEVICE, non_blocking=True)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


def moved(batch: Any) -> Any:
    """Return a batch with its tensors on the GPU of `fake_gpu`."""
    return apply_to_collection(batch, Tensor, lambda tensor: tensor.to(DEVICE, non_blocking=True))


def faults_of_steps(module: pl.LightningModule, data: StepData, splits: Splits, copies: bool = False) -> FakeGPU:
    """Prepare a batch of each split and call the module's steps with it, on a GPU that is not there.

    Args:
        module: the module, which is moved there.
        data: its data module, as it is before a run.
        splits: the data sets of `data`.
        copies: see `FakeGPU`.

    Returns:
        What was found. In evaluation, what torchmetrics reads to check its input is no fault.
    """
    trainer: Any = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    module.trainer = data.trainer = trainer
    module.log = module.log_dict = lambda *args, **options: None  # type: ignore[method-assign, assignment]
    ids = np.arange(min(SAMPLES, len(splits.train)))
    train = fetch(splits.train, ids), splits.augment.random_numbers(0, 0, ids)
    others = {
        name: fetch(getattr(splits, part), np.arange(min(SAMPLES, len(getattr(splits, part)))))
        for name, part in (("validation_step", "val"), ("test_step", "test"), ("predict_step", "test"))
        if getattr(splits, part) is not None and overrides_method(module, name, pl.LightningModule)
    }
    with fake_gpu(copies) as gpu:
        move(module)
        data._parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
        with gpu.recorded():
            micro_batch = MicroBatch(ids, 0, 0, np.zeros_like(ids), *moved(train))
            batch = data.prepare(micro_batch)
            batch = data.mix(batch) if data.mixes else batch
            batch = module.on_after_batch_transfer(batch, 0)
            call(module.train().training_step, batch)
        gpu.ignored = "torchmetrics"
        for name, batch in others.items():
            with gpu.recorded(), torch.no_grad():
                batch = data.on_after_batch_transfer(moved(batch), 0)
                call(getattr(module.eval(), name), batch)
    return gpu


def call(step: Callable[..., Any], batch: Any) -> None:
    """Call a step of a module, with the number of the batch if it takes one."""
    step(batch, *(0,) * (len(inspect.signature(step).parameters) > 1))


# --- lines ---


def _frames(frame: FrameType | None) -> Iterator[Line]:
    """Yield the lines that are being executed, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _trace(trace: TracebackType | None) -> Iterator[Line]:
    """Yield the lines of a traceback, the outermost first."""
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _library(file: str) -> str:
    """Return the name of the installed package of a file; "" if it is in none."""
    parts = Path(file).parts
    return parts[parts.index("site-packages") + 1] if "site-packages" in parts else ""


def _user_line(lines: list[Line]) -> str:
    """Return the innermost line that is none of this file or of an installed package, `file:line`."""
    users = [line for line in lines if line[0] != __file__ and not _library(line[0]) and "/lib/python" not in line[0]]
    file, number = (users or lines)[0]
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{number}"
