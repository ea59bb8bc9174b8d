"""Record what a training does, whoever wrote it.

`lockstep same` and `lockstep trace` let this module enter each process of a program (enter/sitecustomize.py). It
stands on torch's public hooks that are common to all optimizers and modules. It imports nothing but the standard
library and torch, and torch only when the program does: other environments load this file alone, without Lockstep.

A process that takes optimizer steps writes `<pid>.jsonl` into the folder that LOCKSTEP_TRACE names. Its lines are JSON:
one about the process, one about each initial state, one for each step. A tensor is recorded as `Value`: a digest of
its bits, its norm, and a sketch, which gives the distance of two tensors (count sketch; Charikar, Chen and
Farach-Colton, 2002). Nothing here draws a random number, changes a tensor or a mode, or communicates. An error of the
recorder is written into the file, and the program goes on.

| variable | what it does |
|---|---|
| LOCKSTEP_TRACE | the folder |
| LOCKSTEP_TRACE_STEPS | the number of steps to record |
| LOCKSTEP_TRACE_WAIT | after them, wait to be ended, at most that many seconds |
| LOCKSTEP_TRACE_FLIP | flip the last bit of each weight before the first step: of every n-th element, 1 for all |
"""

import base64
import functools
import hashlib
import importlib.abc
import importlib.util
import json
import math
import os
import platform
import random
import struct
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FORMAT = 1  # of the file
BUCKETS = 48  # numbers in a sketch
CHUNK = 1 << 18  # elements that are read at a time
WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"}
PREFIXES = ("module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.")  # that wrappers add to names
# Settings of a group that do not change what a step computes, or only its rounding.
NO_SETTINGS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr", "name"}
CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")  # of torch.nn.utils
PENDING = 64  # forward passes that a later step's gradient may reach, as those of a generator before a discriminator
IGNORED_LABEL = -100  # torch's and transformers' value for a position that has no loss

Value = list[Any]  # [digest, norm, sketch]; sketch: base64 of BUCKETS float64, little-endian


def attach(recorder: "Recorder | None" = None) -> None:
    """Register the hooks of a recorder with torch; None: of one that the variables describe."""
    import torch
    from torch.nn.modules import module
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    recorder = recorder or Recorder(torch, os.environ)
    module.register_module_module_registration_hook(recorder.on_registration)
    module.register_module_forward_pre_hook(recorder.before_forward)
    module.register_module_forward_hook(recorder.after_forward, with_kwargs=True, always_call=True)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def recorded_backward(tensors: Any, *arguments: Any, **options: Any) -> Any:
        recorder.before_backward(tensors)
        try:
            return backward(tensors, *arguments, **options)
        finally:
            recorder.after_backward()

    torch.autograd.backward = recorded_backward  # torch has no hook for it; Tensor.backward calls it by this name
    for home in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in CLIPS:
            if hasattr(home, name):  # an older torch lacks one
                setattr(home, name, recorded_clipping(recorder, getattr(home, name)))


