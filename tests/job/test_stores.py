"""Whole runs on shards of servers: one hash with the folder's, killed, on other devices, with an empty cache."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT, Program, Run, checkpoint_of, wait_for, workers_of
from store_servers import WebServer, files_in, s3_server, upload
from user_runs import recorded_pieces
from written_mds import SHARDS as MDS
from written_mds import as_parquet, as_tar
from written_shards import write_folder, write_shards

EXACT = (
    *("data=shards", "data.window=2", "data.image_size=20", "data.retry_seconds=60", "scheduler=constant"),
    *("batch_size=9", "pieces=3", "exact=true", "threads=1", "accelerator=cpu", "logger=none", "model=mnist_cnn"),
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    folder = write_folder(root / "folder", (("train", 14), ("val", 4), ("test", 4)))
    return write_shards(folder, root / "tar", "tar", count=4)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


def machine(tmp_path: Path, name: str) -> dict[str, str]:
    """Return the environment of a machine with its own cache."""
    return {"XDG_CACHE_HOME": str(tmp_path / name)}


def digest(run: Run) -> str:
    return str(run.summary["weights_sha256"])


def test_a_bucket_trains_the_weights_of_the_folder(
    run_train: Program, shards: Path, s3: dict[str, str], tmp_path: Path
) -> None:
    """The run is killed on two devices, its cache is removed, and it is resumed on one."""
    expected = run_train(*EXACT, f"data_dir={shards}", "max_steps=12", "num_workers=0")
    url = upload(shards, s3, "run")
    env = {**s3, **machine(tmp_path, "cache")}
    program = Program(tmp_path / "killed")
    process = program.start(
        *EXACT, f"data_dir={url}", "max_steps=12", "checkpoint_every=1", "strategy=ddp", "devices=2", env=env
    )
    folder = program.wait_for_checkpoint(process)
    wait_for(lambda: checkpoint_of(folder)["global_step"] >= 3, process)
    program.kill(process)
    shutil.rmtree(tmp_path / "cache")
    resumed = program("resume=last", "strategy=auto", "devices=1", env=env)
    assert (resumed.summary["steps"], digest(resumed)) == (12, digest(expected))
    record = str(checkpoint_of(resumed.folder)) + (resumed.folder / ".hydra" / "overrides.yaml").read_text()
    assert f"data_dir={url}" in record
    assert s3["AWS_SECRET_ACCESS_KEY"] not in record
    control = Program(tmp_path / "other")(*EXACT, f"data_dir={url}", "data.window=1", "max_steps=12", env=env)
    assert digest(control) != digest(expected)  # another window is another order


def test_a_server_that_fails_during_a_run(run_train: Program, shards: Path, tmp_path: Path) -> None:
    """It comes back: the run goes on. It stays away: the run ends in a line, and goes on from its checkpoint."""
    web = WebServer(Path(shutil.copytree(shards, tmp_path / "web", ignore=shutil.ignore_patterns(".index"))))
    url = f"{web.url}/{{train,val,test}}-{{00000..00003}}.tar"
    data = (f"data_dir='{url}'", "max_steps=20")
    expected = run_train(*EXACT, f"data_dir={shards}", "max_steps=20", "num_workers=0")
    env = machine(tmp_path, "cache")
    command = [sys.executable, "-m", "lockstep", "index", url, f"--cache={tmp_path}/other"]
    subprocess.run(command, env={**os.environ, **env, "PYTHONPATH": str(ROOT / "src")}, check=True, timeout=TIMEOUT)
    run = Program(tmp_path / "run")
    web.fault = lambda path: 403 if any(run.outputs.rglob("last.ckpt")) else None
    # shards are fetched again in each epoch, so some are after the first checkpoint
    limit = 2.5 * max(file.stat().st_size for file in web.folder.iterdir()) / (1 << 30)
    cache = (f"data.cache={tmp_path}/mine", f"data.cache_gb={limit}", "num_workers=0")
    first = run(*EXACT, *data, "checkpoint_every=1", *cache, env=env, ok=False)
    assert first.returncode == 2, str(first)
    assert re.search(rf"error: {web.url}/\w+-0000[0-3].tar: access is denied \(403\)", first.stderr)
    assert "it goes on from its checkpoint" in first.stderr
    assert "Traceback" not in first.stderr
    web.fault = lambda path: None
    web.stop()
    threading.Timer(2.0, web.start).start()
    second = run("resume=last", env=env)
    assert (second.summary["steps"], digest(second)) == (20, digest(expected))
    web.stop()


def test_each_shard_is_fetched_once_by_a_machine(run_train: Program, shards: Path, tmp_path: Path) -> None:
    """Two runs of two devices with loader processes share a cache, at the same time."""
    web = WebServer(Path(shutil.copytree(shards, tmp_path / "web", ignore=shutil.ignore_patterns(".index"))))
    url = f"{web.url}/{{train,val,test}}-{{00000..00003}}.tar"
    env = machine(tmp_path, "cache")
    options = (f"data_dir='{url}'", "max_epochs=2", "strategy=ddp", "devices=2", "num_workers=1")
    programs = [Program(tmp_path / name) for name in ("one", "two")]
    processes = [program.start(*EXACT, *options, env=env) for program in programs]
    runs = [program.finish(process) for program, process in zip(programs, processes, strict=True)]
    assert [run.returncode for run in runs] == [0, 0], runs
    assert digest(runs[0]) == digest(runs[1])
    names = [name for name in files_in(web.folder) if name.endswith(".tar")]
    assert {name: web.sent[name] for name in names} == {name: os.path.getsize(web.folder / name) for name in names}
    web.stop()


def test_a_url_with_a_secret_is_written_nowhere(tmp_path: Path, processes: None) -> None:
    run = Program(tmp_path)(*EXACT, "data_dir='https://host/images?token=abcsecret'", ok=False)
    assert run.returncode == 2
    assert "error: data_dir: its https URL has a query, which may hold a token" in run.stderr
    assert "abcsecret" not in run.stdout + run.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"abcsecret" not in path.read_bytes(), path


# --- one hash over all formats and places -----------------------------------------------------------------------------

# The shards of tests/mds_shards: 60 images to train on, seven steps an epoch, the last of six images.
RECORDED = (*EXACT, "max_epochs=2", "callbacks.pictures=null", "+callbacks.recorded._target_=mine.Records")
PLACES = ("tar in a bucket", "mds in a bucket", "tar on the disk", "parquet over http", "compressed mds over http")


@contextlib.contextmanager
def placed(place: str, folder: Path, s3: dict[str, str]) -> Iterator[str]:
    """Write the shards to a place. Yield what is typed for it."""
    if place.endswith("bucket"):
        yield f"data_dir={upload(MDS / 'raw' if 'mds' in place else as_tar(folder), s3, place.partition(' ')[0])}"
    elif place == "tar on the disk":
        yield f"data_dir={as_tar(folder)}"
    else:
        web = WebServer(MDS / "zstd" if "mds" in place else as_parquet(folder))
        names = ",".join(path.stem for path in sorted(folder.glob("*.parquet")))
        yield f"data_dir='{web.url}/{{{names}}}.parquet'" if names else f"data_dir={web.url}"
        web.stop()


def on(strategy: str, devices: int) -> tuple[str, str]:
    return f"strategy={strategy}", f"devices={devices}"


def pieces_read(folder: Path) -> set[tuple[int, int, int, tuple[int, ...]]]:
    """Return epoch, step, piece and samples of the pieces that a run has computed, each once."""
    return {(row["epoch"], row["step"], row["piece"], tuple(row["ids"])) for row in recorded_pieces(folder)}


def check_each_sample_once(folder: Path) -> None:
    """Check that an epoch of a run has each sample once, however often it was killed."""
    rows = pieces_read(folder)
    assert len({row[:3] for row in rows}) == len(rows), "a piece had other samples after a restart"
    for epoch in {row[0] for row in rows}:
        assert sorted(sample for row in rows if row[0] == epoch for sample in row[3]) == list(range(60))


def test_every_format_and_place_trains_the_same_weights(project: Path, tmp_path: Path, s3: dict[str, str]) -> None:
    pytest.importorskip("pyarrow", reason="pip install -e .[huggingface] brings it")
    layouts = (on("auto", 1), on("auto", 1), on("ddp", 3), on("dp", 2), (*on("ddp", 2), "num_workers=1"))
    env = {**s3, **machine(tmp_path, "cache")}
    runs = {}
    for number, (place, layout) in enumerate(zip(PLACES, layouts, strict=True)):
        with placed(place, tmp_path / f"shards_{number}", s3) as data_dir:
            program = Program(tmp_path / f"run_{number}", home=project)
            runs[place] = program(*RECORDED, *layout, data_dir, "logger=csv", env=env)
    assert len({digest(run) for run in runs.values()}) == 1, {place: digest(run) for place, run in runs.items()}
    for run in runs.values():
        check_each_sample_once(run.folder)
        assert pieces_read(run.folder) == pieces_read(runs["tar on the disk"].folder)
    program = Program(tmp_path / "control", home=project)
    control = program(*RECORDED, f"data_dir={tmp_path / 'shards_2'}", "data.window=1", env=env)
    assert digest(control) != digest(runs["tar on the disk"])
    assert pieces_read(control.folder) != pieces_read(runs["tar on the disk"].folder)
    (metrics,) = runs["compressed mds over http"].folder.rglob("metrics.csv")
    assert "data/cache_hits" in metrics.read_text()
    assert "data/fetched_mb_per_second" in metrics.read_text()


def test_fewer_workers_go_on_with_the_shards_of_those_that_are_lost(
    project: Path, shards: Path, tmp_path: Path
) -> None:
    """The cache is removed with the worker, so the others fetch the shards of its pieces."""
    web = WebServer(Path(shutil.copytree(shards, tmp_path / "web", ignore=shutil.ignore_patterns(".index"))))
    data_dir = f"data_dir='{web.url}/{{train,val,test}}-{{00000..00003}}.tar'"
    env = machine(tmp_path, "cache")
    task = (*RECORDED, "max_epochs=12", data_dir)
    expected = Program(tmp_path / "expected", home=project)(*task, env=env)
    program = Program(tmp_path / "elastic", home=project)
    process = program.start(*task, "checkpoint_every=1", *on("ddp", 3), "elastic=true", env=env)
    pids = wait_for(lambda: pids if len(pids := workers_of(process)) == 3 else [], process)
    program.wait_for_checkpoint(process)
    web.sent.clear()
    shutil.rmtree(tmp_path / "cache" / "lockstep" / "shards", ignore_errors=True)  # the run may write there meanwhile
    os.kill(pids[2], signal.SIGKILL)
    run = program.finish(process)
    web.stop()
    assert run.returncode == 0, str(run)
    assert "continuing with 2 of 3 workers" in run.stderr
    assert digest(run) == digest(expected)
    assert {name for name in files_in(web.folder) if name.startswith("train")} <= {*web.sent}
    assert pieces_read(run.folder) == pieces_read(expected.folder)


KILLED = {
    "tar in a bucket": (on("ddp", 3), on("auto", 1), on("dp", 2), on("ddp", 2)),
    "mds in a bucket": (on("dp", 3), on("ddp", 2), on("auto", 1), on("ddp", 3)),
    "tar on the disk": (on("ddp", 2), on("dp", 2), on("ddp", 3), on("auto", 1)),
    "parquet over http": (on("auto", 1), on("ddp", 3), on("dp", 3), on("ddp", 2)),
    "compressed mds over http": (on("dp", 2), on("ddp", 3), on("ddp", 2), on("dp", 3)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
def test_each_place_killed_three_times_on_other_layouts(
    project: Path, tmp_path: Path, s3: dict[str, str], place: str
) -> None:
    """The cache is removed after each kill. Steps that are computed twice have the same samples in the same pieces."""
    pytest.importorskip("pyarrow", reason="pip install -e .[huggingface] brings it")
    env = {**s3, **machine(tmp_path, "cache")}
    task = (*RECORDED, "max_epochs=6")
    with placed(place, tmp_path / "shards", s3) as data_dir:
        expected = Program(tmp_path / "expected", home=project)(*task, f"data_dir={as_tar(tmp_path / 'disk')}", env=env)
        program = Program(tmp_path / "killed", home=project)
        options: tuple[str, ...] = (*task, data_dir, "checkpoint_every=1")
        steps = 0
        *killed, last = KILLED[place]
        for layout in killed:
            process = program.start(*options, *layout, env=env)
            folder = program.wait_for_checkpoint(process)
            wait_for(lambda: checkpoint_of(folder)["global_step"] >= steps + 2, process)  # noqa: B023
            program.kill(process)
            steps = checkpoint_of(folder)["global_step"]
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # what lies on the disk has none
            options = ("resume=last",)
        resumed = program("resume=last", *last, env=env)
    assert (resumed.summary["steps"], digest(resumed)) == (expected.summary["steps"], digest(expected))
    check_each_sample_once(resumed.folder)
    assert pieces_read(resumed.folder) == pieces_read(expected.folder)
