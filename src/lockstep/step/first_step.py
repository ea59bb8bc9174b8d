"""Trial passes before a run's first step: they find a `training_step` that no layout could compute alike.

The passes use this process's first piece. They leave no trace: weights, buffers, Python attributes, random generators
and logged values are restored.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lockstep.arithmetic.seeding import seed_python_and_numpy
from lockstep.errors import StepRefused
from lockstep.step.batch import MicroBatch, repeated
from lockstep.step.module_state import SavedTensors, generator_states, peeked_iterators
from lockstep.step.parameters import not_in_proportion
from lockstep.step.passes import Step, StepHook
from lockstep.step.trial import trial_passes
from lockstep.text import join_names

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORMS = (_BatchNorm,)
LOG = logging.getLogger("lockstep")
RULES = "(lockstep docs module-rules)"
SEEDS = 8  # of the passes that show whether a loss is a sum, since its random numbers change it, too
SAMPLES = 8  # of the piece, in the repeated passes: they take little time, and what changes between two calls shows
CALLS = 8  # of a step that draws random numbers of Python or numpy, until its loss differs
MIN_T = 4.0  # the t statistic of a growth that is no noise
MIN_RATIO, MAX_RATIO = 1.6, 5.0  # of the growth from two parts to four and the growth from one to two
MEANS = 8  # pieces of a process whose loss is compared with those of its parts
PARTS = 32  # samples of the piece whose parts are compared; more would take too much time
MIN_DIFFERENCE = 1e-4  # of a loss and the mean of its parts, as a share of them; in 16 bits HALF
HALF = 0.03
BLOCKS = 8  # parts of these samples
MIN_GROWTH = 0.25  # from one part of the piece to two, as a share of the loss; below it, the loss may be noise


class FirstStepCheck(StepHook):
    """Check before a new run's first step what a module must respect so that its steps can be cut into pieces.

    With exact=true, the loss of a piece's samples must have the same bits when it is computed again. The loss must be a
    mean, not a sum: of a few samples that are repeated twice and four times, a mean stays the same, and a sum grows in
    proportion. BatchNorm's statistics of them are the same. Integer buffers must not depend on the number of samples.

    A run that continues from a checkpoint is not checked, nor is a process without a sample, nor a network
    whose passes communicate (stages, SyncBatchNorm).

    Args:
        compiled: whether torch compiles the networks. These passes run them uncompiled.

    Attributes:
        done: whether the check has been made, or is left out.
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.done = False

    def before_step(self, step: Step) -> None:
        """Run the trial passes before step 0.

        Raises:
            StepRefused: the module breaks one of the rules.
        """
        if self.done or step.number:
            return
        self.done = True
        several = step.passes.gradients.world_size > 1
        if step.strategy.passes_communicate or (
            several and any(isinstance(m, nn.SyncBatchNorm) for m in step.module.modules())
        ):
            LOG.debug("the first step is not checked, since a pass needs other processes")
            return
        with step.strategy.whole_weights():  # every process enters it, also one without a sample
            if step.batch.micro_batches:
                self._check(step, step.batch.micro_batches)

    def _check(self, step: Step, micro_batches: Sequence[MicroBatch]) -> None:
        """Run the trial passes of the first piece, and of some more that may have samples with another weight."""
        with trial_passes(step, self.compiled) as tensors:
            trial = _Trial(step, micro_batches[0], tensors)
            if step.data.layout.exact or step.data.layout.pieces > 1:
                trial.check_parameters()  # before all others, since some modules set parameters in the first call
            if step.data.layout.pieces > 1:
                trial.check_backward()
            if step.data.layout.exact:
                trial.check_repeats()
            trial.check_parts()
            if step.data.layout.pieces > 1 and trial.check_mean():
                all(_Trial(step, each, tensors).check_mean() for each in micro_batches[1:MEANS])
            trial.check_iterators()


