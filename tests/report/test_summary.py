"""What summary.json is made of."""

import subprocess
from pathlib import Path

import pytest
import torch

from lockstep.report.provenance import git_info, versions
from lockstep.report.summary import weights_sha256


def test_the_digest_of_weights_sees_bits_and_names_only() -> None:
    torch.manual_seed(0)
    state = {
        "a": torch.randn(2, 3, 4, 4),
        "b": torch.randn(3).bfloat16(),
        "n": torch.tensor(7),
        "empty": torch.zeros(0),
    }
    digest = weights_sha256(state)
    assert len(digest) == 64
    other_order = dict(reversed(state.items()))
    other_format = {**state, "a": state["a"].to(memory_format=torch.channels_last)}
    assert other_format["a"].stride() != state["a"].stride()
    assert weights_sha256(other_order) == weights_sha256(other_format) == digest
    flipped = state["a"].clone()
    flipped.view(torch.int32).view(-1)[5] ^= 1
    assert weights_sha256({**state, "a": flipped}) != digest
    assert weights_sha256({"c" if name == "b" else name: value for name, value in state.items()}) != digest
    assert weights_sha256({**state, "extra": {"not": "a tensor"}}) == digest


@pytest.mark.usefixtures("processes")
def test_versions_and_git(tmp_path: Path) -> None:
    assert {"python", "torch", "lightning"} <= versions().keys()
    assert git_info(tmp_path / "nowhere") == {"commit": None, "dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    info = git_info(tmp_path)
    assert len(info["commit"]) == 40
    assert info["dirty"] is False
    (tmp_path / "notes").write_text("of no matter")
    assert git_info(tmp_path)["dirty"] is False
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "mine.py").write_text("1")
    assert git_info(tmp_path)["dirty"] is True
    (tmp_path / "src" / "mine.py").unlink()
    (tmp_path / "file").write_text("2")
    assert git_info(tmp_path) == {"commit": info["commit"], "dirty": True}
