"""Whole runs as real processes, and the promise that none outlives its test session."""

import hashlib
import itertools
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import forks
import hydra
import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl  # see `_composed`
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import settings
from omegaconf import DictConfig, OmegaConf

from lockstep.config import pages
from lockstep.config.hydra_quirks import VERSION_BASE
from lockstep.launch import machine
from lockstep.launch.environment import environment
from lockstep.launch.machine import gpu_count
from lockstep.project import project as current_project

if TYPE_CHECKING:
    from thread_ranks import Ranks

pytest_plugins = ["kinds"]
ROOT = Path(__file__).resolve().parent.parent
current_project()  # pytest runs in the project's folder; a test may leave it
MARK = "LOCKSTEP_TEST_SESSION"
COMPOSED = ROOT / ".pytest_cache" / "composed"
# A run of six short steps an epoch.
TINY = ("data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "batch_size=32", "threads=1")
# A network with BatchNorm, and as few weights as it can have.
NORMS = (*TINY, "data.image_size=20", "model=fast_cnn", "model.width=[4,4,8,8]", "logger=none")
# What is random or keeps a state: augmentation, AdamW, clipping; two epochs.
RANDOM = (
    *("data=synthetic", "data.image_size=14", "data.num_classes=3", "data.augment={crop:2,flip:true,fill:zero}"),
    *("optimizer=adamw", "lr=0.003", "gradient_clip_val=0.5", "max_epochs=2", "accelerator=cpu", "threads=1"),
    *("callbacks=none", "logger=none"),
)
# A run to be struck: its steps take milliseconds, and it saves after every third.
SAVES_OFTEN = (
    *("data=synthetic", "data.samples=415", "data.image_size=12", "data.num_classes=3", "model.dropout=0.25"),
    *("batch_size=32", "max_epochs=24", "checkpoint_every=3", "logger=none", "threads=1"),
)
# A run that goes on until somebody ends it.
LONG_RUN = (
    *(*TINY, "max_epochs=100000", "scheduler=constant", "checkpoint_every=20"),
    *("logger=none", "callbacks.console=null"),
)
# Strategies of several devices: those of the core, and what lies beside them in strategy/ of the config.
STRATEGIES = ",".join(["ddp", "dp", *sorted({*pages.options("strategy")} - {"auto", "ddp", "dp"})])
# A GPU is for test_gpu.py alone: all others count on devices that are the CPU's.
SEEN = "LOCKSTEP_TEST_GPUS"  # by the first of all processes: pytest's workers inherit what it hides
os.environ.setdefault(SEEN, os.environ.get("CUDA_VISIBLE_DEVICES", "0") if gpu_count() else "")
CUDA_VISIBLE_DEVICES = os.environ[SEEN]
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when the library is imported: else it asks its hub for 20 s
TIMEOUT = 600.0  # seconds, after which a program counts as one that hangs, however busy the machine is
T = TypeVar("T")
Process = subprocess.Popen[str] | forks.Fork
# A machine may stand still for a moment, so nothing has a deadline.
settings.register_profile("ours", deadline=None, max_examples=30, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("ours")
if "PYTEST_XDIST_WORKER" in os.environ:  # tests share the cores: a thread that waits for another must not spin
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@dataclass(frozen=True)
class Run:
    """One finished process of `src/train.py` (or another program), and what it left under its `outputs` folder."""

    returncode: int  # negative: ended by that signal
    stdout: str
    stderr: str
    outputs: Path

    @property
    def folders(self) -> list[Path]:
        """Return all run folders, oldest first: those that hold Hydra's composed config or a summary."""
        paths = [*self.outputs.rglob(".hydra"), *self.outputs.rglob("summary.json")]
        return sorted({path.parent for path in paths})

    @property
    def folder(self) -> Path:
        """Return the only run folder; an AssertionError if the process left none, or several."""
        assert len(self.folders) == 1, f"one run folder expected, found {self.folders}\n{self}"
        return self.folders[0]

    @property
    def summary(self) -> dict[str, Any]:
        return summary_of(self.folder)

    @property
    def jobs(self) -> list[Path]:
        """Return the job folders of the only sweep, by number."""
        sweeps = {path.parent for path in self.folders}
        assert len(sweeps) == 1, f"one sweep expected, found {sweeps}\n{self}"
        return sorted(self.folders, key=lambda path: int(path.name))

    def __str__(self) -> str:
        return f"exit {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json."""
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def checkpoint_of(folder: Path, name: str = "last") -> dict[str, Any]:
    """Return a checkpoint as anyone may read it: with plain torch, and nothing that could run code."""
    import torch

    content: dict[str, Any] = torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)
    return content


def template(folder: Path) -> Path:
    """Return a copy of the template as a user has it."""
    for part in ("src", "conf"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder


def composed(*overrides: str, page: str = "train") -> dict[str, Any]:
    """Return the config that a program gets: a copy of its own."""
    return cast(dict[str, Any], pickle.loads(_composed(page, overrides)))


def page_file(name: str) -> Path:
    """Return the file of a page of the config, such as `model/resnet18`."""
    file = pages.find(name)
    assert file, name
    return file


@cache
def _composed(page: str, overrides: tuple[str, ...]) -> bytes:
    """Do what Hydra's `compose` does; overrides that choose no file are set in a copy of what the others choose.

    Hydra takes a tenth of a second to put files together, which would be a third of the time of all units. Copies are
    made by pickle, which takes less than `copy`.
    """
    choices = tuple(each for each in overrides if _chooses_files(each))
    values = [each for each in overrides if each not in choices]
    cfg: DictConfig = pickle.loads(_of_files(page, choices))
    parsed = OverridesParser.create().parse_overrides(values)
    ConfigLoaderImpl._apply_overrides_to_config(parsed, cfg)
    raw: Any = OmegaConf.to_container(cfg, resolve=True)
    return pickle.dumps({str(key): value for key, value in raw.items()})


@cache
def _of_files(page: str, choices: tuple[str, ...]) -> bytes:
    """Put files together, or read what an earlier run of the tests has put together of the same files."""
    stored = COMPOSED / f"{_files_and_hydra()}-{hashlib.sha256(repr((page, choices)).encode()).hexdigest()}"
    with suppress(OSError):
        return stored.read_bytes()
    primary = pages.primary(page)
    with initialize_config_dir(str(primary.folder), **VERSION_BASE):
        overrides = pages.with_one_search_path([*primary.overrides, *choices])
        config = pickle.dumps(compose(primary.name, overrides))
    temporary = stored.with_suffix(f".{os.getpid()}")  # another worker may write the same at this moment
    with suppress(OSError):
        temporary.write_bytes(config)
        temporary.replace(stored)
    return config


@cache
def _files_and_hydra() -> str:
    """Return a hash of all that a composed config depends on: the pages, the code of the config, Hydra's version.
    Remove what was composed of others."""
    files = [*ROOT.glob("conf/**/*.yaml"), *ROOT.glob("src/**/*.yaml"), *ROOT.glob("src/lockstep/config/*.py")]
    contents = [(str(file), file.read_bytes()) for file in sorted(files)]
    state = hashlib.sha256(repr((hydra.__version__, contents)).encode()).hexdigest()
    COMPOSED.mkdir(parents=True, exist_ok=True)
    for older in COMPOSED.iterdir():
        if not older.name.startswith(state):
            older.unlink(missing_ok=True)
    return state


def _chooses_files(override: str) -> bool:
    """Return whether an override is more than a value of the config: a file of a group, a key of Hydra, a mistake."""
    key = override.partition("=")[0].lstrip("+~")
    group = key.partition("@")[0]
    return "=" not in override or "@" in key or key.startswith("hydra") or pages.is_group(group)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own, that finds the project."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def python_arguments(program: str | Path, home: Path = ROOT) -> list[str]:
    """Return what Python is given to run a program: a file of a project, or a command such as `lockstep parity`."""
    command = str(program)
    return ["-m", *command.split()] if command.startswith("lockstep ") else [str(home / program)]


def forked(program: str | Path, *arguments: str, cwd: Path = ROOT) -> Run:
    """Run a program as it stands, in a fork: see forks.py."""
    return finished(forks.Fork([*python_arguments(program), *arguments], cwd, dict(os.environ)), cwd, TIMEOUT)


def apart(one: Run, other: Run) -> float:
    """Return how far two runs' last weights are apart, as a part of their size; names must be the same."""
    import torch

    a, b = (checkpoint_of(run.folder)["state_dict"] for run in (one, other))
    assert list(a) == list(b)
    first, second = (torch.cat([value.double().flatten() for value in state.values()]) for state in (a, b))
    return float((first - second).norm() / second.norm())


def wait_for(what: Callable[[], T], process: Process, seconds: float = TIMEOUT) -> T:
    """Return what `what` returns as soon as that is true; fail when the process ends or time runs out before."""
    deadline = time.monotonic() + seconds
    while not (result := what()):
        if (process.poll() is not None or time.monotonic() > deadline) and not what():
            pytest.fail(f"waited in vain; exit {process.poll()}\n{process.communicate(timeout=10)}")
        time.sleep(0.02)
    return result


_ports = itertools.count(20000 + os.getpid() % 100 * 100)


def free_port() -> int:
    """Return a port below those that the kernel assigns by itself: no other process gets it, and none comes twice."""
    for port in _ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("there is no end of ports")


def torchrun_environments() -> list[dict[str, str]]:
    """Return the environments of two workers, as torchrun makes them."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    return [{**where, **sizes, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def workers_of(process: Process) -> list[int]:
    """Return the process ids of a program's workers, oldest (rank zero) first; Linux only."""
    listed = read_proc(process.pid, f"task/{process.pid}/children").split()
    command_line = read_proc(process.pid, "cmdline")
    return [int(pid) for pid in listed if read_proc(int(pid), "cmdline") == command_line]  # `git` is another child


def ended(pid: int) -> bool:
    """Return whether a process is gone, or only waits for its parent to notice; Linux only."""
    return read_proc(pid, "stat").rpartition(")")[2].strip()[:1] in ("", "Z", "X")


def read_proc(pid: int, file: str) -> str:
    """Return a file of /proc about a process; empty when the process has ended, be it while it is read."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def listening(pid: int) -> set[str]:
    """Return the addresses at which a process accepts connections; Linux only."""
    sockets, result = set(), set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in read_proc(pid, f"net/{table}").splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in sockets:
                raw = bytes.fromhex(local.partition(":")[0])  # in little-endian words
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                result.add(socket.inet_ntop(family, words).removeprefix("::ffff:"))
    return result


def finished(process: Process, outputs: Path, timeout: float) -> Run:
    """Wait for a started program; one that takes more than `timeout` seconds is killed and fails the test."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        pytest.fail(f"still running after {timeout:.0f} s: {process.args!r}\n{stdout}\n{stderr}")
    assert process.returncode is not None
    return Run(process.returncode, stdout, stderr, outputs)


@dataclass(frozen=True)
class Program:
    """Runs a program of a project as a user would, in its folder, with `outputs` below the test's own folder."""

    outputs: Path
    script: str = "src/train.py"  # or a command: lockstep parity
    home: Path = ROOT  # the project's folder
    launcher: tuple[str, ...] = ()  # what stands between python and the script, e.g. -m torch.distributed.run
    fresh: bool = False  # an interpreter of its own, as a user starts it; else a fork of one, see forks.py

    def start(self, *overrides: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Process:
        """Start the program in a process group of its own, so that a test may signal it or its group."""
        command = [*python_arguments(self.script, self.home), f"outputs={self.outputs}", *overrides]
        environment = os.environ | (env or {})
        cwd = cwd or self.home
        if not self.fresh:
            return forks.Fork([*self.launcher, *command], cwd, environment)
        return subprocess.Popen(
            [sys.executable, *self.launcher, *command],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: Process, timeout: float = TIMEOUT) -> Run:
        return finished(process, self.outputs, timeout)

    def wait_for_checkpoint(self, process: Process, name: str = "last") -> Path:
        """Wait until a started program has written a checkpoint; return the folder of its run."""
        (checkpoint, *_) = wait_for(lambda: list(self.outputs.rglob(f"{name}.ckpt")), process)
        return checkpoint.parent.parent

    def kill(self, process: Process) -> None:
        """Kill a started program and its workers, at once: a parent that finds its workers dead ends by itself."""
        os.killpg(process.pid, signal.SIGKILL)
        run = self.finish(process)
        assert run.returncode == -signal.SIGKILL, str(run)

    def __call__(
        self,
        *overrides: str,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = TIMEOUT,
        ok: bool = True,
    ) -> Run:
        """Run the program to its end. With `ok` any exit code but 0 fails the test, showing what the program said."""
        run = self.finish(self.start(*overrides, env=env, cwd=cwd), timeout)
        assert not ok or run.returncode == 0, str(run)
        return run


@pytest.fixture
def ranks() -> "Ranks":
    """Return a function: `ranks(4, function)` calls `function(rank)` on 4 threads as ranks, and returns the results."""
    from thread_ranks import Ranks

    return Ranks()


@pytest.fixture
def run_train(processes: None, tmp_path: Path) -> Program:
    """Return a program: `run_train("strategy=ddp")` -> Run. All runs of one test share an `outputs` folder."""
    return Program(tmp_path / "outputs")


@pytest.fixture
def forked_commands(processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark run its commands as forks."""
    from bench import players

    run = SimpleNamespace(run=lambda command, **options: forked(*command[1:]))
    monkeypatch.setattr(players, "subprocess", SimpleNamespace(**(vars(subprocess) | vars(run))))


@pytest.fixture(scope="session")
def project(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the template as a user has it: with modules of their own (user_modules.py), and a file that names one
    of them."""
    folder = template(tmp_path_factory.mktemp("project"))
    shutil.copy(ROOT / "tests" / "user_modules.py", folder / "src" / "mine.py")
    (folder / "conf" / "model" / "mine.yaml").write_text("name: mine\n_target_: mine.LitDigits\n")
    return folder


@pytest.fixture(scope="session", params=["template", "trainer"])
def either(request: pytest.FixtureRequest, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return that project, and one whose src/train.py is a program with `lockstep.Trainer` (trainer_program.py)."""
    if request.param == "template":
        return project
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "src").mkdir()
    shutil.copy(ROOT / "tests" / "trainer_program.py", folder / "src" / "train.py")
    shutil.copy(project / "src" / "mine.py", folder / "src")
    return folder


@pytest.fixture(scope="session")
def undisturbed(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run SAVES_OFTEN on one device, exact: runs that lose workers or machines must end with its bits."""
    return Program(tmp_path_factory.mktemp("undisturbed") / "outputs")(*SAVES_OFTEN, "exact=true", "pieces=4")


# A config makes that same Trainer (trainer/test_one_trainer.py), so the second of the two is enough by day.
TRAINER_BY_DAY = pytest.mark.parametrize(
    "either", [pytest.param("template", marks=pytest.mark.nightly), "trainer"], indirect=True
)


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set variables as an engine does; what is made of them is computed anew, which a process does once otherwise."""

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        environment.cache_clear()

    return set_variables


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail the session if processes that its tests started are still there five seconds after the last test."""
    mark = f"{MARK}={uuid.uuid4().hex}"
    os.environ[MARK] = mark.partition("=")[2]
    yield
    forks.close()
    deadline = time.monotonic() + 5
    while (left := _started_by_us(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "processes left behind (now killed):\n" + "\n".join(f"{pid}: {name}" for pid, name in left.items())


def _started_by_us(mark: str) -> dict[int, str]:
    """Return the living processes below this one, or orphaned by it and known by the mark in their environment;
    Linux only."""
    result: dict[int, str] = {}
    family = {os.getpid()}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        pid = int(folder.name)
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            marked = mark.encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        # Zombies hold nothing; multiprocessing's tracker lives as long as the process that it serves.
        if pid == os.getpid() or state == "Z" or "multiprocessing.resource_tracker" in command:
            continue
        if marked or int(parent) in family:
            family.add(pid)
            result[pid] = command
    return result


@pytest.fixture
def two_cores_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check configs as on a machine with two cores and no GPU, however pytest was started."""
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    monkeypatch.setattr(machine, "cpu_cap", lambda: 8)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("sys.argv", ["src/train.py"])
    GlobalHydra.instance().clear()


@pytest.fixture
def two_gpus(two_cores_no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check configs as on the same machine with two GPUs."""
    monkeypatch.setattr(machine, "gpu_count", lambda: 2)
