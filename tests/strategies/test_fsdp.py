"""`strategy=fsdp`: each process keeps a part of the weights, and the result has the bits of one device."""

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sharded_runs import CASES, Classifier, ViT, samples, train, trainer_on
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep
from lockstep.arithmetic.exact_sum import SMALL
from lockstep.checkpoint import io as checkpoint_io
from lockstep.errors import NonFinite, UserError
from lockstep.strategies import FSDP
from lockstep.strategies.ddp import DistributedDataParallel
from lockstep.strategies.fsdp import FullySharded
from lockstep.strategies.saved_parts import SavedParts, tensors_in
from lockstep.strategies.sharded_optimizer import needs_whole_tensors
from lockstep.strategies.sharded_parameters import ShardedParameter, dim_to_cut, find_blocks
from lockstep.vision.optimizers import Muon

# autograd decides at the first backward pass of a process whether forks may compute gradients too
torch.ones(1, requires_grad=True).sum().backward()


def hashes(folder: Path, strategy: Any, names: tuple[str, ...], **options: Any) -> dict[str, str]:
    """Train some cases. Return the SHA-256 of the weights of each."""
    torch.set_num_threads(1)
    results = {}
    for name in names:
        net, optimizer, more = CASES[name]
        results[name] = train(folder / name, strategy, net, optimizer, **{**more, **options})
    return results


def on(devices: int, function: Any, *args: Any) -> Any:
    """Call a function in this process, or in several workers."""
    if devices == 1:
        return function(*args)
    return lockstep.launch(function, *args, devices=devices, accelerator="cpu", hang_timeout=120)


FEW = ("vit adamw", "vit in double", "vit muon clipped", "stem", "small", "convolutions", "twice")
REST = tuple(name for name in CASES if name not in FEW)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("devices", "reshard", "names"),
    [
        (2, False, FEW),
        pytest.param(3, True, FEW, marks=pytest.mark.nightly),
        pytest.param(2, True, REST, marks=pytest.mark.nightly),
        pytest.param(3, False, REST, marks=pytest.mark.nightly),
        pytest.param(4, False, ("vit adamw",), marks=pytest.mark.nightly),
    ],
)
def test_the_weights_have_the_bits_of_one_device(
    tmp_path: Path, devices: int, reshard: bool, names: tuple[str, ...]
) -> None:
    """The last step has two samples in six pieces, so processes have different numbers of pieces, or none."""
    one = hashes(tmp_path / "one", "auto", names)
    assert on(devices, hashes, tmp_path / "sharded", FSDP(reshard=reshard), names) == one
    assert len({*one.values()}) == len(one)


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_without_exact_the_weights_are_the_same_to_rounding_and_have_other_bits(tmp_path: Path) -> None:
    """The control: torch's own sums have other bits on each layout."""
    names = ("vit adamw",)
    one = hashes(tmp_path / "one", "auto", names, exact=False)
    assert on(2, hashes, tmp_path / "two", FSDP(), names) != one  # exact, so other bits than plain sums
    plain = on(2, partial(hashes, exact=False), tmp_path / "plain", FSDP(), names)
    assert plain != one


