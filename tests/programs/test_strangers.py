"""What a stranger's run may name: what the pages of the project and of the package name. No folder that the run brings,
names or stands in adds pages. More of promise 9: tests/test_promise_9_*."""

import copy
import json
import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, composed
from programs.compared_runs import LAYOUT, compare, written
from torch import nn

from lockstep import load_weights
from lockstep.errors import UserError
from lockstep.job.evaluation import config_of
from lockstep.programs.sameness.folders import Recorded
from lockstep.project import use_project_of

TARGET = "lockstep.files.link_file"
EVIL = {"_target_": TARGET, "source": "source", "path": "sentinel"}
PAGE = f"name: evil\n_target_: {TARGET}\nsource: source\npath: sentinel\n"
GROUPS = ("data", "optimizer", "scheduler")
NAMED_NOWHERE = rf"\._target_ is {TARGET}, which no file of conf/"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a project with this repository's pages."""
    shutil.copytree(ROOT / "conf", tmp_path / "home" / "conf", ignore=shutil.ignore_patterns("schema"))
    (tmp_path / "home" / "src").mkdir()
    use_project_of(tmp_path / "home")
    return tmp_path / "home"


def page(folder: Path, group: str) -> None:
    (folder / group).mkdir(parents=True, exist_ok=True)
    (folder / group / "evil.yaml").write_text(PAGE)


def evaluated(path: Path, config: dict[str, Any]) -> Any:
    """Return the config with which `evaluate.py` would test a checkpoint."""
    raw = composed("checkpoint=x", page="evaluate")
    return config_of(path, {"config": config, "spec": {}, "fingerprint": ""}, raw)


# --- pages that a run brings, names or stands beside ---

BROUGHT = {
    "nowhere": None,
    "in the run's folder": "home/outputs/a/conf",
    "in its .hydra": "home/outputs/a/.hydra",
    "beside the checkpoint": "home/outputs/a/checkpoints",
    "in the working folder": "here/conf",
    "in the project, but not in its conf": "home/src/conf",
    "in a folder beside the project": "conf",
}


