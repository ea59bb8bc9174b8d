"""A user's own LightningModule, written as in Lightning's tutorial, gets promises 1, 2, 3 and 5 on every layout."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, Program, Run, apart, summary_of
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.arithmetic.layout import Refusal, resolve
from lockstep.arithmetic.order import DataOrder
from lockstep.loading import Splits
from lockstep.run import cli
from lockstep.run.config import check
from lockstep.run.instantiate import instantiate
from lockstep.run.library import compose
from lockstep.run.loggers import make_loggers
from lockstep.run.opening import open_data
from lockstep.run.resume import key

DATA = {"samples": 90, "image_size": 12, "num_classes": 3, "val_fraction": 0.1}
TASK = (
    "model=mine",
    "data=synthetic",
    *(f"data.{name}={value}" for name, value in DATA.items()),
    "accelerator=cpu",
    "batch_size=24",  # 81 samples: four steps an epoch, the last of 9, which 6 pieces share unevenly
    "pieces=6",
    "max_epochs=2",
    "precision=64-true",
    "logger=none",
    "callbacks.console=null",
    "callbacks.dashboard=null",
)
DDP, DP = ("strategy=ddp", "devices=2"), ("strategy=dp", "devices=2")
SWA = "+callbacks.swa._target_=lightning.pytorch.callbacks.StochasticWeightAveraging"
LAYOUTS = {"one": ("devices=1",), "ddp": DDP, "dp": DP}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template as a user has it: with modules of their own (own_modules.py), and a file that names one of them."""
    folder = tmp_path_factory.mktemp("project")
    for part in ("src", "conf"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "tests" / "own_modules.py", folder / "src" / "mine.py")
    (folder / "conf" / "model" / "mine.yaml").write_text("name: mine\n_target_: mine.LitDigits\n")
    return folder


def train(project: Path, outputs: Path, name: str, *overrides: str, cut: str = "", ok: bool = True) -> Run:
    """A run of the module `name`; `cut` names the signal that ends one derived from `Cut`."""
    program = Program(outputs, str(project / "src" / "train.py"))
    return program(*TASK, f"model._target_=mine.{name}", *overrides, cwd=project, env={"CUT": cut}, ok=ok)


def go_on(project: Path, run: Run, *overrides: str, ok: bool = True) -> Run:
    program = Program(run.folder.parent, str(project / "src" / "train.py"))
    return program(f"resume={run.folder}", *overrides, cwd=project, ok=ok)


def same_bits(*runs: Run) -> bool:
    return len({run.summary["weights_sha256"] for run in runs}) == 1


# --- the same steps on every layout -----------------------------------------------------------------------------------


