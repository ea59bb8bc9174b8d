"""The models room: shapes, refusals, schedules, and metrics that don't depend on who evaluated what."""

import copy
import io
import math
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningDataModule, Trainer
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_confusion_matrix

import lockstep.models
from lockstep.callbacks import StandIn
from lockstep.layout import Refusal
from lockstep.models import FastCNN, ImageClassifier, MnistCNN, ResNet18
from lockstep.models.metrics import Evaluation, ExactMean
from lockstep.models.optimizer import build_optimizer
from lockstep.models.schedule import lr_factor

CONF = Path(__file__).parents[1] / "conf"


def task(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "channels": 1,
        "image_size": 12,
        "num_classes": 3,
        "lr": 0.1,
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "scheduler": {"name": "cosine"},
        "total_steps": 8,
    }
    return plain | changes


def mnist_cnn(**changes: Any) -> Any:
    return MnistCNN(**task(**changes))


def fast_cnn(**changes: Any) -> Any:
    return FastCNN(**task(**{"image_size": 19, **changes}))


def resnet18(**changes: Any) -> Any:
    return ResNet18(**task(**changes))


def plain_option(group: str, name: str) -> dict[str, Any]:
    found = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


# Nets


@pytest.mark.parametrize(("channels", "image_size", "num_classes"), [(1, 28, 10), (3, 32, 100), (1, 10, 2), (4, 11, 1)])
def test_mnist_cnn_derives_its_sizes(channels: int, image_size: int, num_classes: int) -> None:
    model = mnist_cnn(channels=channels, image_size=image_size, num_classes=num_classes)
    assert model(torch.zeros(3, channels, image_size, image_size)).shape == (3, num_classes)
    assert model(model.example_input_array).shape == (2, num_classes)
    if image_size == 28:
        assert model.net.hidden.in_features == 2000


@pytest.mark.parametrize(("channels", "image_size", "num_classes"), [(1, 28, 10), (3, 32, 100), (1, 19, 2), (4, 35, 1)])
def test_fast_cnn_derives_its_sizes(channels: int, image_size: int, num_classes: int) -> None:
    model = fast_cnn(channels=channels, image_size=image_size, num_classes=num_classes, width=[2, 3, 4, 5])
    assert model(torch.zeros(3, channels, image_size, image_size)).shape == (3, num_classes)
    assert model.net.logits.in_features == 5 * ((image_size - 3) // 16 or 1) ** 2
    tail = torch.randn(1, channels, image_size, image_size)
    assert model.train()(tail).shape == (1, num_classes), "a tail of one sample must train too"


@pytest.mark.parametrize(
    ("options", "kernel", "pools"),
    [
        ({"image_size": 32}, 3, False),
        ({"image_size": 65}, 7, True),
        ({"image_size": 33, "stem": "imagenet"}, 7, True),
        ({"image_size": 65, "stem": "small", "channels": 3}, 3, False),
        ({"image_size": 8, "norm": "group"}, 3, False),
    ],
)
def test_resnet18_takes_any_image(options: dict[str, Any], kernel: int, pools: bool) -> None:
    model = resnet18(**options)
    assert model.net.conv1.kernel_size == (kernel, kernel)
    assert isinstance(model.net.maxpool, nn.MaxPool2d) == pools
    shape = model.example_input_array.shape[1:]
    assert model.train()(torch.randn(1, *shape)).shape == (1, 3), "a tail of one sample must train too"


def test_resnet18_norm_switch() -> None:
    kinds = {norm: {type(m) for m in resnet18(norm=norm).modules()} for norm in ("batch", "group")}
    assert nn.BatchNorm2d in kinds["batch"]
    assert nn.GroupNorm not in kinds["batch"]
    assert nn.GroupNorm in kinds["group"]
    assert nn.BatchNorm2d not in kinds["group"]


def test_dropout_is_off_unless_asked_for() -> None:
    x = torch.randn(4, 1, 12, 12)
    state = torch.get_rng_state()
    off = mnist_cnn()
    torch.set_rng_state(state)
    on = mnist_cnn(dropout=0.5)
    before = torch.get_rng_state()
    assert torch.equal(off(x), off(x))
    assert torch.equal(torch.get_rng_state(), before), "without dropout nothing may draw random numbers"
    assert not torch.equal(on(x), on(x))
    assert torch.equal(on.eval()(x), off(x)), "same weights, same parameter names"


@pytest.mark.parametrize("build", [mnist_cnn, fast_cnn, resnet18, partial(resnet18, norm="group")])
def test_weights_follow_from_the_seed_and_only_they_are_state(build: Any) -> None:
    first, second = [(torch.manual_seed(7), build())[1] for _ in range(2)]
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])
    state = first.state_dict()
    batch = torch.randn_like(first.example_input_array), torch.tensor([0, 2])
    first.training_step(batch, 0)
    first.validation_step(batch, 0)
    assert set(first.state_dict()) == set(state) == {f"net.{key}" for key in first.net.state_dict()}
    assert {name for name, _ in first.named_buffers()} == {f"net.{name}" for name, _ in first.net.named_buffers()}


