"""Inject faults into a run, resume it as a user would, and compare its end with that of an undisturbed run:

    python scripts/lab/chaos.py --faults 20 --layouts single,dp,ddp,ddp_accumulate
    python scripts/lab/chaos.py --faults 300 --exact model.dropout=0.5

The faults: workers, their parent or all of them get SIGKILL, SIGTERM or SIGSTOP; the disk becomes full; the newest
checkpoint is damaged. --seed determines the faults and their targets; the clock determines the moments. After each
fault a new process starts with `resume=<run folder>`. It must refuse a damaged checkpoint by name; then the run resumes
from best.ckpt, or starts again. A run survives if it ends with the weights_sha256 and the metrics of the undisturbed
run, if each process ends with the exit code of its fault and without a traceback, and if nothing is left behind: no
process, no temporary file, no folder but the run folders.

With --storm one run under torchrun over network namespaces (Linux, root) is hit without being resumed by hand: machines
are killed and cut off by the clock, also the one that serves torchrun's store, and it reports where the time went. With
--cuts the network between them is parted, and no two runs may write one folder. docs/devices/when-something-dies.md has
both:

    python scripts/lab/chaos.py --storm --every 15,60 --strikes 16,5 --picture storm.png
    python scripts/lab/chaos.py --cuts 200

With --deaths workers of runs with survive=true are killed or stopped at random instants, also while the others form a
new group. Each run must end as on one device. With --death-storm one dies every few seconds, and it reports what that
costs beside max_restarts:

    python scripts/lab/chaos.py --deaths 100 --seed 3
    python scripts/lab/chaos.py --deaths 20 --engine
    python scripts/lab/chaos.py --deaths 6 --death-storm 15

Exit codes: 0 all survived, 1 not, 2 bad input, 130 interrupted. Linux only.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from campaigns.campaign import Campaign, one_each, run_campaigns, schedule
from campaigns.cuts import Cuts
from campaigns.deaths import CALM, DROPOUT, JOBS, PIECE_SECONDS, Deaths, DeathStorm, EngineDeaths
from campaigns.goodput import draw
from campaigns.runs import FAULTS, Runs
from campaigns.storm import STEP, Plan, Storm
from network.machines import Machines, NoMachines

from lockstep.config.pages import options
from lockstep.launch.machine import computes_bf16

JOB = [
    *("data=digits", "model.dropout=0.25", "max_epochs=2", "batch_size=64", "checkpoint_every=5", "log_every=5"),
    *("threads=1", "accelerator=cpu", "name=chaos"),  # on one GPU, so many workers would run out of memory
]
SAMPLES, DIGITS = 6, 1200  # of a piece; of an epoch, a little fewer than there are
EXACT = ["exact=true", "pieces=4"]
SINGLE = ["strategy=auto", "devices=1"]
STRATEGIES = [name for name in options("strategy") if name != "auto"]
LAYOUTS = {
    "single": SINGLE,
    "dp": ["strategy=dp", "devices=2"],
    "ddp": ["strategy=ddp", "devices=2"],
    **{name: [f"strategy={name}", "devices=2"] for name in STRATEGIES if name not in ("ddp", "dp")},
    "ddp_accumulate": ["strategy=ddp", "devices=2", "accumulate_grad_batches=2"],
}
EXACT_LAYOUTS = [SINGLE] + [
    [f"strategy={s}", f"devices={n}"] for s in options("strategy") if s != "auto" for n in (2, 3, 4)
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=len(FAULTS), help="number over all layouts")
    parser.add_argument(
        "--layouts", default=",".join(LAYOUTS), help="ignored with --exact, which draws one for each start"
    )
    parser.add_argument("--exact", action="store_true", help="exact=true, with a random layout at each start")
    parser.add_argument("--machines", type=int, default=3, metavar="N", help="of --storm and --cuts")
    parser.add_argument("--storm", action="store_true", help="one exact run whose machines die one after the other")
    parser.add_argument("--every", type=numbers, default=[15.0, 60.0], metavar="S,S", help="seconds between strikes")
    parser.add_argument("--strikes", type=numbers, default=[16.0, 5.0], metavar="N,N", help="for each of --every")
    parser.add_argument(
        "--store-every", type=float, default=240.0, metavar="S", help="... on the store's host; 0: never"
    )
    parser.add_argument("--calm", type=float, default=60.0, metavar="S", help="undisturbed seconds before each storm")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the storms")
    parser.add_argument("--cuts", type=int, default=0, help="cut the network of two exact runs so often")
    parser.add_argument("--deaths", type=int, default=0, help="kill so many workers of runs with survive=true")
    parser.add_argument("--engine", action="store_true", help="... whose workers no parent has started (env://)")
    parser.add_argument("--death-storm", type=float, metavar="S", help="... one every S seconds, and measure")
    parser.add_argument("--control", action="store_true", help="make a run go on otherwise: the campaign must fail")
    parser.add_argument("overrides", nargs="*", help="for train.py, such as model=resnet18")
    arguments = parser.parse_args()
    if unknown := set(arguments.layouts.split(",")) - set(LAYOUTS):
        parser.error(f"--layouts: there is no {', '.join(sorted(unknown))}; known: {', '.join(LAYOUTS)}")
    if len(arguments.every) != len(arguments.strikes):
        parser.error("--every and --strikes must have as many numbers")
    if not 2 <= arguments.machines <= 200:
        parser.error(f"--machines={arguments.machines} is out of range: use 2 to 200")

    try:
        drawn: list[Storm] = []
        code = run_campaigns(partial(planned, arguments, drawn=drawn))
        if arguments.picture and drawn:
            draw({storm.name: storm.goodput for storm in drawn if storm.goodput}, arguments.picture)
        return code
    except NoMachines as reason:
        print(f"error: --machines={arguments.machines}: this system can't create namespaces: {reason}", file=sys.stderr)
        return 2


def planned(chosen: argparse.Namespace, work: Path, stack: ExitStack, drawn: list[Storm]) -> Sequence[Campaign]:
    """Return the campaigns that the user asked for. `stack` closes what they need, and `drawn` receives the storms."""
    rng = Random(chosen.seed)
    if chosen.deaths:
        job = [*(each for each in JOB if each != DROPOUT), *EXACT]
        if every := chosen.death_storm:
            epochs = 3 + int((CALM + chosen.deaths * every) / PIECE_SECONDS * 64 / DIGITS)
            job = one_each([*job, f"max_epochs={epochs}", *chosen.overrides])
            return [DeathStorm(chosen.deaths, every, "storm", job, work / "storm", rng, chosen.control)]
        jobs = {name: more for name, more in JOBS.items() if "bf16" not in name or computes_bf16("cpu")}
        return [
            (EngineDeaths if chosen.engine else Deaths)(
                len(range(number, chosen.deaths, len(jobs))),
                *(name, one_each([*job, *more, *chosen.overrides]), work / f"deaths_{number}", rng, chosen.control),
            )
            for number, (name, more) in enumerate(jobs.items())
        ]
    if chosen.storm or chosen.cuts:
        machines = stack.enter_context(Machines(chosen.machines))
        if chosen.storm:
            drawn += storms(chosen, machines, work)
            return drawn
        return cuts(chosen, machines, work)
    job = one_each([*JOB, *(EXACT if chosen.exact else ()), *chosen.overrides])
    layouts = {name: [LAYOUTS[name]] for name in chosen.layouts.split(",")}
    layouts = {"exact": EXACT_LAYOUTS} if chosen.exact else layouts
    faults = schedule(rng, chosen.faults, FAULTS)
    return [
        Runs(choice, faults[number :: len(layouts)], name, job, work / name, rng, chosen.control)
        for number, (name, choice) in enumerate(layouts.items())
    ]


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def job_over_machines(count: int, seconds: float, overrides: list[str]) -> list[str]:
    """Return the job of a run over machines that takes longer than `seconds`."""
    pieces = count * (count - 1)  # as many on each machine, also if one is missing
    epochs = 2 + int(seconds / STEP * SAMPLES * pieces / DIGITS)
    size = [f"pieces={pieces}", f"batch_size={SAMPLES * pieces}", f"max_epochs={epochs}"]
    return one_each([*JOB, "exact=true", *size, "hang_timeout=8", "checkpoint_every=2", *overrides])


def storms(chosen: argparse.Namespace, machines: Machines, work: Path) -> list[Storm]:
    campaigns = []
    for every, strikes in zip(chosen.every, chosen.strikes, strict=True):
        plan = Plan(every, int(strikes), chosen.store_every, chosen.calm)
        name, job = f"storm every {every:g} s", job_over_machines(chosen.machines, plan.seconds, chosen.overrides)
        common = (name, job, work / f"storm_{every:g}", Random(chosen.seed), chosen.control)
        campaigns.append(Storm(machines, plan, *common))
    return campaigns


def cuts(chosen: argparse.Namespace, machines: Machines, work: Path) -> list[Cuts]:
    campaigns = []
    for number, name in enumerate(("shared outputs", "own outputs")):
        here = chosen.cuts // 2 + (chosen.cuts % 2) * (number == 0)
        job = job_over_machines(chosen.machines, 10 * here + 60, ["hang_timeout=4", *chosen.overrides])
        campaigns.append(Cuts(machines, number == 0, here, name, job, work / f"cuts_{number}", Random(chosen.seed)))
    return campaigns


if __name__ == "__main__":
    sys.exit(main())
