"""`lockstep.launch`: a function in several worker processes."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import TIMEOUT, free_port, python
from lightning.pytorch.strategies import DDPStrategy
from small_data import refusal_of
from trainer.small import trainer

import lockstep
from lockstep.errors import UserError, WorkerFailed
from lockstep.launch.environment import environment

pytestmark = pytest.mark.usefixtures("processes")
IN_TIME = DDPStrategy(timeout=timedelta(seconds=9))


def place(*args: Any) -> tuple[int, int, tuple[Any, ...]]:
    return environment().rank, environment().world_size, args


def test_rank_zeros_result_is_returned() -> None:
    assert lockstep.launch(place, "a", 2, devices=3) == (0, 3, ("a", 2))
    assert lockstep.launch(place) == (0, 1, ())
    assert lockstep.launch(lambda: sum(lockstep.gather_objects(environment().rank)), devices=3) == 3


def test_bad_input_is_refused_in_one_line() -> None:
    def refuses() -> None:
        raise UserError("this is wrong: that is right")

    def nested() -> None:
        lockstep.launch(place)

    for line, function, options in (
        ("this is wrong: that is right", refuses, {"devices": 2}),
        ("lockstep.launch was called in a worker", nested, {}),
        ("launch(devices=0): must be a whole number above 0", place, {"devices": 0}),
        ("devices=1000: must be at most", place, {"devices": 1000}),
        ("launch(accelerator='tpu'): must be auto, cpu or gpu", place, {"accelerator": "tpu"}),
        ("devices=3: lockstep has started 2 workers on 1 machine", lambda: trainer(Path(), devices=3), {"devices": 2}),
        ("has 2 devices: use strategy='auto'", lambda: trainer(Path(), strategy="single_device"), {"devices": 2}),
        ("with timeout=0:00:09) came after the", lambda: trainer(Path(), strategy=IN_TIME), {"devices": 2}),
        ("strategy=dp runs in one process", lambda: trainer(Path(), strategy="dp"), {"devices": 2}),
    ):
        assert line in refusal_of(lockstep.launch, function, **options)


def test_a_program_that_is_refused_prints_one_line() -> None:
    """With HYDRA_FULL_ERROR=1 it prints what Python prints."""
    code = "import os; os.environ['HYDRA_FULL_ERROR'] = '{}'; import lockstep; lockstep.Trainer(devices=0)"
    plain, full = (python(code.format(value)) for value in "01")
    assert (plain.returncode, plain.stderr) == (
        1,
        "error: Trainer(devices=0): must be greater than or equal to 1 or 'auto'\n",
    )
    assert "Traceback" in full.stderr


def test_a_workers_error_names_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        if environment().rank == 1:
            raise KeyError("lost")

    with pytest.raises(WorkerFailed, match=r"^rank 1 failed: KeyError: 'lost' \(.*test_launch.py:\d+ in fails; trace"):
        lockstep.launch(fails, devices=2)
    assert "Traceback" in capfd.readouterr().err


ALONE = """
import sys, time
from datetime import timedelta
import torch, lockstep
from lightning.pytorch.strategies import DDPStrategy
lockstep.Trainer(strategy=DDPStrategy(timeout=timedelta(seconds=2)), accelerator="cpu", logger=False)
if torch.distributed.get_rank():
    time.sleep(300)
begun = time.monotonic()
try:
    torch.distributed.barrier()
except RuntimeError:
    print(time.monotonic() - begun < 60)
"""


def test_a_group_has_the_timeout_of_a_strategys_object() -> None:
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ""}
    places = [{**os.environ, **meet, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    ranks = [subprocess.Popen([sys.executable, "-c", ALONE], env=each, stdout=subprocess.PIPE) for each in places]
    output = ranks[0].communicate(timeout=TIMEOUT)[0]
    ranks[1].kill()
    ranks[1].communicate()
    assert output == b"True\n"


ASKS = """
import sys, torch, lockstep
assert "hydra" not in sys.modules
lockstep.Trainer, lockstep.DataModule
assert "hydra" not in sys.modules and "omegaconf" not in sys.modules, "the step needs no Hydra"
if sys.argv[1] == "computed":
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp()
print(lockstep.launch(lambda: (torch.ones(1 << 20).exp().mean() > 2).item(), devices=1))
"""


@pytest.mark.parametrize("before", ["computed", "nothing"])
def test_the_program_may_have_computed_before(before: str) -> None:
    """A fork can't use the threads with which its parent has computed: it would wait for them forever."""
    run = python(ASKS, before)
    assert run.stdout == "True\n", run.stderr
