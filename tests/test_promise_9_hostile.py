"""Promise 9: what a stranger's file may claim. The table of docs/untrusted.md."""

import io
import os
import re
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import composed, forked
from PIL import Image

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.io import CheckpointError
from lockstep.files import replacing
from lockstep.run.evaluation import spec_of

BYTES = 40  # of the tensor in the file
CLAIM = 1 << 30  # bytes that it is said to have


def parts_of(content: dict[str, Any]) -> dict[str, bytes]:
    file = io.BytesIO()
    torch.save(content, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def number(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little")


def shared(depth: int) -> bytes:
    """A pickle of a pair of twice the same pair of twice ..."""
    return b"Nq\x50" + b"".join(b"h%c\x86q%c" % (at, at + 1) for at in range(0x50, 0x50 + depth))


ENTRY = b"\x08\0\0\0lockstep"  # a key, of which the value follows
OTHER = b"\x01\0\0\0x"
PICKLES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a storage that is larger than its part": (
        lambda pickle: pickle.replace(b"K\nt", number(CLAIM // 4) + b"t"),
        "does not match expected size",
    ),
    "a tensor that is larger than its storage": (
        lambda pickle: pickle.replace(b"K\x00K\n", b"K\x00" + number(CLAIM // 4)).replace(b"K\x01\x85", b"K\x00\x85"),
        r"a tensor of shape \[268435456\] is larger than what the file holds of it",
    ),
    "bytes that torch makes itself": (
        lambda pickle: pickle.replace(ENTRY, OTHER + b"cbuiltins\nbytearray\n" + number(CLAIM) + b"\x85Ru."),
        "it would make what the file does not hold: bytearray",
    ),
    "values that nobody could count": (
        lambda pickle: pickle.replace(ENTRY, OTHER + shared(40) + b"u."),
        "its values refer to each other too often or too deep",
    ),
}


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """A checkpoint's path, and the parts of one that can be loaded, the control."""
    parts = parts_of({"pytorch-lightning_version": "2", "state_dict": {"w": torch.zeros(BYTES // 4)}, "lockstep": {}})
    write(tmp_path / "some.ckpt", parts)
    assert checkpoint_io.load(tmp_path / "some.ckpt")["state_dict"]["w"].numel() == BYTES // 4
    return tmp_path / "some.ckpt", parts


def write(path: Path, parts: dict[str, bytes], packed: bool = False) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def refused(path: Path, why: str) -> None:
    """Refuses in a line, and takes no memory for what was claimed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=why) as refusal:
        checkpoint_io.load(path)
    assert "\n" not in str(refusal.value)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < CLAIM // 4


@pytest.mark.parametrize("attack", PICKLES)
def test_sizes_that_lie(plain: tuple[Path, dict[str, bytes]], attack: str) -> None:
    path, parts = plain
    (pickle,) = (name for name in parts if name.endswith("data.pkl"))
    change, why = PICKLES[attack]
    changed = change(parts[pickle])
    assert changed != parts[pickle]
    write(path, {**parts, pickle: changed})
    refused(path, why)


def test_zip_bombs_pipes_and_devices(plain: tuple[Path, dict[str, bytes]]) -> None:
    path, parts = plain
    (data,) = (name for name in parts if name.endswith("data/0"))
    write(path, {**parts, data: bytes(CLAIM // 8)}, packed=True)
    assert path.stat().st_size < CLAIM // 1000
    refused(path, "it is packed")
    write(path, parts)
    content = bytearray(path.read_bytes())
    at = content.rfind(b"PK\x01\x02", 0, content.rfind(data.encode()))  # its line in the table
    content[at + 20 : at + 28] = CLAIM.to_bytes(4, "little") * 2
    path.write_bytes(content)
    refused(path, "its parts are said to be larger than the file")
    path.unlink()
    os.mkfifo(path)
    refused(path, "not a file")
    refused(Path("/dev/zero"), "not a file")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("image_size", 10**6, "spec.image_size=1000000: must be"),
        ("channels", 0, "spec.channels=0: must be"),
        ("classes", "no list", "spec.classes=no list: must be"),
        ("mean", [float("nan")], "spec.mean"),
        ("more", 1, "spec.more: there is no such key"),
        ("std", None, "spec.std=null: must be"),
    ],
)
def test_images_that_no_model_is_made_for(key: str, value: Any, says: str) -> None:
    good = {"channels": 1, "image_size": 8, "classes": ("a", "b"), "mean": (0.0,), "std": (1.0,)}
    assert spec_of(Path("some.ckpt"), {"spec": good}).num_classes == 2
    with pytest.raises(CheckpointError, match=re.escape(f"some.ckpt: {says}")):
        spec_of(Path("some.ckpt"), {"spec": {**good, key: value}})


def test_a_model_much_larger_than_its_file(tmp_path: Path) -> None:
    """By each program that makes the model; nothing is left of a run that was refused."""
    config = composed("model=fast_cnn", f"model.width=[16,16,16,{1 << 24}]")
    spec = {
        "channels": 1,
        "image_size": 28,
        "classes": [str(digit) for digit in range(10)],
        "mean": [0.3],
        "std": [0.3],
    }
    state = {"state_dict": {"w": torch.zeros(1)}, "pytorch-lightning_version": "2.6.6"}
    checkpoint_io.save({**state, "lockstep": {"config": config, "spec": spec}}, tmp_path / "huge.ckpt")
    (tmp_path / "images").mkdir()
    Image.new("L", (28, 28)).save(tmp_path / "images" / "one.png")
    for program, more in {
        "src/evaluate.py": (),
        "src/predict.py": (f"images={tmp_path / 'images'}",),
        "scripts/export.py": (),
    }.items():
        outputs = tmp_path / "outputs"
        done = forked(program, f"checkpoint={tmp_path / 'huge.ckpt'}", f"outputs={outputs}", *more)
        assert done.returncode == 2, done.stderr
        assert re.fullmatch(
            r"error: .*huge.ckpt: has [\d,]+ bytes, and its config asks for a model of [\d,]+\n", done.stderr
        )
        assert not [*outputs.rglob("*.ckpt"), *outputs.rglob("summary.json")]


# --- a run's folder ---------------------------------------------------------------------------------------------------


def test_a_temporary_file_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".last.ckpt.tmp").symlink_to(tmp_path / "victim")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "victim")
    with replacing(tmp_path / "last.ckpt") as file:
        file.write(b"new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "last.ckpt").read_text() == "new"
