"""On a GPU that is not there: no line of the template waits for it, and no constant is on the CPU."""

import inspect
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_data import TASK_ROWS
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lockstep.commands.api import compose
from lockstep.config.check import check
from lockstep.data import StepData
from lockstep.data.build import open_data
from lockstep.job.build import make_module
from lockstep.testing.fake_gpu import DEVICE, ON_CPU, WAITS, fake_gpu, faults_of_steps, move
from lockstep.vision.class_weights import ClassWeights
from lockstep.vision.models import SmallCNN

DATA = ("data=synthetic", "data.samples=100", "data.num_classes=12", "data.image_size=12")
AUGMENTED = "data.augment={crop:2,flip:true,fill:reflect}"
NETS = {
    "small_cnn": ("model=small_cnn", *DATA, AUGMENTED, "model.dropout=0.3"),
    "fast_cnn": ("model=fast_cnn", *DATA, "data.image_size=20", "model.width=[4,4,8,8]", "model.label_smoothing=0.1"),
    "resnet9": ("model=resnet9", *DATA, "model.width=[4,4,8,8]", "data.mix=mixup"),
    "cutmix": ("model=resnet9", *DATA, "model.width=[4,4,8,8]", "data.mix=cutmix"),
    "small_resnet18": ("model=small_resnet18", *DATA, "model.norm=group"),
    "torchvision": ("model=torchvision", "model.arch=mobilenet_v3_small", *DATA, "data.image_size=33"),
    **{name: (*row, "data.samples=110", AUGMENTED) for name, row in TASK_ROWS.items()},
}


def faults(*overrides: str, **changes: Any) -> dict[str, str]:
    config = check(compose(*overrides, "accelerator=cpu", "strategy=auto"))
    splits = open_data(config.data, config.data_dir, config.seed)
    module = changes.get("module") or make_module(config, splits)
    return faults_of_steps(module, StepData(splits, config.layout, config.seed), splits, copies=True).faults


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("name", NETS)
def test_no_line_of_the_template_waits_or_has_a_constant_on_the_cpu(name: str) -> None:
    assert faults(*NETS[name]) == {}


def test_class_weights_are_not_waited_for() -> None:
    weights = ClassWeights([1, 2, 5], 3)
    labels = np.array([0, 1, 2, 1])
    data = SimpleNamespace(labels=labels, labels_of_step=lambda batch: labels)
    trainer: Any = SimpleNamespace(datamodule=data)
    weights.setup(trainer, nn.Module(), "fit")  # type: ignore[arg-type]
    with fake_gpu(copies=True) as gpu:
        weights.on_train_batch_start(trainer, SimpleNamespace(device=DEVICE), None, 0)  # type: ignore[arg-type]
        losses = weights(torch.zeros(4, device=DEVICE), torch.zeros(4, dtype=torch.long, device=DEVICE))
        assert losses.device == DEVICE
    assert gpu.faults == {}


# --- controls ---------------------------------------------------------------------------------------------------------


class Planted(SmallCNN):
    def __init__(self, fault: str) -> None:
        super().__init__(channels=1, image_size=12, num_classes=12)
        self.fault, self.constant = fault, torch.ones(12)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = super().training_step(batch, batch_idx)["loss"]
        match self.fault:
            case "item":
                loss.item()
            case "float":
                float(loss)
            case "if":
                assert loss >= 0
            case "cpu":
                loss.cpu()
            case "mask":
                batch[0][batch[0] > 0].sum()
            case "constant":
                return (self(batch[0]) + self.constant).sum()
            case "new":
                return (self(batch[0]) + torch.ones(12)).sum()
            case "copy":
                self.constant.to(self.device)
        return loss


LINES, FIRST = inspect.getsourcelines(Planted)


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize(
    ("fault", "kind", "line"),
    [
        ("item", WAITS, "loss.item()"),
        ("float", WAITS, "float(loss)"),
        ("if", WAITS, "assert loss >= 0"),
        ("cpu", WAITS, "loss.cpu()"),
        ("mask", WAITS, "batch[0][batch[0] > 0]"),
        ("copy", WAITS, "self.constant.to(self.device)"),
        ("constant", ON_CPU, "+ self.constant)"),
        ("new", ON_CPU, "+ torch.ones(12)"),
    ],
)
def test_a_planted_fault_is_detected_with_its_line(fault: str, kind: str, line: str) -> None:
    number = next(FIRST + at for at, text in enumerate(LINES) if line in text)
    assert faults(*NETS["small_cnn"], module=Planted(fault)) == {f"tests/testing/test_fake_gpu.py:{number}": kind}


def test_what_stays_on_the_cpu_and_numbers_of_no_dimension_are_no_fault() -> None:
    with fake_gpu(copies=True) as gpu, gpu.recorded():
        x = torch.zeros(3, device=DEVICE)
        counts = torch.arange(3)
        assert int(counts.sum()) == 3
        assert (x * torch.tensor(2.0)).device == DEVICE
        assert counts.tolist() == [0, 1, 2]
        assert (x + torch.full((3,), 2.0, device=DEVICE)).sum().device == DEVICE
    assert gpu.faults == {}


def test_what_torchmetrics_reads_to_check_its_input_counts_in_training_only() -> None:
    metric = MulticlassAccuracy(3)
    with fake_gpu() as gpu:
        move(metric)
        gpu.ignored = "torchmetrics"
        with gpu.recorded():
            metric(torch.zeros(4, 3, device=DEVICE), torch.zeros(4, dtype=torch.long, device=DEVICE))
        assert gpu.faults == {}
        gpu.ignored = ""
        with gpu.recorded():
            metric(torch.zeros(4, 3, device=DEVICE), torch.zeros(4, dtype=torch.long, device=DEVICE))
    assert [*gpu.faults.values()] == [WAITS]
    assert re.fullmatch(r"tests/testing/test_fake_gpu.py:\d+", next(iter(gpu.faults)))
