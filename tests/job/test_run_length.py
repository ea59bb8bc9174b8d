"""max_steps and max_epochs: which of them ends a run; and how many devices `auto` means."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TINY, Program, composed, summary_of

from lockstep.config.check import check
from lockstep.config.run_length import run_length
from lockstep.errors import UserError
from lockstep.launch import machine

SAMPLES = 640  # ten steps an epoch


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ("", (200, 20, "max_epochs")),
        ("max_steps=1000", (1000, 100, "max_steps")),
        ("max_steps=15", (15, 2, "max_steps")),
        ("max_epochs=3", (30, 3, "max_epochs")),
        ("max_epochs=3 max_steps=1000", (30, 3, "max_epochs")),
        ("max_epochs=3 max_steps=12", (12, 2, "max_steps")),
        ("max_epochs=3 max_steps=null", (30, 3, "max_epochs")),
        ("experiment=mnist_cnn max_steps=5000 batch_size=64", (5000, 500, "max_steps")),
        ("experiment=mnist_cnn max_epochs=2 batch_size=64", (20, 2, "max_epochs")),
        ("debug=batch max_epochs=7", (1, 1, "max_steps")),
    ],
)
def test_the_length_that_is_set_is_what_is_trained(overrides: str, length: tuple[int, int, str]) -> None:
    words = overrides.split()
    made = check(composed(*words, "accelerator=cpu"), overridden=[each.partition("=")[0] for each in words])
    actual = run_length(made, SAMPLES)
    assert (actual.steps, actual.epochs, actual.ends_by) == length
    assert made.record["max_epochs"] == (None if "experiment" in overrides and made.max_steps else made.max_epochs)


def test_a_length_set_with_resume_replaces_the_runs(run_train: Program, tmp_path: Path) -> None:
    run_train(*TINY, "max_epochs=1", "callbacks.dashboard=null", "logger=none", f"hydra.run.dir={tmp_path}/run")
    steps = []
    for length in ("max_steps=130", "max_epochs=23"):
        run_train(f"resume={tmp_path}/run", length)
        steps.append((summary_of(tmp_path / "run")["steps"], summary_of(tmp_path / "run")["epochs"]))
    assert steps == [(130, 22), (23 * 6, 23)]  # an epoch that was cut short is counted


@pytest.mark.parametrize("words", ["auto", "-1"])
def test_all_devices(monkeypatch: pytest.MonkeyPatch, set_environment: Callable[..., None], words: str) -> None:
    def devices(*overrides: str) -> int:
        return check(composed(f"devices={words}", "batch_size=60", *overrides)).layout.devices

    monkeypatch.setattr(machine, "gpu_count", lambda: 3)
    assert devices() == 3
    assert devices("accelerator=cpu") == 1
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    assert devices() == 1
    set_environment(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    assert (devices(), devices("num_nodes=2")) == (2, 2), "those that the engine has started on each machine"


def test_a_choice_of_devices_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"devices=\[0, 1\]: must be a number of devices, or auto.*CUDA_VISIBLE_DEVICES"
    ):
        check(composed("devices=[0,1]"))
