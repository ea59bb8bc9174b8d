"""Devices of a process and their random generators, as a GPU's would be."""

from types import SimpleNamespace

import pytest
import torch

from lockstep.step.strategy import generators, torch_devices


def test_a_process_of_several_gpus_has_each_of_them() -> None:
    layout = SimpleNamespace(accelerator="gpu", devices=2)
    assert torch_devices(layout) == [torch.device("cuda", 0), torch.device("cuda", 1)]  # type: ignore[arg-type]


def test_a_piece_on_a_gpu_draws_from_the_host_and_from_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpus = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", of_gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert generators(torch.device("cuda", 0)) == [torch.default_generator, of_gpus[0]]
    assert generators(torch.device("cuda")) == [torch.default_generator, of_gpus[1]]
    assert generators(torch.device("cpu")) == [torch.default_generator]
