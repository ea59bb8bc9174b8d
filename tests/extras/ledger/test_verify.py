"""The ledger, and what lockstep verify proves by it: a run that was killed twice and changed its layout twice comes
out again on two others; one that says what was not computed does not."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SAVES_OFTEN, Program, composed, forked, summary_of
from store_servers import WebServer
from written_shards import flip, write_folder, write_shards

from lockstep.checkpoint.io import keep_step_checkpoint, save
from lockstep.checkpoint.paths import step_checkpoints
from lockstep.config.check import check
from lockstep.data.build import open_data
from lockstep.launch.portable import missing_instructions
from lockstep_extras.ledger.ledger_file import config_sha256, hashes, line_sha256, parse_line, samples_sha256, text_of

JOB = (*SAVES_OFTEN, "checkpoint_every=5", "exact=true", "pieces=4", "extras=[ledger]", "checkpoint_keep=-1")
Lines = list[dict[str, Any]]


def ledger(folder: Path) -> Lines:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def killed(program: Program, step: int, *overrides: str) -> Path:
    """Return the folder of a run that was killed as a whole some time after a step."""
    process = program.start(*overrides)
    folder = program.wait_for_checkpoint(process, f"step_{step}")
    program.kill(process)
    return folder


@pytest.fixture(scope="module")
def run(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run on one device, then ddp on 3, then dp on 2; between them kills, one after which the last line is missing,
    and one after which there are lines of steps that were lost, and a part of a line."""
    program = Program(tmp_path_factory.mktemp("runs") / "outputs")
    folder = killed(program, 10, *JOB, "max_epochs=34", "max_steps=400")
    file = folder / "ledger.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    file.write_text("".join(line for line in lines if parse_line(line)["step"] < last))
    killed(program, 160, f"resume={folder}", "strategy=ddp", "devices=3")
    lost = json.loads(file.read_text().splitlines()[-1]) | {"step": 10**6}
    with file.open("a") as more:
        more.write(f'{json.dumps(lost)}\n{{"before": "12')
    done = program(f"resume={folder}", "strategy=dp", "devices=2")
    assert done.folder == folder
    return folder


def verified(run: Path, *overrides: str) -> tuple[int, str]:
    done = forked("lockstep verify", f"run={run}", f"outputs={run.parent.parent / 'verified'}", *overrides)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.usefixtures("processes")
def test_a_ledger_has_neither_gap_nor_double(run: Path) -> None:
    texts, lines = (run / "ledger.jsonl").read_text().splitlines(), ledger(run)
    steps = [line["step"] for line in lines]
    total = summary_of(run)["steps"]
    due = {*range(0, total + 1, 5), *range(0, total + 1, 12)}
    assert steps == sorted(due), "every fifth step, and epochs' ends"
    assert [line["since"] for line in lines[1:]] == steps[:-1]
    assert [line["before"] for line in lines] == [None, *map(line_sha256, texts[:-1])]
    assert lines[-1]["weights_sha256"] == summary_of(run)["weights_sha256"]
    assert [line["step"] for line in lines if "about" in line] == [0], "another layout is no other run under exact"
    remaining = step_checkpoints(run / "checkpoints")
    assert [*remaining] == steps[1:]
    assert len({path.stat().st_ino for path in remaining.values()}) == len(remaining), (
        "none is another one's second name"
    )


@pytest.mark.usefixtures("processes")
def test_parts_of_it_come_out_again(run: Path) -> None:
    code, output = verified(run, "steps=2", "seed=3")
    assert code == 0, output
    assert output.count("the same bits") == 2
    assert "proven: steps" in output
    assert "not proven: the other" in output
    assert not [*(run.parent.parent / "verified").rglob("*")], "what was computed is gone"


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_all_of_it_comes_out_again_from_the_seed(run: Path, tmp_path: Path) -> None:
    """On a layout that the run never had; parts of it, above, on one device."""
    folder = shutil.copytree(run, tmp_path / "a" / "b", ignore=shutil.ignore_patterns("checkpoints"))
    code, output = verified(folder, "steps=[400]", "strategy=ddp", "devices=2")
    assert code == 0, output
    assert "proven: steps 1 to 400 (400 of 400)" in output


def forged(run: Path, folder: Path, change: Callable[[Lines], None]) -> Path:
    """Return a copy of a run whose ledger was changed, so that each line follows from the one before."""
    if folder != run:
        shutil.copytree(run, folder)
    lines = ledger(folder)
    change(lines)
    for before, line in pairwise(lines):
        line["before"] = line_sha256(text_of(before))
    (folder / "ledger.jsonl").write_text("".join(f"{text_of(line)}\n" for line in lines))
    return folder


