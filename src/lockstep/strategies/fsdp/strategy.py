"""`strategy=fsdp`: torch's `fully_shard`, adapted to steps in pieces.

Each process keeps a part of the weights, of their gradients and of the optimizer's state. Before a block of the network
computes, its weights are gathered from all processes. They are copies, so a piece's passes run the same kernels as on
one device. In the backward pass each process gets its part of the block's gradient (`sums.py`).

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
from typing import Any

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
from lockstep.arithmetic.layout import Action, Layout
from lockstep.errors import StepRefused, UserError
from lockstep.lightning.precision import ClipsByStrategy
from lockstep.lightning.process_per_device import ProcessPerDevice
from lockstep.lightning.strategy import Schedule
from lockstep.step.batch import MicroBatch, StepBatch
from lockstep.step.outputs import outputs_of
from lockstep.step.parameters import OTHER_BACKWARD, refuse_gradient_hooks
from lockstep.step.strategy import T, proxy
from lockstep.step.trial import without_traces
from lockstep.strategies.fsdp.checkpoints import CheckpointParts
from lockstep.strategies.fsdp.optimizer import OptimizerParts
from lockstep.strategies.fsdp.parameters import (
    ShardedParameter,
    dim_to_cut,
    find_blocks,
    has_shape,
    is_contiguous,
    memory_of,
    names_of_keys,
    other_dtypes,
)
from lockstep.strategies.fsdp.part_of_weights import UsesParts, guard, guarded, refuse_copy
from lockstep.strategies.fsdp.torch_quirks import (
    computes_with_parts,
    forget_unfinished_passes,
    gather_around_outermost_call,
    needs_freed_weights,
    parameters_of_unit,
    send_gradients_when_complete,
    set_gathered_strides,
)
from lockstep.text import first_line, join_names

LOG = logging.getLogger("lockstep")
MIB = 1 << 20
STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class PartsPrecision(ClipsByStrategy):
    """Methods for `proxy`, around those of the precision plugin."""

    strategy: Any

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, in which blocks may be called again.

        Raises:
            UserError: it needs weights that were freed.
        """
        try:
            with self.strategy.backward_pass():
                super().backward(*args, **kwargs)  # type: ignore[misc]  # of the class that it is mixed into
        except RuntimeError as error:
            if not needs_freed_weights(error):
                raise
            raise UserError(
                "strategy.reshard=true: a backward pass needs weights of a block that is not known to be part of it: "
                "let blocks return all of their outputs instead of setting attributes, or leave out strategy.reshard"
            ) from error

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients of an optimizer's parameters, after it has got what hooks have assigned to them."""
        self.strategy.take_assigned_gradients()
        with torch._C.DisableTorchFunctionSubclass():
            super().clip_gradients(*args, **kwargs)  # type: ignore[misc]  # likewise

    def _after_closure(self, *args: Any, **kwargs: Any) -> None:
        """Call the hooks before the optimizer step. For them, what the optimizer has are parts."""
        with guarded([each.of_optimizer for each in self.strategy.of_optimizer.parameters.values()]):
            super()._after_closure(*args, **kwargs)  # type: ignore[misc]  # likewise


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


