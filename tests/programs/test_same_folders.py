"""`lockstep same` on two run folders."""

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
    done = forked("lockstep same", *map(str, folders))
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_two_equal_runs(tmp_path: Path) -> None:
    """The control: nothing is found."""
    folders = [Program(tmp_path / name)(*SHORT, "checkpoint_keep=-1", "checkpoint_every=1").folder for name in "ab"]
    code, printed = why(*folders)
    assert code == 0, printed
    assert "same bits at every recorded step" in printed


def test_a_layer_and_its_key(tmp_path: Path) -> None:
    """Two keys differ; the one that cannot change the weights is no cause. The page has the steps taken again."""
    one = Program(tmp_path / "one")(*SHORT, "model.dropout=0.25").folder
    other = Program(tmp_path / "other")(*SHORT, "model.dropout=0.3", "log_every=7").folder
    page = tmp_path / "same.html"
    done = forked("lockstep same", str(one), str(other), "--steps", "2", "--once", "--json", "--report", str(page))
    assert done.returncode == 1, done
    verdict = json.loads(done.stdout)
    assert verdict["line"].startswith("different from step 1: gradients of net.")
    assert verdict["causes"][0]["text"] == "model.dropout (0.25, 0.3)"
    assert "log_every" not in done.stdout
    assert [row["step"] for row in verdict["rows"]] == [1, 2]
    assert page.read_text().count("<tr class=odd>") == 2
    done = forked("lockstep same", str(one), str(other), "--timeout", "9")
    assert (done.returncode, done.stderr) == (2, "error: --timeout is for commands: leave it out for two folders\n")


@pytest.mark.nightly
def test_runs_that_saved_only_their_end(tmp_path: Path) -> None:
    """From the seed, steps are taken again. Where the data is gone, the answer is what the records show."""
    one = Program(tmp_path / "one")(*SHORT).folder
    other = Program(tmp_path / "other")(*SHORT, "model.freeze=[net.hidden.*]", "data.augment={crop:1}").folder
    code, printed = why(one, other)
    assert code == 1, printed
    assert printed.startswith("different from step 1: only the first has gradients of net.hidden")
    assert "cause: model.freeze" in printed
    assert "cause: data.augment" in printed

    record = other / "provenance.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"data_fingerprint": "0" * 64}))
    code, printed = why(one, other)
    assert code == 1, printed
    assert printed.startswith("different at one of the steps 1 to 3: net.conv1.weight")
    assert "not taken again" in printed
    assert "its data is no longer in" in printed
    assert "checkpoint_keep=-1" in printed

    content = json.loads(record.read_text())
    content["config"]["extras"] = {"foreign": {"_target_": "this.s"}}  # a module that prints when it is imported
    record.write_text(json.dumps(content))
    code, printed = why(one, other)
    assert code == 1, printed
    assert "its extras.foreign._target_ is this.s, which no file of conf/extras names" in printed
    assert "Zen of Python" not in printed


def test_a_run_that_was_changed_by_hand(tmp_path: Path) -> None:
    """Taken again, both configs lead to the same weights: the run with others is named."""
    import torch

    one, other = (Program(tmp_path / name)(*SHORT).folder for name in "ab")
    path = next(each for each in (other / "checkpoints").iterdir() if each.name == "last.ckpt")
    content = torch.load(path, weights_only=True)
    content["state_dict"]["net.conv1.weight"][0] += 1e-3
    path.unlink()
    torch.save(content, path)
    code, printed = why(one, other)
    assert code == 1, printed
    assert printed.startswith("different at step 3: net.conv1.weight differ by up to")
    assert f"cause: {other} has other weights than its config leads to" in printed


def test_what_it_cannot_compare(tmp_path: Path) -> None:
    code, printed = why(tmp_path, tmp_path)
    assert code == 2
    assert "no run folder" in printed
