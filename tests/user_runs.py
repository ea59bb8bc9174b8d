"""Runs of a user's own modules (user_modules.py) in a copy of the template; see conftest.py's fixture `project`."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conftest import Program, Run, checkpoint_of, summary_of

from lockstep.arithmetic.layout import resolve
from lockstep.arithmetic.order import DataOrder
from lockstep.data.build import open_data

DATA = {"samples": 90, "image_size": 12, "num_classes": 3, "val_fraction": 0.1}
TASK = (
    *("model=mine", "data=synthetic", *(f"data.{name}={value}" for name, value in DATA.items())),
    *("accelerator=cpu", "precision=64-true", "threads=1", "max_epochs=2"),
    *("batch_size=24", "pieces=6"),  # 81 samples: four steps an epoch, the last of 9, which 6 pieces share unevenly
    *("logger=none", "callbacks.console=null", "callbacks.dashboard=null"),
)
DDP, DP = (("strategy=" + name, "devices=2") for name in ("ddp", "dp"))
BOTH = ("strategy=ddp,dp", "devices=2")


def train(project: Path, outputs: Path, name: str, *overrides: str, cut: str = "", ok: bool = True) -> Run:
    """Return a run of the module `name`; `cut` names the signal that ends one derived from `Cut`."""
    program = Program(outputs, home=project)
    return program(*TASK, f"model._target_=mine.{name}", *overrides, env={"CUT": cut}, ok=ok)


def go_on(project: Path, run: Run, *overrides: str, ok: bool = True) -> Run:
    return Program(run.folder.parent, home=project)(f"resume={run.folder}", *overrides, ok=ok)


def jobs(project: Path, outputs: Path, names: str, *overrides: str) -> list[Run]:
    """Return the runs of a sweep over modules, `One,mine.Other`, or over what is overridden."""
    return [Run(0, "", "", folder) for folder in train(project, outputs, names, *overrides, "-m").jobs]


def must_refuse(project: Path, outputs: Path, options: tuple[str, ...], message: dict[str, str]) -> None:
    """Train modules in one sweep; each must be refused with its text."""
    modules = ",mine.".join(message)  # the first one's prefix: see `train`
    run = train(project, outputs, modules, *options, "-m", ok=False)
    assert run.returncode == 1, str(run)
    errors = [summary_of(job)["error"] for job in run.jobs]
    for error, text in zip(errors, message.values(), strict=True):
        assert text in error


def same_bits(*runs: Run) -> bool:
    return len({run.summary["weights_sha256"] for run in runs}) == 1


# --- by hand, in plain torch: no pieces, no Lightning, no step of ours ---


class Replica:
    """The network of `LitDigits` and its optimizer, as a loop by hand has them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        first, last = torch.nn.Linear(12 * 12, 16), torch.nn.Linear(16, 3)
        self.net = torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.ReLU(), last).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def gradient(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(self.net(x), y), list(self.net.parameters()))

    def apply(self, gradient: tuple[torch.Tensor, ...]) -> None:
        for parameter, value in zip(self.net.parameters(), gradient, strict=True):
            parameter.grad = value
        self.optimizer.step()


def batches(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the two epochs of a run with so many samples."""
    data = open_data({"_target_": "lockstep.vision.data.synthetic", **DATA, "samples": samples}, "data")
    on = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=24)
    order = DataOrder(len(data.train), on, 0)
    images = torch.stack([data.train[index][0] for index in range(len(data.train))]).double()
    x = (images / 255 - data.spec.mean[0]) / data.spec.std[0]
    y = torch.stack([data.train[index][1] for index in range(len(data.train))])
    ids = [torch.from_numpy(order.step(e, s)) for e in range(2) for s in range(order.steps_per_epoch)]
    return [(x[each], y[each]) for each in ids]


def same_as(folder: Path, net: torch.nn.Module, name: str = "last") -> bool:
    """Return whether a run's checkpoint has these weights."""
    actual = checkpoint_of(folder, name)["state_dict"]
    pairs = ((actual[f"net.{key}"], value) for key, value in net.state_dict().items())
    return all(torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in pairs)


# --- which samples a run has read -------------------------------------------------------------------------------------

RECORDED = "+callbacks.recorded._target_=mine.Records"


def recorded_pieces(folder: Path) -> list[dict[str, Any]]:
    """Return the pieces that the ranks of a run have computed, by step and piece: epoch, step, piece, device, ids."""
    files = sorted(folder.glob("pieces_*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["step"], row["piece"]))