@pytest.mark.parametrize(
    ("build", "options", "says"),
    [
        (mnist_cnn, {"image_size": 9}, "at least 10 x 10"),
        (mnist_cnn, {"dropout": 1.0}, "dropout=1.0"),
        (mnist_cnn, {"label_smoothing": -0.1}, "label_smoothing=-0.1"),
        (fast_cnn, {"image_size": 18}, "at least 19 x 19"),
        (fast_cnn, {"width": [8, 8, 8]}, r"width=\[8, 8, 8\]: four"),
        (fast_cnn, {"width": [8, 8, 8, 0]}, "at least 1"),
        (resnet18, {"stem": "tiny"}, "auto, small, imagenet"),
        (resnet18, {"norm": "layer"}, "batch, group"),
        (resnet18, {"image_size": 8}, "at least 9 x 9"),
        (resnet18, {"image_size": 32, "stem": "imagenet"}, "stem=small"),
        (resnet18, {"pretrained": True}, "channels=3"),
        (resnet18, {"pretrained": True, "channels": 3, "norm": "group"}, "norm=batch"),
    ],
)
def test_what_does_not_fit_is_refused(build: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        build(**options)
    assert "\n" not in str(caught.value)


def test_pretrained_weights_are_used_or_their_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    place = tmp_path / "checkpoints" / Path(torchvision.models.ResNet18_Weights.DEFAULT.url).name
    place.parent.mkdir()
    place.write_bytes(b"half a file")
    with pytest.raises(Refusal, match="pretrained=true") as caught:
        resnet18(channels=3, pretrained=True)
    assert str(place) in str(caught.value)
    assert "\n" not in str(caught.value)

    weights = {key: torch.full_like(value, 2) for key, value in torchvision.models.resnet18().state_dict().items()}
    torch.save(weights, place)
    net = resnet18(channels=3, pretrained=True).net
    assert (net.layer1[0].conv1.weight == 2).all()
    assert net.fc.weight.shape == (3, 512)
    assert not (net.conv1.weight == 2).any(), "the small stem has no pretrained weights"


@pytest.mark.parametrize("name", ["mnist_cnn", "fast_cnn", "resnet18"])
def test_configs_build(name: str) -> None:
    options = plain_option("model", name)
    assert options.pop("name") == name
    build = getattr(lockstep.models, options.pop("_target_").removeprefix("lockstep.models."))
    for optimizer in ("sgd", "adamw"):
        for scheduler in ("constant", "cosine", "onecycle"):
            choices = {
                "optimizer": plain_option("optimizer", optimizer),
                "scheduler": plain_option("scheduler", scheduler),
            }
            assert (
                build(**options, **task(image_size=28, **choices)).configure_optimizers()["lr_scheduler"]["interval"]
                == "step"
            )


# Optimizers and schedules


def test_biases_and_norms_do_not_decay() -> None:
    model = resnet18()
    model.net.fc.weight.requires_grad = False
    decay, plain = build_optimizer(model, 0.1, "adamw", weight_decay=0.02, betas=[0.8, 0.9]).param_groups
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.02, 0.0)
    assert all(p.ndim > 1 for p in decay["params"])
    assert all(p.ndim == 1 for p in plain["params"])
    assert len(decay["params"]) + len(plain["params"]) == len(list(model.parameters())) - 1, "all that is trained"