def recorded_clipping(recorder: "Recorder", clip: Any) -> Any:
    """Return a function that clips gradients, and records first how large they are."""

    @functools.wraps(clip)
    def recorded(*arguments: Any, **options: Any) -> Any:
        recorder.before_clipping()
        return clip(*arguments, **options)

    return recorded


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls `attach` when the program has imported torch."""

    loader: Any = None  # torch's
    searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        sys.meta_path.remove(self)  # not before: a program may look whether there is a torch, and import it later
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        with suppress(Exception):  # a torch that lacks a hook: the program goes on, and writes no file
            attach()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def enter() -> None:
    """Attach the recorder, now or when torch is imported, if the variables ask for it."""
    if os.environ.get("LOCKSTEP_TRACE"):
        if "torch" in sys.modules:
            attach()
        else:
            sys.meta_path.insert(0, AfterTorch())


class Recorder:
    """Records the steps of this process and of each fork of it, into a file for each.

    Args:
        torch: the imported module.
        variables: those of the table above.
    """

    def __init__(self, torch: Any, variables: Mapping[str, str]) -> None:
        self.torch = torch
        self.folder = Path(variables["LOCKSTEP_TRACE"])
        self.last = int(variables.get("LOCKSTEP_TRACE_STEPS", "20"))
        self.wait = float(variables.get("LOCKSTEP_TRACE_WAIT", "0"))
        self.flip = int(variables.get("LOCKSTEP_TRACE_FLIP", "0"))
        self.parents: Any = weakref.WeakKeyDictionary()  # module -> the modules that contain it
        self.sketcher = Sketcher(torch)
        self.begin()

    def begin(self) -> None:
        """Start anew: in a fork, what its parent has recorded does not count."""
        self.pid, self.over = os.getpid(), False
        self.file: Any = None
        self.calls = threading.local()  # .stack: the modules whose forward pass is under way; .random: see `random`
        self.in_backward = False
        self.roots: list[Any] = []  # the modules that contain all others, of those whose passes were seen
        self.names: dict[int, str] = {}  # of parameters, by identity
        self.step = 0
        self.stepping: Any = None  # the optimizer whose step is under way
        self.optimizers: list[Any] = []
        self.pending: list[tuple[dict[str, Any], list[bool]]] = []  # passes; whether a gradient reached them
        self.now: dict[str, Any] = {"passes": [], "losses": [], "norms": []}
        self.written: dict[str, Any] = {}  # settings, as they were written last

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep errors of the recorder from the program: the first one ends the recording and is its last line."""
        try:
            with self.torch.no_grad():
                yield
        except Exception:
            self.over = True
            with suppress(Exception):
                self.write({"error": traceback.format_exc(limit=-3)})

    def active(self) -> bool:
        if os.getpid() != self.pid:
            self.begin()
        return not self.over

    # --- forward passes -----------------------------------------------------------------------------------------------

    def on_registration(self, module: Any, name: str, child: Any) -> None:
        """Remember which module contains which."""
        if not self.torch.compiler.is_compiling() and child is not None:
            with suppress(TypeError):  # a module without a hash, or without weak references
                self.parents.setdefault(child, []).append(weakref.ref(module))

    def before_forward(self, module: Any, inputs: Any) -> None:
        if self.torch.compiler.is_compiling() or not self.active() or self.in_backward:  # in it: checkpointing
            return
        stack = self.calls.__dict__.setdefault("stack", [])
        wrapped = bool(stack) and stack[-1][1]
        # Lightning calls `training_step` by way of the wrapper and of the module's own `forward`.
        wrapper = wrapped and (hasattr(module, "training_step") and module is not stack[-1][0])
        wrapper = wrapper or type(module).__name__ in WRAPPERS
        outermost = all(each[1] for each in stack)
        stack.append((module, wrapper))
        if not outermost and self.calls.__dict__.get("autocast") is None:  # a forward pass may enter it inside
            self.calls.autocast = autocast_type(self.torch)
        if outermost and self.torch.is_grad_enabled() and not getattr(module, "_is_replica", False):
            with self.recording():
                self.meet(module)
                if not wrapper:
                    self.calls.random, self.calls.autocast = self.random_state(), autocast_type(self.torch)

    def after_forward(self, module: Any, inputs: Any, options: Any, output: Any) -> None:
        if self.torch.compiler.is_compiling() or not self.active() or self.in_backward:
            return
        stack = self.calls.__dict__.get("stack", [])
        if not any(each[0] is module for each in stack):
            return
        while stack.pop()[0] is not module:  # passes that an exception has ended
            pass
        before = self.calls.__dict__.get("random")
        if before is None or not all(each[1] for each in stack) or type(module).__name__ in WRAPPERS:
            return
        if hasattr(module, "training_step") and stack and inputs and isinstance(inputs[-1], int):
            return  # `training_step(batch, batch_idx)` under a wrapper
        self.calls.random = None
        if output is not None and self.torch.is_grad_enabled():
            with self.recording():
                self.record_pass(module, inputs, options, output, before)

    def meet(self, module: Any) -> None:
        """Record the initial state of a module that is new, and of all that it is a part of."""
        root = self.top(module)
        if any(root is each for each in self.roots) or not any(True for _ in root.parameters()):
            return
        self.roots = [each for each in self.roots if not contains(root, each)] + [root]
        self.names |= {id(value): plain_name(name) for name, value in root.named_parameters()}
        if self.flip:
            self.flip_bits(root)
        kinds = Counter(type(each).__name__ for each in root.modules() if not any(True for _ in each.children()))
        weights = self.parameters(root)
        dtypes = Counter(str(value.dtype).removeprefix("torch.") for value in weights.values())
        state = {"class": type(root).__name__, "modules": kinds, "dtypes": dtypes}
        wrappers = [type(each).__name__ for each in root.modules() if type(each).__name__ in WRAPPERS]
        self.write(
            {"start": state | {"wrappers": wrappers, "weights": self.values(weights), "buffers": self.buffers()}}
        )

    def parameters(self, root: Any) -> dict[str, Any]:
        """Return the parameters of a module by their names without wrappers."""
        return {plain_name(name): value for name, value in root.named_parameters()}

    def top(self, module: Any) -> Any:
        """Return the module that contains all modules that `module` is a part of."""
        seen = {id(module)}
        while True:
            parents = [reference() for reference in self.parents.get(module, ())]
            parents = [each for each in parents if each is not None and id(each) not in seen]
            parents = [each for each in parents if any(child is module for child in each.children())]
            if not parents:
                return module
            module = parents[-1]
            seen.add(id(module))

    def flip_bits(self, root: Any) -> None:
        """Flip the last bit of weights."""
        torch = self.torch
        kind = self.computes_in()
        lowest = {"bfloat16": 16, "float16": 13}.get(kind or "", 0)  # the last bit that survives autocast, of float32
        integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}
        for value in root.parameters():
            if value.requires_grad and value.is_floating_point() and value.element_size() in integers:
                bits = local(value.detach()).view(integers[value.element_size()])
                bits = bits.view(-1)[:: self.flip] if bits.is_contiguous() else bits
                last = 1 << (lowest if value.element_size() == 4 else 0)
                bits.bitwise_xor_((bits != 0).to(bits.dtype) * last)  # zero has no last place

    def computes_in(self) -> str | None:
        """Return the type of autocast."""
        return autocast_type(self.torch)

    def random_state(self) -> list[str]:
        """Return the digests of torch's random states."""
        states = [self.torch.get_rng_state()]
        if self.torch.cuda.is_available() and self.torch.cuda.is_initialized():
            states.append(self.torch.cuda.get_rng_state())
        return [short_hash(bytes(state.numpy())) for state in states]

    def record_pass(self, module: Any, inputs: Any, options: Any, output: Any, before: list[str]) -> None:
        torch = self.torch
        tensors = dict(tensors_in(torch, {**dict(enumerate(inputs)), **options}))
        if any(value.requires_grad for value in tensors.values()):
            return  # a later part of the network, or a loss
        drawn = before != self.random_state()
        if not any(value.requires_grad for value in module.parameters()):  # a metric, a loss, noise on the samples
            self.calls.drawn = drawn or self.calls.__dict__.get("drawn", False)
            return
        evaluating = Counter(
            type(each).__name__
            for each in module.modules()
            if module.training and not each.training and not any(True for _ in each.children())
        )
        made: dict[str, Any] = {"module": type(module).__name__, "training": module.training}
        made |= {"evaluating": evaluating, "autocast": self.calls.autocast}
        made |= {"random": before, "drawn": self.calls.__dict__.pop("drawn", False) or drawn}
        rows = {name: value for name, value in tensors.items() if value.dim()}
        if rows:
            # Labels may come first: a sample is the first input that has more than a number for each.
            name, first = max(rows.items(), key=lambda each: each[1].dim() > 1 and str(each[0]) != "labels")
            mask = rows.get("attention_mask")
            made["inputs"] = f"{str(first.dtype).removeprefix('torch.')}{list(first.shape)}"
            made["samples"] = self.sketcher.row_digests(first, mask)
            others = {key: value for key, value in rows.items() if key != name and value.shape[0] == first.shape[0]}
            made["others"] = {str(key): self.sketcher.row_digests(value, mask) for key, value in others.items()}
            labels = others.get("labels", mask)
            if labels is not None and labels.dim() > 1 and not labels.is_floating_point():
                made["counted"] = int((labels != (IGNORED_LABEL if labels is not mask else 0)).sum())
            outputs = [each for _, each in tensors_in(torch, output) if each.dim() and each.shape[0] == len(first)]
            floating = [each for each in outputs if each.is_floating_point() and each.requires_grad]
            if floating:
                made["outputs"] = self.sketcher.row_sketches(floating[0].detach())
        differentiable = [each for _, each in tensors_in(torch, output) if each.requires_grad]
        reached: list[bool] = [] if differentiable else [True]  # no hook can tell: it counts
        for each in differentiable:
            each.register_hook(lambda _: reached.append(True) if self.in_backward else None)
        self.pending.append((made, reached))

    # --- backward passes ----------------------------------------------------------------------------------------------

    def before_backward(self, tensors: Any) -> None:
        if not self.active():
            return
        with self.recording():
            tensors = [tensors] if isinstance(tensors, self.torch.Tensor) else list(tensors)
            if len(tensors) == 1 and tensors[0].numel() == 1:
                self.now["losses"].append(float(tensors[0].detach()))
            self.now["norms"].append([total(self.gradient_norms())])
        self.in_backward = True

    def after_backward(self) -> None:
        self.in_backward = False
        if self.active() and self.now["norms"]:
            with self.recording():
                self.now["passes"] += [made for made, reached in self.pending if reached]  # not those of a validation
                self.pending = [each for each in self.pending if not each[1]]
                norms = self.gradient_norms()
                self.now["norms"][-1].append(total(norms))
                self.now |= {"unclipped": norms, "clips": False}

    def before_clipping(self) -> None:
        if self.active():
            with self.recording():
                self.now |= {"unclipped": self.gradient_norms(), "clips": True}

    def gradient_norms(self) -> dict[str, float]:
        """Return the norm of each gradient."""
        torch = self.torch
        every = {plain_name(name): value for root in self.roots for name, value in root.named_parameters()}
        gradients = {name: local(value.grad.detach()) for name, value in every.items() if value.grad is not None}
        if not gradients:
            return {}
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients.values()]
        return dict(zip(gradients, torch.stack([each.to(norms[0].device) for each in norms]).tolist(), strict=True))

    # --- steps --------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, arguments: Any, options: Any) -> Any:
        if not self.active() or self.stepping not in (None, optimizer):  # a step inside another one's
            return None
        self.stepping = optimizer
        with self.recording():
            if self.file is None and not self.roots:
                for number, group in enumerate(optimizer.param_groups):
                    self.names |= {id(value): f"{number}.{at}" for at, value in enumerate(group["params"])}
        closure = arguments[1] if len(arguments) > 1 else options.get("closure")
        if closure is None:
            self.record_gradients(optimizer)
            return None

        def recorded_closure() -> Any:
            result = closure()
            if self.active():
                self.record_gradients(optimizer)
            return result

        if len(arguments) > 1:
            return (arguments[0], recorded_closure, *arguments[2:]), options
        return arguments, {**options, "closure": recorded_closure}

    def named(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's parameters by their names."""
        named: dict[str, Any] = {}
        for number, group in enumerate(optimizer.param_groups):
            for at, value in enumerate(group["params"]):
                name = self.names.get(id(value))
                named[name if name and name not in named else f"{number}.{at}"] = value
        return named

    def record_gradients(self, optimizer: Any) -> None:
        with self.recording():
            self.now["gradients"] = self.values(self.gradients(optimizer))

    def gradients(self, optimizer: Any) -> dict[str, Any]:
        """Return the gradients of an optimizer's parameters, by name."""
        return {name: value.grad for name, value in self.named(optimizer).items() if value.grad is not None}

    def after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if not self.active() or self.stepping is not optimizer:
            return
        self.stepping = None
        with self.recording():
            if not any(optimizer is each for each in self.optimizers):
                self.optimizers.append(optimizer)
            number = next(at for at, each in enumerate(self.optimizers) if each is optimizer)
            self.step += 1
            named = self.named(optimizer)
            line = {"step": self.step, "optimizer": number, **self.now, **self.changed(number, optimizer, named)}
            line |= {"weights": self.values(named), "buffers": self.buffers()}
            line["unclipped"] = {name: norm for name, norm in line.get("unclipped", {}).items() if name in named}
            self.write(line | {"random": self.random_states_of_python()})
        self.now = {"passes": [], "losses": [], "norms": []}
        self.pending = self.pending[-PENDING:]
        if self.step >= self.last and not self.over:
            with self.recording():
                (self.folder / f"{self.pid}.done").touch()
            self.over = True
            end = time.monotonic() + self.wait
            while time.monotonic() < end:  # the program that started this one ends all ranks together
                time.sleep(0.05)
            if self.wait:
                os._exit(0)

    def changed(self, number: int, optimizer: Any, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of an optimizer, and which parameters train, if they are not those of its last step."""
        by_identity = {id(value): name for name, value in named.items()}
        groups = [
            {
                "settings": {key: plain(value) for key, value in group.items() if key not in NO_SETTINGS},
                "parameters": [by_identity.get(id(value), "?") for value in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        every = {plain_name(name): value for root in self.roots for name, value in root.named_parameters()}
        dealt = {id(p) for each in self.optimizers for group in each.param_groups for p in group["params"]}
        facts = {
            f"groups {number}": {"class": type(optimizer).__name__, "groups": groups},
            "frozen": [name for name, value in every.items() if not value.requires_grad],
            "in no optimizer": [n for n, value in every.items() if value.requires_grad and id(value) not in dealt],
        }
        new = {key: value for key, value in facts.items() if self.written.get(key) != value}
        self.written |= new
        return {"settings": new} if new else {}

    def random_states_of_python(self) -> dict[str, str]:
        states = {"python": short_hash(repr(random.getstate()[1]).encode())}
        if numpy := sys.modules.get("numpy"):
            states["numpy"] = short_hash(numpy.random.get_state()[1].tobytes())
        return states

    def buffers(self) -> dict[str, Value]:
        return self.values({plain_name(name): value for root in self.roots for name, value in root.named_buffers()})

    def values(self, named: Mapping[str, Any]) -> dict[str, Value]:
        return dict(zip(named, self.sketcher.values([local(value.detach()) for value in named.values()]), strict=True))

    # --- the file -----------------------------------------------------------------------------------------------------

    def write(self, line: Mapping[str, Any]) -> None:
        if self.file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = open(self.folder / f"{self.pid}.jsonl", "w")  # noqa: SIM115  # open until the process ends
            self.file.write(json.dumps(self.process()) + "\n")
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def process(self) -> dict[str, Any]:
        """Return the facts about this process."""
        torch, variables = self.torch, os.environ
        group = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if group else int(variables.get("RANK", 0))
        world = torch.distributed.get_world_size() if group else int(variables.get("WORLD_SIZE", 1))
        return {
            "format": FORMAT,
            "rank": rank,
            "world": world,
            "group": group,
            "started": time.time(),
            "program": sys.argv[:1],
            "facts": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "threads": torch.get_num_threads(),
                "machine": platform.machine(),
                "cuda": torch.cuda.is_available(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "matmul precision": torch.get_float32_matmul_precision(),
                "default type": str(torch.get_default_dtype()),
            },
        }


class Sketcher:
    """Computes digests and sketches of tensors, on the device where they are.

    A digest is the sum of all elements, read as integers, times odd numbers that depend on the position, modulo 2**64.
    Integers add up to the same sum in any order.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.patterns: dict[str, tuple[Any, Any]] = {}

    def pattern(self, device: Any) -> tuple[Any, Any]:
        """Return CHUNK odd int64 numbers and CHUNK signs as float64. They follow from the position."""
        if str(device) not in self.patterns:
            torch = self.torch
            mixed = torch.arange(1, CHUNK + 1, dtype=torch.int64, device="cpu")
            for factor, shift in ((-7046029254386353131, 32), (-4417276706812531889, 29), (1609587929392839161, 32)):
                mixed = mixed * factor  # splitmix's constants
                mixed = mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))
            signs = ((mixed >> 40) & 1).double() * 2 - 1
            self.patterns[str(device)] = (mixed | 1).to(device), signs.to(device)
        return self.patterns[str(device)]

    def values(self, tensors: Sequence[Any]) -> list[Value]:
        torch = self.torch
        if not tensors:
            return []
        sums, sketches = [], []
        for value in tensors:
            odd, signs = self.pattern(value.device)
            flat, whole = self.numbers(value).reshape(-1), self.integers(value).reshape(-1)
            total: Any = None
            sketch: Any = None
            squares: Any = None
            for number, start in enumerate(range(0, max(1, flat.numel()), CHUNK)):
                part = flat[start : start + CHUNK].double()
                signed = part * signs[: len(part)] * (1 - 2 * ((number * 0x9E3779B1 >> 7) & 1))
                folded = torch.nn.functional.pad(signed, (0, -len(part) % BUCKETS)).view(-1, BUCKETS).sum(0)
                read = whole[start : start + CHUNK].long()
                hashed = (read * odd[: len(read)]).sum() * (2 * number + 1)
                total = hashed if total is None else total + hashed
                sketch = folded if sketch is None else sketch + folded
                square = (part * part).sum()
                squares = square if squares is None else squares + square
            sums.append(total.cpu() if len(tensors) == 1 else total)
            sketches.append(torch.cat([squares.sqrt().reshape(1), sketch]))
        digests = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
        numbers = torch.stack([each.to(sketches[0].device) for each in sketches]).cpu()
        shapes = [f"{value.dtype}{list(value.shape)}" for value in tensors]
        salts = [int(short_hash(shape.encode()), 16) for shape in shapes]
        salted = [(digest ^ salt) % 2**64 for digest, salt in zip(digests, salts, strict=True)]
        rows = zip(salted, numbers[:, 0].tolist(), numbers[:, 1:].tolist(), strict=True)
        return [[f"{digest:016x}", norm, packed(sketch)] for digest, norm, sketch in rows]

    def row_digests(self, value: Any, mask: Any = None) -> str:
        """Return a digest of each row, packed. Trailing zeros do not count: text is padded to the batch's longest."""
        value = value.detach()
        if mask is not None and value.shape == mask.shape and not value.is_floating_point():
            value = value * mask
        if not value.is_floating_point() and value.element_size() == 8:
            value = value.masked_fill(value == IGNORED_LABEL, 0)
        rows = self.integers(value).reshape(len(value), -1)
        odd, _ = self.pattern(value.device)
        total = self.torch.zeros(len(rows), dtype=self.torch.int64, device=value.device)
        for number, part in enumerate(self.columns(rows)):
            total += (part.long() * odd[: part.shape[1]]).sum(1) * (2 * number + 1)
        return base64.b64encode(struct.pack(f"<{len(rows)}q", *total.tolist())).decode()

    def row_sketches(self, value: Any) -> str:
        """Return two numbers for each row, packed: its norm, and its sum with signs."""
        rows = self.numbers(value).reshape(len(value), -1)
        _, signs = self.pattern(value.device)
        made = self.torch.zeros(len(rows), 2, dtype=self.torch.float64, device=value.device)
        for part in self.columns(rows):
            exact = part.double()
            made[:, 0] += (exact * exact).sum(1)
            made[:, 1] += (exact * signs[: part.shape[1]]).sum(1)
        made[:, 0] = made[:, 0].sqrt()
        return packed(made.reshape(-1).tolist())

    def columns(self, rows: Any) -> Iterator[Any]:
        """Yield the columns of a matrix in parts whose width follows from the matrix's width alone."""
        width = min(CHUNK, 1 << 14)
        for start in range(0, rows.shape[1], width):
            yield rows[:, start : start + width]

    def numbers(self, value: Any) -> Any:
        return self.torch.view_as_real(value) if value.is_complex() else value

    def integers(self, value: Any) -> Any:
        """Return the bits of a tensor as integers, one for each element."""
        torch = self.torch
        value = self.numbers(value).contiguous()
        if value.dtype == torch.bool:
            return value.to(torch.uint8)
        if not value.is_floating_point():
            return value
        return value.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[value.element_size()])


def total(norms: Mapping[str, float]) -> float | None:
    """Return the norm of all tensors together; None if there is none."""
    return math.hypot(*norms.values()) if norms else None


def contains(root: Any, module: Any) -> bool:
    return any(each is module for each in root.modules())


def local(value: Any) -> Any:
    """Return what this process holds of a sharded tensor; of a sparse one the dense form."""
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.to_dense() if value.is_sparse else value


def plain_name(name: str) -> str:
    """Return the name that a parameter has without wrappers."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix).replace(f".{prefix}", ".")
    return name


def plain(value: Any) -> Any:
    """Return a setting as JSON has it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def autocast_type(torch: Any) -> str | None:
    for device in ("cuda", "cpu"):
        with suppress(Exception):  # a device that this torch does not have
            if torch.is_autocast_enabled(device):
                return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def tensors_in(torch: Any, value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors in nested containers, with names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_in(torch, each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from tensors_in(torch, each, f"{name}.{at}" if name else str(at))


def short_hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def packed(numbers: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}d", *numbers)).decode()
