"""Compare whole runs of `src/train.py` between two checkouts, on the same machine:

    python tests/recorded_runs.py write hashes.json [--source <checkout>] [--only 'exact*']
    python tests/recorded_runs.py compare hashes.json [--source <checkout>] [--only 'exact*']

`write` trains each run of RUNS and writes its `weights_sha256`, steps, samples and results to a JSON file. `compare`
trains them again and prints a line for each run that differs from the file, or failed. Both exit with 1 if a run
failed, or if two runs that must have the same weights (`same_as`) have not.

Sums of floating-point numbers depend on the processor and on the version of torch. So this program is committed and
the JSON file is not: before a change, `write` it with the old checkout; afterwards `compare` it with the new one.

The runs of this file are used for every checkout. They give all the settings that decide about the weights, so that a
new default does not count as a difference. If a key gets a new name, change it in RUNS here: the hash must stay.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300.0  # seconds of one process

# --- settings, by subject: a later one replaces an earlier one of the same key, see `effective` ---

BEST = ("callbacks.checkpoint.monitor=val/acc", "callbacks.checkpoint.mode=max")
COMMON = (
    *("seed=3", "accelerator=cpu", "strategy=auto", "devices=1", "threads=1", "num_workers=0", "compile=false"),
    *("precision=32-true", "speed.memory_format=contiguous", "exact=false", "nonfinite=stop"),
    *("gradient_clip_val=null", "batch_size=24", "max_epochs=2", "max_steps=null", "val_every=null", "log_every=50"),
    *("checkpoint_every=null", "logger=none", "callbacks=default", *BEST),
)
SYNTHETIC = (
    *("data=synthetic", "data.samples=160", "data.channels=1", "data.image_size=12", "data.num_classes=3"),
    *("data.sample_seed=0", "data.val_fraction=0.1", "data.split_seed=0", "data.augment=null"),
    *("data/transforms=none", "data.mix=null", "data.sampling=null"),
)
DIGITS = (
    *("data=digits", "data.val_fraction=0.1", "data.split_seed=0", "data/transforms=none"),
    *("data.mix=null", "data.sampling=null"),
)
CROP = "data.augment={crop:2,flip:true,fill:zero}"
CLASSIFIER = (
    *("model.freeze=[]", "model.label_smoothing=0.0", "model.class_weights=null"),
    "model.decay_norms_and_biases=false",
)
SMALL_CNN = ("model=small_cnn", "model.dropout=0.3", *CLASSIFIER)
FAST_CNN = ("model=fast_cnn", "model.width=[16,32,64,128]", *CLASSIFIER, "model.label_smoothing=0.1")
RESNET9 = ("model=resnet9", "model.width=[4,8,8,16]", *CLASSIFIER, "data.image_size=16")
RESNET18 = (
    *("model=small_resnet18", "model.norm=batch", *CLASSIFIER),
    *("data.image_size=12", "data.samples=54", "max_epochs=1"),
)
SGD = (
    *("optimizer=sgd", "lr=0.05", "optimizer.momentum=0.9", "optimizer.nesterov=true"),
    *("optimizer.weight_decay=0.0005", "optimizer.lr_scale=null"),
)
ADAMW = (
    *("optimizer=adamw", "lr=0.003", "optimizer.betas=[0.9,0.999]", "optimizer.weight_decay=0.01"),
    "optimizer.lr_scale=null",
)
CLIP = ("gradient_clip_val=0.5", "gradient_clip_algorithm=norm")
ONECYCLE = (
    *("scheduler=onecycle", "scheduler.interval=step", "scheduler.peak=0.3", "scheduler.start=0.04"),
    "scheduler.final=0.0",
)
PLATEAU = (
    *("scheduler=plateau", "scheduler.interval=epoch", "scheduler.monitor=val/loss", "scheduler.mode=min"),
    *("scheduler.factor=0.5", "scheduler.patience=0"),
    *("+scheduler.threshold=1e9", "+scheduler.threshold_mode=abs"),  # so no loss that falls counts as a better one
)
DDP_2, DDP_3, DP_2, PIPELINE_2 = (
    ("strategy=ddp", "devices=2"),
    ("strategy=ddp", "devices=3"),
    ("strategy=dp", "devices=2"),
    ("strategy=pipeline", "devices=2"),
)
PLAIN = (*COMMON, *SYNTHETIC, *SMALL_CNN, *SGD, *ONECYCLE)  # 144 samples to train on: six whole steps an epoch
TAIL = "data.samples=86"  # 77 to train on: the last step of an epoch has 5
# All that is random or keeps a state. Eight pieces of three; of five in the last step, so that some have none.
EXACT = (*COMMON, *SYNTHETIC, CROP, *SMALL_CNN, *ADAMW, *CLIP, *ONECYCLE, TAIL, "pieces=8", "exact=true")
SAVES_OFTEN = (*EXACT, "max_epochs=40", "checkpoint_every=3")
# A user's own LightningModule that makes its optimizer itself.
USER = (*COMMON, *SYNTHETIC, TAIL, "precision=64-true", "pieces=6", "~model")


@dataclass(frozen=True)
class Run:
    """One run of `src/train.py`."""

    name: str
    overrides: tuple[str, ...]
    same_as: str = ""  # the name of a run with the same weights, whatever the checkout
    resumed: tuple[str, ...] = ()  # kill the run after its first checkpoint, and resume it with these overrides


RUNS = [
    # models and layouts, to rounding
    Run("small_cnn", (*PLAIN, "logger=tensorboard")),
    Run("resnet9_ddp_2", (*PLAIN, *RESNET9, *DDP_2)),
    Run("resnet18", (*PLAIN, *RESNET18)),
    Run("fast_cnn_digits", (*COMMON, *DIGITS, "data.augment={crop:1,flip:false,fill:zero}", *FAST_CNN, *SGD, *ONECYCLE,
                            "batch_size=256", "lr=0.1")),
    Run("ddp_2", (*PLAIN, *DDP_2)),
    Run("ddp_3", (*PLAIN, *DDP_3)),
    Run("dp_2", (*PLAIN, *DP_2)),
    Run("accumulated", (*PLAIN, "accumulate_grad_batches=4")),
    Run("accumulated_ddp_2_tail", (*PLAIN, *DDP_2, TAIL, "accumulate_grad_batches=2")),
    Run("tail", (*PLAIN, TAIL)),
    # to the bit
    Run("exact_single", EXACT),
    Run("exact_ddp_2", (*EXACT, *DDP_2), same_as="exact_single"),
    Run("exact_ddp_3", (*EXACT, *DDP_3), same_as="exact_single"),
    Run("exact_dp_2", (*EXACT, *DP_2), same_as="exact_single"),
    Run("exact_accumulated", (*EXACT, *DDP_2, "pieces=null", "accumulate_grad_batches=4"), same_as="exact_single"),
    Run("exact_pipeline_2", (*EXACT, *PIPELINE_2), same_as="exact_single"),
    Run("exact_audit_ddp_3", (*EXACT, *DDP_3, "extras=[audit]", "extras.audit.share=0.5"), same_as="exact_single"),
    Run("exact_ledger_ddp_2", (*EXACT, *DDP_2, "checkpoint_every=2", "extras=[ledger]"), same_as="exact_single"),
    Run("exact_resnet18_ddp_2", (*EXACT, *RESNET18, *DDP_2)),
    Run("exact_long", SAVES_OFTEN),
    Run("exact_long_killed", (*SAVES_OFTEN, *DDP_3), same_as="exact_long", resumed=DP_2),
    # precision
    Run("bf16_mixed_ddp_2", (*PLAIN, *DDP_2, "precision=bf16-mixed")),
    Run("bf16_true", (*PLAIN, "precision=bf16-true")),
    # what a run can be told beside its layout
    Run("adamw_clip_augment_ddp_2", (*PLAIN, CROP, *ADAMW, *CLIP, *DDP_2)),
    Run("class_weights_ddp_2", (*PLAIN, *DDP_2, TAIL, "model.class_weights=[1,2,5]")),
    Run("mixup", (*PLAIN, "data.mix=mixup", "data.mix_alpha=0.4", "accumulate_grad_batches=2")),
    Run("ema_ddp_2", (*PLAIN, *DDP_2, "callbacks=ema", *BEST, "callbacks.ema.decay=0.9",
                      "callbacks.ema.update_every_n_steps=1")),
    Run("plateau", (*PLAIN, *PLATEAU, "max_epochs=4")),
    Run("early_stopping", (*PLAIN, "max_epochs=9", "callbacks=early_stopping", *BEST,
                           "callbacks.early_stopping.monitor=val/acc", "callbacks.early_stopping.mode=max",
                           "callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=10.0")),
    Run("pipeline_2", (*PLAIN, *PIPELINE_2, "pieces=4"), same_as="accumulated"),
    Run("late_ddp_2", (*PLAIN, *DDP_2, "extras=[late]", "extras.late.steps=1")),
    Run("average_every_ddp_2", (*PLAIN, *DDP_2, "extras=[local_sgd]", "extras.local_sgd.every=4")),
    Run("own_module_ddp_2", (*USER, *DDP_2, "+model.name=own", "+model._target_=user_modules.Mixes", "+model.lr=0.1")),
]  # fmt: skip


class Failed(Exception):
    """A run has no result, and why."""


def main(arguments: list[str]) -> int:
    """Write or compare the results of RUNS. Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0].rstrip(":"))
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path, help="the JSON file")
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout whose src/train.py is run")
    parser.add_argument("--only", default="*", help="a pattern of the names of the runs")
    options = parser.parse_args(arguments)
    runs = [run for run in RUNS if fnmatch(run.name, options.only)]
    if not runs:
        parser.error(f"--only={options.only}: no run has such a name: {', '.join(run.name for run in RUNS)}")
    recorded = json.loads(options.file.read_text()) if options.action == "compare" else {}

    results: dict[str, dict[str, Any]] = {}
    problems = []
    for run in runs:
        started = time.monotonic()
        try:
            results[run.name] = result = train(run, options.source.resolve())
        except Failed as failure:
            problems.append(f"{run.name}: failed: {failure}")
            continue
        seconds, loss = time.monotonic() - started, result["metrics"].get("test/loss")
        print(f"{run.name:26} {result['weights_sha256']}  test/loss {loss}  {seconds:.1f} s", flush=True)
        if options.action == "compare":
            problems += differences(run.name, recorded.get(run.name), result)
    for run in runs:
        one, other = (results.get(name) for name in (run.name, run.same_as))
        if one and other and one["weights_sha256"] != other["weights_sha256"]:
            problems.append(f"{run.name}: its weights are not those of {run.same_as}: they must be the same bits")
    unknown = [name for name in recorded if fnmatch(name, options.only) and name not in {run.name for run in RUNS}]
    problems += [
        f"{name}: recorded, but not in the list of runs: leave it there, or write a new file" for name in unknown
    ]
    if options.action == "write":
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_text(json.dumps(results, indent=2) + "\n")
    print("\n".join(problems or [f"{len(runs)} runs: all as they must be"]))
    return 1 if problems else 0


