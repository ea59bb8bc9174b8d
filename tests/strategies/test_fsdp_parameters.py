"""`strategy=fsdp`: what hangs on a parameter, and what sees a part of one: as on one device, or refused in one line."""

import copy
import io
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from rank_fits import same_bits
from strategies.sharded_runs import Classifier, Mixer, acting, by_day, rank_fit, rank_fits_of
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.arithmetic.exact_sum import SMALL
from lockstep.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")

LARGE = "net.blocks.0.1.weight"  # 521 x 33


# --- what has the bits of one device ---


class Attacks(Classifier):
    """Trains on images that the gradient has changed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        gradient = torch.autograd.grad(F.cross_entropy(self(x), batch[1]), x)[0]
        return F.cross_entropy(self(batch[0] + 0.1 * gradient.sign()), batch[1])


class AttacksBackward(Classifier):
    """The same by `backward`, which gives no parameter a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        F.cross_entropy(self(x), batch[1]).backward(inputs=[x])
        assert x.grad is not None
        return F.cross_entropy(self(batch[0] + 0.1 * x.grad.sign()), batch[1])


class GradientPenalty(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(self(x), batch[1])
        return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum() / len(x)


class PenaltyOfWeights(Classifier):
    """Differentiates by all weights, twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        gradients = torch.autograd.grad(loss, [*self.parameters()], create_graph=True)
        return loss + 0.01 * sum(each.square().sum() for each in gradients)


class WithAttributes(Classifier):
    """Groups parameters by an attribute, which its `training_step` reads, too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for parameter in self.parameters():
            parameter.rate = 0.1 / parameter.ndim  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * getattr(self.get_parameter(LARGE), "rate", 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": [p], "lr": getattr(p, "rate", 1.0)} for p in self.parameters()])


class Special(nn.Parameter):
    pass


class WithASubclass(Classifier):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        layer: Any = self.net.get_submodule("blocks.0.1")
        layer.weight = Special(layer.weight.detach())

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "lr": 0.01 if type(p) is Special else 0.2} for p in self.parameters()]
        assert {group["lr"] for group in groups} == {0.01, 0.2}
        return torch.optim.SGD(groups)


class ResetsMoments(Classifier):
    """Looks for states by the parameters of the module."""

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer: Any = self.optimizers()
        assert all(parameter in optimizer.state for parameter in self.parameters())
        for name, parameter in self.named_parameters():
            optimizer.state[parameter]["exp_avg"].mul_(0.5)
            if name == LARGE:
                state = optimizer.state[parameter]
                optimizer.state[parameter] = {key: value * 0 for key, value in state.items()}


class AddsAGroup(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for n, p in self.named_parameters() if n != LARGE], lr=0.1, momentum=0.9)

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer: Any = self.optimizers()
        if self.trainer.global_step == 1:
            optimizer.add_param_group({"params": [self.get_parameter(LARGE)], "lr": 0.3})


class AfterBackward(Classifier):
    """Changes the gradient of the step."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Elementwise(Classifier):
    """What gives each element from the same ones is right on parts, and so are reads of the whole shape."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                assert parameter.grad.numel() == parameter.numel() == parameter.shape.numel()
                parameter.grad.clamp_(-0.01, 0.01).add_(parameter.detach().sign() * 1e-3)

    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(parameter * 0.9)
                nn.init.constant_(parameter, 0.01) if parameter.ndim == 1 else parameter.clamp_(-0.3, 0.3)


class Skips(nn.Module):
    """A U-Net: what a block gives is read by a later one, too, and two blocks read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(144, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 301), nn.GELU(), nn.Linear(301, 64)) for _ in range(4)
        )
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.blocks
        x = self.stem(x.flatten(1))
        left, right = x + first(x), x * second(x)
        middle = left.tanh() + right
        result: Tensor = self.head(middle + third(middle) + fourth(left + middle) + x + left)
        return result


class Parallel(nn.Module):
    """Blocks in a dict that read one tensor, each twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(144, 64)
        self.branches = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(64, 301), nn.Tanh(), nn.Linear(301, 64)) for name in "abc"}
        )
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        branches = torch.stack([branch(x) * x + x for branch in self.branches.values()])
        result: Tensor = self.head(branches.sum(0))
        return result


