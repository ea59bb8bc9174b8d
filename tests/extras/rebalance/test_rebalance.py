"""Whole runs in which ranks are slow for a while: pieces move, and the weights are those of one device."""

import csv
import re
import shutil
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pytest
from conftest import RANDOM, Program, Run, apart, wait_for
from hypothesis import given
from hypothesis import strategies as st
from refusals import checked, refused_with
from store_servers import WebServer
from written_shards import write_folder, write_shards

from lockstep.arithmetic.layout import Layout, resolve
from lockstep_extras.rebalance.assignment import MovingAssignment, with_counts
from lockstep_extras.rebalance.choice import LEAST_GAIN, MOST_GAIN, better_counts, fastest_counts, slowest_time

# 270 samples to train on: eight whole steps an epoch, and one of 14 samples for 8 pieces; 45 steps.
TASK = (
    *(*RANDOM, "data.samples=300", "batch_size=32", "pieces=8", "max_epochs=5", "checkpoint_every=4"),
    *("model=small_cnn", "model._target_=uneven.Uneven", "model.dropout=0.3"),
)
MOVING = ("strategy=ddp", "extras=[rebalance]", "extras.rebalance.every=4")
BACK_AND_FORTH = "+model.slow=[[1,2,18],[0,22,34]]"
CHANGE = re.compile(r"rebalance: pieces ([\d +]+) instead of [\d +]+ from step \d+ on: a piece takes ")


@pytest.fixture(scope="module")
def uneven(project: Path) -> Path:
    """Return a project that has the file uneven.py."""
    shutil.copy(Path(__file__).with_name("uneven.py"), project / "src" / "uneven.py")
    return project


def run(uneven: Path, outputs: Path, *overrides: str, ok: bool = True) -> Run:
    return Program(outputs, home=uneven)(*overrides, ok=ok)


@pytest.fixture(scope="module")
def single(processes: None, uneven: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(uneven, tmp_path_factory.mktemp("single"), *TASK, "exact=true")


def sha(done: Run) -> str:
    return str(done.summary["weights_sha256"])


def changes(folder: Path) -> list[list[int]]:
    """Return the pieces of each rank after each change, from a run's log."""
    matches = CHANGE.findall((folder / "train.log").read_text())
    return [[int(count) for count in pieces.split("+")] for pieces in matches]


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "loaders"), [(2, 2), (3, 0)])
def test_one_sha256_while_pieces_move(single: Run, uneven: Path, tmp_path: Path, devices: int, loaders: int) -> None:
    """Two loader processes fetch four steps ahead; without them, one gather fetches an epoch from memory."""
    options = ("exact=true", f"devices={devices}", f"num_workers={loaders}", BACK_AND_FORTH)
    moved = run(uneven, tmp_path, *TASK, *MOVING, *options)
    counts = changes(moved.folder)
    assert any(pieces[1] <= 2 for pieces in counts), moved  # of eight
    assert any(pieces[0] < pieces[1] for pieces in counts), moved
    assert moved.summary["metrics"]["rebalance/changes"] == len(counts)
    assert sha(moved) == sha(single)


def test_ranks_that_change_at_different_steps_have_other_bits(single: Run, uneven: Path, tmp_path: Path) -> None:
    """The control: at such a step, a piece is computed twice or never."""
    options = ("exact=true", "devices=2", BACK_AND_FORTH, "+callbacks.apart._target_=uneven.Apart")
    moved = run(uneven, tmp_path, *TASK, *MOVING, *options)
    assert changes(moved.folder)
    assert sha(moved) != sha(single)


def test_a_change_at_a_step_that_is_loaded_already_ends_the_run(uneven: Path, tmp_path: Path) -> None:
    options = ("exact=true", "devices=2", "num_workers=2", BACK_AND_FORTH)
    early = "+callbacks.early._target_=uneven.TooEarly"
    done = run(uneven, tmp_path, *TASK, *MOVING, *options, early, ok=False)
    assert done.returncode == 1
    assert re.search(r"step \d+: rank \d has loaded pieces \[.*\]: must be \[.*\]", done.summary["error"])


