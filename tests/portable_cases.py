"""Prints a hash of the forward and backward pass of each of many networks and layers, and of steps of optimizers:

    python tests/portable_cases.py                 # by the kernels of exact=portable
    python tests/portable_cases.py --unset nets    # by those of this processor; only the cases of one kind

Run on two processors, the lines must be the same. No worker is started, so an emulated processor needs seconds:

    qemu-x86_64 -cpu Haswell .venv/bin/python tests/portable_cases.py
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from lockstep.config import portable

UNSET = "--unset" in sys.argv
if not UNSET:
    portable.choose_kernels(portable.PORTABLE)

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = tuple[str, Callable[[], Iterable[Tensor]]]


def passes(module: nn.Module, *shape: int, last: bool = True) -> Iterator[Tensor]:
    """The output of a module for random images, and the gradients of the images and of all parameters."""
    images = torch.randn(shape)
    if last and len(shape) == 4:
        module, images = module.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    images.requires_grad_()
    output = module(images)
    (output * torch.randn_like(output)).sum().backward()
    yield from (output, images.grad, *(each.grad for each in module.parameters()), *module.buffers())


def nets() -> Iterator[Case]:
    from project.models import FastCNN, MnistCNN, ResNet9, ResNet18, Torchvision

    small = {"channels": 1, "image_size": 28, "num_classes": 10}
    photos = {"channels": 3, "image_size": 32, "num_classes": 10}
    yield "mnist_cnn", lambda: passes(MnistCNN(**small), 8, 1, 28, 28)
    yield "fast_cnn", lambda: passes(FastCNN(**small), 8, 1, 28, 28)
    yield "resnet9", lambda: passes(ResNet9(**photos), 2, 3, 16, 16)
    yield "resnet18", lambda: passes(ResNet18(**photos), 2, 3, 16, 16)
    for arch in ("mobilenet_v3_small", "shufflenet_v2_x0_5", "regnet_y_400mf"):
        yield arch, lambda arch=arch: passes(Torchvision(arch=arch, **photos), 2, 3, 64, 64)


def convolutions() -> Iterator[Case]:
    for batch, inside, outside, size, options in (
        (1, 256, 256, 14, {"kernel_size": 3, "padding": 1}),
        (1, 1024, 256, 14, {"kernel_size": 1}),
        (1, 512, 512, 7, {"kernel_size": 3, "padding": 1, "stride": 2}),
        (1, 3, 64, 64, {"kernel_size": 7, "padding": 3, "stride": 2}),
        (2, 64, 64, 28, {"kernel_size": 3, "padding": 1, "groups": 64}),
        (1, 64, 128, 28, {"kernel_size": 5, "padding": 2, "groups": 8}),
        (5, 20, 20, 14, {"kernel_size": 5}),
        (2, 32, 32, 28, {"kernel_size": 3, "padding": 2, "dilation": 2}),
    ):
        name = f"conv {batch}x{inside}x{size}x{size} to {outside}, " + ", ".join(f"{k} {v}" for k, v in options.items())
        shape = (batch, inside, size, size)
        for last in (True, False):
            layer = lambda inside=inside, outside=outside, options=options: nn.Conv2d(inside, outside, **options)
            yield f"{name}{'' if last else ', contiguous'}", lambda make=layer, s=shape, last=last: passes(
                make(), *s, last=last
            )


def linear() -> Iterator[Case]:
    for batch, inside, outside in (
        (1, 50, 10),
        (16, 2000, 50),
        (7, 513, 129),
        (16, 1024, 1024),
        (16, 4096, 512),
        (4, 25088, 128),
        (256, 300, 192),
    ):
        yield f"linear {batch}x{inside} to {outside}", lambda b=batch, i=inside, o=outside: passes(nn.Linear(i, o), b, i)
    yield "linear 2x197x192 to 768", lambda: passes(nn.Linear(192, 768), 2, 197, 192)
    yield "linear without bias", lambda: passes(nn.Linear(300, 70, bias=False), 33, 300)
    yield "linear float64", in_double
    yield "batched products", lambda: (torch.bmm(torch.randn(12, 65, 64), torch.randn(12, 64, 65)),)
    yield "attention", lambda: passes(Attention(), 4, 65, 96)


def in_double() -> Iterator[Tensor]:
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
        return self.attention(x, x, x)[0]


def layers() -> Iterator[Case]:
    for layer, *shape in (
        (nn.MaxPool2d(2), 8, 20, 24, 24),
        (nn.MaxPool2d(3, 2, 1), 2, 64, 56, 56),
        (nn.AvgPool2d(3, 2, 1), 4, 33, 28, 28),
        (nn.AdaptiveAvgPool2d(1), 8, 512, 7, 7),
        (nn.BatchNorm2d(64), 8, 64, 28, 28),
        (nn.BatchNorm2d(13), 3, 13, 9, 9),
        (nn.GroupNorm(8, 64), 8, 64, 28, 28),
        (nn.LayerNorm(192), 2, 197, 192),
        (nn.Softmax(-1), 64, 1000),
        (nn.LogSoftmax(-1), 64, 10),
        *((each, 64, 1001) for each in (nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.Sigmoid(), nn.Tanh(), nn.ELU())),
        *((each, 64, 1001) for each in (nn.Softplus(), nn.Mish(), nn.ReLU(), nn.GELU("tanh"))),
        (nn.Upsample(scale_factor=2, mode="bilinear"), 2, 16, 14, 14),
        (nn.Dropout(0.3), 64, 1001),
    ):
        yield f"{layer} {'x'.join(map(str, shape))}", lambda layer=layer, shape=shape: passes(layer, *shape)
    for smoothing in (0.0, 0.1):
        yield f"cross entropy, smoothing {smoothing}", lambda s=smoothing: passes(Loss(s), 64, 10)
    yield (
        "random numbers",
        lambda: (torch.randn(999), torch.rand(999), torch.randperm(999), torch.bernoulli(torch.full((999,), 0.3))),
    )
    yield "sums", lambda: (each(torch.randn(777, 301), 0) for each in (torch.sum, torch.mean, torch.std, torch.norm))
    yield "norm", lambda: (torch.linalg.vector_norm(torch.randn(100_003)),)


class Loss(nn.Module):
    """Cross entropy of labels 0 to 9 in turn."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(x, torch.arange(len(x)) % 10, reduction="none", label_smoothing=self.smoothing)