class _Trial:
    """The trial passes of one piece.

    Args:
        step: the step.
        micro_batch: the piece.
        tensors: see `trial_passes`.
    """

    def __init__(self, step: Step, micro_batch: MicroBatch, tensors: SavedTensors) -> None:
        self.step, self.micro_batch, self.tensors = step, micro_batch, tensors
        self._integers: dict[str, Tensor] = {}  # after the whole piece; see `integer_buffers`

    def loss(self, batch: Any, piece: int | None = None) -> float:
        """Return the loss of a prepared batch, from the weights and buffers before the step.

        Args:
            batch: the batch.
            piece: its random numbers are those of the piece with this number; None: of the micro-batch's piece.
        """
        self.tensors.restore()
        return float(self.step.trial_loss(batch, self.micro_batch, piece))

    def check_repeats(self) -> None:
        """Check that the loss of the piece's first samples has the same bits again.

        Python's and numpy's generators have another state in each call.

        Raises:
            StepRefused: it has not.
        """
        losses: list[float] = []
        draws, whole = False, self.micro_batch.size <= SAMPLES
        while len(losses) < (CALLS if draws else 2):
            seed_python_and_numpy(len(losses))
            before = generator_states(self.step.module)
            try:
                self.tensors.restore(parameters=False)  # parameters that the step itself changes are its state
                batch = self.step.prepared(self.micro_batch)
                if not whole:
                    batch = repeated(batch, self.micro_batch.size, range(SAMPLES))
                losses.append(float(self.step.trial_loss(batch, self.micro_batch)))
                if len(losses) == 1:
                    self._pass_of_other_samples()
            except Exception as error:
                if whole:  # the step itself raises it again, with its own message
                    LOG.debug("the first step is not checked, since it fails: %s", error)
                    return
                losses, whole = [], True
                continue
            self._integers = integer_buffers(self.step.module)
            draws = draws or generator_states(self.step.module) != before
            if losses[-1] == losses[0] or math.isnan(losses[0]):
                continue
            because = (
                "it draws random numbers that are not those of torch's default generator"
                if draws
                else "it depends on a state that it changes itself, which pieces on other devices would not see"
            )
            raise StepRefused(
                f"exact=true: training_step gives another loss for the same samples when it is called again, since "
                f"{because}: draw from torch's default generator, which is seeded for every piece, and keep no state "
                f"beside parameters and buffers {RULES}"
            )
        if draws and self.step.trainer.is_global_zero:
            LOG.warning(
                "exact=true: training_step draws random numbers that are not those of torch's default generator. "
                f"No loss has changed by them in {CALLS} calls: if one ever does, layouts have other bits {RULES}"
            )

    def _pass_of_other_samples(self) -> None:
        """Compute other samples, since what a module keeps of the same ones may leave their loss as it is."""
        size = self.micro_batch.size
        rows = range(size - min(SAMPLES, size // 2), size)
        if not rows:
            return
        try:
            self.tensors.restore(parameters=False)
            self.step.trial_loss(repeated(self.step.prepared(self.micro_batch), size, rows), self.micro_batch)
        except Exception as error:  # BatchNorm needs two samples, for example
            LOG.debug("other samples of the first piece are not computed: %s", error)

    def check_parameters(self) -> None:
        """Check that a pass leaves the trained parameters as they are.

        Those without a gradient, such as a teacher's, follow the rule for buffers. All are changed before, each by
        another factor, because a copy of other parameters would not move at first.

        Raises:
            StepRefused: a pass changes parameters.
        """
        size = self.micro_batch.size
        try:
            self.tensors.restore()
            batch = self.step.prepared(self.micro_batch)
            if size > SAMPLES:
                batch = repeated(batch, size, range(SAMPLES))
            self.tensors.scale_parameters()
            self.step.trial_loss(batch, self.micro_batch)
        except Exception as error:
            LOG.debug("it is not checked whether a pass changes parameters: %s", error)
            return
        changed = {id(each) for each in self.tensors.other_than_scaled()}
        named = self.step.module.named_parameters()
        names = [name for name, each in named if id(each) in changed and each.requires_grad]
        if not names:
            return
        wrong = (
            f"training_step changes parameters itself ({join_names(names, 3)}), once for each piece of a device, so "
            f"they depend on the layout: change them between the steps, in on_train_batch_end {RULES}"
        )
        self._name(wrong)

    def check_mean(self) -> bool:
        """Check that the loss of some samples is the mean of the losses of their parts. Return whether it is known.

        It is the mean by samples, or by the weights beside the losses.

        Raises:
            StepRefused: with exact=true, it is another mean.
        """
        size = self.micro_batch.size
        count = min(size, PARTS)
        batch_norms = [each for each in self.step.module.modules() if isinstance(each, BATCH_NORMS)]
        if count < 2 or any(each.running_mean is None for each in batch_norms):
            return False
        borders = [number * count // min(BLOCKS, count) for number in range(min(BLOCKS, count) + 1)]
        blocks = [range(*each) for each in pairwise(borders)]
        try:
            with self._without_dropout(BATCH_NORMS), torch.no_grad(), WeightedMeans() as means:
                losses = Losses(self, self.step.prepared(self.micro_batch))
                if losses.are_almost_equal(blocks):  # of a network whose last layer begins with zeros, for example
                    losses.move = True
                wrong = losses.differ_from_mean(blocks, range(count))
                other_mean = wrong and not losses.weighted and losses.follow_other_mean(borders)
                is_random = wrong and losses.are_random(range(count))
        except Exception as error:  # some modules need larger batches
            LOG.debug("it is not checked whether the loss is a mean: %s", error)
            return False
        if is_random:
            LOG.debug("it is not checked whether the loss is a mean, since it is random")
        elif losses.weighted and wrong:
            self._name(
                "the loss of some samples is not the mean of the losses of their parts by the weight that "
                f"training_step returns: the weight must be the denominator of the loss {RULES}"
            )
        elif not losses.weighted and (other_mean or (means.name and not wrong)):
            what = means.name or "of some samples is a weighted mean of the losses of their parts"
            self._name(
                f"training_step returns a mean over something else than samples (its loss {what}), so the gradient "
                "depends on the pieces: return {'loss': loss, 'weight': its denominator}, such as weight[y].sum() or "
                f"(y != ignore_index).sum() {RULES}"
            )
        elif wrong and self.step.trainer.is_global_zero and self._differs_in_evaluation(losses, blocks, range(count)):
            LOG.warning(
                "the loss of a sample depends on the other samples of its piece (contrastive, or a ratio of sums), so "
                f"the result is that of pieces={self.step.data.layout.pieces}, and other numbers of pieces give "
                f"another: give pieces=1, on one device, or return a mean over a mask with its 'weight' {RULES}"
            )
        return not wrong and not means.name

    def _differs_in_evaluation(self, losses: "Losses", blocks: list[range], whole: range) -> bool:
        """Check that losses are no mean in evaluation mode either.

        In training mode, layers may normalise over samples, as BatchNorm does; that they see a piece is known.
        """
        modes = [(layer, layer.training) for layer in self.step.module.modules()]
        losses.known.clear()
        try:
            with torch.no_grad():
                self.step.module.eval()
                return losses.differ_from_mean(blocks, whole)
        except Exception as error:
            LOG.debug("it is not checked whether the loss is a mean: %s", error)
            return False
        finally:
            for layer, training in modes:
                layer.training = training

    def check_iterators(self) -> None:
        """Check that the passes took nothing from an iterator that the module has: it is a state of each process.

        Raises:
            StepRefused: with exact=true, they have.
        """
        names = peeked_iterators(self.step.module)
        if not names or not (self.step.data.layout.exact or self.step.data.layout.pieces > 1):
            return
        self._name(
            f"training_step takes values from an iterator that the module keeps ({join_names(names, 3)}), so each "
            "process takes others, and a resumed run begins it anew: let the data set return them with its samples, or "
            f"choose them by the number of the step {RULES}"
        )

    def _name(self, wrong: str) -> None:
        """Refuse what is wrong with exact=true. Without, say so in a line."""
        if self.step.data.layout.exact:
            raise StepRefused(f"exact=true: {wrong}")
        if self.step.trainer.is_global_zero:
            LOG.warning(wrong)

    def check_backward(self) -> None:
        """Check that gradients are in proportion to the loss, which the weight of a piece multiplies.

        Raises:
            StepRefused: they are not.
        """
        try:
            self.tensors.restore()
            batch = self.step.prepared(self.micro_batch)
            if self.micro_batch.size > SAMPLES:
                batch = repeated(batch, self.micro_batch.size, range(SAMPLES))
            names = not_in_proportion(self.step.trial_loss(batch, self.micro_batch, graph=True), self.step.module)
        except Exception as error:  # of the step itself, or reentrant checkpoints, which allow no such pass
            LOG.debug("it is not checked whether gradients are in proportion to the loss: %s", error)
            return
        if not names:
            return
        wrong = (
            f"the gradient of {join_names(names, 2)} is not in proportion to the loss, so it depends on the weight of "
            "a piece: let no hook and no autograd.Function clip, clamp or normalise gradients in a backward pass, but "
            f"on_before_optimizer_step those of the whole step {RULES}"
        )
        if self.step.data.layout.exact:
            raise StepRefused(f"exact=true: {wrong}")
        if self.step.trainer.is_global_zero:
            LOG.warning(wrong)

    @contextmanager
    def _without_dropout(self, others: tuple[type[nn.Module], ...] = ()) -> Iterator[None]:
        """Return a context in which dropout layers do nothing, since they would hide the growth of a loss.

        Args:
            others: further kinds of layers that are in evaluation mode.
        """
        kinds: tuple[type[nn.Module], ...] = (*DROPOUT, *others)
        layers = [layer for layer in self.step.module.modules() if isinstance(layer, kinds) and layer.training]
        for layer in layers:
            layer.training = False
        try:
            yield
        finally:
            for layer in layers:
                layer.training = True

    def check_parts(self) -> None:
        """Check the loss and the integer buffers of a part of the piece that is repeated once, twice and four times.

        Raises:
            StepRefused: the loss is a sum, or an integer buffer depends on the samples.
        """
        size = self.micro_batch.size
        # Parts are small, so that the passes take little time. BatchNorm may need two samples.
        for part_size in [2] if size >= 8 else [1, 2][:size]:
            # Without a graph, the passes of more samples than the piece has do not need more memory.
            with self._without_dropout(), torch.set_grad_enabled(4 * part_size <= size):
                try:
                    batch = self.step.prepared(self.micro_batch)
                    batches = [repeated(batch, size, range(part_size), times) for times in (1, 2, 4)]
                    losses, integers = [], []
                    for each in batches:
                        losses.append(self.loss(each))
                        integers.append(integer_buffers(self.step.module))
                    is_sum = may_grow(losses) and grows(
                        [[self.loss(each, piece) for each in batches] for piece in range(SEEDS)]
                    )
                except Exception as error:  # BatchNorm needs two samples, for example
                    LOG.debug("parts of the first piece are not checked: %s", error)
                    continue
            if is_sum:
                raise StepRefused(
                    f"training_step returns a loss that grows with the number of samples ({losses[0]:.4g} for "
                    f"{part_size}, {losses[1]:.4g} for {2 * part_size}): it must be the mean over the samples, as "
                    f"reduction='mean' gives it, not a sum {RULES}"
                )
            self._check_integers(integers)
            return

    def _check_integers(self, integers: list[dict[str, Tensor]]) -> None:
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
        layer = self.step.module.get_submodule(owner)
        more = f" (and {join_names(differ[1:], 3)})" * (len(differ) > 1)
        wrong = (
            f"the buffer {buffer} of {owner or 'the module'} ({type(layer).__name__}){more} depends on the samples "
            "of a piece, so pieces on other devices would have other values"
        )
        right = (
            "an integer buffer must change alike for every piece; count, or fill a queue with what training_step "
            f"returns, in on_train_batch_end, per step {RULES}"
        )
        self._name(f"{wrong}: {right}")


class WeightedMeans(TorchFunctionMode):
    """Inside the `with` block, notices torch's losses that are a mean by class weights.

    Samples may lack a rare class, so that their losses do not show it.

    Attributes:
        name: what is noticed, or "".
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch. Note the weights of a weighted mean."""
        kwargs = kwargs or {}
        if function in (F.cross_entropy, F.nll_loss):
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            if weight is not None and kwargs.get("reduction", "mean") == "mean" and bool((weight != weight[0]).any()):
                self.name = f"is {function.__name__}(weight=...), which divides by the weights"
        return function(*args, **kwargs)


class Losses:
    """The losses of some samples of a piece, each computed once.

    Args:
        trial: the trial passes.
        batch: the prepared batch of the piece.

    Attributes:
        known: by samples, the loss and the weight beside it. Without a weight it is the number of samples.
        weighted: whether `training_step` returns weights.
        move: whether the parameters are moved a little, at random.
    """

    def __init__(self, trial: _Trial, batch: Any) -> None:
        self._trial, self._batch = trial, batch
        self.known: dict[range, tuple[float, float]] = {}
        self.weighted = self.move = False
        precision = str(trial.step.trainer.precision)
        self._smallest = 0.0
        self._share = HALF if "16" in precision else MIN_DIFFERENCE

    def of(self, rows: range, piece: int | None = None, times: int = 1) -> tuple[float, float]:
        """Return the loss of samples, and its weight.

        Args:
            rows: the samples.
            piece: see `_Trial.loss`; given, the loss is computed anew.
            times: how often they stand in the batch.
        """
        usual = piece is None and times == 1
        if usual and rows in self.known:
            return self.known[rows]
        step, micro_batch, tensors = self._trial.step, self._trial.micro_batch, self._trial.tensors
        tensors.restore()
        if self.move:
            tensors.move_parameters()
        numbers = step.trial(repeated(self._batch, micro_batch.size, rows, times), micro_batch, piece)
        self.weighted = "weight" in numbers
        weight = float(numbers["weight"]) * micro_batch.size if self.weighted else float(len(rows))
        result = (float(numbers["loss"]) if weight else 0.0), weight
        if usual:
            self.known[rows] = result
        return result

    def _set_smallest(self, whole: range) -> None:
        """Set the smallest difference between losses that is no rounding, which another order of samples shows."""
        rounding = abs(self.of(whole)[0] - self.of(whole[::-1])[0])
        scale = max(abs(loss) for loss, _ in self.known.values() if math.isfinite(loss))
        self._smallest = max(self._share * scale, 20 * rounding, 1e-12)

    def are_almost_equal(self, blocks: Sequence[range]) -> bool:
        """Check whether samples have almost the same loss, so that each mean of them is the same."""
        losses = [self.of(rows)[0] for rows in blocks]
        equal = max(losses) - min(losses) <= 10 * MIN_DIFFERENCE * max(map(abs, losses))
        if equal:
            self.known.clear()
        return equal

    def are_random(self, rows: range) -> bool:
        """Check whether a loss depends on random numbers of the piece."""
        return abs(self.of(rows)[0] - self.of(rows, self._trial.micro_batch.piece + 1)[0]) > self._smallest

    def differ_from_mean(self, blocks: Sequence[range], whole: range) -> bool:
        """Check whether the loss of some samples is not the mean of the losses of their parts."""
        loss, weight = self.of(whole)
        if not (math.isfinite(loss) and weight):
            return False
        expected = sum(self.of(rows)[0] * self.of(rows)[1] for rows in blocks) / weight
        self._set_smallest(whole)
        return not abs(loss - expected) <= self._smallest  # that of a part may be nan, a mean over nothing

    def follow_other_mean(self, borders: Sequence[int]) -> bool:
        """Check whether losses are those of a mean by unknown weights, which follow from those of neighbours.

        Such a mean of samples that are repeated is the same. Three neighbouring parts, together in pairs, give the
        weights; the loss of all three follows.
        """
        whole = range(borders[0], borders[-1])
        if abs(self.of(whole)[0] - self.of(whole, times=2)[0]) > self._smallest:
            return False
        answers = [self._follow(*cuts) for cuts in combinations(borders, 4)]
        known = [answer for answer in answers if answer is not None]
        return len(borders) < 4 or sum(known) > 0.8 * len(known)

    def _follow(self, start: int, first: int, second: int, stop: int) -> bool | None:
        """Check the losses of three neighbouring parts: whether they are those of one mean; None if they can't say."""
        parts = range(start, first), range(first, second), range(second, stop), range(start, second), range(first, stop)
        a, b, c, ab, bc = (self.of(rows)[0] for rows in parts)
        abc, smallest = self.of(range(start, stop))[0], self._smallest
        if not min(abs(ab - b), abs(ab - a), abs(bc - b), abs(bc - c)) > 10 * smallest:  # also if one is nan
            return None
        weight_a, weight_c = (ab - b) / (a - ab), (bc - b) / (c - bc)  # that of b is 1
        if not (weight_a > 0 and weight_c > 0):
            return False
        expected = (weight_a * a + b + weight_c * c) / (weight_a + 1 + weight_c)
        # The differences of losses that are nearly equal say little about the weights.
        error = smallest * (1 + abs(a - abc) / abs(a - ab) + abs(c - abc) / abs(c - bc))
        return abs(expected - abc) <= error


def may_grow(losses: list[float]) -> bool:
    """Check whether `grows` may be true; it is false for most modules, which then need only one pass of each size."""
    one, two, four = losses
    return abs(two - one) > MIN_GROWTH / 2 * abs(one) and (four - two) * (two - one) > 0


def grows(losses: list[list[float]]) -> bool:
    """Check whether losses of 1, 2 and 4 equal parts grow with them, in proportion or faster, beside a constant.

    Args:
        losses: for each seed the three losses. The growth must be clear beside the noise between seeds.
    """
    one, two, four = np.array(losses).T
    first, second = two - one, four - two
    if not np.isfinite(losses).all() or abs(first.mean()) <= MIN_GROWTH * abs(one.mean()):
        return False
    if any(abs(growth.mean()) * len(losses) ** 0.5 < MIN_T * growth.std(ddof=1) for growth in (first, second)):
        return False
    # 2 for a sum over the samples, 4 for a sum over pairs of them
    return bool(MIN_RATIO <= second.mean() / first.mean() <= MAX_RATIO)


def integer_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's buffers that are integers, by name."""
    return {
        name: buffer.clone()
        for name, buffer in module.named_buffers()
        if not (buffer.is_floating_point() or buffer.is_complex())
    }


def _same(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and torch.equal(value, other)
