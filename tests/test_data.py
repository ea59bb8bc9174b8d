"""The data room: what is refused, what a share holds, what order and augmentation depend on."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import multiprocessing
import os
import random
import socket
import struct
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from lockstep.data import ArrayDataset, DataModule, Share, Spec, Splits, Turn, image_folder, mnist, open_data
from lockstep.data import files as file_sets
from lockstep.data.augment import Augment
from lockstep.data.datasets import fetch, fingerprint
from lockstep.data.embedded import enlarge, synthetic
from lockstep.data.folder import FolderDataset
from lockstep.data.loaders import own_chunks
from lockstep.data.opening import hold_out
from lockstep.layout import Layout, Refusal, resolve

MODEL = torch.nn.Linear(1, 1)
CONF = Path(__file__).resolve().parents[1] / "conf" / "data"


def layout(devices: int = 1, batch_size: int = 12, pieces: int | None = None, strategy: str = "ddp") -> Layout:
    strategy = strategy if devices > 1 else "single"
    return resolve(
        strategy=strategy, accelerator="cpu", devices=devices, num_nodes=1, batch_size=batch_size, pieces=pieces
    )


def arrays(samples: int, size: int = 6, channels: int = 1) -> ArrayDataset:
    rng = np.random.default_rng(0)
    return ArrayDataset(rng.integers(0, 256, (samples, channels, size, size), dtype=np.uint8), np.arange(samples))


def splits(train: Any, augment: Augment | None = None, evaluated: Any = None) -> Splits:
    evaluated = arrays(10) if evaluated is None else evaluated
    spec = Spec(1, 6, ("a", "b"), mean=(0.4,), std=(0.2,))
    return Splits(train, evaluated, evaluated, spec, "", augment or Augment())


def module(data: Splits, on: Layout, process: int = 0, step: int = 0, seed: int = 3, workers: int = 0) -> DataModule:
    made = DataModule(data, on, seed=seed, num_workers=workers)
    made.process = process
    made.trainer = SimpleNamespace(global_step=step, lightning_module=MODEL)  # type: ignore[assignment]
    return made


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml")), **changes}  # type: ignore[dict-item]


def one_line(error: pytest.ExceptionInfo[Refusal]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# --- files ------------------------------------------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.fixture
def mnist_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small set in MNIST's files, and no network."""

    def offline(*args: Any, **kwargs: Any) -> None:
        raise OSError("offline")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(1)
    for prefix, count in (("train", 20), ("t10k", 5)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8) % 10))
    return tmp_path


def test_idx_files_are_read_plain_and_gzipped(mnist_dir: Path) -> None:
    plain = open_data(config("mnist"), str(mnist_dir))
    assert (len(plain.train), len(plain.val), len(plain.test)) == (18, 2, 5)
    for file in (mnist_dir / "MNIST" / "raw").iterdir():
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert open_data(config("mnist"), str(mnist_dir)).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-1], ["truncated", "15,696 bytes expected", "15,695 found"]),
        ("train-images-idx3-ubyte", lambda b: b + b"x", ["too long", "15,697 found"]),
        ("t10k-labels-idx1-ubyte", lambda b: b"", ["not an IDX file", "0x00000801 expected"]),
        ("t10k-images-idx3-ubyte", lambda b: b"<html>" + b, ["not an IDX file", "0x3c68746d"]),
        ("train-labels-idx1-ubyte", lambda b: idx(np.zeros(19, np.uint8)), ["19 labels", "20 images"]),
        ("train-labels-idx1-ubyte", lambda b: idx(np.full(20, 11, np.uint8)), ["label 11", "10 classes"]),
        ("train-images-idx3-ubyte", lambda b: idx(np.zeros((20, 9, 9), np.uint8)), ["9 x 9", "28 x 28"]),
    ],
)
def test_damaged_idx_files_are_refused_by_name(mnist_dir: Path, name: str, damage: Any, words: list[str]) -> None:
    file = mnist_dir / "MNIST" / "raw" / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Refusal) as error:
        mnist(str(mnist_dir))
    assert all(word in one_line(error) for word in [name, *words])


