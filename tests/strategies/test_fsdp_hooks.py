"""`strategy=fsdp`: what hooks do with weights and gradients has the effect that it has on one device, or is refused."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_fits import same_bits
from strategies.sharded_runs import Classifier, acting, by_day, rank_fit, rank_fits_of, refusals
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK, LARGE = "net.blocks.1.", "net.blocks.0.1.weight"


class ChangesGradients(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class AssignsGradients(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad = None if name.startswith(BLOCK) else parameter.grad * 0.5


class DropsGradients(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            if name.startswith(BLOCK):
                parameter.grad = None


class AssignsWhileItClips(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 3


class ChangesThoseOfTheOptimizer(Classifier):
    assigns = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if self.assigns:
                    parameter.grad = parameter.grad * 0.5
                else:
                    parameter.grad.mul_(0.5)


class AssignsThoseOfTheOptimizer(ChangesThoseOfTheOptimizer):
    assigns = True


class MakesItsOptimizerFirst(Classifier):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.optimizer = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.optimizer


class SavesWithinAChange(Classifier):
    def on_train_epoch_start(self) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.whole_weights(), torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1.5)
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "within.ckpt")
            self.get_parameter(LARGE).mul_(1.5)


class SavesInAnEvaluation(Classifier):
    """Rank zero alone computes after the state was gathered, and after it was loaded."""

    def on_validation_end(self) -> None:
        strategy: Any = self.trainer.strategy
        images = torch.ones(1, 1, 12, 12)
        before = self(images)
        state = strategy.broadcast({n: v.clone() for n, v in strategy.lightning_module_state_dict().items()})
        if self.trainer.is_global_zero:
            assert torch.equal(self(images), before)
        with torch.no_grad():
            self.get_parameter(LARGE).mul_(2)
        self.load_state_dict(state)
        if self.trainer.is_global_zero:
            assert torch.equal(self(images), before)


class ChangesWeightsBeforeTheStep(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.whole_weights(), torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


class StepsTwice(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        optimizer.step(closure=lambda: None)


class Ascends(torch.optim.SGD):
    """Computes the gradient of weights that it has moved, and calls its closure twice for it."""

    works_on = "tensors"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        before = [each.clone() for each in parameters]
        for each in parameters:
            if each.grad is not None:
                each.add_(each.grad)
        loss = closure()
        for each, value in zip(parameters, before, strict=True):
            each.copy_(value)
        super().step()
        return loss


class AscendsByElement(Ascends):
    works_on = "elements"


class AscendsFirst(Classifier):
    def configure_optimizers(self) -> Any:
        return {"tensors": Ascends, "elements": AscendsByElement}[self.kind](self.parameters(), lr=0.1)


class ComputesBlocksAgain(Classifier):
    """Calls each block once more in its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        net: Any = self.net
        x = net.patches(x.flatten(1))
        for block in net.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        result: Tensor = net.head(x)
        return result


