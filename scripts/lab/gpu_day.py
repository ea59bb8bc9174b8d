"""Run the trials that need a GPU, the most informative first, and write one page:

    python scripts/lab/gpu_day.py                       # all: half an hour at most
    python scripts/lab/gpu_day.py layouts bits          # some parts
    python scripts/lab/gpu_day.py --accelerator=cpu     # a rehearsal of the same trials without a GPU

Each trial runs programs under a time limit and kills all their processes if one hangs. After each trial the program
writes gpu_day.md and gpu_day.json into the folder `--to`; a later call with other parts adds to them. A refusal in one
line counts as a good result. Trials of one task must end with the same bits, and their control with others.
Exit codes: 0 all as promised, 1 not, 2 bad input.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1]))

from bench.machine import facts

from lockstep.config.value_checks import ROOT, unknown_name_message
from lockstep.launch.machine import gpu_count
from lockstep.run.summary import git_info, write_summary

OUTPUTS = "OUTPUTS"  # placeholder in a command for the trial's own folder
TASK = ["data=synthetic", "data.samples=600", "data.image_size=16", "data.augment={crop:2,flip:true}", "batch_size=128"]
TASK += ["max_steps=8", "scheduler=constant", "logger=none", "threads=1", "hang_timeout=60"]
EXACT = ["exact=true", "pieces=4", "model.dropout=0.3"]
LAYOUTS = {
    "one device": "devices=1",
    "4 pieces, exact": "devices=1 pieces=4 exact=true",
    "ddp": "strategy=ddp",
    "ddp, bf16 on the wire": "strategy=ddp strategy.compression=bf16",
    "ddp, synchronised BatchNorm": "strategy=ddp strategy.sync_batchnorm=true model=resnet9",
    "dp": "strategy=dp",
    "compiled": "devices=1 compile=true",
}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")
# One of two ranks on one GPU. NCCL refuses two ranks on one GPU; gloo accepts GPU tensors.
AS_RANK = """
import os, runpy, sys, torch.distributed as dist
os.environ["RANK"], os.environ["MASTER_PORT"], *sys.argv = sys.argv[1:]
os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
start = dist.init_process_group
dist.init_process_group = lambda backend, **options: start(backend.replace("nccl", "gloo"), **options)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Trial:
    """Programs that run one after the other. The programs of one tuple in `commands` run at once."""

    part: str
    name: str
    commands: Sequence[Sequence[Sequence[str]]]
    seconds: float = 90  # time limit of all programs together
    code: int = 0  # expected exit code of each program
    task: str = ""  # trials of one task end with the same bits: the first one's
    differs: bool = False  # a control, which must end with other bits


Row = dict[str, Any]  # a row of the page: part, trial, verdict, good, seconds, weights_sha256


