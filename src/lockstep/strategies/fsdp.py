"""`strategy=fsdp`: torch's `fully_shard`, adapted to steps in pieces.

Each process keeps a part of the weights, of their gradients and of the optimizer's state. Before a block of the network
computes, its weights are gathered from all processes. They are copies, so a piece's passes run the same kernels as on
one device. In the backward pass each process gets its part of the block's gradient (`sharded_sums.py`).

A parameter of at most SMALL elements, a frozen one, and one that can't be cut evenly enough stay whole on each device,
as with ddp.

A pass communicates, so all processes must run equally many. A process with fewer pieces than others, or without a
sample, runs passes that do not count after its last piece.

Optimizers get this process's parts as ordinary tensors. Most work element by element, so they give the same bits as on
one device. One that needs whole tensors gets each tensor on one process, its owner.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, ModelSummary, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torchmetrics import Metric

from lockstep.arithmetic.exact_sum import SMALL
from lockstep.errors import StepRefused, UserError
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.passes import Step, outputs_of
from lockstep.step.strategy import Action, ClipsByStrategy, T, proxy
from lockstep.step.trial import without_traces
from lockstep.strategies.ddp import DistributedDataParallel
from lockstep.strategies.saved_parts import INDEX, Part, SavedParts, stand_in, tensors_in
from lockstep.strategies.sharded_parameters import ShardedParameter, dim_to_cut, find_blocks, with_strides
from lockstep.strategies.torch_quirks import (
    computes_with_parts,
    forget_unfinished_passes,
    gather_around_outermost_call,
    parameters_of_unit,
    set_gathered_strides,
)
from lockstep.text import first_line, join_names

LOG = logging.getLogger("lockstep")
MIB = 1 << 20
STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
# Optimizers of torch that compute each element of a parameter from the same element of its gradient and state.
BY_ELEMENT = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
}
# Those that compute each parameter from the whole of it, and from no other parameter.
BY_TENSOR = {torch.optim.Adafactor, getattr(torch.optim, "Muon", torch.optim.Adafactor)}


class SentGradient(NamedTuple):
    """A gradient that an optimizer has got for its next step.

    Attributes:
        parameter: the parameter.
        gradient: that of the module's parameter, of which the optimizer has a view or, on its owner, a whole copy.
        versions: of the gradient and of the weights, if there are copies; see `_versions`.
    """

    parameter: ShardedParameter
    gradient: Any
    versions: tuple[int, ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether the owner has whole copies of the gradient and of the weights."""
        return self.parameter.owner is not None and self.gradient is not None


class PartsPrecision(ClipsByStrategy):
    """Methods for `proxy`, around those of the precision plugin."""

    strategy: Any

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, in which blocks may be called again."""
        with self.strategy.backward_pass():
            super().backward(*args, **kwargs)  # type: ignore[misc]  # of the class that it is mixed into

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients of an optimizer's parameters, after it has got what hooks have assigned to them."""
        self.strategy.take_assigned_gradients()
        super().clip_gradients(*args, **kwargs)  # type: ignore[misc]  # likewise


