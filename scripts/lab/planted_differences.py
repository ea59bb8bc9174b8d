"""Make pairs of runs that differ in one known thing, and let `lockstep compare --why` find it:

    python scripts/lab/planted_differences.py
    python scripts/lab/planted_differences.py --only 'seed,lr,dropout'

There are 40 differences: keys of the config, data, and changes of weights, gradients and order that no file records.
The table shows for each the step and the layer that are expected, and those that were found. An answer counts as right
if step, layer and cause are right. Two equal runs are compared, too: nothing may be found.

Exit codes: 0 all but two at most are right, 1 not.
"""

import argparse
import logging
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import lightning.pytorch as pl
import numpy as np
import torch
from PIL import Image

import lockstep
from lockstep.arithmetic.order import DataOrder
from lockstep.config.check import Config, check
from lockstep.config.portable import choose_kernels
from lockstep.data import Splits
from lockstep.data.build import open_data
from lockstep.launch.parent import launch
from lockstep.programs.common.showing import markdown
from lockstep.programs.common.training import open_without_test, train_quietly
from lockstep.programs.comparison.why import Answer, explain

WRONG = 2  # most wrong answers of all 40
STEPS = 12
BASE = (
    *("data=synthetic", "data.samples=200", "data.image_size=12", "data.num_classes=3", "batch_size=32"),
    *("data.augment={crop:1,flip:false,fill:zero}", "model.dropout=0.25", "max_epochs=2", "lr=0.05"),
    *("accelerator=cpu", "threads=1", "num_workers=0", "logger=none", "callbacks.console=null"),
    *("callbacks.dashboard=null", "callbacks.pictures=null", "checkpoint_keep=-1", "checkpoint_every=4"),
)
EACH = "checkpoint_every=1"
PIECES = (EACH, "pieces=2")
EXACT = (EACH, "pieces=2", "exact=true")
DDP = ("strategy=ddp", "devices=2")
FIRST = "net.conv1"
UNRECORDED = "nothing that"


