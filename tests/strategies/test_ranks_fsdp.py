"""`strategy=fsdp` on ranks that are threads: the result has the bits of one device, from any checkpoint too."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_fits import Fit, Saves, same_bits
from strategies.sharded_runs import CASES, Classifier, Mixer, acting, by_day, rank_fit, rank_fits_of, refusals
from thread_ranks import Ranks
from torch import Tensor, nn

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.io import AtomicCheckpointIO
from lockstep.checkpoint.parts import SavedParts, tensors_in
from lockstep.errors import NonFinite, StepRefused, UserError

pytestmark = pytest.mark.filterwarnings("ignore")

RESHARD = {"reshard": True}


class InDouble(Classifier):
    """Lightning's precision 64-true sets the default dtype of the process, which the ranks share."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


def module_of(name: str) -> Classifier:
    if name == "double":
        return InDouble("mixer", "sgd").double()
    net, optimizer, _ = CASES[name]
    return Classifier(net, optimizer)


@cache
def on_one_device(name: str) -> Fit:
    return rank_fit(0, module_of(name), 1, **options_of(name))


def options_of(name: str) -> dict[str, Any]:
    return {"limit_val_batches": 1.0, **(CASES[name][2] if name in CASES else {})}


BITS = [
    ("double", 2, False),
    ("convolutions", 3, True),
    ("vit adamw", 2, False),
    ("vit muon clipped", 3, True),
    ("mixer muon clipped", 3, True),
    ("stem", 2, True),
    ("small", 2, False),
    ("twice", 2, False),
]


@pytest.mark.parametrize(("name", "world", "reshard"), by_day(BITS, BITS[:2]))
def test_the_weights_have_the_bits_of_one_device(ranks: Ranks, name: str, world: int, reshard: bool) -> None:
    module, options = module_of(name), options_of(name) | {"parts": {"reshard": reshard}}
    first, *others = ranks(world, lambda rank: rank_fit(rank, module, world, **options))
    one = on_one_device(name)
    assert same_bits(one.state, first.state)
    assert {each.metrics["val_loss"] for each in (first, *others)} == {one.metrics["val_loss"]}
    assert not same_bits(module.state_dict(), first.state), "the control: the steps have changed them"


def test_without_exact_the_weights_are_the_same_to_rounding_and_have_other_bits(ranks: Ranks) -> None:
    """The control: a plain sum has other bits on each layout."""
    one, two = (rank_fits_of(ranks, module_of("double"), world, exact=False) for world in (1, 2))
    assert not same_bits(one, two)
    assert not same_bits(on_one_device("double").state, two)
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-9, atol=1e-12)


# --- checkpoints ---


SIDES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp 2": (2, {"strategy": "ddp"}),
    "fsdp 2": (2, {}),
    "fsdp 3": (3, {"parts": RESHARD}),
    "parts 2": (2, {"parts": {"saves_parts": True}}),
    "parts 3": (3, {"parts": {"saves_parts": True, "reshard": True}}),
}


def fit_and_save(ranks: Ranks, case: str, side: str, path: Path, step: int, resume: bool = False) -> dict[str, Tensor]:
    """Fit a case, save a checkpoint after a step, and return the weights."""
    more = CASES[case][2]
    world, options = SIDES[side]
    of_case = more.get("callbacks")
    whole = not side.startswith(("fsdp", "parts"))

    def of_rank(rank: int) -> dict[str, Tensor]:
        # as a run has read it before: Lightning reads a file under a lock of the process
        loaded = checkpoint_io.load(path, whole=whole) if resume else None
        return rank_fit(
            rank,
            module,
            world,
            callbacks_of=lambda: [*([of_case()] if of_case else []), Saves(path, step)],
            plugins_of=lambda: [AtomicCheckpointIO(loaded=loaded)],
            ckpt=path if resume else None,
            **options,
            **{name: value for name, value in more.items() if name != "callbacks"},
        ).state

    module = module_of(case)
    states = [of_rank(0)] if world == 1 else ranks(world, of_rank)
    assert len([*path.parent.glob("parts-*")]) == side.startswith("parts")
    return states[0]


