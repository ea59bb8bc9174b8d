"""torchrun's --rdzv-id names the folder of a run, so that the same command continues it."""

import json
from pathlib import Path

import pytest

from lockstep.launch.environment import environment
from lockstep.run.run_folder import folder_of_rendezvous as folder_of


@pytest.fixture
def rdzv_id(monkeypatch: pytest.MonkeyPatch) -> object:
    """Sets the environment of a worker of torchrun, with an id."""

    def started(name: str) -> None:
        place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": name}
        for variable, value in place.items():
            monkeypatch.setenv(variable, str(value))
        environment.cache_clear()

    yield started
    monkeypatch.undo()
    environment.cache_clear()


def test_the_same_command_has_the_same_folder_on_each_machine(rdzv_id, tmp_path: Path) -> None:
    rdzv_id("my/run 1")
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
def test_torchruns_default_names_are_none(rdzv_id, name: str, tmp_path: Path) -> None:
    rdzv_id(name)
    assert folder_of(tmp_path, ["lr=0.1"]) is None
