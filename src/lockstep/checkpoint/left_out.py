"""Tensors of a module that its state_dict leaves out: buffers with `persistent=False`, keys that hooks remove.

A checkpoint has those that have changed since the run began. Of the others it has a SHA-256, since a module that is
made again must make the same: a table of positions, or weights that it has read elsewhere.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.step.buffers import module_buffers
from lockstep.strategies.sharded_parameters import memory_of

COMPARED_SAVES = 2  # saves for which the content of all is compared, since `.data` hides a change from the version


class LeftOut:
    """The tensors of a module that its state_dict leaves out.

    Args:
        module: the module, as it was made and before it continues from a checkpoint.
        state: its state_dict.
        strategy: the strategy, which compares parameters in parts itself.

    Attributes:
        sha256: of each of them, by name.
    """

    def __init__(self, module: Any, state: Mapping[str, Any], strategy: Any) -> None:
        self._in_parts: Mapping[str, Any] = getattr(strategy, "by_name", {})
        tensors = tensors_left_out(module, state, self._in_parts)
        self.sha256 = {name: content_of(tensor) for name, tensor in tensors.items()}
        self._versions = {name: _version(tensor) for name, tensor in tensors.items()}
        self._changed: set[str] = set()
        self._compares = COMPARED_SAVES

    def restore(self, module: Any, saved: Mapping[str, Any]) -> list[str]:
        """Restore what had changed when a checkpoint was saved. Return the names of what is not as it was."""
        self._changed = {name for name, value in saved["changed"].items() if _restore(module, name, value)}
        others = [name for name, sha256 in saved["sha256"].items() if self.sha256.get(name, sha256) != sha256]
        return [*sorted(saved["changed"].keys() - self._changed), *others]

    def state(self, module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint has of them; empty if there are none.

        Args:
            module: the module.
            state: the checkpoint's state_dict.
        """
        tensors = tensors_left_out(module, state, self._in_parts)
        compares, self._compares = self._compares > 0, self._compares - 1
        for name, tensor in tensors.items():
            if name not in self._changed and (compares or self._versions.get(name) != _version(tensor)):
                if self.sha256.get(name) != content_of(tensor):
                    self._changed.add(name)
                self._versions[name] = _version(tensor)
        if not tensors:
            return {}
        changed = {name: tensor.detach() for name, tensor in tensors.items() if name in self._changed}
        return {"changed": changed, "sha256": {name: self.sha256[name] for name in tensors if name not in changed}}


def _restore(module: Any, name: str, value: Tensor) -> bool:
    """Give a module the value of a tensor that it has, or of a buffer that it registers later. Return if it could."""
    path, _, key = name.rpartition(".")
    layer = module.get_submodule(path)
    tensor = layer._parameters.get(key, layer._buffers.get(key))
    if tensor is not None and (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
        tensor.detach().copy_(value)
    elif key in layer._buffers:
        layer._buffers[key] = value.to(module.device)
    elif hasattr(layer, key):
        return False
    else:
        layer.register_buffer(key, value.to(module.device), persistent=False)
    return True


def tensors_left_out(module: Any, state: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers and parameters of a module that its state_dict has under no name, without `others`."""
    buffers = {path: layer._buffers[name] for path, layer, name in module_buffers(module)}
    named = {**buffers, **dict(module.named_parameters())}
    missing = {
        name: tensor
        for name, tensor in named.items()
        if name not in state and name not in others and isinstance(tensor, Tensor) and _has_content(tensor)
    }
    if not missing:
        return {}
    saved = {memory_of(value) for value in state.values() if isinstance(value, Tensor) and _has_content(value)}
    return {name: tensor for name, tensor in missing.items() if memory_of(tensor) not in saved}


def _has_content(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return dense and not isinstance(tensor, DTensor) and tensor.numel() > 0


def content_of(tensor: Tensor) -> str:
    """Return the shape, type and SHA-256 of a dense tensor of any device."""
    content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(content).hexdigest()}"


def _version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), -1 if tensor.is_inference() else tensor._version
