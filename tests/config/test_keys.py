"""Each key of conf/ does something: what is built of another value is another thing, or Lockstep reads it."""

import json
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, composed, page_file
from PIL import Image
from torch import Tensor, nn
from written_shards import write_tar

from lockstep.config.check import Config, check
from lockstep.config.instantiate import instantiate
from lockstep.config.pages import options
from lockstep.config.schema import Keys, Speed, Sweep
from lockstep.data import Splits
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.job.build import make_module
from lockstep.job.optimizers import training_arguments

GROUPS = ("model", "optimizer", "scheduler", "callbacks", "data")
DATA = ("data=synthetic", "data.samples=60", "data.image_size=40", "batch_size=4", "accelerator=cpu")
# Sets whose files aren't here. All their keys are those of digits, or those of test_huggingface.py.
ELSEWHERE = ("mnist", "fashion_mnist", "cifar10", "huggingface")
NAMES = {
    "name",
    "_target_",
    "_partial_",
    "defaults",
    "pretrained",  # it and the next are of files that aren't here
    "weights",
}
# Where the kind of a value does not say which other one is good; of one file, or of all in the group.
OTHER: dict[str, Any] = {
    "model.freeze": ["net.*.weight"],
    "model.train_only": ["net.*.weight"],
    "model.class_weights": "balanced",
    "model.norm": "group",
    "model.stem": "imagenet",
    "torchvision: model.arch": "mobilenet_v3_large",
    "torchvision: model.options": {"dropout": 0.7},
    "timm: model.arch": "resnet14t",
    "multi_label: model.arch": "mobilenet_v3_small",
    "regression: model.arch": "mobilenet_v3_small",
    "segmentation: model.arch": "fcn_resnet50",
    "timm: model.options": {"drop_rate": 0.7},
    "optimizer.lr_scale": {"net.0.*": 0.1},
    "optimizer.betas": [0.8, 0.9],
    "scheduler.interval": "epoch",
    "scheduler.monitor": "val/acc",
    "multistep: scheduler.interval": "step",
    "scheduler.T_0": 7,
    "scheduler.milestones": [3],
    "callbacks.checkpoint.monitor": "val/loss",
    "callbacks.early_stopping.monitor": "val/loss",
    "data.mean": [0.1, 0.2, 0.3],
    "data.std": [0.3, 0.2, 0.1],
    "data.background": "black",
    "data.bits": 12,
    "data.channels": 1,
    "synthetic: data.channels": 3,
    "data.task": "segmentation",
    "data.augment": {"crop": 1},
    **{f"{name}: data.image_size": 20 for name in ("image_folder", "image_list", "shards")},
    "data.augment.fill": "reflect",
    "image_folder: data.augment.fill": "zero",
    "image_list: data.augment.fill": "zero",
    "shards: data.augment.fill": "zero",
    "shards: data.image": "jpg",
    "shards: data.label": "kind",
}
# Another mode than the metric's is refused, see test_metrics.py.
# Without a list there are no images; an index that lies elsewhere is the same one; a window needs shards in parts
# (tests/streams/test_shard_windows.py); the others are in tests/job/test_optimizers.py and tests/project/test_tasks.py.
BESIDE = {"data.csv", "data.index_dir", "data.window", "plateau: scheduler.interval", "optimizer.lr"}
BESIDE |= {f"{name}: scheduler.interval" for name in ("cosine", "onecycle")}  # "epoch" is refused
BESIDE |= {"model.monitor", "model.mode"}
BESIDE |= {"data.cache", "data.cache_gb", "data.retry_seconds"}  # of a server: tests/streams/test_object_stores.py
BESIDE |= {"scheduler.mode", "callbacks.checkpoint.mode", "callbacks.early_stopping.mode"}
BESIDE |= {f"data.{name}" for name in ("labels", "values", "mask", "classes", "unlabelled")}


def other(key: str, value: Any, file: str) -> Any:
    """Return another value of the same kind."""
    for name in (f"{file}: {key}", key):
        if name in OTHER:
            return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return [number + 8 for number in value] if isinstance(value, list) else value / 2 or 0.25


