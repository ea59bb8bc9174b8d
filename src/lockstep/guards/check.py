"""Trial passes that find a `training_step` that no layout could compute alike.

They leave no trace: weights, buffers, Python attributes, random generators and logged values are restored.
"""

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from lockstep.arithmetic.exact_sum import SMALL
from lockstep.guards.losses import HALF, MIN_DIFFERENCE, Losses, WeightedMeans, grows, may_grow
from lockstep.step.batch import copied, repeated
from lockstep.step.outputs import outputs_of
from lockstep.step.strategy import seed_python_and_numpy
from lockstep.step.trial import Saved, generator_states, modes_restored, peeked_iterators, trial_passes
from lockstep.text import join_names

LOG = logging.getLogger("lockstep")
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
PAGE = "(lockstep docs module-rules)"
SEEDS = 8  # of the passes that show whether a loss is a sum, since its random numbers change it, too
SAMPLES = 8  # of the piece, in the repeated passes: they take little time, and what changes between two calls shows
CALLS = 8  # of a step that draws random numbers of Python or numpy, until its loss differs
MEANS = 8  # pieces of a process whose loss is compared with those of its parts
PARTS = 32  # samples of the piece whose parts are compared; more would take too much time
BLOCKS = 8  # parts of these samples
FACTORS = 2.0**-8, 2.0**8  # of a loss, so that gradients have the same digits
TOLERANCE = 1e-2  # of the largest element; kernels that are not deterministic differ by less
NOISE = 1e-3  # of the largest element of all gradients: what smaller gradients are may be rounding
ALWAYS, EXACT, NEVER = "always", "exact", "never"


@dataclass(frozen=True)
class Finding:
    """A rule that a module breaks.

    Attributes:
        rule: `mean` (of what a loss is one), `samples` (values of other samples), `again` (another loss for the same
            samples), or `pieces` (what pieces on other devices would not share).
        text: what is wrong: what would be right.
        refused: whether a run is refused: ALWAYS, with EXACT sums, or NEVER. If not, one line says so.
    """

    rule: str
    text: str
    refused: str = EXACT

    def is_refused(self, exact: bool) -> bool:
        """Check whether a run is refused, with or without exact=true."""
        return self.refused == ALWAYS or (exact and self.refused == EXACT)


class Piece:
    """A batch, whose loss is computed by a call of the module's `training_step`.

    Args:
        module: the module.
        batch: as `training_step` gets it.

    Attributes:
        number: its random numbers are those of the piece with this number.
        size: its samples.
        half: whether numbers have 16 bits.
    """

    number, half = 0, False

    def __init__(self, module: nn.Module, batch: Any) -> None:
        self.module, self._batch = module, batch
        self.size = next((len(each) for each in tree_leaves(batch) if isinstance(each, Tensor) and each.ndim), 0)

    def trial_passes(self) -> AbstractContextManager[Saved]:
        """Return the context of passes that leave no trace."""
        return trial_passes(self.module)

    def prepared(self) -> Any:
        """Return the batch for `training_step`."""
        return copied(self._batch)

    def compute(self, batch: Any, number: int | None = None, graph: bool = False) -> tuple[Tensor, float | None]:
        """Return the loss of some samples, and the weight that `training_step` returns beside it.

        Args:
            batch: samples of the prepared batch.
            number: the random numbers are those of the piece with this number; None: of this one.
            graph: whether the loss has its graph, for a backward pass.
        """
        torch.manual_seed(self.number if number is None else number)
        step: Any = self.module.training_step
        loss, numbers = outputs_of(step(*(batch, 0)[: len(inspect.signature(step).parameters)]))
        return (loss if graph else loss.detach()), float(numbers["weight"]) if "weight" in numbers else None

    def on_other_rank(self) -> AbstractContextManager[None]:
        """Return a context in which `training_step` believes to be on another rank."""
        return nullcontext()


def check(module: nn.Module, batch: Any, *, exact: bool = True, several: bool = True) -> list[Finding]:
    """Return what a module breaks of the rules for a step in pieces, up to the first that is refused.

    With exact=true, the loss of a piece's samples must have the same bits when it is computed again. The loss must be a
    mean, not a sum: of a few samples that are repeated twice and four times, a mean stays the same, and a sum grows in
    proportion. BatchNorm's statistics of them are the same. Integer buffers must not depend on the number of samples.

    Args:
        module: the module, in training mode.
        batch: a batch, as `training_step` gets it; or the pieces of a step.
        exact: whether sums are exact. What only then matters is left out without.
        several: whether a step has several pieces, likewise.
    """
    pieces = batch if isinstance(batch, list) and all(isinstance(each, Piece) for each in batch) else None
    findings = []
    with (pieces or [Piece(module, batch)])[0].trial_passes() as saved:
        for finding in _findings(module, pieces or [Piece(module, batch)], saved, exact, several):
            findings.append(finding)
            if finding.is_refused(exact):
                break
    return findings


