"""Small networks with weights that are sharded, and their training: by `lockstep.Trainer`, or on ranks as threads."""

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rank_fits import Fit, Numbers, fit, layout_of
from thread_ranks import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader, Subset

import lockstep
from lockstep.callbacks import ReplicaConsistencyCheck
from lockstep.callbacks.ema import EMA
from lockstep.checkpoint.io import AtomicCheckpointIO
from lockstep.data import Spec, Splits
from lockstep.errors import UserError
from lockstep.step.finite import FiniteGradientCheck
from lockstep.vision.optimizers import Muon

# autograd decides at the first backward pass of a process whether forks may compute gradients too
torch.ones(1, requires_grad=True).sum().backward()
SAMPLES, BATCH, WIDTH = 26, 12, 75  # the last step has two samples; 301 x 75 elements are more than SMALL


class Block(nn.Module):
    """A transformer block of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 5, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 301), nn.GELU(), nn.Dropout(0.1), nn.Linear(301, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class ViT(nn.Module):
    """A small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x.mean(1))
        return result


class Mixer(nn.Module):
    """Blocks of layers of odd sizes, which take less time."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(144, 33)
        layers: Any = [
            (nn.LayerNorm(33), nn.Linear(33, 521), nn.GELU(), nn.Dropout(0.1), nn.Linear(521, 33)) for _ in range(2)
        ]
        self.blocks = nn.ModuleList(nn.Sequential(*each) for each in layers)
        self.head = nn.Linear(33, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.head(x)
        return result


class Wrapped(Mixer):
    """Its state_dict has other names than the module, as torch's activation checkpointing makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in self.blocks)
        nn.init.zeros_(self.head.bias)  # so that each case has weights of its own


class Renamed(Mixer):
    """Its own code renames what its state_dict has, adds a tensor, and takes both back."""

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        for name in [name for name in state if name.startswith(f"{prefix}blocks.")]:
            state[name.replace("blocks.", "layers.")] = state.pop(name)
        state[f"{prefix}version"] = torch.tensor(2)
        return state

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.rename_back)

    @staticmethod
    def rename_back(module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}layers.")]:
            state[name.replace("layers.", "blocks.")] = state.pop(name)
        state.pop(f"{prefix}version", None)


class Stem(ViT):
    """Has a large weight outside of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(144, 144)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.stem(x.flatten(1)).view_as(x))


def convolutions() -> nn.Module:
    """Return a network with BatchNorm and weights in channels_last."""
    layers = [nn.Conv2d(1, 48, 3), nn.BatchNorm2d(48), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(48, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 3)).to(
        memory_format=torch.channels_last
    )


class Twice(nn.Module):
    """Uses a block twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(144, 144) for _ in range(2))
        self.head = nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](x.flatten(1)).relu()
        result: Tensor = self.head(self.layers[0](self.layers[0](x).relu()))
        return result


class Tied(nn.Module):
    """An encoder and a decoder with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(144, 151), nn.Linear(144, 151)
        self.decoder.weight = self.encoder.weight
        self.middle = nn.Sequential(nn.Linear(151, 144), nn.Tanh(), nn.Linear(144, 144), nn.Linear(144, 144))
        self.head = nn.Linear(151, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.decoder(self.middle(self.encoder(x.flatten(1)))))
        return result


def frozen() -> nn.Module:
    """Return a network with a frozen part."""
    net = ViT()
    net.patches.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    return net


class Unfreezes(pl.Callback):
    """Unfreezes all parameters after an epoch."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.requires_grad_(True)


NETS: dict[str, Any] = {
    "vit": ViT,
    "mixer": Mixer,
    "stem": Stem,
    "wrapped": Wrapped,
    "renamed": Renamed,
    "convolutions": convolutions,
    "tied": Tied,
    "frozen": frozen,
    "twice": Twice,
    "small": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 3)),  # nothing is sharded
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "muon": partial(Muon, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
}
# what is trained, by name: the network, the optimizer, and options of the Trainer
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit sgd": ("vit", "sgd", {}),
    "vit adamw": ("vit", "adamw", {}),
    "vit adagrad": ("vit", "adagrad", {}),
    "vit fused on a CPU": ("vit", "fused", {}),
    "vit muon clipped": ("vit", "muon", {"gradient_clip_val": 0.1}),
    "vit clipped": ("vit", "adamw", {"gradient_clip_val": 0.1}),
    "vit clipped values": ("vit", "sgd", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "vit bf16": ("vit", "adamw", {"precision": "bf16-mixed"}),
    "vit in double": ("vit", "sgd", {"precision": "64-true"}),
    "vit ema": ("vit", "sgd", {"callbacks": EMA}),
    "vit skips a step": ("vit", "muon", {"nonfinite": "skip", "broken": 3}),
    "mixer adamw": ("mixer", "adamw", {}),
    "mixer muon clipped": ("mixer", "muon", {"gradient_clip_val": 0.1}),
    "stem": ("stem", "sgd", {}),
    "wrapped": ("wrapped", "adamw", {}),
    "wrapped ema": ("wrapped", "adamw", {"callbacks": EMA}),
    "renamed": ("renamed", "sgd", {}),
    "small": ("small", "sgd", {}),
    "vit uneven": ("vit", "sgd", {"pieces": 4}),
    "convolutions ema": ("convolutions", "sgd", {"callbacks": EMA}),
    "convolutions": ("convolutions", "sgd", {"gradient_clip_val": 0.1}),
    "tied": ("tied", "adamw", {}),
    "frozen": ("frozen", "sgd", {}),
    "unfrozen": ("frozen", "adamw", {"callbacks": Unfreezes}),
    "twice": ("twice", "sgd", {}),
}


