"""What `lockstep compare --why` finds: differences that are planted by scripts/lab/planted_differences.py, and none."""

import json
import re
from pathlib import Path

from conftest import ROOT, TINY, Program, forked

PLANTED = ROOT / "scripts" / "lab" / "planted_differences.py"
SHORT = (*TINY, "callbacks.console=null", "callbacks.pictures=null", "logger=none", "max_steps=3", "accelerator=cpu")


def why(*folders: Path) -> tuple[int, str]:
    done = forked("lockstep compare", *map(str, folders), "--why")
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_three_differences_and_none() -> None:
    """A key of the config, a weight that no record names, the order of samples; the control is two equal runs."""
    done = forked(PLANTED, "--only", "dropout,a weight of the last layer,two steps swapped")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    answers = {name: (first, cause) for name, _, first, _, cause, right in rows if right == "right"}
    assert answers == {
        "nothing": ("same weights at every recorded step", ""),
        "dropout": ("1, net.dropout", "model.dropout (0.25, 0.3)"),
        "a weight of the last layer": ("7, net.logits", "not in the config"),
        "two steps swapped": ("5, net.conv1", "not in the config"),
    }


def test_forty_differences() -> None:
    done = forked(PLANTED)
    assert done.returncode == 0, done.stdout + done.stderr
    right = re.search(r"^(\d+) of 40 right", done.stdout, re.MULTILINE)
    assert right is not None
    assert int(right[1]) >= 38


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
