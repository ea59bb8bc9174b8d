"""Run campaigns in a temporary folder, print their report, and return the exit code."""

import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from campaigns.campaign import Campaign


def run_campaigns(planned: Callable[[Path, ExitStack], Sequence[Campaign]]) -> int:
    """Run campaigns in a folder of their own, and print the report. Return the exit code.

    Args:
        planned: makes the campaigns from that folder and a stack that closes what they need.
    """
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # background jobs of a shell ignore SIGINT, and forks inherit that
    work = Path(tempfile.mkdtemp(prefix="chaos_"))
    scratch = work / "tmp"
    scratch.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "cache")  # torch does not delete this cache
    try:
        with ExitStack() as places:
            campaigns = planned(work, places)
            for campaign in campaigns:
                campaign.go()
    except KeyboardInterrupt:
        shutil.rmtree(work)
        print("interrupted: nothing is concluded", file=sys.stderr)
        return 130
    except BaseException:
        shutil.rmtree(work)
        raise
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


def one_each(overrides: Sequence[str]) -> list[str]:
    """Return overrides without those that a later one of the same key replaces."""
    return [*{override.partition("=")[0]: override for override in overrides}.values()]
