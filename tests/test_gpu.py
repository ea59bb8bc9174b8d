"""What only a GPU can show: run these first where there is one. Everything else about it is tested on the CPU."""

from pathlib import Path

import pytest
from conftest import CUDA_VISIBLE_DEVICES, RANDOM, Program, apart
from traces import traced

pytestmark = pytest.mark.skipif(not CUDA_VISIBLE_DEVICES, reason="there is no GPU")


@pytest.fixture(autouse=True)
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES)


WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize", "cuCtxSynchronize")
TASK = (
    *RANDOM,
    *("accelerator=gpu", "data.samples=600", "batch_size=128", "pieces=4", "model.dropout=0.3"),  # 4 steps and a tail
    *("callbacks=default", "callbacks.console=null", "callbacks.dashboard=null"),
)


def test_resident_data_moves_no_bit(tmp_path: Path) -> None:
    actual = [
        Program(tmp_path / choice)(*TASK, "exact=true", f"speed.resident={choice}") for choice in ("true", "false")
    ]
    assert actual[0].summary["weights_sha256"] == actual[1].summary["weights_sha256"]


@pytest.mark.parametrize("pieces", [1, 4])
def test_compiled_weights_agree(tmp_path: Path, pieces: int) -> None:
    task = (*TASK, f"pieces={pieces}", "precision=64-true", "optimizer=sgd")
    plain, other = (Program(tmp_path / name)(*task, f"compile={name}") for name in ("false", "true"))
    assert apart(other, plain) < 1e-10


@pytest.mark.parametrize("more", [(), ("pieces=4",), ("compile=true", "precision=bf16-mixed")])
def test_a_step_waits_for_nothing(tmp_path: Path, more: tuple[str, ...]) -> None:
    """No point of the dashboard is due. The wait for an event of one step before (`nonfinite=stop`) is none."""
    task = ("data=synthetic", "data.samples=20000", "batch_size=128", "log_every=1000000", "threads=1")
    happened = traced(["accelerator=gpu", *task, *more], tmp_path)  # 140 steps without an epoch's end
    assert {name: happened[name] for name in WAITING if happened.get(name)} == {}