def test_damaged_gzip_is_refused(mnist_dir: Path) -> None:
    file = mnist_dir / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes())[:-20])
    file.unlink()
    with pytest.raises(Refusal, match=r"train-images-idx3-ubyte\.gz: damaged gzip"):
        mnist(str(mnist_dir))


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_absent_files_are_downloaded(mnist_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    monkeypatch.undo()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served, resources = tmp_path / "served", []
    served.mkdir()
    for file in sorted((mnist_dir / "MNIST" / "raw").iterdir()):
        packed = gzip.compress(file.read_bytes())
        (served / f"{file.name}.gz").write_bytes(packed)
        resources.append((f"{file.name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    timeout = socket.getdefaulttimeout()
    with http.server.HTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(served))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [mirror])
        found = open_data(config("mnist"), str(tmp_path / "fresh"))
        server.shutdown()
    assert found.fingerprint == open_data(config("mnist"), str(mnist_dir)).fingerprint
    assert [entry.name for entry in (tmp_path / "fresh").iterdir()] == ["MNIST"]
    assert socket.getdefaulttimeout() == timeout


@pytest.mark.parametrize(("name", "file"), [("mnist", "MNIST"), ("fashion_mnist", "Fashion"), ("cifar10", "cifar")])
def test_absent_files_offline(name: str, file: str, tmp_path: Path, mnist_dir: Path) -> None:
    empty = tmp_path / "empty"
    with pytest.raises(Refusal) as error:
        open_data(config(name), str(empty))
    assert all(word in one_line(error) for word in [f"{name}: no files in {empty / file}", "offline", "data=digits"])
    assert list(empty.iterdir()) == []
    with pytest.raises(Refusal, match="can't hold a download"):
        open_data(config(name), str(tmp_path / "no" / "such" / "folder"))


def test_cifar10_opens_no_file_whose_digest_is_wrong(mnist_dir: Path) -> None:
    folder = mnist_dir / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")  # a pickle that would run a command
    with pytest.raises(Refusal, match=r"data_batch_1: damaged \(its MD5"):
        file_sets.cifar10(str(mnist_dir))


# --- folders of images ------------------------------------------------------------------------------------------------


def write_images(root: Path, parts: tuple[str, ...] = ("train", "test"), each: int = 6) -> Path:
    rng = np.random.default_rng(2)
    for part in parts:
        for name in ("cat", "dog"):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(each):
                Image.fromarray(rng.integers(0, 256, (20, 14, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return root


def test_image_folder(tmp_path: Path) -> None:
    found = open_data(config("image_folder", image_size=8, val_fraction=0.25), str(write_images(tmp_path)))
    assert (len(found.train), len(found.val), len(found.test)) == (9, 3, 12)
    assert found.spec.classes == ("cat", "dog")
    images, labels = fetch(found.test, np.arange(12))
    assert (images.dtype, images.shape) == (torch.uint8, (12, 3, 8, 8))
    assert labels.tolist() == [0] * 6 + [1] * 6
    grey = open_data(config("image_folder", channels=1), str(tmp_path))
    assert fetch(grey.test, np.arange(2))[0].shape == (2, 1, 32, 32)
    write_images(tmp_path, ("val",), each=2)
    assert (len(open_data(config("image_folder"), str(tmp_path)).val)) == 4


def test_image_folder_fingerprint_follows_names_and_sizes(tmp_path: Path) -> None:
    write_images(tmp_path)
    before = open_data(config("image_folder"), str(tmp_path)).fingerprint
    assert open_data(config("image_folder"), str(tmp_path)).fingerprint == before
    (tmp_path / "train" / "cat" / "0.png").rename(tmp_path / "train" / "cat" / "00.png")
    assert open_data(config("image_folder"), str(tmp_path)).fingerprint != before


def spoil(root: Path, how: str) -> None:
    cat = root / "train" / "cat"
    if how == "empty class":
        for file in cat.iterdir():
            file.rename(file.with_suffix(".txt"))
    elif how == "no classes":
        (root / "test").rename(root / "other")
        (root / "test").mkdir()
    elif how == "no test":
        (root / "test").rename(root / "other")
    elif how == "other classes":
        cat.rename(cat.with_name("lion"))
    elif how == "unreadable":
        (cat / "3.png").write_bytes(b"not an image")
        (cat / "4.png").write_bytes(b"")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("empty class", ["no image in", "train/cat"]),
        ("no classes", ["test has no folders"]),
        ("no test", ["there is no", "/test", "train/ and test/"]),
        ("other classes", ["same classes", "only test/ has cat (and 1 more)"]),
        ("unreadable", ["cat/3.png", "and 1 more"]),
    ],
)
def test_image_folders_that_are_refused(tmp_path: Path, how: str, words: list[str]) -> None:
    spoil(write_images(tmp_path), how)
    with pytest.raises(Refusal) as error:
        image_folder(str(tmp_path))
    assert all(word in one_line(error) for word in words), one_line(error)


def test_missing_image_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"data_dir=.*nowhere is no folder"):
        image_folder(str(tmp_path / "nowhere"))


def test_image_that_breaks_later_is_named(tmp_path: Path) -> None:
    dataset = FolderDataset(write_images(tmp_path) / "train", 8, 3)
    whole = dataset.path(4).read_bytes()
    dataset.path(4).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refusal, match=r"cat/4\.png can't be decoded"):
        dataset[4]


