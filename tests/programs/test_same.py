"""`lockstep same` tells trainings apart: planted mistakes get their names, right pairs pass, bad input ends in a line.

scripts/lab/same_table.py has the whole table, with accelerate and Hugging Face's Trainer.
"""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT, ended, forked, wait_for
from planted.rows import LIGHTNING, ROWS, TORCH, Row

pytestmark = pytest.mark.usefixtures("processes")

PYTHON = sys.executable
LOOP = ROOT / "scripts" / "lab" / "planted" / "torch_loop.py"
CHOSEN = (  # of the table: those that no other row shows
    *("same", "accumulation", "world size", "short last step", "buffers", "noise", "order of samples", "samples lost"),
    *("samples repeated", "schedule", "clipping", "weight decay", "evaluation mode", "nondeterminism"),
    *("inputs", "gradients not averaged"),
)

# What comes after backward() and hides a factor of the gradient.
HIDDEN = ("--clip=0.01", "ranks=2 --clip=0.01", "--normalize", "--optimizer=sign", "--optimizer=adamw")


def chosen() -> Iterator[Row]:
    for kind in CHOSEN:
        yield [row for row in ROWS if row.program == TORCH and row.kind == kind][-1]
    yield from (
        row
        for row in ROWS
        if row.program == TORCH and row.second.startswith((*HIDDEN, "--net=sharp", "--bug=late-noise"))
    )
    for kind in ("same", "BatchNorm", "frozen", "short last step"):
        yield next(row for row in ROWS if row.program == LIGHTNING and row.kind == kind)


@pytest.mark.parametrize("row", dict.fromkeys(chosen()), ids=str)  # some are chosen twice
def test_a_planted_cause_gets_its_name(row: Row) -> None:
    from planted.recording import verdict_of

    verdict = verdict_of(
        row.program,
        row.first,
        row.second,
        again=row.kind == "nondeterminism" or "sharp" in row.first or "late" in row.second,
    )
    if row.kind == "same":
        assert verdict.code == 0, verdict.text
        assert verdict.line.startswith("same")
        assert ("hides what else differs" in verdict.text) == ("sharp" in row.first)
    else:
        assert verdict.code == 1, verdict.text
        assert row.kind in [cause.kind for cause in verdict.causes], verdict.text


def test_two_programs_and_their_traces(tmp_path: Path) -> None:
    """Real commands, from beginning to end: the verdict, the page, the traces, what the recorder changes."""
    good, bad = f"{PYTHON} {LOOP}", f"{PYTHON} {LOOP} --accumulate=2 --bug=accumulation"
    page = tmp_path / "same.html"
    run = forked("lockstep same", good, bad, "--steps", "3", "--once", "--report", str(page))
    assert run.returncode == 1, run
    assert "different from step 1: gradients of 0.weight and 3 more are 2.000 times as large" in run.stdout
    assert "cause: the loss of the second is not divided by its 2 accumulated micro-batches" in run.stdout
    assert "change: loss = loss / 2 before backward()" in run.stdout
    assert "<script" not in page.read_text()
    assert "2.000 times as large" in page.read_text()

    traces = [tmp_path / "before.trace", tmp_path / "after.trace"]
    for path in traces:
        run = forked("lockstep trace", "-o", str(path), "--once", "--steps", "3", "--", PYTHON, str(LOOP))
        assert run.returncode == 0, run
        assert f"{path}: 3 steps of 1 rank" in run.stdout
    run = forked("lockstep same", *map(str, traces), "--json")
    assert run.returncode == 0, run
    assert json.loads(run.stdout)["line"] == "same bits over 3 steps"

    damaged = tmp_path / "damaged.trace"
    whole = traces[0].read_bytes()
    for content in (b"no gzip", gzip.compress(b"[1]"), gzip.compress(b'{"lockstep trace": 1}'), whole[:99]):
        damaged.write_bytes(content)
        run = forked("lockstep same", str(damaged), str(traces[0]))
        assert (run.returncode, len(run.stderr.splitlines())) == (2, 2), run
        assert "not a trace" in run.stderr


PROGRAMS = {
    "raise ValueError('wrong path')": "it failed before its first optimizer step (exit 1)",
    "import time; time.sleep(600)": "it took no optimizer step in time",
    "print('x' * 50_000_000)": "it took no optimizer step",
}
STEP = """
import sys, torch, time
torch.manual_seed(0)
net = torch.nn.Linear(2, 2)
optimizers = [torch.optim.SGD(net.parameters(), 0.1) for _ in range(2)]
for step in range(3):
    net(torch.ones(4, 2)).sum().backward()
    optimizers[step % 2].step()
    if step == 1 and sys.argv[1:] == ["hangs"]: time.sleep(600)
    if step == 1 and sys.argv[1:] == ["fails"]: raise RuntimeError("no more")
"""


