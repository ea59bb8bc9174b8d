"""The options of a `lockstep.Trainer`: they are checked before anything starts."""

import difflib
import inspect
import os
import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, get_type_hints

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lockstep.arithmetic.layout import Layout
from lockstep.config import rules
from lockstep.config.schema import Keys
from lockstep.config.value_checks import checker
from lockstep.errors import UserError
from lockstep.launch.environment import devices_of_engine, external_workers
from lockstep.launch.machine import choose_devices
from lockstep.launch.process_group import gather_objects
from lockstep.lightning.private_names import device_of, unusual_option
from lockstep.strategies import DDP, DP, FSDP, Strategy

STRATEGIES: dict[str, type[Strategy]] = {"auto": DDP, "ddp": DDP, "dp": DP, "fsdp": FSDP}
ACCELERATORS = {"auto": "auto", "cpu": "cpu", "gpu": "gpu", "cuda": "gpu"}
PRECISIONS = {
    None: "32-true",
    32: "32-true",
    "32": "32-true",
    64: "64-true",
    "64": "64-true",
    16: "16-mixed",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}
LIGHTNINGS = {name: each for name, each in inspect.signature(pl.Trainer.__init__).parameters.items() if name != "self"}
OURS = ("batch_size", "pieces", "exact", "seed", "nonfinite", "checkpoint_every")  # that Lightning's Trainer lacks
KINDS = get_type_hints(Keys, include_extras=True)  # of the arguments that are keys of a config, too
# Of names as `ddp_spawn`: Lockstep starts processes by itself, and a parameter without a gradient needs no option.
DDP_OPTIONS = re.compile("(?<=^ddp)(_spawn|_fork|_notebook)?(_find_unused_parameters_(true|false))?$")
# Options of Lightning's Trainer that can't work with steps in pieces, each with its default and what to do instead.
REFUSED_OPTIONS = {
    "plugins": (None, "Lockstep has its own: leave it out"),
    "reload_dataloaders_every_n_epochs": (0, "the training set must stay, since the order of its samples follows it"),
    "barebones": (False, "leave it out"),
    "model_registry": (None, "leave it out"),
}
# What options are called here that have, or had, another name elsewhere.
ELSEWHERE = {
    "gpus": "use devices",
    "hang_timeout": "give it to lockstep.launch",
    "resume_from_checkpoint": "give fit a ckpt_path",
}


def check_arguments(**arguments: Any) -> None:
    """Refuse arguments that are keys of a config, too, by the checks of these keys. None: the Trainer chooses."""
    for name, value in arguments.items():
        if value is not None:
            checker(KINDS[name], lambda name, value: f"Trainer({name}={value!r})")(name, value)


def refuse_beside_layout(**options: Any) -> None:
    """Refuse options, other than None, that a Trainer with a layout would ignore."""
    if chosen := [f"{name}={value}" for name, value in options.items() if value is not None]:
        raise UserError(f"Trainer(layout=..., {chosen[0]}): the config of the layout decides it: leave {chosen[0]} out")


def chosen_seed(seed: int | None) -> Any:
    """Return the run's seed: the given one, else that of `lightning.pytorch.seed_everything`, else 0.

    All ranks must call it.
    """
    if seed is not None:
        return seed
    text = os.environ.get("PL_GLOBAL_SEED", "")
    seeds = gather_objects(int(text) if text.isdigit() else 0)
    if len(set(seeds)) > 1:
        raise UserError(
            f"the ranks have called seed_everything with unlike seeds ({', '.join(map(str, seeds))}): the order of the "
            "samples follows from it, so give all the same, or Trainer(seed=...)"
        )
    return seeds[0]


def whole_number_of(devices: Any, accelerator: Any) -> Any:
    """Return the number of devices that Lightning's spellings mean: `[0, 1]`, "0,1", "2"; other values as they are."""
    if isinstance(devices, str) and devices.strip().removeprefix("-").isdigit():
        return int(devices)
    parts: Any = devices
    if isinstance(devices, str) and "," in devices:
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        parts = [int(part) if part.isdigit() else part for part in parts]
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        return devices
    if not parts or any(not isinstance(part, int) or isinstance(part, bool) for part in parts):
        raise UserError(f"Trainer(devices={devices!r}): must be a number of devices, or a list of their indices")
    if list(parts) != list(range(len(parts))) and accelerator != "cpu":
        indices = ",".join(map(str, parts))
        raise UserError(
            f"Trainer(devices={devices!r}): must be the first ones: use devices={len(parts)} in an environment with "
            f"CUDA_VISIBLE_DEVICES={indices}"
        )
    return len(parts)


