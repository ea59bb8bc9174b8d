"""A forked program is what a program of its own interpreter would be, only sooner."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Program

TOLD = """
import atexit, json, multiprocessing, os, random, signal, sys, tempfile, threading
told = {
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(),
    "variable": os.environ["SAID"], "temporary": tempfile.gettempdir(), "stdin": sys.stdin.read(),
    "session": os.getsid(0) == os.getpgid(0) == os.getpid(), "threads": threading.active_count(),
    "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
    "method": multiprocessing.get_start_method(allow_none=True), "parent": multiprocessing.parent_process(),
    "files": sorted(os.listdir("/proc/self/fd")), "ours": [m for m in sys.modules if m.startswith("lockstep")],
}
print(json.dumps(told), "torch" in sys.modules, random.random())
atexit.register(print, "left")
sys.exit("no more")
"""


def test_a_program_can_not_tell(tmp_path: Path) -> None:
    script = tmp_path / "told.py"
    script.write_text(TOLD)
    own, *forks = (Program(tmp_path, str(script), fresh=fresh) for fresh in (True, False, False))
    expected, *found = (
        program("a=1", env={"SAID": "ü", "TMPDIR": str(tmp_path)}, cwd=tmp_path, ok=False) for program in (own, *forks)
    )
    line, _, end = expected.stdout.partition("} ")
    assert json.loads(line + "}")["variable"] == "ü"
    assert end.startswith("False")
    assert (expected.returncode, expected.stderr) == (1, "no more\n")
    for run in found:
        assert (run.returncode, run.stderr) == (1, "no more\n")
        assert run.stdout.partition("} ")[0] == line
        assert run.stdout.partition("} ")[2].startswith("True")  # the control: it is another way
        assert run.stdout.endswith("left\n")
    assert found[0].stdout != found[1].stdout  # random numbers are each one's own