@pytest.mark.parametrize(
    ("options", "says"),
    [({"name": "lion"}, "sgd, adamw"), ({"name": "sgd", "beta": 1}, "beta"), ({"name": "adamw", "eps": -1.0}, "-1.0")],
)
def test_bad_optimizers_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        build_optimizer(nn.Linear(2, 2), 0.1, **options)


@pytest.mark.parametrize(
    ("total", "options", "says"),
    [
        (10, {"name": "step"}, "constant, cosine, onecycle"),
        (10, {"name": "cosine", "warmup_steps": 11}, r"warmup_steps=11 must lie in 0\.\.10"),
        (10, {"name": "cosine", "end": 1}, "end"),
        (10, {"name": "cosine", "final": 2}, "final=2"),
        (10, {"name": "onecycle", "peak": 1.0}, "peak=1.0"),
        (0, {"name": "constant"}, "total_steps=0"),
    ],
)
def test_bad_schedules_are_refused(total: int, options: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        lr_factor(total, **options)


def test_schedules_are_their_closed_forms() -> None:
    constant = lr_factor(10, "constant", warmup_steps=4)
    assert [constant(s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = lr_factor(104, "cosine", warmup_steps=4, final=0.1)
    assert cosine(0) == 0.25
    assert cosine(3) == cosine(4) == 1.0
    for step in range(4, 104):
        assert cosine(step) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 100)) / 2)
    assert cosine(104) == cosine(200) == pytest.approx(0.1)
    onecycle = lr_factor(100, "onecycle", peak=0.2, start=0.1, final=0.0)
    assert [onecycle(s) for s in (0, 10, 20, 60, 100)] == pytest.approx([0.1, 0.55, 1.0, 0.5, 0.0])
    assert max(range(100), key=onecycle) == 20
    assert lr_factor(3, "cosine", warmup_steps=3)(2) == 1.0


