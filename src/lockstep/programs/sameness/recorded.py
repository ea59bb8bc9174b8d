"""What a program did, as the recorder wrote it (lockstep/trace.py), and the file that holds it.

A `.trace` file is JSON, compressed by gzip: plain data, of which nothing is executed.
"""

import base64
import binascii
import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UserError
from lockstep.files import write
from lockstep.trace import BUCKETS, FORMAT

LARGEST = 1 << 32  # bytes of a trace that are read
EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Tensor:
    """A tensor as it was recorded: a digest of its bits, its norm, and a sketch, float64 [BUCKETS]."""

    digest: str
    norm: float
    sketch: NDArray[np.float64]

    def distance(self, other: "Tensor") -> float:
        """Return the distance as a share of the larger one's size: 0 only for the same bits; infinity for NaN."""
        if self.digest == other.digest:
            return 0.0
        size = max(self.norm, other.norm)
        if not math.isfinite(size):
            return math.inf
        with np.errstate(all="ignore"):
            apart = float(np.linalg.norm(self.sketch - other.sketch)) / size if size else math.inf
        return max(apart, 1e-300)

    def multiple(self, other: "Tensor") -> tuple[float, float]:
        """Return by which factor the other one is larger, and what of it is no multiple, as a share of its size."""
        inner = float(self.sketch @ self.sketch)
        factor = float(self.sketch @ other.sketch) / inner if inner else 0.0
        return factor, float(np.linalg.norm(other.sketch - factor * self.sketch)) / (other.norm or 1.0)


Tensors = dict[str, Tensor]


def tensors(recorded: Mapping[str, Any]) -> Tensors:
    made = {}
    for name, (digest, norm, sketch) in recorded.items():
        numbers = np.frombuffer(base64.b64decode(sketch), dtype="<f8")
        if len(numbers) != BUCKETS or not isinstance(digest, str):
            raise ValueError("not a tensor")
        made[str(name)] = Tensor(digest, float(norm), numbers)
    return made


@dataclass(frozen=True)
class Pass:
    """A forward pass of the outermost module: one micro-batch."""

    module: str
    training: bool
    evaluating: dict[str, int]  # modules in evaluation mode inside a module that trains, by class
    autocast: str | None
    random: list[str]  # digests of torch's random states before the pass
    drawn: bool  # whether the pass drew random numbers
    inputs: str = ""
    samples: tuple[int, ...] = ()  # a digest of each
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the other inputs, as labels
    outputs: NDArray[np.float64] | None = None  # [samples, 2]: norm, sum with signs
    counted: int | None = None  # labels that the loss counts, if they are an input

    @staticmethod
    def of(line: Mapping[str, Any]) -> "Pass":
        facts = {key: line[key] for key in ("module", "training", "evaluating", "autocast", "random", "drawn")}
        facts |= {key: line[key] for key in ("inputs", "counted") if key in line}
        if "samples" in line:
            facts["samples"] = integers(line["samples"])
            facts["others"] = {key: integers(value) for key, value in line["others"].items()}
        if "outputs" in line:
            facts["outputs"] = np.frombuffer(base64.b64decode(line["outputs"]), dtype="<f8").reshape(-1, 2)
        return Pass(**facts)


def integers(text: str) -> tuple[int, ...]:
    return tuple(np.frombuffer(base64.b64decode(text), dtype="<i8").tolist())


@dataclass(frozen=True)
class Step:
    """An optimizer step of a rank.

    Attributes:
        passes: its micro-batches.
        losses: the scalars on which `backward` was called.
        norms: the norm of all gradients before and after each backward pass.
        settings: of each parameter: those of its group.
        optimizer: number and class.
        frozen, idle: parameters that need no gradient, and trainable ones that no optimizer has.
        unclipped: the gradients before the first function that clips them, of which only the norms are recorded; after
            the last backward pass if none does (`clips`).
    """

    number: int
    optimizer: str
    passes: list[Pass]
    losses: list[float]
    norms: list[list[float | None]]
    settings: dict[str, dict[str, Any]]
    frozen: tuple[str, ...]
    idle: tuple[str, ...]
    unclipped: Tensors
    clips: bool
    gradients: Tensors
    weights: Tensors
    buffers: Tensors

    @property
    def norm(self) -> float:
        """The norm of all gradients as the optimizer gets them."""
        return math.sqrt(sum(each.norm**2 for each in self.gradients.values()))

    @property
    def unclipped_norm(self) -> float:
        """The norm of all gradients before they were clipped."""
        return math.sqrt(sum(each.norm**2 for each in self.unclipped.values()))


@dataclass(frozen=True)
class Rank:
    """What one process recorded."""

    rank: int
    world: int
    group: bool
    facts: dict[str, Any]
    modules: Counter[str]  # modules without parts, by class
    wrappers: tuple[str, ...]
    dtypes: Counter[str]
    weights: Tensors  # before the first step
    buffers: Tensors
    steps: list[Step]
    error: str | None

    @staticmethod
    def of(lines: Lines) -> "Rank":
        """Read the lines of a process.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: they are no such lines.
        """
        first, *others = lines
        if first["format"] != FORMAT:
            raise ValueError("another format")
        starts = [line["start"] for line in others if "start" in line]
        weights: Tensors = {}
        buffers: Tensors = {}
        for start in starts:
            weights |= tensors(start["weights"])
            buffers |= tensors(start["buffers"])
        written: dict[str, Any] = {}
        steps = []
        for line in others:
            if "step" in line:
                written |= line.get("settings", {})
                steps.append(_step(line, written))
        return Rank(
            rank=int(first["rank"]),
            world=int(first["world"]),
            group=bool(first["group"]),
            facts=dict(first["facts"]),
            modules=sum((Counter(start["modules"]) for start in starts), Counter()),
            wrappers=tuple(name for start in starts for name in start["wrappers"]),
            dtypes=sum((Counter(start["dtypes"]) for start in starts), Counter()),
            weights=weights,
            buffers=buffers,
            steps=steps,
            error=next((str(line["error"]) for line in others if "error" in line), None),
        )


