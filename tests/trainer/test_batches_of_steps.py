"""`lockstep.Trainer`: what counts batches of the training loader counts as Lightning's Trainer on one device."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from trainer.small import QUIET, SAMPLES, Net, Seen, fit, loader, samples, trainer

import lockstep
from lockstep.errors import UserError

SMALL = 12  # samples of a batch; an epoch has eleven of them


class Scheduled(Seen):
    """Records the optimizer steps at each validation, and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.estimated: Any = None
        self.rates: list[float] = []

    def on_validation_start(self) -> None:
        self.steps.append(self.trainer.global_step)

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        optimizer = super().configure_optimizers()
        per_epoch = math.ceil(11 / self.trainer.accumulate_grad_batches)  # as users compute it
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, per_epoch, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fitted(folder: Path, ours: bool, train: Any = None, ckpt_path: Any = None, **options: Any) -> tuple[Any, Scheduled]:
    """Fit by our Trainer or Lightning's. Return the Trainer and the module."""
    torch.manual_seed(0)
    module = Scheduled()
    train = train or loader(batch_size=SMALL, shuffle=False)
    options = {"num_sanity_val_steps": 0, **options}
    made: Any = trainer(folder, **options) if ours else pl.Trainer(default_root_dir=folder, **{**QUIET, **options})
    made.fit(module, train, DataLoader(samples(), 25, shuffle=False), ckpt_path=ckpt_path)
    return made, module


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated, of whole steps": {"accumulate_grad_batches": 5, "limit_train_batches": 10},
    "accumulated, with a validation inside": {
        "accumulate_grad_batches": 2,
        "limit_train_batches": 10,
        "val_check_interval": 4,
    },
    "accumulated, validated by part": {
        "accumulate_grad_batches": 2,
        "limit_train_batches": 8,
        "val_check_interval": 0.25,
    },
    "accumulated, validated over epochs": {
        "accumulate_grad_batches": 2,
        "limit_train_batches": 10,
        "val_check_interval": 6,
        "check_val_every_n_epoch": None,
    },
    "the first batches": {"limit_train_batches": 3},
    "one batch": {"limit_train_batches": 1},
    "all batches": {"limit_train_batches": 1.0},
    "more than there are": {"limit_train_batches": 50},
    "a part": {"limit_train_batches": 0.5},
    "a part, of epochs and steps": {"limit_train_batches": 0.7, "max_steps": 9},
    "none": {"limit_train_batches": 0},
    "overfit": {"overfit_batches": 2},
    "overfit a part": {"overfit_batches": 0.4},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_count_as_with_lightning(tmp_path: Path, name: str) -> None:
    options = OPTIONS[name]
    theirs, expected = fitted(tmp_path / "theirs", False, **options)
    made, module = fitted(tmp_path / "ours", True, **options)
    assert made.global_step == theirs.global_step
    assert made.current_epoch == theirs.current_epoch
    assert module.trained == expected.trained
    number, batches = len(expected.steps), len(expected.evaluated)
    assert module.steps[:number] == expected.steps
    assert module.steps[number:] in ([], [made.global_step])  # the final weights are always validated
    assert module.evaluated[:batches] == expected.evaluated
    assert module.estimated == expected.estimated
    assert module.rates == expected.rates
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    for attribute in ("limit_train_batches", "limit_val_batches", "overfit_batches", "accumulate_grad_batches"):
        assert getattr(made, attribute) == getattr(theirs, attribute)


@pytest.mark.parametrize(
    ("many", "size", "options", "sizes"),
    [
        (4, 12, {}, [48, 48, 36]),
        (4, 50, {}, [132]),  # more than the epoch has
        (2, 50, {"drop_last": True}, [100]),  # a batch is left out, and no step
        (2, 24, {"drop_last": True}, [48, 48, 24]),
        (3, 10, {"sampler": SequentialSampler(range(40))}, [30, 10]),
    ],
)
def test_the_last_step_has_the_remaining_batches(
    tmp_path: Path, many: int, size: int, options: dict[str, Any], sizes: list[int]
) -> None:
    """As with Lightning. The gradient is the mean over the step's samples; Lightning divides it by `many` always."""
    steps: list[int] = []

    class Sizes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            steps.append(batch.samples)

    train = loader(**{"batch_size": size, "shuffle": None if "sampler" in options else True, **options})
    made, module = fitted(tmp_path, True, train, accumulate_grad_batches=many, max_epochs=1, callbacks=Sizes())
    theirs, expected = fitted(tmp_path, False, train, accumulate_grad_batches=many, max_epochs=1)
    assert steps == sizes
    assert made.global_step == theirs.global_step
    assert module.estimated == expected.estimated
    assert len(module.trained[0]) == len(expected.trained[0])