def with_other_weights(folder: Path, step: int) -> dict[str, Any]:
    """Change a bit of a kept checkpoint, and return it."""
    path = folder / "checkpoints" / f"step_{step}.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    name = next(iter(checkpoint["state_dict"]))
    checkpoint["state_dict"][name].view(-1).view(torch.int32)[3] ^= 1
    path.unlink()
    save(checkpoint, path)
    return dict(checkpoint)


def at(lines: Lines, step: int) -> dict[str, Any]:
    return next(line for line in lines if line["step"] == step)


@pytest.mark.usefixtures("processes")
def test_other_samples_are_seen_without_computing(run: Path, tmp_path: Path) -> None:
    folder = forged(run, tmp_path / "a" / "b", lambda lines: at(lines, 30).update(samples_sha256="0" * 64))
    code, output = verified(folder)
    assert (code, "the samples of steps 26 to 30 are not those of the seed" in output) == (1, True), output
    assert "same bits" not in output

    def other_seed(lines: Lines) -> None:
        lines[0]["about"]["config"]["seed"] = 1
        for line in lines:
            line["config_sha256"] = config_sha256(lines[0]["about"]["config"])

    code, output = verified(forged(run, tmp_path / "c" / "d", other_seed))
    assert (code, "step 5: the samples of steps 1 to 5 are not those" in output) == (1, True), output


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("place", ["logger", "debug"])
def test_a_forged_record_has_nothing_called(run: Path, tmp_path: Path, place: str) -> None:
    """More of it: tests/programs/test_strangers.py. The honest record is verified above."""
    (tmp_path / "source").write_text("evil")
    (tmp_path / "sentinel").write_text("good")
    evil = {"_target_": "lockstep.files.link_file"} | {
        "source": str(tmp_path / "source"),
        "path": str(tmp_path / "sentinel"),
    }

    def name_it(lines: Lines) -> None:
        lines[0]["about"]["config"] |= (
            {"logger": {"x": evil}} if place == "logger" else {"debug": {"trainer": {"profiler": evil}}}
        )
        for line in lines:
            line["config_sha256"] = config_sha256(lines[0]["about"]["config"])

    code, output = verified(forged(run, tmp_path / "a" / "b", name_it), "steps=[5]")
    assert (tmp_path / "sentinel").read_text() == "good", output
    assert code == (0 if place == "logger" else 2), output


@pytest.mark.usefixtures("processes")
def test_a_line_of_too_many_steps_is_refused(run: Path, tmp_path: Path) -> None:
    """Nothing is said about its samples, because they are not compared."""
    folder = forged(run, tmp_path / "a" / "b", lambda lines: lines[-1].update(step=lines[-1]["since"] + 10**7 + 1))
    code, output = verified(folder)
    assert (code, "is for 10,000,001 steps: samples are compared for at most 10,000,000" in output) == (2, True), output
    assert "not those of the seed" not in output


@pytest.mark.usefixtures("processes")
def test_a_changed_weight_is_named(run: Path, tmp_path: Path) -> None:
    folder = forged(run, tmp_path / "a" / "b", lambda lines: None)
    changed = with_other_weights(folder, 25)
    code, output = verified(folder, "steps=[25,30]")
    assert (
        code,
        "step 25 differs from its ledger: step_25.ckpt does not match the ledger: other weights" in output,
    ) == (
        1,
        True,
    ), output
    forged(folder, folder, lambda lines: at(lines, 25).update(hashes(changed)))
    code, output = verified(folder, "steps=[20,25,30]")
    assert "steps 16 to 20: the same bits" in output
    differs = (
        r"error: .*step 25 differs from its ledger: other weights; first difference: [\w.]+ in 1 of \d+ elements, by "
    )
    assert re.search(differs, output), output
    assert code == 1


@pytest.mark.usefixtures("processes")
def test_another_learning_rate_is_named(run: Path, tmp_path: Path) -> None:
    def change(lines: Lines) -> None:
        about = lines[0]["about"]
        about["config"]["lr"] *= 1 + 1e-6
        for line in lines:
            line["config_sha256"] = config_sha256(about["config"])

    code, output = verified(forged(run, tmp_path / "a" / "b", change), "steps=[5,12]")
    assert (code, "step 5 differs from its ledger: other weights and optimizer; first" in output) == (1, True), output


