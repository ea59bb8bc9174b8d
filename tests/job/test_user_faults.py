"""Faults of a user's own module and data, as a line that names the cause and not only where torch noticed it."""

from pathlib import Path

import pytest
from conftest import Program

CODE = """
import lightning.pytorch as pl
import torch
from torch import nn

from lockstep import Source, Spec


class Flat(pl.LightningModule):
    def __init__(self, channels, image_size, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)
        self.out = nn.Linear(4 * (image_size - 2) ** 2, num_classes)

    def flat(self, x):
        return x.flatten(1)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.out(self.flat(self.conv(batch[0].float()))), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class AnySize(Flat):
    def flat(self, x):
        return nn.functional.adaptive_avg_pool2d(x, 10).flatten(1)


class Viewed(Flat):
    def flat(self, x):
        return x.view(x.size(0), -1)


class Images(torch.utils.data.Dataset):
    def __init__(self, labels, size):
        self.labels_made, self.size = labels, size

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((1, self.size, self.size), index, dtype=torch.uint8), index % self.labels_made


def images(labels=2, size=12):
    return Source(Images(labels, size), None, Spec(1, 12, ("a", "b")))
"""


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), ""),
        (
            ("model=viewed",),
            ": .view does not take images that lie as channels_last: use .reshape or .flatten",
        ),
        (("model=viewed", "speed.memory_format=contiguous"), ""),
        (("data.labels=3",), "has the label 2: it must be the number of its class, 0 to 1"),
        (("data.labels=3", "strategy=ddp", "devices=2"), "has the label 2: it must be the number of its class, 0 to 1"),
        (
            ("data.size=14", "model=any_size"),  # the net would take them
            "images of the training set are 1 x 14 x 14, and the data's Spec says 1 x 12 x 12: correct the Spec",
        ),
    ],
)
def test_the_line_names_the_cause(options: tuple[str, ...], line: str, processes: None, tmp_path: Path) -> None:
    (tmp_path / "of_a_user.py").write_text(CODE)
    for name, text in {
        "model/flat": "name: flat\n_target_: of_a_user.Flat\n",
        "model/viewed": "name: viewed\n_target_: of_a_user.Viewed\n",
        "model/any_size": "name: any_size\n_target_: of_a_user.AnySize\n",
        "data/own": "name: own\n_target_: of_a_user.images\nlabels: 2\nsize: 12\n",
    }.items():
        (tmp_path / "pages" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pages" / f"{name}.yaml").write_text(text)
    fixed = ("--config-dir", str(tmp_path / "pages"), "model=flat", "data=own", "callbacks.checkpoint.monitor=null")
    short = ("batch_size=16", "max_steps=2", "logger=none", "num_workers=0")
    run = Program(tmp_path / "outputs", fresh=True)(
        *fixed, *short, *options, env={"PYTHONPATH": str(tmp_path)}, ok=False
    )
    assert run.returncode == (2 if line else 0), run.stderr
    assert not line or line in run.stderr.splitlines()[-1]
