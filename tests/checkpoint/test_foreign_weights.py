"""init_from takes the weights out of files of other programs: other prefixes, sets, objects beside, other formats."""

import argparse
import collections
import datetime
import io
import pathlib
import types
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint import foreign_files
from lockstep.checkpoint.weights import LoadedWeights, copy_weights, load_weights, refuse_frozen_unloaded
from lockstep.errors import UserError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()


class Config(dict[str, Any]):
    """A config that is a dict, such as that of yacs, which also has attributes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(options)
        self.frozen = True


class Custom(argparse.Namespace):
    pass


TOTAL = len(Module().state_dict())


def filled(value: float, prefix: str = "") -> dict[str, Tensor]:
    state = Net().state_dict()
    return {prefix + name: torch.full_like(each.float(), value) for name, each in state.items()}


def loaded(path: Path, content: Any, value: float = 2, suffix: str = "", **options: Any) -> LoadedWeights:
    """Save a content, load it, and check that all weights have a value."""
    torch.save(content, path, **options)
    module = Module()
    result = load_weights("init_from", module, f"{path}{suffix}")
    assert result.message.startswith(f"init_from: {TOTAL} of {TOTAL} tensors"), result.message
    assert all((each == value).all() for each in module.state_dict().values())
    return result


@pytest.mark.parametrize(
    "prefix",
    [
        *("", "net.", "module.", "_orig_mod.", "model.", "module._orig_mod.", "net._orig_mod.", "model.backbone."),
        *("_orig_mod.module.", "module.net.", "model.net._orig_mod.", "encoder.", "a.b.c."),
    ],
)
def test_prefixes(tmp_path: Path, prefix: str) -> None:
    loaded(tmp_path / "a.pth", filled(2, prefix))
    beside = {"criterion.weight": torch.zeros(7, 7)}  # as in a checkpoint of Lightning
    loaded(tmp_path / "b.ckpt", {"state_dict": {**beside, **filled(2, prefix)}, "epoch": 3})


def test_names_that_fit_as_they_are_are_not_shortened(tmp_path: Path) -> None:
    both = {**filled(2, "net."), **filled(3, "ema."), **filled(3, "module.ema.")}
    assert "ema" in loaded(tmp_path / "a.pth", both).message


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model_state_dict": state},
        lambda state: {"net": state, "acc": 0.9},
        lambda state: {"state": {"model": state}},
        lambda state: {"state_dict": {"model": state}, "step": torch.tensor(3)},
        lambda state: {"generator": {"x": torch.zeros(4, 4)}, "classifier": state},
        lambda state: {"model": state, "args": argparse.Namespace(lr=0.1, path=pathlib.PosixPath("/x"))},
        lambda state: {
            "model": state,
            "args": Custom(lr=0.1),
            "acc": np.float64(0.5),
            "when": datetime.datetime(2020, 1, 1),
        },
        lambda state: {"model": state, "config": Config(lr=0.1, inner=Config(a=[1])), "max_accuracy": np.float32(1)},
        lambda state: {
            "model": state,
            "log": collections.defaultdict(list, loss=[1.0]),
            "n": types.SimpleNamespace(a=1),
        },
        lambda state: {"state_dict": state, "hyper_parameters": {"loss": nn.CrossEntropyLoss(), "a": np.arange(3)}},
        lambda state: Config(model=state),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_what_the_weights_are_in_and_what_lies_beside(tmp_path: Path, wrap: Callable[[Any], Any], zipped: bool) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    if not zipped and "hyper_parameters" in wrap({}):
        pytest.skip("torch's older format stores layers in another way, which is refused")
    net.blocks(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    content = wrap(filled(2))
    content["optimizer"] = optimizer.state_dict()
    loaded(tmp_path / "a.pth", content, _use_new_zipfile_serialization=zipped)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    message = loaded(tmp_path / "a.pth", {"model": filled(2), "args": argparse.Namespace(lr=1)}).message
    assert message.endswith("; not read: argparse.Namespace")


@pytest.mark.parametrize(
    ("raw", "average"),
    [
        ("model", "model_ema"),
        ("state_dict", "state_dict_ema"),
        ("model", "ema"),
        ("model", "ema_state_dict"),
        ("module", "module_ema"),
        ("net", "netEMA"),
    ],
)
def test_averaged_weights_are_named_and_taken_on_request(tmp_path: Path, raw: str, average: str) -> None:
    for order in ((raw, average), (average, raw)):
        sets = {raw: filled(2), average: filled(3, "module.")}
        message = loaded(tmp_path / "a.pth", {name: sets[name] for name in order}).message
        assert f"the file also has {average}" in message
        assert f"/a.pth:{average} takes it" in message
    assert f"averaged weights: {average}" in loaded(tmp_path / "a.pth", sets, 3, f":{average}").message
    assert f"averaged weights: {average}" in loaded(tmp_path / "a.pth", {average: filled(3)}, 3).message
    with pytest.raises(UserError, match=f"the file has no set other: it has {raw}, {average}"):
        loaded(tmp_path / "a.pth", {raw: filled(2), average: filled(3)}, 3, ":other")


def test_two_sets_that_fit_equally_are_named(tmp_path: Path) -> None:
    content = {"online": filled(2), "target": filled(3)}
    assert "the file also has target" in loaded(tmp_path / "a.pth", content).message
    loaded(tmp_path / "a.pth", content, 3, ":target")


def test_sets_side_by_side_in_one_mapping(tmp_path: Path) -> None:
    """As MoCo saves them."""
    state = {**filled(2, "module.encoder_q."), **filled(3, "module.encoder_k.")}
    content = {"arch": "resnet18", "state_dict": state}
    message = loaded(tmp_path / "a.pth", content).message
    assert "without the prefix encoder_q.; the file also has state_dict.encoder_k:" in message
    loaded(tmp_path / "a.pth", content, 3, ":state_dict.encoder_k")


def test_a_path_with_a_colon(tmp_path: Path) -> None:
    loaded(tmp_path / "a:b.pth", filled(2))
    loaded(tmp_path / "a:b.pth", {"model": filled(2), "model_ema": filled(3)}, 3, ":model_ema")


def test_the_file_and_the_model_are_shown_if_nothing_fits(tmp_path: Path) -> None:
    """Of several sets, the largest."""
    sets = {"other": {"x": torch.zeros(3)}, "model": {"body.kernel": torch.zeros(5, 5), "body.bias": torch.zeros(5)}}
    torch.save(sets, tmp_path / "a.pth")
    pattern = r"the file has body.kernel 5x5, body.bias 5; the model has net.conv1.weight 4x1x3x3, net.*more"
    with pytest.raises(UserError, match=pattern):
        load_weights("init_from", Module(), str(tmp_path / "a.pth"))


def test_copy_weights_keeps_its_meaning() -> None:
    module = Module()
    assert copy_weights(module, {"conv1.weight": torch.full((4, 1, 3, 3), 2.0)}) == list(module.state_dict())[1:]
    assert torch.equal(module.net.conv1.weight, torch.full((4, 1, 3, 3), 2.0))
    bias = {"conv1.bias": torch.full((4,), 2.0)}  # without a weight nothing tells a prefix
    assert len(copy_weights(module.net, bias)) == TOTAL - 1
    assert torch.equal(module.net.state_dict()["conv1.bias"], bias["conv1.bias"])


def test_nan_is_refused(tmp_path: Path) -> None:
    torch.save(filled(float("nan")), tmp_path / "all.pth")
    one = filled(2)
    one["norm.running_var"][1] = float("nan")
    torch.save(one, tmp_path / "one.pth")
    for name, pattern in ("all", "NaN in net.blocks.0.bias, .* more"), ("one", "NaN in net.norm.running_var: give"):
        with pytest.raises(UserError, match=pattern):
            load_weights("init_from", Module(), str(tmp_path / f"{name}.pth"))
    unused = {**filled(2), "head.weight": torch.full((3, 3), float("nan"))}
    loaded(tmp_path / "unused.pth", unused)


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")


def save_script(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(path))


KINDS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), "git lfs pull"),
    (lambda path: path.write_text("\n<!DOCTYPE html><html>login</html>"), "a web page, not the file"),
    (lambda path: path.write_text("vision/resnet18.pth\n"), "a text file, not weights: it begins with 'vision/resnet"),
    (lambda path: path.write_text('{"error": "not found", "é": 1}' * 500), "a text file, not weights"),
    (lambda path: path.write_bytes(b""), "an empty file"),
    (lambda path: np.savez(open(path, "wb"), a=np.zeros(3)), "a .npz file of numpy"),  # noqa: SIM115
    (lambda path: np.save(open(path, "wb"), np.zeros(3)), "an array of numpy"),  # noqa: SIM115
    (lambda path: path.write_bytes(b"\x1f\x8b" + bytes(90)), "compressed by gzip: unpack it"),
    (write_zip, "a zip file that torch.save did not write"),
    (save_script, "a TorchScript program, which is code"),
    (lambda path: torch.save(nn.Linear(2, 2), path), "holds no tensors by name, but a whole torch.nn.modules.linear"),
    (lambda path: torch.save({"model": nn.Linear(2, 2)}, path), "but a whole torch.nn.modules.linear.Linear, which"),
]


@pytest.mark.parametrize(("write", "pattern"), KINDS)
def test_what_the_file_is_instead(tmp_path: Path, write: Callable[[Path], Any], pattern: str) -> None:
    write(tmp_path / "a.pth")
    with pytest.raises(UserError, match=pattern) as refusal:
        load_weights("init_from", Module(), str(tmp_path / "a.pth"))
    assert "\n" not in str(refusal.value)


def test_safetensors_are_known_by_their_content(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(filled(2, "module."), tmp_path / "a.pth")
    torch.save(filled(2), tmp_path / "b.safetensors")
    for name in ("a.pth", "b.safetensors"):
        assert f"{TOTAL} of {TOTAL}" in load_weights("init_from", Module(), str(tmp_path / name)).message


# --- frozen layers ----------------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """A frozen part with a norm, one without parameters and own buffers, and a head that is trained."""

    def __init__(self, frozen_parameters: Sequence[str] = ()) -> None:
        super().__init__()
        self.frozen_parameters = frozen_parameters
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
        self.body.register_buffer("center", torch.zeros(4))
        self.body.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.head = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
        self.body.requires_grad_(False)


BODY = [name for name, _ in Frozen().named_parameters() if name.startswith("body.")]


def missing(path: Path, *names: str) -> list[str]:
    """Load a file without some tensors, and return what the module lacks then."""
    torch.save({key: each for key, each in Frozen().state_dict().items() if key not in names}, path)
    return load_weights("init_from", Frozen(), str(path)).not_loaded


@pytest.mark.parametrize("name", ["body.1.running_mean", "body.1.running_var", "body.2.running_var", "body.center"])
@pytest.mark.parametrize("by_option", [True, False])
def test_buffers_of_frozen_layers_must_be_in_the_file(tmp_path: Path, name: str, by_option: bool) -> None:
    freeze = BODY if by_option else []
    not_loaded = missing(tmp_path / "a.pth", name)
    with pytest.raises(UserError, match=f"^init_from=a: has no {name}, which frozen layers compute with: give"):
        refuse_frozen_unloaded("init_from=a", Frozen(freeze), not_loaded)
    refuse_frozen_unloaded("init_from=a", Frozen(freeze), not_loaded, [types.SimpleNamespace(trains_later=["body.*"])])
    trained = Frozen(freeze)
    trained.body.requires_grad_(True)
    refuse_frozen_unloaded("init_from=a", trained, not_loaded)


def test_buffers_that_no_frozen_layer_needs_may_be_missing(tmp_path: Path) -> None:
    counters = [name for name in Frozen().state_dict() if name.endswith("num_batches_tracked")]
    head = [name for name in Frozen().state_dict() if name.startswith("head.1.running")]
    refuse_frozen_unloaded("init_from=a", Frozen(BODY), missing(tmp_path / "a.pth", *counters, *head))
    whole_body = [name for name in Frozen().state_dict() if name.startswith("body.")]
    refuse_frozen_unloaded("init_from=a", Frozen(), missing(tmp_path / "a.pth", *whole_body))  # by its own code


def test_the_file_is_broadcast_by_the_same_road(tmp_path: Path) -> None:
    """Ranks read rank zero's bytes, in which stand-ins are found as in the file."""
    for older in (False, True):
        torch.save(
            {"model": filled(2), "args": argparse.Namespace(a=1)},
            tmp_path / "a.pth",
            _use_new_zipfile_serialization=not older,
        )
        source = io.BytesIO((tmp_path / "a.pth").read_bytes())
        names = foreign_files.foreign_names(source)
        assert names == ["argparse.Namespace"] == foreign_files.foreign_names(tmp_path / "a.pth")
        assert foreign_files.load(source, names)["args"] == {}
