"""Checkpoints that people bring: with damaged bytes, or whole files of another structure. What is read is what was
saved, or the file is refused in one line."""

import copy
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import composed
from fuzzing import Edit, damaged, edits, often, refused_line, result_or_line
from hypothesis import event, given
from hypothesis import strategies as st

from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.start import check_checkpoint_fits, load_start, resume_messages
from lockstep.checkpoint.weights import load_weights
from lockstep.config import instantiate
from lockstep.config.check import Config, check
from lockstep.data import Splits
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.job.build import make_module
from lockstep.job.evaluation import check_same_images, config_of, find_checkpoint_and_record
from lockstep.job.prediction import load_module
from lockstep.report.provenance import checkpoint_record

pytestmark = pytest.mark.usefixtures("whole_run")

SMALL = ("data=synthetic", "data.samples=60", "data.image_size=12", "data.num_classes=3", "logger=none")
STEPS = 8  # of the run


@dataclass(repr=False)
class Saved:
    """A run's checkpoint, and what read it."""

    content: dict[str, Any]
    config: Config
    splits: Splits
    folder: Path
    evaluate: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module", autouse=True)
def read_conf_once() -> Iterator[None]:
    """Read the files of conf/ once: each evaluation reads all of them, which takes most of its time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(instantiate, "_part", cache(instantiate._part))
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    config = check(composed(*SMALL))
    splits = open_data(config.data, config.data_dir, config.seed)
    content = {
        "epoch": 1,
        "global_step": 4,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": make_module(config, splits).state_dict(),
        "loops": {"fit_loop": {"epoch_loop.state_dict": {}}},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        "lockstep": {**checkpoint_record(config, splits), "metrics": {"val/acc": 0.5}},
        "continuation": {"stopped": False, "length": {}, "trained": {}, "settings": {}},
    }
    folder = tmp_path_factory.mktemp("run")
    return Saved(content, config, splits, folder, composed("checkpoint=x", page="evaluate"))


def resumed(saved: Saved) -> dict[str, Any]:
    """Return what a run continues from, as train.py reads it."""
    path, content = load_start(saved.folder, str(saved.path), {}, [0])
    now = checkpoint_record(saved.config, saved.splits)
    check_checkpoint_fits(str(path), content, saved.content["state_dict"], saved.config, saved.splits, now, STEPS)
    resume_messages(saved.config, saved.splits, content)
    return content


def evaluated(saved: Saved) -> dict[str, Any]:
    """Return the weights that evaluate.py and predict.py use."""
    raw = {**saved.evaluate, "checkpoint": str(saved.path)}
    path, record = find_checkpoint_and_record(raw)
    config = config_of(path, record, raw)
    same_data = config.data == saved.config.data
    splits = saved.splits if same_data else open_data(config.data, config.data_dir, config.seed)
    check_same_images(path, record, splits.spec)
    return dict(load_module(config, splits).state_dict())


def initial(saved: Saved) -> dict[str, Any]:
    """Return the weights of a run that begins with those of the file."""
    module = make_module(saved.config, saved.splits)
    load_weights("init_from", module, str(saved.path))
    return dict(module.state_dict())


def same(actual: dict[str, Any], right: dict[str, Any]) -> bool:
    return actual.keys() == right.keys() and all(torch.equal(actual[name], right[name]) for name in right)


def test_a_run_that_has_ended_continues_to_the_same_end(saved: Saved) -> None:
    """It is then evaluated again. Of a run that would end earlier, the checkpoint has steps that do not count."""
    checkpoint_io.save({**saved.content, "global_step": STEPS}, saved.path)
    assert resumed(saved)["global_step"] == STEPS
    checkpoint_io.save({**saved.content, "global_step": STEPS + 1}, saved.path)
    with pytest.raises(UserError, match=f"ends the run after step {STEPS}, but .* was saved after step {STEPS + 1}: "):
        resumed(saved)


def test_a_whole_checkpoint_is_read(saved: Saved) -> None:
    checkpoint_io.save(saved.content, saved.path)
    right = saved.content["state_dict"]
    assert same(resumed(saved)["state_dict"], right)
    assert same(evaluated(saved), right)
    assert same(initial(saved), right)


# --- damaged bytes ----------------------------------------------------------------------------------------------------


@often(40)
@given(edits=edits(8, 64))
def test_damaged_bytes(saved: Saved, edits: list[Edit]) -> None:
    """A file whose checksums are right may still be read: a zip has bytes that nobody reads."""
    file = io.BytesIO()
    torch.save(saved.content, file)
    saved.path.parent.mkdir(exist_ok=True)
    saved.path.write_bytes(damaged(file.getvalue(), edits))
    for read in (resumed, initial):
        actual, line = result_or_line(partial(read, saved))
        event("refused" if line else "accepted")
        if not line:
            assert same(actual.get("state_dict", actual), saved.content["state_dict"]), "damaged, and read all the same"


def test_the_control_torch_reads_changed_weights(saved: Saved) -> None:
    checkpoint_io.save(saved.content, saved.path)
    name, tensor = next(iter(saved.content["state_dict"].items()))
    stored = tensor.contiguous().numpy().tobytes()
    saved.path.write_bytes(saved.path.read_bytes().replace(stored, bytes(len(stored))))
    assert not torch.load(saved.path, weights_only=True)["state_dict"][name].any()
    for read in (resumed, evaluated, initial):
        assert "damaged" in refused_line(partial(read, saved))


# --- another structure ------------------------------------------------------------------------------------------------

VALUES = st.sampled_from(
    [
        *(None, True, 0, 1, -1, 10**30, 0.5, float("nan"), "", "x", "a\nb", "os.system", [], [1], ["a"], {}, {"a": 1}),
        *(torch.zeros(0), torch.zeros(3), torch.ones(2, 2, dtype=torch.int64), {"_target_": "os.system"}, {1: 2}),
        *(torch.full((3,), float("nan")), torch.zeros(2, dtype=torch.complex64), {"name": None}, [[None]]),
    ]
)
changes = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(["replace", "remove", "rename", "move"]), VALUES),
    min_size=1,
    max_size=3,
)


def places(node: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all keys."""
    if not isinstance(node, dict):
        return []
    return [place for key, part in node.items() for place in ((*above, key), *places(part, (*above, key)))]