@pytest.mark.parametrize("scheduler", [{"name": "cosine", "warmup_steps": 2}, {"name": "onecycle", "peak": 0.25}])
def test_schedule_resumes_from_plain_state(scheduler: dict[str, Any]) -> None:
    def run(setup: dict[str, Any], steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            rates.append(setup["optimizer"].param_groups[0]["lr"])
            setup["optimizer"].step()
            setup["lr_scheduler"]["scheduler"].step()
        return rates

    def build() -> Any:
        return mnist_cnn(scheduler=scheduler).configure_optimizers()

    whole = run(build(), 8)
    assert whole == pytest.approx([0.1 * lr_factor(8, **scheduler)(s) for s in range(8)])
    killed, resumed, file = build(), build(), io.BytesIO()
    first = run(killed, 3)
    torch.save([killed["optimizer"].state_dict(), killed["lr_scheduler"]["scheduler"].state_dict()], file)
    file.seek(0)
    optimizer, schedule = torch.load(file, weights_only=True)
    resumed["optimizer"].load_state_dict(optimizer)
    resumed["lr_scheduler"]["scheduler"].load_state_dict(schedule)
    assert first + run(resumed, 5) == whole


# Evaluation


Chunk = tuple[Tensor, Tensor, Tensor]  # losses, logits, labels


def evaluated(chunks: list[Chunk], classes: int) -> Evaluation:
    found = Evaluation(classes)
    for chunk in chunks:
        found.update(*chunk)
    return found


def merged(parts: list[Evaluation]) -> Evaluation:
    """What torchmetrics makes of several devices: states are added."""
    whole = copy.deepcopy(parts[0])
    for part in parts[1:]:
        for mine, other in zip(whole.children(), part.children(), strict=True):
            assert isinstance(mine, Metric)
            mine.merge_state(cast(Metric, other))
    return whole


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 60), classes=st.sampled_from([2, 5, 10, 17]), scale=st.floats(-8, 8)
)
def test_any_order_any_chunks_any_devices_same_numbers(seed: int, n: int, classes: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    losses = torch.from_numpy(rng.exponential(10.0**scale, n))
    logits = torch.from_numpy(rng.normal(size=(n, classes)))
    labels = torch.from_numpy(rng.integers(0, classes, n))
    found, matrix = evaluated([(losses, logits, labels)], classes).compute()

    order = torch.from_numpy(rng.permutation(n))
    cuts = sorted(rng.integers(0, n + 1, 5).tolist())
    pieces = [order[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True) if a < b]
    chunks = [(losses[i], logits[i], labels[i]) for i in pieces]
    two_devices = merged([evaluated(chunks[:2], classes), evaluated(chunks[2:], classes)])
    for other, other_matrix in (evaluated(chunks, classes).compute(), two_devices.compute()):
        assert other == found
        assert torch.equal(other_matrix, matrix)

    assert found["loss"] == pytest.approx(math.fsum(losses.tolist()) / n, abs=2.0**-33, rel=1e-15)
    oracle = multiclass_confusion_matrix(logits, labels, classes)
    assert torch.equal(matrix, oracle)
    assert (found["correct"], found["count"]) == (int(oracle.trace()), n)
    assert isinstance(found["correct"], int)
    assert ("acc_top5" in found) == (classes > 10)
    if classes > 10:
        top = multiclass_accuracy(logits, labels, classes, top_k=5, average="micro")
        assert found["acc_top5"] == pytest.approx(float(top))


def test_the_sum_of_losses_forgets_no_small_one() -> None:
    """Added up in floats, in either precision, the small ones would be lost beside the large one."""
    mean = ExactMean()
    mean.update(torch.tensor([2.0**36] + [2.0**-20] * 64, dtype=torch.float64))
    assert mean.compute() == (2**36 * 2**20 + 64) / (65 * 2**20)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_broken_loss_is_seen_and_the_accuracy_stays(bad: float) -> None:
    losses, logits = torch.tensor([0.5, bad], dtype=torch.float64), torch.eye(2)
    found, _ = evaluated([(losses, logits, torch.tensor([0, 1]))], 2).compute()
    assert math.isnan(found["loss"])
    assert found["acc"] == 1.0


@pytest.mark.filterwarnings("ignore:.*compute.*before.*update:UserWarning")
def test_no_sample_is_no_number() -> None:
    found, matrix = Evaluation(3).compute()
    assert math.isnan(found["acc"])
    assert math.isnan(found["loss"])
    assert not matrix.any()


def test_reset_forgets_everything() -> None:
    evaluation = evaluated([(torch.ones(2), torch.eye(17)[:2], torch.tensor([0, 1]))], 17)
    evaluation.reset()
    evaluation.update(torch.full((1,), 3.0), -torch.arange(17.0)[None], torch.tensor([16]))
    found, _ = evaluation.compute()
    assert found == {"loss": 3.0, "acc": 0.0, "correct": 0, "count": 1, "acc_top5": 0.0}


# In a Trainer


def batches(count: int, n: int = 6, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [n] * (count - 1) + [n // 2]
    return [
        (torch.randn(s, 1, 12, 12, generator=generator), torch.randint(0, 3, (s,), generator=generator)) for s in sizes
    ]


def loader(items: list[tuple[Tensor, Tensor]]) -> DataLoader:
    return DataLoader(items, batch_size=None)  # type: ignore[arg-type]


def trainer(folder: Path, **changes: Any) -> Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        False,
    )
    return Trainer(**quiet, accelerator="cpu", devices=1, default_root_dir=folder, **changes)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_evaluation_in_a_trainer(tmp_path: Path) -> None:
    model = mnist_cnn(label_smoothing=0.2)
    data = batches(4)
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
    assert model.confusion is not None
    assert int(model.confusion.sum()) == 21


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("without_a_sample", [False, True])
def test_a_stand_in_is_forgotten(tmp_path: Path, without_a_sample: bool) -> None:
    class Data(LightningDataModule):
        def test_dataloader(self) -> Any:
            return loader(batches(1))

        def stand_in(self, split: str) -> bool:
            assert split == "test"
            return without_a_sample

    class Users(MnistCNN):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            super().test_step(batch, batch_idx)
            self.log("users_own", 7.0)

    run = trainer(tmp_path, callbacks=[StandIn()])
    run.test(Users(**task()), datamodule=Data(), verbose=False)
    assert run.callback_metrics["test/count"] == (0 if without_a_sample else 3)
    assert math.isnan(run.callback_metrics["test/loss"]) == without_a_sample
    own = float(run.callback_metrics["users_own"])  # nan, but there: the other ranks sum it with theirs
    assert math.isnan(own) if without_a_sample else own == 7.0


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_train_totals_are_of_whole_epochs_across_a_resume(tmp_path: Path) -> None:
    data = batches(4)

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "cut.ckpt")

    def fit(items: list[tuple[Tensor, Tensor]], max_epochs: int, *callbacks: Callback, **options: Any) -> Trainer:
        torch.manual_seed(1)
        run = trainer(tmp_path, max_epochs=max_epochs, callbacks=list(callbacks))
        run.fit(mnist_cnn(), loader(items), weights_only=True, **options)
        return run

    whole = fit(data, 2, Save())  # within the second epoch
    # Lightning's own loop restarts its loader at the front; ours would not, so this one is turned to where it was.
    resumed = fit(data[2:] + data[:2], 2, ckpt_path=tmp_path / "cut.ckpt")
    assert resumed.global_step == whole.global_step == 8
    for name in ("train/loss", "train/acc"):
        assert float(resumed.callback_metrics[name]) == pytest.approx(float(whole.callback_metrics[name]), rel=1e-12)
    one = fit(data[:3], 1)
    assert isinstance(one.lightning_module, ImageClassifier)
    loss, correct, samples = one.lightning_module.train_totals(reset=True).tolist()
    assert samples == 18 == sum(len(y) for _, y in data[:3])
    assert (loss / samples, correct / samples) == pytest.approx(
        (float(one.callback_metrics["train/loss"]), float(one.callback_metrics["train/acc"]))
    )
    assert not one.lightning_module.train_totals(reset=False).any()


def test_a_checkpoint_is_plain_and_rebuilds_its_model(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1)
    run.fit(model := mnist_cnn(dropout=0.25), loader(batches(2)))
    run.save_checkpoint(tmp_path / "plain.ckpt")
    loaded: Any = MnistCNN.load_from_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    assert loaded.net.dropout.p == 0.25
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


class Squared(MnistCNN):
    """A user's own loss, one method."""

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits - nn.functional.one_hot(y, self.num_classes)).square().sum(1)


