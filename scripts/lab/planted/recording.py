"""Record planted programs in forks of this process: it has imported the libraries, so a run takes little time."""

import os
import runpy
import shutil
import socket
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # an optimizer imports it in its first step
import torch.distributed
import torch.nn.parallel
import torch.optim.lr_scheduler
import torch.utils.data.distributed

from lockstep import trace
from lockstep.programs.sameness.recorded import Run, read_processes
from lockstep.programs.sameness.running import flip_of
from lockstep.programs.sameness.sides import compared
from lockstep.programs.sameness.verdict import Verdict

HERE = Path(__file__).parent
STEPS = 8


def verdict_of(program: str, first: str, second: str, again: bool = True) -> Verdict:
    """Return the verdict on two sides, as `lockstep same` gives it.

    Args:
        program: a file of this folder.
        first, second: the arguments, with `ranks=2` first for two processes.
        again: whether each side is run twice.
    """
    return compared(Planted(first, program), Planted(second, program), again)[0]


@dataclass
class Planted:
    """A program with its arguments: a side of `compared`."""

    name: str  # the arguments
    program: str

    def run(self, kind: str) -> Run:
        return record(self.program, self.name, flip_of(kind))


def record(program: str, line: str, flip: int = 0) -> Run:
    """Run a program in forks, one for each rank, and return what it did."""
    words = line.split()
    world = int(words.pop(0).partition("=")[2]) if line.startswith("ranks=") else 1
    folder = Path(tempfile.mkdtemp(prefix="planted_"))
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        ranks = [_start(program, words, folder, rank, world, port, flip) for rank in range(world)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        if any(codes):
            raise RuntimeError(f"{program} {line}: {folder.joinpath('error').read_text()}")
        return Run.of(read_processes(folder))
    finally:
        shutil.rmtree(folder)


def _start(program: str, words: list[str], folder: Path, rank: int, world: int, port: int, flip: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.environ.update(LOCKSTEP_TRACE=str(folder), LOCKSTEP_TRACE_STEPS=str(STEPS), LOCKSTEP_TRACE_FLIP=str(flip))
        if world > 1:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
            os.environ.update({name: str(value) for name, value in ranks.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="planted")
        sys.argv[:] = [program, *words]
        sys.path.insert(0, str(HERE))
        trace.attach()
        runpy.run_path(str(HERE / f"{program}.py"), run_name="__main__")
        code = 0
    except BaseException:
        (folder / "error").write_text(traceback.format_exc())
    finally:
        os._exit(code)