def trials(accelerator: str, devices: int) -> Iterator[Trial]:
    """Yield all trials in order."""
    cpu = accelerator == "cpu"
    train = ("src/train.py", *TASK, f"accelerator={accelerator}", f"outputs={OUTPUTS}")
    exact, all_devices = (*train, *EXACT), f"devices={devices}"

    for (layout, options), precision in product(LAYOUTS.items(), PRECISIONS):
        command = (*train, all_devices, *options.split(), f"precision={precision}")
        yield Trial("layouts", f"{layout}, {precision}", [[command]], 240 if "compile" in options else 90)
    yield Trial("tests", "tests/test_gpu.py", [[("-m", "pytest", "-q", "tests/test_gpu.py")]], 500)
    begun = f"{OUTPUTS}/begun"
    yield Trial("bits", "4 pieces", [[exact]], task="exact")
    yield Trial(
        "bits", "data on the host", [[(*exact, "speed.resident=auto" if cpu else "speed.resident=false")]], task="exact"
    )
    stopped, resumed = (*exact, "max_steps=6", f"hydra.run.dir={begun}"), (*exact, f"resume={begun}", "max_steps=8")
    yield Trial("bits", "stopped in mid-epoch, resumed", [[stopped], [resumed]], task="exact")
    yield Trial("bits", "control: another seed", [[(*exact, "seed=1")]], task="exact", differs=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [("-c", AS_RANK, rank, port, *exact, "strategy=ddp", f"outputs={OUTPUTS}/{rank}") for rank in "01"]
    yield Trial("bits", "two ranks on one device, gloo", [ranks], task="exact")
    if devices > 1:
        for strategy in ("ddp", "dp"):
            command = (*exact, f"strategy={strategy}", all_devices)
            yield Trial("bits", f"{strategy} on {devices}", [[command]], task="exact")
    chaos = ("scripts/lab/chaos.py", "--faults=4", "--layouts=single", "--seed=2", f"accelerator={accelerator}")
    yield Trial("kills", "killed, ended, stopped, each time resumed", [[chaos]], 300)
    yield Trial("kills", "control: resumed with another seed", [[(*chaos, "--control")]], 300, code=1)
    if not cpu:
        yield Trial("benchmark", "benchmark.py gpu", [[("scripts/lab/benchmark.py", "gpu")]], 560)


def carried_out(trial: Trial, seconds: float, bits: dict[str, str | None]) -> Row:
    """Run a trial within `seconds` and return its row.

    Args:
        bits: digest of the weights of each task's first trial. It is filled here.
    """

    def row(verdict: str, good: bool, sha256: str | None = None) -> Row:
        fields = {"part": trial.part, "trial": trial.name, "verdict": verdict, "good": good}
        return fields | {"seconds": time.monotonic() - began, "weights_sha256": sha256}

    began, codes = time.monotonic(), [0]
    if seconds < 1:
        return row("left out: the time is up", False)
    with tempfile.TemporaryDirectory() as outputs, tempfile.TemporaryFile("w+") as log:
        options: dict[str, Any] = {"cwd": ROOT, "stdout": log, "stderr": log, "start_new_session": True}
        for programs in trial.commands:
            commands = [[sys.executable, *(part.replace(OUTPUTS, outputs) for part in each)] for each in programs]
            running = [subprocess.Popen(command, **options) for command in commands]
            try:
                codes = [each.wait(max(0.1, began + seconds - time.monotonic())) for each in running]
            except subprocess.TimeoutExpired:
                return row(f"HANGS: killed after {seconds:.0f} s", False)
            finally:
                for each in running:
                    if each.poll() is None:
                        os.killpg(each.pid, signal.SIGKILL)
                        each.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()] or ["no output"]
        digests = [json.loads(file.read_text()).get("weights_sha256") for file in Path(outputs).rglob("summary.json")]
    message = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[-1])
    sha256 = next(filter(None, digests), None)
    if codes != [trial.code] * len(codes):
        refused = trial.part == "layouts" and codes == [2]
        return row(f"refused: {message}" if refused else f"EXIT {codes}: {message}", refused)
    if trial.task:
        same = sha256 == bits.setdefault(trial.task, sha256)
        return row("the same bits" if same else "other bits", same != trial.differs and sha256 is not None, sha256)
    return row(message if trial.code else next((line for line in lines if " fits" in line), lines[-1]), True, sha256)


def write_page(rows: Sequence[Row], machine: Sequence[str], folder: Path) -> None:
    """Write gpu_day.md and gpu_day.json."""
    folder.mkdir(parents=True, exist_ok=True)
    bad = [f"{row['part']}, {row['trial']}" for row in rows if not row["good"]]
    lines = ["# A day on a GPU", "", *(f"- {line}" for line in machine)]
    lines += ["", f"{len(rows) - len(bad)} of {len(rows)} as promised; not: {'; '.join(bad) or 'none'}.", ""]
    lines += ["| part | trial | | verdict | s | weights |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row["part"], row["trial"], "" if row["good"] else "**NOT**", row["verdict"].replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} | {row['seconds']:.1f} | {(row['weights_sha256'] or '')[:12]} |")
    (folder / "gpu_day.md").write_text("\n".join(lines) + "\n")
    write_summary(folder / "gpu_day.json", {"machine": machine, "rows": rows})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="some of layouts, tests, bits, kills, benchmark (default: all)")
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument(
        "--minutes", type=float, default=30, help="time for all trials; those that have not begun by then are left out"
    )
    parser.add_argument("--to", type=Path, default=ROOT / "outputs" / "gpu_day", help="folder for the page")
    options = parser.parse_args()
    devices = 2 if options.accelerator == "cpu" else gpu_count()
    if not devices:
        print("error: torch finds no GPU on this machine: use --accelerator=cpu for a rehearsal", file=sys.stderr)
        return 2
    listed = list(trials(options.accelerator, devices))
    known = dict.fromkeys(trial.part for trial in listed)
    if wrong := [part for part in options.parts if part not in known]:
        print(f"error: {wrong[0]}: {unknown_name_message(wrong[0], known)}", file=sys.stderr)
        return 2
    parts, page = options.parts or list(known), options.to / "gpu_day.json"
    rows: list[Row] = json.loads(page.read_text())["rows"] if page.exists() else []
    rows = [row for row in rows if row["part"] not in parts]
    machine = [*facts(), f"commit {dict(git_info() or {}).get('commit')}"]
    bits: dict[str, str | None] = {}
    end = time.monotonic() + 60 * options.minutes
    for trial in (each for each in listed if each.part in parts):
        # A rehearsal may share its machine with other programs.
        limit = 5 * trial.seconds if options.accelerator == "cpu" else trial.seconds
        rows.append(carried_out(trial, min(limit, end - time.monotonic()), bits))
        print("{part}: {trial}: {verdict} ({seconds:.1f} s)".format(**rows[-1]), flush=True)
        write_page(rows, machine, options.to)
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
