"""Find the first step at which two runs differ, the first layer, and the cause.

First the records are searched: the lines of `ledger.jsonl` and the kept checkpoints. Then the steps after the last
checkpoint at which both runs are the same are taken again under both configs (trace.py). If the configs differ in
several keys, the steps are taken once more with one of them at a time.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.config.check import Config
from lockstep.config.instantiate import check_targets_named
from lockstep.data import Splits
from lockstep.data.datasets import differ
from lockstep.errors import UserError, WorkerFailed
from lockstep.programs.common.training import open_without_test
from lockstep.programs.comparison.pair import Facts, differing_values, facts, read, show
from lockstep.programs.comparison.trace import (
    WRITING as NOT_TAKEN,
)
from lockstep.programs.comparison.trace import Steps, Value, apart, needs_layout, prepare, take_steps, value_of
from lockstep.report.summary import weights_sha256
from lockstep.text import join_names, plural

MOST_STEPS = 200  # steps that are taken again
FIRST_STEPS = 2  # steps that are taken first: most differences appear in them
MOST_KEYS = 8  # differences of the config that are tried one at a time
# A distance, as a share of the size, up to which a difference counts as rounding, by precision.
ROUNDING = {"64-true": 1e-12, "32-true": 1e-5}
ROUNDING_16 = 2e-2  # of all other precisions
# Keys that decide where and how often a run writes.
WRITING = re.compile(
    r"(name|outputs|data_dir|num_workers|logger|sweep|hydra|resume|debug|checkpoint_every|checkpoint_keep|log_every"
    r"|hang_timeout|max_restarts|elastic|survive|val_every|callbacks\.(meter|console|dashboard|pictures|checkpoint)"
    r"|(model|data|strategy)\.name|data\.(cache|cache_gb|retry_seconds))(\.|$)"
)
# Keys that decide which device computes what, and so how sums are rounded.
LAYOUT = re.compile(
    r"(strategy\.(_target_|shares|split|sync_batchnorm)|devices|num_nodes|accumulate_grad_batches|accelerator|threads"
    r"|pieces)(\.|$)"
)
WORDS = {
    "weights": "the weights before the first step",
    "samples": "the samples: {name}",
    "data": "the data: {name}",
    "input": "the network's input",
    "output": "the output of {name}",
    "loss": "the loss",
    "gradient": "the gradient of {name}",
    "update": "{name} after the step; its gradient is the same",
}
KEEP_MORE = "train with checkpoint_keep=-1, or with extras=[ledger], and a small checkpoint_every, to know more"


@dataclass
class Recorded:
    """A run's folder and what it recorded."""

    folder: Path
    facts: Facts
    layout: dict[str, Any] | None = None  # the config of the run whose layout is taken; None: one device

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints, by step: those that were kept, and the last one."""
        folder = paths.folder(self.folder)
        if not folder.is_dir():
            return {}
        saved = paths.step_checkpoints(folder)
        with suppress(UserError):
            last = paths.last(self.folder)
            saved.setdefault(int(checkpoint_io.load(last, tensors=False)["global_step"]), last)
        return saved

    @cached_property
    def hashes(self) -> dict[int, str]:
        """The hashes of the weights in the lines of ledger.jsonl, by step."""
        hashes: dict[int, str] = {}
        file = self.folder / "ledger.jsonl"
        for text in file.read_text(errors="replace").splitlines() if file.is_file() else ():
            with suppress(ValueError, KeyError, TypeError):  # a kill may cut the last line
                line = json.loads(text)
                hashes[int(line["step"])] = str(line["weights_sha256"])
        return hashes

    def sha256(self, step: int) -> str:
        return self.hashes.get(step) or self.hashes.setdefault(step, weights_sha256(self.weights(step)))

    def weights(self, step: int) -> dict[str, Any]:
        return dict(checkpoint_io.load(self.checkpoints[step])["state_dict"])

    @cached_property
    def threads(self) -> int:
        threads = self.facts["machine"].get("threads")
        return threads if isinstance(threads, int) and 0 < threads < 1024 else 1

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The resolved config.

        Raises:
            UserError: the run has no provenance.json, or its config names classes that conf/ does not name.
        """
        config = read(self.folder / "provenance.json").get("config")
        if not isinstance(config, dict):
            raise UserError(f"{self.folder}: its provenance.json has no config")
        for group, value in config.items():
            if group not in NOT_TAKEN:
                check_targets_named(self.folder, group, value)
        return config

    @cached_property
    def config(self) -> Config:
        return prepare(self.raw, self.threads, self.layout)

    @cached_property
    def data(self) -> Splits:
        data = open_without_test(self.config)
        recorded = self.facts["data"].get("fingerprint")
        if recorded != data.fingerprint:
            raise UserError(
                f"{self.folder}: its data is no longer in {self.config.data_dir}: the fingerprint is "
                f"{data.fingerprint[:12]} now, and was {str(recorded)[:12]}"
            )
        if differ(content := self.facts["data"].get("shards"), data.content):
            raise UserError(
                f"{self.folder}: its shards are no longer in {self.config.data_dir}: their SHA-256 is "
                f"{str(data.content)[:12]} now, and was {str(content)[:12]}"
            )
        return data


