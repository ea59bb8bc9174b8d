"""Fine-tuning: weights that a run begins with, what is frozen and unfrozen, factors of the learning rate."""

import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import site_pages
import torch
from conftest import NORMS, Program, Run, checkpoint_of, composed, summary_of, torchrun_environments
from small_data import fast_cnn

from lockstep.checkpoint import weights
from lockstep.config.check import check
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.job.build import make_module
from lockstep.report.report_lines import parameters_text
from lockstep.vision.parameters import Unfreeze

BASE = (*NORMS, "data.samples=150", "batch_size=30", "max_epochs=2")
FREEZE = "model.freeze=[net.conv1.*,net.norm1.*,net.conv2.*,net.norm2.*]"
SCALE = "optimizer.lr_scale={net.*3.*: 0.1, net.norm3.bias: 0.5}"
UNFREEZE = ("callbacks=unfreeze", "callbacks.unfreeze.epoch={net.????2.*: 1}")
TUNED = (
    *NORMS,
    *("data.samples=190", "data.num_classes=5", "data.val_fraction=0.1"),
    *("batch_size=24", "pieces=6", "max_epochs=3"),  # 171 images: eight steps an epoch, the last of 3, unevenly shared
    *("scheduler=multistep", "scheduler.milestones=[1]", "exact=true"),  # which does not follow from the run's length
    *("init_from=base", FREEZE, SCALE, *UNFREEZE),
)
LAYOUTS = {"one": (), "ddp": ("strategy=ddp", "devices=3"), "dp": ("strategy=dp", "devices=2")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run on three classes, and `base`, a copy of it."""
    place = tmp_path_factory.mktemp("tuning")
    made = Program(place / "outputs")(*BASE, cwd=place).folder
    shutil.copytree(made, place / "base")
    return place


def tuned(place: Path, name: str, *overrides: str, without: str = "", ok: bool = True) -> Run:
    remaining = [each for each in TUNED if not without or not each.startswith(without)]
    return Program(place / name)(*remaining, *overrides, cwd=place, ok=ok)


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_a_fine_tuned_run_is_the_same_bits_on_every_layout_also_resumed(place: Path) -> None:
    runs = {name: tuned(place, name, *layout) for name, layout in LAYOUTS.items()}
    hashes = {run.summary["weights_sha256"] for run in runs.values()}
    assert len(hashes) == 1
    output = runs["ddp"].stdout + runs["ddp"].stderr
    assert output.count("init_from: 24 of 26 tensors; not net.logits.weight, net.logits.bias") == 1
    more = "more parameters are trained from now on: net.conv2.weight, net.norm2.weight, net.norm2.bias"
    assert len(re.findall(rf"^epoch 2: \d+ {more}$", output, re.MULTILINE)) == 1
    assert re.search(
        r"^model fast_cnn \| [\d,]+ parameters: [\d,]+ trained, [\d,]+ frozen, [\d,]+ newly initialised$",
        output,
        re.MULTILINE,
    )

    before = checkpoint_of(place / "base", "best")["state_dict"]
    now = checkpoint_of(runs["one"].folder)
    after = now["state_dict"]
    still = {name for name in before if name in after and torch.equal(before[name], after[name])}
    assert still == {name for name in after if ".conv1." in name or ".norm1." in name}, "what is frozen to the end"
    groups = now["optimizer_states"][0]["param_groups"]
    assert {group["lr_scale"] for group in groups} == {1.0, 0.1, 0.5}
    lr = next(group["lr"] for group in groups if group["lr_scale"] == 1)
    assert all(group["lr"] == pytest.approx(lr * group["lr_scale"]) for group in groups)

    cut = tuned(place, "cut", *LAYOUTS["ddp"], "max_steps=11")  # in the epoch that has begun by unfreezing
    shutil.move(place / "base", place / "elsewhere")
    try:
        Program(place / "cut")(f"resume={cut.folder}", "max_steps=null", "strategy=dp", "devices=2", cwd=place)
    finally:
        shutil.move(place / "elsewhere", place / "base")
    assert {summary_of(cut.folder)["weights_sha256"]} == hashes

    controls = [
        tuned(place, "thawed", "model.freeze=[]", without="callbacks"),
        tuned(place, "frozen", without="callbacks"),
        tuned(place, "unscaled", SCALE.replace("0.1", "1.0")),
        tuned(place, "fresh", without="init_from"),
    ]
    assert len({run.summary["weights_sha256"] for run in controls} | hashes) == 5


@pytest.mark.usefixtures("processes")
def test_what_cant_begin_or_go_on_is_refused(place: Path) -> None:
    for overrides, pattern in [
        (("init_from=nowhere",), "error: init_from=nowhere: no such file"),
        (
            ("model.freeze=[]", "model.train_only=[net.conv*]"),
            "error: init_from=base: has no net.logits.weight, net.logits.bias, which are frozen and would stay random",
        ),
        (
            ("model.freeze=[net.logits.w*]",),
            "error: init_from=base: has no net.logits.weight, which are frozen and would stay random: train them",
        ),
        (
            ("callbacks=unfreeze", "callbacks.unfreeze.epoch={net.*5.*: 1}"),
            "error: callbacks.unfreeze.epoch: among the frozen parameters net.*5.*",
        ),
        (
            ("callbacks=unfreeze", "callbacks.unfreeze.epoch=3"),
            "error: callbacks.unfreeze.epoch=3: must be less than max_epochs=3",
        ),
    ]:
        run = tuned(place, "refused", *overrides, without="callbacks", ok=False)
        assert run.returncode == 2, str(run)
        assert pattern in run.stderr.splitlines()[-1]
        assert run.stderr.count("error") == 1

    outputs = Program(place / "outputs")
    short = outputs(
        *(each for each in TUNED if not each.startswith("init_from")), "init_from=last", "max_steps=2", cwd=place
    )
    assert "callbacks.unfreeze.epoch=1: begins after step 8, but max_steps=2 ends the run" in short.stderr
    base, begun = outputs(*BASE, "max_steps=1", cwd=place).folders[:2]  # one that is newer
    assert f"init_from='{base}'" in (begun / ".hydra" / "overrides.yaml").read_text()
    for overrides, pattern in [
        (("optimizer.lr_scale={net.conv4.*: 0.1, net.norm3.bias: 0.5}",), "only their factors may change"),
        (("init_from=base",), "leave one of them out"),
    ]:
        run = outputs(f"resume={begun}", *overrides, cwd=place, ok=False)
        assert run.returncode == 2
        assert pattern in run.stderr


# --- without runs ---


def offered(*overrides: str) -> Any:
    """Return a module of fast_cnn, as a run makes it."""
    config = check(composed("model=fast_cnn", "data=synthetic", "data.samples=90", "max_epochs=2", *overrides))
    return make_module(config, open_data(config.data, config.data_dir))


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"freeze": ["net.conv9.*"]}, r"^freeze=\['net.conv9.\*'\]: net.conv9.\* matches no .*'s name; there is net"),
        ({"freeze": ["*"]}, "no parameter is left to train"),
        ({"freeze": "net.conv1.*"}, r"must be a list, freeze=\[net.conv1.\*\]"),
        ({"train_only": ["net.conv9.*"]}, r"^train_only=\['net.conv9.\*'\]: net.conv9.\* matches no parameter's name"),
        ({"train_only": ["*"]}, r"^train_only=\['\*'\]: no parameter is left to freeze$"),
        ({"train_only": "net.conv1.*"}, r"^train_only=net.conv1.\*: must be a list, train_only=\[net.conv1.\*\]$"),
        ({"train_only": ["net.l*"], "freeze": ["net.conv1.*"]}, r"freeze=\['net.conv1.\*'\] is given too: give one of"),
    ],
)
def test_a_choice_of_parameters_that_does_nothing_is_refused(options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        fast_cnn(**options)


def test_train_only_freezes_all_others() -> None:
    def trained(**options: Any) -> set[str]:
        return {name for name, each in fast_cnn(**options).named_parameters() if each.requires_grad}

    assert trained(train_only=["net.logits.*", "net.norm4.bias"]) == {
        *("net.logits.weight", "net.logits.bias", "net.norm4.bias")
    }
    assert trained(train_only=["net.logits.*"]) == trained(freeze=["net.[!l]*"])
    assert len(trained()) > 10, "the control"


OF_TORCH = ("scheduler=constant", "~scheduler.warmup_steps", "+scheduler.max_lr=later:lr")
TARGET = "scheduler._target_=torch.optim.lr_scheduler."


@pytest.mark.parametrize(
    "schedule",
    [
        ("scheduler=onecycle",),
        (*OF_TORCH, f"{TARGET}OneCycleLR", "+scheduler.total_steps=later:total_steps"),
        (*OF_TORCH, f"{TARGET}CyclicLR", "+scheduler.base_lr=0.001", "+scheduler.step_size_up=2"),
    ],
    ids=["project", "OneCycleLR", "CyclicLR"],
)
def test_every_schedule_moves_each_group_by_its_factor(schedule: tuple[str, ...]) -> None:
    """Of several patterns that match, the last one decides."""
    model = offered("optimizer.lr_scale={net.conv*: 0.1, net.conv4.*: 0.01}", *schedule)
    made = model.configure_optimizers()
    groups, steps = made["optimizer"].param_groups, made["lr_scheduler"]["scheduler"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scales = {names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}
    assert {name: scale for name, scale in scales.items() if scale != 1} == {
        **dict.fromkeys(("net.conv1.weight", "net.conv2.weight", "net.conv3.weight"), 0.1),
        "net.conv4.weight": 0.01,
    }
    assert len(scales) == len(names)
    seen = set()
    for _ in range(3):
        lr = next(group["lr"] for group in groups if group["lr_scale"] == 1)
        assert [group["lr"] for group in groups] == pytest.approx([lr * group["lr_scale"] for group in groups])
        seen.add(lr)
        made["optimizer"].step()
        steps.step()
    assert len(seen) > 1


@pytest.mark.usefixtures("whole_run")
def test_factors_that_name_nothing_are_refused() -> None:
    with pytest.raises(UserError, match=r"^optimizer.lr_scale: net.fc.\* matches no parameter's name; there is net"):
        offered("optimizer.lr_scale={net.fc.*: 0.1}").configure_optimizers()
    with pytest.raises(UserError, match=r"^optimizer.lr_scale.net.conv1.\*=0: must be greater than 0"):
        offered("optimizer.lr_scale={net.conv1.*: 0}")
    with pytest.raises(UserError, match=r"^optimizer.lr_scale has no effect without .*param_groups: give both$"):
        offered("optimizer.lr_scale={net.conv1.*: 0.1}", "optimizer.param_groups=null")


class Hostile:
    def __reduce__(self) -> Any:
        return os.getcwd, ()


def test_weights_are_read_from_whatever_holds_them(tmp_path: Path) -> None:
    state = {name: torch.full_like(value, 2) for name, value in fast_cnn().net.state_dict().items()}

    def legacy(path: Path) -> None:
        torch.save(state, path, _use_new_zipfile_serialization=False)

    def safe(path: Path) -> None:
        pytest.importorskip("safetensors.torch").save_file(state, path)

    kinds: dict[str, Callable[[Path], None]] = {
        "bare.pth": lambda path: torch.save(state, path),
        "old.pth": legacy,
        "references.pth": lambda path: torch.save({"model": state, "epoch": 3}, path),
        "lightning.ckpt": lambda path: torch.save({"state_dict": {f"net.{k}": v for k, v in state.items()}}, path),
        "bare.safetensors": safe,
    }
    for name, save in kinds.items():
        model = fast_cnn(num_classes=4)
        save(tmp_path / name)
        begun = weights.load_weights("init_from", model, str(tmp_path / name))
        assert begun.message == "init_from: 24 of 26 tensors; not net.logits.weight, net.logits.bias"
        assert all((value == 2).all() for key, value in model.state_dict().items() if "logits" not in key)
        assert not (model.net.logits.weight == 2).any()


def test_parameters_are_counted(tmp_path: Path) -> None:
    torch.save(fast_cnn().net.state_dict(), tmp_path / "bare.pth")
    model = fast_cnn(num_classes=4)
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    model.net.conv1.requires_grad_(False)
    begun = weights.load_weights("init_from", model, str(tmp_path / "bare.pth"))
    total, frozen = sum(sizes.values()), sum(size for name, size in sizes.items() if name.startswith("net.conv1."))
    logits = sizes["net.logits.weight"] + sizes["net.logits.bias"]
    text = parameters_text(model, [*begun.not_loaded, "net.norm1.running_mean"])
    parts = f"{total - frozen:,} trained, {frozen:,} frozen, {logits:,} newly initialised"
    assert text == f"{total:,} parameters: {parts}"
    model.net.logits.requires_grad_(False)
    weights.refuse_frozen_unloaded("init_from=x", model, begun.not_loaded)  # frozen by its own code
    model.frozen_parameters = ["net.logits.weight", "net.logits.bias"]
    unfreeze = Unfreeze({"net.log*": 1})
    weights.refuse_frozen_unloaded("init_from=x", model, begun.not_loaded, [unfreeze])
    with pytest.raises(
        UserError, match=r"init_from=x: has no net\.logits\.weight, net\.logits\.bias, which are frozen"
    ):
        weights.refuse_frozen_unloaded("init_from=x", model, begun.not_loaded)


def test_files_without_usable_weights_are_refused_in_a_line(tmp_path: Path) -> None:
    torch.save({"net.conv1.weight": Hostile()}, tmp_path / "code.ckpt")
    torch.save({"net.conv1.weight": Hostile()}, tmp_path / "code.pth", _use_new_zipfile_serialization=False)
    torch.save([1, 2], tmp_path / "numbers.pth")
    torch.save({"net.conv1.weight": torch.zeros(1)}, tmp_path / "small.pth")
    (tmp_path / "half.pth").write_bytes((tmp_path / "small.pth").read_bytes()[:300])
    for name, pattern in [
        ("code.ckpt", "holds code, not only data: posix.getcwd"),
        ("code.pth", "holds code, not only data: posix.getcwd"),
        ("numbers.pth", "numbers.pth holds no tensors by name"),
        ("small.pth", "none of its weights fits"),
        ("half.pth", "can't be loaded as plain data"),
        ("missing.pth", "no such file"),
        ("", "best.ckpt: no such file"),
    ]:
        with pytest.raises(UserError, match=pattern) as caught:
            weights.load_weights("init_from", fast_cnn(), str(tmp_path / name))
        assert str(caught.value).startswith(f"init_from={tmp_path}")
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
def test_the_commands_of_the_page_do_what_it_describes(tmp_path: Path) -> None:
    page = site_pages.read("use/fine-tuning.md")
    commands = [command.words[2:] for command in page.commands if command.text.startswith("python")]
    assert [command[0].partition("=")[2] for command in commands[:5]] == ["base", "tuned", "head", "parts", "thaw"]
    for overrides in commands:
        if "model=timm" not in overrides or importlib.util.find_spec("timm"):
            run = Program(tmp_path)(*overrides, "threads=1", "logger=none", "max_steps=4", "data.val_fraction=0.02")
            assert ("init_from: 26 of 26 tensors" in run.stderr) == ("init_from=last" in overrides)


@pytest.mark.usefixtures("processes")
def test_of_two_machines_one_has_the_weights(place: Path, tmp_path: Path) -> None:
    """Two ranks of an engine, each in a folder of its own, of which rank zero's has what `init_from` names."""
    task = (*BASE, "max_epochs=1", "seed=3", "exact=true", "pieces=6")
    machines = [each | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for each in torchrun_environments()]
    programs = [Program(tmp_path / each["RANK"]) for each in machines]
    started = [
        program.start(*task, "strategy=ddp", "init_from=base", env=machine, cwd=home)
        for program, machine, home in zip(programs, machines, (place, tmp_path), strict=True)
    ]
    runs = [program.finish(each) for program, each in zip(programs, started, strict=True)]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(map(str, runs))
    one = Program(tmp_path / "one")(*task, "init_from=base", cwd=place).summary["weights_sha256"]
    assert runs[0].summary["weights_sha256"] == one
    fresh = Program(tmp_path / "fresh")(*task)
    assert fresh.summary["weights_sha256"] != one