def differences(name: str, before: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
    """Return a line if a run's result is not the recorded one, else nothing."""
    if before is None:
        return [f"{name}: not recorded: write a new file with the old checkout"]
    old, new = ({**result, **result["metrics"]} for result in (before, now))
    keys = [key for key in {**old, **new} if key != "metrics" and old.get(key) != new.get(key)]
    changed = ", ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in keys)
    return [f"{name}: differs: {changed}"] if changed else []


def train(run: Run, source: Path) -> dict[str, Any]:
    """Train a run to its end, in a folder that is removed afterwards. Return what is compared.

    Raises:
        Failed: it did not complete.
    """
    with tempfile.TemporaryDirectory(prefix="recorded_runs_") as outputs:
        if run.resumed:
            checkpoint = kill_after_checkpoint(source, Path(outputs), run.overrides)
            execute(source, Path(outputs), (f"resume={checkpoint.parent.parent}", *run.resumed))
        else:
            execute(source, Path(outputs), run.overrides)
        summaries = list(Path(outputs).rglob("summary.json"))
        if len(summaries) != 1:
            raise Failed(f"{len(summaries)} files summary.json: one run writes one")
        summary = json.loads(summaries[0].read_text())
    metrics = {name: value for name, value in summary["metrics"].items() if name.startswith(("val/", "test/"))}
    return {**{key: summary[key] for key in ("weights_sha256", "steps", "samples_seen")}, "metrics": metrics}


def execute(source: Path, outputs: Path, overrides: tuple[str, ...]) -> None:
    """Run `src/train.py` to its end.

    Raises:
        Failed: its exit code is not 0, or it took longer than TIMEOUT.
    """
    log = outputs / "output.txt"
    process = start(source, outputs, overrides, log)
    try:
        code = process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Failed(f"still running after {TIMEOUT:.0f} s") from None
    finally:
        kill(process)
    if code:
        raise Failed(f"exit code {code}: {last_line(log)}")


def kill_after_checkpoint(source: Path, outputs: Path, overrides: tuple[str, ...]) -> Path:
    """Kill a run and its workers as soon as there is a checkpoint. Return the checkpoint's path.

    Raises:
        Failed: the run ended before, or wrote no checkpoint within TIMEOUT.
    """
    log = outputs / "output.txt"
    process = start(source, outputs, overrides, log)
    deadline = time.monotonic() + TIMEOUT
    try:
        while not (actual := list(outputs.rglob("last.ckpt"))):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"no checkpoint to be killed after: {last_line(log)}")
            time.sleep(0.01)
    finally:
        kill(process)
    if process.wait() != -signal.SIGKILL:
        raise Failed("it ended before it could be killed: give it more steps")
    return actual[0]


def start(source: Path, outputs: Path, overrides: tuple[str, ...], log: Path) -> subprocess.Popen[bytes]:
    """Start `src/train.py` of a checkout in a process group of its own. The modules in tests/ can be imported in it."""
    path = os.pathsep.join(str(source / folder) for folder in ("src", "tests"))
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, str(source / "src" / "train.py"), f"outputs={outputs}", *effective(overrides)],
            cwd=source,
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def effective(overrides: tuple[str, ...]) -> list[str]:
    """Return the overrides without those that a later one replaces: `lr=1` replaces `lr=0`, and `model=x` also
    `model.width=1`."""
    latest: dict[str, str] = {}
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        latest = {name: value for name, value in latest.items() if name != key and not name.startswith(key + ".")}
        latest[key] = override
    return list(latest.values())


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def last_line(log: Path) -> str:
    """Return the last line that a run printed: of one that failed, its error."""
    return (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