@dataclass
class Answer:
    """What is known about the difference of two runs.

    Attributes:
        step: the first step at which they differ, 0 for the initial weights; None: they do not differ, or unknown.
        since: the last step that is known to be the same. If it is not `step - 1`, the step is only an upper bound.
        layer: the first layer that differs at this step.
        what: what differs first at this step, in words.
        causes: the causes.
        rounding: whether the runs differ by no more than rounding.
        notes: further lines.
        known: whether weights of both runs were compared, recorded ones or computed again.
    """

    step: int | None = None
    since: int = -1
    layer: str = ""
    what: str = ""
    causes: list[str] = field(default_factory=list)
    rounding: bool = False
    notes: list[str] = field(default_factory=list)
    known: bool = True

    @property
    def text(self) -> str:
        lines = []
        if self.step is not None:
            exact = self.since >= self.step - 1
            where = f"step {self.step}" if exact else f"one of the steps {self.since + 1} to {self.step}"
            where += ", before the first" if self.step == 0 else ""
            lines.append(f"first difference: {where}{f', layer {self.layer}' if self.layer else ''}")
            lines += [f"what differs: {self.what}"] if self.what else []
            lines.append(f"cause: {'; '.join(self.causes) or 'not found'}")
        return "\n".join([*lines, *self.notes])


