"""The checks of a run's config: each key by the schema, then the layout, then forbidden combinations.

This module imports torch only to count GPUs on a machine that has some, so bad input is refused in a second or two.
"""

import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lockstep.arithmetic import layout as layouts
from lockstep.arithmetic.layout import Layout
from lockstep.config import rules
from lockstep.config.arguments import experiment_keys
from lockstep.config.extras import Extra
from lockstep.config.instantiate import check_target, instantiate, targets_in
from lockstep.config.metrics import modes_with_model, with_mode
from lockstep.config.rules import refuse
from lockstep.config.schema import Keys, RunKeys, chosen_fold
from lockstep.config.value_checks import checker, override, show
from lockstep.errors import UserError
from lockstep.launch.environment import devices_of_engine, external_workers
from lockstep.launch.machine import (
    choose_devices,
    compiler_lacking,
    computes_bf16,
    cores_per_worker,
    has_amx,
)
from lockstep.launch.portable import PORTABLE, missing_instructions
from lockstep.strategies import RunSettings, Strategy
from lockstep.text import plural

EPOCHS = 20  # passes over the training set, if neither max_epochs nor max_steps is given
AMX_CORES = 8  # of a worker, up to which one thread computes bf16 with AMX


@dataclass(frozen=True, kw_only=True)
class Config(RunKeys):
    """The checked config of a run.

    The strategy's name, the devices, `batch_size`, `pieces` and `exact` are in `layout`; no other field repeats them.
    `precision` is Lightning's name, never `auto`.
    """

    data: dict[str, Any]
    strategy: Strategy  # the choice of conf/strategy/
    extras: dict[str, Extra]  # by name
    layout: Layout  # which device computes which piece of a step
    trains: bool  # false for an evaluation, which has no schedule and needs no equal pieces
    record: dict[str, Any]  # the resolved config for checkpoints, as plain containers; `data_dir` is absolute
    overridden: tuple[str, ...]  # dotted keys that the user has set on the command line
    requested: frozenset[str]  # top-level keys and groups that the user has set there, or in an experiment

    @property
    def epoch_limit(self) -> int | None:
        """The number of epochs after which training ends, unless it reaches `max_steps` first; None: no limit."""
        return EPOCHS if self.max_epochs is None and self.max_steps is None else self.max_epochs

    @property
    def worker_threads(self) -> int:
        """CPU threads of one worker."""
        if self.threads:
            return self.threads
        cores = cores_per_worker(max(1, self.layout.world_size // self.layout.num_nodes))
        on_cpu_in_bf16 = self.layout.accelerator == "cpu" and self.precision.startswith("bf16")
        # oneDNN's AMX kernels wait for their threads in a loop without sleep (docs/decisions.md).
        wait_without_sleep = on_cpu_in_bf16 and cores <= AMX_CORES and has_amx()
        # The order of sums depends on the number of threads, so under `exact` it must not depend on the layout.
        return 1 if self.layout.exact or wait_without_sleep else cores

    @property
    def scaled_lr(self) -> float:
        """The peak learning rate after `lr_scaling`. It depends on the batch size, never on the number of devices."""
        ratio = self.layout.batch_size / self.reference_batch_size
        return self.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]


check_keys = checker(Keys)


def as_plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a composed config as resolved plain containers, without Hydra's own part."""
    without_hydra = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    plain: Any = OmegaConf.to_container(without_hydra, resolve=True, throw_on_missing=True)
    return plain


def check(raw: Mapping[str, Any], trains: bool = True, overridden: Iterable[str] = ()) -> Config:
    """Check a composed config and return it. Raise a UserError about the first error.

    Args:
        raw: plain containers, see `as_plain`.
        trains: whether `batch_size` must be cut into equal pieces: in training, not in evaluation.
        overridden: dotted keys that the user has set.
    """
    overridden = tuple(overridden)
    raw = _with_engine_layout(raw, overridden)
    if "max_steps" in overridden and "max_epochs" not in overridden and raw.get("max_steps") is not None:
        raw = {**raw, "max_epochs": None}  # the user's max_steps takes precedence over an experiment's max_epochs
    keys: Keys = check_keys("", raw)
    chosen_fold(keys.data)  # raises if there is no such fold
    optimizer_lr = keys.optimizer.get("lr")
    optimizer = {name: each for name, each in keys.optimizer.items() if name != "lr"}
    if "optimizer.lr" in overridden and optimizer_lr not in (None, keys.lr):
        raise UserError(
            f"optimizer.lr={show(optimizer_lr)}: lr={show(keys.lr)} is given too and overrides it: give lr=... alone"
        )
    if "model" in raw and keys.model.get("_target_") is None:
        check_target("model._target_", "null")
    for group, value in raw.items():
        if not trains and group in ("optimizer", "scheduler"):
            continue  # the checkpoint's, which an evaluation does not make
        for key, target in targets_in(group, value):
            check_target(key, target)
    if trains:
        _refuse_not_finite("optimizer", optimizer)
        _refuse_not_finite("scheduler", keys.scheduler)
    strategy = instantiate("strategy", keys.strategy)
    if not isinstance(strategy, Strategy):
        raise UserError(f"strategy._target_={keys.strategy['_target_']}: must be a lockstep.strategies.Strategy")
    accelerator, devices = choose_devices(keys.accelerator, keys.devices)
    rules.refuse_several_workers(strategy)
    layout = layouts.resolve(
        strategy=strategy.name,
        accelerator=accelerator,
        devices=devices,
        num_nodes=keys.num_nodes,
        batch_size=keys.batch_size,
        pieces=keys.pieces,
        accumulate_grad_batches=keys.accumulate_grad_batches,
        exact=keys.exact,
        shares=strategy.shares,
        weights=strategy.weights,
        one_process=strategy.one_process,
        equal_pieces=trains,
    )
    precision = keys.precision
    if precision == "auto":
        precision = "bf16-mixed" if computes_bf16(accelerator) else "32-true"
    _check_pairs(keys, layout, precision)
    _check_shares(layout, trains)
    run_keys = {field.name: getattr(keys, field.name) for field in fields(RunKeys)}
    run_keys |= {"optimizer": optimizer, "precision": precision}
    modes = _with_modes(keys) if trains else {}
    run_keys |= modes
    extras = _extras(keys, trains)
    lr_of_config = ["lr"] * (optimizer_lr not in (None, keys.lr))  # train.yaml itself sets another one
    config = Config(
        **run_keys,
        data=dict(keys.data),
        strategy=strategy,
        extras=extras,
        layout=layout,
        trains=trains,
        # `data_dir` must be valid from any working folder; the learning rate is recorded once, as `lr`
        record={
            **raw,
            "data_dir": keys.data_dir,
            **({"optimizer": optimizer} if "optimizer" in raw else {}),
            **{key: value for key, value in modes.items() if key in raw},
        },
        overridden=overridden,
        requested=frozenset({*(key.partition(".")[0] for key in overridden), *experiment_keys(), *lr_of_config}),
    )
    refuse(strategy.conflicts(RunSettings(layout, precision, keys.compile, keys.elastic)))
    refuse((extra.setting, *rule) for extra in extras.values() for rule in extra.conflicts(config))
    return config


def _refuse_not_finite(group: str, options: Mapping[str, Any]) -> None:
    """Refuse options that are inf or NaN. Classes of torch take them, and the run fails later."""
    for name, value in options.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            raise UserError(f"{group}.{name}={show(value)}: must be finite")


def _with_modes(keys: Keys) -> dict[str, Any]:
    """Return callbacks and the schedule with each `mode` that is known of its metric.

    Raises:
        UserError: A mode contradicts its metric.
    """
    modes = modes_with_model(keys.model)
    callbacks = {
        name: with_mode(f"callbacks.{name}", options, modes, required=False) if options else options
        for name, options in keys.callbacks.items()
    }
    return {"callbacks": callbacks, "scheduler": with_mode("scheduler", keys.scheduler, modes, required=False)}


def _extras(keys: Keys, trains: bool) -> dict[str, Extra]:
    """Create the chosen extras. Return them by name."""
    extras = {}
    for name, options in keys.extras.items():
        if not options:
            continue
        if not trains:
            raise UserError(f"extras=[{name}]: extras take part in training only: leave it out")
        extra = instantiate(f"extras.{name}", options)
        if not isinstance(extra, Extra):
            raise UserError(f"extras.{name}._target_={options['_target_']}: must be a lockstep.config.extras.Extra")
        extra.name = name
        extras[name] = extra
    return extras


def _with_engine_layout(raw: Mapping[str, Any], overridden: Iterable[str]) -> dict[str, Any]:
    """Return the config with the devices and machines for which an engine (torchrun, SLURM, MPI) started workers.

    Refuse other numbers. Without an engine, refuse several machines and return the config unchanged.
    """
    nodes, devices = raw.get("num_nodes", 1), raw.get("devices", 1)
    workers = external_workers()
    if not workers:
        rules.refuse_several_machines(nodes, lambda: _torchrun(nodes, devices))
        return dict(raw)
    chosen = {key: raw[key] for key in ("devices", "num_nodes") if raw.get(key, 1) != 1 or key in overridden}
    shown = {key: value if isinstance(value, int) else show(value) for key, value in chosen.items()}
    return {**raw, **devices_of_engine(shown)}


def _torchrun(nodes: int, devices: Any) -> str:
    """Return the command that starts this run on each of several machines."""
    task = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    rest = [override for override in task if not override.startswith(("devices=", "num_nodes="))]
    if not any(override.startswith("strategy=") for override in rest):
        rest.insert(0, "strategy=ddp")
    program = os.path.relpath(sys.argv[0]) if sys.argv[0].endswith(".py") else "src/train.py"
    torchrun = f"torchrun --nnodes={nodes} --nproc-per-node={devices} --rdzv-backend=c10d"
    return f"{torchrun} --rdzv-endpoint=<host of one of them>:29500 {program} {shlex.join(rest)}"


def _check_pairs(keys: Keys, layout: Layout, chosen_precision: str) -> None:
    """Refuse forbidden combinations of settings, and settings that this machine can't fulfil.

    Args:
        keys: the settings.
        layout: the layout that follows from them.
        chosen_precision: what `precision=auto` is on this machine, or else the precision given.
    """
    precision, deterministic = f"precision={keys.precision}", keys.debug.trainer.get("deterministic", True)
    # Each of the following is a setting as it is typed, or "" if it is not chosen; see `refuse`.
    exact = f"exact={show(keys.exact)}" * bool(keys.exact)
    portable = exact * (keys.exact == PORTABLE)
    cpu = "accelerator=cpu" * (layout.accelerator == "cpu")
    other_than_ddp = f"strategy={layout.strategy}" * (layout.strategy != "ddp")
    compiled = "compile=true" * keys.compile
    nodes = f"num_nodes={layout.num_nodes}" * (layout.num_nodes > 1)
    # Lightning refuses clipping with a fused optimizer for every mixed precision
    clipped = "gradient_clip_val" * (keys.gradient_clip_val is not None and chosen_precision.endswith("mixed"))
    fused = f"optimizer.fused=true with {precision}" * bool(keys.optimizer.get("fused"))
    tf32 = "speed.tf32=true" * (keys.speed.tf32 is True)
    without_float32 = chosen_precision in ("64-true", "bf16-true", "16-true")
    graphs = "speed.cuda_graphs=true" * keys.speed.cuda_graphs
    in_turn = f"{max(layout.counts)} pieces on one device" * (max(layout.counts) > 1)
    extras = ", ".join(name for name, options in keys.extras.items() if options)
    cannot_shrink = other_than_ddp or "devices=1" * (layout.num_devices == 1)
    pairs = (
        (precision * (keys.precision == "auto"), nodes, "machines may choose differently; give bf16-mixed or 32-true"),
        (fused, clipped, "a fused optimizer removes the loss scale only after clipping; give optimizer.fused=false"),
        (
            f"debug.trainer.deterministic={show(deterministic)}" * (deterministic is not True),
            exact,
            "exact needs deterministic kernels; leave it out",
        ),
        (compiled, portable, "compiled code differs between processors; give compile=false"),
        (
            "elastic=true" * keys.elastic,
            cannot_shrink,
            "only ddp on several devices can continue with fewer; give max_restarts=1 instead",
        ),
        *_survival_pairs(keys, layout, extras),
        (
            f"data.mix={keys.data.get('mix')}" * bool(keys.data.get("mix")),
            f"pieces={layout.pieces}" * (layout.piece_size == 1),
            f"a piece of batch_size={layout.batch_size} is one sample: there is none to mix it with; give fewer pieces",
        ),
        (graphs, cpu, "a CPU has no CUDA graphs; leave it out"),
        (graphs, "compile=false" * (not keys.compile), "graphs are recorded of compiled networks; give compile=true"),
        (graphs, exact, "whether a graph has the same bits is not known; give speed.cuda_graphs=false"),
        # https://github.com/pytorch/pytorch/issues/169545: the second backward pass overwrites the first one's gradient
        (graphs, in_turn, "torch can't add gradients that are a graph's; give as many pieces as devices"),
        (graphs, f"extras=[{extras}]" * bool(extras), "an extra may keep a gradient, which a graph overwrites"),
        (tf32, cpu, "a CPU has no TF32; leave it out"),
        (tf32, precision * without_float32, "nothing is computed in float32; give precision=32-true, or leave it out"),
        (
            "speed.resident=true" * (keys.speed.resident is True),
            cpu,
            "there is no GPU to hold the data; give speed.resident=auto",
        ),
    )
    algorithm = None if keys.gradient_clip_algorithm == "norm" else keys.gradient_clip_algorithm  # the default
    options = {"gradient_clip_val": keys.gradient_clip_val, "gradient_clip_algorithm": algorithm}
    options |= {"benchmark": keys.debug.trainer.get("benchmark")}
    rules.check_pairs(layout, keys.precision, options, _typed)
    refuse(pairs)
    if portable and (missing := missing_instructions()):
        raise UserError(f"{portable}: this processor has no {' and '.join(missing)}: give exact=true")
    if tf32 and not computes_bf16("gpu"):  # the same GPUs have bf16 and TF32
        raise UserError(f"{tf32}: this GPU has no TF32, which came with NVIDIA's Ampere: leave it out")
    if compiled and (reason := compiler_lacking(layout.accelerator)):
        raise UserError(f"{compiled} needs {reason}")


def _survival_pairs(keys: Keys, layout: Layout, extras: str) -> Iterable[tuple[str, str, str]]:
    """Yield the pairs of settings that `survive=true` can't be combined with, and why."""
    survive, other = "survive=true" * keys.survive, "give max_restarts=3 instead"
    one = "devices=1" * (layout.num_devices == 1)
    other_than_ddp = f"strategy={layout.strategy}" * (layout.strategy != "ddp")
    yield survive, one, "no other worker could go on; give devices=4, or survive=false"
    yield survive, other_than_ddp, f"only with ddp each worker has all weights; {other}"
    gpu = "accelerator=gpu" * (layout.accelerator == "gpu")
    yield survive, gpu, f"NCCL aborts the workers that have lost one; {other}"
    yield survive, "exact=false" * (not layout.exact), "fewer workers would round otherwise; give exact=true"
    yield survive, f"extras=[{extras}]" * bool(extras), f"an extra may have a state that no checkpoint has; {other}"
    yield survive, "elastic=true" * keys.elastic, "it goes on with fewer workers by itself; leave elastic out"
    yield survive, sys.platform * (sys.platform != "linux"), f"only Linux lists a process's sockets; {other}"


def _typed(name: str, value: Any) -> str:
    """Return a setting as it is typed on the command line."""
    return override(f"debug.trainer.{name}" if name == "benchmark" else name, value)


def _check_shares(layout: Layout, trains: bool) -> None:
    """Refuse shares that would distribute the pieces of training as none would."""
    shares = layout.shares
    if trains and _shares_change_nothing(layout):
        suitable = (each.pieces for each in layout.with_more_pieces() if not _shares_change_nothing(each))
        pieces = next(suitable, None)
        remedy = f"give pieces={pieces}" if pieces else "leave them out"
        wrong = f"{plural(layout.pieces, 'piece')} would be distributed as without shares"
        raise UserError(f"strategy.shares={list(shares)}: {wrong}: {remedy}")


def _shares_change_nothing(layout: Layout) -> bool:
    """Check whether unequal shares give each device as many pieces as no shares would."""
    return len(set(layout.shares)) > 1 and layout.counts == replace(layout, shares=()).counts
