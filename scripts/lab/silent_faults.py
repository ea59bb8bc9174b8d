"""Flip bits without an error, and check whether the run detects it:

    python scripts/lab/silent_faults.py --faults 200 --aimed --clean 20000

Each run has three devices and one fault: in weights, activations or gradients, in messages sent or received when
gradients are summed, or in a checkpoint; once or repeatedly. The campaign passes if the audit, the checks of sums,
replicas and finite gradients, or verify.py at the end detect every change, if no rank is blamed wrongly, and if nothing
is reported in N steps --clean without a fault.

Exit codes: 0 all survived, 1 not, 2 bad input, 130 interrupted. Linux only.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from campaigns.campaign import Campaign, one_each, run_campaigns
from campaigns.silent import Silent

JOB = [  # small steps, because there are many runs
    *("model.dropout=0.25", "max_epochs=2", "log_every=5", "threads=1", "accelerator=cpu", "name=chaos"),
    *("data=synthetic", "data.samples=4000", "data.image_size=12", "data.num_classes=3"),
    *("batch_size=16", "max_steps=12", "checkpoint_every=4", "exact=true", "pieces=4", "extras=[audit,ledger]"),
    *("extras.audit.share=1.0", "logger=none", "scheduler=constant"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=10, help="one run for each")
    parser.add_argument("--aimed", action="store_true", help="faults that happen once hit an audited piece")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="also run N steps without a fault")
    parser.add_argument("--control", action="store_true", help="do not verify: the campaign must fail")
    parser.add_argument("overrides", nargs="*", help="for train.py, such as model=resnet18")
    options = parser.parse_args()

    def planned(work: Path, _: ExitStack) -> list[Campaign]:
        job, rng = one_each([*JOB, *options.overrides]), Random(options.seed)
        return [Silent(options.faults, options.clean, options.aimed, "silent", job, work, rng, options.control)]

    return run_campaigns(planned)


if __name__ == "__main__":
    sys.exit(main())
