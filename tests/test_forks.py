"""A program that is a fork of the server prints and ends as one that Python starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest

PROGRAMS = {
    "it ends": "print('words', end='')",
    "a code": "raise SystemExit(3)",
    "a large code": "raise SystemExit(259)",
    "a text": "raise SystemExit('words')",
    "an exit without a code": "import sys; sys.exit()",
    "an error": "1 / 0",
    "Ctrl-C": "raise KeyboardInterrupt",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "a thread goes on": "import threading; threading.Timer(0.3, print, ['late']).start()",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first')",
    "arguments": "import sys; print(__name__, sys.argv, sys.path[0])",
    "its own Lockstep": "import lockstep; print(lockstep.__file__, lockstep.mine)",
}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_ends_as_python_would(name: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAMS[name])
    if "Lockstep" in name:
        (tmp_path / "lockstep").mkdir()
        (tmp_path / "lockstep" / "__init__.py").write_text("mine = 1\n")
    process = forks.Fork([str(script), "a", "b=c"], tmp_path, dict(os.environ))
    output, errors = process.communicate()
    python = subprocess.run(
        [sys.executable, script, "a", "b=c"], check=False, cwd=tmp_path, capture_output=True, text=True
    )
    assert (process.returncode, output) == (python.returncode, python.stdout)
    assert errors.splitlines()[-1:] == python.stderr.splitlines()[-1:]


@pytest.mark.usefixtures("processes")
def test_the_end_of_each_of_many_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))")

    def start(seconds: float, code: int) -> forks.Fork:
        return forks.Fork([str(script), str(seconds), str(code)], tmp_path, dict(os.environ))

    long, processes = start(600, 0), [start(code % 3 / 20, code) for code in range(20)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [*range(20)]
    assert long.poll() is None
    long.kill()
    long.communicate(timeout=60)
    assert long.returncode == -signal.SIGKILL
