"""What an owner of `src/train.py` may change: the run resumes as it went, and what can't be right is refused."""

from pathlib import Path

import pytest
from conftest import ROOT, TINY, Program, Run

pytestmark = pytest.mark.usefixtures("processes")

SHORT = (*TINY, "callbacks.console=null", "callbacks.pictures=null", "logger=none", "exact=true", "max_epochs=4")
PROGRAM = """
import os, signal
from lockstep import Job, command

def {name}(job: Job):
{body}

if __name__ == "__main__":
    command({name}, {file!r})
"""
MODULE = """
    module = job.make_module()
    data = job.make_data()
    trainer = job.make_trainer(module)
"""
FIT = "\n    trainer.fit(module, datamodule=data, ckpt_path=job.checkpoint)\n"
FREEZE = """
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=data, ckpt_path=job.checkpoint)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith("net.0."))
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=data)
"""
KILL = """
    import lightning.pytorch as pl
    class Kill(pl.Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 19 and job.checkpoint is None:
                os.kill(os.getpid(), signal.SIGKILL)
    trainer.callbacks.append(Kill())
"""


def program(folder: Path, body: str, name: str = "train") -> Program:
    script = folder / f"{name}_{len(list(folder.glob('*.py')))}.py"
    script.write_text(PROGRAM.format(name=name, body=body, file=str(ROOT / "src" / f"{name}.py")))
    return Program(script.with_suffix(""), str(script))


def error(run: Run) -> str:
    assert run.returncode == 2, str(run)
    assert "Traceback" not in run.stderr
    return run.stderr.splitlines()[-1]


def test_a_freeze_between_two_fits_goes_on_after_a_kill(tmp_path: Path) -> None:
    """The kill comes in the second fit, and the run continues on another layout: with its bits, in one fit only."""
    options = (*SHORT, "pieces=2", "checkpoint_every=3")
    whole = program(tmp_path, MODULE + FREEZE)(*options)
    once = program(tmp_path, MODULE + FIT)(*options)
    assert whole.summary["steps"] == once.summary["steps"]
    assert whole.summary["weights_sha256"] != once.summary["weights_sha256"], "the control: it freezes a layer"

    interrupted = program(tmp_path, MODULE + KILL + FREEZE)
    process = interrupted.start(*options)
    folder = interrupted.wait_for_checkpoint(process)
    assert "was killed by SIGKILL" in interrupted.finish(process).stderr
    resumed = interrupted(f"resume={folder}", "strategy=ddp", "devices=2")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (MODULE, "train(job) has ended without trainer.fit: it must call it once at least"),
        (
            "    job.make_module()\n    job.make_module()",
            "train(job) calls job.make_module() twice: a run has one module",
        ),
        ("    import lightning.pytorch as pl\n    job.make_trainer(pl.LightningModule())", "gets another module"),
        (MODULE + "    job.make_trainer(module)", "job.make_trainer is called twice: a run has one trainer"),
    ],
)
def test_what_has_no_result_is_refused(tmp_path: Path, body: str, message: str) -> None:
    assert message in error(program(tmp_path, body)(*SHORT, ok=False))


def test_a_run_that_would_begin_anew_is_refused(tmp_path: Path) -> None:
    """Without the checkpoint, `resume=` would train from new weights."""
    forgets = program(tmp_path, MODULE + FIT.replace(", ckpt_path=job.checkpoint", ""))
    first = forgets(*SHORT, "max_epochs=1")
    before = (first.folder / "checkpoints" / "last.ckpt").read_bytes()
    refused = forgets(f"resume={first.folder}", "max_epochs=2", ok=False)
    assert "pass ckpt_path=job.checkpoint" in error(refused)
    assert (first.folder / "checkpoints" / "last.ckpt").read_bytes() == before
    assert first.summary["status"] == "completed"


def test_other_weights_than_the_checkpoint_s_are_not_tested(tmp_path: Path) -> None:
    trained = Program(tmp_path / "trained")(*SHORT, "max_epochs=1")
    forgets = program(tmp_path, MODULE + "    trainer.test(module, datamodule=data)\n", "evaluate")
    assert "pass ckpt_path=job.checkpoint" in error(forgets(f"checkpoint={trained.folder}", ok=False))
    fits = program(tmp_path, MODULE + FIT, "evaluate")
    assert "evaluate(job) calls trainer.fit: only train.py trains" in error(
        fits(f"checkpoint={trained.folder}", ok=False)
    )


def test_an_error_of_the_owner_is_a_failed_run(tmp_path: Path) -> None:
    failed = program(tmp_path, MODULE + FIT + "    raise RuntimeError('after the fit')\n")(*SHORT, ok=False)
    assert failed.returncode == 1
    assert failed.summary["status"] == "failed"
    assert "RuntimeError: after the fit (" in failed.summary["error"]
    assert failed.summary["weights_sha256"] is not None
