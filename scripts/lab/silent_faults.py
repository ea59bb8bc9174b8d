"""Flips bits in silence, and looks whether the run notices:

    python scripts/lab/silent_faults.py --faults 200 --aimed --clean 20000

A fault in each run, on three devices: in weights, activations, gradients, in what is sent or received when these are
summed, in what is saved; once, or again and again. Survived: every change was seen by the audit, the checks of sums,
replicas and finite gradients, or verify.py at the end; nobody was named wrongly, and nothing was seen in N steps
--clean.

Exit codes: 0 all survived, 1 not, 2 bad input, 130 interrupted. Linux only.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from campaigns.campaign import Campaign
from campaigns.program import one_each, run_campaigns
from campaigns.silent import Silent

JOB = [  # small steps, many runs
    *("model.dropout=0.25", "max_epochs=2", "log_every=5", "threads=1", "accelerator=cpu", "name=chaos"),
    *("data=synthetic", "data.samples=4000", "data.image_size=12", "data.num_classes=3"),
    *("batch_size=16", "max_steps=12", "checkpoint_every=4", "exact=true", "pieces=4", "extras=[audit,ledger]"),
    *("extras.audit.share=1.0", "logger=none", "scheduler=constant"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=10, help="one run for each")
    parser.add_argument("--aimed", action="store_true", help="faults that pass strike an audited piece")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="N steps without a fault, too")
    parser.add_argument("--control", action="store_true", help="nothing is verified: must not be survived")
    parser.add_argument("overrides", nargs="*", help="for train.py, such as model=resnet18")
    options = parser.parse_args()

    def planned(work: Path, _: ExitStack) -> list[Campaign]:
        job, rng = one_each([*JOB, *options.overrides]), Random(options.seed)
        return [Silent(options.faults, options.clean, options.aimed, "silent", job, work, rng, options.control)]

    return run_campaigns(planned)


if __name__ == "__main__":
    sys.exit(main())
