"""A run's config, checked: each key by the schema, then what can't go together, then the layout that they make.

Nothing here imports torch (except to count GPUs where there are any), so bad input is refused within a second or two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lockstep.arithmetic import layout as layouts
from lockstep.arithmetic.layout import Layout, Refusal
from lockstep.launch.environment import external_workers
from lockstep.launch.machine import computes_bf16, cpu_cap, gpu_count
from lockstep.run.checks import checker, show
from lockstep.run.schema import Kept, Keys, StrategyOptions
from lockstep.run.targets import check_target, named
from lockstep.step.compiled import GRAPHS, lacking

EXACT = ("64-true", "32-true", "bf16-mixed")  # precisions whose sums it can make independent of their order


@dataclass(frozen=True, kw_only=True)
class Config(Kept):
    """What a run needs to know. Strategy, devices, sizes and `exact` stand in the layout alone.

    Attributes:
        precision: Lightning's name, never `auto`.
        layout: who computes which piece of a step.
        strategy: what else its strategy can be told.
        auto_accumulate: whether the layout's number of pieces is only the first one to be tried.
        trains: false for an evaluation, which has no schedule, and whose steps need no equal pieces.
        record: the resolved config as plain containers, `data_dir` absolute: what a checkpoint records.
        given: dotted keys that the user has set, on the command line.
    """

    data: dict[str, Any]
    strategy: StrategyOptions
    layout: Layout
    auto_accumulate: bool
    trains: bool
    record: dict[str, Any]
    given: tuple[str, ...]

    @property
    def step_lr(self) -> float:
        """The peak learning rate after `lr_scaling`; it follows the size of a step, never the number of devices."""
        ratio = self.layout.batch_size / self.reference_batch_size
        return self.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]


check_keys = checker(Keys)


def check(raw: Mapping[str, Any], trains: bool = True, given: Iterable[str] = ()) -> Config:
    """A composed and resolved config, checked.

    Args:
        raw: plain containers (`OmegaConf.to_container(cfg, resolve=True)`).
        trains: whether `batch_size` must be cut into equal pieces: in training, not in evaluation.
        given: dotted keys that the user has set.

    Raises:
        Refusal: the first thing that is wrong.
    """
    keys: Keys = check_keys("", dict(raw))
    name, auto = keys.strategy.name, keys.accumulate_grad_batches == "auto"
    accelerator = _accelerator(keys)
    check_nodes(keys.num_nodes, keys.rdzv_endpoint, name)
    layout = layouts.resolve(
        strategy=("ddp" if keys.devices * keys.num_nodes > 1 else "single") if name == "auto" else name,
        accelerator=accelerator,
        devices=keys.devices,
        num_nodes=keys.num_nodes,
        batch_size=keys.batch_size,
        pieces=keys.pieces,
        accumulate_grad_batches=None if keys.accumulate_grad_batches == "auto" else keys.accumulate_grad_batches,
        exact=keys.exact,
        shares=keys.strategy.shares or (),
        even=trains,
    )
    if (wrong := next(_at_odds(keys, layout), None)) is not None:
        raise Refusal(wrong)
    for group in ("model", "data", "optimizer", "callbacks", "logger"):
        for key, target in named(group, getattr(keys, group)):
            check_target(key, target)
    kept = {field.name: getattr(keys, field.name) for field in fields(Kept)}
    if keys.precision == "auto":
        kept["precision"] = "bf16-mixed" if computes_bf16(accelerator) else "32-true"
    return Config(
        **kept,
        data=dict(keys.data),
        strategy=StrategyOptions(sync_batchnorm=keys.strategy.sync_batchnorm, compression=keys.strategy.compression),
        layout=layout,
        auto_accumulate=auto,
        trains=trains,
        record={**raw, "data_dir": keys.data_dir},  # it is read in other folders too
        given=tuple(given),
    )


def _accelerator(keys: Keys) -> str:
    gpus = gpu_count() if keys.accelerator != "cpu" else 0
    if keys.accelerator == "gpu" and not gpus:
        raise Refusal("accelerator=gpu: this machine has no GPU that torch can use; accelerator=cpu simulates devices")
    if gpus and keys.devices > gpus:
        raise Refusal(
            f"devices={keys.devices}: this machine has {gpus} GPU{'s' * (gpus > 1)}; accelerator=cpu simulates more"
        )
    if not gpus and keys.devices > cpu_cap():
        raise Refusal(
            f"devices={keys.devices}: this machine's CPU carries {cpu_cap()} workers at most (4 a core, at least 8)"
        )
    return "gpu" if gpus else "cpu"


def check_nodes(num_nodes: int, rdzv_endpoint: str | None, strategy: str) -> None:
    """What several machines need; known before one of them waits for the others.

    Raises:
        Refusal: dp, no rendezvous, or one that is no address, or that nobody else comes to.
    """
    if num_nodes == 1:
        if rdzv_endpoint:
            raise Refusal(f"rdzv_endpoint={show(rdzv_endpoint)}: one machine meets no other; give num_nodes=2 or more")
        return
    if strategy == "dp":
        raise Refusal(f"num_nodes={num_nodes}: dp is one process on one machine; strategy=ddp spans machines")
    if not rdzv_endpoint and not external_workers():
        raise Refusal(f"num_nodes={num_nodes} needs rdzv_endpoint=<host>:<port> of one of the machines, or torchrun")
    if rdzv_endpoint and not re.fullmatch(r"\S+:\d{1,5}", str(rdzv_endpoint)):
        raise Refusal(f"rdzv_endpoint={show(rdzv_endpoint)}: must be <host>:<port> of one of the machines")


def _at_odds(keys: Keys, layout: Layout) -> Iterator[str]:
    """What can't go together, each in one line."""
    for part in (_precision_at_odds, _strategy_at_odds, _compile_at_odds, _auto_at_odds):
        yield from part(keys, layout)
    if keys.elastic and (layout.strategy != "ddp" or layout.num_devices == 1):
        yield "elastic=true: only ddp on several devices can go on with fewer; max_restarts=1 starts it again"
    if keys.resident is True and layout.accelerator == "cpu":
        yield "resident=true: there is no GPU for the data to lie on; resident=auto"
    if keys.exact and keys.debug.trainer.get("benchmark"):
        yield "debug.trainer.benchmark=true chooses kernels by their speed, so not with exact=true"
    for name, chosen in keys.callbacks.items():
        if chosen and not isinstance(chosen, Mapping):
            yield f"callbacks.{name}={show(chosen)}: must be null, or a mapping with its _target_"


