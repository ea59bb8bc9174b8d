"""User code that computes in parallel while the parent opens data: the workers are forked all the same, and compute."""

from pathlib import Path

import numpy as np
import pytest
from conftest import Program, template
from PIL import Image

from lockstep.launch.process_lifetime import in_new_thread

OPENER = """
import torch
from project.data import digits

torch.rand(100_000).mul(2)  # a parallel operation, when it is imported

def opened():
    torch.set_num_threads(4)
    torch.rand(100_000).mul(2)  # and when it is called
    return digits()
"""


@pytest.mark.usefixtures("processes")
def test_a_data_set_that_computes_in_parallel_hangs_no_run(tmp_path: Path) -> None:
    """Each program would be silent for `hang_timeout` otherwise."""
    project, outputs = template(tmp_path / "project"), tmp_path / "outputs"
    (project / "src" / "project" / "mine.py").write_text(OPENER)
    (project / "conf" / "data" / "mine.yaml").write_text("name: mine\n_target_: project.mine.opened\n")
    threads = ("threads=2", "hang_timeout=10")
    train, evaluate, predict = (
        Program(outputs, f"src/{name}.py", project) for name in ("train", "evaluate", "predict")
    )
    run = train("data=mine", "max_steps=2", "logger=none", *threads)
    assert run.summary["steps"] == 2
    checkpoint = f"checkpoint={run.folder}"
    actual = evaluate(checkpoint, threads[0], "+" + threads[1])
    assert "count 359" in actual.stderr
    with (project / "src" / "project" / "data" / "__init__.py").open("a") as file:
        file.write("\nimport torch\n\ntorch.rand(100_000).mul(2)\n")
    Image.fromarray(np.zeros((28, 28), dtype=np.uint8)).save(tmp_path / "image.png")
    images = f"images={tmp_path / 'image.png'}"
    predict(checkpoint, images, threads[0], "+" + threads[1])
    assert len(list(outputs.glob("predict/*/predictions.csv"))) == 1


def test_what_user_code_raises_is_raised_here() -> None:
    for raised in (SystemExit(3), ValueError("no")):

        @in_new_thread
        def opener(error: BaseException = raised) -> None:
            raise error

        with pytest.raises(type(raised)) as error:
            opener()
        assert error.value is raised
