"""A program whose standard streams are closed, full or without a reader ends as any other one."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, python

OTHERS = (
    *("src/train.py --cfg job", "src/evaluate.py --help", "src/predict.py --help"),
    *("lockstep new --help", "lockstep --help"),
    *(f"lockstep {name} --help" for name in ("export", "parity", "fit-memory", "schema", "search")),
)
CLOSED = (">&-", "2>&-", "<&-", "<&- >&- 2>&-", "1>/dev/full 2>/dev/full", "-u >&- 2>&-")
STREAMS = """
import contextlib, os, sys
from lockstep import standard_streams
standard_streams.protect()
file = open(sys.argv[1], "w")
for line in range(3000):
    print("line", line)
    sys.stderr.write("error\\n")
    with contextlib.suppress(OSError):
        os.write(2, b"written by a library")
print("lines of", sys.stdin.read(), flush=True)
sys.stderr.flush()
file.write(str(file.fileno()))
"""


def shell(redirections: str, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command of Python in a shell that redirects its streams. `redirections` may begin with -u."""
    unbuffered, words = redirections.startswith("-u"), " ".join(f"'{word}'" for word in command)
    line = f"'{sys.executable}' {'-u ' * unbuffered}{words} {redirections.removeprefix('-u ')}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("redirections", CLOSED)
def test_closed_streams_lead_nowhere_and_no_file_gets_their_numbers(redirections: str, tmp_path: Path) -> None:
    done = shell(redirections, "-c", STREAMS.replace("'", '"'), tmp_path / "file")
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    assert int((tmp_path / "file").read_text()) > 2


@pytest.mark.usefixtures("processes")
def test_without_protection_a_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Show that the test above can fail."""
    unprotected = STREAMS.replace("standard_streams.protect()", "sys.stdout = sys.stderr")
    shell(">&-", "-c", unprotected, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "1"


@pytest.mark.usefixtures("processes")
def test_a_stream_without_a_reader_is_ignored(tmp_path: Path) -> None:
    done = shell("| head -1; echo ${PIPESTATUS[0]}", "-c", STREAMS.replace("'", '"'), tmp_path / "file")
    assert done.stdout == "line 0\n0\n"
    assert "BrokenPipe" not in done.stderr
    ours, other = socket.socketpair()
    other.close()
    program = [sys.executable, "-c", STREAMS, str(tmp_path / "file")]
    assert subprocess.call(program, stdout=ours.fileno(), stderr=ours.fileno(), stdin=subprocess.DEVNULL) == 0


@pytest.mark.usefixtures("processes")
def test_a_full_disk_as_standard_output_is_named_once(tmp_path: Path) -> None:
    done = shell(">/dev/full", "-c", STREAMS.replace('sys.stderr.write("error\\n")', "0"), tmp_path / "file")
    lines = done.stderr.replace("written by a library", "").splitlines()
    assert (done.returncode, lines) == (0, ["standard output: No space left on device: what is printed there is lost"])


@pytest.mark.usefixtures("processes")
def test_output_to_a_pipe_that_does_not_block_is_complete(tmp_path: Path) -> None:
    """A slow reader, and a pipe that other programs have set to O_NONBLOCK."""
    code = "import sys, os\nfrom lockstep import standard_streams\nstandard_streams.protect()\nprint('x' * 500_000)"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with subprocess.Popen([sys.executable, "-c", code], stdout=writing) as process:
        os.close(writing)
        with open(reading) as output:
            assert len(output.read()) == 500_001
    assert process.returncode == 0


@pytest.mark.usefixtures("processes")
def test_replaced_streams_stay_as_they_are() -> None:
    done = python(
        "import io, sys\nfrom lockstep import standard_streams\nsys.stdout = mine = io.StringIO()\n"
        "standard_streams.protect()\nassert sys.stdout is mine\nprotected = sys.stderr\nstandard_streams.protect()\n"
        "assert sys.stderr is protected\nsys.stderr.write('é\\n')"
    )
    assert (done.returncode, done.stderr) == (0, "é\n")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "program",
    [
        *("src/train.py --help", "lockstep compare --help"),
        *(pytest.param(program, marks=pytest.mark.nightly) for program in OTHERS),  # the list below is checked daily
    ],
)
def test_every_program_is_protected(program: str) -> None:
    """Also while it imports: each is started with all streams closed, and its help is cut by `head`."""
    words = ["-m", *program.split()] if program.startswith("lockstep") else [ROOT / program.split()[0], "--help"]
    assert shell("<&- >&- 2>&-", *words).returncode == 0
    cut = shell("2>&1 | head -c 1; echo ' '${PIPESTATUS[0]}", *words)
    assert cut.stdout.endswith(" 0\n"), cut.stdout


def test_all_programs_are_in_the_list() -> None:
    torchrun = ROOT / "src" / "lockstep" / "programs" / "workers" / "torchrun.py"
    for file in [*ROOT.glob("src/*.py"), *ROOT.glob("scripts/*.py"), torchrun]:
        text = file.read_text()
        if '\nif __name__ == "__main__":' in text:
            first = text.partition('\nif __name__ == "__main__":\n')[2]
            assert re.search(r"^    (command\(|from lockstep import standard_streams)", first), file


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "redirections",
    ["<&- >&- 2>&-", pytest.param("2>&1 | head -1 >/dev/null; exit ${PIPESTATUS[0]}", marks=pytest.mark.nightly)],
)
def test_a_run_without_streams_completes_with_all_its_files(redirections: str, tmp_path: Path) -> None:
    task = ("max_epochs=1", "strategy=ddp", "devices=2", f"outputs={tmp_path}")
    done = shell(redirections, ROOT / "src/train.py", *task)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder,) = (tmp_path / "mnist_cnn_digits").iterdir()
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    assert "completed: " in (folder / "train.log").read_text()