# --- embedded sets, splits, options -----------------------------------------------------------------------------------


def test_digits_split_is_stratified_and_fixed() -> None:
    found = open_data(config("digits"), "nowhere")
    counts = np.bincount(found.test.labels.numpy())
    assert len(found.train) + len(found.val) + len(found.test) == 1797
    assert len(found.test) == 359
    assert counts.min() >= 35
    assert counts.max() <= 37
    # a changed split or enlargement would make every published number incomparable
    assert found.fingerprint == open_data(config("digits"), "elsewhere", seed=9).fingerprint
    assert fingerprint(found.test).startswith("6cf35046c249215d")


def test_enlarge_keeps_constants_and_range() -> None:
    assert (enlarge(np.full((1, 8, 8), 16), 28) == 255).all()
    assert (enlarge(np.zeros((1, 8, 8), dtype=np.int64), 28) == 0).all()
    ramp = enlarge(np.broadcast_to(np.arange(8) * 2, (1, 8, 8)), 28)[0]
    assert (np.diff(ramp.astype(int), axis=1) >= 0).all()
    assert (ramp == ramp[:1]).all()


def test_synthetic_images_can_be_told_apart() -> None:
    source = synthetic(samples=200, image_size=20)
    images, labels = source.train.images.float().flatten(1), source.train.labels
    centres = torch.stack([images[labels == label].mean(0) for label in range(10)])
    nearest = torch.cdist(source.test.images.float().flatten(1), centres).argmin(1)
    assert (nearest == source.test.labels).float().mean() > 0.9


def test_held_out_samples_are_those_of_smallest_hash() -> None:
    train, val = hold_out(arrays(1000), 0.1, 0)
    assert len(val) == 100
    assert sorted([*train.indices, *val.indices]) == list(range(1000))
    assert list(hold_out(arrays(1000), 0.1, 0)[1].indices) == list(val.indices)
    assert set(hold_out(arrays(1000), 0.1, 1)[1].indices) != set(val.indices)
    assert set(val.indices) < set(hold_out(arrays(1000), 0.2, 0)[1].indices)  # a larger fraction only adds
    assert hold_out(arrays(5), 0.0, 0)[1] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"val_fraction": 1.0}, "data.val_fraction=1.0: must be at least 0 and below 1"),
        ({"val_fraction": -0.1}, "data.val_fraction=-0.1"),
        ({"val_fraction": 0.9999}, "none would be left"),
        ({"augment": {"crop": 28}}, "less than the images' 28 pixels"),
        ({"augment": {"crop": -1}}, "data.augment.crop=-1"),
        ({"augment": {"flop": True}}, "data.augment.flop: there is no such key"),
        ({"augment": "crop"}, "data.augment=crop"),
        ({"samples": "many"}, "data.samples=many"),
        ({"num_classes": 1}, "data.num_classes=1"),
        ({"sampels": 4}, "did you mean samples"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal) as error:
        open_data(config("synthetic", **change), "nowhere")
    assert words in one_line(error)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_every_config_names_itself_and_its_opener(name: str) -> None:
    found = config(name)
    assert found["name"] == name
    assert found["_target_"] == f"lockstep.data.{name}"


