"""The loop that people write by hand: images in memory as floats, a permutation, forward, backward, step.

    python scripts/lab/bench/opponents/bare_loop.py --task task.pt [--levers] [--precision bf16] [--device cuda]
    python scripts/lab/bench/opponents/bare_loop.py --memory small_cnn <batch size> <steps> <images>

The loop is as fast as possible: no metrics, no logger, no validation, one line every 50 steps. `--levers` adds all that
Lockstep's default path uses: the process does not return freed memory (mallopt), channels_last, index_select. On a GPU
these are channels_last, images, labels and order on the device, a fused optimizer and cuDNN's choice by timing. The
task is a file of benchmark.py with images, labels, order of samples and initial weights. With `--memory` the loop uses
as little memory as possible: grey images of 28 x 28 as bytes, of which it converts one batch at a time to floats.
"""

import argparse
import ctypes
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from turns import Turns


def small_cnn(channels: int, size: int, classes: int) -> nn.Module:
    side = (size - 8) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 20, 5), nn.ReLU(inplace=True), nn.Conv2d(20, 20, 5), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(20 * side * side, 50), nn.ReLU(inplace=True), nn.Linear(50, classes),
    )  # fmt: skip


def resnet18(channels: int, size: int, classes: int) -> nn.Module:
    from torchvision.models import resnet18

    net = resnet18(num_classes=classes)
    net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


def linear(channels: int, size: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))


NETWORKS = {"small_cnn": small_cnn, "resnet18": resnet18, "linear": linear}


def sgd(net: nn.Module, lr: float, fused: bool | None = None) -> torch.optim.Optimizer:
    decays = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decays, "weight_decay": 5e-4}, {"params": others}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True, fused=fused)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task")
    parser.add_argument("--memory", nargs=4)
    parser.add_argument("--levers", action="store_true")
    parser.add_argument("--precision", choices=["32", "bf16"], default="32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", help="a mode of torch.compile")
    parser.add_argument("--pieces", type=int, default=1, help="number of micro-batches of a step")
    options = parser.parse_args()
    if options.memory:
        sparing(options.memory[0], *map(int, options.memory[1:]))
    else:
        fast(options)


def fast(options: argparse.Namespace) -> None:
    """Train until the benchmark closes the connection, or the order of samples ends."""
    torch.set_num_threads(1)
    if options.levers:
        libc = ctypes.CDLL("libc.so.6")
        assert libc.mallopt(-4, 0)  # M_MMAP_MAX
        assert libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    device, resident = torch.device(options.device), options.levers and options.device != "cpu"
    task: dict[str, Any] = torch.load(options.task)
    images, labels, order = task["images"], task["labels"], task["order"]
    if resident:
        images, labels, order = images.to(device), labels.to(device), [index.to(device) for index in order]
        torch.backends.cudnn.benchmark = True
    net = NETWORKS[task["model"]](images.shape[1], images.shape[2], task["classes"]).to(device)
    for parameter, initial in zip(net.parameters(), task["weights"], strict=True):
        parameter.data.copy_(initial)
    if options.levers:
        net.to(memory_format=torch.channels_last)
    optimizer = sgd(net, task["lr"], fused=resident or None)
    autocast = nullcontext() if options.precision == "32" else torch.autocast(device.type, torch.bfloat16)
    if options.compile:
        net.compile(mode=options.compile, dynamic=False)
    turns = Turns()
    turns.begin()
    for step, index in enumerate(order):
        x = images.index_select(0, index) if options.levers else images[index]
        x, y = x.to(device), labels[index].to(device)
        optimizer.zero_grad()
        for part, target in zip(x.chunk(options.pieces), y.chunk(options.pieces), strict=True):
            with autocast:
                loss = cross_entropy(net(part), target)
            (loss if options.pieces == 1 else loss * (len(part) / len(x))).backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        turns.step(net.parameters())


def sparing(model: str, batch_size: int, steps: int, samples: int) -> None:
    """Train with as little memory as possible."""
    images = torch.randint(256, (samples, 1, 28, 28), dtype=torch.uint8)
    labels = torch.arange(samples) % 10
    net = NETWORKS[model](1, 28, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for index in torch.randperm(samples).split(batch_size)[:steps]:
        optimizer.zero_grad()
        cross_entropy(net(images[index].float() / 255), labels[index]).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