LIMITS: dict[str, Any] = {
    "accumulated": ({"accumulate_grad_batches": 4}, {"shuffle": True}),
    "accumulated, drop_last": ({"accumulate_grad_batches": 4}, {"batch_size": 50, "drop_last": True, "shuffle": True}),
    "limited": ({"limit_train_batches": 5, "pieces": 4}, {"shuffle": True}),
    "limited by a part, by weight": (
        {"limit_train_batches": 0.5, "pieces": 4},
        {"sampler": WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)},
    ),
    "limited, of a sampler": ({"limit_train_batches": 3, "pieces": 4}, {"sampler": RandomSampler(range(100))}),
    "limited and accumulated": ({"limit_train_batches": 7, "accumulate_grad_batches": 4}, {"shuffle": True}),
    "overfit": ({"overfit_batches": 3, "pieces": 4}, {"shuffle": True}),
    "overfit a part": ({"overfit_batches": 0.3, "pieces": 4}, {"sampler": RandomSampler(range(100))}),
}


def hashed(folder: Path, name: str, ckpt_path: Any = None, **changes: Any) -> tuple[str, list[list[int]]]:
    options, of_loader = LIMITS[name]
    made: dict[str, Any] = {**options, "exact": True, "max_epochs": 3, **changes}
    _, module = fitted(folder, True, loader(**{"batch_size": SMALL, "shuffle": None, **of_loader}), ckpt_path, **made)
    return lockstep.weights_sha256(module.state_dict()), [sorted(each) for each in module.trained]


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("name", LIMITS)
def test_batches_are_the_same_samples_on_each_layout(tmp_path: Path, name: str) -> None:
    one, seen = hashed(tmp_path / "one", name)
    for devices in (2, 3):
        assert hashed(tmp_path / str(devices), name, strategy="dp", devices=devices) == (one, seen)
    assert hashed(tmp_path / "seed", name, seed=1)[0] != one or "overfit" in name
    if "overfit" in name:
        assert seen[0] == seen[1] == list(range(len(seen[0])))
    elif "batches" not in name and "weight" not in name:
        assert seen[0] != seen[1] or len(seen[0]) == SAMPLES
    folder = tmp_path / "cut"
    steps = 1 + (2 if "accumulated, drop_last" not in name else 0)
    cut, _ = hashed(folder, name, max_steps=steps)
    assert cut != one
    assert hashed(folder, name, ckpt_path="last", strategy="dp", devices=2)[0] == one


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", ["accumulated", "limited", "overfit"])
def test_batches_are_the_same_samples_on_ranks(tmp_path: Path, name: str) -> None:
    one, _ = hashed(tmp_path / "one", name)
    assert lockstep.launch(lambda: hashed(tmp_path / "two", name)[0], devices=2) == one


def test_a_batch_sampler_stays_when_batches_are_overfit(tmp_path: Path) -> None:
    batches = BatchSampler(range(40, 90), 12, False)
    train = DataLoader(samples(), batch_sampler=batches)
    _, module = fitted(tmp_path, True, train, overfit_batches=2)
    assert module.trained == fitted(tmp_path, False, train, overfit_batches=2)[1].trained == [list(range(40, 64))] * 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"limit_train_batches": 0.01}, "limit_train_batches=0.01 of 11 batches is less than one: give at"),
        ({"overfit_batches": 0.01}, "limit_train_batches=0.01 of 11 batches is less than one"),
        ({"limit_train_batches": -1}, "invalid value -1 for limit_train_batches"),
        ({"limit_train_batches": 2.5}, "invalid value 2.5 for limit_train_batches"),
        ({"overfit_batches": "x"}, "not supported between instances of 'int' and 'str'"),
        (
            {"accumulate_grad_batches": 4, "val_check_interval": 3},
            "val_check_interval=3 with accumulate_grad_batches=4: a validation after 3 batches would come inside a "
            "step: use a multiple of 4 batches",
        ),
        ({"accumulate_grad_batches": 4, "val_check_interval": 0.5}, "a validation after 5 batches would come inside"),
        (
            {"accumulate_grad_batches": 4, "val_check_interval": 8, "check_val_every_n_epoch": None},
            "a validation after 8 batches, and an epoch of 11 batches, would come inside a step",
        ),
        ({"accumulate_grad_batches": 4, "val_check_interval": 12}, "must be less than or equal to the number of the"),
        ({"accumulate_grad_batches": 4, "batch_size": 40}, "Trainer(batch_size=40), but the training loader has"),
        ({"accumulate_grad_batches": 4, "pieces": 5}, "batch_size=48 can't be cut into 5 equal pieces"),
    ],
)
def test_batches_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], line: str) -> None:
    with pytest.raises((UserError, ValueError)) as refused:
        fitted(tmp_path, True, **options)
    assert line in " ".join(str(refused.value).split())


def test_another_limit_does_not_continue(tmp_path: Path) -> None:
    fit(tmp_path, limit_train_batches=2)
    with pytest.raises(UserError, match="counts its steps in 48 training samples, and there are 72"):
        trainer(tmp_path, limit_train_batches=3, max_epochs=3).fit(Net(), loader(), ckpt_path="last")