class Cast(nn.Module):
    """A layer of another dtype."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.to(self.layer.weight.dtype)).float()
        return result


def other_dtypes() -> nn.Module:
    """Return a network with layers in double precision and in bfloat16 in its blocks."""
    net: Any = Mixer()
    net.blocks[0][1] = Cast(net.blocks[0][1].double())
    net.blocks[1][4] = Cast(net.blocks[1][4].bfloat16())
    return net


def of_net(net: nn.Module) -> Classifier:
    module = Classifier("small")
    module.net = net
    return module


SAME: dict[str, Any] = {
    "attacks": lambda: Attacks("mixer"),
    "attacks with weights outside of blocks": lambda: Attacks("stem"),
    "attacks by backward": lambda: AttacksBackward("stem"),
    "gradient penalty": lambda: GradientPenalty("mixer"),
    "attributes": lambda: WithAttributes("mixer"),
    "a subclass": lambda: WithASubclass("mixer"),
    "moments": lambda: ResetsMoments("mixer", "adamw"),
    "a new group": lambda: AddsAGroup("mixer"),
    "after backward": lambda: AfterBackward("mixer"),
    "element by element": lambda: Elementwise("mixer", "adamw"),
    "skips": lambda: of_net(Skips()),
    "parallel": lambda: of_net(Parallel()),
    "other dtypes": lambda: of_net(other_dtypes()),
}
FEW = ("attacks", "attributes", "moments", "skips")


@pytest.mark.parametrize("name", by_day(SAME, FEW))
def test_it_has_the_bits_of_one_device(ranks: Ranks, name: str) -> None:
    torch.manual_seed(1)
    module = SAME[name]()
    one = rank_fits_of(ranks, module, 1, train=24)
    for reshard in (False, True):
        parts = rank_fits_of(ranks, module, 2, train=24, parts={"reshard": reshard})
        assert same_bits(one, parts), f"reshard={reshard}"


# --- what is refused ---


def hook_on(moment: str, register: str = "register_hook") -> Classifier:
    """Return a module that registers a hook on a large parameter at some moment."""
    return acting(moment, lambda module, *_: getattr(module.get_parameter(LARGE), register)(lambda gradient: None))


def using(moment: str, action: Any, net: str = "stem") -> Classifier:
    """Return a module whose hook does something with itself and a large parameter."""

    def act(module: Any, *arguments: Any) -> None:
        # of the cut parameters the one with the most rows that all ranks have alike: sums of it have a part on each
        large = [each for each in module.parameters() if each.numel() > SMALL]
        largest = max(large, key=lambda each: (each.shape[0] % 2 == 0, each.numel()))
        with torch.no_grad():
            action(module, largest, *arguments)

    return acting(moment, act, net)


def clips_each(module: Any, parameter: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            with torch.enable_grad():
                nn.utils.clip_grad_norm_(each, 0.1)


def saves(module: Any, parameter: Any) -> None:
    torch.save(module.net.state_dict(), io.BytesIO())


class KeepsATeacher(Classifier):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            teacher.lerp_(student, 0.1)


class Descends(Classifier):
    """PGD: its backward pass gives all parameters a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        F.cross_entropy(self(x), batch[1]).backward()
        assert x.grad is not None
        return F.cross_entropy(self(batch[0] + 0.1 * x.grad.sign()), batch[1])


