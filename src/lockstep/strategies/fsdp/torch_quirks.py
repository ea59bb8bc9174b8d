"""Private names of torch 2.15 for `fully_shard`.

They are used in this file only; tests/strategies/test_fsdp.py fails when they change.
"""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import MethodType
from typing import Any

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def parameters_of_unit(unit: Any) -> list[Tensor]:
    """Return the sharded parameters of a module of `fully_shard`, in the order in which it sends their gradients.

    A custom reduce-scatter gets these gradients as one tensor, and no public name tells where a gradient begins.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    return [] if group is None else [parameter.sharded_param for parameter in group.fsdp_params]


def set_gathered_strides(unit: Any, strides: dict[int, tuple[int, ...]]) -> None:
    """Let the gathered parameters of a module of `fully_shard` have other strides than contiguous ones.

    `fully_shard` takes contiguous parameters only. Kernels give other bits for a weight in channels_last, and take less
    time. No public option sets the strides.

    Args:
        unit: the module.
        strides: by the id of the sharded parameter.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    for parameter in [] if group is None else group.fsdp_params:
        assert parameter._contiguous_orig_stride is not None
        parameter._contiguous_orig_stride = strides[id(parameter.sharded_param)]


def send_gradients_when_complete(
    unit: Any, of_step: Callable[[], bool], refuse: Callable[[Any], None], attributes: dict[int, dict[str, Any]]
) -> None:
    """Let a module of `fully_shard` send its gradient when all of it is there, and take part in the step's pass only.

    torch sends it when the gradient of the module's inputs is there. For this it puts an identity function around the
    inputs, so autograd first adds up what the module itself adds to an input's gradient: other bits than on one device
    if something else uses this input, too. And torch takes each backward pass for that of the step. If `training_step`
    itself calls `torch.autograd.grad`, it would send gradients and free weights. No public option changes either.

    Args:
        unit: the module.
        of_step: whether the backward pass that runs is that of a step.
        refuse: called with a sharded parameter whose gathered weights have got a gradient in another backward pass.
        attributes: what a user has set on the whole parameters, by the id of the sharded parameter.
    """
    state = unit._get_fsdp_state()
    group, pre_backward = state._fsdp_param_group, state._pre_backward

    def before_backward(gradient: Tensor) -> Tensor:
        if of_step():
            result: Tensor = pre_backward(gradient)
            return result
        if group is not None:  # it may have been freed after the forward pass
            group.unshard()
            group.wait_for_unshard()
        return gradient

    state._pre_backward = before_backward
    if group is None:
        return
    group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)
    complete: set[int] = set()

    def after_gradient(number: int, _: Tensor) -> None:
        if not of_step():
            refuse(group.fsdp_params[number].sharded_param)
        complete.add(number)
        if len(complete) == len(group.fsdp_params):
            complete.clear()
            group.post_backward()

    def around(number: int, parameter: Any, method: Callable[[], None]) -> Callable[[], None]:
        @wraps(method)
        def init_unsharded_param() -> None:
            first = not hasattr(parameter, "_unsharded_param")
            method()
            if first:
                parameter._unsharded_param.register_post_accumulate_grad_hook(partial(after_gradient, number))
                vars(parameter._unsharded_param).update(attributes.get(id(parameter.sharded_param), {}))

        return init_unsharded_param

    for number, parameter in enumerate(group.fsdp_params):
        parameter.init_unsharded_param = around(number, parameter, parameter.init_unsharded_param)

    def post_backward(*_: Any) -> None:
        complete.clear()
        type(group).post_backward(group)

    group.post_backward = post_backward


def gather_around_outermost_call(unit: Any, methods: Iterable[str], check: Callable[[str], None]) -> None:
    """Let `fully_shard` gather and free the weights of a module around some methods, as it does around `forward`.

    `training_step` calls `forward`, and `fully_shard` would act around both (`register_fsdp_forward_method`). It then
    frees the weights at the end of the outer one, whatever was set by `set_reshard_after_forward`. No public name
    takes its hooks from `forward`.

    Args:
        unit: the module.
        methods: names of its methods, besides `forward`.
        check: gets the name of a method before the weights are gathered for it.
    """
    state = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    running: list[str] = []  # names of the methods that run

    def around(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if running:
                return method(*args, **kwargs)
            check(name)
            args, kwargs = state._pre_forward(unit, args, kwargs)
            running.append(name)
            try:
                result = method(*args, **kwargs)
            finally:
                running.pop()
            return state._post_forward(unit, args, result)

        return call

    for name in ("forward", *methods):
        setattr(unit, name, MethodType(around(name, getattr(unit, name)), unit))


def forget_unfinished_passes(units: Iterable[Any]) -> None:
    """Let modules of `fully_shard` begin anew after forward passes that raised an error, or had no backward pass.

    After an error torch's hook at the end of a forward pass does not run, and the module's next backward pass would
    send its gradient at another time than other processes. `reset_iter_state` of torch would drop gradients.
    """
    for unit in units:
        state = unit._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        if (group := state._fsdp_param_group) is not None:
            group._training_state = TrainingState.IDLE


def computes_with_parts(error: RuntimeError) -> bool:
    """Check whether torch has refused an operation because a tensor is a part, which has to be gathered first.

    torch raises it in C++, as an error of no class of its own, for a DTensor beside a tensor and for operations that
    DTensors lack. A look at the arguments of each operation would take time in each pass.
    """
    return "DTensor" in str(error)


def needs_freed_weights(error: RuntimeError) -> bool:
    """Check whether torch has refused an operation on weights whose memory `fully_shard` has freed."""
    return "setStorage" in str(error) and "storage of size 0" in str(error)
