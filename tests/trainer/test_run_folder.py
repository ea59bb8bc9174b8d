"""Where a `lockstep.Trainer` writes, and which run `ckpt_path="last"` continues."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import python
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset, random_split
from trainer.small import BATCH, Net, loader, trainer

import lockstep
from lockstep.checkpoint import io as checkpoint_io
from lockstep.data.datasets import digest_of
from lockstep.errors import UserError
from lockstep.trainer import lock, run_folder

LOGGERS: dict[str, Callable[[Path], Any]] = {
    "none": lambda folder: False,
    "default": lambda folder: True,
    "other": lambda folder: CSVLogger(folder / "logs", name="mine"),
}
NIGHTLY = pytest.mark.nightly
PLACES = {  # of the first, second and third run
    "none": [".", "version_1", "version_2"],
    "default": [f"lightning_logs/version_{number}" for number in range(3)],
    "other": [f"logs/mine/version_{number}" for number in range(3)],
}


def checkpoints(folder: Path) -> dict[str, int]:
    """Return the step of each checkpoint in a folder, by its path."""
    return {str(each.relative_to(folder)): checkpoint_io.step_of(each) for each in folder.rglob("*.ckpt")}


class Begins(Net):
    began = -1

    def on_train_start(self) -> None:
        type(self).began = self.trainer.global_step


def begins(folder: Path, data: Any = None, **options: Any) -> int:
    """Fit with `ckpt_path="last"`. Return the step at which it began."""
    trainer(folder, **options).fit(Begins(), data or loader(), ckpt_path="last")
    return Begins.began


@pytest.mark.parametrize(
    ("logger", "callback"),
    [
        *(("none", None), ("default", {"save_last": True}), ("other", {})),
        *(pytest.param(logger, None, marks=NIGHTLY) for logger in ("default", "other")),
        *(pytest.param(logger, {}, marks=NIGHTLY) for logger in ("none", "default")),
        *(pytest.param(logger, {"save_last": True}, marks=NIGHTLY) for logger in ("none", "other")),
    ],
)
def test_no_run_overwrites_a_file_of_another(tmp_path: Path, logger: str, callback: Any) -> None:
    for epochs, place in zip((1, 2, 3), PLACES[logger], strict=True):
        before = checkpoints(tmp_path)
        assert before or epochs == 1
        options = {"max_epochs": epochs, "logger": LOGGERS[logger](tmp_path)}
        callbacks = [] if callback is None else [ModelCheckpoint(**callback)]
        made = trainer(tmp_path, callbacks=callbacks, **options)
        made.validate(Net(), loader(), verbose=False)  # makes no folder
        module = Net()
        made.fit(module, loader())
        made.test(module, loader(shuffle=False), verbose=False)
        after = checkpoints(tmp_path)
        assert {name: after.get(name) for name in before} == before
        new = {name: step for name, step in after.items() if name not in before}
        assert new[str(Path(place, "checkpoints", "last.ckpt"))] == 6 * epochs
        assert {Path(name).parent for name in new} == {Path(place, "checkpoints")}
    assert not [*tmp_path.rglob(".*")]


def test_a_trainer_that_fits_again_stays_in_its_folder(tmp_path: Path) -> None:
    made, module = trainer(tmp_path, max_epochs=1), Net()
    made.fit(module, loader())
    made.fit_loop.max_epochs = 2
    made.fit(module, loader(), ckpt_path="last")
    assert checkpoints(tmp_path) == {"checkpoints/last.ckpt": 12}


@pytest.mark.parametrize("logger", LOGGERS)
def test_last_is_of_the_newest_run_and_goes_on_beside_its_log(tmp_path: Path, logger: str) -> None:
    make = LOGGERS[logger]
    for epochs in (1, 3):
        trainer(tmp_path, max_epochs=epochs, logger=make(tmp_path)).fit(Net(), loader())
    assert begins(tmp_path, max_epochs=4, logger=make(tmp_path)) == 18
    places = [Path(place, "checkpoints", "last.ckpt") for place in PLACES[logger]]
    ends = [6, 24] if logger == "none" else [6, 18, 24]
    assert checkpoints(tmp_path) == {str(place): end for place, end in zip(places, ends, strict=False)}


def test_a_path_of_a_last_checkpoint_is_continued_in_its_place(tmp_path: Path) -> None:
    """As programs do that look for the file themselves: killed twice, they go on from the second place."""
    last = tmp_path / "checkpoints" / "last.ckpt"
    for epochs in (1, 2, 3):
        path = last if last.exists() else None
        trainer(tmp_path, max_epochs=epochs).fit(Net(), loader(), ckpt_path=path)
    assert checkpoints(tmp_path) == {"checkpoints/last.ckpt": 18}


COMMANDS = {  # words of the first command and of the second, and whether the second continues the first's run
    "the same": (["p.py", "--lr", "1"], ["p.py", "--lr", "1"], True),
    "more words": (["p.py", "--lr", "1"], ["/else/where/p.py", "--lr", "1", "--resume"], True),
    "another value": (["p.py", "--lr", "1"], ["p.py", "--lr", "2"], False),
    "a word less": (["p.py", "2"], ["p.py"], False),
    "another program": (["p.py"], ["q.py"], False),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_last_is_of_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    first, second, continues = COMMANDS[case]
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "p.py", raising=False)  # a worker of pytest has none
    monkeypatch.setattr(sys, "argv", first)
    trainer(tmp_path, max_epochs=1).fit(Net(), loader())
    monkeypatch.setattr(sys, "argv", second)
    assert begins(tmp_path) == 6 * continues
    record = checkpoint_io.load(tmp_path / "checkpoints" / "last.ckpt")["lockstep"]
    assert "--lr" not in str(record), "a word may be a password"


def test_last_is_of_the_same_seed_and_another_run_is_named(tmp_path: Path) -> None:
    trainer(tmp_path, max_epochs=1, seed=1).fit(Net(), loader())
    with pytest.warns(UserWarning, match=r"of another command or seed \(to continue from one, give .*last.ckpt\), so"):
        assert begins(tmp_path, seed=2) == 0
    assert begins(tmp_path, seed=1, max_epochs=2) == 6, "the control"


@pytest.mark.usefixtures("processes")
def test_a_run_in_which_another_process_trains_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.1)
    trainer(tmp_path, max_epochs=1).fit(Net(), loader())
    code = f"import sys; sys.path.insert(0, {str(Path(lockstep.__file__).parents[1])!r}); from pathlib import Path\n"
    code += f"from lockstep.trainer.run_folder import try_lock; print(try_lock(Path({str(tmp_path)!r})), flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", code + "input()"], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert begins(tmp_path, max_epochs=1) == 0
        other.kill()
    assert begins(tmp_path, max_epochs=2) == 6, "the newest is free, and its process that was killed left the lock file"


AT_ONCE = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer.small import *
callbacks = [ModelCheckpoint("mine", "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)]
callbacks = callbacks if sys.argv[1] == "callback" else []
made = trainer(Path.cwd(), max_epochs=6, checkpoint_every=1, callbacks=callbacks)
print("ready", flush=True)
input()
made.fit(Net(), loader())
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("callback", ["callback", "none"])
def test_programs_at_once_in_one_folder_all_end(tmp_path: Path, callback: str) -> None:
    paths = [str(Path(__file__).parents[1]), str(Path(lockstep.__file__).parents[1])]
    command = [sys.executable, "-c", AT_ONCE, callback, *paths]
    pipes: dict[str, Any] = {"stdin": -1, "stdout": -1, "stderr": -1, "text": True, "cwd": tmp_path}
    programs = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n", program.communicate()
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
    for program in programs:
        errors = program.communicate()[1]
        assert program.returncode == 0, errors
    steps = checkpoints(tmp_path)
    if callback == "none":
        assert steps == {str(Path(place, "checkpoints", "last.ckpt")): 36 for place in PLACES["none"]}
    assert -1 not in steps.values(), "each file is whole"
    assert not [*tmp_path.rglob(".*")]


def test_a_home_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = trainer(Path("~/runs"))
    made.fit(Net(), loader())
    assert checkpoints(tmp_path) == {"runs/checkpoints/last.ckpt": 12}
    made.save_checkpoint("~/more.ckpt")
    assert trainer(tmp_path).test(Net(), loader(shuffle=False), ckpt_path="~/more.ckpt", verbose=False)
    assert run_folder.root_folder(f"file://{tmp_path}") == tmp_path


REMOTE: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: trainer("memory://bucket/run"),  # type: ignore[arg-type]
    "s3": lambda folder: trainer("s3://bucket/run"),  # type: ignore[arg-type]
    "gs, cut by pathlib": lambda folder: trainer(Path("gs://bucket/run")),
    "a callback": lambda folder: trainer(folder, callbacks=[ModelCheckpoint("s3://bucket/run")]),
    "a checkpoint": lambda folder: trainer(folder).fit(Net(), loader(), ckpt_path="http://127.0.0.1/x.ckpt"),
    "to test": lambda folder: trainer(folder).test(Net(), loader(shuffle=False), ckpt_path="hf://a/x.ckpt"),
    "to save": lambda folder: trainer(folder).save_checkpoint("abfs://bucket/x.ckpt"),
    "no user": lambda folder: trainer(Path("~no-such-user/x")),
}


@pytest.mark.parametrize("case", REMOTE)
def test_what_is_no_place_of_this_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no folder or file of this machine|must be a folder of|no such user") as error:
        REMOTE[case](tmp_path)
    assert "\n" not in str(error.value)
    assert not os.listdir(tmp_path)


class Inside(Dataset[Any]):
    """A data set with another one inside, and with what changes from start to start."""

    def __init__(self, seed: int) -> None:
        self.inside, self.calls, self.started = numbers(seed), 0, object()

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.inside[index]


class Files(Dataset[Any]):
    """Names of files and labels; the folder may move."""

    def __init__(self, seed: int, folder: str = "/a") -> None:
        self.samples = [(f"{folder}/{seed}_{number}.png", number % 3) for number in range(48)]

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return torch.full((8,), float(index)), self.samples[index][1]


class Arrays(Files):
    def __init__(self, seed: int) -> None:
        self.samples = [("", 0)] * 48
        self.x = np.random.default_rng(seed).normal(size=(48, 8)).astype(np.float32)


class OnServer(Files):
    """Samples whose bytes are known, as those of shards on a server are."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self.content = str(seed)

    def content_sha256(self) -> str:
        return self.content


