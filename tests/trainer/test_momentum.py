"""Parameters without a gradient that `training_step` changes: a teacher that follows the weights that are trained.

They follow the rule for buffers: each piece starts from the step's begin, and all pieces agree. So a teacher has moved
once after a step, on every layout, as with Lightning's Trainer.
"""

import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainer.small import QUIET, Killed, Net, fit, loader, trainer

import lockstep

PROCESSES: dict[str, Any] = {"devices": 2, "accelerator": "cpu", "hang_timeout": 120}


class Byol(pl.LightningModule):
    """Two views of a sample: a trained network predicts what its teacher says about the other view."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 6))
        self.predictor = nn.Linear(6, 6)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.teacher.parameters(), self.student.parameters(), strict=True))

    def move(self) -> None:
        for slow, fast in self.pairs():
            slow.data = 0.9 * slow.data + 0.1 * fast.data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.move()
        one, two = batch[0], batch[0].flip(1)
        losses = [
            1 - F.cosine_similarity(self.predictor(self.student(seen)), self.teacher(other).detach()).mean()
            for seen, other in ((one, two), (two, one))
        ]
        return losses[0] + losses[1]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class InPlace(Byol):
    """As DINO does: `.data` hides it from autograd."""

    def move(self) -> None:
        for slow, fast in self.pairs():
            slow.data.mul_(0.9).add_(0.1 * fast.detach().data)


class Visible(Byol):
    @torch.no_grad()
    def move(self) -> None:
        for slow, fast in self.pairs():
            slow.lerp_(fast, 0.1)


class Copied(Byol):
    """A teacher that is a copy, every third step; its gradient reaches the student through what it gets."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step % 3 == 1:
            self.teacher.load_state_dict(self.student.state_dict())
        return F.mse_loss(self.teacher(self.predictor.weight.sum() * batch[0]), self.student(batch[0]))


class NewParameters(Byol):
    @torch.no_grad()
    def move(self) -> None:
        for slow, fast in zip(self.teacher, self.student, strict=True):
            if isinstance(slow, nn.Linear) and isinstance(fast, nn.Linear):
                slow.weight = nn.Parameter(0.9 * slow.weight + 0.1 * fast.weight, requires_grad=False)


class Later(Byol):
    """A teacher that moves from a later step on."""

    begins = 6

    def move(self) -> None:
        if self.global_step >= self.begins:
            super().move()


class AfterTheFirstEpoch(Later, InPlace):
    pass


class OfTheSamples(Byol):
    """A centre beside the teacher: pieces differ, so it is a buffer, which gets the mean."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def move(self) -> None:
        super().move()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.centre.data.lerp_(batch[0].mean(0), 0.1)
        return super().training_step((batch[0] - self.centre,), batch_idx)


class WithDropout(Net):
    """A teacher of a network with BatchNorm and dropout; the teacher has statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data = slow.data * 0.8 + fast.data * 0.2
        logits = self.net(batch[0])
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(logits, self.teacher(batch[0]))


KINDS = [Byol, InPlace, Visible, Copied, NewParameters, AfterTheFirstEpoch, OfTheSamples, WithDropout]
AS_WITH_LIGHTNING = KINDS[:-2]  # of the others the loss depends on the piece


def fitted(kind: type[pl.LightningModule], folder: Path, killed: bool = False, ckpt: Any = None, **options: Any) -> Any:
    """Return a module's state after a fit."""
    pl.seed_everything(0, verbose=False)
    module = kind()
    options = {"exact": True, "pieces": 4, **options, "callbacks": [Killed()] if killed else []}
    fits = trainer(folder, **options)
    fits.fit(module, loader(), ckpt_path=ckpt)
    state: Any = fits.strategy.lightning_module_state_dict()  # of weights in parts, rank zero has the whole
    return state


def sha256(*args: Any, **options: Any) -> str:
    return lockstep.weights_sha256(fitted(*args, **options))


