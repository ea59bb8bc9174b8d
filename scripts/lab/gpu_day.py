"""Run the trials that need a GPU, the most informative first, and write one page:

    python scripts/lab/gpu_day.py one --to FOLDER                 # the first call: nine minutes at most
    python scripts/lab/gpu_day.py two --from FOLDER --to ANOTHER  # the second: three; also what was not as promised
    python scripts/lab/gpu_day.py layouts benchmark --minutes=20  # parts that only a longer day has
    python scripts/lab/gpu_day.py page FOLDER                     # put a folder's results into docs/results/gpu.md
    python scripts/lab/gpu_day.py --accelerator=cpu --short       # a rehearsal of both calls without a GPU: minutes

Each trial runs programs under a time limit and kills all their processes if one hangs. After each trial the program
writes gpu_day.md, gpu_day.json and gpu_day.log into the folder `--to`; gpu_probe.py and benchmark.py write their
figures there. A later call continues that folder, or that of `--from`: it runs what is left, and again what was not as
promised. A refusal in one line counts as a good result of a layout. Trials of one task must end with the same bits, and
their control with others. What was expected before stands beside each result.
Exit codes: 0 all as promised, 1 not, 2 bad input.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import IO, Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))

import gpu_wheels

if not find_spec("hydra") and gpu_wheels.install():  # a machine without network: use what was taken along
    sys.path.insert(3, str(gpu_wheels.SITE))

from bench.machine import facts
from repository import ROOT

from lockstep.config.value_checks import unknown_name_message
from lockstep.launch.machine import gpu_count
from lockstep.programs.common.showing import markdown
from lockstep.report.summary import git_info, write_summary

OUTPUTS, TO = "OUTPUTS", "FOLDER_OF_THE_PAGE"  # placeholders in a command: the trial's own folder, and `--to`
PAGE = ROOT / "docs" / "results" / "gpu.md"
BEGIN, END = "<!-- results: gpu_day.py page writes them -->", "<!-- end of the results -->"
PART_MINUTES = 8
FIRST_CALL = ("first", "bits", "price", "steps", "hashes", "traps")
CALLS = {"one": (8.5, FIRST_CALL), "two": (3.0, ("tests", *FIRST_CALL))}  # minutes, and parts
TOGETHER = ("bits", "hashes", "layouts")  # parts that measure no time: their trials may run at once
TASK = ["data=synthetic", "data.samples=600", "data.image_size=16", "data.augment={crop:2,flip:true}", "batch_size=128"]
TASK += ["max_steps=8", "scheduler=constant", "logger=none", "threads=1", "hang_timeout=60"]
EXACT = ["exact=true", "pieces=8", "model.dropout=0.3", "checkpoint_every=2"]
KILLED_AT = 5  # the optimizer step after which a worker of the trial "killed" is killed
LAYOUTS = {
    "one device": "devices=1",
    "4 pieces, exact": "devices=1 pieces=4 exact=true",
    "ddp": "strategy=ddp",
    "ddp, bf16 on the wire": "strategy=ddp strategy.compression=bf16",
    "ddp, synchronised BatchNorm": "strategy=ddp strategy.sync_batchnorm=true model=resnet9",
    "dp": "strategy=dp",
    "compiled": "devices=1 compile=true",
}
REFUSED = ("4 pieces, exact, 16-mixed", "4 pieces, exact, bf16-true", "ddp, bf16 on the wire, 64-true")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")
PHOTOS = "data=synthetic data.channels=3 data.image_size=32"
# Runs whose weights another card of the same kind must end with; docs/results/gpu.md has the commands and the digests.
HASHES = {
    "small_cnn": "model=small_cnn data=synthetic accelerator=gpu exact=true pieces=8 max_steps=50",
    "resnet18": f"model=resnet18 {PHOTOS} accelerator=gpu exact=true pieces=8 max_steps=20",
    "resnet18, bf16-mixed": f"model=resnet18 {PHOTOS} accelerator=gpu exact=true pieces=8 max_steps=20 "
    "precision=bf16-mixed",
    "resnet18, no TF32": f"model=resnet18 {PHOTOS} accelerator=gpu exact=true pieces=8 max_steps=20 speed.tf32=false",
}
DESCRIBE_MACHINE = """
import glob, platform, shutil, torch
gpus = torch.cuda.is_available()
backends = torch.distributed.Backend
getattr(backends, "_ensure_backend_registered", lambda name: None)("nccl")
made = getattr(backends, "_plugins", {}).get("NCCL")  # torch 2.15 builds "nccl" as nccl2
print("Python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN",
      torch.backends.cudnn.version(), "NCCL", torch.cuda.nccl.version() if gpus else None, "which backend=nccl is",
      made.creator_fn.__name__.strip("_") if made else "ProcessGroupNCCL", "TF32 of convolutions",
      torch.backends.cudnn.allow_tf32, "of products", torch.backends.cuda.matmul.allow_tf32, "devices",
      glob.glob("/dev/nvidia[0-9]*"), f"/dev/shm {shutil.disk_usage('/dev/shm').total >> 20} MiB", "compiler",
      shutil.which("gcc"))
