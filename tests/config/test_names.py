"""Which known name a message proposes for an unknown one."""

import re
from pathlib import Path

import pytest

from lockstep.config.arguments import no_option_message, read_arguments
from lockstep.config.pages import group_file
from lockstep.config.value_checks import near_names, no_such_key_message
from lockstep.errors import UserError

KNOWN = ["cifar10", "cosine", "image_folder", "image_list", "onecycle", "resnet18", "resnet9", "tensorboard", "wandb"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resnet", ["resnet18", "resnet9"]),
        ("resnet50", ["resnet18", "resnet9"]),
        ("rsenet9", ["resnet9"]),
        ("imagenet", ["image_folder", "image_list"]),
        ("cifar100", ["cifar10"]),
        ("cosine_annealing", ["cosine"]),
        ("onecyclelr", ["onecycle"]),
        ("tb", ["tensorboard"]),
        ("wb", ["wandb"]),
        ("t", ["tensorboard"]),
        ("zebra", []),
    ],
)
def test_near_names(name: str, near: list[str]) -> None:
    assert near_names(name, KNOWN) == near


@pytest.mark.parametrize(
    "name",
    ["deepspeed", "deepspeed_stage_2", "ddp_spawn", "ddp_find_unused_parameters_true", "horovod"],
)
def test_a_strategy_of_others_is_not_supported(name: str) -> None:
    message = no_option_message("strategy", name)
    assert message.startswith(f"strategy={name}: not supported: use ddp on several devices")
    assert "did you mean" not in message
    assert no_option_message("strategy", "ddpp").startswith("strategy=ddpp: did you mean ddp?")


def test_a_net_that_has_no_file_may_be_one_of_the_libraries() -> None:
    message = no_option_message("model", "resnet")
    assert "did you mean resnet18 or resnet9 or small_resnet18?" in message
    assert message.endswith("others are in model=timm or model=torchvision with model.arch=<net>")


@pytest.mark.parametrize(
    ("key", "here"),
    [("gpus", "devices"), ("bs", "batch_size"), ("wd", "optimizer.weight_decay"), ("max_epoch", "max_epochs")],
)
def test_keys_that_people_type(key: str, here: str) -> None:
    config = {"batch_size": 1, "devices": 1, "max_epochs": 2, "optimizer": {"weight_decay": 0.1}}
    assert no_such_key_message(key, config).startswith(f"{key}: there is no such key; did you mean {here}?")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--devices", "2"], "devices=<value>"),
        (["--gpus=2"], "devices=2"),
        (["--learning-rate=0.1"], "lr=0.1"),
        (["--max_epochs=3"], "max_epochs=3"),
    ],
)
def test_a_flag_of_others_is_shown_as_an_override(arguments: list[str], pattern: str) -> None:
    with pytest.raises(UserError, match=rf"there is no such flag; an override has no dashes, {pattern}$"):
        read_arguments(arguments, "train")


def test_a_page_of_the_folder_of_a_command_is_a_choice(tmp_path: Path) -> None:
    (tmp_path / "debug").mkdir()
    (tmp_path / "debug" / "default.yaml").touch()
    read_arguments(["--config-dir", str(tmp_path), "debug=default"], "train")
    with pytest.raises(UserError, match=r"^debug=default: there is no such file; give "):
        read_arguments(["debug=default"], "train")


@pytest.mark.parametrize("flags", [["--config-name=big"], ["-cn", "big"], ["--config-path", "big"]])
def test_another_first_page_is_refused(flags: list[str]) -> None:
    """A resumed run and a sweep would begin with train.yaml."""
    with pytest.raises(UserError, match=r"a run begins with conf/train.yaml: .* give experiment=<name>$"):
        read_arguments([*flags, "lr=1"], "train")


def test_a_page_is_merged_with_pages_of_the_same_group_only() -> None:
    page = group_file("experiment", "mnist_cnn")  # its `defaults` choose files of other groups
    assert "defaults" not in page
    assert {"batch_size", "lr"} <= page.keys()
    assert group_file("model", "resnet18")["label_smoothing"] == 0.0, "of _classifier"


@pytest.mark.parametrize(
    ("argument", "right"),
    [
        ("trainer=ddp", "strategy=ddp devices=4"),
        ("+trainer=gpu", "accelerator=gpu"),
        ("logger=many_loggers", "logger=[tensorboard,csv]"),
        ("debug=fdr", "debug=batch"),
    ],
)
def test_a_choice_of_lightning_hydra_template_is_named_as_it_is_here(argument: str, right: str) -> None:
    with pytest.raises(UserError, match=rf": there is no such file; give {re.escape(right)}$"):
        read_arguments([argument], "train")
