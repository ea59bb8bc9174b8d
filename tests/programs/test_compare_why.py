"""What `lockstep compare --why` finds."""

import json
from pathlib import Path

import pytest
from conftest import TINY, Program, forked

pytestmark = pytest.mark.usefixtures("processes")

SHORT = (
    *TINY,
    "callbacks.console=null",
    "callbacks.pictures=null",
    "logger=none",
    "max_steps=3",
    "accelerator=cpu",
    "model=small_cnn",
)


def why(*folders: Path) -> tuple[int, str]:
    done = forked("lockstep compare", *map(str, folders), "--why")
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_two_equal_runs(tmp_path: Path) -> None:
    """The control: nothing is found."""
    folders = [Program(tmp_path / name)(*SHORT, "checkpoint_keep=-1", "checkpoint_every=1").folder for name in "ab"]
    code, printed = why(*folders)
    assert code == 0, printed
    assert "same weights at every recorded step" in printed


def test_a_layer_and_its_key(tmp_path: Path) -> None:
    """Two keys differ; the one that cannot change the weights is no cause."""
    one = Program(tmp_path / "one")(*SHORT, "model.dropout=0.25").folder
    other = Program(tmp_path / "other")(*SHORT, "model.dropout=0.3", "log_every=7").folder
    code, printed = why(one, other)
    assert code == 0, printed
    assert printed.startswith("first difference: step 1, layer net.dropout\nwhat differs: the output of net.dropout")
    assert "cause: model.dropout (0.25, 0.3)" in printed
    assert "cause: log_every" not in printed


@pytest.mark.nightly
def test_runs_that_saved_only_their_end(tmp_path: Path) -> None:
    """From the seed, steps are taken again. Where the data is gone, the answer is what the records show."""
    one = Program(tmp_path / "one")(*SHORT).folder
    other = Program(tmp_path / "other")(*SHORT, "model.freeze=[net.hidden.*]", "data.augment={crop:1}").folder
    code, printed = why(one, other)
    assert code == 0, printed
    assert printed.startswith("first difference: step 1, layer net.conv1\nwhat differs: the network's input")
    assert "cause: data.augment" in printed
    assert "model.freeze" not in printed.partition("the runs differ in")[0], "it alone does not change the input"

    record = other / "provenance.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"data_fingerprint": "0" * 64}))
    code, printed = why(one, other)
    assert code == 0, printed
    assert "first difference: one of the steps 1 to 3, layer net.conv1" in printed
    assert "its data is no longer in" in printed
    assert "checkpoint_keep=-1" in printed

    content = json.loads(record.read_text())
    content["config"]["extras"] = {"foreign": {"_target_": "this.s"}}  # a module that prints when it is imported
    record.write_text(json.dumps(content))
    code, printed = why(one, other)
    assert code == 0, printed
    assert "its extras.foreign._target_ is this.s, which no file of conf/extras names" in printed
    assert "Zen of Python" not in printed


def test_what_it_cannot_compare(tmp_path: Path) -> None:
    code, printed = why(tmp_path)
    assert (code, printed) == (2, "error: --why: 1 folder: give two run folders\n")
    code, printed = why(tmp_path, tmp_path)
    assert code == 2
    assert "no run folder" in printed
