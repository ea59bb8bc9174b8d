"""Which checkpoint several ranks continue from, who writes copies of it, and what all of them refuse."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_fits import Net, fit, layout_of, same_bits
from thread_ranks import Ranks, place_of

from lockstep.callbacks import Checkpoint
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.checkpoint.io import AtomicCheckpointIO, CheckpointError, checked_source, step_of
from lockstep.checkpoint.record import FORMAT
from lockstep.checkpoint.resume import OVERRIDES, _newest_of_ranks
from lockstep.checkpoint.start import checkpoint_to_load, load_start, share_newest
from lockstep.errors import UserError
from lockstep.launch.process_group import broadcast_file

pytestmark = pytest.mark.filterwarnings("ignore")

TARGET = {"_target_": "somewhere.Something"}
SPEC = {"channels": 1, "image_size": 8, "classes": ["a", "b"], "mean": [0.0], "std": [1.0], "task": "classification"}
RECORD = {
    "format": FORMAT,
    "config": {"model": TARGET, "data": TARGET, "optimizer": TARGET, "batch_size": 4},
    "spec": SPEC,
    "trainer": {"batch_size": 4, "samples": 16, "fingerprint": "1", "precision": "32-true"},
}
CONTINUATION: dict[str, Any] = {"stopped": False, "length": {}, "trained": {}, "settings": {}}


def write(folder: Path, step: int, best: int | None = None, **more: Any) -> Path:
    """Write checkpoints as a run does. Return the folder of the run."""
    for path, of_step in ((paths.last(folder), step), (paths.best(folder), best)):
        if of_step is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            content: dict[str, Any] = {
                "state_dict": {"w": torch.full((3,), of_step)},
                "pytorch-lightning_version": "2.6",
            }
            content |= {"global_step": of_step, "lockstep": RECORD, "continuation": CONTINUATION, **more}
            checkpoint_io.save(content, path)
    return folder


def damage(path: Path) -> None:
    """Cut off the second half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """Return the run's folder on each of three machines, none of which sees another's."""
    return [tmp_path / str(machine) / "run" for machine in range(3)]


# --- a file is broadcast ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "source"), [(0, 0), (1, 0), (4096, 2), (1_000_003, 0), (1_000_003, 2), (None, 1)])
def test_a_file_is_sent_from_any_rank(ranks: Ranks, tmp_path: Path, size: int | None, source: int) -> None:
    """Also an empty one, and that there is none."""
    content = None if size is None else os.urandom(size)
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    file = None if content is None else tmp_path / "file"
    sent = ranks(3, lambda rank: broadcast_file(file if rank == source else None, source))
    assert [each if each is None else bytes(each) for each in sent] == [content] * 3


def test_rank_zeros_file_is_what_all_ranks_load(ranks: Ranks, tmp_path: Path) -> None:
    """Another rank's file of the same name is not read."""
    for rank, step in enumerate((7, 99)):
        write(tmp_path / str(rank), step)

    def of_rank(rank: int) -> int:
        return int(checkpoint_io.load(paths.last(tmp_path / str(rank)), broadcast=True)["global_step"])

    assert ranks(2, of_rank) == [7, 7]


@pytest.mark.parametrize("fault", ["missing", "damaged", "cut off", "none"])
def test_a_file_that_rank_zero_can_not_use_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    path = paths.last(write(tmp_path, 3))
    if fault == "missing":
        path.unlink()
    elif fault == "damaged":
        damage(path)
    elif fault == "cut off":
        path.write_bytes(path.read_bytes()[:-40])
    results = ranks(3, lambda rank: checked_source(path, broadcast=True), errors=CheckpointError)
    assert [isinstance(result, CheckpointError) for result in results] == [fault != "none"] * 3
    assert len({str(result) for result in results if fault != "none"}) <= 1


