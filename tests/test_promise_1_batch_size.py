"""Promise 1: one batch size, one number of pieces, on any layout.

What follows from what, for all numbers: tests/arithmetic/test_layout.py. What does not fit is refused: refusals.yaml.
"""

from itertools import groupby
from pathlib import Path
from typing import Any

from conftest import summary_of
from user_runs import RECORDED, recorded_pieces, train

SAMPLES = 81  # of an epoch: user_runs.TASK


def steps_of(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the pieces of each step of a run."""
    return [list(step) for _, step in groupby(recorded_pieces(folder), key=lambda row: row["step"])]


def test_a_step_is_batch_size_samples_in_equal_pieces_on_any_layout(either: Path, tmp_path: Path) -> None:
    """8 pieces on 3 devices are 3, 3 and 2. The last step of the epoch has 9 samples."""
    task = (RECORDED, "pieces=8", "max_epochs=1", "strategy=ddp,dp", "devices=1,3", "-m")
    swept = train(either, tmp_path, "LitDigits", *task)
    for folder, loads in zip(swept.jobs, ([8], [3, 3, 2]) * 2, strict=True):
        steps = steps_of(folder)
        sizes = [[len(piece["ids"]) for piece in step] for step in steps]
        assert sizes == [[3] * 8] * 3 + [[1] * 7 + [2]]
        for step in steps:
            assert [piece["piece"] for piece in step] == list(range(8)), "each is computed once"
            devices = [piece["device"] for piece in step]
            assert [devices.count(device) for device in range(len(loads))] == loads
        assert summary_of(folder)["steps"] == 4
        assert sum(map(sum, sizes)) == SAMPLES


def test_pieces_follow_from_devices_and_accumulation(either: Path, tmp_path: Path) -> None:
    """The control: without accumulation a step is cut otherwise, and has as many samples."""
    task = (RECORDED, "pieces=null", "devices=2", "accumulate_grad_batches=2,1", "max_steps=1", "-m")
    cut = [steps_of(folder)[0] for folder in train(either, tmp_path, "LitDigits", *task).jobs]
    assert [[len(piece["ids"]) for piece in step] for step in cut] == [[6] * 4, [12] * 2]
