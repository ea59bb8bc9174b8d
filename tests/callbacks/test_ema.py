"""callbacks=ema: an average of the weights is what is validated, kept, tested and named."""

import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import NORMS, Program, checkpoint_of, workers_of
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from lockstep.callbacks.ema import EMA, Average
from lockstep.report.summary import weights_sha256
from lockstep.testing.fake_gpu import DEVICE, fake_gpu, move

TASK = (*NORMS, "max_epochs=3", "lr=0.1")
OURS = ("callbacks=ema", "callbacks.ema.decay=0.8", "callbacks.ema.update_every_n_steps=2")


@pytest.mark.usefixtures("processes")
def test_the_test_is_that_of_the_average_which_the_best_checkpoint_holds(tmp_path: Path) -> None:
    ours, plain = Program(tmp_path / "ours")(*TASK, *OURS), Program(tmp_path / "plain")(*TASK)
    test = {name: value for name, value in ours.summary["metrics"].items() if name.startswith("test/")}
    evaluated = Program(tmp_path / "evaluated", "src/evaluate.py")(f"checkpoint={ours.folder}", "threads=1")
    assert evaluated.summary["metrics"] == test
    loss = test["test/loss"]
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
    run_train.wait_for_checkpoint(process)
    os.kill(workers_of(process)[0], signal.SIGTERM)
    run = run_train.finish(process)
    assert run.returncode == 143, str(run)
    assert run.summary["weights_sha256"] == weights_sha256(checkpoint_of(run.folder)["state_dict"])
    assert run.summary["weights_sha256"] != weights_sha256(checkpoint_of(run.folder)["current_model_state"])


def test_the_average_is_lightnings_with_a_decay_that_warms_up() -> None:
    """With a decay below the first one of the warm-up, 2/11, it is Lightning's average."""
    torch.manual_seed(0)
    module = pl.LightningModule()
    module.frozen, module.trained = nn.Parameter(torch.rand(1000)), nn.Parameter(torch.rand(1000))
    counter = torch.arange(1000)
    module.register_buffer("counter", counter)
    strategy = SimpleNamespace(root_device="cpu", whole_weights=nullcontext)
    frozen, trainer = module.frozen.detach().clone(), SimpleNamespace(strategy=strategy)
    callbacks: list[Any] = [EMA(decay=0.9), EMA(decay=0.1), EMAWeightAveraging(decay=0.1)]
    for callback in callbacks:
        callback.setup(trainer, module, "fit")
    expected = module.trained.detach().clone()
    for step in range(100):
        module.trained.data, module.counter = torch.rand(1000), counter + step
        weight = 1 - min(0.9, (1 + step) / (10 + step)) if step else 1.0  # the first one copies
        expected = expected.lerp(module.trained.detach(), weight)
        for callback in callbacks:
            trainer.global_step = step + 1
            callback.on_train_batch_end(trainer, module, None, None, step)
    ours, small, lightnings = (callback._average_model.module for callback in callbacks)
    assert torch.equal(ours.trained, expected)
    torch.testing.assert_close(small.trained, lightnings.trained)
    assert not torch.allclose(ours.trained, small.trained), "the control"
    assert torch.equal(ours.frozen, frozen)
    assert torch.equal(ours.counter, counter + 99)


@pytest.mark.usefixtures("processes")
def test_a_short_run_does_not_end_with_its_first_weights(tmp_path: Path) -> None:
    run = Program(tmp_path)("data=digits", "callbacks=[early_stopping,ema]", "max_steps=21", "threads=1", "logger=none")
    assert run.summary["metrics"]["test/acc"] > 0.3


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"update_every_n_steps": 0}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}={re.escape(str(options[name]))}: must be"):
        EMA(**options)


def test_weights_of_few_digits_are_refused(run_train: Program) -> None:
    run = run_train(*TASK, *OURS, "precision=bf16-true", ok=False)
    assert run.returncode == 2
    *notes, line = run.stderr.splitlines()
    assert re.fullmatch("error: callbacks.ema: .*has too few digits for an average.*", line), str(run)
    assert all("this processor emulates bf16" in note for note in notes), str(run)


def test_no_update_waits_for_a_gpu() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with fake_gpu(copies=True) as gpu:
        move(module)
        average = Average(module, EMA(0.9))
        for _ in range(3):
            average.update_parameters(module)
        assert {value.device for value in average.module.state_dict().values()} == {DEVICE}
    assert gpu.faults == {}
    assert int(average.n_averaged) == 3