RESUMES = [
    ("mixer muon clipped", "parts 2", "one"),
    ("wrapped", "parts 2", "parts 3"),
    ("renamed", "parts 3", "fsdp 2"),
    ("mixer adamw", "fsdp 2", "parts 2"),
    ("wrapped", "fsdp 2", "one"),
    ("vit adamw", "fsdp 2", "one"),
    ("vit adamw", "parts 2", "one"),
    ("mixer muon clipped", "parts 2", "fsdp 3"),
    ("convolutions", "parts 3", "parts 2"),
    ("convolutions ema", "parts 3", "parts 2"),
    ("convolutions ema", "parts 2", "one"),
    ("vit muon clipped", "fsdp 3", "ddp 2"),
    ("tied", "ddp 2", "parts 3"),
    ("wrapped", "one", "fsdp 3"),
    ("wrapped ema", "parts 2", "fsdp 2"),
    ("renamed", "ddp 2", "parts 2"),
]


@pytest.mark.parametrize(("case", "before", "after"), by_day(RESUMES, RESUMES[:3]))
def test_a_run_continues_on_another_layout_to_the_same_bits(
    ranks: Ranks, tmp_path: Path, case: str, before: str, after: str
) -> None:
    path = tmp_path / "last.ckpt"
    whole = fit_and_save(ranks, case, before, path, step=1)
    assert same_bits(on_one_device(case).state, whole)
    saved = checkpoint_io.load(path)
    assert saved["global_step"] == 1
    assert not same_bits(whole, saved["state_dict"]), "the control"
    assert same_bits(whole, fit_and_save(ranks, case, after, path, step=2, resume=True))
    assert same_bits(whole, checkpoint_io.load(path)["state_dict"])


@pytest.mark.usefixtures("whole_run")
def test_a_rank_reads_its_part_of_the_state(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank has more of the optimizer's state than its part and one tensor."""
    path, read = tmp_path / "last.ckpt", SavedParts.read
    fit_and_save(ranks, "mixer adamw", "parts 2", path, step=1)
    file = checkpoint_io.load(path, tensors=False)
    elements: list[dict[str, int]] = [{}, {}, {}]

    def counted(saved: SavedParts, value: Tensor, *region: Any) -> Tensor:
        result = read(saved, value, *region)
        elements[dist.get_rank()][saved._names[id(value)]] = result.numel()
        return result

    monkeypatch.setattr(SavedParts, "read", counted)
    fit_and_save(ranks, "mixer adamw", "parts 3", path, step=2, resume=True)
    whole = {name: value.numel() for name, *_, value in tensors_in(file) if value.is_meta}
    of_optimizer = [name for name in whole if name.startswith("optimizer_states")]
    assert len(of_optimizer) == 8  # two of each of two weights of two blocks
    for of_rank in elements:
        assert of_rank.keys() == whole.keys()
        for name in of_optimizer:
            assert of_rank[name] == pytest.approx(whole[name] / 3, rel=0.02), name


# --- what is refused ---


class NoCall(nn.Module):
    """Uses the weights of a block without a call of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(144, 144) for _ in range(2))
        self.head = nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x.flatten(1) @ self.layers[0].weight + self.layers[1](x.flatten(1)))
        return result


class Unused(NoCall):
    """Does not use a weight of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(144, 144))
        self.other = nn.Parameter(torch.zeros(144, 144))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers[0](self.layers[1](x.flatten(1))) @ self.weight)
        return result


class Skips(Mixer):
    """Leaves out a block, another one on each process."""

    def forward(self, x: Tensor) -> Tensor:
        left_out = dist.get_rank()
        blocks, self.blocks = self.blocks, nn.ModuleList(self.blocks[n] for n in range(2) if n != left_out)
        try:
            return super().forward(x)
        finally:
            self.blocks = blocks