def weights_after(folder: Path, strategy: Any, exact: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    trained: list[Any] = []
    train(folder, strategy, "vit", "sgd", precision="64-true", exact=exact, states=trained)
    return {name: value.numpy() for name, value in trained[0].items()}


@pytest.mark.usefixtures("processes")
def test_without_exact_the_weights_are_the_same_to_rounding(tmp_path: Path) -> None:
    one = weights_after(tmp_path / "one", "auto", False)
    two = on(2, weights_after, tmp_path / "two", FSDP(), False)
    assert one.keys() == two.keys()
    for name, weight in one.items():
        np.testing.assert_allclose(two[name], weight, rtol=1e-9, atol=1e-12)


SIDES: dict[str, tuple[int, Any]] = {
    "one": (1, "auto"),
    "ddp 2": (2, "ddp"),
    "fsdp 2": (2, FSDP()),
    "fsdp 3": (3, FSDP(reshard=True)),
    "parts 2": (2, FSDP(checkpoint="sharded")),
    "parts 3": (3, FSDP(checkpoint="sharded", reshard=True)),
}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        ("vit adamw", "fsdp 2", "one"),
        pytest.param("vit adamw", "one", "fsdp 3", marks=pytest.mark.nightly),
        pytest.param("vit muon clipped", "fsdp 3", "ddp 2", marks=pytest.mark.nightly),
        pytest.param("vit muon clipped", "ddp 2", "fsdp 2", marks=pytest.mark.nightly),
        pytest.param("vit ema", "fsdp 2", "fsdp 3", marks=pytest.mark.nightly),
        pytest.param("convolutions", "fsdp 2", "one", marks=pytest.mark.nightly),
        pytest.param("convolutions", "one", "fsdp 2", marks=pytest.mark.nightly),
        ("vit adamw", "parts 2", "one"),
        ("convolutions", "parts 3", "parts 2"),
        ("convolutions ema", "parts 2", "one"),
        pytest.param("vit adamw", "one", "parts 3", marks=pytest.mark.nightly),
        pytest.param("vit muon clipped", "parts 3", "ddp 2", marks=pytest.mark.nightly),
        pytest.param("vit muon clipped", "parts 2", "fsdp 3", marks=pytest.mark.nightly),
        pytest.param("vit ema", "parts 2", "parts 3", marks=pytest.mark.nightly),
        pytest.param("vit ema", "parts 3", "one", marks=pytest.mark.nightly),
        pytest.param("tied", "parts 2", "parts 3", marks=pytest.mark.nightly),
        pytest.param("vit fused on a CPU", "parts 2", "parts 3", marks=pytest.mark.nightly),
    ],
)
def test_a_run_continues_on_another_layout_to_the_same_bits(tmp_path: Path, case: str, before: str, after: str) -> None:
    whole = hashes(tmp_path / "whole", "auto", (case,))
    for (devices, strategy), options in ((SIDES[before], {"max_epochs": 1}), (SIDES[after], {"ckpt_path": "last"})):
        last = on(devices, partial(hashes, **options), tmp_path / "run", strategy, (case,))
        folders = [*(tmp_path / "run" / case / "checkpoints").glob("parts-*")]
        assert len(folders) == (getattr(strategy, "checkpoint", "whole") == "sharded")
    assert last == whole


def reads_of_a_resume(folder: Path) -> dict[str, int]:
    """Continue from parts. Return how many elements rank zero reads of each tensor."""
    torch.set_num_threads(1)
    read, elements = SavedParts.read, {}

    def counted(saved: SavedParts, value: Tensor, *region: Any) -> Tensor:
        result = read(saved, value, *region)
        elements[saved._names[id(value)]] = result.numel()
        return result

    SavedParts.read = counted  # type: ignore[assignment, method-assign]
    train(folder, FSDP(checkpoint="sharded"), "vit", "adamw", ckpt_path="last")
    return elements


@pytest.mark.usefixtures("processes")
def test_a_rank_reads_its_part_of_the_state(tmp_path: Path) -> None:
    """No rank has more of the optimizer's state than its part and one tensor."""
    on(2, partial(train, max_epochs=1), tmp_path, FSDP(checkpoint="sharded"), "vit", "adamw")
    elements = on(3, reads_of_a_resume, tmp_path)
    file = checkpoint_io.load(tmp_path / "checkpoints" / "last.ckpt", tensors=False)
    whole = {path: value.numel() for path, *_, value in tensors_in(file) if value.is_meta}
    assert elements.keys() == whole.keys()
    of_optimizer = [path for path in whole if path.startswith("optimizer_states")]
    assert len(of_optimizer) == 12  # two of each of three weights of two blocks
    for path in of_optimizer:
        assert elements[path] == pytest.approx(whole[path] / 3, rel=0.02), path


# --- what is refused ---


class Unknown(torch.optim.SGD):
    """Not known to work element by element."""


class ByElement(torch.optim.SGD):
    works_on = "elements"


def test_it_must_be_known_what_an_optimizer_needs() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(UserError, match="strategy=fsdp: it is not known whether Unknown needs whole tensors: give its"):
        needs_whole_tensors(Unknown(parameters))
    assert needs_whole_tensors(Muon(parameters))
    assert not needs_whole_tensors(ByElement(parameters))
    assert not needs_whole_tensors(torch.optim.AdamW(parameters))


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


class Skips(ViT):
    """Leaves out a block, another one on each process."""

    def forward(self, x: Tensor) -> Tensor:
        left_out = int(os.environ["RANK"])
        blocks, self.blocks = self.blocks, nn.ModuleList(self.blocks[n] for n in range(2) if n != left_out)
        try:
            return super().forward(x)
        finally:
            self.blocks = blocks


