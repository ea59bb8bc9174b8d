"""Checkpoints that claim more than they hold, hold code, or are no files; and links in a run's folder."""

import io
import os
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.io import CheckpointError
from lockstep.checkpoint.record import FORMAT
from lockstep.files import replacing

BYTES = 40  # of the tensor in the file
CLAIM = 1 << 30  # bytes that it is said to have


def parts_of(content: dict[str, Any]) -> dict[str, bytes]:
    file = io.BytesIO()
    torch.save(content, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """Return a checkpoint's path, and the parts of one that can be loaded, the control."""
    parts = parts_of(
        {"pytorch-lightning_version": "2", "state_dict": {"w": torch.zeros(BYTES // 4)}, "lockstep": {"format": FORMAT}}
    )
    write(tmp_path / "some.ckpt", parts)
    assert checkpoint_io.load(tmp_path / "some.ckpt")["state_dict"]["w"].numel() == BYTES // 4
    return tmp_path / "some.ckpt", parts


def write(path: Path, parts: dict[str, bytes], packed: bool = False) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def refused(path: Path, why: str) -> None:
    """Check that loading is refused in one line, and takes no memory for what was claimed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=why) as refusal:
        checkpoint_io.load(path)
    assert "\n" not in str(refusal.value)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < CLAIM // 4


@pytest.mark.usefixtures("whole_run")
def test_zip_bombs_pipes_and_devices(plain: tuple[Path, dict[str, bytes]]) -> None:
    path, parts = plain
    (data,) = (name for name in parts if name.endswith("data/0"))
    write(path, {**parts, data: bytes(CLAIM // 8)}, packed=True)
    assert path.stat().st_size < CLAIM // 1000
    refused(path, "its parts claim to be larger than the file")
    write(path, parts)
    content = bytearray(path.read_bytes())
    at = content.rfind(b"PK\x01\x02", 0, content.rfind(data.encode()))  # its line in the table
    content[at + 20 : at + 28] = CLAIM.to_bytes(4, "little") * 2
    path.write_bytes(content)
    refused(path, "its parts claim to be larger than the file")
    path.unlink()
    os.mkfifo(path)
    refused(path, "not a file")
    refused(Path("/dev/zero"), "not a file")


def test_a_temporary_file_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".last.ckpt.tmp").symlink_to(tmp_path / "victim")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "victim")
    with replacing(tmp_path / "last.ckpt") as file:
        file.write(b"new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "last.ckpt").read_text() == "new"


class Code:
    """Pickles as a call of `print`."""

    def __reduce__(self) -> Any:
        return print, ("called",)


def test_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"weight": torch.ones(2)}, "args": Code()}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match="holds code"):
        checkpoint_io.load(tmp_path / "evil.pth")
    assert capsys.readouterr().out == ""
    torch.load(tmp_path / "evil.pth", weights_only=False)
    assert capsys.readouterr().out == "called\n", "the control"