def replace_a_weight(module: Any) -> None:
    with module.trainer.strategy.whole_weights(), torch.no_grad():
        weight = module.get_parameter("net.blocks.0.1.weight")
        weight.data = weight.detach() * 2


def ask_for_a_state(module: Any) -> None:
    with module.trainer.strategy.whole_weights():
        module.state_dict()


class Drops(Mixer):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        for name in [name for name in state if "0.1.weight" in name]:
            del state[name]
        return state


class Halves(Mixer):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        for name in [name for name in state if "0.1.weight" in name]:
            state[f"{name}.half"] = state.pop(name).half()
        return state


class DropsLater(Classifier):
    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.save_checkpoint("never.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.blocks.1.1.weight"]


def with_net(net: nn.Module) -> Classifier:
    module = Classifier("mixer")
    module.net = net
    return module


EPOCH, STEP = "on_train_epoch_start", "on_before_optimizer_step"
CHANGED = "the module's state_dict lacks net.blocks.0.1.weight or has changed it"


@pytest.mark.parametrize(
    ("make", "parts", "message"),
    [
        (lambda: with_net(NoCall()), {}, "uses weights of a block without a call of the block"),
        (
            lambda: with_net(Unused()),
            {},
            "no gradient has reached net.weight, or another parameter of its block (its block has 2",
        ),
        (
            lambda: Classifier("mixer"),
            {"blocks": "net.bloks.*"},
            "strategy.blocks=net.bloks.*: no module of this name has large",
        ),
        (lambda: with_net(Skips()), {}, "a pass has not used the block of net.blocks."),
        (
            lambda: acting(STEP, lambda module, *_: module(torch.zeros(1, 1, 12, 12))),
            {},
            "forward of the module is called outside of a step and an evaluation",
        ),
        (
            lambda: acting(EPOCH, replace_a_weight),
            {},
            "net.blocks.0.1.weight was replaced within trainer.strategy.whole_weights()",
        ),
        (lambda: acting(EPOCH, ask_for_a_state), {}, "state_dict() of a module would have parts of the weights"),
        (lambda: with_net(Drops()), {}, CHANGED),
        (lambda: with_net(Halves()), {}, CHANGED),
        (lambda: DropsLater("mixer"), {}, "never.ckpt: not saved, because it lacks net.blocks.1.1.weight"),
    ],
)
def test_what_can_not_be_right_is_refused(ranks: Ranks, make: Any, parts: dict[str, Any], message: str) -> None:
    for text in refusals(ranks, make(), parts=parts, errors=(StepRefused, UserError)):
        assert message in text


def test_another_module_than_the_one_that_was_cut_is_refused(ranks: Ranks) -> None:
    """Its weights would be written into those of the first."""
    one, other = Classifier("mixer"), Classifier("mixer")

    def tests_another(rank: int) -> None:
        trainer = rank_fit(rank, one, 2).trainer
        trainer.test(trainer.lightning_module, trainer.datamodule, verbose=False)
        trainer.test(deepcopy(other), trainer.datamodule, verbose=False)

    for error in ranks(2, tests_another, errors=UserError):
        assert "another module than that of trainer.fit: make a Trainer for it" in str(error)


def test_all_ranks_begin_with_the_weights_of_rank_zero(ranks: Ranks) -> None:
    """As with ddp: a part of the weights of each rank would be another start."""
    module = module_of("mixer adamw")

    def starts_elsewhere(rank: int) -> dict[str, Tensor]:
        mine = deepcopy(module)
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.add_(0.01 * rank)
        return rank_fit(rank, mine, 2).state

    assert same_bits(on_one_device("mixer adamw").state, ranks(2, starts_elsewhere)[0])


def test_a_sample_that_is_not_finite_is_named(ranks: Ranks) -> None:
    for text in refusals(ranks, Classifier("mixer"), errors=NonFinite, broken=3):
        assert "the gradient is not finite" in text
        assert "sample 3 of the training set has values that are not finite" in text
