"""torchrun's --rdzv-id names the folder of a run, so that the same command continues it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.job.run_folder import folder_of_rendezvous as folder_of

WORKER = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def test_the_same_command_has_the_same_folder_on_each_machine(
    set_environment: Callable[..., None], tmp_path: Path
) -> None:
    set_environment(**WORKER, TORCHELASTIC_RUN_ID="my/run 1")
    folder = folder_of(tmp_path, ["lr=0.1", "outputs=/a", "threads=1"])
    assert folder is not None
    assert folder.name.startswith("my_run_1_")
    assert folder_of(tmp_path, ["lr=0.1", "outputs=/b"]) == folder
    assert folder_of(tmp_path, ["lr=0.2", "outputs=/a"]) != folder, "another command"
    for status, expected in (("interrupted", folder), ("completed", None)):
        folder.mkdir(exist_ok=True)
        (folder / "summary.json").write_text(json.dumps({"status": status}))
        assert folder_of(tmp_path, ["lr=0.1", "outputs=/a"]) == expected, status


@pytest.mark.parametrize("name", ["none", "6b24db5c-4c6d-4ae0-8fd3-1f5f4e6f8f11"])
def test_torchruns_default_names_are_none(set_environment: Callable[..., None], name: str, tmp_path: Path) -> None:
    set_environment(**WORKER, TORCHELASTIC_RUN_ID=name)
    assert folder_of(tmp_path, ["lr=0.1"]) is None