@cache
def of_one_device(kind: type[pl.LightningModule], folder: Path) -> str:
    return sha256(kind, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("momentum")


@pytest.mark.parametrize("kind", AS_WITH_LIGHTNING)
def test_it_has_moved_once_after_a_step_as_with_lightnings_trainer(kind: Any, folder: Path) -> None:
    pl.seed_everything(0, verbose=False)
    module, batches = kind(), []

    class Records(pl.Callback):
        changes_weights = False

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *args: Any) -> None:
            batches.append([each.clone() for each in batch])

    pl.seed_everything(0, verbose=False)
    trainer(folder, exact=True, pieces=4, callbacks=[Records()]).fit(ours := kind(), loader())
    options: dict[str, Any] = QUIET | {"max_epochs": 2, "enable_checkpointing": False, "default_root_dir": folder}
    steps = len(batches) // 2

    class Again(torch.utils.data.Dataset[Any]):
        epoch = -1

        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> Any:
            self.epoch += index == 0
            return batches[self.epoch * steps + index]

    again = torch.utils.data.DataLoader(Again(), batch_size=None)
    pl.Trainer(**options, num_sanity_val_steps=0).fit(module, again)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert not torch.equal(kind().state_dict()["teacher.0.weight"], module.state_dict()["teacher.0.weight"])


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if at == number % 3 else pytest.mark.nightly)
        for number, kind in enumerate(KINDS)
        for at, layout in enumerate(("dp", "ddp", "fsdp"))
    ],
)
def test_the_same_bits_on_every_layout(kind: Any, layout: str, folder: Path, tmp_path: Path) -> None:
    if layout == "dp":
        other = sha256(kind, tmp_path, strategy="dp", devices=2)
    else:
        other = lockstep.launch(partial(sha256, strategy=layout), kind, tmp_path, **PROCESSES)
    assert other == of_one_device(kind, folder)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", [InPlace, OfTheSamples])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(kind: Any, folder: Path, tmp_path: Path) -> None:
    whole = of_one_device(kind, folder)
    with pytest.raises(lockstep.WorkerFailed):
        lockstep.launch(partial(sha256, checkpoint_every=4), kind, tmp_path, True, **PROCESSES)
    (file,) = tmp_path.rglob("last.ckpt")
    assert lockstep.launch(sha256, kind, tmp_path / "other", False, file, **PROCESSES) == whole
    layouts: tuple[dict[str, Any], ...] = ({"devices": 1}, {"strategy": "dp", "devices": 3})
    for number, layout in enumerate(layouts):
        assert sha256(kind, tmp_path / str(number), False, file, **layout) == whole


@pytest.mark.usefixtures("processes")
def test_a_rank_without_a_sample_has_the_teacher_of_the_others(tmp_path: Path) -> None:
    options = {"batch_size": 120, "pieces": 24}  # the last step has twelve samples
    one = sha256(InPlace, tmp_path / "one", **options)
    assert lockstep.launch(partial(sha256, InPlace, tmp_path / "two", **options), **PROCESSES) == one


@pytest.mark.usefixtures("processes")
def test_without_exact_the_teacher_is_the_same_to_rounding(folder: Path, tmp_path: Path) -> None:
    expected = values(WithDropout, folder)
    layouts: tuple[dict[str, Any], ...] = ({}, {"strategy": "dp", "devices": 2})
    others = [values(WithDropout, tmp_path / str(n), exact=False, **each) for n, each in enumerate(layouts)]
    others.append(lockstep.launch(partial(values, WithDropout, tmp_path / "ddp", exact=False), **PROCESSES))
    for other in others:
        assert other == pytest.approx(expected, rel=1e-3, abs=1e-4)


def values(*args: Any, **options: Any) -> list[float]:
    """Return the numbers of the state, which a process can send."""
    return torch.cat([each.flatten().double() for each in fitted(*args, **options).values()]).tolist()


class InStepTwo(Later, Visible):
    begins = 1


class InStepFive(Later, Visible):
    begins = 4


class HiddenInStepFive(Later, InPlace):
    begins = 4


@pytest.mark.usefixtures("processes")
def test_a_change_that_begins_in_the_first_steps_is_followed(tmp_path: Path) -> None:
    one = sha256(InStepTwo, tmp_path)
    assert lockstep.launch(sha256, InStepTwo, tmp_path, **PROCESSES) == one
    assert sha256(InStepTwo, tmp_path, strategy="dp", devices=2) == one


LATE = r"parameter teacher.0.weight of Linear begins to change inside training_step in the middle of an epoch"


@pytest.mark.parametrize("kind", [InStepFive, HiddenInStepFive])
@pytest.mark.usefixtures("processes")
def test_a_change_that_begins_later_is_refused(kind: Any, tmp_path: Path) -> None:
    for exact in (True, False):
        with pytest.raises(lockstep.UserError, match=f"^{LATE}: change it from the first step of a run"):
            fitted(kind, tmp_path, exact=exact)
    with pytest.raises(lockstep.UserError, match=LATE):
        lockstep.launch(sha256, kind, tmp_path, **PROCESSES)
    fitted(kind, tmp_path, exact=False, pieces=1)  # a step of one piece may do so


class Large(Visible):
    """A student that is so large that fsdp cuts it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 6))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


class LargeInPlace(Large):
    move = Byol.move


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", [Large, LargeInPlace])
def test_a_student_of_which_each_process_has_a_part(kind: Any, tmp_path: Path) -> None:
    one = sha256(kind, tmp_path / "one")
    function = partial(sha256, kind, tmp_path / "parts", strategy="fsdp")
    assert lockstep.launch(function, **PROCESSES) == one


class Differs(Byol):
    """One rank changes its teacher between the steps."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_rank and self.global_step == 3:
            self.pairs()[1][0].data.add_(1)