@pytest.mark.parametrize("code", PROGRAMS)
def test_bad_input_ends_in_a_line(code: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(code)
    seconds = "3" if "sleep" in code else "600"
    run = forked("lockstep trace", "-o", str(tmp_path / "x.trace"), "--timeout", seconds, "--", PYTHON, str(path))
    assert run.returncode == 2, run
    assert len(run.stderr.splitlines()) == 1, run
    assert PROGRAMS[code] in run.stderr


def test_a_folder_beside_a_command(tmp_path: Path) -> None:
    run = forked("lockstep same", str(tmp_path), f"{PYTHON} {LOOP} {'x' * 300}")
    assert run.returncode == 2, run
    assert (
        run.stderr == f"error: {tmp_path}: a run's folder is compared with another one only: give two folders, or "
        "two commands\n"
    )


@pytest.mark.nightly
def test_a_program_that_ends_early_or_hangs(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    looks = "import importlib.metadata as m, importlib.util as u; m.version('torch'); u.find_spec('torch')"
    path.write_text(looks + STEP)
    short = f"{PYTHON} {path}"
    run = forked("lockstep trace", "-o", str(tmp_path / "x.trace"), "--once", "--", *short.split())
    assert run.returncode == 0, run
    assert "3 steps of 1 rank" in run.stdout
    ends = (("hangs", "it hangs after 2 optimizer steps"), ("fails", "it failed after 2 optimizer steps"))
    for word, message in ends:
        run = forked("lockstep trace", "-o", str(tmp_path / "y.trace"), "--timeout", "60", "--", *short.split(), word)
        assert run.returncode == 2, run
        assert message in run.stderr, run


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_programs_end_with_ours(tmp_path: Path, signum: signal.Signals) -> None:
    """Also those in sessions of their own, when ours is killed. A signal that can be handled leaves no file."""
    path = tmp_path / "program.py"
    note = tmp_path / "pid"
    path.write_text(
        f"import os, time, pathlib; os.setsid(); pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    command = f"{PYTHON} {path} & wait"
    variables = {"PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)}
    ours = subprocess.Popen(
        [PYTHON, "-m", "lockstep", "same", command, command],
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        traced = wait_for(lambda: note.is_file() and int(note.read_text() or 0), ours)
        ours.send_signal(signum)
        last = ours.communicate(timeout=TIMEOUT)[1].splitlines()[-1:]
        deadline = time.monotonic() + TIMEOUT
        while not ended(traced) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ended(traced)
        if signum != signal.SIGKILL:
            assert (ours.returncode, last) == (
                130 if signum == signal.SIGINT else 143,
                [f"interrupted by {signum.name}"],
            )
            assert not list(tmp_path.glob("lockstep_same_*"))
    finally:
        with suppress(ProcessLookupError):
            ours.kill()


@pytest.mark.nightly
def test_the_fixture(tmp_path: Path) -> None:
    """It passes two programs that are the same, and shows the verdict on two that are not."""
    path = tmp_path / "test_mine.py"
    good, bad = f"{PYTHON} {LOOP}", f"{PYTHON} {LOOP} --bug=decay"
    path.write_text(
        f"def test_same(same):\n    assert same({good!r}, {good!r}, steps=1).startswith('same bits')\n"
        f"def test_different(same):\n    same({good!r}, {bad!r}, steps=1)\n"
    )
    options = ("-q", "-p", "no:randomly", "-c", os.devnull)
    done = subprocess.run(
        [PYTHON, "-m", "pytest", *options, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "cause: weight_decay of 0.bias, 2.bias is 0.01, not 0" in done.stdout


@pytest.mark.nightly
def test_processes_without_ranks(tmp_path: Path) -> None:
    """Two processes that train without a group are one rank: the verdict says that only one of them is compared."""
    path = tmp_path / "program.py"
    path.write_text(f"import os\npid = os.fork()\n{STEP}\nif pid: os.waitpid(pid, 0)\n")
    run = forked("lockstep same", f"{PYTHON} {path}", f"{PYTHON} {path}", "--steps", "4")
    assert run.returncode == 0, run
    assert "the first program: 1 more process took steps without a rank of its own" in run.stdout
    assert "the first program has 2 optimizers" in run.stdout
