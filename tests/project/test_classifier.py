"""An ImageClassifier in a Trainer: what it logs, its checkpoint, and a resume with other settings."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from plain import QUIET
from small_data import small_cnn, task
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.checkpoint.callback import ResumeState
from lockstep.errors import UserError
from lockstep.vision.models import SmallCNN
from lockstep.vision.schedules import cosine

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def batches(count: int, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = [6] * (count - 1) + [3]
    return [
        (torch.randn(s, 1, 12, 12, generator=generator), torch.randint(0, classes, (s,), generator=generator))
        for s in sizes
    ]


def loader(items: list[tuple[Tensor, Tensor]]) -> DataLoader:
    return DataLoader(items, batch_size=None)  # type: ignore[arg-type]


def trainer(folder: Path, **changes: Any) -> Trainer:
    return Trainer(**QUIET, use_distributed_sampler=False, default_root_dir=folder, **changes)


def test_evaluation_in_a_trainer(tmp_path: Path) -> None:
    model = small_cnn(label_smoothing=0.2, num_classes=11)
    data = batches(4, classes=11)
    logged = trainer(tmp_path).test(model, loader(data), verbose=False)[0]
    again = trainer(tmp_path).test(model, loader(data[::-1]), verbose=False)[0]
    assert again == logged
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        logits = model.eval()(x)
    assert logged["test/count"] == len(y) == 21
    assert logged["test/correct"] == int((logits.argmax(1) == y).sum())
    assert logged["test/acc"] == logged["test/correct"] / 21
    assert logged["test/loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-6)
    ranks = (logits > logits.gather(1, y[:, None])).sum(1)
    assert logged["test/acc_top5"] == int((ranks < 5).sum()) / 21


class First(Callback):
    """The optimizer as the first step of a fit finds it."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not hasattr(self, "group"):
            (optimizer,) = trainer.optimizers
            self.group = dict(optimizer.param_groups[0])
            self.gathered = [state["momentum_buffer"].clone() for state in optimizer.state.values()]


def by_step(optimizer: Any) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1), "interval": "step"}


def by_epoch(optimizer: Any) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1), "interval": "epoch"}


def every_second(optimizer: Any) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1), "interval": "step", "frequency": 2}


@pytest.mark.parametrize(
    ("scheduler", "fraction"),
    [
        (lambda made: {"scheduler": cosine(made, 16), "interval": "step"}, (1 + math.cos(math.pi * 6 / 16)) / 2),
        (by_step, 0.1**3),
        (by_epoch, 0.1**2),
        (every_second, 0.1**2),  # the loop counts from the begin of each epoch, which has three
        (None, 1.0),
    ],
    ids=["longer", "by step", "by epoch", "every second step", "none"],
)
def test_a_resumed_run_follows_its_differing_settings(tmp_path: Path, scheduler: Any, fraction: float) -> None:
    """The optimizer keeps what it has gathered, and the new schedule stands where it would after as many steps."""
    same, new = {"lr": 0.1}, {"lr": 0.4}

    def fit(model: Any, settings: dict[str, float], epochs: int, **options: Any) -> Trainer:
        state = ResumeState({"config": {}}, {"optimizer": settings}, steps_per_epoch=3)
        run = trainer(tmp_path, max_epochs=epochs, callbacks=[state, *options.pop("callbacks", [])])
        run.fit(model, loader(batches(3)), loader(batches(1)), weights_only=True, **options)
        return run

    cut = fit(small_cnn(), same, 2)
    cut.save_checkpoint(path := tmp_path / "cut.ckpt")
    (state,) = torch.load(path, weights_only=True)["optimizer_states"]
    for lr, momentum, expected in ((0.1, 0.9, state["param_groups"][0]["lr"]), (0.4, 0.5, 0.4 * fraction)):
        optimizer = partial(torch.optim.SGD, lr=lr, momentum=momentum)
        options = {} if lr == 0.1 else {"scheduler": scheduler}
        first = First()
        fit(small_cnn(optimizer=optimizer, **options), same if lr == 0.1 else new, 3, ckpt_path=path, callbacks=[first])
        assert first.group["lr"] == pytest.approx(expected, rel=1e-12)
        assert first.group["momentum"] == momentum
        saved = [one["momentum_buffer"] for one in state["state"].values()]
        assert all(torch.equal(a, b) for a, b in zip(first.gathered, saved, strict=True))


