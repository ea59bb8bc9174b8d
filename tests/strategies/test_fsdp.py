"""`strategy=fsdp`: each process keeps a part of the weights, and the result has the bits of one device."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from strategies.sharded_runs import CASES, Classifier, ViT, on, samples, train, trainer_on
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep
from lockstep.arithmetic.exact_sum import SMALL
from lockstep.arithmetic.layout import Layout
from lockstep.checkpoint import io as checkpoint_io
from lockstep.errors import UserError
from lockstep.lightning.process_per_device import ProcessPerDevice
from lockstep.strategies import FSDP
from lockstep.strategies.fsdp.optimizer import needs_whole_tensors
from lockstep.strategies.fsdp.parameters import ShardedParameter, dim_to_cut, find_blocks
from lockstep.vision.optimizers import Muon


def hashes(folder: Path, strategy: Any, names: tuple[str, ...], **options: Any) -> dict[str, str]:
    """Train some cases. Return the SHA-256 of the weights of each."""
    torch.set_num_threads(1)
    results = {}
    for name in names:
        net, optimizer, more = CASES[name]
        results[name] = train(folder / name, strategy, net, optimizer, **{**more, **options})
    return results


DAY = ("vit in double", "vit muon clipped")
FEW = ("vit adamw", *DAY, "stem", "small", "convolutions", "twice")
REST = tuple(name for name in CASES if name not in FEW)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("devices", "reshard", "names"),
    [
        (2, False, DAY),
        pytest.param(3, True, FEW, marks=pytest.mark.nightly),
        pytest.param(2, True, REST, marks=pytest.mark.nightly),
    ],
)
def test_the_weights_have_the_bits_of_one_device(
    tmp_path: Path, devices: int, reshard: bool, names: tuple[str, ...]
) -> None:
    """The last step has two samples in six pieces, so processes have different numbers of pieces, or none."""
    one = hashes(tmp_path / "one", "auto", names)
    assert on(devices, hashes, tmp_path / "sharded", FSDP(reshard=reshard), names) == one
    assert len({*one.values()}) == len(one)


# --- units ---


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
    monkeypatch.setattr(ProcessPerDevice, "setup_environment", lambda self: None)
    fsdp, layout = FSDP(checkpoint="sharded" if saves_parts else "whole"), Layout("fsdp", "cpu", 2, 1, 4, 2)
    strategy = cast(Any, fsdp.build(layout).strategy)
    strategy.checkpoint_io = SimpleNamespace(has_copies=has_copies)
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(callbacks=[]))
    refused = pytest.raises(UserError, match=r"strategy.checkpoint=sharded needs a folder that all machines see: give")
    with refused if saves_parts and has_copies else nullcontext():
        strategy.setup_environment()


def test_one_device_is_not_sharded() -> None:
    assert type(FSDP().build(Layout("single", "cpu", 1, 1, 4, 2)).strategy).__name__ == "OneProcess"
    assert type(FSDP().build(Layout("fsdp", "cpu", 2, 1, 4, 2)).strategy).__name__ == "FullySharded"
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
