"""Prints a hash of the forward and backward pass of each of many networks and layers, and of steps of optimizers:

    python tests/portable_cases.py                 # by the kernels of exact=portable
    python tests/portable_cases.py --unset nets    # by those of this processor; only the cases of one kind

On two processors, the lines must be the same. An emulated one takes minutes:

    qemu-x86_64 -cpu Haswell .venv/bin/python tests/portable_cases.py
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.launch import portable

Case = tuple[str, Callable[[], Iterable[Tensor | None]]]
Make = Callable[[], nn.Module]


def passes(make: Make, *shape: int, last: bool = True) -> Iterator[Tensor | None]:
    """Return the output of a module for random inputs, the gradients of inputs and parameters, and the module's
    buffers.

    Args:
        last: whether images are channels_last.
    """
    module, inputs = make(), torch.randn(shape)
    if last and len(shape) == 4:
        module, inputs = module.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    inputs.requires_grad_()
    output = module(inputs)
    (output * torch.randn_like(output)).sum().backward()
    yield from (output, inputs.grad, *(each.grad for each in module.parameters()), *module.buffers())


def nets() -> Iterator[Case]:
    from lockstep.vision.models import FastCNN, ResNet9, SmallCNN, SmallResNet18, Torchvision

    digits: dict[str, Any] = {"channels": 1, "image_size": 28, "num_classes": 10}
    photos: dict[str, Any] = {"channels": 3, "image_size": 32, "num_classes": 10}
    yield "small_cnn", partial(passes, partial(SmallCNN, **digits), 8, 1, 28, 28)
    yield "fast_cnn", partial(passes, partial(FastCNN, **digits), 8, 1, 28, 28)
    yield "resnet9", partial(passes, partial(ResNet9, **photos), 2, 3, 16, 16)
    yield "small_resnet18", partial(passes, partial(SmallResNet18, **photos), 2, 3, 16, 16)
    for arch in ("mobilenet_v3_small", "shufflenet_v2_x0_5", "regnet_y_400mf"):
        yield arch, partial(passes, partial(Torchvision, arch=arch, **photos), 2, 3, 64, 64)


def convolutions() -> Iterator[Case]:
    cases: tuple[tuple[int, int, int, int, dict[str, Any]], ...] = (
        (1, 256, 256, 14, {"kernel_size": 3, "padding": 1}),
        (1, 1024, 256, 14, {"kernel_size": 1}),
        (1, 512, 512, 7, {"kernel_size": 3, "padding": 1, "stride": 2}),
        (1, 3, 64, 64, {"kernel_size": 7, "padding": 3, "stride": 2}),
        (2, 64, 64, 28, {"kernel_size": 3, "padding": 1, "groups": 64}),
        (1, 64, 128, 28, {"kernel_size": 5, "padding": 2, "groups": 8}),
        (5, 20, 20, 14, {"kernel_size": 5}),
        (2, 32, 32, 28, {"kernel_size": 3, "padding": 2, "dilation": 2}),
    )
    for batch, channels, outputs, size, options in cases:
        name = f"conv {batch}x{channels}x{size}x{size} to {outputs}, "
        name += ", ".join(f"{option} {value}" for option, value in options.items())
        make = partial(nn.Conv2d, channels, outputs, **options)
        yield name, partial(passes, make, batch, channels, size, size)
        yield f"{name}, contiguous", partial(passes, make, batch, channels, size, size, last=False)


def linear() -> Iterator[Case]:
    for batch, inputs, outputs in (
        (1, 50, 10),
        (16, 2000, 50),
        (7, 513, 129),
        (16, 1024, 1024),
        (16, 4096, 512),
        (4, 25088, 128),
        (256, 300, 192),
    ):
        yield (
            f"linear {batch}x{inputs} to {outputs}",
            partial(passes, partial(nn.Linear, inputs, outputs), batch, inputs),
        )
    yield "linear 2x197x192 to 768", partial(passes, partial(nn.Linear, 192, 768), 2, 197, 192)
    yield "linear without bias", partial(passes, partial(nn.Linear, 300, 70, bias=False), 33, 300)
    yield "linear float64", in_double
    yield "batched products", lambda: [torch.bmm(torch.randn(12, 65, 64), torch.randn(12, 64, 65))]
    yield "attention", partial(passes, Attention, 4, 65, 96)


def in_double() -> Iterator[Tensor | None]:
    layer, x = nn.Linear(300, 70).double(), torch.randn(33, 300).double()
    output = layer(x)
    output.sum().backward()
    yield from (output, layer.weight.grad)


class Attention(nn.Module):
    """Self-attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x)[0]
        return result


