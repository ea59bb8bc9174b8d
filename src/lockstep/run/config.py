"""The typed schema of `conf/`, and the checks that see more than one value.

Nothing here imports torch (except to count GPUs where there are any), so bad input is refused within a second or two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_origin, get_type_hints

from lockstep.arithmetic import layout as layouts
from lockstep.arithmetic.layout import Layout, Refusal
from lockstep.launch.environment import external_workers
from lockstep.launch.machine import computes_bf16, cpu_cap, gpu_count
from lockstep.run import debug
from lockstep.run.checks import (
    Check,
    accumulation,
    choice,
    flag,
    flag_or,
    folder,
    node,
    optional_node,
    real,
    run_name,
    show,
    text,
    unknown,
    whole,
)
from lockstep.run.targets import check_target, named
from lockstep.step import compiled
from lockstep.sweeps import options

PRECISIONS = ("64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
COMPRESSIONS = ("none", "bf16", "fp16", "powersgd")


@dataclass(frozen=True)
class Config:
    """A checked config. Units and scope of each key stand beside it in conf/train.yaml and conf/evaluate.yaml.

    Each key has its type, its check, and the value that it takes on a front page without it: evaluate.yaml has no
    training keys, train.yaml no `checkpoint`.
    """

    name: Annotated[str, run_name]
    outputs: Annotated[str, folder]
    seed: Annotated[int, whole(0, most=2**32 - 1), 0]  # as numpy takes
    model: Annotated[dict[str, Any], node, {}]
    data: Annotated[dict[str, Any], node]
    data_dir: Annotated[str, folder]
    num_workers: Annotated[int | None, whole(0, optional=True)]
    strategy: Annotated[dict[str, Any], node]
    accelerator: Annotated[str, choice("auto", "cpu", "gpu")]
    devices: Annotated[int, whole(1)]
    num_nodes: Annotated[int, whole(1)]
    rdzv_endpoint: Annotated[str | None, text]
    max_restarts: Annotated[int, whole(0), 0]
    elastic: Annotated[bool, flag, False]
    elastic_retry: Annotated[float, real(above=0), 60.0]
    hang_timeout: Annotated[float, real(above=0), 300.0]
    nonfinite: Annotated[str, choice("stop", "skip"), "stop"]
    batch_size: Annotated[int, whole(1)]
    pieces: Annotated[int | None, whole(1, optional=True)]
    accumulate_grad_batches: Annotated[int | str | None, accumulation]
    memory_budget: Annotated[float | None, real(above=0, optional=True)]
    exact: Annotated[bool, flag]
    precision: Annotated[str, choice("auto", *PRECISIONS)]
    threads: Annotated[int | None, whole(1, optional=True)]
    memory_format: Annotated[str, choice("auto", "contiguous", "channels_last")]
    allocator: Annotated[str, choice("auto", "system"), "auto"]
    compile: Annotated[str | None, compiled.mode, False]
    resident: Annotated[bool | str, flag_or("auto"), "auto"]
    max_epochs: Annotated[int, whole(1), 1]
    max_steps: Annotated[int | None, whole(1, optional=True)]
    val_every: Annotated[int | None, whole(1, optional=True)]
    lr: Annotated[float, real(above=0), 1.0]
    lr_scaling: Annotated[str, choice("none", "linear", "sqrt"), "none"]
    reference_batch_size: Annotated[int, whole(1), 1]
    optimizer: Annotated[dict[str, Any], node, {}]
    scheduler: Annotated[dict[str, Any], node, {}]
    gradient_clip_val: Annotated[float | None, real(above=0, optional=True)]
    checkpoint_every: Annotated[int | None, whole(1, optional=True)]
    log_every: Annotated[int, whole(1), 50]
    resume: Annotated[str | None, text]
    checkpoint: Annotated[str | None, text]
    callbacks: Annotated[dict[str, Any], optional_node, {}]
    logger: Annotated[dict[str, Any], optional_node, {}]
    debug: Annotated[dict[str, Any], debug.check, None]
    sweep: Annotated[dict[str, Any], options.check, {}]
    layout: Layout
    raw: dict[str, Any]  # the resolved config as plain containers, `data_dir` absolute: what a checkpoint records
    given: tuple[str, ...] = ()  # dotted keys that the user has set, on the command line

    @property
    def step_lr(self) -> float:
        """The peak learning rate after `lr_scaling`; it follows the size of a step, never the number of devices."""
        ratio = self.batch_size / self.reference_batch_size
        return self.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]


KEYS: dict[str, tuple[Check, Any]] = {  # check, and value where it is absent
    key: (*kind.__metadata__, None)[:2]
    for key, kind in get_type_hints(Config, include_extras=True).items()
    if get_origin(kind) is Annotated
}


def check(raw: Mapping[str, Any], even: bool = True, given: Iterable[str] = ()) -> Config:
    """A composed and resolved config, checked.

    Args:
        raw: plain containers (`OmegaConf.to_container(cfg, resolve=True)`).
        even: whether `batch_size` must be cut into equal pieces: in training, not in evaluation.
        given: dotted keys that the user has set.

    Raises:
        Refusal: the first thing that is wrong.
    """
    for key in raw:
        if key not in KEYS:
            raise Refusal(f"{key}: there is no such key; {unknown(str(key), sorted(KEYS))}")
    values = {key: check_one(key, raw.get(key, absent)) for key, (check_one, absent) in KEYS.items()}
    values["accelerator"] = _accelerator(values["accelerator"], values["devices"], values["precision"])
    values["precision"] = _precision(values)
    values["strategy"] = _strategy(values)
    compiled.must_work(values)
    debug.must_be_free(values)
    if values["resident"] is True and values["accelerator"] == "cpu":
        raise Refusal("resident=true: there is no GPU for the data to lie on; resident=auto")
    if values["exact"] and values["precision"] in ("16-true", "bf16-true", "16-mixed"):
        raise Refusal(f"exact=true holds for precision=64-true, 32-true and bf16-mixed, not {values['precision']}")
    for name, chosen in values["callbacks"].items():
        if chosen and not isinstance(chosen, Mapping):
            raise Refusal(f"callbacks.{name}={show(chosen)}: must be null, or a mapping with its _target_")
    for group in ("model", "data", "optimizer", "callbacks", "logger"):
        for key, target in named(group, values[group]):
            check_target(key, target)
    strategy = values["strategy"]
    strategy["balance"] = (raw.get("strategy") or {}).get("shares") == "auto"
    if values["accumulate_grad_batches"] == "auto":
        _check_auto(values)
    if values["elastic"] and (strategy["name"] != "ddp" or values["devices"] * values["num_nodes"] == 1):
        raise Refusal("elastic=true: only ddp on several devices can go on with fewer; max_restarts=1 starts it again")
    layout = layouts.resolve(
        strategy=strategy["name"],
        accelerator=values["accelerator"],
        devices=values["devices"],
        num_nodes=values["num_nodes"],
        batch_size=values["batch_size"],
        pieces=values["pieces"],
        accumulate_grad_batches=None
        if values["accumulate_grad_batches"] == "auto"
        else values["accumulate_grad_batches"],
        exact=values["exact"],
        shares=strategy["shares"],
        even=even,
    )
    if strategy["balance"] and layout.pieces < 2 * layout.num_devices:
        raise Refusal(
            f"strategy.shares=auto measures two pieces or more of each device, and there are {layout.pieces} for "
            f"{layout.num_devices}: give pieces={8 * layout.num_devices}, say"
        )
    recorded = {**raw, "data_dir": values["data_dir"]}  # it is read in other folders too
    return Config(**values, layout=layout, raw=recorded, given=tuple(given))


def _accelerator(accelerator: str, devices: int, precision: str) -> str:
    gpus = gpu_count() if accelerator != "cpu" else 0
    if accelerator == "gpu" and not gpus:
        raise Refusal("accelerator=gpu: this machine has no GPU that torch can use; accelerator=cpu simulates devices")
    found = "gpu" if gpus else "cpu"
    if found == "gpu" and devices > gpus:
        raise Refusal(
            f"devices={devices}: this machine has {gpus} GPU{'s' * (gpus > 1)}; accelerator=cpu simulates more"
        )
    if found == "cpu" and devices > cpu_cap():
        raise Refusal(
            f"devices={devices}: this machine's CPU carries {cpu_cap()} workers at most (4 a core, at least 8)"
        )
    if found == "cpu" and precision.startswith("16-"):
        raise Refusal(f"precision={precision} needs a GPU; precision=auto takes what this machine computes in")
    return found


def _precision(values: Mapping[str, Any]) -> str:
    if values["precision"] != "auto":
        return str(values["precision"])
    if values["num_nodes"] > 1:
        raise Refusal("precision=auto: machines may differ in it, a step can't; give precision=bf16-mixed or 32-true")
    return "bf16-mixed" if computes_bf16(values["accelerator"]) else "32-true"


def _strategy(values: Mapping[str, Any]) -> dict[str, Any]:
    strategy = dict(values["strategy"])
    name = choice("auto", "ddp", "dp")("strategy", strategy.get("name"))
    world = values["devices"] * values["num_nodes"]
    strategy["name"] = ("ddp" if world > 1 else "single") if name == "auto" else name
    known = {"name", "shares", "sync_batchnorm", "compression"}
    for key in strategy:
        if key not in known:
            raise Refusal(f"strategy.{key}: there is no such key; {unknown(str(key), sorted(known))}")
    strategy["sync_batchnorm"] = flag("strategy.sync_batchnorm", strategy.get("sync_batchnorm", False))
    strategy["compression"] = choice(*COMPRESSIONS)("strategy.compression", strategy.get("compression", "none"))
    shares = strategy.get("shares")
    strategy["shares"] = _shares(shares, world)
    check_nodes(values["num_nodes"], values["rdzv_endpoint"], name)
    if strategy["sync_batchnorm"]:
        if values["accelerator"] == "cpu" or strategy["name"] != "ddp":
            raise Refusal(
                "strategy.sync_batchnorm=true: torch has it for ddp on GPUs only; model.norm=group needs no syncing"
            )
        if values["exact"]:
            raise Refusal(
                "strategy.sync_batchnorm=true makes pieces depend on each other: exact=true can't hold, leave one out"
            )
        if shares is not None:
            raise Refusal("strategy.sync_batchnorm=true: all devices compute as many pieces; leave strategy.shares out")
        if values["pieces"] and values["pieces"] % world:
            raise Refusal(
                f"pieces={values['pieces']}: with strategy.sync_batchnorm=true the {world} devices must divide them"
            )
    if strategy["compression"] != "none":
        if strategy["name"] != "ddp":
            raise Refusal(f"strategy.compression={strategy['compression']}: only ddp sends gradients")
        if values["exact"]:
            raise Refusal(
                f"strategy.compression={strategy['compression']} rounds gradients: exact=true can't hold, leave one out"
            )
        if values["precision"].startswith("64"):
            raise Refusal(
                f"strategy.compression={strategy['compression']}: torch compresses float32 gradients only, not 64-true"
            )
    return strategy


def _check_auto(values: Mapping[str, Any]) -> None:
    """What can't be had while the number of pieces is still open."""
    strategy, auto = values["strategy"], "accumulate_grad_batches=auto"
    if values["pieces"]:
        raise Refusal(f"pieces={values['pieces']} fixes what {auto} looks for: leave one of the two out")
    if strategy["balance"]:
        raise Refusal(f"strategy.shares=auto deals a known number of pieces: give pieces, not {auto}")
    if strategy["sync_batchnorm"]:
        raise Refusal(f"strategy.sync_batchnorm=true: its ranks wait for each other inside a piece, so not {auto}")
    if strategy["compression"] != "none":
        raise Refusal(f"strategy.compression={strategy['compression']}: not with {auto}, which sends gradients itself")