class ReduceScatter:
    """What `fully_shard` calls with the gradient of a unit in a backward pass.

    Args:
        strategy: the strategy.
        parameters: the unit's sharded parameters, in the order of their gradients.
    """

    def __init__(self, strategy: "FullySharded", parameters: Sequence[ShardedParameter]) -> None:
        self.strategy, self.parameters = strategy, parameters
        self.calls = 0  # in this pass

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Sum the gradients of all processes. Set `output_tensor` to this process's part, or to 0.

        Raises:
            UserError: a parameter has no gradient, or the unit is used twice.
        """
        self.calls += 1
        sizes = [parameter.part_size for parameter in self.parameters]
        name = self.parameters[0].name
        if self.calls > 1:
            raise UserError(
                f"strategy=fsdp: the block of {name} is used more than once in a pass: give a pattern strategy.blocks= "
                "that leaves it out"
            )
        if sum(sizes) * self.strategy.world_size != input_tensor.numel():
            others = f" (its block has {len(sizes)} sharded ones)" * (len(sizes) > 1)
            raise UserError(
                f"strategy=fsdp: no gradient has reached {name}, or another parameter of its block{others}: use all in "
                "every training_step, or freeze them by requires_grad_(False)"
            )
        if not self.strategy.counts:
            input_tensor.zero_()
        self.strategy.receive(self.parameters, input_tensor, output_tensor, group)


class FullySharded(DistributedDataParallel):
    """A process per device, each with a part of the weights, of the gradients and of the optimizer's state.

    Args:
        reshard: free the gathered weights of a block after its forward pass. Otherwise they are kept until the step's
            last pass.
        offload: keep the parts in the host's memory.
        blocks: pattern of the names of modules that are gathered one after the other; None: the repeated modules.
        saves_parts: whether each process writes its parts of a checkpoint, and rank zero the rest.

    Attributes:
        sharded: the sharded parameters, by the id of the module's parameter.
        counts: whether the present pass counts.
        receive: takes the gradient of a unit; the gradient sum sets it.
        exact: whether norms must have the bits of one device; the gradient sum sets it.
        bytes_of_sums: bytes of the gradient sum; the gradient sum sets it.
    """

    parted = True
    name = "fsdp"

    def __init__(
        self, reshard: bool = False, offload: bool = False, blocks: str | None = None, saves_parts: bool = False
    ) -> None:
        super().__init__()
        self.passes_communicate = reshard
        self.less_memory = "" if reshard else "strategy.reshard=true"
        self.sharded: dict[int, ShardedParameter] = {}
        self.counts = True
        self.receive: Any = None
        self.exact = False
        self.bytes_of_sums = 0
        self._reshard, self._offload, self._pattern = reshard, offload, blocks
        self._units: list[Any] = []  # modules whose weights are gathered together; the last one is the whole module
        self._messages: list[tuple[Any, ReduceScatter]] = []  # units that have sharded parameters
        self._replicated: list[nn.Parameter] = []
        self._of_optimizer: dict[int, ShardedParameter] = {}  # by id of what the optimizer has
        self._by_name: dict[str, ShardedParameter] = {}  # by each name of it in the module
        self._step_batch: StepBatch | None = None
        self._depth = 0  # of contexts in which all weights are gathered
        self._evaluation = ExitStack()
        self._in_backward = False  # whether a backward pass runs
        self._sent: list[SentGradient] = []  # of this step
        self._sums = torch.zeros(0)  # of the gradients and weights of which owners have copies
        # the module's parameters before they were cut, by id; what was made before may have them
        self._before: dict[int, tuple[nn.Parameter, ShardedParameter]] = {}
        self._memory_is_logged = False
        self._saves = False  # whether the module's state is being gathered
        self._saves_parts = saves_parts
        # of the checkpoint that is being put together: this process's parts, by the id of their stand-in; None: of none
        self._parts: dict[int, tuple[Tensor, Part]] | None = None
        self._addresses: dict[str, int] = {}  # of the gathered weights, by name
        self._example: Any = None  # what `example_input_array` of the module was

    # --- the cut ---

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the module if it is trained. An evaluation of its own runs on the whole module.

        Raises:
            UserError: it is another module than the one that was sharded.
        """
        if self.sharded and self._units[-1] is not self.lightning_module:
            raise UserError("strategy=fsdp: another module than that of trainer.fit: make a Trainer for it")
        if trainer.state.fn == TrainerFn.FITTING or not self.sharded:
            super().setup(trainer)
            self._set_example_aside()
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._to_device()
        self.setup_precision_plugin()

    def _set_example_aside(self) -> None:
        """Keep Lightning's summary from passing `example_input_array` through a sharded module."""
        module = self.lightning_module
        summed_up = any(isinstance(each, ModelSummary) for each in module.trainer.callbacks)
        if self.sharded and summed_up and module.example_input_array is not None:
            self._example, module.example_input_array = module.example_input_array, None
            LOG.info("fsdp: the summary has no sizes of outputs, since the module's weights are in parts")

    def teardown(self) -> None:
        """End the run."""
        if self._example is not None:
            self.lightning_module.example_input_array = self._example
            self._example = None
        super().teardown()

    def setup_environment(self) -> None:
        """Set up the process group, and refuse callbacks that read weights as if they were whole.

        Raises:
            UserError: there is such a callback.
        """
        super().setup_environment()
        if self._saves_parts and getattr(self.checkpoint_io, "has_copies", False):
            raise UserError(
                "strategy.checkpoint=sharded needs a folder that all machines see: give outputs= (default_root_dir=) "
                "on a shared file system, or strategy.checkpoint=whole"
            )
        trainer = self.lightning_module.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, WeightAveraging) and self.sharded and trainer.state.fn == TrainerFn.FITTING:
                raise UserError("strategy=fsdp: a second trainer.fit can't average weights: make another Trainer")
            named = type(callback).__name__
            notes_names = type(callback).on_train_epoch_start is BaseFinetuning.on_train_epoch_start
            if isinstance(callback, BaseFinetuning) and notes_names:
                raise UserError(
                    f"strategy=fsdp: {named} looks for the optimizer's parameters in the module, where they are in "
                    "parts: use callbacks=unfreeze, or strategy=ddp"
                )
            if isinstance(callback, WeightAveraging) and not getattr(callback, "takes_whole_weights", False):
                raise UserError(
                    f"strategy=fsdp: {named} needs the whole weights on each device: use "
                    "lockstep.callbacks.EMA (callbacks=ema), or strategy=ddp"
                )

    def model_to_device(self) -> None:
        """Move the module to the device, unless it is sharded there block by block."""
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING or (self._offload and not self.sharded):
            super().model_to_device()

    def configure_ddp(self) -> None:
        """Shard the module."""
        if not self.sharded:
            self._shard(self.lightning_module)
        self._to_device()
        if not isinstance(self.precision_plugin, PartsPrecision):
            self.precision_plugin = proxy(self.precision_plugin, PartsPrecision)
            vars(self.precision_plugin)["strategy"] = self  # Lightning's class does not declare it

    def _to_device(self) -> None:
        """Move to the device what `fully_shard` has left where it was: whole parameters, metrics, buffers."""
        if not self._offload:
            self.lightning_module.to(self.root_device)
        else:  # parts stay in the host's memory
            for parameter in self._replicated:
                parameter.data = parameter.data.to(self.root_device)
            for layer in self.lightning_module.modules():
                for name, buffer in layer.named_buffers(recurse=False):
                    layer._buffers[name] = buffer.to(self.root_device)
        for layer in self.lightning_module.modules():
            if isinstance(layer, Metric):
                layer.to(self.root_device)
        # A module that moves to another device gets new parameters. Lightning moves it to the host after a fit.
        for unit, message in self._messages:
            for cut, tensor in zip(message.parameters, parameters_of_unit(unit), strict=True):
                cut.tensor = tensor
        self.sharded = {id(parameter.tensor): parameter for parameter in self.sharded.values()}

    def _shard(self, module: Any) -> None:
        """Apply `fully_shard` to the blocks and to the module.

        Raises:
            UserError: there is no block of the given pattern.
        """
        for tensor in (*module.parameters(), *module.buffers()):  # as DDP does
            sent = tensor.detach().to(self.root_device).contiguous()
            dist.broadcast(sent, 0)
            tensor.detach().copy_(sent)
        dims = {id(p): dim for p in module.parameters() if (dim := dim_to_cut(p, self.world_size)) is not None}
        self._replicated = [p for p in module.parameters() if id(p) not in dims]
        if not dims and self.is_global_zero:
            LOG.warning(f"strategy=fsdp: no trained parameter has more than {SMALL:,} elements, so all stay whole")
        strides = {id(p): p.stride() for p in module.parameters()}
        before = dict(module.named_parameters(remove_duplicate=False))
        for parameter in module.parameters():
            if id(parameter) in dims and not parameter.is_contiguous():  # `fully_shard` takes no other
                parameter.data = parameter.data.as_strided((parameter.numel(),), (1,)).view(parameter.shape)
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        options: dict[str, Any] = {
            "mesh": mesh,
            "shard_placement_fn": lambda parameter: Shard(dims[id(parameter)]),
            "offload_policy": CPUOffloadPolicy() if self._offload else OffloadPolicy(),
            "ignored_params": set(self._replicated),
        }
        blocks = find_blocks(module, set(dims), self._pattern)
        for block in blocks:
            fully_shard(block, reshard_after_forward=self._reshard, **options)
            name = next(name for name, each in module.named_modules() if each is block)
            block.register_forward_pre_hook(partial(self._check_may_gather, name), prepend=True)  # before torch's
        fully_shard(module, reshard_after_forward=False, **options)
        gather_around_outermost_call(module, STEP_METHODS, self._check_may_gather)
        for name, tensor in module.named_parameters():
            if isinstance(tensor, DTensor):
                key = id(before[name])
                self.sharded[id(tensor)] = parameter = ShardedParameter(
                    name, tensor, strides[key], dims[key], self.world_size, self.global_rank
                )
                self._before[key] = before[name], parameter
        tensors = module.named_parameters(remove_duplicate=False)
        self._by_name = {name: self.sharded[id(tensor)] for name, tensor in tensors if id(tensor) in self.sharded}
        self._units = [*blocks, module]
        for unit in self._units:
            set_gathered_strides(unit, {id(each.tensor): each.strides for each in self.sharded.values()})
        for unit in self._units:
            if not (parameters := [self.sharded[id(tensor)] for tensor in parameters_of_unit(unit)]):
                continue
            message = ReduceScatter(self, parameters)
            self._messages.append((unit, message))
            unit.set_custom_reduce_scatter(message)
            unit.set_force_sum_reduction_for_comms(True)
            # As DDP does: weights of losses include it. Those of exact sums do not, and of float64 torch divides what
            # it passes to the message.
            unit.set_gradient_divide_factor(1.0 if self.exact else float(self.world_size))
        self._keep_gathered(not self._reshard, not self._reshard)
        for first, parameter in self._before.values():  # other uses of them would go on with the first weights
            first.data = first.new_full((), math.nan).expand(first.shape)
            first.register_hook(partial(_refuse_gradient, parameter.name))
        module.register_load_state_dict_pre_hook(self._cut_state)
        module.register_load_state_dict_post_hook(self._after_load)
        # Those of torch, which free gathered weights, follow: it registers them in the first forward pass.
        for layer in module.modules():
            if layer is module or any(id(each) in self.sharded for each in layer.parameters(recurse=False)):
                layer.register_state_dict_pre_hook(self._check_may_save)
        if self.is_global_zero:
            elements = sum(parameter.tensor.numel() for parameter in self.sharded.values())
            whole = sum(parameter.numel() for parameter in self._replicated)
            LOG.info(
                f"fsdp: {elements:,} parameters in {self.world_size} parts, {whole:,} whole on each device; "
                f"{len(blocks)} blocks"
            )

    def _check_may_gather(self, called: str, *args: Any) -> None:
        """Check that all processes call a method or a block of the module now.

        Raises:
            UserError: it is called outside of a step's passes, and the weights are not whole.
        """
        if self.sharded and not (self._inside or self._in_backward or self._depth):
            raise UserError(
                f"strategy=fsdp: {called} of the module is called outside of a step and an evaluation, where the "
                "weights are in parts: call it on all ranks within trainer.strategy.whole_weights()"
            )

    def _check_may_save(self, *args: Any) -> None:
        """Check that nobody asks for the state of a module while its weights are whole: `fully_shard` would cut them.

        Raises:
            UserError: somebody does.
        """
        if self._depth and not self._saves:
            raise UserError(
                "strategy=fsdp: state_dict() of a module would have parts of the weights: call "
                "trainer.strategy.lightning_module_state_dict() on all ranks"
            )

    def _cut_state(self, module: nn.Module, state: dict[str, Any], *args: Any) -> None:
        """Before a `load_state_dict`, replace whole weights by this process's parts."""
        if self._depth:
            self._write_back()
        for name, parameter in self._by_name.items():
            value = state.get(name)
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                part = parameter.parts(value)[self.global_rank].to(parameter.local.device).contiguous()
                state[name] = parameter.as_parameter(part)

    def _after_load(self, *args: Any) -> None:
        self._gather_again()

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that each process has whole."""
        return self._replicated if self.sharded else super().replicated_parameters()

    def local_part(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a parameter or of its gradient."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    # --- gathered weights ---

    def _keep_gathered(self, after_forward: bool, after_backward: bool) -> None:
        """Choose whether the units keep their gathered weights after their passes."""
        for unit in self._units[:-1]:
            unit.set_reshard_after_forward(not after_forward, recurse=False)
        for unit in self._units:
            unit.set_reshard_after_backward(not after_backward, recurse=False)

    def _free_gathered(self) -> None:
        """Free all gathered weights."""
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Return a context in which the module has all its weights, so that a pass needs no other process.

        What changes in them is written to the parts, and to owners' copies. Every process enters and leaves it, and
        changes the same.
        """
        if not self.sharded:
            yield
            return
        if not self._depth:
            for sent in self._sent:
                if sent.is_copy:  # which the optimizer may have changed
                    self._check_weights(sent)
                    self._send_parts(sent.parameter)
            self._keep_gathered(True, True)
            self._gather()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._write_back()
            if not self._depth:
                forget_unfinished_passes(self._units)
                self._free_gathered()
                self._keep_gathered(not self._reshard, not self._reshard)
        if not self._depth:
            self._sent = [self._with_new_weights(sent) if sent.is_copy else sent for sent in self._sent]
            self._sums = self._sums_of_copied()

    def _gather(self) -> None:
        """Gather all weights."""
        # Later passes differentiate the gathered weights, so they must be no inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            for unit in self._units:
                unit.unshard()
        self._addresses = {name: each.data_ptr() for name, each in self._gathered_weights().items()}

    def _gather_again(self) -> None:
        """Within `whole_weights`, gather all weights of the parts. Every process calls this."""
        if self._depth:
            self._free_gathered()
            self._gather()

    @torch.no_grad()
    def _write_back(self) -> None:
        """Copy the gathered weights to this process's parts.

        Raises:
            UserError: they were freed or replaced.
        """
        gathered = self._gathered_weights()
        if freed := self._addresses.keys() - gathered.keys():
            raise UserError(
                f"strategy=fsdp: {min(freed)} was cut within trainer.strategy.whole_weights(), or in an evaluation: "
                "move no module and ask for no state there"
            )
        for name, whole in gathered.items():
            if whole.data_ptr() != self._addresses[name]:
                raise UserError(
                    f"strategy=fsdp: {name} was replaced within trainer.strategy.whole_weights(): change it in place, "
                    "by copy_()"
                )
            parameter = self._by_name[name]
            parameter.local.copy_(parameter.parts(whole)[self.global_rank])

    def _gathered_weights(self) -> dict[str, Tensor]:
        """Return the weights that are gathered now, by name."""
        module = self._units[-1]
        named = {each.name: module.get_parameter(each.name).detach() for each in self.sharded.values()}
        return {name: each for name, each in named.items() if not isinstance(each, DTensor)}

    def _begin_evaluation(self) -> None:
        """Gather all weights, since ranks may have different numbers of batches."""
        self._evaluation.close()
        self._evaluation.enter_context(self.whole_weights())

    def on_validation_start(self) -> None:
        """Gather all weights."""
        super().on_validation_start()
        self._begin_evaluation()

    def on_validation_end(self) -> None:
        """Free the gathered weights."""
        self._evaluation.close()
        super().on_validation_end()

    def on_test_start(self) -> None:
        """Gather all weights."""
        super().on_test_start()
        self._begin_evaluation()

    def on_test_end(self) -> None:
        """Free the gathered weights."""
        self._evaluation.close()
        super().on_test_end()

    def on_predict_start(self) -> None:
        """Gather all weights."""
        super().on_predict_start()
        self._begin_evaluation()

    def on_predict_end(self) -> None:
        """Free the gathered weights."""
        self._evaluation.close()
        super().on_predict_end()

    # --- passes ---

    def use_reducer(self, wanted: bool) -> bool:
        """Return False: the gradients are summed unit by unit."""
        return False

    def begin_step(self, step_batch: StepBatch) -> None:
        """Prepare for the passes of a step; the gradient sum calls it.

        Raises:
            UserError: a sharded parameter was frozen.
        """
        self._step_batch = step_batch
        self._send_from_owners()  # an optimizer may run the passes again, with weights that it has changed
        frozen = [each.name for each in self.sharded.values() if not each.tensor.requires_grad]
        if frozen:
            raise UserError(
                f"strategy=fsdp: {join_names(frozen, 2)} was frozen after the start: freeze it before, or use ddp"
            )

    def schedule(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Action, int]]:
        """Yield the passes of a step's micro-batches in order. Then run as many passes as other processes still run."""
        for action, index in super().schedule(micro_batches):
            for _, message in self._messages:
                message.calls = 0
            yield action, index
            if action is Action.BACKWARD:
                self._check_calls()
        assert self._step_batch is not None
        for _ in range(self._step_batch.most_micro_batches - len(micro_batches)):
            for _, message in self._messages:
                message.calls = 0
            self._pass_without_effect(self._step_batch)
        self._free_gathered()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Return the context of a backward pass."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def _check_calls(self) -> None:
        """Check that a pass has used each block, since other processes would pair another block with it.

        Raises:
            StepRefused: it has left one out.
        """
        if left_out := [message.parameters[0].name for _, message in self._messages if not message.calls]:
            raise StepRefused(
                f"strategy=fsdp: a pass has not used the block of {left_out[0]}, for which other processes wait: use "
                "all blocks in every training_step (without LayerDrop), or strategy=ddp"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step`.

        Raises:
            UserError: it uses weights of a block that it does not call, which are not gathered.
        """
        try:
            return super().training_step(*args, **kwargs)
        except RuntimeError as error:
            if not computes_with_parts(error):
                raise
            raise UserError(
                "strategy=fsdp: training_step uses weights of a block without a call of the block, so they are not "
                f"gathered ({first_line(error)}): give a pattern strategy.blocks= of modules that are called"
            ) from error

    def _pass_without_effect(self, step_batch: StepBatch) -> None:
        """Run the passes of a piece whose gradient and numbers do not count, since other processes run theirs."""
        trainer = self.lightning_module.trainer
        passes = trainer.fit_loop.epoch_loop.passes
        step = Step(passes, step_batch)
        gradients = [(parameter, parameter.grad) for parameter in self._replicated]
        for parameter in self._replicated:
            parameter.grad = None
        self.counts = False
        try:
            with without_traces(trainer), torch.enable_grad():
                micro_batch = self._any_micro_batch(step)
                with self.micro_batch(micro_batch, 0):
                    loss, _ = outputs_of(passes.forward(step.prepared(micro_batch)))
                with self.backward_pass():
                    loss.backward()
            self._check_calls()
        finally:
            self.counts = True
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _any_micro_batch(self, step: Step) -> MicroBatch:
        """Return a micro-batch of a step: one of this process if there is one."""
        step_batch, order = step.batch, step.data.order
        if step_batch.micro_batches:
            return step_batch.micro_batches[-1]
        sizes = order.piece_sizes(step_batch.step - step_batch.epoch * order.steps_per_epoch)
        piece = next(piece for piece, size in enumerate(sizes) if size)
        return step.data.fetch_piece(step_batch, piece, self.global_rank)

    # --- the optimizer ---

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers, and give them this process's parts."""
        super().setup_optimizers(trainer)
        self._of_optimizer, self._sent = {}, []
        for parameter in self.sharded.values():
            parameter.owner = parameter.of_optimizer = None
        for optimizer in self.optimizers:
            self._give_parts(optimizer)

    def _give_parts(self, optimizer: Any) -> None:
        """Replace an optimizer's sharded parameters by parts of them, or by whole tensors on their owners.

        Raises:
            UserError: it is not known what the optimizer needs, or it has tensors that the module lacks.
        """
        mine = set(map(id, self.lightning_module.parameters()))
        on_cpu = self.root_device.type == "cpu" or self._offload
        # Fused optimizers on a CPU give other bits where a vector of the processor's size ends.
        fused = on_cpu and any(group.get("fused") for group in optimizer.param_groups)
        by_tensor = needs_whole_tensors(optimizer) or fused
        loads = [0] * self.world_size
        for group in optimizer.param_groups:
            for position, tensor in enumerate(group["params"]):
                _, parameter = self._before.get(id(tensor), (None, self.sharded.get(id(tensor))))
                if parameter is None:
                    if self.sharded and id(tensor) not in mine:
                        raise UserError(
                            f"strategy=fsdp: {type(optimizer).__name__} has a tensor of shape {list(tensor.shape)} "
                            "that is no parameter of the module: make the optimizer in configure_optimizers, of "
                            "self.parameters()"
                        )
                    continue
                if by_tensor:
                    parameter.owner = loads.index(min(loads))
                    loads[parameter.owner] += parameter.shape.numel()
                    part = parameter.local.new_empty(0)
                else:
                    parameter.owner, part = None, parameter.local
                parameter.of_optimizer = nn.Parameter(part)
                state = optimizer.state.pop(tensor, None)
                if state is not None and not by_tensor:
                    optimizer.state[parameter.of_optimizer] = {
                        name: self._part_of(value, parameter) for name, value in state.items()
                    }
                group["params"][position] = parameter.of_optimizer
                self._of_optimizer[id(parameter.of_optimizer)] = parameter

    def _part_of(self, value: Any, parameter: ShardedParameter) -> Any:
        """Return this process's part of an optimizer's state."""
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and _has_shape(value, parameter.shape):
            return parameter.parts(value)[self.global_rank].clone()
        return self.local_part(value)

    def set_gradient(self, parameter: ShardedParameter, part: Tensor | None) -> None:
        """Set the gradient of a sharded parameter to its part on this process, padded."""
        if part is None:
            parameter.tensor.grad = None
            return
        parameter.tensor.grad = parameter.as_parameter(parameter.in_memory_order(part).to(parameter.local.device))

    def give_gradients(self) -> None:
        """Give the optimizer the gradients of the sharded parameters. Every process calls this."""
        self._sent = []
        for parameter in self._of_optimizer.values():
            gradient = parameter.tensor.grad
            sent = SentGradient(parameter, gradient)
            if sent.is_copy:
                whole = self.gathered(parameter, gradient.to_local(), parameter.owner or 0)
                sent = self._with_new_weights(sent)
            else:
                whole = None if gradient is None else gradient.to_local()
            if parameter.owner in (None, self.global_rank):
                parameter.of_optimizer.grad = whole
            self._sent.append(sent)
        self._sums = self._sums_of_copied()

    @torch.no_grad()
    def _with_new_weights(self, sent: SentGradient) -> SentGradient:
        """Give the owner of a parameter its weights. Every process calls this."""
        parameter = sent.parameter
        weights = self.gathered(parameter, parameter.local, parameter.owner or 0)
        if weights is not None:
            of_optimizer = parameter.of_optimizer
            if of_optimizer.shape == weights.shape:
                of_optimizer.copy_(weights)
            else:
                of_optimizer.data = weights
        return sent._replace(versions=_versions(parameter))

    def take_assigned_gradients(self) -> None:
        """Give the optimizer what hooks have assigned to the gradients of the module's parameters.

        Raises:
            UserError: it can't be given.
        """
        for number, sent in enumerate(self._sent):
            parameter, gradient = sent.parameter, sent.parameter.tensor.grad
            name, of_optimizer = parameter.name, parameter.of_optimizer
            self._check_weights(sent)
            if gradient is sent.gradient and not (sent.is_copy and _versions(parameter) != sent.versions):
                continue
            if gradient is not None:
                if parameter.owner is not None:
                    raise self._changed("gradient", parameter)
                if not isinstance(gradient, DTensor) or gradient.placements != parameter.tensor.placements:
                    raise UserError(
                        f"strategy=fsdp: a hook has set the gradient of {name} to a tensor that is not cut as {name} "
                        "is: compute it from the gradient, element by element"
                    )
                if _address(of_optimizer.grad) != _address(self.local_part(sent.gradient)):
                    raise UserError(
                        f"strategy=fsdp: hooks have set the gradient of {name} both in the module and in "
                        "optimizer.param_groups: set one of them"
                    )
            of_optimizer.grad = None if gradient is None else gradient.to_local()
            self._sent[number] = sent._replace(gradient=gradient) if parameter.owner is None else sent

    def _check_weights(self, sent: SentGradient) -> None:
        """Check that nobody has changed the weights of which an owner has a copy.

        Raises:
            UserError: a hook has.
        """
        if sent.is_copy and _versions(sent.parameter)[2:] != sent.versions[2:]:
            raise self._changed("weights", sent.parameter)

    def _sums_of_copied(self) -> Tensor:
        """Return the sums of this process's parts of the gradients and weights of which owners have copies."""
        copied = [sent for sent in self._sent if sent.is_copy]
        parts = [part.detach() for each in copied for part in (each.gradient.to_local(), each.parameter.local)]
        return torch.stack([part.sum(dtype=torch.float64) for part in parts]) if parts else torch.zeros(0)

    def _check_sums(self) -> None:
        """Check what `take_assigned_gradients` does not see: changes by way of `.data`.

        Raises:
            UserError: a hook has changed a gradient or weights of which an owner has a copy.
        """
        sums = self._sums_of_copied()
        if torch.equal(sums.nan_to_num(), self._sums.nan_to_num()):
            return
        number = int((sums.nan_to_num() != self._sums.nan_to_num()).nonzero()[0])
        sent = [sent for sent in self._sent if sent.is_copy][number // 2]
        raise self._changed("weights" if number % 2 else "gradient", sent.parameter)

    def _changed(self, what: str, parameter: ShardedParameter) -> UserError:
        right = "change gradients of optimizer.param_groups"
        if what == "weights":
            right = "do so within trainer.strategy.whole_weights()"
        copied = f"{parameter.name}, of which {type(self.optimizers[0]).__name__} has a whole copy"
        return UserError(f"strategy=fsdp: a hook has changed the {what} of {copied}: {right}")

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Take a step. Owners of whole parameters then send each process its part.

        Raises:
            UserError: a hook has changed what owners have copies of, or computes with parts and whole tensors together.
        """
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        except RuntimeError as error:
            if not computes_with_parts(error):
                raise
            raise UserError(
                f"strategy=fsdp: {type(self.lightning_module).__name__}, a callback or the optimizer computes with "
                f"parts of gradients or weights ({first_line(error)}): take a norm by trainer.strategy.gradient_norm, "
                "clip by gradient_clip_val="
            ) from error
        owned = [each for each in self._of_optimizer.values() if each.owner is not None]
        if not self._sent and any(each.tensor.grad is not None for each in owned):
            raise UserError(
                f"strategy=fsdp: {type(optimizer).__name__} steps twice with one gradient, of which its owners have no "
                "more copies: step once"
            )
        self._check_sums()
        self._free_gathered()  # a hook may have gathered the weights of before the step
        self._send_from_owners()
        if not self._memory_is_logged:
            self._memory_is_logged = True
            self._log_memory(optimizer)
        return output

    def _send_from_owners(self) -> None:
        """Send the weights that owners have to all processes, and free the owners'."""
        gradients, self._sent, self._sums = self._sent, [], torch.zeros(0)
        for sent in gradients:
            if not sent.is_copy:
                continue
            parameter = sent.parameter
            self._check_weights(sent)
            self._send_parts(parameter)
            if parameter.of_optimizer.numel():
                parameter.of_optimizer.data = parameter.local.new_empty(0)
                parameter.of_optimizer.grad = None

    @torch.no_grad()
    def _send_parts(self, parameter: ShardedParameter) -> None:
        """Send the weights of a parameter from its owner to all processes."""
        part = torch.empty(parameter.part_size, dtype=parameter.tensor.dtype, device=self.root_device)
        parts = None
        if self.global_rank == parameter.owner:
            wholes = parameter.parts(parameter.of_optimizer.data)
            parts = [parameter.padded(each).contiguous().to(self.root_device) for each in wholes]
        dist.scatter(part, parts, src=parameter.owner)
        local = parameter.local
        local.copy_(part[: local.numel()].view(local.shape))

    def gathered(self, parameter: ShardedParameter, part: Tensor, rank: int = 0) -> Tensor | None:
        """Return a whole tensor of the parts of all processes, on `rank`; None elsewhere. Every process calls it."""
        sent = parameter.padded(part.detach()).to(self.root_device)
        received = [torch.empty_like(sent) for _ in range(self.world_size)] if self.global_rank == rank else None
        dist.gather(sent.contiguous(), received, dst=rank)
        return None if received is None else parameter.joined(received)

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the norm of the gradient of all `parameters`, of the module or of an optimizer.

        Every process calls this. If the run is exact, one process computes each tensor's norm from the whole tensor.
        It is the norm of the gradients that the optimizer has got, as hooks have changed them.
        """
        self.take_assigned_gradients()
        copied = {id(sent.parameter) for sent in self._sent if sent.is_copy}
        # One column for each parameter: its gradient's norm, and 1 if it has a gradient.
        norms = torch.zeros(2, len(parameters), dtype=torch.float64, device=self.root_device)
        squares = torch.zeros(len(parameters), dtype=torch.bool, device=self.root_device)
        for number, tensor in enumerate(parameters):
            parameter = self._of_optimizer.get(id(tensor)) or self.sharded.get(id(tensor))
            if parameter is None:
                gradient = tensor.grad
            elif id(parameter) in copied or (parameter.owner is None and parameter.of_optimizer is not None):
                gradient = parameter.of_optimizer.grad
            else:
                gradient = parameter.tensor.grad
            if gradient is None:
                continue
            part = self.local_part(gradient)
            if parameter is None:
                takes_part, value = self.global_rank == 0, part
            elif id(parameter) in copied:  # only its owner has a gradient
                takes_part, value = True, part
            elif self.exact:
                rank = number % self.world_size if parameter.owner is None else parameter.owner
                whole = self.gathered(parameter, part, rank)
                takes_part, value = whole is not None, part if whole is None else whole
            else:
                squares[number] = True
                norms[0, number] = norm_of(part).double() ** 2
                norms[1, number] = 1
                continue
            if takes_part:
                norms[0, number] = norm_of(value).double()
                norms[1, number] = 1
        dist.all_reduce(norms)
        values = torch.where(squares, norms[0].sqrt(), norms[0])
        return torch.linalg.vector_norm(values[norms[1] > 0].to(parameters[0].dtype))

    # --- checkpoints ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, on rank zero with whole weights. It gathers one parameter after the other.

        While a checkpoint is saved in parts, it gathers nothing, and the weights are stand-ins; see `saved_parts`.
        """
        if self._depth:
            self._write_back()
        self._saves = True
        try:
            state = super().lightning_module_state_dict()
        finally:
            self._saves = False
        self._gather_again()  # `fully_shard` has freed what the evaluation still needs
        wholes = {id(each): self._to_save(each, each.local) for each in self.sharded.values()}
        return state | {name: wholes[id(each)] for name, each in self._by_name.items() if name in state}

    def gather_dicts(self, local_values: dict[T, Any]) -> dict[T, Any]:
        """Return values of parameters by name, on rank zero with whole tensors. Every process calls this."""
        return {
            name: self._whole_on_cpu(parameter, value)
            if (parameter := self._by_name.get(str(name))) and _has_shape(value, parameter.local.shape)
            else value
            for name, value in local_values.items()
        }

    def _whole_on_cpu(self, parameter: ShardedParameter, part: Tensor) -> Tensor:
        """Return a whole tensor of parts on rank zero, in the host's memory; on other ranks the part."""
        whole = self.gathered(parameter, part)
        return part if whole is None else whole.cpu()

    def _to_save(self, parameter: ShardedParameter, part: Tensor) -> Tensor:
        """Return what a checkpoint has of a tensor: the whole of it, or a stand-in if each process writes its part."""
        if self._parts is None:
            return self._whole_on_cpu(parameter, part)
        part = parameter.in_tensor_order(part.detach())
        return self._stand_in(Part(part.contiguous(), parameter.offsets, tuple(parameter.shape)))

    def _stand_in(self, part: Part) -> Tensor:
        assert self._parts is not None
        value = stand_in(part.shape, part.tensor.dtype)
        self._parts[id(value)] = (value, part)
        return value

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context in which a checkpoint is put together and saved. Every process enters it."""
        self._parts = {} if self._saves_parts and self.sharded else None
        try:
            yield
        finally:
            self._parts = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, or each process's part of it."""
        if self._parts is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        state = checkpoint["state_dict"]
        for name, parameter in self._by_name.items():  # an average, which each process has whole
            if _has_shape(value := state.get(name), parameter.shape) and not value.is_meta:
                state[name] = self._to_save(parameter, parameter.parts(value)[self.global_rank])
        places = {path: id(value) for path, *_, value in tensors_in(checkpoint) if id(value) in self._parts}
        io: Any = self.checkpoint_io
        io.save_parts(checkpoint, {path: self._parts[each][1] for path, each in places.items()}, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint. What is saved in parts is read later, when it is known which parts are needed."""
        io: Any = self.checkpoint_io
        checkpoint: dict[str, Any] = io.load_parts(checkpoint_path)
        return checkpoint

    @torch.no_grad()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's weights: those that are saved in parts one after the other."""
        saved = checkpoint.get(INDEX)
        if not isinstance(saved, SavedParts):
            super().load_model_state_dict(checkpoint, strict)
            return
        module = self.lightning_module
        state = dict(checkpoint["state_dict"])
        mine = {name: each.detach() for name, each in module.named_parameters(remove_duplicate=False)}
        cut = {name: each for name, each in state.items() if saved.has(each) and _has_shape(mine.get(name), each.shape)}
        state |= {name: mine[name] for name in cut}  # so that all other names are checked
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)
        for name, value in cut.items():
            if (parameter := self._by_name.get(name)) is None:
                mine[name].copy_(saved.read(value))
            else:
                parameter.local.copy_(self._read_part(saved, value, parameter))
        self._gather_again()

    def _read_part(self, saved: SavedParts, value: Tensor, parameter: ShardedParameter) -> Tensor:
        """Return this process's part of a tensor that is saved in parts, of this or another number of processes."""
        part = saved.read(value, parameter.offsets, parameter.shape_of_part(self.global_rank))
        return parameter.in_memory_order(part)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state, on rank zero with whole tensors; see `lightning_module_state_dict`."""
        state = super().optimizer_state(optimizer)
        of_owners: dict[int, Any] = {}
        states: dict[int, Any] = dict(state["state"])
        for number, parameter in self._numbered(optimizer):
            entry = states.get(number)
            if parameter.owner is not None:
                if parameter.owner == self.global_rank and entry is not None:
                    of_owners[number] = {
                        name: self._of_owner(parameter, value) if isinstance(value, Tensor) else value
                        for name, value in entry.items()
                    }
                    states[number] = of_owners[number]
            elif entry is not None:
                shape = parameter.local.shape
                states[number] = {
                    name: self._to_save(parameter, value) if _has_shape(value, shape) else value
                    for name, value in entry.items()
                }
        if any(parameter.owner is not None for _, parameter in self._numbered(optimizer)):
            gathered: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
            dist.gather_object(of_owners, gathered)
            for each in (gathered or [])[1:]:  # of the other processes
                states |= each
        return {**state, "state": dict(sorted(states.items()))}

    def _of_owner(self, parameter: ShardedParameter, value: Tensor) -> Tensor:
        """Return what a checkpoint has of an owner's tensor: a copy in the host's memory, or a stand-in."""
        if self._parts is None or not _has_shape(value, parameter.shape):
            return value.detach().cpu()
        return self._stand_in(Part(value.detach().contiguous(), (0,) * value.dim(), tuple(value.shape)))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, each with this process's parts of the states."""
        saved = checkpoint.get(INDEX)
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        super().load_optimizer_state_dict(
            {**checkpoint, "optimizer_states": [self._cut_optimizer_state(*pair, saved) for pair in pairs]}
        )

    def _cut_optimizer_state(self, optimizer: Any, state: Mapping[str, Any], saved: Any) -> dict[str, Any]:
        """Return what this process's optimizer needs of a state.

        Args:
            optimizer: it has this process's parameters.
            state: the state, with whole tensors, or with stand-ins.
            saved: reads what the stand-ins stand for; None: there are none.
        """

        def cut(value: Any, parameter: ShardedParameter | None) -> Any:
            reads = isinstance(saved, SavedParts) and saved.has(value)
            if parameter is None or not _has_shape(value, parameter.shape):
                return saved.read(value) if reads else value
            if parameter.owner is not None:  # fused optimizers pair elements in the order of the memory
                return with_strides(saved.read(value) if reads else value, parameter.strides)
            part = self._read_part(saved, value, parameter) if reads else parameter.parts(value)[self.global_rank]
            return part.clone(memory_format=torch.contiguous_format)

        parameters = dict(self._numbered(optimizer))
        states = {}
        for number, entry in state["state"].items():
            parameter = parameters.get(number)
            if parameter is None or parameter.owner in (None, self.global_rank):
                states[number] = {name: cut(value, parameter) for name, value in entry.items()}
        return {**state, "state": states}

    def _numbered(self, optimizer: Any) -> list[tuple[int, ShardedParameter]]:
        """Return the sharded parameters of an optimizer with their numbers in its state."""
        tensors = enumerate(tensor for group in optimizer.param_groups for tensor in group["params"])
        return [(number, self._of_optimizer[id(each)]) for number, each in tensors if id(each) in self._of_optimizer]

    # --- memory ---

    def _log_memory(self, optimizer: Any) -> None:
        """Log which bytes rank zero keeps between two steps."""
        if not self.is_global_zero:
            return
        sizes = {name: each / MIB for name, each in self.bytes_by_kind(optimizer).items()}
        parts = ", ".join(f"{name} {size:.0f}" for name, size in sizes.items())
        LOG.info(f"fsdp: each device keeps {sum(sizes.values()):.0f} MiB ({parts}), and gathered weights meanwhile")

    def bytes_by_kind(self, optimizer: Any) -> dict[str, int]:
        """Return the bytes of the tensors that this process keeps between two steps, by what they are."""
        parameters = [*self._replicated, *(each.local for each in self.sharded.values())]
        trained = [
            *(p for p in self._replicated if p.grad is not None),
            *(each.local for each in self.sharded.values()),
        ]
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return {
            "weights": _bytes(parameters),
            "gradients": _bytes(trained),
            "optimizer": _bytes(states),
            "exact sums": self.bytes_of_sums,
        }

    def on_exception(self, exception: BaseException) -> None:
        """Free what an evaluation has gathered."""
        self._evaluation.close()
        super().on_exception(exception)


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer needs whole tensors; False if it computes each element by itself.

    An optimizer's class says so by its attribute `works_on`: `elements` or `tensors`.

    Raises:
        UserError: it is not known.
    """
    kind = type(optimizer)
    works_on = getattr(kind, "works_on", None)
    if works_on == "tensors" or kind in BY_TENSOR:
        return True
    if works_on == "elements" or kind in BY_ELEMENT:
        return False
    raise UserError(
        f"strategy=fsdp: it is not known whether {kind.__name__} needs whole tensors: give its class an attribute "
        "works_on = 'elements' (each element by itself) or 'tensors' (each tensor by itself), or use strategy=ddp"
    )


def norm_of(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor, by the kernel with which torch clips gradients."""
    return torch._foreach_norm([tensor])[0] if tensor.is_cuda else torch.linalg.vector_norm(tensor)


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and list(value.shape) == list(shape)


def _versions(parameter: ShardedParameter) -> tuple[int, ...]:
    """Return version counters of a parameter's gradient and of its weights, two of each; a change raises one of them.

    A distributed tensor has one, and its local part another.
    """
    tensors = (parameter.tensor.grad, parameter.tensor)
    return tuple(
        count
        for each in tensors
        for count in ((0, 0) if each is None else (each._version, each.detach().to_local()._version))
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise UserError(
        f"strategy=fsdp: training_step uses {name} by a reference from before it was cut: use it by the module's name"
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