# --- the newest wins --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "bests", "newest", "best"),
    [
        ((5, 9, 7), (3, 7, 5), 9, [7, 7, 7]),
        ((9, 5, None), (7, 3, None), 9, [7, 7, 7]),
        ((None, None, 4), (None, None, 2), 4, [2, 2, 2]),
        ((None, 8, 8), (None, 6, 6), 8, [6, 6, 6]),
        ((8, None, 8), (6, None, 6), 8, [6, 6, 6]),
        # of equally new ones none is sent: their bests differ only after a loss of one, which `Checkpoint` repairs
        ((6, 6, 6), (0, 1, 2), 6, [0, 1, 2]),
        # a best goes where the newest has none: it is of another history
        ((3, 9, 9), (2, None, None), 9, [-1, -1, -1]),
        # one that is damaged, of step 99, is not the newest
        ((4, 99, 6), (2, 2, 4), 6, [4, 4, 4]),
    ],
)
def test_the_newest_checkpoint_reaches_the_machines_that_lack_it(
    ranks: Ranks,
    machines: list[Path],
    steps: Sequence[int | None],
    bests: Sequence[int | None],
    newest: int,
    best: list[int],
) -> None:
    for machine, step, its_best in zip(machines, steps, bests, strict=True):
        if step is not None:
            write(machine, step, its_best)
        if step == 99:
            damage(paths.last(machine))
    ranks(3, lambda rank: share_newest(paths.last(machines[rank]), [0, 1, 2]))
    assert [step_of(paths.last(machine)) for machine in machines] == [newest] * 3
    assert [step_of(paths.best(machine)) for machine in machines] == best


