"""callbacks=ema: an average of the weights is what is validated, kept, tested and named."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NORMS, Program, checkpoint_of, wait_for, workers_of

from lockstep.callbacks import EMA
from lockstep.run.summary import weights_sha256

TASK = (*NORMS, "max_epochs=3")
OURS = ("callbacks=ema", "callbacks.ema.decay=0.8", "callbacks.ema.update_every_n_steps=2")
LIGHTNINGS = (
    "+callbacks.ema._target_=lightning.pytorch.callbacks.EMAWeightAveraging",
    "+callbacks.ema.decay=0.8",
    "+callbacks.ema.update_every_n_steps=2",
)


def test_the_test_is_that_of_the_average_which_the_best_checkpoint_holds(tmp_path: Path) -> None:
    outputs = {name: tmp_path / name for name in ("ours", "lightnings", "plain")}
    ours, lightnings = Program(outputs["ours"])(*TASK, *OURS), Program(outputs["lightnings"])(*TASK, *LIGHTNINGS)
    plain = Program(outputs["plain"])(*TASK)
    test = {name: value for name, value in ours.summary["metrics"].items() if name.startswith("test/")}
    evaluated = Program(tmp_path / "evaluated", "src/evaluate.py")(f"checkpoint={ours.folder}", "threads=1")
    assert evaluated.summary["metrics"] == test
    loss = test["test/loss"]
    assert lightnings.summary["metrics"]["test/loss"] == pytest.approx(loss, rel=1e-4)
    assert abs(plain.summary["metrics"]["test/loss"] / loss - 1) > 1e-2, "the control"

    last = checkpoint_of(ours.folder)
    average, weights = last["state_dict"], last["current_model_state"]
    assert ours.summary["weights_sha256"] == weights_sha256(average)
    assert plain.summary["weights_sha256"] == weights_sha256(weights), "training itself is the same"
    assert not torch.equal(average["net.norm2.running_var"], weights["net.norm2.running_var"])
    assert average["net.norm2.num_batches_tracked"] == weights["net.norm2.num_batches_tracked"] - 1  # at every second
    assert last["averaging_state"]["n_averaged"] == ours.summary["steps"] // 2 == 9

    again = Program(ours.outputs)(f"resume={ours.folder}")  # nothing is left to train
    assert again.summary["weights_sha256"] == ours.summary["weights_sha256"]
    assert {name: again.summary["metrics"][name] for name in test} == test


def test_an_interrupted_run_names_the_average_that_it_has_saved(run_train: Program) -> None:
    process = run_train.start(*TASK, *OURS, "max_epochs=100000", "strategy=ddp", "devices=2")
    wait_for(lambda: list(run_train.outputs.rglob("last.ckpt")), process)
    os.kill(workers_of(process)[0], signal.SIGTERM)
    run = run_train.finish(process)
    assert run.returncode == 143, str(run)
    assert run.summary["weights_sha256"] == weights_sha256(checkpoint_of(run.folder)["state_dict"])
    assert run.summary["weights_sha256"] != weights_sha256(checkpoint_of(run.folder)["current_model_state"])


def test_what_does_not_change_is_averaged_to_the_same_bits_and_whole_numbers_are_copied() -> None:
    update = EMA(decay=0.9)._update
    frozen, counter = torch.rand(1000), torch.arange(1000)
    averages = frozen.clone()
    for _ in range(20):
        update([averages], [frozen], 1)
        update([counter], [torch.arange(1000) + 7], 1)
    assert torch.equal(averages, frozen)
    assert torch.equal(counter, torch.arange(1000) + 7)
    update([averages], [frozen + 1], 1)
    torch.testing.assert_close(averages, frozen + 0.1)


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"update_every_n_steps": 0}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}={re.escape(str(options[name]))}: must be"):
        EMA(**options)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("precision=bf16-true",), "has too few digits for an average"),
    ],
)
def test_refused_in_one_line(run_train: Program, overrides: tuple[str, ...], reason: str) -> None:
    run = run_train(*TASK, *OURS, *overrides, ok=False)
    assert run.returncode == 2
    assert re.fullmatch(rf"error: callbacks.ema: .*{reason}.*\n", run.stderr), str(run)