class CallsInAHook(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self(torch.zeros(1, 1, 12, 12))


class Replaces(Classifier):
    def on_train_epoch_start(self) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.whole_weights(), torch.no_grad():
            weight = self.get_parameter("net.blocks.0.mlp.0.weight")
            weight.data = weight.detach() * 2


class AsksForItsState(Classifier):
    def on_train_epoch_start(self) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.whole_weights():
            self.state_dict()


def refused(folder: Path, net: type[nn.Module], kind: type[Classifier] = Classifier, **options: Any) -> str:
    """Train a network on fsdp. Return the text of the error."""
    try:
        module = kind("vit", "sgd")
        module.net = net()
        trainer = lockstep.Trainer(
            strategy=FSDP(**options),
            default_root_dir=folder,
            accelerator="cpu",
            logger=False,
            pieces=6,
            exact=True,
            max_epochs=1,
        )
        trainer.fit(module, DataLoader(samples(), batch_size=12))
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (NoCall, {}, "uses weights of a block without a call of the block"),
        (Unused, {}, "no gradient has reached net.weight, or another parameter of its block (its block has 2 sharded"),
        (ViT, {"blocks": "net.bloks.*"}, "strategy.blocks=net.bloks.*: no module of this name has large weights"),
        (Skips, {}, "a pass has not used the block of net.blocks."),
        (ViT, {"kind": CallsInAHook}, "forward of the module is called outside of a step and an evaluation"),
        (ViT, {"kind": Replaces}, "net.blocks.0.mlp.0.weight was replaced within trainer.strategy.whole_weights()"),
        (ViT, {"kind": AsksForItsState}, "state_dict() of a module would have parts of the weights"),
    ],
)
def test_what_can_not_be_right_is_refused(
    tmp_path: Path, net: type[nn.Module], options: dict[str, Any], message: str
) -> None:
    assert message in on(2, partial(refused, **options), tmp_path, net)


def with_another(folder: Path) -> str:
    """Fit a module, test another one with the Trainer, and return the text of the error."""
    data = lockstep.DataModule(train=samples(), test=samples())
    trainer = lockstep.Trainer(
        strategy=FSDP(), default_root_dir=folder, accelerator="cpu", logger=False, batch_size=12, max_epochs=1
    )
    trainer.fit(Classifier(), data)
    trainer.test(trainer.lightning_module, data)
    try:
        trainer.test(Classifier(), data)
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.usefixtures("processes")
def test_another_module_than_the_one_that_was_cut_is_refused(tmp_path: Path) -> None:
    """Its weights would be written into those of the first."""
    assert "another module than that of trainer.fit: make a Trainer for it" in on(2, with_another, tmp_path)


