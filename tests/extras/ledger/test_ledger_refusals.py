"""What can't be combined is refused in one line."""

import sys
from pathlib import Path

import pytest
from conftest import composed
from refusals import refused_with

from lockstep.config import check as config
from lockstep.errors import UserError
from lockstep.launch import machine
from lockstep_extras.ledger.ledger_file import decisive_config
from lockstep_extras.programs import verify

pytestmark = pytest.mark.usefixtures("two_cores_no_gpu")


def test_a_ledger_without_checkpoints_is_refused() -> None:
    refused_with("extras=[ledger] callbacks=none", "ledger.* and no callbacks.checkpoint don't go together")


def test_a_ledger_of_a_run_that_survives_is_refused() -> None:
    combination = "extras=[ledger] exact=true devices=2 survive=true"
    refused_with(combination, r"survive=true and extras=\[ledger\] don't go together: .*max_restarts=3")


def test_a_ledger_of_a_checkpoint_in_parts_is_refused() -> None:
    combination = "strategy=fsdp devices=2 strategy.checkpoint=sharded extras=[ledger]"
    refused_with(
        combination,
        r"ledger.* and strategy\.checkpoint=sharded don't go together: no device has the whole checkpoint to hash",
    )


@pytest.mark.usefixtures("whole_run")
def test_a_callback_counts_unless_its_class_changes_no_weights() -> None:
    """Whatever package it comes from."""

    def callbacks(*overrides: str) -> set[str]:
        return set(decisive_config(config.check(composed("extras=[ledger]", *overrides)))["callbacks"])

    assert callbacks() == set()
    assert callbacks("callbacks=early_stopping", "~callbacks.pictures") == {"early_stopping"}


def test_tf32_counts_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a CPU has none, so a ledger that was written before there was the key still matches."""

    def speed(*overrides: str) -> dict[str, object]:
        actual: dict[str, object] = decisive_config(config.check(composed("extras=[ledger]", *overrides)))["speed"]
        return actual

    assert speed() == {"memory_format": "auto"} == speed("speed.tf32=false")
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    assert speed() == {"memory_format": "auto", "tf32": "auto"}
    assert speed("speed.tf32=false") != speed()


def test_a_run_without_a_ledger_is_refused_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lockstep_extras.ledger.verifying", None)  # an import of it fails
    with pytest.raises(UserError, match=rf"^run={tmp_path}/no: there is no such folder: give the folder of a run"):
        verify.main(["steps=3", f"run={tmp_path}/no"])
    with pytest.raises(UserError, match=rf"^run={tmp_path} has no ledger\.jsonl: start a run with extras=\[ledger\]$"):
        verify.main([f"run='{tmp_path}'"])
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(ImportError):
        verify.main([f"run={tmp_path}"])