@pytest.mark.parametrize(("writers", "expected"), [([0, 2], 9), ([0], -1)])
def test_ranks_that_write_nothing_take_part_in_nothing_but_the_exchange(
    ranks: Ranks, machines: list[Path], writers: list[int], expected: int
) -> None:
    """Ranks 0 and 1 are on one machine, 2 and 3 on another. With one writing rank nothing is exchanged."""
    write(machines[1], 9)
    ranks(4, lambda rank: share_newest(paths.last(machines[rank // 2]), writers))
    assert step_of(paths.last(machines[0])) == expected


# --- where a run starts -----------------------------------------------------------------------------------------------


def starts(ranks: Ranks, machines: Sequence[Path], resume: str | None = None, **changes: Any) -> list[Any]:
    world = len(machines)

    def of_rank(rank: int) -> Any:
        here = place_of(rank, world, world, **changes)
        path, content = load_start(machines[rank], resume, {}, range(world), here)
        return path and Path(path).name, content.get("global_step")

    return ranks(world, of_rank, errors=UserError)


NEW, LAST = (None, None), "checkpoints/last.ckpt"


@pytest.mark.parametrize(
    ("steps", "damaged", "resume", "restarts", "expected"),
    [
        ([None, None, None], False, None, 0, NEW),
        ([None, 8, 6], False, None, 0, ("last.ckpt", 8)),
        ([8, 8, 8], True, None, 0, ("best.ckpt", 4)),
        ([8, 8, 8], True, LAST, 0, "cut off"),  # the user has named it
        ([None, None, None], False, "checkpoints/step_4.ckpt", 0, "no such file"),
        ([None, None, None], False, LAST, 1, NEW),  # the run may have died before its first checkpoint
    ],
)
def test_all_ranks_start_from_the_newest_or_refuse_it(
    ranks: Ranks,
    machines: list[Path],
    caplog: pytest.LogCaptureFixture,
    steps: Sequence[int | None],
    damaged: bool,
    resume: str | None,
    restarts: int,
    expected: Any,
) -> None:
    for machine, step in zip(machines, steps, strict=True):
        if step is not None:
            write(machine, step, best=4)
        if damaged:
            damage(paths.last(machine))
    results = starts(ranks, machines, resume and str(machines[0] / resume), restarts=restarts)
    if isinstance(expected, str):
        assert [expected in str(error) for error in results] == [True] * 3
    else:
        assert results == [expected] * 3
    assert ("continuing from the older best.ckpt" in caplog.text) == (expected == ("best.ckpt", 4))


def test_a_damaged_one_without_a_best_or_of_another_version_is_refused_on_all_ranks(
    ranks: Ranks, machines: list[Path]
) -> None:
    damage(paths.last(write(machines[0], 8)))
    assert ["cut off" in str(error) for error in starts(ranks, machines[:1] * 3)] == [True] * 3
    checkpoint_io.save({"state_dict": {}, "pytorch-lightning_version": "2", "global_step": 3}, paths.last(machines[0]))
    refused = "no lockstep.Trainer has saved it, so none can continue from it: init_from= begins"
    assert [refused in str(error) for error in starts(ranks, machines[:2])] == [True] * 2


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("recorded", [(), (1,), (0, 1, 2)])
def test_a_restarted_run_does_not_go_back_again(
    ranks: Ranks, machines: list[Path], restarts: int, recorded: Sequence[int]
) -> None:
    """As soon as one machine's folder has the overrides of this command, the run has gone back already."""
    for machine in recorded:
        (machines[machine] / ".hydra").mkdir(parents=True)
        (machines[machine] / ".hydra" / OVERRIDES).write_text("- lr=1\n")
    resume = str(machines[0] / "checkpoints" / "step_4.ckpt")

    def of_rank(rank: int) -> str:
        here = place_of(rank, 3, 3, restarts=restarts)
        return checkpoint_to_load(machines[rank], resume, {OVERRIDES: "- lr=1\n"}, here).name

    expected = "last.ckpt" if restarts and recorded else "step_4.ckpt"
    assert ranks(3, of_rank) == [expected] * 3


@pytest.mark.parametrize("times", [(3.0, 5.0, None), (None, None, 1.0), (2.0, 1.0, 0.0), (None, None, None)])
def test_resume_takes_the_newest_run_of_all_machines(ranks: Ranks, times: Sequence[float | None]) -> None:
    """Without any, all ranks have rank zero's line."""

    def of_rank(rank: int) -> str:
        def find() -> tuple[float, str, list[str]]:
            time = times[rank]
            if time is None:
                raise UserError(f"rank {rank} has none")
            return time, f"run {time}", []

        return _newest_of_ranks(find)[1]

    newest = max((time for time in times if time is not None), default=None)
    expected = f"run {newest}" if newest is not None else "rank 0 has none"
    assert [str(each) for each in ranks(3, of_rank, errors=UserError)] == [expected] * 3


# --- who writes -------------------------------------------------------------------------------------------------------


def saves(rank: int, folder: Path, writers: Sequence[int], steps: Sequence[int], fails: bool = False) -> Any:
    """Save checkpoints as Lightning's strategy calls a rank's plugin."""
    io = AtomicCheckpointIO(ranks=writers, timeout=20.0)
    for step in steps:
        if rank == 0 or io.keeps_copies:
            content = {"state_dict": {"w": torch.tensor(step)}, "pytorch-lightning_version": "2", "global_step": step}
            if fails and rank == 0 and step == steps[-1]:
                content["state_dict"]["w"] = print  # type: ignore[index]
            io.save_checkpoint(content, paths.last(folder))
    io.teardown()
    return io.keeps_copies


@pytest.mark.parametrize(("world", "writers"), [(2, [0]), (2, [0, 1]), (4, [0, 2]), (3, [0, 1, 2])])
def test_rank_zero_and_one_rank_of_each_other_machine_write(
    ranks: Ranks, tmp_path: Path, world: int, writers: list[int]
) -> None:
    """Copies have the bytes of rank zero's files."""
    remaining = ranks(world, lambda rank: saves(rank, tmp_path / str(rank), writers, [1, 2, 3]))
    assert remaining == [rank in writers[1:] for rank in range(world)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(rank) for rank in writers]
    files = [paths.last(tmp_path / str(rank)) for rank in writers]
    assert {step_of(file) for file in files} == {3}
    assert len({file.read_bytes() for file in files}) == 1


def test_a_file_that_rank_zero_can_not_write_leaves_the_copies_as_they_were(ranks: Ranks, tmp_path: Path) -> None:
    zero, one = ranks(
        2, lambda rank: saves(rank, tmp_path / str(rank), [0, 1], [1, 2], fails=True), errors=CheckpointError
    )
    assert "not saved, because loading it would run code" in str(zero)
    assert one is True
    assert [step_of(paths.last(tmp_path / rank)) for rank in "01"] == [1, 1]


@pytest.mark.parametrize("copies", [False, True])
def test_a_fit_of_several_ranks_writes_its_last_and_best_once(ranks: Ranks, tmp_path: Path, copies: bool) -> None:
    net = Net()
    layout, writers = layout_of(3, exact=True), [0, 2] if copies else [0]

    def of_rank(rank: int) -> Any:
        folder = tmp_path / str(rank)
        callback, io = Checkpoint(folder, monitor="val/loss", mode="min"), AtomicCheckpointIO(ranks=writers, timeout=20)
        options: dict[str, Any] = {
            "callbacks": [callback],
            "plugins": [io],
            "enable_checkpointing": True,
            "max_epochs": 2,
        }
        result = fit(rank, net, layout, **options)
        io.wait()
        return result.state, callback.best_score

    results = ranks(3, of_rank)
    assert len({score for _, score in results}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(rank) for rank in writers]
    for rank in writers:
        assert sorted(path.name for path in paths.folder(tmp_path / str(rank)).iterdir()) == ["best.ckpt", "last.ckpt"]
        last = checkpoint_io.load(paths.last(tmp_path / str(rank)))
        assert (last["global_step"], same_bits(last["state_dict"], results[0][0])) == (4, True)


# --- which is the best ------------------------------------------------------------------------------------------------


def best_callback(rank: int, folder: Path, scores: Sequence[float | None]) -> tuple[Checkpoint, Any]:
    """Return a callback and a trainer of a rank whose logged score is its own."""
    from lockstep.launch.process_group import broadcast_from_rank_zero

    strategy = SimpleNamespace(broadcast=broadcast_from_rank_zero, checkpoint_io=SimpleNamespace(loaded_step=4))
    metrics = {} if scores[rank] is None else {"val/acc": torch.tensor(scores[rank])}
    trainer = SimpleNamespace(
        strategy=strategy, callback_metrics=metrics, global_step=4, is_global_zero=rank == 0, ckpt_path=None
    )
    return Checkpoint(folder), trainer


@pytest.mark.parametrize(
    ("scores", "expected"), [((0.5, 0.9, None), 0.5), ((None, 0.9, 0.9), None), ((float("nan"), 0.9, 0.9), None)]
)
def test_rank_zeros_score_decides_for_all_ranks(
    ranks: Ranks, tmp_path: Path, scores: Sequence[float | None], expected: float | None
) -> None:
    """Saving is collective, and a metric that a module has not reduced differs between ranks."""

    def of_rank(rank: int) -> Any:
        callback, trainer = best_callback(rank, tmp_path, scores)
        return callback._improved(trainer), callback.best_score

    assert ranks(3, of_rank) == [(expected is not None, expected)] * 3


@pytest.mark.parametrize("exists", [True, False])
def test_a_best_score_without_its_file_is_dropped_on_all_ranks(ranks: Ranks, tmp_path: Path, exists: bool) -> None:
    """Rank zero alone sees the folder."""
    if exists:
        write(tmp_path / "0", 4, best=4)

    def of_rank(rank: int) -> float | None:
        callback, trainer = best_callback(rank, tmp_path / str(rank), (0.5, 0.5, 0.5))
        callback.load_state_dict({"monitor": "val/acc", "mode": "max", "best_score": 0.75, "best_step": 4})
        callback.on_fit_start(trainer, None)  # type: ignore[arg-type]
        return callback.best_score

    assert ranks(3, of_rank) == [0.75 if exists else None] * 3