# --- class weights ----------------------------------------------------------------------------------------------------


class CustomLoss(SmallCNN):
    """Which knows nothing of weights."""

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return nn.functional.multi_margin_loss(logits, y, reduction="none")


def weighted(weights: Any, y: Tensor, kind: type[SmallCNN] = SmallCNN, balanced: bool = False, **options: Any) -> Any:
    """Return a classifier in a step whose samples have the labels `y`."""
    model = kind(**task(class_weights=weights, num_classes=3, **options))
    splits = SimpleNamespace(labels=y.numpy() if balanced else None, train_labels=y.numpy)
    data = SimpleNamespace(labels_of_step=lambda step_batch: y.numpy(), splits=splits)
    trainer: Any = SimpleNamespace(datamodule=data)
    model.class_weights.setup(trainer, model, "fit")
    model.class_weights.on_train_batch_start(trainer, model, None, 0)
    return model


@pytest.mark.parametrize("weights", [[1, 5, 0.2], "balanced"])
@pytest.mark.parametrize("loss", ["torch's", "smoothed", "own"])
def test_class_weights_of_a_step_in_pieces_are_those_of_the_whole_step(weights: Any, loss: str) -> None:
    x, y = torch.randn(12, 1, 12, 12), torch.tensor([0, 0, 0, 0, 0, 1, 0, 2, 2, 0, 0, 1])
    model = weighted(weights, y, CustomLoss if loss == "own" else SmallCNN, label_smoothing=0.1 * (loss == "smoothed"))
    factors = torch.tensor([12 / (3 * n) for n in (8, 2, 2)] if weights == "balanced" else weights)

    def expected(x: Tensor, y: Tensor) -> Tensor:
        if loss == "torch's":
            return nn.functional.cross_entropy(model(x), y, factors)
        return (model.losses(model(x), y) * factors[y]).sum() / factors[y].sum()

    def gradients() -> list[Tensor]:
        actual = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return actual

    for piece, labels in zip(x.split(4), y.split(4), strict=True):
        (model.training_step((piece, labels), 0)["loss"] * (4 / 12)).backward()
    actual = gradients()
    expected(x, y).backward()
    whole = gradients()
    torch.testing.assert_close(actual, whole)
    for piece, labels in zip(x.split(4), y.split(4), strict=True):  # the control: each piece normalised by itself
        (expected(piece, labels) * (4 / 12)).backward()
    assert float((gradients()[0] - whole[0]).norm() / whole[0].norm()) > 1e-2


def test_an_evaluation_is_not_weighted(tmp_path: Path) -> None:
    model, (x, y) = weighted([1, 5, 0.2], torch.tensor([0, 1, 2, 0])), batches(2)[0]
    logged = trainer(tmp_path).test(model, loader([(x, y)]), verbose=False)[0]
    logits = model(x).double()
    assert logged["test/loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-6)
    losses = nn.functional.cross_entropy(logits, y, reduction="none")
    assert logged["test/loss"] != pytest.approx(float(model.class_weights(losses, y).mean()), rel=1e-2)  # the control


def test_weighted_classes_take_no_mixed_labels_and_no_balanced_order() -> None:
    y = torch.tensor([0, 1, 2])
    model = weighted("balanced", y)
    with pytest.raises(UserError, match="class_weights can't weigh mixed labels"):
        model.training_step((torch.randn(3, 1, 12, 12), torch.eye(3)), 0)
    weighted([1, 2, 3], y, balanced=True)  # given ones may have another reason
    with pytest.raises(UserError, match=r"class_weights=balanced and data.sampling=balanced both balance"):
        weighted("balanced", y, balanced=True)


@pytest.mark.parametrize("weights", ["weighted", [1, 2], [1, 2, 0], [1, 2, math.inf], 3])
def test_class_weights_that_are_none(weights: Any) -> None:
    with pytest.raises(ValueError, match=r"^class_weights=.*: must be balanced, or 3 numbers above 0"):
        small_cnn(class_weights=weights, num_classes=3)
