"""Options of a user's classes that look like settings of the run."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
from conftest import composed

from lockstep.config.check import Config, check
from lockstep.errors import UserError
from lockstep.job.ignored_arguments import argument_notes, refuse_loader_keys

pytestmark = pytest.mark.usefixtures("whole_run")


class Images(pl.LightningDataModule):
    def __init__(
        self, batch_size: int = 32, num_workers: int = 0, shuffle: bool = True, max_epochs: int = 3
    ) -> None: ...


class CustomLr(pl.LightningModule):
    def __init__(self, lr: float = 1e-3, max_epochs: int = 100) -> None: ...


def config(data: dict[str, Any], model: dict[str, Any] | None = None, *overridden: str) -> Config:
    made = check(composed("batch_size=64", "max_epochs=2"), overridden=overridden)
    data = {"_target_": f"{__name__}.Images", **data}
    return replace(made, data=data, model={"_target_": "project.models.MnistCNN"} if model is None else model)


def test_the_batch_size_of_a_data_module_is_refused_on_the_command_line_and_named_in_a_file() -> None:
    refuse_loader_keys(config({"batch_size": 16}))
    refuse_loader_keys(config({"batch_size": 64}, None, "data.batch_size"))  # the run's
    for key in ("batch_size", "num_workers"):
        with pytest.raises(UserError, match=rf"^data\.{key}=16 has no effect, .*: give {key}=16$"):
            refuse_loader_keys(config({key: 16}, None, f"data.{key}"))
    (line,) = argument_notes(config({"batch_size": 16, "shuffle": False, "num_workers": None}))
    assert line.startswith("data.batch_size=16, data.shuffle=false: of loaders that the run does not use: batch_size=")
    assert argument_notes(config({"batch_size": 64})) == []


def test_the_same_options_of_an_opener_are_for_it_alone() -> None:
    of_opener = replace(config({}), data={"_target_": "project.data.digits", "batch_size": 16})
    refuse_loader_keys(replace(of_opener, overridden=("data.batch_size",)))
    assert argument_notes(of_opener) == []


def test_lengths_and_the_default_lr_of_a_class_are_named() -> None:
    custom = {"_target_": f"{__name__}.CustomLr"}
    assert argument_notes(config({"max_epochs": 3}, custom | {"max_epochs": 100})) == [
        "data.max_epochs=3 is an argument of its class only: the run has max_epochs=2",
        "model.max_epochs=100 is an argument of its class only: the run has max_epochs=2",
        f"lr=0.001 is the default of {__name__}.CustomLr: lr= changes it",
    ]
    assert argument_notes(config({}, custom, "lr")) == []
    assert argument_notes(config({}, custom | {"lr": 0.5, "max_epochs": 2})) == []