"""
# One of several ranks on one GPU. NCCL refuses two ranks on one device; gloo takes tensors of a GPU, but not in each
# collective of each version, so the two that fsdp needs beside go through the host's memory.
AS_RANK = """
import os, runpy, sys, torch, torch.distributed as dist
os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"], *sys.argv = sys.argv[1:]
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
start = dist.init_process_group
dist.init_process_group = lambda backend, **options: start(backend.replace("nccl", "gloo"), **options)
def through_host(collective):
    def call(output, input, *args, **options):
        on_host = torch.empty(output.shape, dtype=output.dtype)
        work = collective(on_host, input.cpu(), *args, **options)
        if work is not None:
            work.wait()
        output.copy_(on_host)
        return work
    return call
dist.all_gather_into_tensor = through_host(dist.all_gather_into_tensor)
dist.reduce_scatter_tensor = through_host(dist.reduce_scatter_tensor)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# A run whose worker is killed by SIGKILL after an optimizer step.
AS_KILLED = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
if (child := os.fork()) == 0:
    left, *sys.argv = sys.argv[1:]
    left = [int(left)]
    def count(*_):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    register_optimizer_step_post_hook(count)
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)
sys.exit("error: the run was not killed" if os.waitpid(child, 0)[1] == 0 else 0)
"""
RUNNING: set[subprocess.Popen[Any]] = set()


@dataclass(frozen=True)
class Day:
    """Where the trials run, and with what.

    Attributes:
        short: few and small trials, for a rehearsal.
        again: measure again what has figures.
    """

    accelerator: str
    devices: int
    short: bool = False
    again: bool = False


@dataclass(frozen=True)
class Trial:
    """Programs that run one after the other. The programs of one tuple in `commands` run at once."""

    part: str
    name: str
    commands: Sequence[Sequence[Sequence[str]]]
    seconds: float = 90  # time limit of all programs together
    task: str = ""  # trials of one task end with the same bits: the first one's
    differs: bool = False  # a control, which must end with other bits
    last_line: str = ""  # text that the last line of the output must have
    expected: str = ""  # what was expected before any run


Row = dict[str, Any]  # a row of the page: part, trial, verdict, good, seconds, weights_sha256, figures, expected


def trials(day: Day) -> Iterator[Trial]:
    """Yield all trials, part by part, the most informative part first."""
    cpu, short = day.accelerator == "cpu", day.short
    on = f"accelerator={day.accelerator}"
    train = ("src/train.py", *TASK, on, f"outputs={OUTPUTS}")
    exact, all_devices = (*train, *EXACT), f"devices={day.devices}"
    probe = ["scripts/lab/gpu_probe.py", f"--to={TO}", f"--device={'cpu' if cpu else 'cuda'}"]
    probe += ["--short"] * short + ["--again"] * day.again

    yield Trial("first", "what is there", [[("-c", DESCRIBE_MACHINE)]], 60, expected="torch 2.11 or newer, one GPU")
    smoke = (*train, "model=fast_cnn", "data.image_size=28", "exact=true", "pieces=4")
    yield Trial("first", "a short run, exact", [[smoke]], expected="completes, 4 to 15 s")

    def ranks(count: int, *more: str) -> list[tuple[str, ...]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        common = (*exact, "hang_timeout=60", *more)
        return [("-c", AS_RANK, str(n), str(count), port, *common, f"outputs={OUTPUTS}/{n}") for n in range(count)]

    begun = f"{OUTPUTS}/begun"
    yield Trial("bits", "one device, which owns 8 pieces", [[exact]], task="exact", expected="the first")
    same: Row = {"task": "exact", "expected": "the same"}
    accumulated = tuple(each for each in exact if each != "pieces=8")
    yield Trial("bits", "accumulate_grad_batches=8", [[(*accumulated, "accumulate_grad_batches=8")]], **same)
    yield Trial("bits", "ddp, two ranks on one card, gloo", [ranks(2, "strategy=ddp")], **same)
    yield Trial("bits", "fsdp, two ranks on one card, gloo", [ranks(2, "strategy=fsdp")], **same)
    killed = ("-c", AS_KILLED, str(KILLED_AT), *exact, f"hydra.run.dir={begun}")
    moved = ranks(2, "strategy=ddp", f"resume={begun}")
    yield Trial("bits", f"killed after step {KILLED_AT}, moved to ddp of two ranks", [[killed], moved], **same)
    another: Row = {"task": "exact", "differs": True, "expected": "others"}
    plain = ranks(2, "strategy=ddp", "exact=false")
    yield Trial("bits", "control: two ranks without exact", [plain], **another)
    if not short:
        yield Trial("bits", "ddp, 8 ranks on one card, a piece each", [ranks(8, "strategy=ddp")], 120, **same)
        on_host = "speed.resident=auto" if cpu else "speed.resident=false"
        yield Trial("bits", "data on the host", [[(*exact, on_host)]], **same)
        yield Trial("bits", "dp on one device", [[(*exact, "strategy=dp", "devices=1")]], **same)
        yield Trial("bits", "control: another seed", [[(*exact, "seed=1")]], **another)
        for strategy in ("ddp", "dp") if day.devices > 1 else ():
            command = (*exact, f"strategy={strategy}", all_devices)
            yield Trial("bits", f"{strategy} on {day.devices}", [[command]], **same)

    price = (*probe, "--part=price", "--minutes=2.5")
    yield Trial("price", "gpu_probe.py --part=price", [[price]], 190, expected="exact: 1.02 to 1.2 of ours")
    steps = (*probe, "--part=steps", "--minutes=2")
    yield Trial("steps", "gpu_probe.py --part=steps", [[steps]], 160, expected="see the table of steps")
    for name, options in HASHES.items():
        if short and name != "small_cnn":
            continue
        command = ("src/train.py", *options.split(), f"outputs={OUTPUTS}", *([on, "max_steps=4"] if cpu else []))
        yield Trial("hashes", name, [[command]], expected=f"python src/train.py {options}")
    traps = ("scripts/lab/gpu_traps.py", f"--device={'cpu' if cpu else 'cuda'}")
    yield Trial("traps", "gpu_traps.py", [[traps]], 60, expected="others in a few convolutions: the trap is there")

    last_line = "skipped" if cpu else " passed"  # without a GPU they are skipped
    tests = [[("-m", "pytest", "-q", "tests/test_gpu.py")]]
    yield Trial("tests", "tests/test_gpu.py", tests, 150, last_line=last_line, expected="6 passed")

    # What follows runs by name only: a longer day.
    for (layout, options), precision in product(LAYOUTS.items(), PRECISIONS):
        if short and (layout not in ("one device", "4 pieces, exact") or precision not in ("32-true", "16-mixed")):
            continue
        command = (*train, all_devices, *options.split(), f"precision={precision}")
        expected = "refused" if f"{layout}, {precision}" in REFUSED else "completes"
        limit = 240 if "compile" in options else 90
        yield Trial("layouts", f"{layout}, {precision}", [[command]], limit, expected=expected)

    if not cpu:
        benchmark = ("scripts/lab/benchmark.py", "gpu", f"--json={TO}")
        yield Trial("benchmark", "benchmark.py gpu", [[benchmark]], 470, expected="every goal met")


def carried_out(trial: Trial, seconds: float, bits: dict[str, str | None], day: Day, to: Path) -> Row:
    """Run a trial within `seconds` and return its row.

    Args:
        bits: digest of the weights of each task's first trial. It is filled here.
        to: the folder of the page.
    """

    def row(verdict: str, good: bool, sha256: str | None = None, **figures: float) -> Row:
        fields = {"part": trial.part, "trial": trial.name, "verdict": verdict, "good": good, "figures": figures}
        return fields | {"seconds": time.monotonic() - began, "weights_sha256": sha256, "expected": trial.expected}

    began, codes = time.monotonic(), [0]
    if seconds < 1:
        return row("left out: the time is up", False)
    with tempfile.TemporaryDirectory() as outputs, tempfile.TemporaryFile("w+") as log:
        for programs in trial.commands:
            commands = [[part.replace(OUTPUTS, outputs).replace(TO, str(to)) for part in each] for each in programs]
            try:
                codes = run(commands, began + seconds, log)
            except subprocess.TimeoutExpired:
                append_log(trial, log, to)
                return row(f"HANGS: killed after {seconds:.0f} s", False)
        append_log(trial, log, to)
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()] or ["no output"]
        summaries = [json.loads(file.read_text()) for file in sorted(Path(outputs).rglob("summary.json"))]
    message = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[-1])
    sha256 = next(filter(None, (each.get("weights_sha256") for each in summaries)), None)
    if any(codes):
        refused = trial.part == "layouts" and codes == [2]
        return row(f"refused: {message}" if refused else f"EXIT {codes}: {message}", refused)
    if trial.task:
        if sha256 and not trial.differs:
            bits.setdefault(trial.task, sha256)
        same = sha256 == bits.get(trial.task)
        comparable = sha256 is not None and trial.task in bits
        return row("the same bits" if same else "other bits", comparable and same != trial.differs, sha256)
    if trial.last_line not in lines[-1]:
        return row(f"does not say {trial.last_line!r}: {lines[-1]}", False)
    figures = figures_of(summaries[-1]) if summaries else {}
    verdict = "{status}, {steps} steps".format(**summaries[-1]) if "steps" in (summaries or [{}])[-1] else lines[-1]
    return row(verdict, True, sha256, **figures)


def run(programs: Sequence[Sequence[str]], end: float, log: IO[str]) -> list[int]:
    """Run Python programs at once and return their exit codes.

    Raises:
        TimeoutExpired: one was still running at `end`. All are killed.
    """
    # Lockstep may not be installed; the packages of `sys.path` may be those that were taken along.
    paths = [str(ROOT / "src"), *([str(gpu_wheels.SITE)] if str(gpu_wheels.SITE) in sys.path else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(":")}
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": log, "start_new_session": True}
    running = [subprocess.Popen([sys.executable, *each], **options) for each in programs]
    RUNNING.update(running)
    try:
        return [each.wait(max(0.1, end - time.monotonic())) for each in running]
    finally:
        for each in running:
            kill(each)


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a program and its children if it is still running."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    RUNNING.discard(process)


def end_all(*_: object) -> None:
    """Kill all programs and end. The results of finished trials are written already."""
    for each in list(RUNNING):
        kill(each)
    os._exit(143)


def append_log(trial: Trial, log: IO[str], to: Path) -> None:
    """Append the end of a trial's output to gpu_day.log."""
    log.seek(0)
    with (to / "gpu_day.log").open("a") as file:
        file.write(f"== {trial.part}: {trial.name}\n{log.read()[-4000:]}\n")