class Loss(nn.Module):
    """Cross entropy of labels 0 to 9 in turn."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(x, torch.arange(len(x)) % 10, reduction="none", label_smoothing=self.smoothing)


def layers() -> Iterator[Case]:
    functions = (nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Tanh, nn.ELU, nn.Softplus, nn.Mish, nn.ReLU)
    cases: list[tuple[Make, tuple[int, ...]]] = [
        (partial(nn.MaxPool2d, 2), (8, 20, 24, 24)),
        (partial(nn.MaxPool2d, 3, 2, 1), (2, 64, 56, 56)),
        (partial(nn.AvgPool2d, 3, 2, 1), (4, 33, 28, 28)),
        (partial(nn.AdaptiveAvgPool2d, 1), (8, 512, 7, 7)),
        (partial(nn.BatchNorm2d, 64), (8, 64, 28, 28)),
        (partial(nn.BatchNorm2d, 13), (3, 13, 9, 9)),
        (partial(nn.GroupNorm, 8, 64), (8, 64, 28, 28)),
        (partial(nn.LayerNorm, 192), (2, 197, 192)),
        (partial(nn.Softmax, -1), (64, 1000)),
        (partial(nn.LogSoftmax, -1), (64, 10)),
        *((each, (64, 1001)) for each in functions),
        (partial(nn.GELU, "tanh"), (64, 1001)),
        (partial(nn.Upsample, scale_factor=2, mode="bilinear"), (2, 16, 14, 14)),
        (partial(nn.Dropout, 0.3), (64, 1001)),
    ]
    for make, shape in cases:
        yield f"{make()} {'x'.join(map(str, shape))}", partial(passes, make, *shape)
    for smoothing in (0.0, 0.1):
        yield f"cross entropy, smoothing {smoothing}", partial(passes, partial(Loss, smoothing), 64, 10)
    yield "random numbers", random_numbers
    yield "sums", lambda: (each(torch.randn(777, 301), 0) for each in (torch.sum, torch.mean, torch.std, torch.norm))
    yield "norm", lambda: [torch.linalg.vector_norm(torch.randn(100_003))]


def random_numbers() -> Iterator[Tensor]:
    yield from (torch.randn(999), torch.rand(999), torch.randperm(999), torch.bernoulli(torch.full((999,), 0.3)))


def optimizers() -> Iterator[Case]:
    fused = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad)
    cases: tuple[tuple[Any, dict[str, Any]], ...] = (
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0005}),
        (torch.optim.AdamW, {"weight_decay": 0.01}),
        (torch.optim.Adam, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adagrad, {}),
    )
    ways: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}}
    ways["for loop"] = {"foreach": False}
    for kind, options in cases:
        for way, chosen in ways.items():
            if way != "fused" or kind in fused:
                yield f"{kind.__name__}, {way}", partial(steps, partial(kind, lr=0.01, **options, **chosen))


def steps(make: Callable[..., torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Return the weights after three steps."""
    weights = [nn.Parameter(torch.randn(size)) for size in ((50, 2001), (10,), (20, 20, 5, 5))]
    optimizer = make(weights)
    for _ in range(3):
        for each in weights:
            each.grad = torch.randn_like(each)
        optimizer.step()
    yield from weights


KINDS = {each.__name__: each for each in (nets, convolutions, linear, layers, optimizers)}


def main() -> None:
    if "--unset" not in sys.argv:
        portable.set_up_worker(portable.PORTABLE)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for kind in [name for name in sys.argv[1:] if not name.startswith("--")] or KINDS:
        for name, compute in KINDS[kind]():
            torch.manual_seed(0)
            sha256 = hashlib.sha256()
            for tensor in compute():
                assert tensor is not None
                sha256.update(tensor.detach().contiguous().numpy().tobytes())
            print(f"{kind}: {name}: {sha256.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
