"""A callback for campaigns: it flips bits without an error, as a faulty device does."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.extras.audit.choice import choose_piece
from lockstep.extras.audit.hook import AuditHook

PLACES = ("weights", "activations", "gradients", "sent", "received", "checkpoint")
FLIP_FILE = "struck.json"  # in the run's folder: the first flip
MIN_ELEMENTS = 1000  # smallest number of elements in a sum of gradients; other sums are shorter


class Flips(Callback):
    """Flip bits of one element: another element in each step, but the same one in all passes of a step.

    Args:
        place: `weights` before a step; `activations` (a layer's output) or `gradients` (of a weight) in a pass; `sent`
            or `received` messages when gradients are summed; a weight in a `checkpoint`.
        rank: the rank on which it happens. None: the rank that computes the audited piece, in the pass of that piece.
        step: the optimizer step, 1 or more, or the first later one that is saved or has an audited piece.
        bits: number of bits to flip.
        lasting: repeat in all later passes and steps.
        seed: determines the element and the bits.
    """

    def __init__(self, folder: Path, place: str, rank: int | None, step: int, bits: int, lasting: bool, seed: int):
        self.file, self.place, self.rank, self.step = folder / FLIP_FILE, place, rank, step
        self.bits, self.lasting, self.seed = bits, lasting, seed
        self.names: list[str] = []  # parameters or layers that may be hit
        self.now = 0  # the current step if it is hit on this rank, else 0
        self.chosen = ""  # the name to hit in this step
        self.number = 0  # index of the pass to hit
        self.passes: Counter[str] = Counter()  # number of passes of each name in this step
        self.messages = Messages(self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        weights = {name: weight for name, weight in pl_module.named_parameters() if weight.requires_grad}
        self.names = [*weights]
        if self.place == "gradients":
            for name, weight in weights.items():
                weight.register_hook(partial(self._pass, name))
        if self.place == "activations":
            self.names = sorted({name.rpartition(".")[0] for name in weights})
            for name in self.names:
                layer = pl_module.get_submodule(name)
                layer.register_forward_hook(lambda layer, inputs, output, name=name: self._pass(name, output))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step, rank, random = batch.step + 1, self.rank, Random(f"{self.seed} {batch.step}")
        self.passes.clear()
        self.chosen, self.number = random.choice(self.names), random.randrange(len(batch.micro_batches))
        if rank is None:
            rank = self._aim(trainer, batch)
        self.now = step if step >= self.step and not self.is_over and trainer.global_rank == rank else 0
        if self.now and self.place == "weights":
            self._strike(self.chosen, pl_module.get_parameter(self.chosen))
        if self.now and self.place in ("sent", "received"):
            self.messages.__enter__()

    @property
    def is_over(self) -> bool:
        return self.file.exists() and not self.lasting

    def _aim(self, trainer: Any, batch: Any) -> int:
        """Return the rank that owns the audited piece of a step. Set `number` to the index of its pass there."""
        order = trainer.datamodule.order
        share = next(hook.share for hook in trainer.strategy.hooks if isinstance(hook, AuditHook))
        sizes = [len(ids) for ids in order.pieces(*order.position(batch.step))]
        choice = choose_piece(share, order.seed, batch.step, sizes, order.layout)
        if choice is None:
            return -1
        passes = [choice.piece == micro_batch.piece for micro_batch in batch.micro_batches]
        self.number = passes.index(True) if any(passes) else 0
        return choice.devices[0]

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self.now and self.place in ("sent", "received"):
            self.messages.__exit__(None, None, None)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.now and self.place == "checkpoint":
            state = checkpoint["state_dict"]
            state[self.chosen] = self._struck(self.chosen, state[self.chosen])

    def _pass(self, name: str, value: Tensor) -> Tensor | None:
        """Return the tensor that replaces the result of a pass. Return None to keep the result."""
        self.passes[name] += 1
        due = self.lasting or self.passes[name] == self.number + 1
        return self._struck(name, value) if self.now and due and name == self.chosen else None

    def _struck(self, name: str, value: Tensor) -> Tensor:
        changed = value.clone()
        self._strike(name, changed)
        return changed

    def _strike(self, name: str, value: Tensor) -> None:
        tensor, random = value.detach(), Random(f"{self.seed} {self.now}")
        at = tuple(random.randrange(size) for size in tensor.shape)
        element = tensor[at].reshape(1).clone()
        for bit in random.sample(range(8 * element.element_size()), self.bits):
            element.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        tensor[at] = element[0]
        if not self.file.exists():
            self.file.write_text(json.dumps({"rank": dist.get_rank(), "step": self.now, "name": name, "at": at}))


class Messages(TorchDispatchMode):
    """Hit the sums of gradients, and the messages to one rank, while this mode is active.

    With `sent` it changes them before a rank sends them, else after it has received them.
    """

    def __init__(self, flips: Flips) -> None:
        super().__init__()
        self.flips = flips

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        c10d, sent = torch.ops.c10d, self.flips.place == "sent"
        struck = c10d.allreduce_.default, c10d.send.default if sent else c10d.recv_.default
        if func not in struck or len(args[0][0]) < MIN_ELEMENTS or self.flips.is_over:
            return func(*args, **(kwargs or {}))
        if sent:
            self.flips._strike("the sum", args[0][0])
        result = func(*args, **(kwargs or {}))
        if not sent:
            dist.Work.unbox(result[1] if func is c10d.allreduce_.default else result).wait()
            self.flips._strike("the sum", args[0][0])
        return result
