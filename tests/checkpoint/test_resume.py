"""How `resume=` is expanded: which folder and checkpoint it means, and what of the run's own command it repeats."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lockstep import compose
from lockstep.checkpoint import resume, start
from lockstep.checkpoint.resume import write_hydra_files
from lockstep.checkpoint.start import check_checkpoint_fits, checkpoint_to_load, differences
from lockstep.config.arguments import read_arguments
from lockstep.errors import UserError
from lockstep.launch.environment import environment


def resolved(typed: list[str], program: str = "train") -> list[str]:
    """Return the arguments with which Hydra composes the config of a command line."""
    return resume.resolve(read_arguments(typed, program)).line


def run_with_checkpoint(folder: Path, *overrides: str) -> Path:
    """Return the folder of a run of a command with overrides; its checkpoint is empty."""
    for file, content in (("checkpoints/last.ckpt", ""), (".hydra/overrides.yaml", OmegaConf.to_yaml([*overrides]))):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content)
    return folder


@pytest.mark.parametrize("name", ["o'brien", "a b\\", '\\"b', "\\'b"])
def test_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    folder = run_with_checkpoint(tmp_path / name)
    (folder / "multirun.yaml").write_text("hydra: {overrides: {task: [], hydra: []}}")
    run, sweep = (
        {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(actual)}
        for actual in (resolved([f"resume={folder}"]), resolved([f"sweep.resume={folder}"])[:-1])
    )
    assert run["hydra.run.dir"] == sweep["hydra.sweep.dir"] == sweep["sweep.resume"] == str(folder)
    assert run["resume"] == str(folder / "checkpoints" / "last.ckpt")


def test_a_run_goes_on_with_the_config_folder_of_its_command(tmp_path: Path) -> None:
    sources = [
        {"path": "/conf", "schema": "file", "provider": "main"},
        {"path": str(tmp_path / "o'b c"), "schema": "file", "provider": "command-line"},
    ]
    hydra = OmegaConf.to_yaml({"hydra": {"runtime": {"config_sources": sources}}})
    (run_with_checkpoint(tmp_path / "run", "experiment=best") / ".hydra" / "hydra.yaml").write_text(hydra)
    (page := tmp_path / "o'b c" / "experiment" / "best.yaml").parent.mkdir(parents=True)
    page.write_text("# @package _global_\nlr: 0.077\n")
    assert compose(f"resume={tmp_path / 'run'}", "seed=1")["lr"] == 0.077
    for other in (["--config-dir", "x"], ["--config-dir=x", "--cfg", "job"]):
        actual = resolved([f"resume={tmp_path / 'run'}", *other])
        assert not [override for override in actual if "searchpath" in override]
        assert actual[-len(other) :] == other


def test_another_strategy_drops_the_options_that_it_does_not_have(tmp_path: Path) -> None:
    saved = ["strategy=fsdp", "strategy.reshard=true", "strategy.shares=[2,1]", "devices=2"]
    run_with_checkpoint(tmp_path, *saved)
    again = resolved([f"resume={tmp_path}"])
    assert {*saved} <= {*again}
    other = resolved([f"resume={tmp_path}", "strategy=ddp"])
    assert {"strategy=ddp", "strategy.shares=[2,1]", "devices=2"} <= {*other}
    assert "strategy.reshard=true" not in other


@pytest.mark.parametrize("program", ["advise", "parity", "evaluate"])
def test_no_other_program_goes_on_in_a_runs_folder(program: str) -> None:
    with pytest.raises(UserError, match=r"resume=last: only train\.py resumes a run: .* take checkpoint="):
        resolved(["resume=last"], program)
    assert resolved(["resume=null"], program) == ["resume=null"]


def test_what_changed_since_the_checkpoint_is_reported_once() -> None:
    sgd = {"name": "sgd", "momentum": 0.9}
    before = {"lr": 1, "strategy": {"name": "ddp", "compression": "none", "shares": None}, "optimizer": sgd}
    now = {"lr": 2, "strategy": {"name": "auto", "shares": "auto"}, "optimizer": sgd | {"fused": True}}
    strategy = ["strategy.name: ddp -> auto", "strategy.shares: None -> auto"]
    assert differences(before, now) == ["lr: 1 -> 2", "optimizer.fused: None -> True", *strategy]


def test_a_run_that_has_gone_back_does_not_go_back_again_when_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, older = {"overrides.yaml": "- resume=step_5"}, tmp_path / "checkpoints" / "step_5.ckpt"
    write_hydra_files(tmp_path, {"overrides.yaml": "- another=command"})

    def begin() -> Path:
        environment.cache_clear()
        return checkpoint_to_load(tmp_path, str(older), record)

    assert begin() == older
    for variable in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        with monkeypatch.context() as patched:
            patched.setenv("SLURM_JOB_ID", "77")
            patched.setenv(variable, "1")
            write_hydra_files(tmp_path, {"overrides.yaml": "- another=command"})
            assert begin() == older, "it was killed before its first step"
            write_hydra_files(tmp_path, record)
            assert begin() == older.with_name("last.ckpt")
    assert begin() == older, "the user has typed it once more"


@pytest.mark.parametrize(("limit", "max_steps"), [("max_steps=8", 8), ("max_epochs=4", None)])
def test_a_run_may_end_where_it_was_saved_and_not_before(
    monkeypatch: pytest.MonkeyPatch, limit: str, max_steps: int | None
) -> None:
    monkeypatch.setattr(start, "_check_same_data", lambda *arguments: None)
    chosen = {"model": {"_target_": "Net"}, "optimizer": {"_target_": "SGD"}}
    config: Any = SimpleNamespace(max_steps=max_steps, max_epochs=4, record=chosen, **chosen)

    def check(step: int) -> None:
        record = {"config": chosen, "trainer": {"batch_size": 12, "samples": 24}}
        saved: dict[str, Any] = {"lockstep": record, "state_dict": {}, "global_step": step}
        check_checkpoint_fits("last.ckpt", saved, {}, config, Mock(window=None), record, 8)

    check(8)
    message = f"{limit} ends the run after step 8, but last.ckpt was saved after step 9: give a larger limit"
    with pytest.raises(UserError, match=f"^{message}$"):
        check(9)


FOLDER = "lockstep.vision.data.image_folder"


@pytest.mark.parametrize(
    ("before", "classes", "message"),
    [
        ({"_target_": "mine.data", "name": "mine"}, "ab", "data=photos, but last.ckpt was trained on data=mine: give"),
        ({"_target_": "mine.data"}, "ab", "data=photos, but last.ckpt was trained on data=mine.data: give the same"),
        (
            {"_target_": FOLDER},
            "ba",
            "in another order, b, a, and not a, b: '+data.known_classes=[b,a]' keeps it; init",
        ),
        ({"_target_": FOLDER, "size": 3}, "ab", "data.size=null, but last.ckpt was trained with 3: give data.size=3"),
        ({"_target_": FOLDER}, "ac", "last.ckpt was trained on other classes: give the same data; init_from="),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(before: dict[str, Any], classes: str, message: str) -> None:
    config: Any = SimpleNamespace(data={"_target_": FOLDER, "name": "photos"})
    splits: Any = SimpleNamespace(spec=SimpleNamespace(classes=["a", "b"]), fingerprint="now")
    record = {"config": {"data": before}, "spec": {"classes": [*classes]}, "trainer": {"fingerprint": "before"}}
    with pytest.raises(UserError, match=re.escape(message)):
        check_checkpoint_fits("last.ckpt", {"lockstep": record}, None, config, splits, {}, 8)


@pytest.mark.usefixtures("whole_run")
def test_the_last_run_is_the_newest_of_those_that_are_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_environment: Callable[..., None]
) -> None:
    runs = [tmp_path / "mnist_cnn_digits" / "1", tmp_path / "resnet18_digits" / "2", tmp_path / "own" / "3"]
    for age, run in enumerate(runs):
        run_with_checkpoint(run)
        os.utime(run / "checkpoints" / "last.ckpt", (1000 - age, 1000 - age))

    def meant(*overrides: str) -> Path:
        actual = resolved(["resume=last", f"outputs={tmp_path}", *overrides])
        (folder,) = [
            each.removeprefix("hydra.run.dir=").strip("'") for each in actual if each.startswith("hydra.run.dir=")
        ]
        return Path(folder)

    assert meant() == meant("max_epochs=3") == runs[0]
    assert meant("model=resnet18") == runs[1]
    assert meant("name=own") == runs[2]
    os.utime(runs[2] / "checkpoints" / "last.ckpt", (2000, 2000))
    assert meant() == runs[2]
    assert meant("data=digits") == runs[0]
    with pytest.raises(UserError, match=r"no run in .*mnist_cnn_mnist has a checkpoint"):
        meant("data=mnist")
    for folder in (tmp_path / "own", tmp_path):
        with pytest.raises(UserError, match=rf"^resume={folder}: a folder of runs, not a run: resume={runs[2]} is the"):
            resolved([f"resume={folder}"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").rename(tmp_path / "my own")
    with pytest.raises(UserError, match=r": 'resume=my own/3' is the newest$"):
        resolved(["resume=my own"])
    (tmp_path / "my own").rename(tmp_path / "own")
    set_environment(SLURM_JOB_ID="77", SLURM_RESTART_COUNT="1")
    assert meant() == runs[2]
    (runs[1] / "provenance.json").write_text('{"slurm_job": "77"}')
    assert meant() == runs[1]  # another job's may be newer by now


def test_a_copy_of_the_checkpoints_is_not_taken_for_them(tmp_path: Path) -> None:
    """The run would go on from its own file of the same name."""
    folder = run_with_checkpoint(tmp_path / "run")
    copy = folder / "copy" / "last.ckpt"
    copy.parent.mkdir()
    copy.touch()
    with pytest.raises(UserError, match=r"not in the checkpoints/ of a run folder"):
        resolved([f"resume={copy}"])
    assert resolved([f"resume={folder / 'checkpoints' / 'last.ckpt'}"]) == resolved([f"resume={folder}"])


def test_a_plus_sign_changes_nothing_and_one_run_is_no_sweep(tmp_path: Path) -> None:
    folder = run_with_checkpoint(tmp_path / "run")
    assert resolved([f"+resume={folder}"]) == resolved([f"++resume={folder}"]) == resolved([f"resume={folder}"])
    with pytest.raises(UserError, match=r"continues one run, and -m starts several: leave one of them out"):
        resolved([f"resume={folder}", "-m", "seed=0,1"])


@pytest.mark.usefixtures("whole_run")
def test_the_start_of_a_run_is_the_same_however_often_it_is_started(
    tmp_path: Path, set_environment: Callable[..., None]
) -> None:
    """A job that is queued again would find its own run, and begin anew from it."""
    before = run_with_checkpoint(tmp_path / "mnist_cnn_digits" / "1")
    typed = ["init_from=last", f"outputs={tmp_path}"]
    config = compose(*typed)
    run_with_checkpoint(tmp_path / "mnist_cnn_digits" / "2")
    assert config["init_from"] == str(before)
    assert compose(*config.overrides)["init_from"] == str(before)
    assert compose(*typed)["init_from"] != str(before), "the control"
    for variables in (
        {"SLURM_JOB_ID": "77"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "mine"},
    ):
        set_environment(**variables)
        with pytest.raises(UserError, match=rf"would find its own run: give the folder, init_from={tmp_path}"):
            resolved(typed)