# --- fetching ---------------------------------------------------------------------------------------------------------


def test_a_gather_is_the_same_as_sample_by_sample() -> None:
    dataset, ids = arrays(50), np.array([3, 49, 0, 3])
    images, labels = fetch(Subset(dataset, np.arange(50)[::-1].copy()), ids)  # type: ignore[arg-type]
    for row, index in enumerate(49 - ids):
        assert torch.equal(images[row], dataset[index][0])
        assert labels[row] == dataset[index][1]


class Noisy(torch.utils.data.Dataset[Any]):
    """Somebody's dataset, with random transforms that draw from every global generator."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, float]:
        noise = random.random() + np.random.rand()  # noqa: NPY002
        return torch.rand(2) + index, index, noise


def shares(made: DataModule) -> list[Share]:
    return list(made.train_dataloader())


def same(one: list[Share], other: list[Share]) -> bool:
    def tensors(found: list[Share]) -> list[torch.Tensor]:
        return [t for share in found for turn in share.turns for t in (*turn.batch, torch.from_numpy(turn.ids))]

    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


@pytest.mark.parametrize("dataset", [arrays(30), Noisy(), Subset(Noisy(), list(range(5, 30)))])
def test_worker_processes_change_no_bit(dataset: Any) -> None:
    on = layout(batch_size=8, pieces=2)
    torch.manual_seed(0)
    inline = shares(module(splits(dataset), on))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert same(inline, shares(module(splits(dataset), on, workers=2)))
    assert torch.equal(torch.get_rng_state(), state), "a loader must not move the global random state"
    assert not same(inline, shares(module(splits(dataset), on, seed=4)))


def test_transforms_in_a_users_dataset_draw_anew_each_epoch() -> None:
    data = module(splits(Noisy()), layout(batch_size=30))
    (first,), (again,) = shares(data), shares(data)
    data.trainer.global_step = 1  # type: ignore[union-attr, misc]
    (second,) = shares(data)
    assert same([first], [again])
    by_id = [dict(zip(s.turns[0].ids.tolist(), s.turns[0].batch[2].tolist(), strict=True)) for s in (first, second)]
    assert all(by_id[0][i] != by_id[1][i] for i in range(30))


def test_a_plain_dataset_passes_unchanged() -> None:
    x, y = torch.randn(20, 3), torch.arange(20)
    data = module(splits(TensorDataset(x, y), evaluated=TensorDataset(x, y)), layout(batch_size=6))
    turn = shares(data)[0].turns[0]
    got_x, got_y = data.finish(turn)
    assert torch.equal(got_x, x[turn.ids])
    assert torch.equal(got_y, y[turn.ids])
    assert [len(batch[0]) for batch in data.val_dataloader()] == [20]


# --- shares -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 70),
    devices=st.integers(1, 5),
    pieces=st.integers(1, 9),
    size=st.integers(1, 4),
    strategy=st.sampled_from(["ddp", "dp"]),
)
def test_shares_of_all_processes_hold_an_epoch_once(
    samples: int, devices: int, pieces: int, size: int, strategy: str
) -> None:
    pieces = max(pieces, devices)
    on = layout(devices, pieces * size, pieces, strategy)
    dataset = arrays(samples, size=2)
    alone = shares(module(splits(dataset), layout(1, pieces * size, pieces)))
    everyone = [shares(module(splits(dataset), on, process)) for process in range(on.processes)]
    assert sorted(i for own in everyone for share in own for turn in share.turns for i in turn.ids) == [*range(samples)]
    for step, at_once in enumerate(zip(*everyone, strict=True)):
        reference = {turn.pieces[0]: turn.ids for turn in alone[step].turns}
        found: dict[int, np.ndarray] = {}
        for share in at_once:
            assert (share.step, share.samples, share.pieces) == (step, alone[step].samples, len(reference))
            assert share.everyone == all(other.turns for other in at_once)
            for turn in share.turns:
                assert min(turn.sizes) >= 1
                assert len(turn.devices) == len(turn.pieces) == len(turn.sizes)
                parts = np.split(turn.ids, np.cumsum(turn.sizes)[:-1])
                found |= dict(zip(turn.pieces, parts, strict=True))
                assert all(piece in on.owned(device) for device, piece in zip(turn.devices, turn.pieces, strict=True))
                assert turn.batch[1].tolist() == turn.ids.tolist()  # labels are ids here
        assert found.keys() == reference.keys()
        assert all((found[piece] == reference[piece]).all() for piece in found)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_goes_on_at_its_step(workers: int) -> None:
    data = module(splits(arrays(50), Augment(crop=1)), layout(batch_size=12, pieces=3), workers=workers)
    loader = data.train_dataloader()
    data.trainer.global_step = 0  # type: ignore[union-attr, misc]
    first = list(loader)
    assert len(first) == len(loader) == 5
    data.trainer.global_step = 5  # type: ignore[union-attr, misc]
    second = list(loader)  # the same loader asks again
    for step in (5, 7, 9):
        rest = shares(module(data.splits, data.layout, step=step))
        assert [share.step for share in rest] == list(range(step, 10))
        assert {share.epoch for share in rest} == {1}
        assert same(rest, second[step - 5 :])
    assert not same(first, second)


def test_shares_move_to_a_device() -> None:
    share = shares(module(splits(arrays(30), Augment(flip=True)), layout(batch_size=8, pieces=2)))[0]
    moved = share.to("meta")
    assert {t.device.type for turn in moved.turns for t in (*turn.batch, turn.draws)} == {"meta"}
    assert (moved.samples, moved.step, moved.turns[1].sizes) == (8, 0, share.turns[1].sizes)
    assert isinstance(moved.turns[0], Turn)
    assert share.turns[0].batch[0].device.type == "cpu"


# --- on the device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_finish_normalises_in_the_modules_dtype(dtype: torch.dtype) -> None:
    dataset = arrays(30)
    data = module(splits(dataset), layout(batch_size=8))
    data.trainer.lightning_module = torch.nn.Linear(1, 1).to(dtype)  # type: ignore[union-attr, misc]
    turn = shares(data)[0].turns[0]
    x, y = data.finish(turn)
    wanted = (dataset.images[turn.ids].double() / 255 - 0.4) / 0.2
    assert x.dtype == dtype
    assert torch.allclose(x.double(), wanted, atol={torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 3e-2))
    assert torch.equal(y, dataset.labels[turn.ids])


@pytest.mark.parametrize("fill", ["zero", "reflect"])
def test_a_sample_is_augmented_alike_in_every_batch(fill: str) -> None:
    dataset, augment = arrays(60, size=7, channels=3), Augment(crop=3, flip=True, fill=fill)
    by_id: dict[int, torch.Tensor] = {}
    for on in (layout(1, 12, 1), layout(1, 15, 5), layout(3, 12, 4, "dp"), layout(2, 12, 3)):
        for process in range(on.processes):
            data = module(splits(dataset, augment), on, process)
            for share in shares(data):
                for turn in share.turns:
                    for index, image in zip(turn.ids.tolist(), data.finish(turn)[0], strict=True):
                        assert torch.equal(by_id.setdefault(index, image), image)
    assert len(by_id) == 60


def test_draws_are_keyed_by_seed_epoch_and_sample() -> None:
    augment, ids = Augment(crop=1), np.arange(1000)
    draws = augment.draws(1, 2, ids)
    assert draws is not None
    assert draws.dtype == torch.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.02
    assert torch.equal(augment.draws(1, 2, ids[[7, 3]]), draws[[7, 3]])  # type: ignore[arg-type]
    for other in (augment.draws(2, 2, ids), augment.draws(1, 3, ids)):
        assert other is not None
        assert (other != draws).float().mean() > 0.99
    assert Augment().draws(1, 2, ids) is None


@pytest.mark.parametrize("fill", ["zero", "reflect"])
def test_augmentation_against_padding_and_slicing(fill: str) -> None:
    images = arrays(200, size=9).images
    draws = torch.rand(200, 3)
    got = Augment(crop=2, flip=True, fill=fill)(images, draws)
    mode = {"zero": "constant", "reflect": "reflect"}[fill]
    padded = torch.from_numpy(np.pad(images.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode))  # type: ignore[call-overload]
    tops, lefts = (draws[:, :2] * 5).long().T.tolist()
    for index, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        # mirrored before the shift or after it, the set of outcomes is the same; here the mirror acts on the window
        window = padded[index, :, top : top + 9, left : left + 9]
        mirrored = padded[index].flip(2)[:, top : top + 9, 4 - left : 13 - left].flip(2)
        assert torch.equal(mirrored, window)
        wanted = padded[index].flip(2)[:, top : top + 9, 4 - left : 13 - left] if draws[index, 2] < 0.5 else window
        assert torch.equal(got[index], wanted)


# --- evaluation -------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(samples=st.integers(1, 5000), devices=st.integers(1, 9), pieces=st.integers(1, 20), size=st.integers(1, 600))
def test_evaluation_covers_every_sample_once(samples: int, devices: int, pieces: int, size: int) -> None:
    pieces = max(pieces, devices)
    on, alone = layout(devices, pieces * size, pieces), layout(1, pieces * size, pieces)
    found = [chunk for process in range(on.processes) for chunk in own_chunks(samples, on, process)]
    assert found == own_chunks(samples, alone, 0)
    assert [i for chunk in found for i in range(*chunk)] == list(range(samples))


def test_a_process_without_samples_gets_a_stand_in() -> None:
    data = [module(splits(arrays(9), evaluated=arrays(2)), layout(3, 12), process) for process in range(3)]
    assert [made.stand_in("test") for made in data].count(True) == 1
    assert [sum(len(y) for _, y in made.test_dataloader()) for made in data] == [1, 1, 1]


class Counts(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(36, 2)
        self.seen: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        assert x.dtype == torch.float32
        assert abs(x).max() < 4
        self.seen += y.tolist()

    test_step = validation_step


def quiet_trainer() -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_lightning_evaluates_on_plain_batches() -> None:
    counts = Counts()
    quiet_trainer().validate(counts, datamodule=DataModule(splits(arrays(9), evaluated=arrays(700)), layout(), seed=0))
    assert counts.seen == list(range(700))


@pytest.mark.skipif("LOCKSTEP_TEST_DATA" not in os.environ, reason="LOCKSTEP_TEST_DATA names no folder with real data")
def test_real_mnist() -> None:
    found = open_data(config("mnist"), os.environ["LOCKSTEP_TEST_DATA"])
    assert (len(found.train), len(found.val), len(found.test)) == (54_000, 6_000, 10_000)


class Inverted(Subset[Any]):
    """A user's: a subset that transforms its samples."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return 255 - image, label

    def __getitems__(self, ids: Any) -> list[Any]:
        return [self[int(index)] for index in ids]


def test_a_subset_of_the_users_own_transforms_its_samples() -> None:
    whole, ids = arrays(10), np.array([1, 4])
    images, labels = fetch(Inverted(whole, range(2, 8)), ids)  # type: ignore[arg-type]
    assert torch.equal(images, 255 - whole.images[ids + 2])
    assert labels.tolist() == [3, 6]
    assert torch.equal(fetch(Subset(whole, range(2, 8)), ids)[0], whole.images[ids + 2])  # type: ignore[arg-type]


def test_loader_processes_are_forked_whatever_python_prefers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 prefers a server; to `die_with`, its children are orphans."""
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    multiprocessing.set_start_method("forkserver")
    data = module(splits(arrays(20)), layout(), workers=1)
    assert [len(share.turns) for share in data.train_dataloader()] == [1, 1]