SAME: dict[str, tuple[type[Classifier], str, dict[str, Any]]] = {
    "changed": (ChangesGradients, "sgd", {}),
    "assigned": (AssignsGradients, "adamw", {"gradient_clip_val": 0.1}),
    "dropped": (DropsGradients, "muon", {"gradient_clip_val": 0.1}),
    "while it clips": (AssignsWhileItClips, "sgd", {"gradient_clip_val": 0.1}),
    "values": (AssignsWhileItClips, "sgd", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "of owners": (ChangesThoseOfTheOptimizer, "muon", {"gradient_clip_val": 0.1}),
    "assigned to the optimizer's": (AssignsThoseOfTheOptimizer, "adamw", {"gradient_clip_val": 0.1}),
    "assigned to owners'": (AssignsThoseOfTheOptimizer, "muon", {"gradient_clip_val": 0.1}),
    "an early optimizer": (MakesItsOptimizerFirst, "adagrad", {}),
    "an early one with owners": (MakesItsOptimizerFirst, "muon", {}),
    "saved within": (SavesWithinAChange, "sgd", {}),
    "in an evaluation": (SavesInAnEvaluation, "sgd", {"limit_val_batches": 1.0}),
    "weights before the step": (ChangesWeightsBeforeTheStep, "muon", {}),
    "blocks again": (ComputesBlocksAgain, "sgd", {}),
    "passes twice": (AscendsFirst, "tensors", {}),
    "passes twice by element": (AscendsFirst, "elements", {"pieces": 3}),
}


# those in which the hooks change nothing in the end
SAME_AS_WITHOUT = {"an early optimizer", "an early one with owners", "in an evaluation", "blocks again"}


@cache
def without_hooks(optimizer: str, **options: Any) -> dict[str, Tensor]:
    """Return the weights of a fit on one device."""
    return rank_fit(0, Classifier("mixer", optimizer), 1, **options).state


# of each kind one that `make quick` runs
FEW = ("assigned", "dropped", "in an evaluation", "weights before the step")


@pytest.mark.parametrize("name", by_day(SAME, FEW))
def test_what_hooks_do_has_the_same_effect_as_on_one_device(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Check that what hooks do on two ranks has the effect that it has on one device, and what that is."""
    kind, optimizer, options = SAME[name]
    module, folders = kind("mixer", optimizer), (tmp_path / "one", tmp_path / "two")
    one, two = (
        rank_fits_of(ranks, module, world, default_root_dir=folder, **options)
        for world, folder in zip((1, 2), folders, strict=True)
    )
    assert same_bits(one, two)
    plain = without_hooks("sgd" if kind is AscendsFirst else optimizer, **options)
    assert same_bits(one, plain) == (name in SAME_AS_WITHOUT), "the control"
    if kind is SavesWithinAChange:
        states = [torch.load(each / "within.ckpt", weights_only=True)["state_dict"] for each in folders]
        assert same_bits(*states)
        assert not same_bits(one, *states)


# --- what is refused ---


def assign_both(module: Any, optimizer: Any) -> None:
    for parameter in [*module.parameters(), *optimizer.param_groups[0]["params"]]:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def of_parameters(change: Any) -> Any:
    """Return an action that changes each parameter that has a gradient."""

    def action(module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    change(parameter)

    return action


class Penalizes(Classifier):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weights = [each for each in self.parameters() if each.ndim == 2]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(each.square().mean() for each in self.weights)


class TrainsSomethingElse(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(7, 5))])


STEP = "on_before_optimizer_step"
GRADIENT = "a hook has changed the gradient of net.blocks.0.1.weight, of which Muon"
WEIGHTS = "a hook has changed the weights of net.blocks.0.1.weight, of which Muon"
REFUSED: dict[str, tuple[Any, str]] = {
    "changed": (lambda: ChangesGradients("mixer", "muon"), f"strategy=fsdp: {GRADIENT}"),
    "assigned": (
        lambda: acting(STEP, of_parameters(lambda p: setattr(p, "grad", p.grad * 0.5)), optimizer="muon"),
        GRADIENT,
    ),
    "data of gradients": (
        lambda: acting(STEP, of_parameters(lambda p: p.grad.data.mul_(0.9)), optimizer="muon"),
        GRADIENT,
    ),
    "both": (
        lambda: acting(STEP, assign_both),
        "have set the gradient of net.blocks.0.1.weight both in the module and in",
    ),
    "weights": (lambda: acting(STEP, of_parameters(lambda p: p.mul_(0.9)), optimizer="muon"), WEIGHTS),
    "their data": (lambda: acting(STEP, of_parameters(lambda p: p.data.mul_(0.9)), optimizer="muon"), WEIGHTS),
    "clips by itself": (
        lambda: acting(STEP, lambda module, *_: nn.utils.clip_grad_norm_(module.parameters(), 0.1)),
        "linalg_vector_norm() sums a part of weights or gradients as if it were the whole: do so",
    ),
    "penalizes": (lambda: Penalizes("mixer"), "training_step uses net.blocks."),
    "trains something else": (
        lambda: TrainsSomethingElse("mixer"),
        "SGD has a tensor of shape [7, 5] that is no parameter of the module: make the",
    ),
    "steps twice": (
        lambda: StepsTwice("mixer", "muon"),
        "Muon steps twice with one gradient, of which its owners have no more copies: step once",
    ),
    "moves inside": (
        lambda: acting("on_validation_end", lambda module: module.to("cpu")),
        "net.blocks.0.1.weight was cut within trainer.strategy.whole_weights(), or in",
    ),
    "asks for a state inside": (
        lambda: acting("on_validation_end", lambda module: module.net.state_dict()),
        "state_dict() of a module would have parts of the weights: call",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_have_no_effect_is_refused(ranks: Ranks, name: str) -> None:
    make, message = REFUSED[name]
    for text in refusals(ranks, make(), limit_val_batches=1.0):
        assert message in text


def test_one_rank_that_calls_a_block_outside_of_a_step_is_refused(ranks: Ranks) -> None:
    """It would wait for the others."""

    def call(module: Any) -> None:
        if module.trainer.is_global_zero:
            module.net(torch.zeros(1, 1, 12, 12))

    with pytest.raises(UserError, match=r"net.blocks.0 of the module is called outside of a step and an evaluation"):
        rank_fits_of(ranks, acting("on_train_epoch_end", call), 2)