def check_nodes(num_nodes: Any, rdzv_endpoint: Any, strategy: str) -> None:
    """What several machines need; known before one of them waits for the others.

    Raises:
        Refusal: dp, no rendezvous, or one that is no address, or that nobody else comes to.
    """
    if whole(1)("num_nodes", num_nodes) == 1:
        if rdzv_endpoint:
            raise Refusal(f"rdzv_endpoint={show(rdzv_endpoint)}: one machine meets no other; give num_nodes=2 or more")
        return
    if strategy == "dp":
        raise Refusal(f"num_nodes={num_nodes}: dp is one process on one machine; strategy=ddp spans machines")
    if not rdzv_endpoint and not external_workers():
        raise Refusal(f"num_nodes={num_nodes} needs rdzv_endpoint=<host>:<port> of one of the machines, or torchrun")
    if rdzv_endpoint and not re.fullmatch(r"\S+:\d{1,5}", str(rdzv_endpoint)):
        raise Refusal(f"rdzv_endpoint={show(rdzv_endpoint)}: must be <host>:<port> of one of the machines")


def _shares(shares: Any, world: int) -> tuple[float, ...]:
    if shares in (None, "auto"):  # auto is measured when the data is open, see lockstep.run.balance
        return ()
    if not isinstance(shares, list) or len(shares) != world:
        raise Refusal(
            f"strategy.shares={show(shares)}: must be auto, or a list of {world} numbers, one for each device"
        )
    return tuple(real(above=0)("strategy.shares", share) for share in shares)