def by_day(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`; those that are not chosen are run by night."""
    return [
        pytest.param(*((each,) if isinstance(each, str) else each), marks=() if each in chosen else pytest.mark.nightly)
        for each in cases
    ]


class Classifier(pl.LightningModule):
    """Trains a network."""

    def __init__(self, net: str = "vit", optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.kind = NETS[net](), optimizer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.kind](self.parameters())


def acting(moment: str, action: Callable[..., Any], net: str = "mixer", optimizer: str = "sgd") -> Classifier:
    """Return a module whose hook of some name does something with it: `action(module, *arguments)`."""
    act = {moment: lambda self, *arguments, **options: action(self, *arguments)}
    module: Classifier = type("Acts", (Classifier,), act)(net, optimizer)
    return module


def samples(number: int = SAMPLES, broken: int | None = None) -> Numbers:
    """Return random samples. The sample `broken` has a value that is not finite."""
    x = torch.randn(number, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    if broken is not None:
        x[broken, 0, 5, 5] = torch.inf
    return Numbers(x, torch.arange(number) % 3)


def trainer_on(strategy: Any, folder: Path | str, **options: Any) -> lockstep.Trainer:
    """Return a Trainer that prints nothing; `options` are further arguments of it."""
    chosen: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lockstep.Trainer(strategy=strategy, default_root_dir=folder, **{**chosen, **options})


def train(
    folder: Path | str,
    strategy: Any,
    net: str,
    optimizer: str,
    ckpt_path: Any = None,
    states: list[Any] | None = None,
    broken: int | None = None,
    kind: type[Classifier] = Classifier,
    **options: Any,
) -> str:
    """Train and return the SHA-256 of the weights, on rank zero. Append the weights to `states`."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    if callbacks := options.pop("callbacks", None):
        options["callbacks"] = [callbacks()]
    chosen: dict[str, Any] = {"pieces": 6, "exact": True, "max_epochs": 2, **options}
    trainer = trainer_on(strategy, folder, **chosen)
    module = kind(net, optimizer)
    loaders = DataLoader(samples(broken=broken), batch_size=BATCH, shuffle=True), DataLoader(samples(5), batch_size=1)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    strategy_of_run: Any = trainer.strategy
    state = strategy_of_run.lightning_module_state_dict()
    if states is not None:
        states.append({name: value.clone() for name, value in state.items()})
    return lockstep.weights_sha256(state)


def on(devices: int, function: Any, *args: Any) -> Any:
    """Call a function in this process, or in several workers."""
    if devices == 1:
        return function(*args)
    return lockstep.launch(function, *args, devices=devices, accelerator="cpu", hang_timeout=120)


# --- on ranks that are threads ---


def rank_fit(
    rank: int,
    module: pl.LightningModule,
    world: int,
    strategy: str = "fsdp",
    exact: bool = True,
    pieces: int = 4,
    train: int = 9,
    broken: int | None = None,
    nonfinite: str = "stop",
    callbacks: Callable[[], pl.Callback] | None = None,
    **options: Any,
) -> Fit:
    """Fit a copy of a module as a rank. By default an epoch has two steps, of eight samples and of one.

    So ranks have different numbers of pieces, or none. By default there is no validation.

    Args:
        strategy: that of more than one rank.
        pieces: of a step, of two samples each.
        train: number of samples.
        broken: see `samples`.
        nonfinite: what follows a gradient that is not finite.
        callbacks: makes a callback.
        options: further ones of `rank_fits.fit`.
    """
    data, evaluated = samples(train, broken), Subset(samples(5), range(5))
    usual: dict[str, Any] = {
        "data": Splits(data, evaluated, evaluated, Spec(1, 12, tuple("abc")), ""),
        "hooks_of": lambda gradients: [FiniteGradientCheck(nonfinite)],
        "callbacks_of": lambda: [ReplicaConsistencyCheck(), *([callbacks()] if callbacks else [])],
        "plugins_of": lambda: [AtomicCheckpointIO()],
        "limit_val_batches": 0,
    }
    layout = layout_of(world, exact, 2 * pieces, pieces, strategy=strategy if world > 1 else "single")
    return fit(rank, module, layout, **usual | options)


def rank_fits_of(ranks: Ranks, module: pl.LightningModule, world: int, **options: Any) -> dict[str, Tensor]:
    """Fit a module on ranks. Return the weights and buffers, as rank zero has them."""
    if world == 1:
        return rank_fit(0, module, 1, **options).state
    results: list[Fit] = ranks(world, lambda rank: rank_fit(rank, module, world, **options))
    return results[0].state


def refusals(ranks: Ranks, module: pl.LightningModule, errors: Any = UserError, **options: Any) -> list[str]:
    """Fit a module on two ranks. Return the text of the error of each."""
    return [str(each) for each in ranks(2, lambda rank: rank_fit(rank, module, 2, **options), errors=errors)]