def test_another_loss_is_one_method() -> None:
    model, batch = Squared(**task()), batches(1)[0]
    loss = model.training_step(batch, 0).detach()
    model.validation_step(batch, 0)
    assert model.evaluation.compute()[0]["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_a_resumed_run_follows_its_own_config() -> None:
    """lr, momentum and so on are the new ones, what the optimizer has gathered is kept."""

    def made(lr: float, momentum: float) -> MnistCNN:
        options = {"lr": lr, "optimizer": {"name": "sgd", "momentum": momentum, "weight_decay": 0.1}}
        return MnistCNN(**(task() | options | {"scheduler": {"name": "cosine", "final": 0.5}, "total_steps": 8}))

    def saved(model: MnistCNN) -> dict[str, Any]:
        setup = model.configure_optimizers()
        for _ in range(3):
            sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
            setup["optimizer"].step()
            setup["lr_scheduler"]["scheduler"].step()
        parts = [setup["optimizer"], setup["lr_scheduler"]["scheduler"]]
        return dict(zip(("optimizer_states", "lr_schedulers"), ([part.state_dict()] for part in parts), strict=True))

    same, new = saved(made(0.4, 0.9)), saved(made(0.1, 0.5))
    group, other = (found["optimizer_states"][0]["param_groups"][0] for found in (same, new))
    untouched = dict(group)
    made(0.4, 0.9).on_load_checkpoint(same)
    assert group == untouched
    model = made(0.1, 0.5)
    model.on_load_checkpoint(same)
    assert group == other != untouched
    assert same["lr_schedulers"][0]["base_lrs"] == [0.1, 0.1]
    assert same["optimizer_states"][0]["state"]
