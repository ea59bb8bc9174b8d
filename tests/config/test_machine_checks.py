"""The checks of a config that do not depend on its command line alone: the machine, and every number."""

from pathlib import Path

import pytest
from conftest import composed
from refusals import checked, refused_with

from lockstep.config import check as config
from lockstep.config.arguments import read_arguments
from lockstep.config.check import check
from lockstep.errors import UserError
from lockstep.launch import machine

pytestmark = pytest.mark.usefixtures("two_cores_no_gpu")


def test_names_of_groups_are_taken_in_any_form() -> None:
    arguments = ["-m", "model=mnist_cnn,resnet18", "logger='csv'", "experiment=[mnist_cnn]", "logger=[csv,none]"]
    read_arguments(arguments, "train")


@pytest.mark.usefixtures("whole_run")
def test_every_number_of_the_front_page_is_checked() -> None:
    """Not only those above: a word, a NaN or a list in place of any number is refused, and named."""
    raw = composed()
    texts = {"init_from", "resume", "experiment", "debug"}
    numbers = {key for key, value in raw.items() if isinstance(value, int | float) or value is None} - texts
    assert len(numbers) > 12
    for key in numbers:
        for bad in ([1, 2], float("nan"), "much"):
            with pytest.raises(UserError, match=f"^{key}="):
                check(raw | {key: bad})


def test_auto_is_refused_only_where_it_means_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ("precision=auto", "+optimizer.fused=true", "gradient_clip_val=1")
    monkeypatch.setattr(config, "computes_bf16", lambda accelerator: False)
    assert checked(*task).precision == "32-true"
    monkeypatch.setattr(config, "computes_bf16", lambda accelerator: True)
    refused_with(" ".join(task), "fused=true with precision=auto and gradient_clip_val")


@pytest.mark.parametrize(
    ("cpuinfo", "precision"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx512f avx512_bf16 avx512_vnni\n", "bf16-mixed"),
        ("flags\t\t: fpu amx_tile amx_bf16\nflags\t\t: fpu amx_tile amx_bf16\n", "bf16-mixed"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd i8mm bf16 dgh\n", "bf16-mixed"),
        ("processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f\nbugs\t\t: bf16\n", "32-true"),
        (None, "32-true"),  # no Linux
    ],
)
def test_precision_auto_is_what_the_processor_computes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, precision: str
) -> None:
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    monkeypatch.setattr(config, "computes_bf16", lambda accelerator: machine.computes_bf16(accelerator, str(file)))
    actual = checked("precision=auto")
    assert (actual.precision, actual.record["precision"]) == (precision, "auto")
    assert checked().precision == "32-true"
    assert checked("precision=bf16-mixed").precision == "bf16-mixed"  # who asks by name gets it


def test_tf32_is_refused_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    for has_tf32 in (True, False):
        monkeypatch.setattr(config, "computes_bf16", lambda accelerator, has_tf32=has_tf32: has_tf32)
        for more in ((), ("exact=true", "pieces=4"), ("precision=bf16-mixed",)):
            if has_tf32:
                assert checked("speed.tf32=true", *more).speed.tf32 is True
            else:
                refused_with(" ".join(["speed.tf32=true", *more]), "speed.tf32=true: this GPU has no TF32")
        assert checked("speed.tf32=false").speed.tf32 is False
