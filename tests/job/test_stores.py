"""Whole runs on shards of servers: one hash with the folder's, killed, on other devices, with an empty cache."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT, Program, Run, checkpoint_of, wait_for
from store_servers import WebServer, files_in, s3_server, upload
from written_mds import SHARDS as MDS
from written_mds import as_tar
from written_shards import write_folder, write_shards

pytest.importorskip("moto.server", reason="pip install -e .[dev] brings moto")
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


def test_every_format_and_place_trains_the_same_weights(run_train: Program, tmp_path: Path, s3: dict[str, str]) -> None:
    """MosaicML's shards in a bucket, compressed ones behind a web server on two devices, and tar files on the disk."""
    pytest.importorskip("pyarrow", reason="pip install -e .[huggingface] brings it")
    env = {**s3, **machine(tmp_path, "cache")}
    options = (*EXACT, "max_epochs=2", "data.image_size=20")
    bucket = Program(tmp_path / "bucket")(*options, f"data_dir={upload(MDS / 'raw', s3, 'mds')}", env=env)
    web = WebServer(MDS / "zstd")
    devices = ("strategy=ddp", "devices=2", "num_workers=1")
    compressed = Program(tmp_path / "web")(*options, *devices, f"data_dir={web.url}", "logger=csv", env=env)
    web.stop()
    tars = Program(tmp_path / "tar")(*options, f"data_dir={as_tar(tmp_path / 'shards')}", env=env)
    assert digest(bucket) == digest(compressed) == digest(tars)
    control = run_train(*options, f"data_dir={tmp_path / 'shards'}", "data.window=1", env=env)
    assert digest(control) != digest(tars)
    (metrics,) = compressed.folder.rglob("metrics.csv")
    assert "data/cache_hits" in metrics.read_text()
    assert "data/fetched_mb_per_second" in metrics.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [("strategy=ddp", "devices=3"), ("strategy=dp", "devices=2"), ("devices=1",)])
def test_other_layouts_killed_three_times(
    run_train: Program, shards: Path, s3: dict[str, str], tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """The cache is removed after each kill, and the next part of the run has one device, or those of the layout."""
    expected = run_train(*EXACT, f"data_dir={shards}", "max_steps=24", "num_workers=0")
    env = {**s3, **machine(tmp_path, "cache")}
    program = Program(tmp_path / "killed")
    options: tuple[str, ...] = (*EXACT, f"data_dir={upload(shards, s3, 'run')}", "max_steps=24", "checkpoint_every=1")
    steps = 0
    for number in range(3):
        process = program.start(*options, *(layout if number % 2 == 0 else ("strategy=auto", "devices=1")), env=env)
        folder = program.wait_for_checkpoint(process)
        before = steps
        wait_for(lambda: checkpoint_of(folder)["global_step"] >= before + 2, process)  # noqa: B023
        program.kill(process)
        steps = checkpoint_of(folder)["global_step"]
        shutil.rmtree(tmp_path / "cache")
        options = ("resume=last",)
    resumed = program("resume=last", *layout, env=env)
    assert (resumed.summary["steps"], digest(resumed)) == (24, digest(expected))
