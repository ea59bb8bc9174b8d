"""The doctor: what it measures, and that each ill it knows is told with its cure."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import namedtuple

import doctor
import pytest
from checkup import link, machine
from conftest import ROOT

Usage = namedtuple("Usage", "total used free")


def test_it_measures_two_workers_and_its_exit_code_counts_problems() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "doctor.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (row,) = re.findall(r"2 workers over gloo: (.*) \(([\d,]+) MB/s\)", done.stdout)
    times = [float(number) for number in re.findall(r"([\d.]+) ms", row[0])]
    assert len(times) == len(link.SIZES)
    assert times[-1] > times[0] > 0
    rate = float(row[1].replace(",", ""))
    assert rate == pytest.approx(link.SIZES[-1] / times[-1] / 1000, rel=0.01)
    for title in ("software", "cores", "memory", "GPUs", "network"):
        assert f"\n{title} " in f"\n{done.stdout}"
    wrong = [line for line in done.stdout.splitlines() if line.startswith("wrong: ")]
    assert done.returncode == (1 if wrong else 0), done.stdout + done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("ill", "check", "said"),
    [
        ("threads", machine.cores, "OMP_NUM_THREADS=4096 on"),
        ("quota", machine.cores, "this container may use 0.25"),
        ("shared", machine.memory, "/dev/shm has 0.06 GiB free"),
        ("rank", machine.network, "RANK=3 is set, though no launcher runs"),
        ("name", machine.network, "can't find its own name"),
        ("version", machine.software, "torch is 1.0, >=2.14 is needed"),
        ("link", link.all_reduce, "two workers can't all-reduce over gloo: "),
        ("slow", link.all_reduce, "gloo moves 17 MB/s between two workers"),
    ],
)
def test_each_ill_is_told_with_its_cure(ill: str, check: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = {wrong for wrong, _ in check()[1]} if ill not in ("link", "slow") else set()  # type: ignore[operator]
    assert not [wrong for wrong in healthy if said in wrong]  # the control
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    match ill:
        case "threads":
            monkeypatch.setenv("OMP_NUM_THREADS", "4096")
        case "quota":
            monkeypatch.setattr(machine, "_cgroup_cores", lambda: 0.25)
        case "shared":
            monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
        case "rank":
            monkeypatch.setenv("RANK", "3")
        case "name":
            monkeypatch.setattr(machine.socket, "getaddrinfo", _no_such_name)
        case "version":
            monkeypatch.setattr(machine.metadata, "version", lambda name: "1.0")
        case "link":
            monkeypatch.setattr(link, "worker_command", lambda *args: [sys.executable, "-c", "raise OSError('cut')"])
        case "slow":
            monkeypatch.setattr(link, "measure", lambda backend: [0.001, 0.001, 0.01, 1.0])
    problems = check()[1]  # type: ignore[operator]
    (cure,) = [cure for wrong, cure in problems if said in wrong]
    assert cure
    assert "\n" not in cure


def _no_such_name(*args: object) -> None:
    raise OSError("no such name")


def test_a_check_that_fails_is_a_problem_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> machine.Found:
        raise RuntimeError("sensor gone")

    monkeypatch.setattr(doctor, "CHECKS", {"first": broken, "second": lambda: (["fine"], [])})
    monkeypatch.setattr(sys, "argv", ["doctor.py"])
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "second       fine" in said
    assert "wrong: first can't be looked at: RuntimeError: sensor gone" in said
    assert "\n1 problem\n" in said