@pytest.mark.usefixtures("processes")
def test_ranks_that_differ_are_noticed(tmp_path: Path) -> None:
    text = r"parameter teacher.0.bias of Linear differs between a step's pieces or ranks: .* make it a buffer"
    with pytest.raises(lockstep.UserError, match=text):
        lockstep.launch(sha256, Differs, tmp_path, **PROCESSES)


class ParameterOfTheSamples(OfTheSamples):
    def __init__(self) -> None:
        super().__init__()
        del self.centre
        self.centre = nn.Parameter(torch.zeros(8), requires_grad=False)


def test_a_parameter_of_which_pieces_have_other_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lockstep.UserError, match=r"parameter centre of ParameterOfTheSamples differs between"):
        fitted(ParameterOfTheSamples, tmp_path, exact=False)


class Frozen(Net):
    """A network with a large part that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.LayerNorm(16)
        self.frozen = nn.Linear(8, 64).requires_grad_(False)

        self.copies: dict[int, int] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        buffers: Any = self.trainer.fit_loop.epoch_loop.passes.buffers  # type: ignore[attr-defined]
        self.copies[self.global_step] = sum(each.start is not None for each in buffers.buffers.values())
        return super().training_step(batch, batch_idx) + 0 * self.frozen(batch[0]).mean()


def test_parameters_that_never_change_are_copied_in_few_steps(tmp_path: Path) -> None:
    module = Frozen()
    trainer(tmp_path, exact=True, pieces=4).fit(module, loader())
    assert list(module.copies.values()) == [2, 2, 2, 0, 0, 2, 2, 0, 0, 0, 0, 2], "three steps, and the ends of epochs"


class Moco(Byol):
    """It compares with the keys of earlier samples, in a queue that is filled after the step."""

    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(96, 6), dim=1))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.move()
        queries, keys = self.student(batch[0]), self.teacher(batch[0].flip(1))
        queries, keys = F.normalize(queries, dim=1), F.normalize(keys, dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().T], 1)
        return {"loss": F.cross_entropy(logits / 0.2, torch.zeros(len(logits), dtype=torch.long)), "keys": keys}

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        keys = self.all_gather(outputs["keys"])
        assert isinstance(keys, Tensor)
        keys = keys.reshape(-1, 6)
        at = (int(self.pointer) + torch.arange(len(keys))) % len(self.queue)
        self.queue[at] = keys
        self.pointer[0] = (int(self.pointer) + len(keys)) % len(self.queue)


@pytest.mark.usefixtures("processes")
def test_a_queue_that_is_filled_after_the_step(tmp_path: Path) -> None:
    one = fitted(Moco, tmp_path / "one")
    assert int(one["pointer"]) == 2 * 132 % 96, "each sample once"
    whole = lockstep.weights_sha256(one)
    assert sha256(Moco, tmp_path / "dp", strategy="dp", devices=3) == whole
    assert lockstep.launch(sha256, Moco, tmp_path / "ddp", **PROCESSES) == whole
    with pytest.raises(lockstep.WorkerFailed):
        lockstep.launch(partial(sha256, checkpoint_every=4), Moco, tmp_path / "killed", True, **PROCESSES)
    (file,) = (tmp_path / "killed").rglob("last.ckpt")
    assert lockstep.launch(sha256, Moco, tmp_path / "other", False, file, **PROCESSES) == whole


class NotFinite(Visible):
    """In its sixth step the gradient is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        factor = torch.inf if batch_idx == 5 else 1.0
        return loss * factor


class WithoutThisStep(NotFinite):
    def move(self) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx != 5:
            super().move()


@pytest.mark.usefixtures("processes")
def test_a_step_that_is_skipped_leaves_the_teacher_as_it_was(tmp_path: Path) -> None:
    one = sha256(NotFinite, tmp_path, nonfinite="skip")
    assert one == sha256(WithoutThisStep, tmp_path, nonfinite="skip")
    function = partial(sha256, NotFinite, tmp_path, nonfinite="skip")
    assert lockstep.launch(function, **PROCESSES) == one


class Unfreezes(pl.Callback):
    """Trains the first layer from the second epoch on, as fine-tuning does."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch >= self.epoch)


def test_what_is_unfrozen_is_trained_on_every_layout(tmp_path: Path) -> None:
    def fitted(epoch: int = 1, **options: Any) -> str:
        return fit(tmp_path, exact=True, pieces=4, callbacks=[Unfreezes(epoch)], **options)

    one = fitted()
    assert fitted(strategy="dp", devices=2) == one
    assert fitted(epoch=9) != one, "the control"