def name_of(accelerator: Any, strategy: Any) -> Any:
    """Return the name of an accelerator object of Lightning, or of a strategy's device; other values as they are."""
    for kind, name in ((CPUAccelerator, "cpu"), (CUDAAccelerator, "gpu")):
        if isinstance(accelerator, kind):
            accelerator = name
    if not isinstance(strategy, SingleDeviceStrategy):
        return accelerator
    device = device_of(strategy)
    wanted = ACCELERATORS.get(device.type, device.type)
    if ACCELERATORS.get(accelerator, accelerator) not in ("auto", wanted):
        raise UserError(f"Trainer(accelerator={accelerator!r}) has a strategy on {device}: leave accelerator out")
    if device.index and wanted == "gpu":
        raise UserError(
            f"Trainer(strategy=a {type(strategy).__name__} on {device}): must be the first one: use 'auto' in an "
            f"environment with CUDA_VISIBLE_DEVICES={device.index}"
        )
    return wanted


def with_options_of_lightning(init: Any) -> Any:
    """Give a Trainer's `__init__` a signature with Lightning's options, which LightningCLI and editors read.

    Arguments without names are those of Lightning's Trainer, in its order. `PL_TRAINER_DEVICES` and such variables of
    the environment are the defaults, unless a config decides.
    """

    @wraps(init)
    def with_names(self: Any, *args: Any, **options: Any) -> None:
        positional = dict(zip(LIGHTNINGS, args, strict=False))
        usual = {} if "layout" in options else _options_in_environment(f"PL_{type(self).__name__.upper()}_")
        init(self, **positional, **{name: usual[name] for name in usual if name not in positional} | options)

    parameters = dict(inspect.signature(init).parameters)
    del parameters["options"]
    more = {name: each for name, each in LIGHTNINGS.items() if name not in parameters and name != "model_registry"}
    every = [*parameters.values(), *more.values()]
    with_names.__signature__ = inspect.Signature(every, return_annotation=None)  # type: ignore[attr-defined]
    with_names.__annotations__ = {each.name: each.annotation for each in every if each.name != "self"} | {
        "return": None
    }
    return with_names


def _options_in_environment(prefix: str) -> dict[str, Any]:
    """Return the options of Lightning's Trainer that variables of the environment give."""
    options: dict[str, Any] = {}
    for name in LIGHTNINGS:
        if text := os.environ.get(prefix + name.upper()):
            try:
                options[name] = literal_eval(text)
            except (ValueError, SyntaxError):  # it is a name
                options[name] = text
    return options


def checked_options(options: dict[str, Any], exact: bool | str) -> dict[str, Any]:
    """Return the options for Lightning's Trainer. Refuse those that can't work with steps in pieces."""
    options = dict(options)
    if unknown := [name for name in options if name not in LIGHTNINGS]:
        near = difflib.get_close_matches(unknown[0], [*LIGHTNINGS, *OURS], n=1)
        right = ELSEWHERE.get(unknown[0], f"use {near[0]}" if near else "leave it out")
        raise UserError(f"Trainer({unknown[0]}=...): there is no such option: {right}")
    # Hydra gives its own lists
    options = {
        name: list(value) if isinstance(value, Sequence) and not isinstance(value, str | list | tuple) else value
        for name, value in options.items()
    }
    options.pop("use_distributed_sampler", None)  # every process gets its samples by the order
    for name, (default, remedy) in REFUSED_OPTIONS.items():
        value = options.pop(name, default)
        if value not in (default, None, []):
            raise UserError(f"Trainer({name}={value!r}) can't be used: {remedy}")
    if isinstance(interval := options.get("val_check_interval"), Mapping):
        options["val_check_interval"] = dict(interval)
    if exact:  # it decides by itself which kernels must be deterministic
        options.pop("deterministic", None)
    if options.get("deterministic", True) is None:
        del options["deterministic"]
    return options


