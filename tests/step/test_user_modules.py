"""A user's own LightningModule, as in Lightning's tutorial: what it may do, how it goes on, and what is refused."""

import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Run, summary_of
from plain import scalars
from user_runs import DDP, go_on, same_bits, train

from lockstep.commands import cli
from lockstep.config.instantiate import instantiate
from lockstep.errors import UserError

SWA = "+callbacks.swa._target_=lightning.pytorch.callbacks.StochasticWeightAveraging"


# --- what a module may do on every layout -----------------------------------------------------------------------------


def test_a_module_without_a_test(project: Path, tmp_path: Path) -> None:
    run = train(project, tmp_path, "NoTest", "max_epochs=1", "callbacks.checkpoint.monitor=null")
    assert (run.summary["status"], list(run.summary["metrics"])) == ("completed", ["train/loss"])


# --- what goes on after a stop ----------------------------------------------------------------------------------------


def train_loss(run: Run) -> list[tuple[int, float]]:
    return scalars(next((run.folder / "tensorboard").iterdir()))["train_loss"]


def test_what_an_epoch_began_with_exists_and_what_it_logs_stands_once(project: Path, tmp_path: Path) -> None:
    killed = ("max_epochs=3", "pieces=1", "num_workers=1", "checkpoint_every=5")  # in step 7, of four an epoch
    task = (*killed, "logger=tensorboard", "log_every=1")
    whole = train(project, tmp_path / "whole", "Curriculum", *task)
    cut = train(project, tmp_path / "cut", "Curriculum", *task, cut="SIGKILL", ok=False)
    assert cut.returncode == 1, str(cut)
    assert [step for step, _ in train_loss(cut)] == list(range(1, 7))
    assert same_bits(go_on(project, cut), whole)
    assert [step for step, _ in train_loss(cut)] == list(range(1, 13))
    assert train_loss(cut) == train_loss(whole)


def test_a_network_that_is_made_late_goes_on(project: Path, tmp_path: Path) -> None:
    whole = train(project, tmp_path / "whole", "Lazy", "max_epochs=3")
    cut = train(project, tmp_path / "cut", "Lazy", "max_epochs=3", "max_steps=3")
    assert same_bits(go_on(project, cut, "max_steps=null"), whole)


def test_a_run_that_a_callback_ended_has_ended(project: Path, tmp_path: Path) -> None:
    run = train(project, tmp_path, "LitDigits", "+callbacks.stopping._target_=mine.Stopping", "max_epochs=9")
    before = run.summary
    assert before["steps"] == 8, "of two epochs, since nothing is better than the first by 10"
    again = go_on(project, run).summary
    assert (again["steps"], again["weights_sha256"]) == (8, before["weights_sha256"])
    assert go_on(project, run, "max_epochs=10").summary["steps"] == 12  # asked for, until the next check


# --- what is refused, and what is said --------------------------------------------------------------------------------


def test_a_piece_of_one_sample_is_refused_where_batch_norm_gets_one_value_of_it(project: Path, tmp_path: Path) -> None:
    """Before the first step; at its own step where the module's forward can't be tried. 81 samples in steps of 24 leave
    9, of which 6 pieces get one or two, and 4 pieces two or three."""
    advice = "last step has 9 of 81 samples, so a piece has one sample.*use batch_size=30 or pieces=4$"
    task = ("max_epochs=1", "pieces=6,4", "-m")
    folders = Run(1, "", "", train(project, tmp_path, "WideNorms,mine.Norms", *task, ok=False).outputs).jobs
    wide, refused, _, fits = (summary_of(folder) for folder in folders)
    assert [each.get("steps", 0) for each in (wide, refused, fits)] == [4, 0, 4]
    assert re.search(advice, refused["error"])
    run = train(project, tmp_path / "at its step", "Norms", "+model.hides=true", *DDP, ok=False)
    assert run.returncode == 2
    assert re.search(advice, run.stderr.strip())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("LitDigits", ("optimizer=adamw",), "optimizer has no effect, since mine.LitDigits takes no optimizer"),
        ("LitDigits", ("scheduler=cosine",), "scheduler has no effect, since mine.LitDigits takes no scheduler"),
        ("LitDigits", (SWA, "+callbacks.swa.swa_lrs=0.1"), "callbacks.swa: StochasticWeightAveraging takes over the"),
        ("CustomData", (), "mine.CustomData: its train_dataloader would not be called"),
        (
            "CustomOptimizer",
            ("precision=32-true", "scheduler=cosine"),
            "since the configure_optimizers of mine.CustomOptimizer does not use self.scheduler:",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(
    project: Path, tmp_path: Path, name: str, options: tuple[str, ...], message: str
) -> None:
    run = train(project, tmp_path, name, *options, ok=False)
    assert run.returncode == 2, str(run)
    assert message in run.stderr
    assert [path for folder in run.folders for path in folder.rglob("*.ckpt")] == []


def test_an_optimizer_that_a_method_of_the_classifier_makes_is_not_ignored(project: Path, tmp_path: Path) -> None:
    train(project, tmp_path, "Helped", "precision=32-true", "max_steps=1", "optimizer.weight_decay=0.3")


def test_the_rank_that_failed_is_named_where_others_lose_it(project: Path, tmp_path: Path) -> None:
    run = train(project, tmp_path, "OneFails", *DDP, ok=False)
    assert run.returncode == 1, str(run)
    assert run.summary["status"] == "failed"
    assert "rank 1 failed: ValueError: the file that is broken" in run.summary["error"]


@pytest.mark.parametrize(
    ("program", "target", "error", "message"),
    [
        ("import nowhere.at_all", "own.Net", UserError, "own.Net: own imports nowhere, which is not installed"),
        ("import torch; torch.nowhere", "own.Net", AttributeError, ".*'torch' has no attribute 'nowhere'"),
        ("", "own.Net", UserError, "own.Net: own has no Net"),
        ("", "own.nets.Net", UserError, "own.nets.Net: there is no module own.nets"),
        ("", "src.own.Net", UserError, "no module src, neither in src/ nor installed: leave out `src.`, as src/ is"),
        ('def net():\n    {}["label"]', "own.net", KeyError, r"KeyError: 'label' \(\S+own\.py:2 in net; "),
        ("def net():\n    assert 1 > 2", "own.net", AssertionError, r"AssertionError \(\S+own\.py:2 in net; "),
        ("def net():\n    if True", "own.net", SyntaxError, r"SyntaxError: expected ':' \(own\.py, line 2\) \("),
    ],
)
def test_what_is_missing_or_mistaken_in_a_users_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, target: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own.py").write_text(program + "\n")
    others = [each for each in sys.path if each and Path(each) != ROOT]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "src"), *others])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises(error) as caught:
        instantiate("model", {"_target_": target})
    assert re.search(message, str(caught.value) if error is UserError else cli.error_line(caught.value))


def test_a_mistaken_option_of_a_nested_target_is_refused() -> None:
    net = {"_target_": "torchvision.models.shufflenet_v2_x0_5", "weights": "DEFULT"}
    with pytest.raises(UserError, match=r"^model\.net: shufflenet_v2_x0_5\(weights=DEFULT\): KeyError: 'DEFULT'$"):
        instantiate("model", {"_target_": "lockstep.vision.models.ImageClassifier", "net": net})