def explain(one: Path, other: Path) -> Answer:
    """Find the first difference of two runs.

    Raises:
        UserError: a folder is no run folder.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # this process forks, and a child lacks the threads that torch has started
    try:
        return _Search(*(Recorded(folder, facts(folder)) for folder in (one, other))).answer()
    finally:
        torch.set_num_threads(threads)


class _Search:
    def __init__(self, a: Recorded, b: Recorded) -> None:
        self.a, self.b = a, b
        self.common = sorted({*a.checkpoints, *a.hashes} & {*b.checkpoints, *b.hashes})
        self.both = sorted(a.checkpoints.keys() & b.checkpoints.keys())  # steps whose weights can be compared
        precision = a.facts["config"].get("precision")
        self.tolerance = ROUNDING.get(str(precision), ROUNDING_16)

    def answer(self) -> Answer:
        first = bisect(self.common, lambda step: self.a.sha256(step) != self.b.sha256(step))
        differing = [*self.changed, *self.surroundings]
        also = f"the runs differ in {join_names(differing)}" if differing else "config, code, versions and data: same"
        if first is None and self.common:
            steps = f"{plural(len(self.common), 'step')}, the last is {self.common[-1]}"
            return Answer(notes=[f"same weights at every recorded step, to the bit ({steps})", also])
        since = max((step for step in self.common if first is not None and step < first), default=-1)
        answer = self.computed_again(since, first)
        if not self.common:
            answer.notes.append("no step has weights of both runs")
        answer.notes.append(also)
        if answer.step is None or answer.since < answer.step - 1:
            answer.notes.append(KEEP_MORE)
        return answer

    # --- the records --------------------------------------------------------------------------------------------------

    @cached_property
    def exact(self) -> bool:
        return all(run.facts["config"].get("exact") in (True, "portable") for run in (self.a, self.b))

    @cached_property
    def placement(self) -> list[str]:
        """What differs in the layout, the machine or the versions, and so may change the rounding of sums."""
        return [
            f"{key} ({pair})"
            for section in ("layout", "versions", "machine")
            for key, pair in self.differing(section).items()
            if key not in ("host", "platform", "samples", "exact", "cores")
        ]

    @cached_property
    def tolerance_of_records(self) -> float:
        """The distance up to which a difference of the records counts as rounding."""
        return 0.0 if self.exact or not self.placement else self.tolerance

    def differing(self, section: str) -> dict[str, str]:
        """Return the keys of a section of the facts in which the runs differ, with both values."""
        one, other = self.a.facts[section], self.b.facts[section]
        if not one or not other:
            return {}
        return {key: ", ".join(map(show, values)) for key, values in differing_values(one, other).items()}

    @cached_property
    def changed(self) -> list[str]:
        """The keys of the config that differ, with both values, without those that only decide what is written."""
        return [f"{key} ({pair})" for key, pair in self.differing("config").items() if not WRITING.match(key)]

    @cached_property
    def surroundings(self) -> list[str]:
        """What differs beside the config."""
        data = [f"the data's {key} ({pair})" for key, pair in self.differing("data").items()]
        code = [f"the code's {key} ({pair})" for key, pair in self.differing("code").items()]
        machine = self.differing("versions") | self.differing("machine")
        return data + code + [f"{key} ({pair})" for key, pair in machine.items()]

    def distance(self, step: int) -> float:
        """Return the largest distance of two tensors of the recorded weights, as a share of their size."""
        return max((apart(*pair) for pair in self.pairs(step)), default=0.0)

    def pairs(self, step: int) -> list[tuple[Value, Value]]:
        one, other = (weights_of(run, step) for run in (self.a, self.b))
        absent = Value("update", "", "")
        return [(one.get(name, absent), replace(other.get(name, absent), name=name)) for name in one | other]

    def by_records(self, since: int, first: int | None, tolerance: float) -> Answer:
        """Return what the records alone show."""
        if tolerance:
            big = bisect(self.both, lambda step: self.distance(step) > tolerance)
            if big is None:
                most = self.distance(self.both[-1]) if self.both else 0.0
                placed = [f"rounding, which depends on {join_names(self.placement)}"]
                note = f"never by more than rounding: by {most:.0e} of the size at step {self.both[-1]}, the last"
                notes = [note] if self.both else []
                return Answer(first, since, causes=placed, rounding=True, notes=notes, known=bool(self.both))
            since, first = max((step for step in self.both if step < big), default=-1), big
        if first is None:
            return Answer(causes=[*self.changed, *self.surroundings], known=False)
        layer = what = ""
        if first in self.both:
            odd = next(pair for pair in self.pairs(first) if apart(*pair) > tolerance)
            layer, what = layer_of(odd[1].name), f"{odd[1].name} after the step, by {share(apart(*odd))}"
        return Answer(first, max(since, 0), layer, what, [*self.changed, *self.surroundings])

    # --- steps that are taken again -----------------------------------------------------------------------------------

    def computed_again(self, since: int, first: int | None) -> Answer:
        """Return what taking the steps again shows; what the records show if that is not possible."""
        start = max((step for step in self.both if step <= since), default=0)
        end = min(start + MOST_STEPS, self.length if first is None else first)
        try:
            self.a.layout = self.b.layout = next((run.raw for run in (self.b, self.a) if needs_layout(run.raw)), None)
            answer = self.taken(start, end, 0.0)
            if answer is not None:
                return self.larger(answer)
            if first is None or end < first:
                return Answer(notes=[f"steps {start + 1} to {end}, computed again under both configs, are the same"])
            if self.tolerance_of_records:
                return self.beyond_rounding(since, first)
            return self.odd_run(start, self.by_records(since, first, 0.0))
        except (UserError, WorkerFailed) as error:
            answer = self.by_records(since, first, self.tolerance_of_records)
            answer.notes.append(f"not computed again: {' '.join(str(error).split())}")
            return answer

    @property
    def length(self) -> int:
        return min(int(run.facts["outcome"].get("steps") or MOST_STEPS) for run in (self.a, self.b))

    def larger(self, answer: Answer) -> Answer:
        """Add from when on a difference that begins as small as rounding is larger."""
        if answer.rounding and not self.exact and self.both:
            big = bisect(self.both, lambda step: self.distance(step) > self.tolerance)
            larger = "no recorded step" if big is None else f"step {big}, of the recorded ones"
            answer.notes.append(f"at first it is as small as rounding ({self.tolerance:.0e}); larger from: {larger}")
        return answer

    def beyond_rounding(self, since: int, first: int) -> Answer:
        """Return the first difference that is more than rounding, for runs whose layouts round differently."""
        answer = self.by_records(since, first, self.tolerance)
        if answer.rounding or answer.step is None:
            return answer
        start = max((step for step in self.both if step < answer.step), default=0)
        if answer.step - start > MOST_STEPS:
            return answer
        again = self.taken(start, answer.step, self.tolerance) or self.odd_run(start, answer, self.tolerance)
        from_step = f"from step {first} on, or from one before it, the runs differ by rounding"
        again.notes.append(f"{from_step}: {join_names(self.placement)}")
        return again

    def odd_run(self, start: int, answer: Answer, tolerance: float = 0.0) -> Answer:
        """Complete what the records show: name the run that has other weights than its config leads to."""
        answer.causes, step = self.surroundings, answer.step
        if step not in self.both:
            return answer
        odd: dict[Path, list[str]] = {}
        for run in (self.a, self.b):
            values = {value.name: value for value in steps_of(run, run.config, run.data, start, step)[step]}
            saved = weights_of(run, step)
            names = [name for name in saved if name in values and apart(saved[name], values[name]) > tolerance]
            odd |= {run.folder: names} if names else {}
        if len(odd) == 1:
            ((folder, names),) = odd.items()
            answer.layer = layer_of(names[0])
            answer.causes = answer.causes or [f"nothing that {folder} records: a change by hand, or a processor"]
            answer.notes.append(
                f"computed again, the other run has the same weights after step {step}, and {folder} has not"
            )
        elif odd:
            answer.notes.append("computed again, both runs have other weights than they recorded")
        return answer

    def taken(self, start: int, end: int, tolerance: float) -> Answer | None:
        """Take steps again under both configs. Return the first difference; None if there is none."""
        for last in sorted({min(start + FIRST_STEPS, end), end}):
            one, other = (steps_of(run, run.config, run.data, start, last) for run in (self.a, self.b))
            for step in sorted(one.keys() & other.keys()):
                if difference := first_difference(one[step], other[step], tolerance):
                    return self.described(step, difference, one[step], other[step], start, tolerance)
        return None

    def described(
        self, step: int, difference: Value, one: list[Value], other: list[Value], start: int, tolerance: float
    ) -> Answer:
        mine = {(value.stage, value.name): value for value in one}

        def distance(value: Value) -> float:
            same_name = mine.get((value.stage, value.name))
            return apart(same_name, value) if same_name else float("inf")

        stage, name, far = difference.stage, difference.name, distance(difference)
        what = WORDS[stage].format(name=name) + (f", by {share(far)}" if far < float("inf") else "")
        if stage == "output":
            layer = name
        else:
            later = [value for value in other if value.stage in ("weights", "gradient", "update")]
            layer = next((layer_of(value.name) for value in later if distance(value) > tolerance), "")
        changed = [each for each in other if each.stage in ("gradient", "update")] or other
        causes = self.causes(step, difference, one, start, tolerance)
        return Answer(step, step - 1, layer, what, causes, max(map(distance, changed)) <= self.tolerance)

    # --- the cause ----------------------------------------------------------------------------------------------------

    def causes(self, step: int, difference: Value, one: list[Value], start: int, tolerance: float) -> list[str]:
        """Return the causes of a difference: the settings that make it when they alone are changed."""
        parts = self.parts()
        data = [f"the data's {key} ({pair})" for key, pair in self.differing("data").items()]
        if difference.stage == "data" and data and not any(part.startswith("data") for part in parts):
            return data
        if len(parts) <= 1 or len(parts) > MOST_KEYS:
            return [text for texts in parts.values() for text in texts] or data or self.surroundings
        causes: list[str] = []
        for part, texts in parts.items():
            with suppress(UserError, WorkerFailed):
                raw = deepcopy(self.a.raw)
                if part == "pieces":
                    raw |= {"pieces": self.b.config.layout.pieces, "devices": 1, "num_nodes": 1}
                    raw["accumulate_grad_batches"] = None
                else:
                    put(raw, self.b.raw, part)
                threads = self.b.threads if part == "threads" else self.a.threads
                config = prepare(raw, threads, self.a.layout)
                data_of_part = open_without_test(config) if part.startswith(("data", "seed")) else self.a.data
                values = steps_of(self.a, config, data_of_part, start, step).get(step, [])
                first = first_difference(one, values, tolerance)
                if first and (first.stage, first.name) == (difference.stage, difference.name):
                    causes += texts
        return causes or [f"only together: {join_names(text for texts in parts.values() for text in texts)}"]

    def parts(self) -> dict[str, list[str]]:
        """Return the differences of the config by the part that is changed as a whole: a key, or a group."""
        parts: dict[str, list[str]] = {}
        for text in self.changed:
            key = text.partition(" ")[0]
            if LAYOUT.match(key):
                continue
            names = key.split(".")
            part = ".".join(names[:2]) if names[0] in ("callbacks", "extras", "strategy") else names[0]
            parts.setdefault(part, []).append(text)
        pieces = [run.config.layout.pieces for run in (self.a, self.b)]
        if pieces[0] != pieces[1]:
            parts["pieces"] = [f"pieces ({pieces[0]}, {pieces[1]})"]
        if self.a.threads != self.b.threads:
            parts["threads"] = [f"threads ({self.a.threads}, {self.b.threads})"]
        return parts


def put(raw: dict[str, Any], source: Mapping[str, Any], key: str) -> None:
    """Set a dotted key of a nested dict to the value that `source` has there, or delete it."""
    *above, name = key.split(".")
    for part in above:
        raw, source = raw.setdefault(part, {}), source.get(part) or {}
    if name in source:
        raw[name] = deepcopy(source[name])
    else:
        raw.pop(name, None)


def bisect(steps: Sequence[int], differs: Callable[[int], bool]) -> int | None:
    """Return the first of ascending steps that differs, if all later ones differ too. Return None if none differs."""
    low, high = 0, len(steps)
    if not steps or not differs(steps[-1]):
        return next((step for step in steps if differs(step)), None)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(steps[middle]) else (middle + 1, high)
    return steps[low]


def steps_of(run: Recorded, config: Config, data: Splits, start: int, last: int) -> Steps:
    """Take the steps from a checkpoint of a run up to `last`."""
    checkpoint = run.checkpoints[start] if start else None
    with tempfile.TemporaryDirectory(prefix="lockstep-why-") as folder:
        return take_steps(config, data, checkpoint, last, Path(folder) / "again")


def weights_of(run: Recorded, step: int) -> dict[str, Value]:
    return {name: value_of("update", name, value) for name, value in run.weights(step).items()}


def first_difference(one: Iterable[Value], other: Iterable[Value], tolerance: float) -> Value | None:
    """Return the first value of the second step that the first step does not have."""
    for mine, theirs in zip(one, other, strict=False):
        if (mine.stage, mine.name) != (theirs.stage, theirs.name) or apart(mine, theirs) > tolerance:
            return theirs
    return None


def layer_of(name: str) -> str:
    """Return the layer of a parameter or a buffer."""
    return name.rpartition(".")[0] or name


def share(distance: float) -> str:
    return f"{distance:.0e} of its size" if 1e-300 < distance < float("inf") else "another type or shape"
