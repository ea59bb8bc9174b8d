"""Runs in which one device computes wrong, once or from some step on, and clean ones without an alarm."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import TINY, Program, Run, summary_of
from test_promise_4_same_result import TOGETHER, featured
from user_runs import DDP, DP, jobs, same_bits, train

from lockstep.arithmetic.layout import Layout, resolve
from lockstep.arithmetic.order import DataOrder
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep_extras.audit.auditor import go_back
from lockstep_extras.audit.choice import choose_piece, verdict

TRAINED = 81  # samples, in four steps an epoch
AUDIT = (
    "accelerator=cpu",
    "exact=true",
    "extras=[audit]",
    "extras.audit.share=1",
    "checkpoint_every=1",
    "checkpoint_keep=-1",
)


def layout(devices: int, strategy: str = "ddp") -> Layout:
    return resolve(
        strategy=strategy, accelerator="cpu", devices=devices, num_nodes=1, batch_size=24, pieces=6, exact=True
    )


def devices_of(on: Layout) -> list[tuple[int, ...]]:
    """Return who computes the piece that is computed again, its owner first, in each step of a run."""
    order, actual = DataOrder(TRAINED, on, 0), []
    for step in range(8):
        choice = choose_piece(1.0, 0, step, [len(piece) for piece in order.pieces(*order.position(step))], on)
        assert choice is not None
        actual.append(choice.devices)
    return actual


def flips(what: str, device: str, step: int, lasting: bool = False) -> list[str]:
    fault = {"_target_": "mine.Flips", "what": what, "device": device, "step": step, "lasting": str(lasting).lower()}
    return [f"+callbacks.flips.{key}={value}" for key, value in fault.items()]


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a processor's workers, so that a device stays wrong when ranks are counted anew."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")


@pytest.fixture(scope="module")
def clean(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(project, tmp_path_factory.mktemp("clean"), "LitDigits", *AUDIT[:2], *AUDIT[4:])


def test_a_clean_run_reports_it_and_keeps_its_bits_and_metrics(project: Path, tmp_path: Path) -> None:
    options = ("exact=true", "precision=bf16-mixed", "extras=[audit]", "extras.audit.share=1e-9,1", *DDP)
    actual = jobs(project, tmp_path, "Counts,mine.Drops", *options)
    for plain, audited in zip(actual[::2], actual[1::2], strict=True):
        assert same_bits(plain, audited)
        assert audited.summary["metrics"] == plain.summary["metrics"] | {"audit/pieces": 8}
        assert "audit: 8 pieces computed again, all with the same bits" in (audited.folder / "train.log").read_text()


RANDOM_TWICE = (*TINY, "data.mix=mixup", "model.dropout=0.3", "exact=true", "pieces=4", "max_epochs=1")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "task",
    [*(pytest.param(featured(names), marks=pytest.mark.nightly) for names in TOGETHER), RANDOM_TWICE],
    ids=[*map("+".join, TOGETHER), "mixed+dropped"],
)
def test_whatever_a_run_is_configured_to_do_pieces_come_to_the_same_bits(task: list[str], run_train: Program) -> None:
    """By another device, and by the only one."""
    audited = run_train(*task, "extras=[audit]", "extras.audit.share=1", "strategy=ddp,dp", "devices=1,3", "-m").jobs
    plain = Program(run_train.outputs / "plain")(*task, "strategy=ddp", "devices=3")
    for summary in map(summary_of, audited):
        assert summary["weights_sha256"] == plain.summary["weights_sha256"]
        assert summary["metrics"]["audit/pieces"] == summary["steps"]


@pytest.mark.nightly
def test_of_three_devices_the_one_that_goes_on_to_be_wrong_is_named(project: Path, tmp_path: Path) -> None:
    on = (*AUDIT, "strategy=ddp", "devices=3", "-m")
    fault = flips("gradient", "0,1,2", 2, lasting=True)
    runs = train(project, tmp_path / "gradient", "LitDigits", *on, *fault, ok=False).jobs
    fault = flips("weight", "1", 2, lasting=True)
    runs += train(project, tmp_path / "weight", "LitDigits", *on, *fault, ok=False).jobs
    for device, folder in zip([0, 1, 2, 1], runs, strict=True):
        took_part = [step for step, devices in enumerate(devices_of(layout(3))) if device in devices[:2]]
        seen, right = min(s for s in took_part if s >= 2), max([s + 1 for s in took_part if s < 2], default=0)
        error = summary_of(folder)["error"]
        which = "net.1.weight and 3 more (4 of 4" if folder is runs[-1] else "net.1.weight (1 of 4"
        begins = (
            rf"step {seen + 1}, piece \d: rank {device} \(cpu on \S+\) computed a wrong gradient of {re.escape(which)} "
        )
        assert re.match(begins + r"tensors\), twice; the step was not applied", error), error
        assert f"; the step was not applied, and checkpoints up to step {right} are good" in error
        assert max(steps_of(folder)) == seen


def test_a_damaged_message_is_named_by_the_rank_that_got_it(project: Path, tmp_path: Path) -> None:
    fault = flips("got", "1", 2)
    run = train(project, tmp_path, "LitDigits", *AUDIT, "strategy=ddp", "devices=3", *fault, ok=False)
    wrong = "the sums of net.1.weight to net.1.bias do not match what the ranks sent"
    output = f"rank 1 failed: CorruptMessage: step 3: {wrong}"
    assert run.summary["error"].startswith(output), run
    assert (run.returncode, run.summary["status"], max(steps_of(run.folder))) == (1, "failed", 2)


@pytest.mark.parametrize(
    ("ranks", "lasting", "fault"),
    [
        (3, True, "what rank 1 sends or gets is damaged again"),
        (2, True, "what rank 1 sends to rank 0 is damaged again"),
        (3, False, "test messages arrive undamaged"),
    ],
)
def test_who_sends_what_comes_damaged_is_detected_by_asking_again(
    project: Path, tmp_path: Path, ranks: int, lasting: bool, fault: str
) -> None:
    struck = flips("sent", "1", 2, lasting)
    run = train(project, tmp_path, "LitDigits", *AUDIT, "strategy=ddp", f"devices={ranks}", *struck, ok=False)
    output = "step 3: the sums of net.1.weight to net.1.bias do not match what the ranks sent; none was applied; "
    assert output + fault in run.summary["error"], run
    assert (run.returncode, run.summary["status"], max(steps_of(run.folder))) == (1, "failed", 2)


@pytest.mark.parametrize(
    ("on", "what", "device", "who"),
    [
        (DDP, "gradient", 1, "rank 1"),
        (DP, "activation", 1, "device 1"),
        (("devices=1",), "gradient", 0, "device 0"),
    ],
)
def test_a_fault_that_passes_is_seen_and_not_applied(
    project: Path, tmp_path: Path, clean: Run, on: tuple[str, ...], what: str, device: int, who: str
) -> None:
    run = train(project, tmp_path, "LitDigits", *AUDIT, *on, *flips(what, str(device), 1), ok=False)
    error = run.summary["error"]
    assert re.match(rf"step 2, piece 5: {who} \(cpu on \S+\) computed a wrong gradient of net.1.weight", error), run
    assert "once; it was right the second time; the step was not applied, and checkpoints up to step 1 " in error
    assert error in run.stderr
    assert ("a permanent fault is not detected" in run.stdout + run.stderr) == (who == "device 0")
    assert (run.returncode, steps_of(run.folder)) == (1, {1})
    last, same = (
        torch.load(path, weights_only=True)["state_dict"]
        for path in (run.folder / "checkpoints" / "last.ckpt", clean.folder / "checkpoints" / "step_1.ckpt")
    )
    assert all(torch.equal(last[name], value) for name, value in same.items())


def test_of_two_devices_nobody_can_decide_which_goes_on_to_be_wrong(project: Path, tmp_path: Path) -> None:
    on = ("elastic=true", *DDP)
    run = train(project, tmp_path, "LitDigits", *AUDIT, *on, *flips("gradient", "1", 2, lasting=True), ok=False)
    both = r"step 3, piece 3: rank 0 \(cpu on \S+\) or rank 1 \(cpu on \S+\) computed a wrong gradient"
    assert re.match(both, run.summary["error"]), run
    assert run.summary["restarts"] == 0, "one of them would go on"


@pytest.mark.parametrize(("good", "expected"), [(9, 9), (8, 6), (6, 6), (5, 3), (2, None)])
def test_wrong_values_lead_back_to_the_newest_checkpoint_without_them(
    tmp_path: Path, good: int, expected: int | None
) -> None:
    last = paths.last(tmp_path)
    last.parent.mkdir()
    for at in (3, 6, 9):
        content: dict[str, Any] = {
            "global_step": at,
            "state_dict": {},
            "pytorch-lightning_version": "2.6",
        }
        checkpoint_io.save(content, last)
        checkpoint_io.keep_step_checkpoint(last, at, -1)
    trainer: Any = SimpleNamespace(is_global_zero=True, strategy=SimpleNamespace(checkpoint_io=Mock()))
    assert go_back(Mock(trainer=trainer), tmp_path, good) == (expected is not None)
    assert checkpoint_io.step_of(last) == (expected or 9)


@pytest.mark.nightly
def test_an_elastic_run_goes_on_without_that_device_to_the_same_bits(project: Path, tmp_path: Path, clean: Run) -> None:
    """From the last checkpoint that it has not spoilt: the third step has the last one's fault in it."""
    on = ("strategy=ddp", "devices=3", "elastic=true")
    fault = flips("gradient", "0,2", 2, lasting=True)
    run = train(project, tmp_path / "computed", "LitDigits", *AUDIT, *on, *fault, "-m")
    sent = train(project, tmp_path / "sent", "LitDigits", *AUDIT, *on, *flips("sent", "1", 2, lasting=True))
    assert "step 3, piece" in run.stderr
    assert "step 4, piece" in run.stderr
    assert "what rank 1 sends or gets is damaged again; continuing with 2 of 3 workers" in sent.stderr
    for folder in (*run.jobs, sent.folder):
        summary = summary_of(folder)
        assert summary["weights_sha256"] == clean.summary["weights_sha256"]
        assert (summary["restarts"], summary["layout"]["devices"]) == (1, 2)
        assert "resumes after step 2" in (folder / "train.log").read_text()


