"""Strikes a run again and again, resumes it as a user would, and compares its end with that of the undisturbed run:

    python scripts/lab/chaos.py --faults 20 --layouts single,dp,ddp,ddp_accumulate
    python scripts/lab/chaos.py --faults 300 --exact model.dropout=0.5
    python scripts/lab/chaos.py --faults 6 --machines 3
    python scripts/lab/chaos.py --faults 200 --silent --aimed --clean 20000

Workers, their parent or all of them are killed, asked to end, or stopped for a while; the disk is full from one moment
on; the newest checkpoint is damaged where it lies. What strikes, and whom, follows from --seed (when, by the clock).
Each life after a fault is `resume=<run folder>`. A damaged checkpoint must be refused by name; then the run goes on
from best.ckpt, or starts again. Survived: every run ended with the weights_sha256 and the metrics of the undisturbed
one, each life with the exit code that its fault calls for and without a traceback, and nothing was left behind: no
process (hence no port), no temporary file, no folder but the runs' own.

With --machines one run under torchrun, over network namespaces (Linux, root), is struck within its life: a worker, a
machine, a link for 5 or 20 s, the machine that serves torchrun's store, or all. A machine that was killed is started
again seconds later; without the store all end, and go on by `resume=` with another machine's store. It must end as the
same run on one device, and each machine with the same last.ckpt.

With --silent bits flip instead, a fault in each run, on three devices: in weights, activations, gradients, in what is
sent or received when these are summed, in what is saved; once, or again and again. Survived: every change was seen by
the audit, the checks of sums, replicas and finite gradients, or verify.py at the end; nobody was named wrongly, and
nothing was seen in N steps --clean.

Exit codes: 0 all survived, 1 not, 2 bad input, 130 interrupted. Linux only.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from campaigns.campaign import Campaign, schedule
from campaigns.faults import FAULTS
from campaigns.machines import LASTING, SeveralMachines
from campaigns.runs import Runs
from campaigns.silent import Silent
from network.machines import Machines, NoMachines

JOB = [
    *("data=digits", "model.dropout=0.25", "max_epochs=2", "batch_size=64", "checkpoint_every=5", "log_every=5"),
    *("threads=1", "accelerator=cpu", "name=chaos"),  # a crowd of workers on one GPU would measure its memory
]
SILENT = [  # small steps, many runs
    *("data=synthetic", "data.samples=4000", "data.image_size=12", "data.num_classes=3"),
    *("batch_size=16", "max_steps=12", "checkpoint_every=4", "exact=true", "pieces=4", "extras=[audit,ledger]"),
    *("extras.audit.share=1.0", "logger=none", "scheduler=constant"),
]
EXACT = ["exact=true", "pieces=4"]
SINGLE = ["strategy=auto", "devices=1"]
LAYOUTS = {
    "single": SINGLE,
    "dp": ["strategy=dp", "devices=2"],
    "ddp": ["strategy=ddp", "devices=2"],
    "pipeline": ["strategy=pipeline", "devices=2"],
    "ddp_accumulate": ["strategy=ddp", "devices=2", "accumulate_grad_batches=2"],
}
EXACT_LAYOUTS = [SINGLE] + [[f"strategy={s}", f"devices={n}"] for s in ("ddp", "dp", "pipeline") for n in (2, 3, 4)]


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
    work = Path(tempfile.mkdtemp(prefix="chaos_"))
    scratch = work / "tmp"
    scratch.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "cache")  # a cache of torch's, that it keeps
    try:
        with ExitStack() as places:
            campaigns = planned(options, work, places)
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
    problems = [problem for campaign in campaigns for problem in campaign.problems]
    kinds = Counter(name for campaign in campaigns for name in campaign.struck)
    print("\n" + ", ".join(f"{count} x {name}" for name, count in kinds.most_common()))
    done = f"{kinds.total()} faults in {sum(campaign.runs for campaign in campaigns)} runs"
    if problems:
        print(f"\n{done}, {len(problems)} problems; all files are in {work}\n", *problems, sep="\n")
        return 1
    shutil.rmtree(work)
    print(f"{done} survived: {campaigns[0].claim}")
    return 0


def planned(options: argparse.Namespace, work: Path, places: ExitStack) -> list[Campaign]:
    """The campaigns that were asked for; what they need is held by `places`."""
    asked = [*JOB, *(EXACT if options.exact or options.machines else ()), *(SILENT if options.silent else ())]
    if options.machines:
        asked.append(f"max_epochs={2 + LASTING * options.faults}")
    job = [*{override.partition("=")[0]: override for override in [*asked, *options.overrides]}.values()]  # last counts
    rng = Random(options.seed)
    if options.silent:
        return [Silent(options.faults, options.clean, options.aimed, "silent", job, work, rng, options.control)]
    if options.machines:
        machines, name = places.enter_context(Machines(options.machines)), f"{options.machines} machines"
        return [SeveralMachines(machines, options.faults, name, job, work / "machines", rng, options.control)]
    layouts = {name: [LAYOUTS[name]] for name in options.layouts.split(",")}
    layouts = {"exact": EXACT_LAYOUTS} if options.exact else layouts
    faults = schedule(rng, options.faults, FAULTS)
    return [
        Runs(choice, faults[number :: len(layouts)], name, job, work / name, rng, options.control)
        for number, (name, choice) in enumerate(layouts.items())
    ]


if __name__ == "__main__":
    sys.exit(main())
