"""Data sets in files of their own format: read, downloaded, and refused where they are damaged."""

import gzip
import hashlib
import http.server
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import config, idx, refusal_of, write_mnist

from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.vision.data import files as file_sets
from lockstep.vision.data import mnist


@pytest.fixture
def mnist_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small set in MNIST's files, and no network."""

    def offline(*args: Any, **kwargs: Any) -> None:
        raise OSError("offline")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    write_mnist(tmp_path)
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
        ("train-images-idx3-ubyte", lambda b: b[:-1], ["truncated", "it has 15,695 bytes instead of 15,696"]),
        ("train-images-idx3-ubyte", lambda b: b + b"x", ["too long", "it has 15,697 bytes"]),
        ("t10k-labels-idx1-ubyte", lambda b: b"", ["not an IDX file", "not with 0x00000801"]),
        ("t10k-images-idx3-ubyte", lambda b: b"<html>" + b, ["not an IDX file", "0x3c68746d"]),
        ("train-labels-idx1-ubyte", lambda b: idx(np.zeros(19, np.uint8)), ["19 labels", "20 images"]),
        ("train-labels-idx1-ubyte", lambda b: idx(np.full(20, 11, np.uint8)), ["label 11", "0 to 9"]),
        ("train-images-idx3-ubyte", lambda b: idx(np.zeros((20, 9, 9), np.uint8)), ["9 x 9", "28 x 28"]),
    ],
)
def test_damaged_idx_files_are_refused_by_name(mnist_dir: Path, name: str, damage: Any, words: list[str]) -> None:
    file = mnist_dir / "MNIST" / "raw" / name
    file.write_bytes(damage(file.read_bytes()))
    line = refusal_of(mnist, str(mnist_dir))
    assert all(word in line for word in [name, *words])


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.usefixtures("whole_run")
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
        actual = open_data(config("mnist"), str(tmp_path / "fresh"))
        server.shutdown()
    assert actual.fingerprint == open_data(config("mnist"), str(mnist_dir)).fingerprint
    assert [entry.name for entry in (tmp_path / "fresh").iterdir()] == ["MNIST"]
    assert socket.getdefaulttimeout() == timeout


@pytest.mark.parametrize(("name", "file"), [("mnist", "MNIST"), ("fashion_mnist", "Fashion"), ("cifar10", "cifar")])
def test_absent_files_offline(name: str, file: str, tmp_path: Path, mnist_dir: Path) -> None:
    empty = tmp_path / "empty"
    line = refusal_of(open_data, config(name), str(empty))
    assert all(word in line for word in [f"{name}: no files in {empty / file}", "offline", "data=digits"])
    assert list(empty.iterdir()) == []
    with pytest.raises(UserError, match="can't hold a download"):
        open_data(config(name), str(tmp_path / "no" / "such" / "folder"))


def test_cifar10_opens_no_file_whose_digest_is_wrong(mnist_dir: Path) -> None:
    folder = mnist_dir / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")  # a pickle that would run a command
    with pytest.raises(UserError, match=r"data_batch_1: damaged, its MD5"):
        file_sets.cifar10(str(mnist_dir))
