"""Compare two runs of Lockstep by their folders: what they recorded, and steps that are taken again under both configs.

The records (kept checkpoints, the lines of `ledger.jsonl`) say from which step on the weights differ. The steps after
the last checkpoint at which both are the same are taken again, recorded, and judged as those of any two programs are.
Where both configs lead to the same weights and the records do not, a run has weights that its config does not explain.
"""

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint import paths
from lockstep.config.check import Config, check
from lockstep.config.instantiate import check_targets_named, locate
from lockstep.config.pages import group_file
from lockstep.data import Splits
from lockstep.data.datasets import differ
from lockstep.errors import UserError, WorkerFailed
from lockstep.launch.portable import choose_kernels
from lockstep.programs.common.training import open_without_test, train_from, train_quietly
from lockstep.programs.comparison.facts import Facts, differing_values, facts, read, show
from lockstep.programs.sameness.causes import Cause
from lockstep.programs.sameness.judging import MARGIN, Pair
from lockstep.programs.sameness.recorded import Run, Side, Tensors, tensors
from lockstep.programs.sameness.running import flip_of
from lockstep.programs.sameness.sides import compared
from lockstep.programs.sameness.training import Ended, read_run
from lockstep.programs.sameness.verdict import Verdict
from lockstep.report.summary import weights_sha256
from lockstep.text import join_names, plural
from lockstep.trace import Sketcher, plain_name

MOST_STEPS = 200  # steps that are taken again
FIRST_STEPS = 8  # steps that are taken first: most differences appear in them
MOST_KEYS = 8  # differences of the config that are tried one at a time
# Keys that decide how often and where a run writes, but not what it computes.
NOT_TAKEN: dict[str, Any] = {
    "logger": {},
    "checkpoint_every": None,
    "checkpoint_keep": 0,
    "resume": None,
    "max_restarts": 0,
    "survive": False,
}
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
        return self.hashes.get(step) or self.hashes.setdefault(step, weights_sha256(self._state(step)))

    def _state(self, step: int) -> dict[str, Any]:
        return dict(checkpoint_io.load(self.checkpoints[step])["state_dict"])

    def weights(self, step: int) -> Tensors:
        """Return the weights and buffers of a checkpoint as the recorder has them."""
        state = {plain_name(name): value for name, value in self._state(step).items()}
        return tensors(dict(zip(state, Sketcher(torch).values([*state.values()]), strict=True)))

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
class TakenAgain:
    """Steps of a run, taken again in workers: a side of `compared`."""

    name: str
    config: Config
    data: Splits
    checkpoint: Path | None  # where it starts; None: from the seed
    steps: int

    def run(self, kind: str) -> Run:
        """Take the steps. For what it raises see `launch`."""
        with tempfile.TemporaryDirectory(prefix="lockstep-same-") as folder:
            record: dict[str, Any] = {"_target_": "lockstep.programs.sameness.training.Record"}
            record |= {"folder": f"{folder}/trace", "steps": self.steps, "flip": flip_of(kind), "ends": True}
            config = replace(self.config, callbacks={**self.config.callbacks, "record": record})
            choose_kernels(config.layout.exact)
            train_from(self.checkpoint, config, self.data, Path(folder, "run"), _train)
            return read_run(Path(folder, "trace"))


def _train(config: Config, data: Splits, folder: Path) -> None:
    with suppress(Ended):
        train_quietly(config, data, folder)


