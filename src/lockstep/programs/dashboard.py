"""Start TensorBoard on the runs of a folder, each under the name that it was given:

    lockstep dashboard outputs

The HParams page has the keys that differ between the runs that exist when it starts; for a single run it has the few
keys that matter most. It shows the first five, and lists the others to tick.
Further arguments go to TensorBoard, such as `--port 6007`. Later runs appear by themselves.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep import exit_on_signal
from lockstep.programs.common.keys import differing

SECONDS = 5.0  # between two searches for new runs
HARMLESS = "TensorFlow installation not found"  # TensorBoard prints it first; nothing shown here needs TensorFlow
COMPARED = ("val/loss", "test/loss", "workers/samples_per_second")  # on the HParams page, after the models' own metric
FEW = ("batch_size", "lr", "strategy.name")  # its keys if the runs do not differ; with more, metrics are off screen
# The keys that it shows first, if they differ; then those that were given on the command line.
FIRST = (
    *("lr", "model.name", "data.name", "optimizer.name", "scheduler.name", "strategy.name", "devices", "num_nodes"),
    *("batch_size", "pieces", "max_epochs", "max_steps", "data.fold", "seed"),
)
TICKED = 5  # keys that the page shows at once; it ticks that many, those marked as differing first, then by alphabet
TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d+")  # names of run folders
MINUTE, SECOND = 16, 19  # length of the name up to the minute and up to the second


def main(words: list[str]) -> int:
    """Run TensorBoard until it is interrupted. Return its exit code."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("lockstep dashboard", description=__doc__, formatter_class=layout)
    parser.add_argument("runs", nargs="?", default="outputs", help="folder with run folders (default: outputs)")
    arguments, options = parser.parse_known_args(words)
    runs = arguments.runs
    exit_on_signal.restore()
    if not Path(runs).is_dir():
        print(f"error: {runs}: no such folder", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        links = Links(Path(runs), Path(folder))
        links.update()
        command = ["-m", "tensorboard.main", "--logdir", folder, "--reload_interval", "5", *options]
        process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        ended = threading.Event()
        updater = threading.Thread(target=update_until, args=(links, ended))
        updater.start()
        printer = threading.Thread(target=print_messages, args=(process.stderr,), daemon=True)
        printer.start()
        try:
            return process.wait()
        except KeyboardInterrupt:
            return process.wait()
        finally:
            ended.set()
            updater.join()
            printer.join(SECONDS)  # a child of TensorBoard may live longer and keep the pipe open


def print_messages(lines: Iterable[str]) -> None:
    """Print TensorBoard's messages as they arrive."""
    for line in lines:
        if not line.startswith(HARMLESS):
            print(line, end="", file=sys.stderr, flush=True)


def update_until(links: "Links", ended: threading.Event) -> None:
    """Update the links every few seconds until TensorBoard has ended."""
    while not ended.wait(SECONDS):
        links.update()


class Links:
    """A folder for TensorBoard with one folder per run, which holds links to the run's event files.

    Args:
        runs: the folder of the run folders.
        folder: an empty folder for the links.
    """

    def __init__(self, runs: Path, folder: Path) -> None:
        self._runs, self._folder = runs.resolve(), folder
        self._names: dict[Path, str] = {}  # by the folder of event files
        self._columns = False  # True once the columns are written

    def update(self) -> None:
        """Link new event files. With the first runs, also write the columns of the HParams page."""
        for file in sorted(self._runs.glob("**/tensorboard/**/*tfevents*")):
            if file.parent not in self._names:
                self._names[file.parent] = self._name(file.parent)
            target = self._folder / self._names[file.parent]
            target.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                (target / file.name).symlink_to(file)
        if not self._columns and (hyper_parameters := [*filter(None, map(session, sorted(self._names)))]):
            self._columns = True
            titles = " ".join(self._names.values())
            write_columns(hyper_parameters, self._folder / min(self._names.values()), titles)

    def _name(self, folder: Path) -> str:
        """Return the name of a run: its title, its `name` and a job's number in a sweep.

        If two runs would have the same name, add the time of the start.
        """
        run = next(parent for parent in folder.parents if parent.joinpath("tensorboard").is_dir())
        titles = run / "loggers.json"
        title = json.loads(titles.read_text())["title"] if titles.exists() else "run"
        parts = [part for part in run.relative_to(self._runs).parts if part != "sweeps"]
        inside = folder.relative_to(run / "tensorboard").parts[1:]  # below the title
        names = []
        for length in (0, MINUTE, SECOND, None):
            place = " ".join(filter(None, (part[:length] if TIME.fullmatch(part) else part for part in parts)))
            names.append(" - ".join(filter(None, (title, place, *inside))))
        return next((name for name in names if name not in self._names.values()), names[-1])


def session(folder: Path) -> dict[str, Any]:
    """Return a run's hyper-parameters from its event files. Return an empty dict if none are written yet."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams import metadata

    for file in sorted(folder.glob("*tfevents*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag == metadata.SESSION_START_INFO_TAG:
                    content = value.metadata.plugin_data.content
                    hparams = metadata.parse_session_start_info_plugin_data(content).hparams
                    return {key: getattr(each, each.WhichOneof("kind")) for key, each in hparams.items()}
    return {}


def columns(runs: Sequence[dict[str, Any]], titles: str = "") -> list[str]:
    """Return the keys in which runs differ, the most important first.

    If they differ in none, return the few that matter most.

    Args:
        titles: the names of the runs, which have what was given on the command line.
    """
    overridden = [word.lstrip("+").partition("=")[0] for word in titles.split() if "=" in word]
    overridden += [f"{key}.name" for key in overridden]  # `model=resnet18`

    def importance(key: str) -> tuple[int, bool, str]:
        return FIRST.index(key) if key in FIRST else len(FIRST), key not in overridden, key

    return sorted(differing(runs), key=importance) or [key for key in FEW if any(key in run for run in runs)]


def metrics(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the metrics to compare: those by which the runs' models choose the best checkpoint, then COMPARED."""
    monitors = [str(run.get("model.monitor", "val/acc")) for run in runs]
    tests = [f"test/{monitor.removeprefix('val/')}" for monitor in monitors]
    return list(dict.fromkeys([*monitors, *tests, *COMPARED]))


def write_columns(runs: Sequence[dict[str, Any]], folder: Path, titles: str) -> None:
    """Write an event file with the columns of the HParams page. The first ones are marked, so that it ticks them.

    It goes into the folder of an existing run, because TensorBoard would show a folder of its own as a run.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    infos = []
    for number, key in enumerate(columns(runs, titles)):
        numbers = all(isinstance(run.get(key, 0.0), float | int) for run in runs)
        kind = api_pb2.DATA_TYPE_FLOAT64 if numbers else api_pb2.DATA_TYPE_STRING
        infos.append(api_pb2.HParamInfo(name=key, type=kind, differs=number < TICKED))
    compared = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics(runs)]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=compared)
    about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(experiment=experiment))
    summary = Summary(value=[Summary.Value(tag=metadata.EXPERIMENT_TAG, metadata=about)])
    writer = EventFileWriter(str(folder), filename_suffix=".columns")
    writer.add_event(Event(summary=summary))
    writer.close()
