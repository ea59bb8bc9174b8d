"""TensorBoard on the runs of a folder, each called by what it was given:  python scripts/dashboard.py outputs

What follows the folder goes to TensorBoard: --port 6007, say. Runs that begin later come to it by themselves.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

SECONDS = 5.0  # between two looks for new runs
HARMLESS = "TensorFlow installation not found"  # TensorBoard's first line: what is shown here needs none


def main() -> int:
    """Shows them until it is interrupted; TensorBoard's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", default="outputs", help="where run folders are; outputs")
    given, options = parser.parse_known_args()
    runs = given.runs
    if not Path(runs).is_dir():
        print(f"error: {runs}: no such folder", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as links:
        link(Path(runs), Path(links))
        command = ["-m", "tensorboard.main", "--logdir", links, "--reload_interval", "5", *options]
        process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        over = threading.Event()
        looking = threading.Thread(target=look, args=(Path(runs), Path(links), over))
        looking.start()
        speaking = threading.Thread(target=pass_on, args=(process.stderr,), daemon=True)
        speaking.start()
        try:
            return process.wait()
        except KeyboardInterrupt:
            return process.wait()
        finally:
            over.set()
            looking.join()
            speaking.join(SECONDS)  # a process that TensorBoard has started may live longer


def pass_on(lines: Iterable[str]) -> None:
    """Prints TensorBoard's messages as they come."""
    for line in lines:
        if not line.startswith(HARMLESS):
            print(line, end="", file=sys.stderr, flush=True)


def look(runs: Path, links: Path, over: threading.Event) -> None:
    while not over.wait(SECONDS):
        link(runs, links)


def link(runs: Path, links: Path) -> None:
    """Makes a link for each run that has none: its title, its name, and when it began, or its number in a sweep."""
    there = {path.resolve() for path in links.iterdir()}
    for folder in {path.parent.resolve() for path in runs.glob("**/tensorboard/**/*tfevents*")} - there:
        run = next(parent for parent in folder.parents if parent.joinpath("tensorboard").is_dir())
        kept = run / "loggers.json"
        title = json.loads(kept.read_text())["title"] if kept.exists() else "run"
        place = run.relative_to(runs.resolve()).as_posix().replace("/", " ")
        inside = folder.relative_to(run / "tensorboard").parts[1:]  # below the title
        (links / " - ".join((title, place, *inside))).symlink_to(folder)


if __name__ == "__main__":
    sys.exit(main())
