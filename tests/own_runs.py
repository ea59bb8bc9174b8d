"""Runs of a user's own modules (own_modules.py) in a copy of the template; see conftest.py's fixture `project`."""

from __future__ import annotations

from pathlib import Path

from conftest import Program, Run

DATA = {"samples": 90, "image_size": 12, "num_classes": 3, "val_fraction": 0.1}
TASK = (
    "model=mine",
    "data=synthetic",
    *(f"data.{name}={value}" for name, value in DATA.items()),
    "accelerator=cpu",
    "batch_size=24",  # 81 samples: four steps an epoch, the last of 9, which 6 pieces share unevenly
    "pieces=6",
    "max_epochs=2",
    "precision=64-true",
    "logger=none",
    "callbacks.console=null",
    "callbacks.dashboard=null",
)
DDP, DP, PIPELINE = (("strategy=" + name, "devices=2") for name in ("ddp", "dp", "pipeline"))
LAYOUTS = {"one": ("devices=1",), "ddp": DDP, "dp": DP}


def train(project: Path, outputs: Path, name: str, *overrides: str, cut: str = "", ok: bool = True) -> Run:
    """A run of the module `name`; `cut` names the signal that ends one derived from `Cut`."""
    program = Program(outputs, str(project / "src" / "train.py"))
    return program(*TASK, f"model._target_=mine.{name}", *overrides, cwd=project, env={"CUT": cut}, ok=ok)


def go_on(project: Path, run: Run, *overrides: str, ok: bool = True) -> Run:
    program = Program(run.folder.parent, str(project / "src" / "train.py"))
    return program(f"resume={run.folder}", *overrides, cwd=project, ok=ok)


def same_bits(*runs: Run) -> bool:
    return len({run.summary["weights_sha256"] for run in runs}) == 1