@pytest.mark.nightly
def test_pieces_move_with_the_shards_that_they_read_on_a_server(uneven: Path, tmp_path: Path) -> None:
    """Each piece has a stream of its own, which its new rank reads on. The control has other streams."""
    pytest.importorskip("aiohttp", reason="the driver of http")
    images = write_folder(tmp_path / "images", (("train", 48), ("val", 6)))
    web = WebServer(write_shards(images, tmp_path / "tar", "tar", 12))
    names = "{train,val}-{00000..00011}.tar"
    data = ("data=shards", f"data_dir='{web.url}/{names}'", "data.window=1", "data.image_size=14")
    task = (*data, "batch_size=8", "pieces=8", "max_epochs=3", "checkpoint_every=4", "model=small_cnn", "exact=true")
    common = ("accelerator=cpu", "threads=1", "callbacks=none", "logger=none", "model._target_=uneven.Uneven")
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    alone, control = (
        Program(tmp_path / name, home=uneven)(*task, *common, *change, env=env)
        for name, change in (("alone", ()), ("control", ("data.window=2",)))
    )
    # a limit with which shards are fetched again
    limit = 4.5 * max(path.stat().st_size for path in web.folder.iterdir()) / (1 << 30)
    cache = (f"data.cache={tmp_path / 'small'}", f"data.cache_gb={limit}")
    web.sent.clear()
    moved = Program(tmp_path / "moved", home=uneven)(
        *task, *common, *MOVING, "devices=2", BACK_AND_FORTH, *cache, env=env
    )
    web.stop()
    counts = changes(moved.folder)
    assert any(pieces[1] <= 2 for pieces in counts), moved
    assert any(pieces[0] < pieces[1] for pieces in counts), moved
    assert sha(moved) == sha(alone)
    assert sha(control) != sha(alone)
    assert sum(web.sent.values()) > 2 * sum(path.stat().st_size for path in web.folder.glob("*.tar"))


@pytest.mark.nightly
def test_a_run_that_is_killed_while_shares_are_uneven_ends_with_the_same_bits(
    single: Run, uneven: Path, tmp_path: Path
) -> None:
    program = Program(tmp_path, home=uneven)
    lasting = ("exact=true", "devices=2", "callbacks=default", "+model.slow=[[1,0,1000]]")
    process = program.start(*TASK, *MOVING, *lasting)
    (last,) = wait_for(lambda: [path for path in tmp_path.rglob("last.ckpt") if changes(path.parent.parent)], process)
    program.kill(process)
    folder = last.parent.parent
    resumed = program(f"resume={folder}", "devices=3", "+model.slow=[[2,0,1000]]")
    assert re.search(r"resumes after step \d", resumed.stdout + resumed.stderr)
    assert len(changes(folder)) >= 2
    assert sha(resumed) == sha(single)


@pytest.mark.nightly
def test_without_exact_weights_agree_to_rounding_and_the_loggers_get_idle_shares(uneven: Path, tmp_path: Path) -> None:
    """DDP waits for the slowest rank inside the last backward pass. With that wait, all ranks would seem equal."""
    task = (*TASK, "optimizer=sgd", "lr=0.05", "precision=64-true", "callbacks=default")
    alone = run(uneven, tmp_path / "alone", *task)
    options = ("devices=2", "+model.slow=[[1,0,1000]]", "logger=csv", "log_every=4")
    moved = run(uneven, tmp_path / "moved", *task, *MOVING, *options)
    assert max(fast for fast, _ in changes(moved.folder)) >= 6  # of eight; how many depends on other programs
    assert apart(moved, alone) < 1e-10
    assert sha(moved) != sha(alone)
    (file,) = moved.folder.rglob("metrics.csv")
    rows = [row for row in csv.DictReader(file.open()) if row.get("rebalance/idle_of_rank_0")]
    first = rows[0]
    assert first["rebalance/pieces_of_rank_0"] == "4"
    assert max(int(row["rebalance/pieces_of_rank_0"]) for row in rows) >= 6
    assert float(first["rebalance/idle_of_rank_0"]) > 0.5 > float(first["rebalance/idle_of_rank_1"]) == 0


def test_a_run_begins_with_the_shares_of_the_command_line(single: Run, uneven: Path, tmp_path: Path) -> None:
    options = ("exact=true", "devices=2", "strategy.shares=[1,7]", "+model.slow=[[1,0,1000]]")
    moved = run(uneven, tmp_path, *TASK, *MOVING, *options)
    assert "instead of 1 + 7" in (moved.folder / "train.log").read_text()
    assert max(fast for fast, _ in changes(moved.folder)) >= 6
    assert sha(moved) == sha(single)


@pytest.mark.nightly
def test_the_audit_follows_pieces_that_move(single: Run, uneven: Path, tmp_path: Path) -> None:
    pytest.importorskip("lockstep_extras.audit")
    options = ("exact=true", "devices=3", BACK_AND_FORTH, "extras=[rebalance,audit]", "extras.audit.share=1")
    moved = run(uneven, tmp_path, *TASK, "strategy=ddp", *options, "extras.rebalance.every=4")
    assert len(changes(moved.folder)) >= 2
    assert moved.summary["metrics"]["audit/pieces"] == moved.summary["steps"]
    assert sha(moved) == sha(single)