def changed(content: dict[str, Any], changes: list[tuple[float, str, Any]]) -> dict[str, Any]:
    content = copy.deepcopy(content)
    content["state_dict"] = dict(content["state_dict"])
    for where, how, value in changes:
        if not (actual := places(content)):
            break
        *above, key = actual[int(where * len(actual))]
        node = content
        for each in above:
            node = node[each]
        match how:
            case "replace":
                node[key] = copy.deepcopy(value)  # else later changes would change the strategy
            case "remove":
                del node[key]
            case "rename":
                node[f"{key}2"] = node.pop(key)
            case "move":
                content[key] = node.pop(key)
    return content


@often(30)
@given(changes=changes)
def test_another_structure(saved: Saved, changes: list[tuple[float, str, Any]]) -> None:
    content = changed(saved.content, changes)
    saved.path.parent.mkdir(exist_ok=True)
    torch.save(content, saved.path)
    for read in (resumed, evaluated, initial):
        actual, line = result_or_line(partial(read, saved))
        event(f"{read.__name__}: {'refused' if line else 'accepted'}")
        if not line and read is not initial:  # init_from takes whatever fits
            weights = actual.get("state_dict", actual)
            assert same(weights, content["state_dict"]), "other weights than those of the file"


TRACEBACKS: dict[str, list[Any]] = {  # by the test above, and ended in a traceback
    "lockstep.config": [None, torch.zeros(0), {"data": 5}],
    "lockstep.config.data": [7, {}],
    "lockstep.config.model": [None, {}],
    "lockstep.config.optimizer": [[], {}],
    "lockstep.config.lr": [torch.zeros(0), torch.zeros(2)],
    "lockstep.config.batch_size": [None, "x"],
    "lockstep.trainer.samples": [None, "x"],
    "lockstep.trainer.precision": [None],
    "lockstep.spec": [None, {"classes": 3}],
    "global_step": [None, "x", torch.zeros(3)],
    "continuation": [None, {"stopped": 1}],
    "state_dict.net.0.weight": [None, {}, []],
}


@pytest.mark.parametrize("key", TRACEBACKS)
def test_an_entry_of_another_kind_is_refused(saved: Saved, key: str) -> None:
    *above, last = key.split(".", 1) if key.startswith("state_dict") else key.split(".")
    for value in TRACEBACKS[key]:
        content = changed(saved.content, [])
        node = content
        for each in above:
            node = node[each]
        last = last if last in node or not key.startswith("state_dict") else next(iter(node))
        node[last] = value
        saved.path.parent.mkdir(exist_ok=True)
        torch.save(content, saved.path)
        assert str(saved.path) in refused_line(lambda: resumed(saved))