@pytest.mark.parametrize(("place", "group"), [*product(BROUGHT, ["model"]), *product(["in the run's folder"], GROUPS)])
def test_a_page_elsewhere_allows_nothing(
    home: Path, tmp_path: Path, place: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / (BROUGHT[place] or "other")
    if BROUGHT[place]:
        page(folder, group)
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    places: dict[str, Any] = {"searchpath": [f"file://{folder}", "pkg://evil"], "runtime": {"config_sources": []}}
    more = {"hydra": places, "hydra.searchpath": [f"file://{folder}"], "config_dir": str(folder), "defaults": [group]}
    config = copy.deepcopy(composed()) | {group: {"name": "evil", **EVIL}} | more
    with pytest.raises(UserError, match=NAMED_NOWHERE):
        evaluated(home / "outputs" / "a" / "checkpoints" / "last.ckpt", config)
    page(home / "conf", group)  # the control: a page of the project's own
    evaluated(home / "outputs" / "a" / "checkpoints" / "last.ckpt", config)


@pytest.mark.parametrize("depth", ["in a list", "in a mapping", "in a target that a page names"])
def test_a_target_is_seen_at_any_depth(home: Path, depth: str) -> None:
    config = copy.deepcopy(composed("model=torchvision", "model.arch=resnet18"))
    evaluated(home / "x.ckpt", config)  # the control
    places: dict[str, Any] = {"in a list": [{"a": [EVIL]}], "in a mapping": {"a": {"b": EVIL}}}
    config["model"]["weights"] = places.get(depth, {"_target_": config["model"]["_target_"], "net": EVIL})
    with pytest.raises(UserError, match=NAMED_NOWHERE):
        evaluated(home / "x.ckpt", config)


def test_a_page_of_the_project_before_a_packages_page_takes_nothing_away(home: Path) -> None:
    config = copy.deepcopy(composed("optimizer=adamw"))
    (home / "conf" / "optimizer").mkdir()
    (home / "conf" / "optimizer" / "adamw.yaml").write_text("_target_: torch.optim.Adam\n")
    evaluated(home / "x.ckpt", config)
    config["optimizer"]["_target_"] = "torch.optim.Adagrad"
    with pytest.raises(UserError, match=r"optimizer\._target_ is torch\.optim\.Adagrad, which no file"):
        evaluated(home / "x.ckpt", config)


def test_init_from_reads_weights_and_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").write_text("evil")
    config = dict.fromkeys(("model", *GROUPS, "callbacks", "extras", "logger", "debug"), EVIL)
    weights = {"weight": torch.full((2, 2), 2.0)}
    content = {"state_dict": weights, "lockstep": {"config": config, "spec": EVIL}, "hyper_parameters": EVIL}
    torch.save(content, tmp_path / "evil.ckpt")
    module = nn.Linear(2, 2, bias=False)
    load_weights("init_from", module, str(tmp_path / "evil.ckpt"))
    assert (module.weight == 2).all()
    assert not (tmp_path / "sentinel").exists()


# --- lockstep compare why ---


# Where a config may name what is built; `extras.x` stands for a key of the group.
PLACES = (
    *("model", "data", "optimizer", "scheduler", "callbacks.x", "extras.x", "debug.trainer.profiler", "sweep.x"),
    *("optimizer.param_groups", "scheduler.x", "data.transforms", "unknown", "logger.x", "strategy"),
)


def put(config: dict[str, Any], place: str) -> None:
    *above, last = place.split(".")
    for key in above:
        config[key] = config.get(key) or {}
        config = config[key]
    before = config.get(last)
    config[last] = {**(before if isinstance(before, dict) else {}), **EVIL}


@pytest.mark.parametrize("place", ["", *PLACES])
def test_why_two_runs_differ_builds_nothing_that_no_page_names(place: str, tmp_path: Path) -> None:
    config = json.loads(json.dumps(composed("debug=profile")))
    run = written(tmp_path / "run", status="completed")

    def raw() -> dict[str, Any]:
        (run / "provenance.json").write_text(json.dumps({"config": config}))
        return Recorded(run, {}).raw

    if place:
        put(config, place)
    if place in ("", "logger.x"):  # the control; and a logger is replaced by none
        assert raw()["seed"] == 0
    else:
        with pytest.raises(UserError, match=NAMED_NOWHERE):
            raw()


# --- lockstep compare ---


DONE: dict[str, Any] = {
    "status": "completed",
    "layout": LAYOUT | {"strategy": "single", "devices": 1, "accumulate_grad_batches": 1, "pieces": 1},
    "metrics": {"val/acc": 0.5, "test/acc": 0.5},
}


def test_compare_prints_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    for name, text in (("a", "good"), ("b", "\x1b[2Jevil\x07\u202e")):
        run = written(tmp_path / name, **{**DONE, "status": "failed", "error": text})
        (run / "provenance.json").write_text(json.dumps({"config": {"max_epochs": 1, f"key {text}": text}}))
    done = compare(tmp_path / "a", tmp_path / "b")
    assert "�[2Jevil��" in done.stdout
    assert not {"\x1b", "\x07", "\u202e"} & {*done.stdout}


@pytest.mark.parametrize("content", ['{"a":' * 100_000 + "1" + "}" * 100_000, '{"metrics": {"val/acc": "x"}}', "[]"])
def test_compare_refuses_or_passes_over_what_is_no_summary(content: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / name, **DONE)
    assert compare(tmp_path).returncode == 0  # the control
    (tmp_path / "b" / "summary.json").write_text(content)
    done = compare(tmp_path)
    assert (done.returncode, "summary.json: " in done.stderr) in ((2, True), (0, False))


def test_compare_follows_no_link_that_came_with_the_runs(tmp_path: Path) -> None:
    runs, mine = tmp_path / "runs", tmp_path / "mine"
    for name in ("a", "b"):
        written(runs / name, **DONE)
    mine.write_text("mine")
    (runs / "compare").mkdir()
    for name in ("compare.md", "compare.json"):
        (runs / "compare" / name).symlink_to(mine)
    assert compare(runs).returncode == 0
    assert mine.read_text() == "mine"
    assert (runs / "compare" / "compare.md").read_text().startswith("|")
    shutil.rmtree(runs / "compare")
    (tmp_path / "folder").mkdir()
    (runs / "compare").symlink_to(tmp_path / "folder")
    refused = compare(runs)
    line = (
        f"error: {runs}/compare: a link: name the folder for the tables, --to {os.path.relpath(tmp_path / 'folder')}\n"
    )
    assert (refused.returncode, refused.stderr) == (2, line)
    assert not [*(tmp_path / "folder").iterdir()]
    assert compare(runs, "--to", tmp_path / "folder").returncode == 0