def _step(line: Mapping[str, Any], written: Mapping[str, Any]) -> Step:
    number = line["optimizer"]
    group = written[f"groups {number}"]
    return Step(
        number=int(line["step"]),
        optimizer=f"{group['class']} {number}" if number else str(group["class"]),
        passes=[Pass.of(each) for each in line["passes"]],
        losses=[float(each) for each in line["losses"]],
        norms=list(line["norms"]),
        settings={name: dict(each["settings"]) for each in group["groups"] for name in each["parameters"]},
        frozen=tuple(written["frozen"]),
        idle=tuple(written["in no optimizer"]),
        unclipped={name: Tensor(repr(norm), norm, np.array([norm])) for name, norm in line["unclipped"].items()},
        clips=bool(line.get("clips")),
        gradients=tensors(line.get("gradients", {})),
        weights=tensors(line["weights"]),
        buffers=tensors(line["buffers"]),
    )


@dataclass(frozen=True)
class Run:
    """A run of a program.

    Attributes:
        ranks: its ranks, by number.
        others: how many more processes took steps, with the number of a rank that another one has.
    """

    ranks: list[Rank]
    others: int = 0

    @staticmethod
    def of(processes: Sequence[Lines]) -> "Run":
        """Read the lines of all processes that took steps. Of several with one rank, the first that started counts."""
        ordered = sorted(processes, key=lambda lines: lines[0]["started"])
        ranks: dict[int, Rank] = {}
        others = 0
        for lines in ordered:
            rank = Rank.of(lines)
            if rank.steps or rank.error:
                others += rank.rank in ranks
                ranks.setdefault(rank.rank, rank)
        if not ranks:
            raise ValueError("no step")
        return Run([ranks[number] for number in sorted(ranks)], others)

    @property
    def first(self) -> Rank:
        return self.ranks[0]

    @property
    def length(self) -> int:
        """The number of steps that all ranks recorded."""
        return min(len(rank.steps) for rank in self.ranks)

    def at(self, step: int) -> list[Step]:
        """Return a step of all ranks; the first is 1."""
        return [rank.steps[step - 1] for rank in self.ranks]

    def passes(self, step: int) -> Iterator[Pass]:
        for each in self.at(step):
            yield from each.passes

    def samples(self, step: int) -> Counter[int]:
        """Return the samples of a step, of all ranks and micro-batches."""
        return Counter(sample for each in self.passes(step) for sample in each.samples)

    def loss(self, step: int) -> float | None:
        """Return the mean over the ranks of the sum of a step's losses."""
        sums = [sum(each.losses) for each in self.at(step) if each.losses]
        return sum(sums) / len(sums) if sums else None

    @cached_property
    def micro_batches(self) -> int:
        """How many backward passes of a rank most steps have."""
        counts = Counter(len(step.losses) or len(step.norms) for step in self.first.steps)
        return max(1, counts.most_common(1)[0][0]) if counts else 1


@dataclass(frozen=True)
class Side:
    """A program: what its user calls it, and its runs.

    Attributes:
        run: the run that is compared.
        again: the same program once more.
        flipped: runs before whose first step the last bit of weights was flipped.
    """

    name: str
    run: Run
    again: Run | None = None
    flipped: tuple[Run, ...] = ()


@dataclass
class Written:
    """The content of a trace file: the command, and of each of its runs the lines of all processes."""

    command: str
    runs: dict[str, list[Lines]]  # run, again, flipped

    def save(self, path: Path) -> None:
        content = {"lockstep trace": FORMAT, "command": self.command, "runs": self.runs}
        write(path, gzip.compress(json.dumps(content).encode(), 6, mtime=0))

    def run(self, kind: str, name: str | None = None) -> Run:
        """Return a run.

        Raises:
            UserError: the lines are not the recorder's.
        """
        try:
            return Run.of(self.runs[kind])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, binascii.Error) as error:
            raise UserError(
                f"{name or self.command}: not a trace that this version can read: record it again"
            ) from error


def read_processes(folder: Path) -> list[Lines]:
    """Return what the recorder has written into a folder: the lines of each process."""
    processes = []
    for path in sorted(folder.glob("*.jsonl")):
        lines: Lines = []
        for text in path.read_text().splitlines():
            with suppress(ValueError):  # a process that was killed while it wrote
                lines.append(json.loads(text))
        processes.append(lines)
    return processes


def read(path: Path) -> Written:
    """Read a trace file.

    Raises:
        UserError: it can't be read, or is no trace.
    """
    try:
        with gzip.open(path) as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise UserError(f"{path}: more than 4 GiB: record fewer steps")
        content = json.loads(text)
        if content["lockstep trace"] != FORMAT:
            raise ValueError("another format")
        return Written(str(content["command"]), dict(content["runs"]))
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise UserError(f"{path}: not a trace: lockstep trace -o {path} -- python train.py makes one") from error
        raise UserError(f"{path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, EOFError, zlib.error, RecursionError) as error:
        raise UserError(f"{path}: not a trace: lockstep trace -o {path} -- python train.py makes one") from error