def figures_of(summary: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a run that stand on the page."""
    speed, metrics = summary.get("throughput") or {}, summary.get("metrics") or {}
    named = {"test/acc": metrics.get("test/acc"), "samples/s": speed.get("samples_per_second")}
    named |= {"s to the first step": speed.get("seconds_to_first_step"), "s in the worker": speed.get("seconds")}
    return {name: value for name, value in named.items() if value is not None}


def results(rows: Sequence[Row], machine: Sequence[str], steps: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the results as Markdown.

    Args:
        steps: the rows of gpu_probe.py.
        ratios: the rows of benchmark.py.
    """
    bad = [f"{row['part']}, {row['trial']}" for row in rows if not row["good"]]
    lines = [*(f"- {line}" for line in machine), ""]
    lines += [f"{len(rows) - len(bad)} of {len(rows)} as promised; not: {'; '.join(bad) or 'none'}.", ""]
    table = []
    for row in rows:
        figures = ", ".join(f"{name} {value:,.4g}" for name, value in row["figures"].items())
        cells = [f"{row['part']}: {row['trial']}", "" if row["good"] else "**NOT**", row["verdict"], figures]
        table.append([*cells, row["expected"], f"{row['seconds']:.1f}", (row["weights_sha256"] or "")[:12]])
    lines += [markdown(("trial", "", "verdict", "figures", "expected before", "s", "weights"), table)]
    if recorded := [row for row in rows if row["part"] == "hashes" and row["good"]]:
        lines += ["", "Another card of the same kind must end with the same `weights_sha256`:", ""]
        cells = [[f"`{row['expected']}`", f"`{row['weights_sha256']}`"] for row in recorded]
        lines += [markdown(("command", "weights_sha256"), cells)]
    if steps:
        legend = "Microseconds, launches and waits are those of a step; a ratio without a name is to the plain loop."
        lines += ["", legend, ""]
        lines += [markdown(STEP_NAMES, step_cells(steps))]
    if ratios:
        lines += ["", "Both sides in turns, seconds a step:", ""]
        cells = [
            [each["what"], each["ours"], each["other"], f"{each['ratio']:.3f}", each["goal"] or ""] for each in ratios
        ]
        lines += [markdown(("benchmark.py gpu", "ours", "other", "ratio", "goal"), cells)]
    return "\n".join(lines) + "\n"


STEP_NAMES: tuple[str, ...] = (
    "network, batch, precision: side",
    "us",
    "expected before",
    "ratio",
    "cpu us",
    "images/s",
    "launches",
)
STEP_NAMES = (*STEP_NAMES, "waits", "busy", "MiB")


def step_cells(steps: Sequence[Row]) -> Iterator[list[str]]:
    """Yield a line of the table for each row of gpu_probe.py. The expectations are an H100's."""
    from gpu_probe import PREDICTIONS

    known = {(row["model"], row["batch"], row["precision"], row["side"]): row.get("us") for row in steps}
    for row in sorted(steps, key=lambda row: (row["model"], row["batch"], row["precision"])):
        case = row["model"], row["batch"], row["precision"]
        name = "{}, {}, {}: {}".format(*case, row["side"])
        low, high = PREDICTIONS.get((*case, row["side"]), (0, 0))
        expected = f"{low:,.0f} to {high:,.0f}" if high else ""
        if "us" not in row:
            yield [name, f"**FAILED** {row.get('error')}", expected, *[""] * 7]
            continue
        exact = row["side"].endswith(", exact")
        base = row["side"].removesuffix(", exact") if exact else "plain loop"
        other = known.get((*case, base))
        relative = f"{row['us'] / other:.2f}{f' of {base}' * exact}" if other else ""
        waits = ", ".join(f"{each} {count}" for each, count in row["waits"].items()) or "0"
        speed = [f"{row['cpu_us']:,.0f}", f"{row['batch'] / row['us'] * 1e6:,.0f}", f"{row['launches']}", waits]
        memory = f"{row['peak_mib']:,.0f}" if "peak_mib" in row else ""
        yield [name, f"{row['us']:,.0f}", expected, relative, *speed, f"{row['busy']:.2f}", memory]


def read(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's files: rows, machine, steps, ratios."""

    def content(name: str, default: Any) -> Any:
        return json.loads((folder / name).read_text()) if (folder / name).exists() else default

    day, ratios = content("gpu_day.json", {}), content("gpu.json", {})
    contents = {"rows": day.get("rows", []), "machine": day.get("machine", [])}
    return contents | {"steps": content("probe.json", []), "ratios": ratios.get("rows", [])}


def write_page(folder: Path) -> int:
    """Put the results of a folder into docs/results/gpu.md."""
    contents = read(folder)
    if not contents["rows"]:
        print(f"error: {folder} has no results of gpu_day.py", file=sys.stderr)
        return 2
    cards = {row["device"] for row in contents["steps"]} - {"cpu"}
    if not cards:
        print(f"error: {folder} was not measured on a GPU: docs/results/gpu.md is for GPUs", file=sys.stderr)
        return 2
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    heading = f"## Measured on {' and '.join(sorted(cards))}"
    PAGE.write_text(f"{before}{BEGIN}\n\n{heading}\n\n{results(**contents)}\n{END}{after}")
    print(f"{PAGE.relative_to(ROOT)}: {len(contents['rows'])} trials, {len(contents['steps'])} rows of steps")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="a call (one, two), some parts (default: both calls), or: page FOLDER")
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--short", action="store_true", help="few and small trials, for a rehearsal")
    parser.add_argument("--minutes", type=float, help="time for all trials (default: the call's, else 30)")
    parser.add_argument("--jobs", type=int, default=6, help=f"trials at once in {', '.join(TOGETHER)}")
    parser.add_argument("--again", action="store_true", help="run again what was as promised, too")
    parser.add_argument("--to", type=Path, default=ROOT / "outputs" / "gpu_day", help="folder for the results")
    parser.add_argument("--from", dest="begun", type=Path, help="a folder of results to continue")
    options = parser.parse_args()
    if options.parts[:1] == ["page"] and len(options.parts) == 2:
        return write_page(Path(options.parts[1]))
    devices = 2 if options.accelerator == "cpu" else gpu_count()
    if not devices:
        print("error: torch finds no GPU on this machine: use --accelerator=cpu for a rehearsal", file=sys.stderr)
        return 2
    day = Day(options.accelerator, devices, options.short, options.again)
    listed = list(trials(day))
    known = dict.fromkeys(trial.part for trial in listed)
    if wrong := [part for part in options.parts if part not in (known | CALLS)]:
        print(f"error: {wrong[0]}: {unknown_name_message(wrong[0], known | CALLS)}", file=sys.stderr)
        return 2
    calls = [CALLS[part] for part in options.parts or CALLS if part in CALLS]
    parts = {part for _, names in calls for part in names} | set(options.parts)
    minutes = sum(minutes for minutes, _ in calls) or 30 if options.minutes is None else options.minutes
    if options.begun and not (options.begun / "gpu_day.json").exists():
        print(f"error: --from={options.begun} has no gpu_day.json", file=sys.stderr)
        return 2
    to: Path = options.to.absolute()
    to.mkdir(parents=True, exist_ok=True)
    if options.begun:
        shutil.copytree(options.begun, to, dirs_exist_ok=True, copy_function=shutil.copyfile)
    listed.sort(key=lambda trial: options.parts == ["two"] and trial.part != "tests")  # what is new comes first
    return carry_out(day, [trial for trial in listed if trial.part in parts], to, minutes, options.jobs)


def carry_out(day: Day, listed: Sequence[Trial], to: Path, minutes: float, jobs: int) -> int:
    """Run trials, and write what is known after each. Return the exit code.

    Args:
        to: the folder of the results. Those of earlier calls that are as promised are not run again.
        jobs: trials at once in the parts that measure no time.
    """
    rows, machine = read(to)["rows"], read(to)["machine"]
    chosen_trials = {(trial.part, trial.name) for trial in listed}
    rows = [row for row in rows if (row["part"], row["trial"]) not in chosen_trials or (row["good"] and not day.again)]
    done_trials = {(row["part"], row["trial"]) for row in rows}
    firsts = {(trial.part, trial.name): trial.task for trial in listed if trial.task and not trial.differs}
    bits = {firsts[key]: row["weights_sha256"] for row in rows if (key := (row["part"], row["trial"])) in firsts}
    commit = dict(git_info() or {}).get("commit") or gpu_wheels.commit()
    machine = list(dict.fromkeys([*machine, *facts(), f"commit {commit}"]))  # a later call may be on another card
    end = time.monotonic() + 60 * minutes
    slow = 5 if day.accelerator == "cpu" else 1  # a rehearsal may share its machine with other programs
    for part in dict.fromkeys(trial.part for trial in listed):
        part_end = min(end, time.monotonic() + slow * 60 * PART_MINUTES)

        def one(trial: Trial, part_end: float = part_end) -> Row:
            return carried_out(trial, min(slow * trial.seconds, part_end - time.monotonic()), bits, day, to)

        waiting = [trial for trial in listed if trial.part == part and (part, trial.name) not in done_trials]
        first, rest = waiting[:1], waiting[1:]  # the first one's bits are the others'
        with ThreadPoolExecutor(jobs if part in TOGETHER else 1) as pool:
            for row in (each for some in (first, rest) for each in pool.map(one, some)):
                rows.append(row)
                write_summary(to / "gpu_day.json", {"machine": machine, "rows": rows})
                contents = read(to)
                (to / "gpu_day.md").write_text("# A day on a GPU\n\n" + results(**contents))
                print("{part}: {trial}: {verdict} ({seconds:.1f} s; expected: {expected})".format(**row), flush=True)
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_all)
    sys.exit(main())