class Change(pl.Callback):
    """Changes one thing at one step. No config has this callback, so no record names it.

    Args:
        what: weight, bit, gradient, lr, dropout.
        step: counted from 1.
        name: the parameter, if one is changed.
    """

    def __init__(self, what: str, step: int, name: str) -> None:
        self._what, self._step, self._name = what, step, name

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = trainer.global_step + 1 == self._step
        if self._what == "dropout":
            pl_module.net.dropout.train(not now)
        if self._what == "lr" and now:
            trainer.optimizers[0].param_groups[0]["lr"] *= 2

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._what == "gradient" and trainer.global_step + 1 == self._step:
            pl_module.get_parameter(self._name).grad.mul_(1.1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step and self._what in ("weight", "bit"):
            with torch.no_grad():
                flat = pl_module.get_parameter(self._name).view(-1)
                if self._what == "weight":
                    flat[0] += 0.1 * flat.norm()
                else:
                    flat.view(torch.int32)[0] ^= 1


def swapped(first: int) -> None:
    """Swap the samples of two steps of the first epoch, counted from 1: `first` and the one after it."""
    pieces = DataOrder.pieces

    def swapped_pieces(order: DataOrder, epoch: int, index: int) -> Any:
        return pieces(order, epoch, {first - 1: first, first: first - 1}.get(index, index) if epoch == 0 else index)

    DataOrder.pieces = swapped_pieces  # type: ignore[assignment,method-assign]


@dataclass(frozen=True)
class Plant:
    """A difference of two runs.

    Attributes:
        name: what differs.
        step: the first step at which the runs must differ; 0: before the first.
        layer: the first layer that must differ.
        cause: text that the cause must contain.
        overrides: of the second run.
        base: of both.
        change: arguments of `Change` in the second run.
        prepare: called in the second run's worker.
        data: `pixel` or `label`: what differs in the files of the second run.
        same_folder: whether these files replace those of the first run.
    """

    name: str
    step: int
    layer: str
    cause: str
    overrides: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    change: dict[str, Any] | None = None
    prepare: Callable[[], None] | None = None
    data: str = ""
    same_folder: bool = False


def key(name: str, override: str, step: int = 1, layer: str = FIRST) -> Plant:
    """Return a difference in one key of the config."""
    return Plant(name, step, layer, override.partition("=")[0], (override,))


def changed(
    name: str,
    what: str,
    step: int,
    parameter: str = "",
    base: tuple[str, ...] = (EACH,),
    overrides: tuple[str, ...] = (),
) -> Plant:
    """Return a change that no record names."""
    layer = parameter.rpartition(".")[0] or FIRST
    return Plant(name, step, layer, UNRECORDED, overrides, base, {"what": what, "step": step, "name": parameter})


PLANTS = [
    key("seed", "seed=1", step=0),
    key("lr", "lr=0.051"),
    key("momentum", "optimizer.momentum=0.8"),
    key("nesterov", "optimizer.nesterov=false"),
    key("weight decay", "optimizer.weight_decay=0.001"),
    key("factor of one layer's lr", "optimizer.lr_scale={net.logits.*:0.5}", layer="net.logits"),
    Plant("optimizer", 1, FIRST, "optimizer._target_", ("optimizer=adamw",)),
    key("clipping", "gradient_clip_val=0.1"),
    Plant("schedule", 1, FIRST, "scheduler._target_", ("scheduler=cosine",)),
    key("schedule: its peak", "scheduler.peak=0.5", step=2),
    key("schedule: its end", "scheduler.final=0.1", step=5),
    key("length of the run", "max_epochs=3", step=2),
    key("dropout", "model.dropout=0.3", layer="net.dropout"),
    key("label smoothing", "model.label_smoothing=0.1"),
    key("class weights", "model.class_weights=[1,2,3]"),
    key("frozen second layer", "model.freeze=[net.conv2.*]", layer="net.conv2"),
    key("frozen last layer", "model.freeze=[net.logits.*]", layer="net.logits"),
    key("decay of biases", "model.decay_norms_and_biases=true"),
    key("augmentation: crop", "data.augment.crop=2"),
    key("augmentation: flip", "data.augment.flip=true"),
    key("augmentation: fill", "data.augment.fill=reflect"),
    key("mixup", "data.mix=mixup"),
    key("balanced sampling", "data.sampling=balanced"),
    key("split of the data", "data.split_seed=1"),
    key("number of samples", "data.samples=210"),
    key("batch size", "batch_size=36"),
    key("number of pieces", "pieces=2"),
    key("bf16", "precision=bf16-mixed"),
    key("float64", "precision=64-true", step=0),
    key("initial weights", "init_from=<weights>", step=0),
    Plant("compression", 1, FIRST, "strategy.compression", (*DDP, "strategy.compression=bf16"), PIECES),
    Plant("lr and exact ddp on 2 devices", 1, FIRST, "lr", (*DDP, "lr=0.06"), EXACT),
    changed("a weight of the last layer", "weight", 7, "net.logits.weight"),
    changed("a bit of a weight", "bit", 9, "net.hidden.weight"),
    changed("the gradient of a layer", "gradient", 5, "net.conv2.weight"),
    changed("dropout off for one step", "dropout", 4),
    changed("a weight and ddp on 2 devices", "weight", 7, "net.hidden.weight", PIECES, overrides=DDP),
    Plant("two steps swapped", 5, FIRST, UNRECORDED, base=(EACH,), prepare=partial(swapped, 5)),
    Plant("one pixel", 4, FIRST, "data.csv", data="pixel"),
    Plant("one label in the same folder", 3, FIRST, "fingerprint", base=(EACH,), data="label", same_folder=True),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of differences, with commas")
    only = [name for name in parser.parse_args().only.split(",") if name]
    plants = [plant for plant in PLANTS if not only or plant.name in only]
    torch.set_num_threads(1)  # this process forks, and a child lacks the threads that torch has started
    logging.disable(logging.WARNING)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        rows, wrong = try_all(plants, Path(work))
    print(markdown(("what differs", "expected", "found", "what differs first", "cause", ""), rows))
    print(f"\n{len(plants) - wrong} of {len(plants)} right, {time.monotonic() - began:.0f} s")
    return int(wrong > (0 if only else WRONG))


def try_all(plants: Sequence[Plant], work: Path) -> tuple[list[tuple[str, ...]], int]:
    """Return a row for each difference, and how many answers are wrong."""
    firsts: dict[tuple[str, ...], Path] = {}  # first runs, by their overrides
    rows: list[tuple[str, ...]] = []
    wrong = 0
    control = [train((*BASE, EACH), work / name) for name in ("same_a", "same_b")]
    answer = explain(*control)
    right = answer.step is None and answer.text.startswith("same weights at every recorded step, to the bit (12 steps,")
    rows.append(("nothing", "same", answer.text.partition(",")[0], "", "", "right" if right else "WRONG"))
    wrong += not right
    firsts[(EACH,)] = control[0]
    for number, plant in enumerate(plants):
        files, base = work / f"files_{number}", plant.base
        if plant.data:
            write_images(files / "a")
            base = (*base, *image_list(files / "a"))
        if base not in firsts:
            firsts[base] = train((*BASE, *base), work / f"first_{number}")
        if plant.data:
            change_file(plant, files, (*BASE, *base))
        overrides = (*BASE, *base, *plant.overrides)
        if plant.data and not plant.same_folder:
            overrides += image_list(files / "b")
        weights = firsts[(EACH,)] / "checkpoints" / "last.ckpt"
        overrides = tuple(each.replace("<weights>", str(weights)) for each in overrides)
        second = train(overrides, work / f"second_{number}", plant.change, plant.prepare)
        answer = explain(firsts[base], second)
        right = verdict(answer, plant)
        wrong += not right
        rows.append((plant.name, f"{plant.step}, {plant.layer}", *shown(answer), "right" if right else "WRONG"))
        print(
            f"{number + 1} of {len(plants)}: {plant.name}{'' if right else f': WRONG: {answer.text}'}", file=sys.stderr
        )
        shutil.rmtree(second)
    return rows, wrong


def verdict(answer: Answer, plant: Plant) -> bool:
    exact = answer.step is not None and answer.since >= answer.step - 1
    named = any(plant.cause in cause for cause in answer.causes) or not plant.cause
    return exact and (answer.step, answer.layer) == (plant.step, plant.layer) and named


def shown(answer: Answer) -> tuple[str, str, str]:
    cause = "not in the config" if any(UNRECORDED in each for each in answer.causes) else "".join(answer.causes[:1])
    cause = re.sub(r"/\S+/", "", cause)  # folders
    return f"{answer.step}, {answer.layer}", answer.what.partition(", by ")[0], cause


# --- runs -------------------------------------------------------------------------------------------------------------


def train(
    overrides: tuple[str, ...],
    folder: Path,
    change: dict[str, Any] | None = None,
    prepare: Callable[[], None] | None = None,
) -> Path:
    """Train a run in its folder and return the folder."""
    config = check(composed(overrides))
    choose_kernels(config.layout.exact)
    folder.mkdir()
    if change:
        extra = {"_target_": "planted_differences.Change", **change}
        config = replace(config, callbacks={**config.callbacks, "change": extra})
    launch(_work, config, open_without_test(config), folder, prepare, layout=config.layout)
    return folder


def _work(config: Config, data: Splits, folder: Path, prepare: Callable[[], None] | None) -> None:
    if prepare is not None:
        prepare()
    train_quietly(config, data, folder)


# --- images -----------------------------------------------------------------------------------------------------------


def image_list(folder: Path) -> tuple[str, ...]:
    """Return overrides for the images in a folder, in the place of those for generated images."""
    return ("data=image_list", f"data.csv={folder / 'list.csv'}", "data.channels=1", "data.image_size=12")


def write_images(folder: Path) -> None:
    """Write images of three classes, and their list."""
    count = 200
    folder.mkdir(parents=True)
    images = np.random.default_rng(3).integers(0, 256, (count, 12, 12), dtype=np.uint8)
    parts = ["train"] * (count - 40) + ["val"] * 20 + ["test"] * 20
    lines = ["path,label,split"]
    for number, (image, part) in enumerate(zip(images, parts, strict=True)):
        Image.fromarray(image).save(folder / f"{number:03}.png")
        lines.append(f"{number:03}.png,{'abc'[number % 3]},{part}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")


def change_file(plant: Plant, files: Path, overrides: tuple[str, ...]) -> None:
    """Change a pixel or the label of a file that the step `plant.step` takes first."""
    config = check(composed(overrides))
    order = open_data(config.data, config.data_dir, config.seed).order(config.layout, config.seed)
    number = int(order.step(*order.position(plant.step - 1))[0])  # the training set is the list's first part
    folder = files / "a" if plant.same_folder else shutil.copytree(files / "a", files / "b")
    if plant.data == "pixel":
        pixels = np.asarray(Image.open(folder / f"{number:03}.png")).copy()
        pixels[5, 5] ^= 64
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    else:
        text, old, new = (folder / "list.csv").read_text(), "abc"[number % 3], "bca"[number % 3]
        (folder / "list.csv").write_text(text.replace(f"{number:03}.png,{old}", f"{number:03}.png,{new}"))


def composed(overrides: tuple[str, ...]) -> lockstep.Composed:
    """Return the config of a run. The last override of a key counts."""
    by_key = {each.partition("=")[0]: each for each in overrides}
    if by_key["data"] == "data=image_list":
        del by_key["data.samples"], by_key["data.num_classes"]
    return lockstep.compose(*by_key.values())


if __name__ == "__main__":
    sys.exit(main())