def by_hand(splits: Splits, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the run must compute, as a loop over whole steps in plain torch: no pieces, no Lightning, no lockstep."""
    torch.manual_seed(seed)
    first, last = torch.nn.Linear(12 * 12, 16), torch.nn.Linear(16, 3)
    net = torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.ReLU(), last).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    on = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=24)
    order = DataOrder(len(splits.train), on, seed)
    samples = [splits.train[index] for index in range(len(splits.train))]
    images = torch.stack([image for image, _ in samples]).double()
    x = (images / 255 - splits.spec.mean[0]) / splits.spec.std[0]
    y = torch.stack([label for _, label in samples])
    for epoch in range(2):
        for index in range(order.steps_per_epoch):
            ids = torch.from_numpy(order.step(epoch, index))
            optimizer.zero_grad()
            F.cross_entropy(net(x[ids]), y[ids]).backward()
            optimizer.step()
    return {f"net.{name}": value for name, value in net.state_dict().items()}


def test_every_layout_takes_the_steps_of_a_plain_loop(project: Path, tmp_path: Path) -> None:
    run = train(project, tmp_path, "LitDigits", "lr=0.1", "strategy=ddp,dp", "devices=1,2,4", "-m")
    expected = by_hand(open_data({"_target_": "project.data.synthetic", **DATA}, "data"))
    for folder in run.jobs:
        found = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{folder}: {name}")
    metrics = [summary_of(folder)["metrics"] for folder in run.jobs]
    assert len(metrics) == 6
    assert len({each["test/acc"] for each in metrics}) == 1
    losses = [each["test/loss"] for each in metrics]
    assert max(losses) - min(losses) < 1e-10 * losses[0]


def test_what_is_unfrozen_in_mid_run_is_trained_alike(project: Path, tmp_path: Path) -> None:
    plain = train(project, tmp_path / "plain", "Unfrozen", "pieces=1")
    ddp = train(project, tmp_path / "ddp", "Unfrozen", *DDP)
    exact = [train(project, tmp_path / "exact" / n, "Unfrozen", "exact=true", *on) for n, on in LAYOUTS.items()]
    frozen = train(project, tmp_path / "frozen", "Unfrozen", "pieces=1", "max_epochs=1")
    assert all(apart(run, plain) < 1e-10 for run in (ddp, *exact))
    assert same_bits(*exact)
    assert apart(frozen, plain) > 1e-3


def test_a_parameter_that_a_step_leaves_out_is_not_decayed(project: Path, tmp_path: Path) -> None:
    """Its gradient is None there, not zeros. The step is the epoch's last, of one sample: a rank has none."""
    task = ("batch_size=20", "pieces=2", "threads=1")  # 81 samples: 4 x 20 + 1
    plain = train(project, tmp_path / "plain", "Rarely", *task, "pieces=1")
    for number, layout in enumerate((DDP, DP, (*DDP, "exact=true"))):
        assert apart(train(project, tmp_path / str(number), "Rarely", *task, *layout), plain) < 1e-10, layout


def test_what_a_module_does_to_batches_is_the_same(project: Path, tmp_path: Path) -> None:
    def run(name: str, on: str) -> Run:
        return train(project, tmp_path / name / on, name, "exact=true", "max_epochs=1", *LAYOUTS[on])

    mixed = [run("Mixes", on) for on in LAYOUTS]
    plain, blind = run("LitDigits", "one"), run("Blinds", "one")
    assert same_bits(*mixed)
    assert not same_bits(plain, mixed[0])
    assert same_bits(plain, blind)
    assert plain.summary["metrics"]["test/loss"] != blind.summary["metrics"]["test/loss"]


def test_buffers_survive_a_step_on_scattered_devices(project: Path, tmp_path: Path) -> None:
    """As on one device: whether they are changed in place or replaced."""
    runs = [train(project, tmp_path / n, "Buffers", "max_epochs=1", "pieces=4", *LAYOUTS[n]) for n in ("one", "dp")]
    one, dp = (torch.load(r.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for r in runs)
    assert one["seen"] == dp["seen"] == 81
    assert sorted(one["sizes"].tolist()) == sorted(dp["sizes"].tolist())
    assert one["norm.num_batches_tracked"] == dp["norm.num_batches_tracked"] == 4  # steps
    assert one["norm.running_mean"].abs().max() > 1e-3
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(dp[name], one[name], rtol=1e-10, atol=0)


def test_a_loss_that_goes_past_forward_is_trained_on_or_refused(project: Path, tmp_path: Path) -> None:
    """Under dp and exact it would be without its gradient."""
    task = ("max_epochs=1", "threads=1")
    dp, without = (train(project, tmp_path / name, name, *task, *DP) for name in ("Penalty", "LitDigits"))
    alone = train(project, tmp_path / "alone", "Penalty", *task)
    assert apart(dp, alone) < 1e-10
    assert apart(without, alone) > 1e-3
    refused = train(project, tmp_path / "exact", "Penalty", *DP, "exact=true", ok=False)
    assert refused.returncode == 2, str(refused)
    assert "training_step uses net.1.weight, net.1.bias, net.3.weight, ... outside of forward()" in refused.stderr


def test_outputs_in_a_named_tuple_come_from_scattered_devices(project: Path, tmp_path: Path) -> None:
    one, dp = (train(project, tmp_path / n, "Named", "max_epochs=1", *LAYOUTS[n]) for n in ("one", "dp"))
    assert apart(dp, one) < 1e-10


def test_more_ranks_than_validation_samples(project: Path, tmp_path: Path) -> None:
    """No rank waits for one that has no sample, and what is counted in training meanwhile stays."""
    few = ("data.val_fraction=0.03", "strategy=ddp", "devices=4", "pieces=8", "val_every=3", "hang_timeout=20")
    metrics = train(project, tmp_path, "Counts", *few).summary["metrics"]
    assert metrics["train/seen"] == 87
    assert 3 * metrics["val/acc"] == pytest.approx(round(3 * metrics["val/acc"])), "of three samples"


def test_a_module_without_a_test(project: Path, tmp_path: Path) -> None:
    run = train(project, tmp_path, "NoTest", "max_epochs=1", "callbacks.checkpoint.monitor=null")
    assert (run.summary["status"], list(run.summary["metrics"])) == ("completed", ["train/loss"])


def test_mixed_labels_and_weighted_classes_of_a_classifier(project: Path, tmp_path: Path) -> None:
    options = ("precision=32-true", "lr=0.05")
    mixed, plain = (train(project, tmp_path / n, n, *options) for n in ("MixedClassifier", "MnistCNN"))
    assert mixed.summary["metrics"]["test/acc"] == plain.summary["metrics"]["test/acc"]


# --- what goes on after a stop ----------------------------------------------------------------------------------------


def test_what_it_logs_stands_once_after_a_kill(project: Path, tmp_path: Path) -> None:
    task = ("logger=tensorboard", "log_every=1", "checkpoint_every=5", "pieces=1", "max_epochs=3")
    undisturbed = train(project, tmp_path / "undisturbed", "Cut", *task)
    run = train(project, tmp_path / "cut", "Cut", *task, cut="SIGKILL", ok=False)
    assert run.returncode == 1, str(run)
    assert [step for step, _ in train_loss(run)] == list(range(1, 7))
    go_on(project, run)
    assert [step for step, _ in train_loss(run)] == list(range(1, 13))
    assert train_loss(run) == train_loss(undisturbed)


def train_loss(run: Run) -> list[tuple[int, float]]:
    """The curve of `train_loss` as TensorBoard shows it."""
    events = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("train_loss")]


def test_what_an_epoch_began_with_is_there_when_it_goes_on(project: Path, tmp_path: Path) -> None:
    task = ("max_epochs=3", "pieces=1", "num_workers=1", "checkpoint_every=5")  # killed in step 7, of four an epoch
    whole = train(project, tmp_path / "whole", "Curriculum", *task)
    cut = train(project, tmp_path / "cut", "Curriculum", *task, cut="SIGKILL", ok=False)
    assert cut.returncode == 1, str(cut)
    assert same_bits(go_on(project, cut), whole)


def test_a_schedule_that_follows_a_metric_by_steps_goes_on(project: Path, tmp_path: Path) -> None:
    monitor = ("+model.monitor=val/acc", "val_every=2", "callbacks.checkpoint.monitor=null")
    task = (*monitor, "checkpoint_every=4", "data.samples=300", "pieces=1", "max_epochs=1")
    whole = train(project, tmp_path / "whole", "StepPlateau", *task, "+model.every=2")
    fixed = train(project, tmp_path / "fixed", "StepPlateau", *task, "+model.every=1000")
    cut = train(project, tmp_path / "cut", "StepPlateau", *task, "+model.every=2", cut="SIGKILL", ok=False)
    assert cut.returncode == 1, str(cut)
    run = go_on(project, cut)
    assert "resumes after step 4" in run.stderr
    assert same_bits(run, whole)
    assert not same_bits(run, fixed)


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


def test_csv_keeps_its_rows_when_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when that is cut short."""
    config = check(dict(compose("logger=csv")))
    (first,) = make_loggers(config, tmp_path, 0)
    for step in (1, 2, 3):
        first.log_metrics({"loss": float(step)}, step)
    first.save()

    def killed(writer: ExperimentWriter) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ExperimentWriter, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            make_loggers(config, tmp_path, 2)
    for _ in range(2):
        make_loggers(config, tmp_path, 2)
        rows = list(csv.DictReader((tmp_path / "csv" / "metrics.csv").read_text().splitlines()))
        assert [(row["step"], row["loss"]) for row in rows] == [("1", "1.0"), ("2", "2.0")]


# --- what is refused, and what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        # before anything starts: no folder is left
        ("Twice", (), "configure_optimizers returned several optimizers: a step has one"),
        ("Keeps", ("precision=32-true",), "mine.Keeps: its hyperparameters hold net (Flatten), and a checkpoint holds"),
        ("LitDigits", ("optimizer=adamw",), "optimizer: mine.LitDigits takes no optimizer, so this would change noth"),
        ("LitDigits", ("scheduler=cosine",), "scheduler: mine.LitDigits takes no scheduler, so this would change noth"),
        ("OwnData", (), "mine.OwnData: its train_dataloader would not be asked"),
        ("LitDigits", (SWA, "+callbacks.swa.swa_lrs=0.1"), "callbacks.swa: StochasticWeightAveraging changes how many"),
        ("AfterBackward", (), "its on_after_backward would see the gradient of a piece"),
        ("Moves", (), "its transfer_batch_to_device would see a whole step instead of a batch"),
        # in the first steps
        ("Spare", DDP, "no gradient has reached spare.weight, spare.bias"),
        ("Sometimes", (*DDP, "pieces=4"), "no gradient has reached head.weight, head.bias in a step's last piece"),
        ("Gathers", (*DDP, "pieces=3", "hang_timeout=20"), "training_step can't gather from other ranks"),
        ("Shares", (*DDP, "pieces=3", "hang_timeout=20"), "training_step can't log with sync_dist=True"),
        ("Past", DP, "training_step must call self(x), not a layer of its own"),
        ("WholeLoss", DP, "forward() returned one number for a whole piece"),
        ("Views", DP, "training_step calls forward() more than once"),
    ],
)
def test_what_would_be_ignored_or_wrong_is_refused(
    project: Path, tmp_path: Path, name: str, options: tuple[str, ...], says: str
) -> None:
    run = train(project, tmp_path, name, *options, ok=False)
    assert run.returncode == 2, str(run)
    assert says in run.stderr
    assert not run.folders or options[:2] in (DDP, DP)


@pytest.mark.parametrize(
    ("name", "given", "refused"),
    [
        ("OwnOptimizer", "scheduler=cosine", True),
        ("Helped", "optimizer.weight_decay=0.3", False),
    ],
)
def test_what_a_classifiers_own_optimizer_does_not_take_is_not_ignored(
    project: Path, tmp_path: Path, name: str, given: str, refused: bool
) -> None:
    run = train(project, tmp_path, name, "precision=32-true", "max_steps=1", given, ok=not refused)
    if refused:
        assert run.returncode == 2, str(run)
        group = key(given).partition(".")[0]
        assert f"{key(given)}: the configure_optimizers of mine.{name} does not use self.{group}, so" in run.stderr


def test_the_rank_that_failed_is_named_where_others_lose_it(project: Path, tmp_path: Path) -> None:
    run = train(project, tmp_path, "OneFails", *DDP, ok=False)
    assert run.returncode == 1, str(run)
    assert run.summary["status"] == "failed"
    assert "rank 1 failed: ValueError: the file that is broken" in run.summary["error"]


def test_an_evaluation_that_takes_long_is_not_silent(project: Path, tmp_path: Path) -> None:
    run = train(project, tmp_path / "trained", "SlowTest", "max_steps=1", "data.samples=600")  # 120 to be tested
    evaluate = Program(tmp_path / "evaluated", str(project / "src" / "evaluate.py"))
    task = (f"checkpoint={run.folder}", "batch_size=12", "+hang_timeout=4", "accelerator=cpu")  # 10 batches of 0.6 s
    found = evaluate(*task, "+model._target_=mine.SlowTest", cwd=project, env={"SLOW": "0.6"})
    assert found.summary["metrics"]["test/acc"] == run.summary["metrics"]["test/acc"]


@pytest.mark.parametrize(
    ("program", "target", "error", "says"),
    [
        ("import nowhere.at_all", "own.Net", Refusal, "own.Net: own imports nowhere, which is not installed"),
        ("import torch; torch.nowhere", "own.Net", AttributeError, ".*'torch' has no attribute 'nowhere'"),
        ("", "own.Net", Refusal, "own.Net: own has no Net"),
        ("", "own.nets.Net", Refusal, "own.nets.Net: there is no module own.nets"),
        ('def net():\n    {}["label"]', "own.net", KeyError, r"KeyError: 'label' \(\S+own\.py:2 in net; HYDRA_FULL_"),
        ("def net():\n    assert 1 > 2", "own.net", AssertionError, r"AssertionError \(\S+own\.py:2 in net; "),
        ("def net():\n    if True", "own.net", SyntaxError, r"SyntaxError: expected ':' \(own\.py, line 2\) \("),
    ],
)
def test_what_is_missing_or_mistaken_in_a_users_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, target: str, error: type[Exception], says: str
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own.py").write_text(program + "\n")
    monkeypatch.syspath_prepend(tmp_path / "src")
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises(error) as caught:
        instantiate("model", {"_target_": target})
    assert re.search(says, str(caught.value) if error is Refusal else cli.line(caught.value, "train"))
