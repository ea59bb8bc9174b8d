"""A loss that is no mean over samples: named before the first step, and right on every layout with its weight."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainer.small import BATCH, Net, lines_of_lockstep, loader, trainer

import lockstep
from lockstep.callbacks import Meter
from lockstep.errors import StepRefused
from lockstep.strategies import Action, Strategy

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0])
Loss = Callable[[Tensor, Tensor, Tensor], Any]  # of inputs, logits and labels


def by_class(x: Tensor, logits: Tensor, y: Tensor) -> Any:
    return {"loss": F.cross_entropy(logits, y, weight=CLASS_WEIGHTS), "weight": CLASS_WEIGHTS[y].sum()}


def ignoring(x: Tensor, logits: Tensor, y: Tensor) -> Any:
    y = torch.where(x[:, 0] > 0, y, -100)
    return {"loss": F.cross_entropy(logits, y), "weight": int((y != -100).sum())}


def masked(x: Tensor, logits: Tensor, y: Tensor) -> Any:
    """Return the loss of some samples. A piece may have none: its loss and gradients are nan."""
    mask = (x[:, 0] > 0.9).float()
    return {"loss": (F.cross_entropy(logits, y, reduction="none") * mask).sum() / mask.sum(), "weight": mask.sum()}


def ragged(x: Tensor, logits: Tensor, y: Tensor) -> Any:
    tokens = (x[:, 1].abs() * 5).long() + 1
    loss = (F.cross_entropy(logits, y, reduction="none") * tokens).sum() / tokens.sum()
    return {"loss": loss, "weight": tokens.sum(), "more": logits.mean()}


class Weighted(Net):
    def __init__(self, loss: Loss, alone: bool = False, zero: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        if zero:
            for parameter in self.net[-1].parameters():
                nn.init.zeros_(parameter)
        self.loss, self.alone = loss, alone
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        returned = self.loss(x, self.net(x), y)
        return returned["loss"] if self.alone and isinstance(returned, dict) else returned

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def train(folder: Path, loss: Loss, alone: bool = False, **options: Any) -> tuple[str, list[float], list[float]]:
    """Return the hash and the weights after two epochs with a short last step, and the losses of the steps."""

    def run() -> tuple[str, list[float], list[float]]:
        pl.seed_everything(0, verbose=False)
        module = Weighted(loss, alone)
        trainer(folder, **{"pieces": 4, **options}).fit(module, loader())
        weights = torch.cat([parameter.flatten().double() for parameter in module.parameters()])
        return lockstep.weights_sha256(module.state_dict()), weights.tolist(), module.losses

    return lockstep.launch(run, devices=options["devices"]) if options.get("strategy") in ("ddp", "fsdp") else run()


LAYOUTS: list[dict[str, Any]] = [
    {"devices": 2, "strategy": "dp"},
    {"devices": 2, "strategy": "ddp"},
    {"devices": 3, "strategy": "ddp"},
    {"devices": 2, "strategy": "fsdp"},
]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("loss", [by_class, masked])
def test_a_weighted_step_is_the_same_on_every_layout(tmp_path: Path, loss: Loss) -> None:
    _, expected, losses = train(tmp_path, loss, pieces=1, exact=True)
    exact = train(tmp_path, loss, exact=True)
    assert exact[1] == pytest.approx(expected, abs=2e-6)
    assert exact[2] == pytest.approx(losses, rel=1e-4), "the losses that callbacks see"
    for layout in LAYOUTS:
        assert train(tmp_path, loss, exact=True, **layout)[0] == exact[0], layout
    for layout in LAYOUTS[1::2]:
        assert train(tmp_path, loss, **layout)[1] == pytest.approx(expected, abs=2e-6), layout
    control = train(tmp_path, by_class, alone=True)[1]
    assert control != pytest.approx(train(tmp_path, by_class, pieces=1)[1], abs=1e-3)


class Backwards(Strategy):
    """Computes the pieces from the last one to the first."""

    name = "backwards"

    def schedule(self, micro_batches: Any) -> Any:
        for index in reversed(range(len(micro_batches))):
            yield Action.FORWARD, index
            yield Action.BACKWARD, index


def test_a_piece_has_its_own_weight_in_any_order_of_the_passes(tmp_path: Path) -> None:
    """The pieces of the last step are of unequal sizes."""
    expected = train(tmp_path, by_class, pieces=8, exact=True)
    backwards = train(tmp_path, by_class, pieces=8, exact=True, strategy=Backwards())
    assert backwards[0] == expected[0]
    assert backwards[2] == pytest.approx(expected[2], rel=1e-6)


@pytest.mark.parametrize("loss", [by_class, ignoring, masked, ragged])
def test_pieces_do_not_change_a_weighted_step(tmp_path: Path, loss: Loss) -> None:
    def weights(**options: Any) -> list[float]:
        return train(tmp_path, loss, max_epochs=1, **options)[1]

    whole = weights(pieces=1)
    cuts: list[dict[str, Any]] = [
        {"exact": True, "pieces": 12},
        {"pieces": 3},
        {"accumulate_grad_batches": 2, "batch_size": BATCH, "pieces": None},
    ]
    for options in cuts:
        assert weights(**options) == pytest.approx(whole, abs=2e-6), options


def mean_of_squares(x: Tensor, logits: Tensor, y: Tensor) -> Any:
    return F.mse_loss(logits[:, 0], y.float()) + 1e-3 * logits.square().sum(1).mean()


def contrastive(x: Tensor, logits: Tensor, y: Tensor) -> Any:
    z = F.normalize(logits)
    return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)))


def dice(x: Tensor, logits: Tensor, y: Tensor) -> Any:
    p, target = logits.softmax(1), F.one_hot(y, 3)
    return 1 - (2 * (p * target).sum(0) / (p + target).sum(0)).mean()


def rare(x: Tensor, logits: Tensor, y: Tensor) -> Any:
    """Return the loss of samples of one class only, which does not show its class weights."""
    return F.cross_entropy(logits, y * 0, weight=CLASS_WEIGHTS)


OTHER, COUPLED = "training_step returns a mean over something else than samples", "depends on the other samples of its"
WRONG = "the weight must be the denominator of the loss"


@pytest.mark.parametrize(
    ("loss", "alone", "line"),
    [
        (by_class, True, OTHER),
        (ignoring, True, OTHER),
        (ragged, True, OTHER),
        (rare, True, OTHER),
        (lambda *parts: {**by_class(*parts), "weight": len(parts[2])}, False, WRONG),
        (lambda *parts: {**by_class(*parts), "weight": CLASS_WEIGHTS[parts[2]].mean()}, False, WRONG),
        (by_class, False, ""),
        (ragged, False, ""),
        (mean_of_squares, False, ""),
        (lambda x, logits, y: F.cross_entropy(logits, y, label_smoothing=0.1), False, ""),
        (lambda x, logits, y: F.cross_entropy(logits + torch.randn_like(logits), y), False, ""),
        (lambda x, logits, y: F.cross_entropy(logits, y, weight=torch.ones(3)), False, ""),
        (contrastive, False, COUPLED),
        (dice, False, COUPLED),
    ],
)
@pytest.mark.parametrize("zero", [False, True])
def test_another_mean_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: Loss, alone: bool, line: str, zero: bool
) -> None:
    """`zero`: all samples have the same loss at first, since the last layer begins with zeros."""
    options: dict[str, Any] = {"max_steps": 1}
    torch.manual_seed(0)  # with few weights the means of both halves agree by chance
    with caplog.at_level(logging.WARNING, "lockstep"):
        trainer(tmp_path, pieces=2, **options).fit(Weighted(loss, alone, zero), loader())
    assert (line in caplog.text) if line else not lines_of_lockstep(caplog)
    caplog.clear()
    trainer(tmp_path, **options).fit(Weighted(loss, alone, zero), loader())
    assert not lines_of_lockstep(caplog), "one piece is a whole step"
    if line not in (OTHER, WRONG):
        trainer(tmp_path, pieces=2, exact=True, **options).fit(Weighted(loss, alone, zero), loader())
        return
    with pytest.raises(StepRefused, match=f"^exact=true: .*{line}"):
        trainer(tmp_path, pieces=2, exact=True, **options).fit(Weighted(loss, alone, zero), loader())


@pytest.mark.parametrize(
    ("weight", "line"),
    [
        (
            lambda logits: -1.0,
            "training_step returned -1 as weight: it must be the denominator of its loss, one finite",
        ),
        (lambda logits: logits, "training_step returned what is no number as weight"),
        (lambda logits: float("nan"), "training_step returned nan as weight"),
        (lambda logits: logits.exp().sum(), "training_step returned a weight that depends on the parameters"),
    ],
)
def test_a_weight_is_a_number_that_follows_from_the_batch(tmp_path: Path, weight: Any, line: str) -> None:
    def loss(x: Tensor, logits: Tensor, y: Tensor) -> Any:
        return {"loss": F.cross_entropy(logits, y), "weight": weight(logits)}

    with pytest.raises(StepRefused, match=line):
        trainer(tmp_path, pieces=2).fit(Weighted(loss), loader())


def test_each_loss_has_a_weight_or_none_has(tmp_path: Path) -> None:
    def loss(x: Tensor, logits: Tensor, y: Tensor) -> Any:
        returned = {"loss": F.cross_entropy(logits, y)}
        return {**returned, "weight": len(y)} if len(y) == BATCH else returned

    with pytest.raises(StepRefused, match="returns a weight beside some losses only: return one beside each"):
        trainer(tmp_path).fit(Weighted(loss), loader())


@pytest.mark.parametrize("loss", [by_class, masked])
def test_the_mean_of_an_epoch_has_the_weights_of_its_losses(tmp_path: Path, loss: Loss) -> None:
    """A piece without a weight may have a loss that is nan."""

    def mean(pieces: int) -> float:
        pl.seed_everything(0, verbose=False)
        trained = trainer(tmp_path, pieces=pieces, max_epochs=1, callbacks=[Meter()])
        trained.fit(Weighted(loss), loader())
        return float(trained.callback_metrics["train/loss"])

    assert mean(12) == pytest.approx(mean(1), rel=1e-5)