def compare_folders(one: Path, other: Path, steps: int = MOST_STEPS, twice: bool = True) -> Verdict:
    """Return the verdict on two runs.

    Args:
        one, other: their folders.
        steps: how many are taken again at most.
        twice: whether each is taken a second time if bits differ.

    Raises:
        UserError: a folder is no run folder, or nothing can be compared.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # this process forks, and a child lacks the threads that torch has started
    try:
        return _Search(Recorded(one, facts(one)), Recorded(other, facts(other)), steps, twice).verdict()
    finally:
        torch.set_num_threads(threads)


class _Search:
    def __init__(self, a: Recorded, b: Recorded, steps: int, twice: bool) -> None:
        self.a, self.b, self.steps, self.twice = a, b, steps, twice
        self.common = sorted({*a.checkpoints, *a.hashes} & {*b.checkpoints, *b.hashes})
        self.both = sorted(a.checkpoints.keys() & b.checkpoints.keys())  # steps whose weights can be compared

    def verdict(self) -> Verdict:
        first = first_that(self.common, lambda step: self.a.sha256(step) != self.b.sha256(step))
        differing = [*self.changed, *self.surroundings]
        also = f"the runs differ in {join_names(differing)}" if differing else "config, code, versions and data: same"
        if first is None and self.common:
            steps = f"{plural(len(self.common), 'step')}, the last is {self.common[-1]}"
            return Verdict(0, f"same bits at every recorded step ({steps})", notes=[also])
        since = max((step for step in self.common if first is not None and step < first), default=0)
        start = max((step for step in self.both if step <= since), default=0)
        try:
            self.a.layout = self.b.layout = next((run.raw for run in (self.b, self.a) if needs_layout(run.raw)), None)
            verdict = self.taken_again(start, first)
        except (UserError, WorkerFailed) as error:
            verdict = self.by_records(since, first)
            verdict.notes.append(f"not taken again: {' '.join(str(error).split())}")
        verdict.notes.append(also)
        if first is None or first > since + 1:
            verdict.notes.append(KEEP_MORE)
        return verdict

    # --- the records --------------------------------------------------------------------------------------------------

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
    def to_the_bit(self) -> bool:
        """Whether the records of both must have the same bits, since nothing rounds in another way."""
        exact = all(run.facts["config"].get("exact") in (True, "portable") for run in (self.a, self.b))
        return exact or not self.placement

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

    def by_records(self, since: int, first: int | None) -> Verdict:
        """Return what the records alone show.

        Raises:
            UserError: they do not show whether a difference is rounding.
        """
        names = f"{self.a.folder}, {self.b.folder}"
        if first is None:
            raise UserError(f"{names}: no step has weights of both runs: {KEEP_MORE}")
        if not self.to_the_bit:
            raise UserError(
                f"{names}: their weights differ at step {first}, and their layouts, machines or versions round in "
                "different ways: whether it is more than rounding is known only if steps can be taken again"
            )
        where = f"at step {first}" if first <= since + 1 else f"at one of the steps {since + 1} to {first}"
        return Verdict(1, f"different {where}: {self.what(first)}", first, self.as_causes(self.changed))

    def what(self, step: int) -> str:
        """Say which recorded weights differ at a step."""
        if step not in self.both:
            return "the weights have other hashes"
        return f"{self.apart(self.a.weights(step), self.b.weights(step))} after the step"

    def apart(self, one: Tensors, other: Tensors) -> str:
        far = {name: value.distance(other[name]) for name, value in one.items() if name in other}
        odd = {name: distance for name, distance in far.items() if distance}
        return f"{join_names([*odd])} differ by up to {max(odd.values(), default=0.0):.0e} of their size"

    def as_causes(self, texts: Sequence[str]) -> list[Cause]:
        causes = [Cause("config", text, "the same value in both runs") for text in texts]
        return causes or [Cause("surroundings", text, "the same on both sides") for text in self.surroundings]

    # --- steps that are taken again -----------------------------------------------------------------------------------

    def taken_again(self, start: int, first: int | None) -> Verdict:
        """Take the steps after `start` under both configs, and judge them; then the weights that were recorded."""
        length = min(int(run.facts["outcome"].get("steps") or self.steps) for run in (self.a, self.b))
        last = max(min(start + self.steps, length if first is None else first), start + 1)
        for end in sorted({min(start + FIRST_STEPS, last), last}):
            sides = self.again(self.a, start, end), self.again(self.b, start, end)
            verdict, pair = compared(sides[0], sides[1], self.twice, start)
            if verdict.code:
                return self.explained(verdict, pair, sides)
        if first is None or first > last:
            verdict.notes.append(f"only the steps {start + 1} to {last} were taken again: --steps takes more")
            return verdict
        return self.unexplained(verdict, pair, sides[0], first)

    def again(self, run: Recorded, start: int, end: int) -> TakenAgain:
        checkpoint = run.checkpoints[start] if start else None
        return TakenAgain(str(run.folder), run.config, run.data, checkpoint, end - start)

    def unexplained(self, verdict: Verdict, pair: Pair, side: TakenAgain, step: int) -> Verdict:
        """Judge weights that differ in the records, while both configs lead to the same: one run has others."""
        if step not in self.both:
            verdict = Verdict(1, f"different at step {step}: {self.what(step)}", step, rows=verdict.rows)
            verdict.notes.append("taken again, both configs lead to the same weights")
            verdict.causes = self.as_causes([])
            return verdict
        if not pair.one.flipped and not self.to_the_bit:
            pair.one = replace(pair.one, flipped=(side.run("flipped"),))
            pair.forget()
        at = step - pair.start
        saved = [run.weights(step) for run in (self.a, self.b)]
        if not self.beyond(pair, at, *saved):
            line = f"same up to rounding over {plural(at, 'step')}: {self.what(step)}; one flipped bit of each weight "
            line += f"makes {pair.largest_rounding('weights', at):.0e}"
            return Verdict(0, line, notes=[f"what rounds differs in {join_names(self.placement)}"], rows=verdict.rows)
        odd = []
        for run, taken, weights in zip((self.a, self.b), (pair.one.run, pair.other.run), saved, strict=True):
            computed = {**taken.first.steps[at - 1].weights, **taken.first.steps[at - 1].buffers}
            odd += [run.folder] if self.beyond(pair, at, computed, weights) else []
        causes = self.as_causes([])
        if len(odd) == 1:
            texts = f"{odd[0]} has other weights than its config leads to: a change by hand, or a processor"
            causes = causes or [Cause("unexplained", texts, "train again")]
            note = f"taken again, the other run has the weights that it recorded, and {odd[0]} has not"
        else:
            note = "taken again, both runs have other weights than they recorded"
        return Verdict(1, f"different at step {step}: {self.what(step)}", step, causes, [note], verdict.rows)

    def beyond(self, pair: Pair, at: int, one: Tensors, other: Tensors) -> bool:
        """Check whether weights of a step are further apart than rounding takes them."""
        factor = 0.0 if self.to_the_bit else MARGIN
        return any(
            value.distance(other[name]) > factor * pair.rounding("weights", at, name)
            for name, value in one.items()
            if name in other
        )

    # --- the cause ----------------------------------------------------------------------------------------------------

    def explained(self, verdict: Verdict, pair: Pair, sides: Sequence[TakenAgain]) -> Verdict:
        """Add the settings that make the difference when they alone are changed, before what they do to a step."""
        keys = self.as_causes(self.keys(pair, sides[0])) if verdict.step is not None else []
        vague = ("not named", "update", "network")
        named = [cause for cause in verdict.causes if not keys or cause.kind not in vague]
        verdict.causes = [*keys, *named]
        return verdict

    def keys(self, pair: Pair, side: TakenAgain) -> list[str]:
        step, parts = pair.first_difference, self.parts()
        if len(parts) <= 1 or len(parts) > MOST_KEYS or step is None:
            return [text for texts in parts.values() for text in texts]
        keys: list[str] = []
        for part, texts in parts.items():
            with suppress(UserError, WorkerFailed):
                raw = deepcopy(self.a.raw)
                if part == "pieces":
                    raw |= {"pieces": self.b.config.layout.pieces, "devices": 1, "num_nodes": 1}
                    raw["accumulate_grad_batches"] = None
                else:
                    put(raw, self.b.raw, part)
                config = prepare(raw, self.b.threads if part == "threads" else self.a.threads, self.a.layout)
                data = open_without_test(config) if part.startswith(("data", "seed")) else side.data
                run = replace(side, config=config, data=data, steps=max(step, 1)).run("run")
                changed = Pair(pair.one, Side(part, run))
                if changed.first_difference == step:
                    keys += texts
        return keys or [f"only together: {join_names(text for texts in parts.values() for text in texts)}"]

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


def prepare(recorded: Mapping[str, Any], threads: int, layout: Mapping[str, Any] | None = None) -> Config:
    """Return the config of a run for this machine: on one device, without what only writes.

    Args:
        recorded: the resolved config that the run recorded. Its classes must be checked already.
        threads: CPU threads of one of its workers.
        layout: the config of a run whose layout is taken instead of one device.

    Raises:
        UserError: the config does not fit this checkout.
    """
    raw = {**deepcopy(dict(recorded)), **NOT_TAKEN, "threads": threads}
    raw |= {group: _changing(raw, group) for group in ("callbacks", "extras")}
    raw["speed"] = {**(raw.get("speed") or {}), "resident": False}
    pieces = check({**raw, "callbacks": {}}).layout.pieces
    place: dict[str, Any] = {"strategy": group_file("strategy", "auto"), "devices": 1, "num_nodes": 1}
    if layout is not None:
        compression = (raw.get("strategy") or {}).get("compression", "none")
        place = {key: layout[key] for key in place}
        place["strategy"] = {**place["strategy"], "compression": compression}
    raw |= {**place, "pieces": pieces, "accumulate_grad_batches": None}
    return check(raw)


def needs_layout(recorded: Mapping[str, Any]) -> bool:
    """Check whether the weights of a run depend on its layout by more than rounding: compression, and some extras."""
    compression = (recorded.get("strategy") or {}).get("compression", "none")
    return bool(_changing(recorded, "extras")) or compression != "none"


def _changing(raw: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the callbacks or the extras of a config that may change the weights."""
    changing = {}
    for name, options in (raw.get(group) or {}).items():
        if options:
            located = locate(f"{group}.{name}._target_", str(options.get("_target_")))
            if getattr(located, "changes_weights", True):
                changing[name] = options
    return changing


def put(raw: dict[str, Any], source: Mapping[str, Any], key: str) -> None:
    """Set a dotted key of a nested dict to the value that `source` has there, or delete it."""
    *above, name = key.split(".")
    for part in above:
        raw, source = raw.setdefault(part, {}), source.get(part) or {}
    if name in source:
        raw[name] = deepcopy(source[name])
    else:
        raw.pop(name, None)


def first_that(steps: Sequence[int], differs: Callable[[int], bool]) -> int | None:
    """Return the first of ascending steps that differs, if all later ones differ too. Return None if none differs."""
    low, high = 0, len(steps)
    if not steps or not differs(steps[-1]):
        return next((step for step in steps if differs(step)), None)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(steps[middle]) else (middle + 1, high)
    return steps[low]