def _findings(
    module: nn.Module, pieces: Sequence[Piece], saved: Saved, exact: bool, several: bool
) -> Iterator[Finding]:
    """Yield what is found of each rule."""
    trial = _Trial(module, pieces[0], saved)
    if exact or several:
        yield from _tried(trial.parameters())  # before all others, since some modules set parameters in the first call
    if several:
        yield from _tried(trial.backward())
    if exact:
        yield from _tried(trial.repetitions())
    yield from _tried(trial.parts())
    if several:
        yield from _means(module, pieces, saved)
    if exact or several:
        yield from trial.iterators()


def _means(module: nn.Module, pieces: Sequence[Piece], saved: Saved) -> Iterator[Finding]:
    """Yield what is found of the means of some pieces, since a later one may have samples with another weight."""
    coupled: list[Finding] = []  # so it looks where too few samples have a weight
    for piece in pieces[:MEANS]:
        trial = _Trial(module, piece, saved)
        for finding in _tried(trial.mean()):
            if finding.rule == "mean":
                yield finding
                return
            coupled.append(finding)
        if not trial.is_mean and not coupled:
            return
    yield from coupled[:1]


def _tried(rule: Iterator[Finding]) -> Iterator[Finding]:
    """Yield what is found of a rule. An error leaves the rest of it unknown; one of the step itself is raised there."""
    try:
        yield from rule
    except Exception as error:  # some modules need larger batches
        LOG.debug("a rule is not checked: %s", error)