def keys_of(group: str, file: str) -> dict[str, Any]:
    """Return the keys of a config file, and of what it begins with that is no choice by itself, dotted, with their
    values."""

    def read(name: str) -> dict[str, Any]:
        content: dict[str, Any] = yaml.safe_load(page_file(f"{group}/{name}").read_text()) or {}
        bases = [read(base) for base in content.get("defaults", ()) if str(base).startswith("_") and base != "_self_"]
        return dict(ChainMap(content, *bases))

    def flat(above: str, content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in content.items():
            if name not in NAMES:
                yield f"{above}.{name}", value
            if isinstance(value, dict):
                yield from flat(f"{above}.{name}", value)

    actual = dict(flat(group, read(file)))
    of_callbacks = {f"{group}.{name}" for name in ("meter", "console", "dashboard", "pictures", "checkpoint", file)}
    left_out = {each.removeprefix(f"{file}: ") for each in BESIDE if each.partition(":")[0] in (file, each)}
    left_out |= of_callbacks if group == "callbacks" else set()
    return {key: value for key, value in actual.items() if key not in left_out}


def describe(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Return what an object is made of, to be compared; but not what a module keeps as the record of its arguments."""
    if isinstance(value, Tensor):
        return (*value.shape, value.requires_grad, float(value.detach().double().sum()))
    if isinstance(value, np.ndarray):
        return (*value.shape, str(value.dtype), float(value.sum()) if value.dtype.kind in "biuf" else value.tolist())
    if isinstance(value, partial):
        return describe((value.func, value.args, value.keywords), seen)
    if isinstance(value, FunctionType):
        return value.__qualname__, [describe(cell.cell_contents, seen) for cell in value.__closure__ or ()]
    if isinstance(value, Mapping):
        return {str(name): describe(part, seen) for name, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [describe(part, seen) for part in value]
    if id(value) in seen:
        return None
    if hasattr(value, "__dict__") and not isinstance(value, type):
        record = ("_hparams", "_hparams_initial", "_log_hyperparams")
        parts = {name: part for name, part in vars(value).items() if name not in record}
        return type(value).__name__, describe(parts, (*seen, id(value)))
    return value if isinstance(value, str | int | float | None) else type(value).__name__


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return images of two classes, in folders, in a list and in a shard."""
    folder = tmp_path_factory.mktemp("images")
    rows, members = ["path,label"], {}
    for number in range(40):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((40, 36, 3), 5 * number, dtype=np.uint8)).save(path)
        rows.append(f"{path.relative_to(folder)},{number % 2}")
        members[f"{number}.json"] = json.dumps({"label": number % 2, "kind": number % 4 // 2}).encode()
        members[f"{number}.{'png' if number % 3 else 'jpg'}"] = path.read_bytes()
    (folder / "list.csv").write_text("\n".join(rows))
    write_tar(folder / "images.tar", members)
    return folder


@cache
def synthetic(model: str) -> Splits:
    tasks = {name: (f"data.task={name}", "data.channels=3") for name in ("multi_label", "regression", "segmentation")}
    return open_data(composed(*DATA, *tasks.get(model, ()))["data"], "data")


def built(group: str, raw: dict[str, Any], images: Path) -> Any:
    config: Config = check(raw)
    if group == "data":
        config.data.update({"csv": str(images / "list.csv")} if config.data["name"] == "image_list" else {})
        splits = open_data(config.data, str(images))
        return describe(splits), [fetched.tolist() for fetched in map(np.asarray, splits.train[0])]
    if group == "callbacks":
        known: dict[str, Any] = {"folder": Path("run"), "every": None, "log_every": 50, "record": {}, "config": {}}
        named = config.callbacks.items()
        return {
            name: describe(instantiate(f"callbacks.{name}", each, **known, headline="", started=0.0))
            for name, each in named
            if each
        }
    if group == "scheduler":
        made = training_arguments(config, 60)
        optimizer = made["optimizer"]([nn.Parameter(torch.zeros(1))])
        return describe(made["scheduler"](optimizer)), describe(optimizer.param_groups)
    module = make_module(config, synthetic(config.model["name"]))
    return describe(module), describe(module.configure_optimizers())


FILES = [(group, file) for group in GROUPS for file in options(group) if file not in ELSEWHERE]


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize(("group", "file"), FILES, ids=["=".join(pair) for pair in FILES])
def test_each_key_of_a_group_changes_what_is_built(
    group: str, file: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for clock in ("monotonic", "perf_counter", "time"):  # which some callbacks look at when they are made
        monkeypatch.setattr(f"time.{clock}", lambda: 0.0)
    chosen = [*DATA, f"{group}={file}"] if group != "data" else [f"data={file}", *DATA[3:]]
    before = built(group, composed(*chosen), images)
    assert before == built(group, composed(*chosen), images), "the control"
    for key, value in keys_of(group, file).items():
        *above, name = key.split(".")
        raw = composed(*chosen)
        place: Any = raw
        for part in above:
            place = place[part]
        place[name] = other(key, value, file)
        assert built(group, raw, images) != before, f"{key}={place[name]} changes nothing"


LOCKSTEP = "\n".join(
    path.read_text()
    for path in (ROOT / "src").rglob("*.py")
    if path.relative_to(ROOT / "src").as_posix() not in ("lockstep/config/check.py", "lockstep/config/schema.py")
)
READ = set(re.findall(r"\b(?:config|cfg)\.(\w+)", LOCKSTEP))
LAYOUT = {"accelerator", "devices", "num_nodes", "batch_size", "pieces", "accumulate_grad_batches", "exact"}
OF_HYDRA = {"outputs"}  # conf/hydra/default.yaml has it in the run's folder


@pytest.mark.parametrize("key", sorted({field.name for field in fields(Keys)} - OF_HYDRA))
def test_each_key_of_the_front_page_is_read(key: str) -> None:
    """In the layout, in the learning rate of a step, in a worker's threads, or by Lockstep, in words."""
    others = {"accelerator": None, "num_nodes": None, "lr_scaling": "linear", "threads": 1000}
    raw = composed("accelerator=cpu", "lr_scaling=sqrt", "data=synthetic")
    read = key in READ
    if key in LAYOUT or key in ("lr", "lr_scaling", "reference_batch_size", "threads"):
        value = others[key] if key in others else other(key, raw[key] if raw[key] is not None else 1, "")
        if value is not None:
            raw |= {"batch_size": 64 * 3}
            before, after = check(raw), check(raw | {key: value})
            of_both = [(each.layout, each.scaled_lr, each.worker_threads) for each in (before, after)]
            read = of_both[0] != of_both[1]
    if key == "num_nodes":  # which the engine decides that starts workers on machines
        with pytest.raises(UserError, match="num_nodes=2: on several machines torchrun, SLURM or MPI must start"):
            check(composed("num_nodes=2"))
        return
    assert read or key == "accelerator", f"nobody reads {key}"
    assert f"{key}_" not in READ, "the control"


CHOSEN = {"model", "data", "strategy", "extras", "optimizer", "scheduler", "callbacks", "logger", "debug", "sweep"}
BESIDE_THE_PAGE = {"checkpoint"}  # of other programs


def test_a_page_and_the_schema_have_the_same_keys_and_defaults() -> None:
    page = yaml.safe_load(page_file("base").read_text())
    schema = {field.name: field for field in fields(Keys)}
    assert page.keys() - {"defaults"} == schema.keys() - (CHOSEN - page.keys()) - BESIDE_THE_PAGE
    project = yaml.safe_load(page_file("train").read_text()).keys() - {"defaults", "hydra"}
    assert project == {"batch_size"}, "a project's page has what it changes"
    compared = {
        "speed": (page.pop("speed"), Speed()),
        "sweep": (yaml.safe_load(page_file("sweep/grid").read_text()), Sweep()),
    }
    for key, (values, expected) in compared.items():
        assert {name: values[name] for name in values if "$" not in str(values[name])}.items() <= vars(
            expected
        ).items(), key
        assert values.keys() == vars(expected).keys(), key
    for key in page.keys() - CHOSEN - {"defaults"}:
        if schema[key].default is not MISSING and "$" not in str(page[key]):
            assert page[key] == schema[key].default, key