def steps_of(folder: Path) -> set[int]:
    return {int(path.stem.partition("_")[2]) for path in folder.glob("checkpoints/step_*.ckpt")}


@pytest.mark.parametrize(
    ("results", "wrong", "still"),
    [
        ([(0, "x"), (1, "a"), (0, "a"), (1, "a")], [0], False),
        ([(0, "a"), (1, "x"), (0, "a"), (1, "a"), (2, "a")], [1], False),
        ([(0, "x"), (1, "a"), (0, "x"), (1, "a"), (2, "a")], [0], True),
        ([(0, "x"), (1, "a"), (0, "y"), (1, "a")], [0], True),  # it comes to something else each time
        ([(0, "x"), (1, "a"), (0, "x"), (1, "a")], [0, 1], True),
        ([(0, "x"), (1, "a"), (0, "a"), (1, "a"), (2, "y")], [0, 2], True),
        ([(0, "x"), (1, "y"), (0, "x"), (1, "y"), (2, "z")], [0, 1, 2], True),
        ([(0, "x"), (0, "a"), (0, "a"), (0, "a")], [0], False),
    ],
)
def test_verdict(results: list[tuple[int, str]], wrong: list[int], still: bool) -> None:
    assert verdict(results) == (wrong, still)


def test_the_share_of_steps_stays_and_no_device_is_left_out() -> None:
    for devices in (1, 2, 3, 6):
        on = layout(devices, "ddp" if devices > 1 else "single")
        actual = [choose_piece(0.25, 7, step, [4, 4, 0, 4, 4, 4], on) for step in range(4000)]
        present = [choice for choice in actual if choice]
        assert 900 < len(present) < 1100
        assert {choice.piece for choice in present} == {0, 1, 3, 4, 5}
        assert all(choice.piece in on.owned(choice.devices[0]) for choice in present)
        assert {choice.devices[1] for choice in present} == set(range(devices))
        assert all(len(set(choice.devices)) == min(devices, 3) for choice in present)
    assert not any(choose_piece(0.0, 7, step, [4], layout(1, "single")) for step in range(99))
