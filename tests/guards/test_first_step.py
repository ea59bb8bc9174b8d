"""The trial passes before the first step: what they find, what they leave alone, and that they leave no trace."""

import logging
import random
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import small_data
import torch
from plain import QUIET
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lockstep.data import ArrayDataset, Spec, Splits, StepData
from lockstep.data.augment import Augment
from lockstep.errors import StepRefused
from lockstep.guards.first_step import FirstStepCheck
from lockstep.guards.losses import grows
from lockstep.lightning.trainer import StepTrainer
from lockstep.step.batch import CannotRepeat, repeated
from lockstep.step.gradients import ExactGradientSum, GradientSum
from lockstep.strategies import DDP, DP

SAMPLES, BATCH = 32, 16


class Net(pl.LightningModule):
    """A net whose loss of a piece is `piece_loss`, the mean here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
        self.generator = np.random.default_rng(0)
        self.calls = 0
        self.set_up()

    def set_up(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return self.piece_loss(self(batch[0]), batch[1])

    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    folder: Path,
    module: pl.LightningModule,
    *,
    pieces: int = 2,
    exact: bool = False,
    check: bool = True,
    dp: bool = False,
) -> StepTrainer:
    random_numbers = np.random.default_rng(1)
    images = random_numbers.integers(0, 256, (SAMPLES, 1, 4, 4), dtype=np.uint8)
    data = ArrayDataset(images, random_numbers.integers(0, 3, SAMPLES))
    splits = Splits(data, None, None, Spec(1, 4, ("a", "b", "c"), (0.5,), (0.25,)), "none", Augment())
    layout = small_data.layout(2 if dp else 1, BATCH, pieces, "dp" if dp else "ddp", exact)
    strategy = (DP if dp else DDP)().build(layout).strategy
    gradients = (ExactGradientSum if exact and pieces > 1 else GradientSum)(strategy, 1)
    options = QUIET | {"default_root_dir": folder, "max_steps": 2, "logger": False}
    trainer = StepTrainer(gradients, [FirstStepCheck(compiled=False)] if check else [], 3, **options)
    trainer.fit(module, datamodule=StepData(splits, layout, seed=3, num_workers=0))
    return trainer


def both(folder: Path, kind: Callable[[], Any], **options: Any) -> list[Any]:
    """Fit a module with the trial passes, and one without. Return both, which begin with the same random numbers."""
    modules = [kind(), kind()]
    for module, check in zip(modules, (True, False), strict=True):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        fit(folder, module, check=check, **options)
    return modules


def same_state(one: Net, other: Net) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert one.calls == other.calls


# --- a mean over something else than samples ---


def test_a_mask_is_seen_where_only_a_later_piece_of_the_process_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same pieces on two devices show it, too."""
    batches: list[Tensor] = []

    class Masked(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batches.append(batch[0])
            losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
            mask = (batch[0] != marked).flatten(1).any(1)
            return (losses * mask).sum() / mask.sum()

    marked = torch.zeros(1, 4, 4)
    fit(tmp_path, Masked(), pieces=2, check=False)
    for piece, exact in ((0, True), (1, True), (1, False)):
        marked = batches[piece][0]
        if exact:
            with pytest.raises(StepRefused, match="returns a mean over something else than samples"):
                fit(tmp_path, Masked(), pieces=2, exact=True)
        else:
            fit(tmp_path, Masked(), pieces=2)
            assert caplog.text.count("returns a mean over something else than samples") == 1


# --- a sum instead of a mean ---


class Sum(Net):
    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="sum")


class NegativeSumWithPenalty(Net):
    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        penalty = sum((p**2).sum() for p in self.parameters())
        return -5 * logits.softmax(1).gather(1, y[:, None]).sum() + penalty


class SumOverPairs(Net):
    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits[:, None] - logits[None] - 1).square().sum()