class Unknown(Files):
    """Random samples that are made for each call: nothing is known of them."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.random.normal(size=8).astype(np.float32)), index % 3


def numbers(seed: int) -> TensorDataset:
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.arange(48) % 3)


OTHER_DATA: dict[str, Callable[[int], Any]] = {
    "tensors": numbers,
    "inside another": Inside,
    "names": Files,
    "arrays": Arrays,
    "on a server": OnServer,
    "a part": lambda seed: random_split(numbers(seed), [40, 8], torch.Generator().manual_seed(0))[0],
    "several": lambda seed: ConcatDataset([numbers(0), numbers(seed)]),
}


@pytest.mark.parametrize("case", OTHER_DATA)
def test_other_data_of_the_same_size_is_refused(tmp_path: Path, case: str) -> None:
    make = OTHER_DATA[case]

    def train(seed: int, epochs: int) -> int:
        return begins(tmp_path, DataLoader(make(seed), BATCH), max_epochs=epochs, exact=case == "tensors", pieces=2)

    train(1, 1)
    assert train(1, 2) > 0, "the control"
    with pytest.raises(UserError, match=r"last.ckpt was trained on other data of the same size: give the same; wit"):
        train(2, 3)


def test_data_of_which_nothing_is_known_goes_on(tmp_path: Path) -> None:
    assert digest_of(Unknown(0)) is None
    assert digest_of(Files(0, "/a")) == digest_of(Files(0, "/b"))
    assert begins(tmp_path, DataLoader(Unknown(1), BATCH), max_epochs=1) == 0
    assert begins(tmp_path, DataLoader(Unknown(2), BATCH), max_epochs=2) == 2


def test_the_default_checkpoint_callback_has_lightnings_attributes(tmp_path: Path) -> None:
    plain = ModelCheckpoint()
    made = trainer(tmp_path, max_epochs=1)
    made.fit(Net(), loader())
    ours: Any = made.checkpoint_callback
    assert not [name for name in vars(plain) if name[0] != "_" and name != "kth_value" and not hasattr(ours, name)]
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    assert (ours.dirpath, ours.last_model_path, ours.best_model_path) == (os.path.dirname(last), last, last)
    assert (ours.best_model_score, ours.best_k_models, ours.monitor, ours.save_top_k) == (None, {}, None, 1)


@pytest.mark.parametrize(
    ("made_by", "precision"),
    [(copy.deepcopy, "32-true"), (lambda each: pickle.loads(pickle.dumps(each)), "bf16-mixed")],
    ids=["copied", "pickled"],
)
def test_a_trainer_and_its_module_can_be_copied(tmp_path: Path, made_by: Callable[[Any], Any], precision: str) -> None:
    made, module = trainer(tmp_path, max_epochs=1, precision=precision), Net()
    another = made_by(made)
    assert type(another.precision_plugin).__mro__[1:] == type(made.precision_plugin).__mro__[1:]
    made.fit(module, loader())
    another.fit(made_by(module), loader())
    assert checkpoints(tmp_path) == {"checkpoints/last.ckpt": 6, "version_1/checkpoints/last.ckpt": 6}
    copied = copy.deepcopy(made)
    assert copied.global_step == made_by(made).global_step == 6
    copied.save_checkpoint(tmp_path / "copy.ckpt")
    assert checkpoint_io.step_of(tmp_path / "copy.ckpt") == 6


@pytest.mark.usefixtures("processes")
def test_the_code_of_a_command_is_a_part_of_it() -> None:
    code = "from lockstep.trainer.run_folder import command; print(command())"
    first, again, other, more = (python(*words).stdout for words in ((code,), (code,), (code + "#",), (code, "a")))
    assert first == again != other
    assert more.startswith(first.rstrip("]\n") + ", ")


def test_modules_that_a_notebook_runs_have_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel-1.json"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "p.py", raising=False)
    assert len(run_folder.command()) == 3
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert run_folder.command() == []


def test_a_folder_that_cant_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^.*/file.*: checkpoints can't be written there \(Not a directory\): give an"):
        trainer(tmp_path / "file" / "below").fit(Net(), loader())


def test_a_fit_that_saves_nothing_leaves_no_folder(tmp_path: Path) -> None:
    class Fails(Net):
        def on_train_start(self) -> None:
            raise KeyError

    with pytest.raises(KeyError):
        trainer(tmp_path).fit(Fails(), loader())
    assert not os.listdir(tmp_path)
