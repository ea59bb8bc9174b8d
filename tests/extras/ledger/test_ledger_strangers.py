"""What the ledger of a stranger's run may name: what the pages of the project and of the package name. More of
promise 9: tests/test_promise_9_*, tests/programs/test_strangers.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import composed
from programs.test_strangers import NAMED_NOWHERE, PLACES, TARGET, put

from lockstep.config.check import check
from lockstep.errors import UserError
from lockstep.programs.common import training
from lockstep_extras.ledger.ledger_file import LEDGER_FILE, decisive_config
from lockstep_extras.ledger.recomputing import part_of_run

# What a run's ledger does not record, or the command has its own of.
NOT_BUILT = ("logger.x", "sweep.x", "strategy")


def recorded(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return what a ledger records of a run, changed."""
    config = json.loads(
        json.dumps(decisive_config(check(composed("extras=[ledger]", "exact=true", "accelerator=cpu"))))
    )
    config["debug"] = {"trainer": {"profiler": composed("debug=profile")["debug"]["trainer"]["profiler"]}}
    change(config)
    return {"config": config}


def verified(change: Callable[[dict[str, Any]], None]) -> Any:
    raw = composed("run=x", page="verify")
    return part_of_run(recorded(change), raw, Path("a", LEDGER_FILE)).config


def test_a_ledger_has_built_what_a_page_names() -> None:
    """The control."""
    assert verified(lambda config: None).debug.trainer["profiler"]["_target_"]


@pytest.mark.parametrize("place", PLACES)
def test_a_ledger_has_nothing_built_that_no_page_names(place: str) -> None:
    if place in NOT_BUILT:
        config = verified(lambda config: put(config, place))
        assert TARGET not in str(config.logger)
        assert TARGET not in str(config.strategy)
    else:
        with pytest.raises(UserError, match=NAMED_NOWHERE):
            verified(lambda config: put(config, place))


@pytest.mark.parametrize("key", ["logger", "resume", "checkpoint_keep", "outputs"])
def test_a_ledger_does_not_choose_where_files_are_written(key: str, tmp_path: Path) -> None:
    named = "lightning.pytorch.loggers.CSVLogger"  # by conf/logger/csv.yaml
    values = {"logger": {"csv": {"_target_": named, "save_dir": str(tmp_path)}}, "checkpoint_keep": 77}
    config = verified(lambda config: config.update({key: values.get(key, str(tmp_path))}))
    honest = verified(lambda config: None)
    assert all(getattr(config, each) == getattr(honest, each) for each in ("logger", "resume", "checkpoint_keep"))
    assert str(tmp_path) not in str(config.record)


def test_a_ledgers_callback_that_only_writes_is_left_out(tmp_path: Path) -> None:
    """Its options may name any folder: that of another run of the user's."""
    checkpoint = composed()["callbacks"]["checkpoint"] | {"folder": str(tmp_path)}
    average = composed("callbacks=ema")["callbacks"]["ema"]
    config = verified(lambda config: config["callbacks"].update(checkpoint=checkpoint, ema=average))
    assert {*config.callbacks} == {"ledger_checkpoint", "ema"}


def test_steps_that_are_taken_again_write_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(work: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        return config.debug.trainer

    monkeypatch.setattr(training, "launch", launched)
    config = verified(lambda config: config["debug"]["trainer"].update(limit_val_batches=0))
    splits: Any = None
    assert training.train_from(None, config, splits, tmp_path) == {"limit_val_batches": 0, "profiler": None}