@pytest.mark.parametrize("kind", [Sum, NegativeSumWithPenalty, SumOverPairs])
@pytest.mark.parametrize(("pieces", "dp"), [(1, False), (2, False), (8, False), (2, True)])
def test_a_sum_is_refused_on_every_layout(tmp_path: Path, kind: Any, pieces: int, dp: bool) -> None:
    """With one piece, with pieces of two samples, and on copies of the module."""
    with pytest.raises(StepRefused, match="training_step returns a loss that grows with the number of samples"):
        fit(tmp_path, kind(), pieces=pieces, dp=dp)


def test_a_sum_of_pieces_of_one_sample_is_refused(tmp_path: Path) -> None:
    module = Sum()
    module.net[2] = nn.GroupNorm(2, 6)
    with pytest.raises(StepRefused, match="grows with the number of samples"):
        fit(tmp_path, module, pieces=16)


class Contrastive(Net):
    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(logits, dim=1)
        similar = z @ (z + 0.1 * torch.randn_like(z)).T / 0.1
        return F.cross_entropy(similar, torch.arange(len(z)))


class NearZero(Net):
    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return (torch.randn_like(logits) * logits).mean() * 1e-3


class Penalised(Net):
    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return 1e-3 * sum((p**2).sum() for p in self.parameters()) - logits.softmax(1).gather(1, y[:, None]).mean()


class Variances(Net):
    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return (1 - logits.std(0)).relu().mean() + logits.T.cov().square().sum()


