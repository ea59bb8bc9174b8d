"""The class of parameters that `strategy=fsdp` cuts: what code does with them between passes is right or refused.

torch's `DTensor` computes with parts as if they were whole wherever it can. Where it can't, it raises errors that name
neither the parameter nor a remedy, or it gives the value of this process's part alone: `p.mean().item()` differs
between the ranks. A sum over parts is rounded in another order than on one device, too. So a parameter is a
`PartOfWeights`. Its gradient becomes one when it is read, and so does what is computed from them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lockstep.errors import StepRefused, UserError
from lockstep.text import first_line

WHOLE = (
    "do so on all ranks within trainer.strategy.whole_weights(); of gradients, take a norm by "
    "trainer.strategy.gradient_norm, and clip by gradient_clip_val="
)
# Each process would draw the same random numbers for its rows, or other ones than one device does.
RANDOM = frozenset(
    (
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
        *("trunc_normal_", "randn_like", "rand_like", "randint_like", "bernoulli", "normal", "multinomial", "poisson"),
        *("dropout", "dropout_", "alpha_dropout", "feature_dropout", "native_dropout", "rrelu", "gumbel_softmax"),
    )
)
FILLS = frozenset(("constant_", "zeros_", "ones_"))  # those of torch.nn.init that draw no random numbers
TO_PYTHON = frozenset(("item", "tolist", "__float__", "__int__", "__bool__", "__complex__", "__index__", "numpy"))
HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))


class UsesParts(StepRefused):
    """Code has used parts of weights or gradients as if they were whole. Rank zero alone may have done so."""


class PartOfWeights(DTensor):
    """A parameter of which each process has a part, its gradient, or what is computed from them.

    Only a function that gives each element from the same elements, or from whole tensors that torch has gathered for
    it, is right. Others are refused.
    """

    in_memory_order: ClassVar[bool] = False  # whether the elements have the order of the memory, not of the tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function. Raise UsesParts if it treats a part as a whole tensor."""
        name = getattr(func, "__name__", str(func))
        if name == "__set__" and getattr(func, "__self__", None) is Tensor.data:
            _refuse("p.data = ... replaces", "change it in place by copy_()")
        if name in HOOKS:
            _refuse(f"{name} is called for", "change gradients in on_before_optimizer_step", "")
        if name in RANDOM or (getattr(func, "__module__", "") == "torch.nn.init" and name not in FILLS):
            _refuse(f"{name}() fills or draws for", WHOLE, "")
        if name in TO_PYTHON and any(_is_cut(each) for each in args[:1]):
            _refuse(f"{name}() reads", WHOLE)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError) as error:
            if isinstance(error, UserError):
                raise
            raise UsesParts(_text(f"{name}() gets", WHOLE, f" ({first_line(error)})")) from error
        return cls._guarded(result, name, args)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise UsesParts."""
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise UsesParts."""
        refuse_copy()

    @classmethod
    def _guarded(cls, result: Any, name: str, args: Any) -> Any:
        """Let results be guarded, too.

        Raises:
            UsesParts: a result is a sum of which each process has a part.
        """
        if isinstance(result, tuple | list):
            for each in result:
                cls._guarded(each, name, args)
        elif isinstance(result, DTensor):
            if any(placement.is_partial() for placement in result.placements):
                _refuse(f"{name}() sums", WHOLE)
            if cls.in_memory_order and result.shape != args[0].shape:
                _refuse(f"{name}() reads in the order of the memory", WHOLE)
            if type(result) is DTensor:
                result.__class__ = cls
        return result


class PartInMemoryOrder(PartOfWeights):
    """A part of a parameter that is in another memory format, such as channels_last.

    torch takes the order of its elements in the memory for that of the tensor.
    """

    in_memory_order = True

    def full_tensor(self, **options: Any) -> NoReturn:
        """Raise UsesParts, since the elements would have another order."""
        _refuse("full_tensor() reads in the order of the memory", WHOLE)


def refuse_copy(*_: Any) -> NoReturn:
    """Raise UsesParts: a module or a parameter is copied or saved."""
    right = "copy or save what trainer.strategy.lightning_module_state_dict() returns on all ranks"
    _refuse("deepcopy, pickle or torch.save copies", right, "")


def _is_cut(value: Any) -> bool:
    return isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements)


def _text(what: str, right: str, reason: str = "") -> str:
    return f"strategy=fsdp: {what} a part of weights or gradients as if it were the whole{reason}: {right}"


def _refuse(what: str, right: str, reason: str | None = None) -> NoReturn:
    if reason is None:
        raise UsesParts(_text(what, right))
    raise UsesParts(f"strategy=fsdp: {what} weights of which each device has a part{reason}: {right}")


def guard(parameter: Any, in_memory_order: bool, attributes: dict[str, Any]) -> None:
    """Let a parameter that has been cut refuse what would take its part for the whole.

    Args:
        parameter: the parameter, a `DTensor`.
        in_memory_order: whether its elements have the order of the memory of the whole parameter.
        attributes: what a user has set on the whole parameter.
    """
    parameter.__class__ = PartInMemoryOrder if in_memory_order else PartOfWeights
    vars(parameter).update(attributes)


class PartOfOptimizer(nn.Parameter):
    """A parameter that an optimizer has, an ordinary tensor, while hooks may read it: it is a part, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function that computes each element from the same ones. Raise UsesParts for others."""
        return _by_element(func, args, kwargs or {})


class _Computed(Tensor):
    """A gradient of a `PartOfOptimizer`, or what is computed from it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _by_element(func, args, kwargs or {})


def _by_element(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name in TO_PYTHON or name in RANDOM:
        _refuse(f"{name}() reads", WHOLE)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        shapes = {each.shape for each in leaves if isinstance(each, PartOfOptimizer | _Computed)}
        for each in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(each, Tensor):
                continue
            if each.shape not in shapes:
                _refuse(f"{name}() sums or cuts", WHOLE)
            if type(each) is Tensor:
                each.__class__ = _Computed
    return result


@contextmanager
def guarded(parameters: Sequence[Any]) -> Iterator[None]:
    """Return a context in which parameters of an optimizer are parts that hooks may change element by element only.

    The optimizer itself gets ordinary parameters again, since torch chooses its kernels by their class.
    """
    for parameter in parameters:
        parameter.__class__ = PartOfOptimizer
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.__class__ = nn.Parameter
            if type(parameter.grad) is _Computed:
                parameter.grad.__class__ = Tensor  # type: ignore[assignment]