class _Trial:
    """The trial passes of one piece. Each rule yields what breaks it.

    Attributes:
        is_mean: whether the loss of the samples is the mean of the losses of their parts.
    """

    def __init__(self, module: nn.Module, piece: Piece, saved: Saved) -> None:
        self.module, self.piece, self.saved = module, piece, saved
        self.is_mean = False
        self._integers: dict[str, Tensor] = {}  # after the whole piece; see `integer_buffers`

    def _few(self) -> Any:
        """Return the first samples of the prepared batch."""
        batch, size = self.piece.prepared(), self.piece.size
        return batch if size <= SAMPLES else repeated(batch, size, range(SAMPLES))

    @contextmanager
    def _in_evaluation(self, *kinds: type[nn.Module]) -> Iterator[None]:
        """Return a context in which layers of these kinds are in evaluation mode; without a kind, all layers."""
        with modes_restored(self.module):
            for layer in self.module.modules():
                if not kinds or isinstance(layer, kinds):
                    layer.training = False
            yield

    def parameters(self) -> Iterator[Finding]:
        """Check that a pass leaves the trained parameters as they are.

        Those without a gradient, such as a teacher's, follow the rule for buffers. All are changed before, each by
        another factor, because a copy of other parameters would not move at first.
        """
        self.saved.tensors.restore()
        batch = self._few()
        scaled = [
            (parameter, content, 1 + (1 + number % 64) / 512)
            for number, (parameter, content) in enumerate(self.saved.tensors.parameters)
            if parameter.is_floating_point()
        ]
        with torch.no_grad():
            for parameter, _, factor in scaled:
                parameter.mul_(factor)
        self.piece.compute(batch)
        changed = {
            id(parameter)
            for parameter, content, factor in scaled
            if not torch.equal(parameter.detach().nan_to_num(), (content * factor).nan_to_num())
        }
        named = self.module.named_parameters()
        if names := [name for name, each in named if id(each) in changed and each.requires_grad]:
            yield Finding(
                "pieces",
                f"training_step changes parameters itself ({join_names(names, 3)}), once for each piece of a device, "
                f"so they depend on the layout: change them between the steps, in on_train_batch_end {PAGE}",
            )

    def backward(self) -> Iterator[Finding]:
        """Check that gradients are in proportion to the loss, which the weight of a piece multiplies."""
        self.saved.tensors.restore()
        loss, _ = self.piece.compute(self._few(), graph=True)
        if names := not_in_proportion(loss, self.module):
            yield Finding(
                "pieces",
                f"the gradient of {join_names(names, 2)} is not in proportion to the loss, so it depends on the weight "
                "of a piece: let no hook and no autograd.Function clip, clamp or normalise gradients in a backward "
                f"pass, but on_before_optimizer_step those of the whole step {PAGE}",
            )

    def repetitions(self) -> Iterator[Finding]:
        """Check that the loss of the piece's first samples has the same bits again, and on another rank."""
        losses: list[float] = []
        drawn: dict[str, None] = {}
        few = True
        while len(losses) < (CALLS if drawn else 2):
            try:
                loss, names = self._again(few, len(losses), other_rank=len(losses) == 1)
            except Exception:
                if not few or self.piece.size <= SAMPLES:
                    raise
                losses, few = [], False
                continue
            losses.append(loss)
            drawn |= dict.fromkeys(names)
            if len(losses) == 1:
                self._compute_other_samples()
            if loss == losses[0] or math.isnan(losses[0]):
                continue
            if len(losses) == 2 and not drawn and self._again(few, 2)[0] == losses[0]:
                yield Finding(
                    "again",
                    "training_step gives another loss for the same samples on another rank, so pieces depend on the "
                    f"layout: let it follow from the samples, parameters and buffers, not from global_rank {PAGE}",
                )
                return
            because, right = self._reason(few, list(drawn))
            yield Finding(
                "again",
                f"training_step gives another loss for the same samples when it is called again, since it {because}: "
                f"{right} {PAGE}",
            )
            return
        if drawn:
            yield Finding(
                "again",
                "training_step draws random numbers that are not those of torch's default generator "
                f"({join_names(list(drawn), 3)}). No loss has changed by them in {CALLS} calls: if one ever does, "
                f"layouts have other bits {PAGE}",
                NEVER,
            )

    def _again(self, few: bool, seed: int, other_rank: bool = False) -> tuple[float, list[str]]:
        """Return the loss of the piece, and the generators that it draws from beside torch's.

        Args:
            few: whether it is the loss of the first samples.
            seed: of Python's and numpy's generators.
            other_rank: whether it is computed as on another rank.
        """
        seed_python_and_numpy(seed)
        before = generator_states(self.module)
        self.saved.tensors.restore(parameters=False)  # parameters that the step itself changes are its state
        batch = self._few() if few else self.piece.prepared()
        with self.piece.on_other_rank() if other_rank else nullcontext():
            loss = float(self.piece.compute(batch)[0])
        self._integers = integer_buffers(self.module)
        after = generator_states(self.module)
        return loss, [name for name, state in after.items() if before.get(name) != state]

    def _compute_other_samples(self) -> None:
        """Compute other samples, since what a module keeps of the same ones may leave their loss as it is."""
        size = self.piece.size
        rows = range(size - min(SAMPLES, size // 2), size)
        if not rows:
            return
        try:
            self.saved.tensors.restore(parameters=False)
            self.piece.compute(repeated(self.piece.prepared(), size, rows))
        except Exception as error:  # BatchNorm needs two samples, for example
            LOG.debug("other samples of the first piece are not computed: %s", error)

    def _reason(self, few: bool, drawn: list[str]) -> tuple[str, str]:
        """Return why the loss of the first call is not that of another one, and what would be right."""
        right = "draw from torch's default generator, which is seeded for every piece"
        if drawn:
            names = join_names(drawn, 3)
            return f"draws random numbers that are not those of torch's default generator ({names})", right
        if changed := self.saved.attributes.changed():
            rewound = []
            for _ in range(2):
                self.saved.attributes.rewind()
                rewound.append(self._again(few, 0)[0])
            if rewound[0] == rewound[1]:
                return (
                    f"depends on a state that it changes itself ({join_names(changed, 3)}), which pieces on other "
                    "devices would not see",
                    "compute it from self.global_step, or keep it in a buffer",
                )
        return (
            "depends on something that is no part of the module, such as a generator without a seed (numpy's "
            "default_rng(), random.SystemRandom()), the clock, or a global",
            right,
        )

    def parts(self) -> Iterator[Finding]:
        """Check the loss and the integer buffers of a part of the piece that is repeated once, twice and four times."""
        size = self.piece.size
        # Parts are small, so that the passes take little time. BatchNorm may need two samples.
        for part_size in [2] if size >= 8 else [1, 2][:size]:
            integers, batches, losses = [], [], []
            try:
                # Without a graph, the passes of more samples than the piece has do not need more memory.
                with self._in_evaluation(*DROPOUT), torch.set_grad_enabled(4 * part_size <= size):
                    batch = self.piece.prepared()
                    batches = [repeated(batch, size, range(part_size), times) for times in (1, 2, 4)]
                    for each in batches:
                        losses.append(self._loss(each))
                        integers.append(integer_buffers(self.module))
                    is_sum = may_grow(losses) and grows(
                        [[self._loss(each, number) for each in batches] for number in range(SEEDS)]
                    )
            except Exception as error:  # BatchNorm needs two samples, for example
                LOG.debug("parts of the first piece are not checked: %s", error)
                continue
            if is_sum:
                yield Finding(
                    "mean",
                    f"training_step returns a loss that grows with the number of samples ({losses[0]:.4g} for "
                    f"{part_size}, {losses[1]:.4g} for {2 * part_size}): it must be the mean over the samples, as "
                    f"reduction='mean' gives it, not a sum {PAGE}",
                    ALWAYS,
                )
            yield from self._integers_differ(integers)
            return

    def _loss(self, batch: Any, number: int | None = None) -> float:
        """Return the loss of some samples, from the weights and buffers before the step."""
        self.saved.tensors.restore()
        return float(self.piece.compute(batch, number)[0])

    def _integers_differ(self, integers: list[dict[str, Tensor]]) -> Iterator[Finding]:
        """Check that integer buffers are the same after other numbers of samples."""
        first, *others = [*integers, self._integers]
        differ = [
            name
            for name, value in first.items()
            if any(name in other and not _same(value, other[name]) for other in others)
        ]
        if not differ:
            return
        owner, _, buffer = differ[0].rpartition(".")
        layer = self.module.get_submodule(owner)
        more = f" (and {join_names(differ[1:], 3)})" * (len(differ) > 1)
        yield Finding(
            "pieces",
            f"the buffer {buffer} of {owner or 'the module'} ({type(layer).__name__}){more} depends on the samples "
            "of a piece, so pieces on other devices would have other values: an integer buffer must change alike for "
            "every piece; count, or fill a queue with what training_step returns, in on_train_batch_end, per step "
            f"{PAGE}",
        )

    def mean(self) -> Iterator[Finding]:
        """Check that the loss of some samples is the mean of the losses of their parts, by samples or by weights."""
        size = self.piece.size
        rows = range(min(size, PARTS))
        if len(rows) < 2:
            return
        if any(isinstance(each, _BatchNorm) and each.running_mean is None for each in self.module.modules()):
            yield from self._mixing(rows)
            return
        batch, count, moves = self.piece.prepared(), min(BLOCKS, len(rows)), False
        borders = [number * len(rows) // count for number in range(count + 1)]
        blocks = [range(*each) for each in pairwise(borders)]

        def compute(rows: range, times: int, number: int | None) -> tuple[float, float | None]:
            self.saved.tensors.restore()
            if moves:
                self._move_parameters()
            loss, weight = self.piece.compute(repeated(batch, size, rows, times), number)
            return float(loss), weight

        losses = Losses(compute, HALF if self.piece.half else MIN_DIFFERENCE)
        with self._in_evaluation(*DROPOUT, _BatchNorm), torch.no_grad(), WeightedMeans() as means:
            if losses.are_almost_equal(blocks):  # of a network whose last layer begins with zeros, for example
                moves = True
                losses.known.clear()
            wrong = losses.differ_from_mean(blocks, rows)
            other_mean = wrong and not losses.weighted and losses.follow_other_mean(borders)
            if wrong and losses.are_random(rows, self.piece.number + 1):
                return
        self.is_mean = not wrong and not means.name
        if losses.weighted and wrong:
            yield Finding(
                "mean",
                "the loss of some samples is not the mean of the losses of their parts by the weight that "
                f"training_step returns: the weight must be the denominator of the loss {PAGE}",
            )
        elif not losses.weighted and (other_mean or (means.name and not wrong)):
            what = means.name or "of some samples is a weighted mean of the losses of their parts"
            yield Finding(
                "mean",
                f"training_step returns a mean over something else than samples (its loss {what}), so the gradient "
                "depends on the pieces: return {'loss': loss, 'weight': its denominator}, such as weight[y].sum() or "
                f"(y != ignore_index).sum() {PAGE}",
            )
        elif wrong:  # in training mode, layers may normalise over samples, as BatchNorm does
            losses.known.clear()
            with self._in_evaluation(), torch.no_grad():
                wrong = losses.differ_from_mean(blocks, rows)
            mixing = list(self._mixing(rows)) if wrong else []
            yield from mixing
            if wrong and not mixing:
                yield Finding(
                    "samples",
                    "the loss of a sample depends on the other samples of its piece (contrastive, or a ratio of sums), "
                    "so the result is that of this number of pieces, and other numbers of pieces give another: give "
                    f"pieces=1, on one device, or return a mean over a mask with its 'weight' {PAGE}",
                    NEVER,
                )

    def _move_parameters(self) -> None:
        """Add small random numbers to the parameters, the same in each call."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter, _ in self.saved.tensors.parameters:
                if parameter.is_floating_point():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))

    def _mixing(self, rows: range) -> Iterator[Finding]:
        """Check that no layer's output for a sample depends on other samples in evaluation."""
        part = rows[: max(len(rows) // 2, 2)]  # a normalisation needs two
        with self._in_evaluation(), torch.no_grad():
            batch, number = self.piece.prepared(), self.piece.number
            together, otherwise, apart = (
                self._outputs(repeated(batch, self.piece.size, which), seed)
                for which, seed in ((rows, number), (rows, number + 1), (part, number))
            )
        share = HALF if self.piece.half else MIN_DIFFERENCE
        for (name, whole), (_, other), (_, some) in zip(together, otherwise, apart, strict=False):
            if len(whole) != len(rows) or some.shape != (len(part), *whole.shape[1:]) or not _close(whole, other, 0):
                continue  # it has no row for each sample, or is random
            if not _close(whole[: len(part)], some, share):
                yield Finding(
                    "samples",
                    f"in evaluation, the output of {name} for a sample depends on the other samples of its batch: "
                    "compute over the dimensions from 1 on, never over dimension 0; a normalisation over the batch "
                    f"needs running statistics (track_running_stats=True) {PAGE}",
                    NEVER,
                )
                return

    def _outputs(self, batch: Any, number: int) -> list[tuple[str, Tensor]]:
        """Return name and output of each layer, in the order in which `training_step` computes them."""
        seen: list[tuple[str, Tensor]] = []

        def see(name: str) -> Any:
            def hook(layer: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor) and output.ndim:
                    seen.append((f"{name} ({type(layer).__name__})" if name else "forward", output.detach().clone()))

            return hook

        handles = [layer.register_forward_hook(see(name)) for name, layer in self.module.named_modules()]
        try:
            self._loss(batch, number)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def iterators(self) -> Iterator[Finding]:
        """Check that the passes took nothing from an iterator that the module has: it is a state of each process."""
        if names := peeked_iterators(self.module):
            yield Finding(
                "again",
                f"training_step takes values from an iterator that the module keeps ({join_names(names, 3)}), so each "
                "process takes others, and a resumed run begins it anew: let the data set return them with its "
                f"samples, or choose them by the number of the step {PAGE}",
            )


def not_in_proportion(loss: Tensor, module: nn.Module) -> list[str]:
    """Return the parameters whose gradient is not 65,536 times as large when the loss is.

    Large parameters but the first are left out, to save memory: what they have behind them, small ones have, too. So
    are losses in float16, whose gradients would overflow.
    """
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    chosen = [pair for number, pair in enumerate(trained) if not number or pair[1].numel() <= SMALL]
    if torch.is_autocast_enabled(loss.device.type) and torch.get_autocast_dtype(loss.device.type) is torch.float16:
        return []
    parameters = [parameter for _, parameter in chosen if parameter.dtype is not torch.float16]
    low, high = (
        torch.autograd.grad(loss * factor, parameters, retain_graph=True, allow_unused=True) for factor in FACTORS
    )
    ratio, names = FACTORS[1] / FACTORS[0], {id(parameter): name for name, parameter in chosen}
    pairs = {
        names[id(parameter)]: (one, other / ratio)
        for parameter, one, other in zip(parameters, low, high, strict=True)
        if one is not None and one.layout is torch.strided and one.isfinite().all() and other.isfinite().all()
    }
    largest = {name: float(one.abs().max()) for name, (one, _) in pairs.items() if one.numel()}
    rounding = NOISE * max(largest.values(), default=0.0)
    return [
        name
        for name, size in largest.items()
        if float((pairs[name][1] - pairs[name][0]).abs().max()) > TOLERANCE * max(size, rounding)
    ]


def integer_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's buffers that are integers, by name."""
    return {
        name: buffer.clone()
        for name, buffer in module.named_buffers()
        if not (buffer.is_floating_point() or buffer.is_complex())
    }


def _same(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and torch.equal(value, other)


def _close(value: Tensor, other: Tensor, share: float) -> bool:
    """Check that no element of two tensors differs by more than a share of the largest."""
    return float((value.double() - other.double()).abs().max()) <= share * float(value.double().abs().max())
