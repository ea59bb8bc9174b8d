"""`strategy=fsdp` on ranks that are threads: the result has the bits of one device, from any checkpoint too."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rank_fits import same_bits
from sharded_runs import CASES, Classifier, rank_fit, rank_fits_of
from thread_ranks import Ranks
from torch import Tensor

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.io import AtomicCheckpointIO
from lockstep.strategies.saved_parts import SavedParts, tensors_in

pytestmark = pytest.mark.filterwarnings("ignore")

RESHARD = {"reshard": True}


class InDouble(Classifier):
    """Lightning's precision 64-true sets the default dtype of the process, which the ranks share."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


def module_of(name: str) -> Classifier:
    if name == "double":
        return InDouble("vit", "sgd").double()
    net, optimizer, _ = CASES[name]
    return Classifier(net, optimizer)


def fit_case(ranks: Ranks, name: str, world: int, **options: Any) -> dict[str, Tensor]:
    of_case: dict[str, Any] = CASES[name][2] if name in CASES else {}
    return rank_fits_of(ranks, module_of(name), world, **of_case | options)


@cache
def on_one_device(name: str) -> dict[str, Tensor]:
    return fit_case(Ranks(), name, 1)


@pytest.mark.parametrize(
    ("name", "world", "reshard"),
    [
        ("vit adamw", 2, False),
        ("vit adamw", 3, True),
        ("double", 2, False),
        ("vit muon clipped", 2, False),
        ("vit muon clipped", 3, True),
        ("stem", 2, True),
        ("small", 2, False),
        ("convolutions", 2, False),
        ("convolutions", 3, True),
        ("twice", 2, False),
    ],
)
def test_the_weights_have_the_bits_of_one_device(ranks: Ranks, name: str, world: int, reshard: bool) -> None:
    """The last step has two samples in six pieces, so ranks have different numbers of pieces, or none."""
    parts = fit_case(ranks, name, world, parts={"reshard": reshard})
    assert same_bits(on_one_device(name), parts)
    assert not same_bits(module_of(name).state_dict(), parts), "the control: the steps have changed them"


def test_without_exact_the_weights_are_the_same_to_rounding_and_have_other_bits(ranks: Ranks) -> None:
    """The control: a plain sum has other bits on each layout."""
    one, two = (fit_case(ranks, "double", world, exact=False) for world in (1, 2))
    assert not same_bits(one, two)
    assert not same_bits(on_one_device("double"), two)
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-9, atol=1e-12)


# --- checkpoints ---


class Saves(pl.Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


SIDES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp 2": (2, {"strategy": "ddp"}),
    "fsdp 2": (2, {}),
    "fsdp 3": (3, {"parts": RESHARD}),
    "parts 2": (2, {"parts": {"saves_parts": True}}),
    "parts 3": (3, {"parts": {"saves_parts": True, "reshard": True}}),
}


def fit_and_save(
    ranks: Ranks, case: str, side: str, path: Path, step: int, resume: bool = False
) -> dict[str, Tensor]:
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


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        ("mixer adamw", "fsdp 2", "one"),
        ("mixer muon clipped", "fsdp 3", "ddp 2"),
        ("mixer adamw", "parts 2", "one"),
        ("convolutions", "parts 3", "parts 2"),
        ("convolutions ema", "parts 2", "one"),
        ("mixer muon clipped", "parts 3", "parts 2"),
        ("tied", "ddp 2", "parts 3"),
    ],
)
def test_a_run_continues_on_another_layout_to_the_same_bits(
    ranks: Ranks, tmp_path: Path, case: str, before: str, after: str
) -> None:
    path = tmp_path / "last.ckpt"
    whole = fit_and_save(ranks, case, before, path, step=1)
    assert same_bits(on_one_device(case), whole)
    saved = checkpoint_io.load(path)
    assert saved["global_step"] == 1
    assert not same_bits(whole, saved["state_dict"]), "the control"
    assert same_bits(whole, fit_and_save(ranks, case, after, path, step=2, resume=True))
    assert same_bits(whole, checkpoint_io.load(path)["state_dict"]) or "ema" in case
