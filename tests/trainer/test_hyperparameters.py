"""What checkpoints have of hyperparameters: `load_from_checkpoint` makes the same module and data module."""

import enum
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from trainer.small import Data, Net, loader, trainer

from lockstep.checkpoint import io as checkpoint_io
from lockstep.errors import UserError


class Activation(enum.Enum):
    RELU, TANH = "relu", "tanh"


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Made(Net):
    """A module that is made from one hyperparameter."""

    def __init__(self, value: Any = "the default") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.value = value


class OfConfig(Net):
    """A module whose hyperparameters are a config."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters(cfg)
        self.value = cfg["net"]["width"]


CONFIG = {"net": {"width": 3, "sizes": [1, 2]}, "lr": 0.1, "same": "${lr}"}
PLAIN = {"net": {"width": 3, "sizes": [1, 2]}, "lr": 0.1, "same": 0.1}


def last_of(folder: Path, module: Any, *data: Any, **options: Any) -> Path:
    trainer(folder, max_steps=1, **options).fit(module, *(data or [loader()]))
    [file] = folder.rglob("last.ckpt")
    torch.load(file, weights_only=True)
    return file


@pytest.mark.parametrize(
    ("value", "loaded"),
    [
        (np.float64(0.07), 0.07),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (Path("a/b"), "a/b"),
        ({"sizes": (np.int32(2), 3), Path("a"): [np.float64(1.5)]}, {"sizes": (2, 3), "a": [1.5]}),
        (OmegaConf.create(CONFIG), PLAIN),
        (OmegaConf.create([1, {"a": 2}]), [1, {"a": 2}]),
        ({"of": OmegaConf.create(CONFIG)}, {"of": PLAIN}),
        (torch.float16, torch.float16),
        (None, None),
    ],
)
def test_what_is_as_good_as_plain_data_is_saved(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, value: Any, loaded: Any
) -> None:
    file = last_of(tmp_path, Made(value))
    made = Made.load_from_checkpoint(file)
    assert made.value == loaded
    assert type(made.value) is type(loaded)
    assert not [each for each in recwarn if "hyperparameters" in str(each.message)]


@pytest.mark.parametrize(
    "value",
    [
        Activation.TANH,
        Level.HIGH,
        torch.nn.ReLU(),
        len,
        np.arange(3),
        Namespace(a=1),
        {"activation": Activation.TANH, "width": 3},
        OmegaConf.create({"a": "${nothing}"}),
        OmegaConf.create({"a": Activation.TANH}),
    ],
)
def test_of_the_rest_a_line_names_the_argument(tmp_path: Path, value: Any) -> None:
    line = "hyperparameters value of Made are no plain data, so checkpoints leave them out: Made.load_from_checkpoint"
    with pytest.warns(UserWarning, match=line):
        file = last_of(tmp_path, Made(value))
    assert checkpoint_io.load(file)["hyper_parameters"] == {}
    assert Made.load_from_checkpoint(file, value=value).value is value


@pytest.mark.parametrize("cfg", [CONFIG, OmegaConf.create(CONFIG)], ids=["dict", "config"])
def test_a_config_as_hyperparameters(tmp_path: Path, cfg: Any) -> None:
    file = last_of(tmp_path, OfConfig(cfg), logger=CSVLogger(tmp_path))
    made = OfConfig.load_from_checkpoint(file)
    assert made.value == 3
    assert dict(made.hparams) == (CONFIG if cfg is CONFIG else PLAIN)
    if cfg is not CONFIG:
        assert made.hparams.lr == 0.1  # type: ignore[attr-defined]


class Sized(Data):
    """A data module with hyperparameters and a state."""

    def __init__(self, size: Any = 7, root: Any = None, other: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters("size", "root", "other")
        self.fits = 0

    def state_dict(self) -> dict[str, Any]:
        return {"fits": self.fits + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fits = state_dict["fits"]


def test_those_of_a_data_module_are_logged_and_saved(tmp_path: Path) -> None:
    line = "hyperparameters other of Sized are no plain data, so checkpoints leave them out: Sized.load_from_checkpoint"
    logger = CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match=line):
        file = last_of(tmp_path, Made(1.5), Sized(np.int64(9), Path("a"), len), logger=logger)
    made = Sized.load_from_checkpoint(file)
    assert (made.hparams["size"], made.hparams["root"], made.hparams["other"]) == (9, "a", None)
    assert made.fits == 1
    assert checkpoint_io.load(file)["datamodule_hyper_parameters"] == {"size": 9, "root": "a"}
    hparams = Path(logger.log_dir, "hparams.yaml").read_text()
    assert "size: " in hparams
    assert "value: 1.5" in hparams
    data = Sized(9)
    trainer(tmp_path / "more", max_epochs=2).fit(Made(1.5), data, ckpt_path=file)
    assert data.fits == 1, "its state is restored"


class SavesMore(Net):
    def __init__(self, more: Any) -> None:
        super().__init__()
        self.more, self.saves = more, 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saves += 1
        checkpoint["more"] = self.more


def test_what_a_checkpoint_cannot_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """The first save would refuse it, after an epoch."""
    module, begun = SavesMore(Path("x")), trainer(tmp_path, max_epochs=1)
    with pytest.raises(UserError, match=r"^on_save_checkpoint of SavesMore adds more, which is no plain data, so no"):
        begun.fit(module, loader())
    assert begun.global_step == 0
    trainer(tmp_path, max_epochs=1, enable_checkpointing=False).fit(module, loader())
    assert module.saves == 0
    plain = SavesMore([torch.ones(2), {"a": 1}])
    assert torch.load(last_of(tmp_path / "plain", plain), weights_only=True)["more"][1] == {"a": 1}
    assert plain.saves == 1, "the trial leaves no trace"