class StartsElsewhere(Classifier):
    """Has other first weights on each process."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.01 * int(os.environ.get("RANK", "0")))


@pytest.mark.usefixtures("processes")
def test_all_processes_begin_with_the_weights_of_rank_zero(tmp_path: Path) -> None:
    """As with ddp: a part of the weights of each process would be another start."""
    one = train(tmp_path, "auto", "vit", "sgd", kind=StartsElsewhere)
    assert on(2, partial(train, kind=StartsElsewhere), tmp_path, FSDP(), "vit", "sgd") == one


class ChangesGradients(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def halved(folder: Path, strategy: Any, optimizer: str) -> str:
    torch.set_num_threads(1)
    try:
        return train(folder, strategy, "vit", optimizer, kind=ChangesGradients)
    except UserError as error:
        return str(error)


@pytest.mark.usefixtures("processes")
def test_a_hook_may_change_gradients_unless_a_copy_of_them_is_used(tmp_path: Path) -> None:
    assert on(2, halved, tmp_path, FSDP(), "adamw") == halved(tmp_path, "auto", "adamw")
    message = "strategy=fsdp: a hook has changed the gradient of net.blocks.0.attention.in_proj_weight, of which Muon"
    assert on(2, halved, tmp_path, FSDP(), "muon").startswith(message)


def stopped(folder: Path, strategy: Any) -> str:
    try:
        train(folder, strategy, "vit", "sgd", broken=3)
    except NonFinite as error:
        return str(error)
    return "nothing"


@pytest.mark.usefixtures("processes")
def test_a_sample_that_is_not_finite_is_named(tmp_path: Path) -> None:
    message = on(2, stopped, tmp_path, FSDP())
    assert "the gradient is not finite" in message
    assert "sample 3 of the training set has values that are not finite" in message


# --- units ---


def test_the_repeated_modules_are_the_blocks() -> None:
    net: Any = ViT()
    large = {id(p) for p in net.parameters() if p.numel() > SMALL}
    assert find_blocks(net, large, None) == list(net.blocks)
    assert find_blocks(net, large, "blocks.*.mlp") == [block.mlp for block in net.blocks]
    assert find_blocks(net, large, "*") == list(net.blocks), "the outermost ones that are called"
    for wrong in ("", "blocks", "blocks.*.norm1", "net.blocks.*"):
        with pytest.raises(UserError, match=r"strategy.blocks=.*: no module of this name has large weights of its own"):
            find_blocks(net, large, wrong)
    tied = net.blocks[1].mlp[0].weight = net.blocks[0].mlp[0].weight
    large = {id(p) for p in net.parameters() if p.numel() > SMALL}
    blocks = find_blocks(net, large, None)
    assert not any(tied is each for block in blocks for each in block.parameters()), "a block shares no parameter"


@pytest.mark.parametrize(
    ("tensor", "dim"),
    [
        (torch.zeros(300, 70), 0),
        (torch.zeros(SMALL), None),
        (torch.zeros(1, 201, 100), 1),
        (torch.zeros(1, 199, 101), None),
        (torch.zeros(50, 50, 3, 3).to(memory_format=torch.channels_last), 0),
        (torch.zeros(200, 100).T, None),
    ],
)
def test_which_dimension_is_cut(tensor: Tensor, dim: int | None) -> None:
    assert dim_to_cut(nn.Parameter(tensor), 3) == dim
    assert dim_to_cut(nn.Parameter(tensor, requires_grad=False), 3) is None


@pytest.mark.parametrize(
    "whole",
    [
        torch.randn(7, 5),
        torch.randn(2, 4),
        torch.randn(7, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(6, 2, 3, 3),
    ],
    ids=lambda tensor: str(list(tensor.shape)),
)
def test_parts_are_joined_to_the_whole_tensor(whole: Tensor) -> None:
    one = ShardedParameter("weight", whole, whole.stride(), 0, 3, 0)
    joined = one.joined([one.padded(part) for part in one.parts(whole)])
    assert torch.equal(joined, whole)
    assert joined.stride() == whole.stride()
    for rank in range(3):
        of_rank = ShardedParameter("weight", whole, whole.stride(), 0, 3, rank)
        rows = -(-len(whole) // 3)
        gradient = whole[rank * rows : (rank + 1) * rows].contiguous()
        assert torch.equal(of_rank.in_memory_order(gradient), one.parts(whole)[rank])
    across = ShardedParameter("weight", torch.zeros(2, 6), (6, 1), 1, 3, 0)
    assert torch.equal(
        across.joined([each.reshape(-1) for each in across.parts(whole.new_ones(2, 6))]), torch.ones(2, 6)
    )


@pytest.mark.parametrize(("saves_parts", "has_copies"), [(True, True), (True, False), (False, True)])
def test_machines_that_do_not_see_the_folder_can_not_save_parts(
    monkeypatch: pytest.MonkeyPatch, saves_parts: bool, has_copies: bool
) -> None:
    monkeypatch.setattr(DistributedDataParallel, "setup_environment", lambda self: None)
    strategy = FullySharded(saves_parts=saves_parts)
    strategy.checkpoint_io = cast(Any, SimpleNamespace(has_copies=has_copies))
    strategy._lightning_module = cast(Any, SimpleNamespace(trainer=SimpleNamespace(callbacks=[])))
    refused = pytest.raises(UserError, match=r"strategy.checkpoint=sharded needs a folder that all machines see: give")
    with refused if saves_parts and has_copies else nullcontext():
        strategy.setup_environment()


def test_one_device_is_not_sharded() -> None:
    assert FSDP().layout_name(1) == "single"
    assert FSDP().layout_name(2) == "fsdp"
    assert os.environ.get("RANK") is None


def saved_by_callbacks(folder: Path) -> str:
    """Fit with a ModelCheckpoint that keeps two files, save once more, and test the best one."""
    torch.set_num_threads(1)
    keeps = ModelCheckpoint(folder / "mine", "{step}", monitor="val_loss", save_top_k=2)
    trainer = trainer_on(FSDP(checkpoint="sharded"), folder, max_epochs=4, callbacks=[keeps])
    module = Classifier("vit", "adamw")
    trainer.fit(module, DataLoader(samples(), batch_size=12), DataLoader(samples(5), batch_size=1))
    trainer.save_checkpoint(folder / "after" / "end.ckpt")
    trainer.test(module, DataLoader(samples(5), batch_size=1), ckpt_path=keeps.best_model_path)
    strategy: Any = trainer.strategy
    return lockstep.weights_sha256(strategy.lightning_module_state_dict())


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_checkpoints_of_users_are_saved_in_parts_too(tmp_path: Path) -> None:
    tested = on(2, saved_by_callbacks, tmp_path)
    mine = sorted((tmp_path / "mine").glob("*.ckpt"))
    assert len(mine) == len([*(tmp_path / "mine").glob("parts-*")]) == 2
    states = [checkpoint_io.load(file)["state_dict"] for file in (*mine, tmp_path / "after" / "end.ckpt")]
    hashes_of_files = [lockstep.weights_sha256(state) for state in states]
    assert tested in hashes_of_files[:2]
    last = checkpoint_io.load(tmp_path / "checkpoints" / "last.ckpt")["state_dict"]
    assert hashes_of_files[2] == lockstep.weights_sha256(last)