def chosen_strategy(strategy: Any, sync_batchnorm: bool) -> Strategy:
    """Return the strategy that a user has named."""
    if isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        name = "ddp" if isinstance(strategy, DDPStrategy) else "auto"
        if option := unusual_option(strategy):
            raise UserError(
                f"Trainer(strategy=a {type(strategy).__name__} with {option}) can't be used, since Lockstep has a "
                f"strategy of its own in its place: use strategy='{name}' or one of lockstep.strategies"
            )
        strategy = name
    if isinstance(strategy, str):
        strategy = DDP_OPTIONS.sub("", strategy.lower())
    if strategy == "single_device":
        strategy = "auto"
    if isinstance(strategy, Strategy):
        chosen = strategy
    elif isinstance(strategy, str) and strategy in STRATEGIES:
        chosen = STRATEGIES[strategy]()
    else:
        shown = repr(strategy) if isinstance(strategy, str) else f"a {type(strategy).__name__}"
        raise UserError(
            f"Trainer(strategy={shown}): must be {', '.join(map(repr, STRATEGIES))} or one of lockstep.strategies"
        )
    if sync_batchnorm and not isinstance(chosen, DDP):
        raise UserError("Trainer(sync_batchnorm=True) needs strategy='ddp'")
    if sync_batchnorm:
        chosen = DDP(chosen.shares or None, True, chosen.compression)  # type: ignore[arg-type]
    return chosen


def chosen_devices(strategy: Strategy, devices: Any, num_nodes: int | None, accelerator: Any) -> dict[str, Any]:
    """Return those options of `resolve` that follow from the devices."""
    if not isinstance(accelerator, str) or accelerator not in ACCELERATORS:
        raise UserError(f"Trainer(accelerator={accelerator!r}): must be one of {', '.join(ACCELERATORS)}")
    workers = external_workers()
    rules.refuse_several_workers(strategy)
    chosen: dict[str, Any] = {"devices": devices, "num_nodes": num_nodes}
    if workers > 1 or (workers and not strategy.one_process):
        chosen |= devices_of_engine({name: value for name, value in chosen.items() if value is not None})
    rules.refuse_several_machines(num_nodes, lambda: f"torchrun --nnodes={num_nodes} --nproc-per-node={devices or 1}")
    wanted: Any = "auto" if chosen["devices"] == -1 else chosen["devices"] or 1
    kind, number = choose_devices(ACCELERATORS[accelerator], wanted)
    nodes = chosen["num_nodes"] or 1
    if number * nodes > 1 and not strategy.one_process and not workers:
        raise UserError(
            f"Trainer(devices={number}, strategy={strategy.name!r}): this process is alone: call "
            f"lockstep.launch(function, devices={number}), where the function makes the Trainer, or start it by "
            f"torchrun --nproc-per-node={number}"
        )
    return {"strategy": strategy.name, "accelerator": kind, "devices": number, "num_nodes": nodes}


def refuse_more_than_one(strategy: Any, number: int) -> None:
    """Refuse several devices for a strategy that names a single one."""
    if number > 1 and (strategy == "single_device" or isinstance(strategy, SingleDeviceStrategy)):
        raise UserError(f"Trainer(strategy=that of a single device) has {number} devices: use strategy='auto'")


class BadInput(UserError, MisconfigurationException, ValueError, TypeError):
    """Bad input that Lightning has noticed; programs may expect any class of its errors."""


@contextmanager
def one_line_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Inside the `with` block, turn Lightning's errors about bad input, and those of `kinds`, into UserErrors."""
    bad_input: tuple[type[Exception], ...] = (MisconfigurationException, *kinds)
    try:
        yield
    except bad_input as error:
        if isinstance(error, UserError):
            raise
        raise BadInput(" ".join(str(error).split())) from error


def check_weights_only(weights_only: bool | None) -> None:
    """Refuse to load more than plain data and tensors."""
    if weights_only is False:
        raise UserError("weights_only=False: a checkpoint is always loaded as plain data and tensors: leave it out")


def set_up_process(layout: Layout) -> None:
    """Set what the bits of a step depend on in this process: subnormal numbers, and under `exact` the threads.

    The order of sums depends on the number of threads, so under `exact` it must not depend on the layout.
    """
    torch.set_flush_denormal(True)
    if layout.exact:
        torch.set_num_threads(1)
    if layout.has_process_group:
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # otherwise Lightning's ddp sets its own number
