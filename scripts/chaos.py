"""Strikes a run again and again, resumes it as a user would, and compares its end with that of the undisturbed run:

    python scripts/chaos.py --faults 20 --layouts single,dp,ddp,ddp_accumulate
    python scripts/chaos.py --faults 300 --exact model.dropout=0.5
    python scripts/chaos.py --faults 6 --machines 3
    python scripts/chaos.py --faults 200 --silent --aimed --clean 20000

Workers, their parent or all of them are killed, asked to end, or stopped for a while; the disk is full from one moment
on; the newest checkpoint is damaged where it lies. What strikes, whom and when follows from --seed (the moment by the
clock, so no two campaigns are quite the same). Each life after a fault is `resume=<run folder>`. A damaged checkpoint
must be refused by name; then the run goes on from best.ckpt, or starts again. Under --exact the number of devices and
the strategy change at random from life to life.

A campaign is survived when every run ended with the weights_sha256 and the metrics of the undisturbed one, each life
with the exit code that its fault calls for and without a traceback, and nothing was left behind: no process (hence no
port), no temporary file, no folder but the runs' own.

With --machines one run over several machines (network namespaces: Linux, root) is struck within its life: a worker or a
machine is killed, a link goes down for 5 or 20 s, the machine that keeps the run is killed, or all. Who was killed is
started again seconds later. It must end as the same run on one device, each machine with exit code 0.

With --silent bits flip instead, a fault in each run, on three devices: in weights, activations, gradients, in what is
sent or received when these are summed, in what is saved; once, or again and again. A table tells by what it was seen
(`audit=`, the checks of sums, replicas and finite gradients, verify.py at the end), how many steps later, and whether
the right rank was named. Survived: every change was seen, nobody named wrongly, and none seen in N steps --clean.

Exit codes: 0 all survived, 1 not, 2 bad input, 130 interrupted. Linux only.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from campaigns.faults import FAULTS, schedule
from campaigns.machines import SeveralMachines
from campaigns.runs import LINE, Campaign
from campaigns.silent import Silent
from network.machines import Machines, NoMachines

JOB = [
    "data=digits",
    "model.dropout=0.25",
    "max_epochs=2",
    "batch_size=64",
    "checkpoint_every=5",
    "log_every=5",
    "threads=1",
    "accelerator=cpu",  # a crowd of workers on one GPU would measure its memory, not the promise
    "name=chaos",
]
LAYOUTS = {
    "single": ["strategy=auto", "devices=1"],
    "dp": ["strategy=dp", "devices=2"],
    "ddp": ["strategy=ddp", "devices=2"],
    "pipeline": ["strategy=pipeline", "devices=2"],
    "ddp_accumulate": ["strategy=ddp", "devices=2", "accumulate_grad_batches=2"],
}
SILENT = [  # small steps, many runs
    *("data=synthetic", "data.samples=4000", "data.image_size=12", "data.num_classes=3"),
    *("batch_size=16", "max_steps=12", "checkpoint_every=4", "exact=true", "pieces=4", "audit=1.0"),
    *("ledger=true", "logger=none", "scheduler=constant"),
]
LASTING = 3  # epochs of a run over machines, for each fault that it must outlast
EXACT = ["exact=true", "pieces=4"]
EXACT_LAYOUTS = [["strategy=auto", "devices=1"]] + [
    [f"strategy={s}", f"devices={n}"] for s in ("ddp", "dp", "pipeline") for n in (2, 3, 4)
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=len(FAULTS), help="in all, over the layouts")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="--exact changes them at random instead")
    parser.add_argument("--exact", action="store_true", help="another layout in each life, exact=true")
    parser.add_argument("--machines", type=int, metavar="N", help="one exact run over N machines (2 or more)")
    parser.add_argument("--silent", action="store_true", help="bits flip, one run for each fault")
    parser.add_argument("--aimed", action="store_true", help="silent faults that pass strike an audited piece")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="N steps without a silent fault, too")
    parser.add_argument("--control", action="store_true", help="go on with another seed: must not be survived")
    parser.add_argument("overrides", nargs="*", help="for train.py, such as model=resnet18")
    options = parser.parse_args()
    if unknown := set(options.layouts.split(",")) - set(LAYOUTS):
        parser.error(f"--layouts: there is no {', '.join(sorted(unknown))}; known: {', '.join(LAYOUTS)}")
    if options.machines is not None and not 2 <= options.machines <= 200:
        parser.error(f"--machines: {options.machines}, must be 2 or more (to 200)")

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would lives
    work, rng = Path(tempfile.mkdtemp(prefix="chaos_")), random.Random(options.seed)
    scratch = work / "tmp"
    scratch.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "cache")  # a cache of torch's, that it keeps
    asked = [*JOB, *(EXACT if options.exact or options.machines else ()), *(SILENT if options.silent else ())]
    if options.machines:
        asked.append(f"max_epochs={2 + LASTING * options.faults}")
    asked += options.overrides
    job = [*{override.partition("=")[0]: override for override in asked}.values()]  # the last of a key counts
    campaigns: Sequence[Campaign | SeveralMachines | Silent]
    try:
        with ExitStack() as places:
            if options.silent:
                campaigns = [Silent(job, options.faults, options.clean, options.aimed, work, rng, options.control)]
            elif options.machines:
                machines = places.enter_context(Machines(options.machines))
                home = work / "machines"
                campaigns = [SeveralMachines(machines, job, options.faults, home, rng, options.control)]
            else:
                layouts = {name: [LAYOUTS[name]] for name in options.layouts.split(",")}
                layouts = {"exact": EXACT_LAYOUTS} if options.exact else layouts
                faults = schedule(options.faults, rng, FAULTS)
                campaigns = [
                    Campaign(name, job, choice, faults[number :: len(layouts)], work / name, rng, options.control)
                    for number, (name, choice) in enumerate(layouts.items())
                ]
            if not options.silent:
                print(LINE.format("layout", "fault", "whom", "after", "exit", "what followed"))
            for campaign in campaigns:
                campaign.go()
    except KeyboardInterrupt:
        shutil.rmtree(work)
        print("interrupted: nothing is concluded", file=sys.stderr)
        return 130
    except NoMachines as reason:
        shutil.rmtree(work)
        print(f"error: --machines={options.machines}: can't be made here: {reason}", file=sys.stderr)
        return 2
    return conclude(campaigns, work)


def conclude(campaigns: Sequence[Campaign | SeveralMachines | Silent], work: Path) -> int:
    """The last words, and the exit code."""
    problems = [problem for campaign in campaigns for problem in campaign.problems]
    kinds = Counter(name for campaign in campaigns for name in campaign.struck)
    print("\n" + ", ".join(f"{count} x {name}" for name, count in kinds.most_common()))
    runs = sum(campaign.runs for campaign in campaigns)
    if problems:
        print(f"\n{kinds.total()} faults in {runs} runs, {len(problems)} problems; all files are in {work}\n")
        print("\n".join(problems))
        return 1
    shutil.rmtree(work)
    how = "all ended bitwise equal, nothing was left behind"
    if isinstance(campaigns[0], Silent):
        how = "every change was seen, nobody was named wrongly, and nothing was seen where nothing was"
    print(f"{kinds.total()} faults in {runs} runs survived: {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