# --- the choice -------------------------------------------------------------------------------------------------------

speeds = st.lists(st.floats(0.1, 10), min_size=1, max_size=3)


@given(st.integers(0, 6), speeds)
def test_no_other_choice_is_faster(more: int, seconds: list[float]) -> None:
    pieces = len(seconds) + more
    others = [each for each in product(range(1, pieces + 1), repeat=len(seconds)) if sum(each) == pieces]
    chosen = fastest_counts(pieces, seconds)
    assert sum(chosen) == pieces
    assert slowest_time(chosen, seconds) == min(slowest_time(each, seconds) for each in others)


def test_pieces_stay_where_a_change_saves_little_or_times_are_noisy() -> None:
    assert 1 - 31.9 / 33 < LEAST_GAIN < 1 - 33 / 36
    assert better_counts([30, 30], [1.0, 1.1], noise=0.01) is None
    assert better_counts([30, 30], [1.0, 1.2], noise=0.01) == [33, 27]
    assert better_counts([30, 30], [1.0, 1.2], noise=0.06) is None
    assert better_counts([30, 30], [1.0, 1.2], noise=0.03) is not None
    assert better_counts([30, 30], [1.0, 2.0], noise=MOST_GAIN) == [40, 20]
    assert better_counts([1, 1], [1.0, 9.0], noise=0.0) is None


# --- the table --------------------------------------------------------------------------------------------------------


def layout(pieces: int, devices: int) -> Layout:
    on = {"strategy": "ddp", "accelerator": "cpu", "devices": devices, "num_nodes": 1}
    return resolve(**on, batch_size=pieces, pieces=pieces)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_each_device_has_as_many_pieces_as_the_table_shows(counts: list[int]) -> None:
    assert with_counts(layout(sum(counts), len(counts)), tuple(counts)).counts == counts


@pytest.mark.usefixtures("processes")
def test_a_process_that_was_forked_earlier_reads_changes_and_earlier_steps_stay() -> None:
    assignment = MovingAssignment(layout(8, 2))
    context = get_context("fork")
    pipe, end = context.Pipe()
    steps = range(40)

    def read() -> None:
        while end.recv():
            end.send([assignment.layout_at(step).counts for step in steps])

    reader = context.Process(target=read, daemon=True)
    reader.start()
    for now, first, counts in [(3, 6, [7, 1]), (9, 10, [2, 6]), (20, 30, [5, 3])]:
        before = [assignment.layout_at(step).counts for step in range(now, first)]
        assert not assignment.changes_after(now)
        assignment.change(first, now, counts)
        assert assignment.changes_after(now)
        assert not assignment.changes_after(first)
        pipe.send(True)
        seen = pipe.recv()
        assert seen[now:first] == before
        assert seen[first:] == [counts] * (len(steps) - first)
        assert assignment.layout_at(first) is assignment.layout_at(first + 1)
    pipe.send(False)
    reader.join()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_cores_no_gpu")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("devices=2 strategy=dp pieces=8", "rebalance. and strategy=dp .*strategy=ddp"),
        ("devices=2 strategy=fsdp pieces=8", "rebalance. and strategy=fsdp .*wait for each other.*strategy=ddp"),
        ("devices=2", "rebalance. and pieces=2 .*each of 2 devices has one piece, .*; pieces=16"),
        ("devices=2 pieces=8 exact=true survive=true", r"survive=true and extras=\[rebalance\] .*no checkpoint has"),
        ("devices=2 pieces=8 extras.rebalance.every=0", "extras.rebalance.every=0: must be 1 or more"),
    ],
)
def test_refused_in_one_line(overrides: str, message: str) -> None:
    refused_with(f"extras=[rebalance] {overrides}", message)


@pytest.mark.usefixtures("two_gpus")
def test_batchnorm_over_ranks_is_refused() -> None:
    message = "rebalance. and strategy.sync_batchnorm=true .*equally many pieces"
    refused_with("extras=[rebalance] devices=2 pieces=8 strategy.sync_batchnorm=true", message)


@pytest.mark.usefixtures("two_cores_no_gpu")
def test_shares_by_hand_are_taken_and_one_device_too() -> None:
    assert checked("extras=[rebalance]", "devices=2", "pieces=8", "strategy.shares=[3,1]").layout.counts == [6, 2]
    assert checked("extras=[rebalance]").layout.num_devices == 1
