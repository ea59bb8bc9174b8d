"""The rules of a run, each once with its message. A config is checked by them, and so is a `lockstep.Trainer`.

This module imports neither torch nor Lightning, because a config is checked before they are imported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from lockstep.arithmetic.layout import EXACT_PRECISIONS, Layout
from lockstep.errors import UserError
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.portable import PORTABLE
from lockstep.strategies import Strategy
from lockstep.text import plural

SINGLE_VALUE_TEXT = "Expected more than 1 value per channel"  # in torch's message, of BatchNorm


def refuse(pairs: Iterable[tuple[str, str, str]]) -> None:
    """Refuse the first pair of settings that are both chosen.

    Args:
        pairs: two settings as they are typed, each empty if it is not chosen, and the reason.
    """
    for one, other, why in pairs:
        if one and other:
            raise UserError(f"{one} and {other} don't go together: {why}")


def check_pairs(layout: Layout, name: str, options: Mapping[str, Any], typed: Callable[[str, Any], str]) -> None:
    """Refuse settings that can't be combined, and shares of the wrong number.

    Args:
        layout: the layout that follows from them.
        name: the precision, as the user gave it.
        options: those of Lightning's Trainer that the user has chosen.
        typed: returns a setting as a user types it, from its name and value.
    """
    precision, exact = typed("precision", name), typed("exact", layout.exact) * bool(layout.exact)
    portable = exact * (layout.exact == PORTABLE)
    device = typed("accelerator", layout.accelerator)
    on_cpu, on_gpu = device * (layout.accelerator == "cpu"), device * (layout.accelerator == "gpu")
    algorithm, clips = options.get("gradient_clip_algorithm"), options.get("gradient_clip_val") is not None
    refuse(
        (
            (precision * name.startswith("16-"), on_cpu, "fp16 needs a GPU; give bf16-mixed or 32-true"),
            (
                precision * (name not in ("auto", *EXACT_PRECISIONS)),
                exact,
                f"exact needs one of {', '.join(EXACT_PRECISIONS)}",
            ),
            (
                typed("benchmark", True) * bool(options.get("benchmark")),
                exact,
                "it may choose other kernels in each run; leave it out",
            ),
            (precision * name.startswith(("bf16", "auto")), portable, "give precision=32-true"),
            (on_gpu, portable, "it works on CPUs only; give exact=true"),
            (
                typed("gradient_clip_algorithm", algorithm) * (algorithm is not None),
                typed("gradient_clip_val", None) * (not clips),
                "nothing would be clipped; give gradient_clip_val=0.5, say",
            ),
        )
    )
    if layout.shares and len(layout.shares) != layout.num_devices:
        shares = list(layout.shares)
        raise UserError(f"strategy.shares={shares}: must be {layout.num_devices} numbers, one for each device")


def refuse_several_workers(strategy: Strategy) -> None:
    """Refuse a strategy that runs in one process where an engine has started several workers."""
    if strategy.one_process and external_workers() > 1:
        several = f"{environment().started_by} has started several workers"
        raise UserError(f"strategy={strategy.name} runs in one process, but {several}: give strategy=ddp")


def refuse_several_machines(nodes: Any, command: Callable[[], str]) -> None:
    """Refuse several machines where no engine has started the workers.

    Args:
        nodes: the number of machines.
        command: returns what starts them.
    """
    if isinstance(nodes, int) and nodes > 1 and not external_workers():
        raise UserError(
            f"num_nodes={nodes}: on several machines torchrun, SLURM or MPI must start the workers. "
            f"On each machine: {command()}"
        )


def check_sizes(strategy: Strategy, layout: Layout, samples: int) -> None:
    """Check that a training set of `samples` samples fills a step.

    Raises:
        UserError: The batch size is larger, or the strategy needs more samples.
    """
    size = layout.batch_size
    if size > samples:
        most = f"the {plural(samples, 'sample')} of the training set"
        raise UserError(f"batch_size={size} is more than {most}: use batch_size={samples} or less")
    strategy.check_samples(layout, samples)


def check_length(path: str, step: int, limits: Mapping[str, int]) -> None:
    """Check that a run is not shorter than it was when a checkpoint was saved.

    Args:
        path: the checkpoint.
        step: the step after which it was saved.
        limits: the numbers of steps after which settings, as they are typed, end the run.
    """
    for limit, steps in limits.items():
        if steps < step:
            raise UserError(
                f"{limit} ends the run after step {steps}, but {path} was saved after step {step}: give a larger limit"
            )


def smallest_piece(layout: Layout, samples: int, has_last_step: bool) -> int:
    """Return the number of samples of a run's smallest piece.

    Args:
        layout: the run's layout.
        samples: samples of the training set.
        has_last_step: whether the run reaches an epoch's last step, which may be short.
    """
    size = layout.batch_size
    tail = samples % size if has_last_step else 0
    return min(max(1, step // layout.pieces) for step in (size, tail or size))


def single_value_error(
    layout: Layout, samples: int, fits: Callable[[Layout], bool], accumulates: bool = False
) -> UserError:
    """Return an error about a BatchNorm layer that gets one value; it names the nearest sizes and pieces that fit.

    Args:
        layout: the run's layout.
        samples: samples of the training set.
        fits: whether each piece of a run with another layout would have several samples.
        accumulates: whether the user has chosen the pieces by `accumulate_grad_batches`.
    """
    tail, last = samples % layout.batch_size, ""
    if layout.batch_size // layout.pieces > 1:
        last = f"an epoch's last step has {tail} of {plural(samples, 'sample')}, so "
    remedies = [*_sizes(layout, samples, fits), *_pieces(layout, fits, accumulates)]
    remedy = f"use {' or '.join(remedies) or 'another normalisation'}"
    return UserError(
        f"batch_size={layout.batch_size} in {layout.pieces} pieces: {last}a piece has one sample, and a BatchNorm "
        f"layer gets one value per channel, which has no variance: {remedy}"
    )


def _sizes(layout: Layout, samples: int, fits: Callable[[Layout], bool]) -> Iterator[str]:
    """Yield the nearest smaller and the nearest larger `batch_size` that fit, as settings."""
    size, pieces = layout.batch_size, layout.pieces
    for sizes in (range(size - pieces, 0, -pieces), range(size + pieces, samples + 1, pieces)):
        fitting = (each for each in sizes if fits(replace(layout, batch_size=each)))
        yield from (f"batch_size={each}" for each in islice(fitting, 1))


def _pieces(layout: Layout, fits: Callable[[Layout], bool], accumulates: bool) -> Iterator[str]:
    """Yield the nearest smaller number of pieces that fits, as a setting."""
    for pieces in range(layout.pieces - 1, layout.num_devices - 1, -1):
        if layout.batch_size % pieces == 0 and fits(replace(layout, pieces=pieces)):
            each, rest = divmod(pieces, layout.num_devices)
            yield f"accumulate_grad_batches={each}" if accumulates and not rest else f"pieces={pieces}"
            return
