"""What a machine has."""

import os
import re
from fnmatch import fnmatch

import pytest

from lockstep.launch import machine


@pytest.mark.parametrize(
    ("file", "count"),
    [("/dev/nvidia0", 2), ("/dev/dxg", 2), ("/dev/kfd", 2), ("/dev/nvhost-gpu", 2), ("/dev/nvidiactl", 0), ("", 0)],
)
def test_gpus_are_counted_where_a_driver_has_its_device_file(
    file: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: [file] if fnmatch(file, pattern) else [])
    monkeypatch.setattr(machine, "_call_in_child", lambda function: 2)
    assert machine.gpu_count() == count


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("capabilities", "computes"), [([(8, 0), (9, 0)], True), ([(9, 0), (7, 5)], False)])
def test_gpus_are_checked_in_another_process(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], computes: bool
) -> None:
    """A parent that has touched CUDA can't fork its workers."""
    import torch

    calls = []

    def capability(device: int) -> tuple[int, int]:
        calls.append(device)
        return capabilities[device]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    machine._gpus_compute_bf16.cache_clear()
    assert machine.computes_bf16("gpu") is computes
    assert calls == []
    machine._gpus_compute_bf16.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # a notebook's: its workers are spawned
    assert machine.computes_bf16("gpu") is computes
    assert calls == [0, 1]
    machine._gpus_compute_bf16.cache_clear()


@pytest.mark.parametrize(
    ("file", "variables", "message"),
    [
        ("", {}, "no driver has made one of /dev/nvidia[0-9]*, /dev/dxg, /dev/kfd, .* (NVIDIA, WSL, ROCm, Jetson)"),
        ("/dev/kfd", {}, "there is /dev/kfd, but torch [0-9.]+.* finds no device (its build or the driver do not fit)"),
        ("/dev/nvidia0", {"CUDA_VISIBLE_DEVICES": ""}, ".* finds no device (CUDA_VISIBLE_DEVICES=)"),
        ("/dev/kfd", {"HIP_VISIBLE_DEVICES": "7"}, ".* finds no device (HIP_VISIBLE_DEVICES=7)"),
    ],
)
def test_how_gpus_were_looked_for_is_reported(
    file: str, variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in machine.GPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: [file] if fnmatch(file, pattern) else [])
    pattern = message.replace("(", r"\(").replace(")", r"\)").replace("[0-9]*", r"\[0-9\]\*")
    assert re.fullmatch(pattern, machine.no_gpu_reason())


@pytest.mark.usefixtures("processes")
def test_who_launches_never_touches_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML's help (MIG) torch touches it to count, and a process that has done so can't be forked."""
    import torch

    parent = os.getpid()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(machine.glob, "glob", lambda _: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3 if os.getpid() != parent else pytest.fail("touched"))
    assert machine.gpu_count() == 3
    machine.hide_gpu(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    machine.hide_gpu(0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"
