"""What TensorBoard gets to show, read back from the event files of whole runs."""

import itertools
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, Program, Run
from event_files import Board
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from omegaconf import OmegaConf
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.util import tensor_util
from torch import Tensor, nn
from torchmetrics.classification import MulticlassConfusionMatrix

from lockstep.arithmetic.layout import resolve
from lockstep.data import Spec, StepData
from lockstep.data.build import open_data
from lockstep.testing.fake_gpu import DEVICE, WAITS, fake_gpu
from lockstep.vision.callbacks import Pictures
from lockstep.vision.callbacks.pictures import Mistakes, count_classes


@pytest.fixture(scope="module")
def ddp(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return one run on two workers that goes on for an epoch after its end."""
    program = Program(tmp_path_factory.mktemp("board") / "outputs")
    options = (*TINY, "strategy=ddp", "devices=2", "log_every=2")
    run = program(*options, "callbacks.pictures.seconds=0", "max_epochs=2")
    return program(f"resume={run.folder}", "max_epochs=3")


@pytest.fixture(scope="module")
def board(ddp: Run) -> Board:
    return Board(next((ddp.folder / "tensorboard").iterdir()))


@pytest.mark.usefixtures("processes")
def test_no_step_is_shown_twice(board: Board) -> None:
    assert [step for step, _ in board.curve("train/loss")] == [1, 2, 4, 6, 8, 10, 12, 13, 14, 16, 18]
    for tag in board.tags["scalars"]:
        steps = [step for step, _ in board.curve(tag)]
        assert all(before < after for before, after in itertools.pairwise(steps)) or tag == "epoch", (tag, steps)
    for tag in board.tags["images"]:
        steps = [event.step for event in board.events.Images(tag)]
        assert len(set(steps)) == len(steps)


@pytest.mark.usefixtures("processes")
def test_the_first_page_shows_what_matters(board: Board) -> None:
    layout = layout_pb2.Layout.FromString(board.tensor("custom_scalars__config__").item())
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert list(charts)[:4] == ["training loss", "validation loss", "training accuracy", "validation accuracy"]
    assert {"speed, samples per second", "peak memory, GiB"} <= set(charts)
    for title, patterns in charts.items():
        for pattern in patterns:
            assert any(re.search(pattern, tag) for tag in board.tags["scalars"]), (title, pattern)
    assert all(any(re.search(p, f"train/loss{fork}") for p in charts["training loss"]) for fork in ("_step", "_epoch"))
    shown = [tag for tag in board.tags["scalars"] if any(re.search(p, tag) for ps in charts.values() for p in ps)]
    assert {"workers/peak_gib", "workers/data_wait", "val_class/2"} <= set(shown)
    assert "test/acc" not in shown  # the control: not everything matches
    # TensorBoard's Time Series page sorts groups of tags by name, and opens two: no picture may be among them
    groups = sorted({tag.partition("/")[0] for kind in ("scalars", "images") for tag in board.tags[kind]})
    assert groups[:2] == ["headline", "test"]
    assert [tag for tag in board.tags["images"] if tag.partition("/")[0] in groups[:4]] == []
    for name in ("acc", "loss"):
        assert board.curve(f"headline/val_{name}") == board.curve(f"val/{name}")


@pytest.mark.usefixtures("processes")
def test_a_model_with_a_custom_metric(tmp_path: Path) -> None:
    """Regression has no accuracy: the first page and the charts show the metric that it names."""
    model = ("model=regression", "model.arch=squeezenet1_0", "data.task=regression", "data.num_classes=1")
    run = Program(tmp_path / "outputs")(*TINY, *model, "data.image_size=32", "max_steps=2")
    board = Board(next((run.folder / "tensorboard").iterdir()))
    assert board.curve("headline/val_mae") == board.curve("val/mae") != []
    layout = layout_pb2.Layout.FromString(board.tensor("custom_scalars__config__").item())
    titles = [chart.title for category in layout.category for chart in category.chart]
    assert titles[:4] == ["training loss", "validation loss", "training mae", "validation mae"]


@pytest.mark.usefixtures("processes")
def test_the_run_as_text(board: Board) -> None:
    about, config = (
        [tensor_util.make_ndarray(event.tensor_proto).item().decode() for event in board.events.Tensors(tag)]
        for tag in ("about/text_summary", "config/text_summary")
    )
    assert "step 32 samples = 2 pieces x 16 on 2 devices, 1 each | ddp on cpu\n" in about[0]
    assert "6 steps per epoch, 12 in all (max_epochs=2) | 32-true\n" in about[0]
    assert about[0].endswith("lr 0.02\n```")
    logged = OmegaConf.create(config[0].removeprefix("```yaml\n").removesuffix("```"))
    assert (logged["batch_size"], logged["strategy"]["name"], logged["callbacks"]["console"]["line_seconds"]) == (
        32,
        "ddp",
        30,
    )


@pytest.mark.usefixtures("processes")
def test_a_row_of_hyper_parameters_with_the_final_metrics(ddp: Run, board: Board) -> None:
    content = {name: meta.plugin_data.content for name, meta in board.events.summary_metadata.items()}
    logged = hparams.parse_session_start_info_plugin_data(content[hparams.SESSION_START_INFO_TAG])
    assert logged.hparams["lr"].number_value == 0.02
    assert logged.hparams["strategy.name"].string_value == "ddp"
    assert not logged.hparams["exact"].bool_value
    assert not [name for name in logged.hparams if name.startswith(("callbacks", "logger", "outputs", "model._"))]
    assert not {"epoch", "val/count", "test/correct"} & set(board.tags["scalars"])
    for name in ("val/acc", "val/loss", "test/acc", "test/loss"):
        assert board.curve(name)[-1] == (18, float(np.float32(ddp.summary["metrics"][name])))
    assert len({path.parent for path in ddp.folder.rglob("*tfevents*")}) == 1, "one run, one entry"


@pytest.mark.usefixtures("processes")
def test_pictures_of_what_went_wrong(ddp: Run, board: Board) -> None:
    drawn = [[event.step for event in board.events.Images(f"wrong/{split}_mistakes")] for split in ("val", "test")]
    assert drawn == [[6, 12, 18], [12, 18]], "each validation, of both lives, and their tests"
    assert board.image("wrong/test_mistakes").std() > 10, "not a blank page"
    for name in range(3):
        assert [step for step, _ in board.curve(f"val_class/{name}")] == [6, 12, 18]


# --- parts of it ------------------------------------------------------------------------------------------------------


def test_the_worst_mistakes_and_their_pixels_stay() -> None:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (60, 1, 4, 4), generator=generator)
    x, y = (pixels / 255 - 0.5) / 0.25, torch.randint(3, (60,), generator=generator)
    logits = torch.randn(60, 3, generator=generator)
    record = Mistakes(Spec(1, 4, ("a", "b", "c"), mean=(0.5,), std=(0.25,)), 5)
    for part in (slice(0, 7), slice(7, 8), slice(8, 60)):
        record.add(x[part], logits[part], y[part])
    losses = F.cross_entropy(logits.double(), y, reduction="none")
    wrong = logits.argmax(1) != y
    worst = [int(index) for index in losses.argsort(descending=True) if wrong[index]][:5]
    logged, labels, predictions, sure, images = zip(*record.worst, strict=True)
    assert logged == pytest.approx(losses[worst].tolist())
    assert list(labels) == y[worst].tolist()
    assert list(predictions) == logits[worst].argmax(1).tolist()
    assert sure == pytest.approx(logits[worst].softmax(1).amax(1).tolist())
    assert np.array_equal(images, pixels[worst].permute(0, 2, 3, 1))
    assert Mistakes(Spec(1, 4, ("a", "b")), 5).draw("none").axes, "a picture all the same"


def test_classes_are_counted_as_torchmetrics_counts_them() -> None:
    generator = torch.Generator().manual_seed(1)
    counts, reference = torch.zeros(2, 4, dtype=torch.int64), MulticlassConfusionMatrix(3)
    for valid in (True, False, True):
        logits, y = torch.randn(9, 3, generator=generator), torch.randint(3, (9,), generator=generator)
        count_classes(counts, logits, y if valid else y + 200, torch.tensor(valid))
        if valid:
            reference.update(logits, y)
    matrix = reference.compute()
    assert torch.equal(counts[:, :-1], torch.stack([matrix.diagonal(), matrix.sum(1)]))


@pytest.mark.parametrize("label", [1, 255])
def test_a_batch_whose_labels_are_no_classes_has_no_mistakes(label: int) -> None:
    record, logits = Mistakes(Spec(1, 4, ("a", "b"))), torch.tensor([[1.0, 0.0], [math.nan, 0.0]])
    y = torch.tensor([label, 0])
    record.add(torch.zeros(2, 1, 4, 4), logits, y, ((y >= 0) & (y < 2)).all())
    assert len(record.worst) == (label == 1)  # a loss of nan is none


def test_pictures_do_not_wait_for_a_gpu() -> None:
    drawing, trainer = Pictures(), Mock(testing=True)
    trainer.datamodule.num_local_samples.return_value = 8
    with fake_gpu() as gpu:
        drawing._hook, drawing._mistakes = Mock(), Mistakes(Spec(1, 4, ("a", "b", "c")))
        drawing._counts = torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
        for _ in range(2):
            x, y = torch.zeros(4, 1, 4, 4, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
            drawing._last_pass = x, torch.zeros(4, 3, device=DEVICE)
            drawing._count(trainer, None, None, (x, y))
        assert len(drawing._mistakes._values) == 5
        assert gpu.faults == {}
        drawing._counts.cpu()
        assert list(gpu.faults.values()) == [WAITS]  # the control


class Custom(pl.LightningModule):
    """A user's module as in a tutorial: nothing of ours, and `forward` gives logits."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.net = nn.Linear(144, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flatten(1))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/loss", self(batch[0]).mean())


class PastForward(Custom):
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.net(batch[0].flatten(1))


@pytest.mark.parametrize(
    ("module", "drawn"),
    [(Custom(), True), (Custom(classes=7), False), (PastForward(), False)],
    ids=["own", "other", "past"],
)
def test_any_module_that_gives_logits_is_drawn_and_others_are_left_alone(
    module: pl.LightningModule, drawn: bool, tmp_path: Path
) -> None:
    source = {"_target_": "lockstep.vision.data.synthetic", "samples": 60, "image_size": 12, "num_classes": 3}
    data = open_data(source, "data")
    layout = resolve(
        strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=8, pieces=1, equal_pieces=False
    )
    loggers = [TensorBoardLogger(tmp_path, name="", version="tensorboard"), CSVLogger(tmp_path, name="", version="csv")]
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=loggers, callbacks=[Pictures()], **quiet)
    trainer.test(module, datamodule=StepData(data, layout, seed=0), verbose=False)
    assert not module._forward_hooks
    tags = Board(tmp_path / "tensorboard").tags
    assert ("wrong/test_mistakes" in tags["images"]) is drawn