class FullySharded(ProcessPerDevice):
    """A process per device, each with a part of the weights, of the gradients and of the optimizer's state.

    Args:
        layout: the run's layout.
        schedule: see `StepStrategy`.
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

    def __init__(
        self,
        layout: Layout,
        schedule: Schedule,
        reshard: bool = False,
        offload: bool = False,
        blocks: str | None = None,
        saves_parts: bool = False,
    ) -> None:
        super().__init__(layout, schedule)
        self.less_memory = "" if reshard else "strategy.reshard=true"
        self.sharded: dict[int, ShardedParameter] = {}
        self.counts = True
        self.receive: Any = None
        self.exact = False
        self.bytes_of_sums = 0
        self._reshard, self.offload, self._pattern = reshard, offload, blocks
        self._units: list[Any] = []  # modules whose weights are gathered together; the last one is the whole module
        self._messages: list[tuple[Any, ReduceScatter]] = []  # units that have sharded parameters
        self._replicated: list[nn.Parameter] = []
        self.of_optimizer = OptimizerParts(self)
        # by each name of it in the module and in the module's state_dict
        self.by_name: dict[str, ShardedParameter] = {}
        self.names_of_keys: dict[str, str] = {}  # the module's names of parameters, by those in its state_dict
        self._step_batch: StepBatch | None = None
        self._depth = 0  # of contexts in which all weights are gathered
        self._evaluation = ExitStack()
        self._in_backward = False  # whether a backward pass runs
        # the module's parameters before they were cut, by id; what was made before may have them
        self.before: dict[int, tuple[nn.Parameter, ShardedParameter]] = {}
        self._memory_is_logged = False
        self._saves = False  # whether the module's state is being gathered
        self._saves_parts = saves_parts
        self._saved_names: dict[str, ShardedParameter] = {}  # in the state that was gathered last
        self._checkpoints = CheckpointParts(self)
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
        # Parts can't be used in inference mode (torch #95957). Lightning leaves it out for its own FSDP, and with gloo.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
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
        forget_unfinished_passes(self._units)  # after an error, gathered weights could not move to the host
        self._free_gathered()
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
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING or (self.offload and not self.sharded):
            super().model_to_device()

    def configure_ddp(self) -> None:
        """Shard the module."""
        self._send_buffers(self.lightning_module)
        if not self.sharded:
            self._shard(self.lightning_module)
        self._to_device()
        if not isinstance(self.precision_plugin, PartsPrecision):
            self.precision_plugin = proxy(self.precision_plugin, PartsPrecision)
            vars(self.precision_plugin)["strategy"] = self  # Lightning's class does not declare it

    def _to_device(self) -> None:
        """Move to the device what `fully_shard` has left where it was: whole parameters, metrics, buffers."""
        if not self.offload:
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
                guard(tensor, not is_contiguous(cut.strides, cut.shape), cut.attributes)
        self.sharded = {id(parameter.tensor): parameter for parameter in self.sharded.values()}

    def _shard(self, module: Any) -> None:
        """Apply `fully_shard` to the blocks and to the module.

        Raises:
            UserError: there is no block of the given pattern.
        """
        refuse_gradient_hooks(module.named_parameters())
        for tensor in module.parameters():  # as DDP does; buffers are sent for both
            sent = tensor.detach().to(self.root_device).contiguous()
            dist.broadcast(torch.view_as_real(sent) if sent.is_complex() else sent, 0)
            tensor.detach().copy_(sent)
        dims = {id(p): dim for p in module.parameters() if (dim := dim_to_cut(p, self.world_size)) is not None}
        for other in other_dtypes(module, find_blocks(module, set(dims), self._pattern), set(dims)):
            del dims[id(other)]
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
            "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy(),
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
                attributes = {name: value for name, value in vars(before[name]).items() if name != "_is_param"}
                self.sharded[id(tensor)] = parameter = ShardedParameter(
                    name, tensor, strides[key], dims[key], self.world_size, self.global_rank, attributes=attributes
                )
                self.before[key] = before[name], parameter
        tensors = module.named_parameters(remove_duplicate=False)
        self.by_name = {name: self.sharded[id(tensor)] for name, tensor in tensors if id(tensor) in self.sharded}
        state = module.state_dict()
        self.by_name |= self._names_in_state(module, state)
        self.names_of_keys = names_of_keys(module, state)
        self._units = [*blocks, module]
        for unit in self._units:
            set_gathered_strides(unit, {id(each.tensor): each.strides for each in self.sharded.values()})
            attributes_by_id = {key: each.attributes for key, each in self.sharded.items()}
            send_gradients_when_complete(unit, lambda: self._in_backward, self._refuse_backward, attributes_by_id)
            vars(unit)["__deepcopy__"] = refuse_copy  # torch's own raises an AssertionError
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
        for first, parameter in self.before.values():  # other uses of them would go on with the first weights
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

    def _names_in_state(self, module: Any, state: Mapping[str, Any]) -> dict[str, ShardedParameter]:
        """Return the sharded parameters by their names in the module's state_dict, which its hooks may rename.

        Raises:
            UserError: the state lacks one, or has parts of something else: a checkpoint would not be complete.
        """
        by_memory = {memory_of(each.tensor): each for each in self.sharded.values()}
        names = {
            name: parameter
            for name, value in state.items()
            if isinstance(value, DTensor) and (parameter := by_memory.get(memory_of(value)) or self.by_name.get(name))
        }
        saved = {id(parameter) for parameter in names.values()}
        wrong = [each.name for each in self.sharded.values() if id(each) not in saved]
        wrong += [name for name, value in state.items() if isinstance(value, DTensor) and name not in names]
        if wrong:
            raise UserError(
                f"strategy=fsdp: the module's state_dict lacks {wrong[0]} or has changed it, and so "
                "would a checkpoint: leave weights as they are in state_dict() and its hooks, or use strategy=ddp"
            )
        return names

    def _refuse_backward(self, tensor: Any) -> None:
        """Raise UserError: a backward pass of the user's own has given a gradient to a sharded parameter."""
        raise UserError(OTHER_BACKWARD.format(self.sharded[id(tensor)].name))

    def __deepcopy__(self, memo: Any) -> Any:
        """Raise UsesParts: a copy of the module would copy this."""
        refuse_copy(memo)

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
        for name, parameter in self.by_name.items():
            value = state.get(name)
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                part = parameter.parts(value)[self.global_rank].to(parameter.local.device).contiguous()
                state[name] = parameter.as_parameter(part)

    def _after_load(self, *args: Any) -> None:
        self.gather_again()

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
            self.of_optimizer.send_changed_weights()
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
            self.of_optimizer.give_weights()

    def _gather(self) -> None:
        """Gather all weights."""
        # Later passes differentiate the gathered weights, so they must be no inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            for unit in self._units:
                unit.unshard()
        self._addresses = {name: each.data_ptr() for name, each in self._gathered_weights().items()}

    def gather_again(self) -> None:
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
            parameter = self.by_name[name]
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

    def passes_communicate(self) -> bool:
        """Return whether a pass gathers the weights again, or communicates as with ddp."""
        return self._reshard or super().passes_communicate()

    def use_reducer(self, wanted: bool) -> bool:
        """Return False: the gradients are summed unit by unit."""
        return False

    def begin_step(self, step_batch: StepBatch) -> None:
        """Prepare for the passes of a step; the gradient sum calls it.

        Raises:
            UserError: a sharded parameter was frozen.
        """
        self._step_batch = step_batch
        self.of_optimizer.send_from_owners()  # an optimizer may run the passes again, with weights that it has changed
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

        If it may change parameters without a gradient, as a teacher that follows the weights, all weights are gathered
        before, unless they shall be freed between the passes.

        Raises:
            UserError: it uses weights of a block that it does not call, which are not gathered.
        """
        if self.changing_parameters and self.sharded and not self._reshard:
            for unit in self._units[:-1]:
                unit.unshard()
        try:
            return super().training_step(*args, **kwargs)
        except (RuntimeError, UsesParts) as error:
            if not isinstance(error, UsesParts) and not computes_with_parts(error):
                raise
            cause = error.__cause__ if isinstance(error, UsesParts) and error.__cause__ else error
            raise UserError(
                "strategy=fsdp: training_step uses weights of a block without a call of the block, so they are not "
                f"gathered ({first_line(cause)}): give a pattern strategy.blocks= of modules that are called, or leave "
                "out strategy.reshard=true"
            ) from error

    def _pass_without_effect(self, step_batch: StepBatch) -> None:
        """Run the passes of a piece whose gradient and numbers do not count, since other processes run theirs."""
        trainer = self.lightning_module.trainer
        step = trainer.fit_loop.epoch_loop.passes.new_step(step_batch)
        gradients = [(parameter, parameter.grad) for parameter in self._replicated]
        for parameter in self._replicated:
            parameter.grad = None
        self.counts = False
        try:
            with without_traces(self.lightning_module, trainer), torch.enable_grad():
                micro_batch = step.any_micro_batch()
                with self.micro_batch(micro_batch, 0):
                    loss, _ = outputs_of(step.forward_pass(step.prepared(micro_batch), micro_batch))
                with self.backward_pass():
                    loss.backward()
            self._check_calls()
        finally:
            self.counts = True
            for parameter, gradient in gradients:
                parameter.grad = gradient

    # --- the optimizer ---

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers, and give them this process's parts."""
        super().setup_optimizers(trainer)
        self.of_optimizer.set_up(self.optimizers)

    def set_gradient(self, parameter: ShardedParameter, part: Tensor | None) -> None:
        """Set the gradient of a sharded parameter to its part on this process, padded."""
        if part is None:
            parameter.tensor.grad = None
            return
        parameter.tensor.grad = parameter.as_parameter(parameter.in_memory_order(part).to(parameter.local.device))

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
        self.of_optimizer.end_step(optimizer)
        self._free_gathered()  # a hook may have gathered the weights of before the step
        self.of_optimizer.send_from_owners()
        if not self._memory_is_logged:
            self._memory_is_logged = True
            self._log_memory(optimizer)
        return output

    def gathered(self, parameter: ShardedParameter, part: Tensor, rank: int = 0) -> Tensor | None:
        """Return a whole tensor of the parts of all processes, on `rank`; None elsewhere. Every process calls it."""
        sent = parameter.padded(part.detach()).to(self.root_device)
        received = [torch.empty_like(sent) for _ in range(self.world_size)] if self.global_rank == rank else None
        dist.gather(sent.contiguous(), received, dst=rank)
        return None if received is None else parameter.joined(received)

    def give_gradients(self) -> None:
        """Give the optimizer the gradients of the sharded parameters. Every process calls this."""
        self.of_optimizer.give_gradients()

    def take_assigned_gradients(self) -> None:
        """Give the optimizer what hooks have assigned to the gradients of the module's parameters."""
        self.of_optimizer.take_assigned_gradients()

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the norm of the gradient of all `parameters`, of the module or of an optimizer; all processes call it.

        With `exact=true` it has the bits of one device.
        """
        return self.of_optimizer.gradient_norm(parameters)

    # --- checkpoints ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, on rank zero with whole weights. It gathers one parameter after the other.

        While a checkpoint is saved in parts, it gathers nothing, and the weights are stand-ins; see
        `lockstep.checkpoint.parts`.
        """
        if self._depth:
            self._write_back()
        self._saves = True
        try:
            state = super().lightning_module_state_dict()
        finally:
            self._saves = False
        self.gather_again()  # `fully_shard` has freed what the evaluation still needs
        names = self._names_in_state(self.lightning_module, state)
        wholes = {id(each): self._checkpoints.to_save(each, each.local) for each in self.sharded.values()}
        state.update({name: wholes[id(each)] for name, each in names.items()})
        self._saved_names = names
        return state

    def gather_dicts(self, local_values: dict[T, Any]) -> dict[T, Any]:
        """Return values of parameters by name, on rank zero with whole tensors. Every process calls this."""
        return {
            name: self._checkpoints.whole_on_cpu(parameter, value)
            if (parameter := self.by_name.get(str(name))) and has_shape(value, parameter.local.shape)
            else value
            for name, value in local_values.items()
        }

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context in which a checkpoint is put together and saved. Every process enters it."""
        self._checkpoints.begin(in_parts=self._saves_parts and bool(self.sharded))
        try:
            yield
        finally:
            self._checkpoints.begin(in_parts=False)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, or each process's part of it.

        Raises:
            UserError: it is not complete.
        """
        for name, parameter in self._saved_names.items():
            value = checkpoint["state_dict"].get(name)
            if value is None or (self.is_global_zero and not has_shape(value, parameter.shape)):
                raise UserError(
                    f"{filepath}: not saved, because it lacks {parameter.name} or has another shape of it: leave its "
                    "state_dict as it is in on_save_checkpoint, or use strategy=ddp"
                )
        parts = self._checkpoints.parts_of(checkpoint)
        if parts is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            io: Any = self.checkpoint_io
            io.save_parts(checkpoint, parts, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint. What is saved in parts is read later, when it is known which parts are needed."""
        io: Any = self.checkpoint_io
        checkpoint: dict[str, Any] = io.load_parts(checkpoint_path)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's weights: those that are saved in parts one after the other."""
        state, in_parts = self._checkpoints.cut_weights(self.lightning_module, checkpoint)
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)
        self._checkpoints.read_weights(self.lightning_module, checkpoint, in_parts)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state, on rank zero with whole tensors; see `lightning_module_state_dict`."""
        return self._checkpoints.optimizer_state(optimizer, super().optimizer_state(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, each with this process's parts of the states."""
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        saved = self._checkpoints.saved(checkpoint)
        states = [self._checkpoints.cut_optimizer_state(*pair, saved) for pair in pairs]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
        self.of_optimizer.guard_states(self.optimizers)

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


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise UserError(
        f"strategy=fsdp: training_step uses {name} by a reference from before it was cut: use it by the module's name"
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