def optimizers() -> Iterator[Case]:
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0005}),
        (torch.optim.AdamW, {"weight_decay": 0.01}),
        (torch.optim.Adam, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adagrad, {}),
    ):
        for way in ("fused", "foreach", "for loop"):
            if way != "fused" or kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad):
                chosen = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for loop": {"foreach": False}}[way]
                yield f"{kind.__name__}, {way}", lambda k=kind, o=options | chosen: steps(k, o)


def steps(kind: Callable[..., torch.optim.Optimizer], options: dict[str, object]) -> Iterator[Tensor]:
    """Weights after three steps."""
    weights = [nn.Parameter(torch.randn(size)) for size in ((50, 2001), (10,), (20, 20, 5, 5))]
    optimizer = kind(weights, lr=0.01, **options)
    for _ in range(3):
        for each in weights:
            each.grad = torch.randn_like(each)
        optimizer.step()
    yield from weights


KINDS = {each.__name__: each for each in (nets, convolutions, linear, layers, optimizers)}


def main() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if not UNSET and "--mkl" not in sys.argv:
        portable.set_up_worker(portable.PORTABLE)
    chosen = [name for name in sys.argv[1:] if not name.startswith("--")] or list(KINDS)
    for kind in chosen:
        for name, compute in KINDS[kind]():
            torch.manual_seed(0)
            sha256 = hashlib.sha256()
            for tensor in compute():
                sha256.update(tensor.detach().contiguous().numpy().tobytes())
            print(f"{kind}: {name}: {sha256.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