@pytest.mark.nightly
def test_a_run_without_exact_on_its_layout(run_train: Program) -> None:
    job = [*SAVES_OFTEN, "checkpoint_every=5", "extras=[ledger]", "checkpoint_keep=2", "max_epochs=2", "devices=2"]
    job += ["data.sampling=balanced"]
    folder = run_train(*job).folder
    config = check(composed(*job))
    splits = open_data(config.data, config.data_dir, config.seed)
    orders = [each.order(config.layout, config.seed) for each in (splits, replace(splits, labels=None))]
    taken, plain = (samples_sha256(order, 0, 5) for order in orders)
    assert ledger(folder)[1]["samples_sha256"] == taken != plain, "of the samples that the run took"
    assert [*step_checkpoints(folder / "checkpoints")] == [20, 24]
    code, output = verified(folder, "steps=[24]")
    assert (code, "has the same bits only on its own layout: use strategy=ddp devices=2" in output) == (2, True), output
    code, output = verified(folder, "steps=[24]", "devices=2")
    assert code == 0, output
    assert "steps 21 to 24: the same bits" in output
    # trained on: another length, so another schedule, which the ledger tells of
    run_train(f"resume={folder}", "max_epochs=3")
    assert [line["step"] for line in ledger(folder) if "about" in line] == [0, 25]
    code, output = verified(folder, "steps=[36]", "devices=2")
    assert (code, "after step 24 the run changed: max_epochs: 2 -> 3" in output) == (0, True), output
    for wanted, why in {
        "steps=[23]": "has no line at 23: the nearest are 20, 24, 25",
        "steps=[30]": "training would start at step 0, and the run's config changed between the two",
        "steps=x": "steps=x: must be",
        "run=nowhere": "run=nowhere: there is no such folder",
    }.items():
        code, output = verified(folder, "devices=2", wanted)
        assert (code, why in output) == (2, True), output


@pytest.mark.usefixtures("processes")
def test_a_module_with_a_default_lr_is_computed_again_with_the_lr_of_the_run(project: Path, tmp_path: Path) -> None:
    program = Program(tmp_path / "outputs", home=project)
    task = ["model=mine", "data=synthetic", "data.samples=90", "data.image_size=12", "data.num_classes=3"]
    task += ["accelerator=cpu", "threads=1", "max_epochs=1", "batch_size=24", "extras=[ledger]", "logger=none"]
    folder = program(*task, "lr=0.02").folder
    recorded = ledger(folder)[0]["about"]["config"]
    assert (recorded["lr"], recorded["model"]["lr"]) == (0.02, 0.02)
    assert recorded["optimizer"] == recorded["scheduler"] == {"_target_": None}
    assert "lr: 0.02" in (folder / ".hydra" / "config.yaml").read_text()
    done = Program(tmp_path / "verified", "lockstep verify", home=project)(f"run={folder}")
    assert "the same bits" in done.stdout
    default = Program(tmp_path / "default", home=project)(*task).folder  # the control
    lines = ledger(folder)
    assert lines[-1]["weights_sha256"] != ledger(default)[-1]["weights_sha256"]


def test_the_newest_stay(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    for step in (5, 10, 12, 15, 9):
        last.unlink(missing_ok=True)
        last.write_text(str(step))
        keep_step_checkpoint(last, step, 2)
        remaining = {5: [5], 10: [5, 10], 12: [10, 12], 15: [12, 15], 9: [9]}[step]
        assert [*step_checkpoints(tmp_path)] == remaining, "of steps behind which a run has gone back, none"
    assert (tmp_path / "step_9.ckpt").samefile(last)


@pytest.mark.skipif(bool(missing_instructions()), reason="this processor has no AVX2 and FMA")
def test_a_portable_run_comes_out_again(run_train: Program) -> None:
    """lockstep verify computes by the kernels that the ledger's config asks for: others give other bits."""
    folder = run_train(*SAVES_OFTEN, "exact=portable", "pieces=4", "extras=[ledger]", "max_epochs=1").folder
    assert ledger(folder)[0]["about"]["config"]["exact"] == "portable"
    code, output = verified(folder, "steps=[12]")
    assert code == 0, output
    assert "steps 1 to 12: the same bits" in output


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_images_of_a_server_that_were_replaced_are_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same names and sizes. A folder's would be seen by the bits of the first step that reads them."""
    pytest.importorskip("aiohttp", reason="the driver of http")
    web = WebServer(write_shards(write_folder(tmp_path / "images"), tmp_path / "tar", "tar"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = ("data=shards", f"data_dir='{web.url}/{{train,test}}-{{00000..00002}}.tar'", "data.image_size=12")
    short = ("max_steps=3", "batch_size=8", "threads=1", "accelerator=cpu", "logger=none", "data.val_fraction=0")
    run = Program(tmp_path / "runs")(*data, *short, "extras=[ledger]", "checkpoint_every=1", "exact=true").folder
    code, output = verified(run)
    assert code == 0, output
    flip(web.folder / "train-00001.tar")
    code, output = verified(run)
    assert code == 1, output
    assert "ledger.jsonl: other data: the SHA-256 of their shards is " in output
    web.stop()