class HandsOver(nn.Module):
    """A block that hands its output over by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(144, 144)

    def forward(self, x: Tensor) -> None:
        self.output = self.layer(x)


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HandsOver() for _ in range(2))
        self.head = nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            block(x)
            x = x + block.output  # type: ignore[operator]
        result: Tensor = self.head(x)
        return result


def test_a_block_that_returns_no_output_is_refused_if_its_weights_are_freed(ranks: Ranks) -> None:
    module = of_net(ByAttribute())
    one, two = (rank_fits_of(ranks, module, world) for world in (1, 2))
    assert same_bits(one, two)
    with pytest.raises(UserError, match=r"^strategy.reshard=true: a backward pass needs weights .*: let blocks return"):
        rank_fits_of(ranks, module, 2, parts={"reshard": True})


def test_a_derivative_by_freed_weights_is_refused(ranks: Ranks) -> None:
    module = PenaltyOfWeights("mixer")
    one, two = (rank_fits_of(ranks, module, world, train=24) for world in (1, 2))
    assert same_bits(one, two)
    with pytest.raises(UserError, match=r"weights of a block without a call of the block.*, or leave out strategy"):
        rank_fits_of(ranks, module, 2, parts={"reshard": True})


STEP, EPOCH, START = "on_before_optimizer_step", "on_train_epoch_end", "on_train_start"
WHOLE = "within trainer.strategy.whole_weights()"
ONE_HOOK = "register_hook or register_post_accumulate_grad_hook on net.blocks.0.1.weight: it would get the weighted"
REFUSED: dict[str, tuple[Any, str]] = {
    "hook in setup": (lambda: hook_on("setup"), ONE_HOOK),
    "hook in configure_model": (lambda: hook_on("configure_model"), ONE_HOOK),
    "post hook in setup": (lambda: hook_on("setup", "register_post_accumulate_grad_hook"), ONE_HOOK),
    "hook in on_fit_start": (lambda: hook_on("on_fit_start"), "register_hook is called for weights of which each"),
    "post hook later": (
        lambda: hook_on(START, "register_post_accumulate_grad_hook"),
        "register_post_accumulate_grad_hook is called for",
    ),
    "PGD": (lambda: Descends("mixer"), "a backward pass in training_step, or in a hook, has given a gradient to net."),
    "item": (lambda: using(STEP, lambda m, p, o: p.grad.pow(2).sum().item()), WHOLE),
    "float": (lambda: using(EPOCH, lambda m, p: float(p.abs().max())), WHOLE),
    "bool": (lambda: using(EPOCH, lambda m, p: bool(p.square().sum() > 1)), WHOLE),
    "mean": (lambda: using(EPOCH, lambda m, p: p.sub_(p.mean())), WHOLE),
    "a norm that decides": (lambda: using(EPOCH, lambda m, p: p.mul_(0.5) if p.norm() > 1 else None), WHOLE),
    "over the first dimension": (lambda: using(STEP, lambda m, p, o: p.grad.sub_(p.grad.mean(0))), WHOLE),
    "logged": (lambda: using(EPOCH, lambda m, p: m.log("w", p.mean())), WHOLE),
    "logged norm": (lambda: using(EPOCH, lambda m, p: m.log("w", p.norm(), sync_dist=True)), WHOLE),
    "tolist": (lambda: using(EPOCH, lambda m, p: p.tolist()), WHOLE),
    "numpy": (lambda: using(EPOCH, lambda m, p: p.detach().cpu().numpy()), WHOLE),
    "median": (lambda: using(EPOCH, lambda m, p: p.flatten().median(), "mixer"), WHOLE),
    "vector": (lambda: using(EPOCH, lambda m, p: nn.utils.parameters_to_vector(m.parameters())), WHOLE),
    "copy_": (lambda: using(START, lambda m, p: p.copy_(torch.zeros(p.shape))), WHOLE),
    "data": (lambda: using(START, lambda m, p: setattr(p, "data", torch.zeros(p.shape))), "p.data = ... replaces"),
    "normal_": (lambda: using(START, lambda m, p: nn.init.normal_(p)), WHOLE),
    "kaiming": (lambda: using("on_fit_start", lambda m, p: nn.init.kaiming_uniform_(p)), WHOLE),
    "trunc_normal_": (lambda: using("on_fit_start", lambda m, p: nn.init.trunc_normal_(p)), WHOLE),
    "orthogonal_": (lambda: using(START, lambda m, p: nn.init.orthogonal_(p)), WHOLE),
    "noise": (lambda: using(EPOCH, lambda m, p: p.add_(torch.randn_like(p))), WHOLE),
    "teacher": (lambda: KeepsATeacher("mixer"), WHOLE),
    "grad_norm of Lightning": (lambda: using(STEP, lambda m, p, o: grad_norm(m, 2)), WHOLE),
    "clips the optimizer's": (lambda: using(STEP, clips_each), "gradient_clip_val"),
    "sums the optimizer's": (
        lambda: using(STEP, lambda m, p, o: sum(each.grad.square().sum() for each in o.param_groups[0]["params"])),
        "trainer.strategy.gradient_norm",
    ),
    "reads the optimizer's": (
        lambda: using(STEP, lambda m, p, o: [each.tolist() for each in o.param_groups[0]["params"]]),
        WHOLE,
    ),
    "whole of another memory format": (
        lambda: using(EPOCH, lambda m, p: p.full_tensor(), "convolutions"),
        "in the order of the memory",
    ),
    "row of another memory format": (
        lambda: using(EPOCH, lambda m, p: p[0], "convolutions"),
        "in the order of the memory",
    ),
    "deepcopy": (lambda: using("on_train_end", lambda m, p: copy.deepcopy(m.net)), "deepcopy, pickle or torch.save"),
    "deepcopy of a block": (
        lambda: using("on_train_end", lambda m, p: copy.deepcopy(m.net.blocks[0])),
        "lightning_module_state_dict() returns on all ranks",
    ),
    "torch.save": (lambda: using("on_train_end", saves), "deepcopy, pickle or torch.save copies weights"),
}
FEW_REFUSED = ("hook in setup", "hook in on_fit_start", "PGD", "item", "data", "teacher", "clips the optimizer's")


def refused(rank: int, module: Classifier) -> str:
    """Return the text of the error of a fit. A rank that waits for one that has ended is none."""
    try:
        rank_fit(rank, module, 2)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", by_day(REFUSED, FEW_REFUSED))
def test_it_is_refused(ranks: Ranks, name: str) -> None:
    make, text = REFUSED[name]
    module = make()
    raised = [each for each in ranks(2, lambda rank: refused(rank, module)) if each]
    assert raised, "no rank refuses it"
    for each in raised:
        assert text in each
        assert "\n" not in each.partition("\non rank")[0]