def _precision_at_odds(keys: Keys, layout: Layout) -> Iterator[str]:
    if keys.precision == "auto" and layout.num_nodes > 1:
        yield "precision=auto: machines may differ in it, a step can't; give precision=bf16-mixed or 32-true"
    if layout.accelerator == "cpu" and keys.precision.startswith("16-"):
        yield f"precision={keys.precision} needs a GPU; precision=auto takes what this machine computes in"
    if keys.exact and keys.precision not in ("auto", *EXACT):
        yield f"exact=true holds for precision={', '.join(EXACT[:-1])} and {EXACT[-1]}, not {keys.precision}"


def _strategy_at_odds(keys: Keys, layout: Layout) -> Iterator[str]:
    shares, world = keys.strategy.shares, layout.num_devices
    if shares is not None and len(shares) != world:
        yield f"strategy.shares={show(list(shares))}: must be a list of {world} numbers, one for each device"
    if keys.strategy.sync_batchnorm:
        asked = "strategy.sync_batchnorm=true"
        if layout.accelerator == "cpu" or layout.strategy != "ddp":
            yield f"{asked}: torch has it for ddp on GPUs only; model.norm=group needs no syncing"
        if keys.exact:
            yield f"{asked} makes pieces depend on each other: exact=true can't hold, leave one out"
        if shares is not None:
            yield f"{asked}: all devices compute as many pieces; leave strategy.shares out"
        if layout.pieces % world:
            yield f"pieces={layout.pieces}: with {asked} the {world} devices must divide them"
    if keys.strategy.compression != "none":
        asked = f"strategy.compression={keys.strategy.compression}"
        if layout.strategy != "ddp":
            yield f"{asked}: only ddp sends gradients"
        if keys.exact:
            yield f"{asked} rounds gradients: exact=true can't hold, leave one out"
        if keys.precision.startswith("64"):
            yield f"{asked}: torch compresses float32 gradients only, not 64-true"


def _compile_at_odds(keys: Keys, layout: Layout) -> Iterator[str]:
    if keys.compile is None:
        return
    asked = f"compile={'true' if keys.compile == 'default' else keys.compile}"
    if layout.strategy == "dp":
        yield f"{asked}: strategy=dp gives a network other devices' weights, a compiled one has its own; ddp"
    if keys.strategy.sync_batchnorm:
        yield f"{asked}: strategy.sync_batchnorm=true waits for other ranks inside a network; leave one out"
    if keys.compile in GRAPHS and layout.accelerator == "cpu":
        yield f"{asked}: CUDA graphs need a GPU; compile={GRAPHS[keys.compile]} does without them"
    if keys.compile in GRAPHS and keys.accumulate_grad_batches == "auto":
        yield f"accumulate_grad_batches=auto: CUDA graphs don't give memory back, so not with {asked}; compile=true"
    if keys.compile.startswith("max-autotune") and keys.exact:
        yield f"{asked} chooses kernels by their speed, so not with exact=true; compile=true"
    if keys.memory_budget and layout.accelerator == "cpu":
        yield f"memory_budget on a CPU counts tensors, and {asked} hides them: leave one of the two out"
    if reason := lacking(layout.accelerator):
        yield f"{asked} needs {reason}"


def _auto_at_odds(keys: Keys, layout: Layout) -> Iterator[str]:
    """What can't be had while the number of pieces is still open."""
    if keys.accumulate_grad_batches != "auto":
        return
    auto = "accumulate_grad_batches=auto"
    if keys.pieces:
        yield f"pieces={keys.pieces} fixes what {auto} looks for: leave one of the two out"
    if keys.strategy.sync_batchnorm:
        yield f"strategy.sync_batchnorm=true: its ranks wait for each other inside a piece, so not {auto}"
    if keys.strategy.compression != "none":
        yield f"strategy.compression={keys.strategy.compression}: not with {auto}, which sends gradients itself"