class GradientPenalty(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return F.cross_entropy(self(x), batch[1]) + gradient.square().flatten(1).sum(1).mean()


class MixedUp(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        order = torch.randperm(len(x))
        share = torch.rand(())
        return {
            "x": share * x + (1 - share) * x[order],
            "y": (y, y[order], share),
            "names": ["a"] * len(x),
            "more": None,
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, (y, other, share) = self(batch["x"]), batch["y"]
        assert len(batch["names"]) == len(logits)
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, other)


class Opaque(Net):
    """Its batch has a part that can't be cut, so only the repetition is checked."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (*batch, torch.ones(5))


class Teacher(Net):
    """It moves a second network towards the first one in every call."""

    def set_up(self) -> None:
        self.teacher = nn.Linear(16, 3).requires_grad_(False)
        self.student = nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        x = batch[0].flatten(1)
        return F.mse_loss(self.student(x), self.teacher(x)) + F.cross_entropy(self(batch[0]), batch[1])


class CopyAsTeacher(Net):
    """An average of the weights that begins with them, so that the first average changes nothing."""

    def set_up(self) -> None:
        self.teacher = deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data = 0.5 * slow.data + 0.5 * fast.data
        logits = self(batch[0])
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(logits, self.teacher(batch[0]))


class AveragedBetweenSteps(CopyAsTeacher):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return Net.training_step(self, batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        CopyAsTeacher.training_step(self, (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)), 0)


TEACHERS = [Teacher, CopyAsTeacher, AveragedBetweenSteps]
MEANS = [Net, Contrastive, NearZero, Penalised, Variances, GradientPenalty, MixedUp, Opaque]


@pytest.mark.parametrize(
    ("kind", "pieces", "exact"),
    [
        *((kind, 8, exact) for kind in MEANS for exact in (False, True)),
        *((kind, 1, True) for kind in (Net, Contrastive, *TEACHERS)),
        *((kind, 4, True) for kind in TEACHERS),
    ],
)
def test_a_mean_passes_and_nothing_is_left_of_the_trial(
    tmp_path: Path, kind: Any, pieces: int, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    same_state(*both(tmp_path, kind, pieces=pieces, exact=exact))
    assert "parameter" not in caplog.text


def test_noise_is_no_sum() -> None:
    noise = (np.random.default_rng(seed).normal(size=(8, 3)).tolist() for seed in range(200))
    assert [seed for seed, losses in enumerate(noise) if grows(losses)] == []


# --- state that a layout would not share ---


class FlipsSometimes(Net):
    """By one bit of Python's generator, so a single repetition need not show it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flip(-1) if random.random() < 0.2 else batch[0]
        return F.cross_entropy(self(x), batch[1])


class DrawsInPreparation(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * random.random(), batch[1]


class Remembers(Net):
    """It compares with the samples of earlier calls."""

    def set_up(self) -> None:
        self.earlier: deque[Tensor] = deque(maxlen=8)

    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, y) + sum(logits.mean() * each.mean() for each in self.earlier)
        self.earlier.append(logits.detach())
        return loss


class FirstLoss(Net):
    """It divides by the mean of all losses, which the same samples leave as it is."""

    def set_up(self) -> None:
        self.losses: list[float] = []

    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, y)
        self.losses.append(float(loss))
        return loss / (sum(self.losses) / len(self.losses))


DRAWS, STATE = "draws random numbers that are not those of torch", "depends on a state that it changes itself"
HIDDEN = {FlipsSometimes: DRAWS, DrawsInPreparation: DRAWS, Remembers: STATE, FirstLoss: STATE}


@pytest.mark.parametrize(("kind", "why"), HIDDEN.items())
@pytest.mark.parametrize("pieces", [1, 4])
def test_what_changes_between_two_calls_is_refused_with_exact(tmp_path: Path, kind: Any, why: str, pieces: int) -> None:
    with pytest.raises(StepRefused, match=rf"^exact=true: training_step gives another loss .* since it {why}"):
        fit(tmp_path, kind(), pieces=pieces, exact=True)


@pytest.mark.parametrize("kind", HIDDEN)
def test_without_exact_it_trains_as_without_the_trial(tmp_path: Path, kind: Any) -> None:
    same_state(*both(tmp_path, kind))


class FlipsRarely(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flip(-1) if random.random() < 0.001 else batch[0]
        return F.cross_entropy(self(x), batch[1])


def test_random_numbers_that_change_no_loss_yet_are_named_with_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, FlipsRarely())
    assert "random numbers" not in caplog.text
    fit(tmp_path, FlipsRarely(), exact=True)
    assert "No loss has changed by them in 8 calls" in caplog.text


class FirstScale(Net):
    """It sets a parameter by the samples of its first call."""

    def set_up(self) -> None:
        self.scale, self.is_set = nn.Parameter(torch.ones(())), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.scale.data.copy_(x.abs().mean())
            self.is_set = True
        return self.net(x / self.scale)


class Normalised(Net):
    """It sets the norm of trained weights in each call."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for row in self.net[1].get_parameter("weight"):
                row.div_(row.norm())
        return self.net(x)


def test_trained_parameters_that_the_step_changes_are_refused_with_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, name in ((FirstScale, "scale"), (Normalised, "net.1.weight")):
        message = rf"training_step changes parameters itself \({name}\), once for each piece of a device, so"
        for pieces in (1, 4):
            with pytest.raises(StepRefused, match=f"^exact=true: {message}"):
                fit(tmp_path, kind(), pieces=pieces, exact=True)
        caplog.clear()
        fit(tmp_path, kind(), pieces=1)
        assert "changes parameters" not in caplog.text, "a single pass computes the step, on any layout"
        modules = both(tmp_path, kind, pieces=4)
        assert re.search(message, caplog.text)
        if kind is Normalised:  # an attribute of the other one decides what it does
            same_state(*modules)


# --- buffers of integers ---


class Queue(nn.Module):
    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(64, 3))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        at = int(self.pointer)
        self.queue[at : at + len(x)] = x.detach()
        self.pointer[0] = (at + len(x)) % 64
        return x


class WithQueue(Net):
    memory: Queue

    def set_up(self) -> None:
        self.memory = Queue()

    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.memory(logits), y)


def test_a_queue_is_refused_with_exact_and_named_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = r"the buffer pointer of memory \(Queue\) depends on the samples of a piece"
    for pieces in (1, 4):
        with pytest.raises(StepRefused, match=rf"^exact=true: {message}"):
            fit(tmp_path, WithQueue(), pieces=pieces, exact=True)
    assert "pointer" not in caplog.text
    module = WithQueue()
    with caplog.at_level(logging.WARNING, "lockstep"):
        fit(tmp_path, module, pieces=2)
    assert "the buffer pointer of memory (Queue) depends" in caplog.text
    assert int(module.memory.pointer) == 16, "of two steps, of which each piece, of 8, begins with the step's pointer"


def test_all_buffers_that_count_samples_are_named(tmp_path: Path) -> None:
    class Counts(Net):
        def set_up(self) -> None:
            for name in ("a", "b", "c", "d", "e", "f"):
                self.register_buffer(name, torch.tensor(0))

        def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
            for name, buffer in self.named_buffers(recurse=False):
                if name != "b":
                    buffer += len(y)
            return F.cross_entropy(logits, y)

    names = r"the buffer a of the module \(Counts\) \(and c, d, e and 1 more\)"
    with pytest.raises(StepRefused, match=f"^exact=true: {names} depends on the samples of a piece"):
        fit(tmp_path, Counts(), exact=True)


# --- no trace ---


class Traces(Net):
    def set_up(self) -> None:
        self.accuracy = MulticlassAccuracy(3)
        self.losses: list[float] = []

    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, y)
        self.accuracy.update(logits, y)
        self.losses.append(float(loss))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss


def test_logged_values_metrics_and_attributes_are_those_of_the_steps(tmp_path: Path) -> None:
    checked, unchecked = both(tmp_path, Traces)
    assert checked.trainer.callback_metrics == unchecked.trainer.callback_metrics
    assert checked.losses == unchecked.losses
    assert len(checked.losses) == 4


class Mean:
    def __init__(self) -> None:
        self.values: list[float] = []
        self.count = 0
        self.parts = SimpleNamespace(largest=0.0)

    def add(self, value: float) -> None:
        self.values.append(value)
        self.count += 1
        self.last = value
        self.parts.largest = max(self.parts.largest, value)


class WithObjects(Net):
    """It has averages of its own class, one of them in a dict."""

    def set_up(self) -> None:
        self.mean, self.means = Mean(), {"loss": Mean()}

    def piece_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, y)
        for mean in (self.mean, self.means["loss"]):
            mean.add(float(loss))
        return loss


def test_objects_of_a_users_class_are_those_of_the_steps(tmp_path: Path) -> None:
    for exact in (True, False):
        checked, unchecked = both(tmp_path, WithObjects, exact=exact)
        for one, other in ((checked.mean, unchecked.mean), (checked.means["loss"], unchecked.means["loss"])):
            assert one.count == 4
            assert vars(one) == vars(other)


def test_generators_are_those_of_a_run_without_the_trial(tmp_path: Path) -> None:
    drawn = []
    for check in (True, False):
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        fit(tmp_path, Net(), exact=True, check=check)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
    assert drawn[0] == drawn[1]


# --- parts of a batch ---


class Pair(NamedTuple):
    x: Tensor
    scale: Tensor


def test_the_samples_of_a_batch_are_repeated() -> None:
    x, share = torch.arange(8.0).view(4, 2), torch.tensor(0.3)
    batch = {"x": x, "y": (x[:, 0], None), "names": ["a", "b", "c", "d"], "share": share, "size": 7}
    doubled = repeated(batch, 4, range(2), 2)
    assert torch.equal(doubled["x"], torch.cat([x[:2], x[:2]]))
    assert torch.equal(doubled["y"][0], torch.tensor([0.0, 2.0, 0.0, 2.0]))
    assert (doubled["names"], doubled["share"], doubled["size"]) == (["a", "b", "a", "b"], share, 7)
    ordered = repeated(OrderedDict(x=x, rest=[x, "text"]), 4, range(1, 3))
    assert type(ordered) is OrderedDict
    assert torch.equal(ordered["x"], x[1:3])
    assert [torch.equal(ordered["rest"][0], x[1:3]), ordered["rest"][1]] == [True, "text"]
    pair = repeated(Pair(x, x[:1, :1]), 4, range(3), 2)
    assert type(pair) is Pair
    assert (pair.x.shape, pair.scale.shape) == ((6, 2), (1, 1))
    for unknown in (torch.ones(5), object(), [torch.ones(3)] * 4):
        with pytest.raises(CannotRepeat):
            repeated((x, unknown), 4, range(2), 2)


def test_it_takes_few_samples(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Seen(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    fit(tmp_path, Seen(), pieces=1, exact=True)
    assert sizes[-2:] == [BATCH, BATCH], "the steps"
    assert max(sizes[:-2]) == 8
