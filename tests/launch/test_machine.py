"""What a machine has."""

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
