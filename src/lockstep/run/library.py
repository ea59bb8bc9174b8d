"""Training from Python: what `src/train.py` does, without a command line and without leaving the process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.agent import has_computed
from lockstep.launch.environment import STARTED, export
from lockstep.launch.signals import Interrupted
from lockstep.run import cli, resume
from lockstep.run.checks import ROOT
from lockstep.run.config import check


class Composed(dict[str, Any]):
    """A resolved config as plain containers.

    Attributes:
        overrides: what it was composed from; a run folder records them, so that the run can be resumed.
    """

    def __init__(self, values: Any, overrides: tuple[str, ...]) -> None:
        super().__init__(values)
        self.overrides = overrides


def compose(*overrides: str) -> Composed:
    """The config that `python src/train.py <overrides>` trains with.

    Raises:
        Refusal: an override that does not fit conf/.
    """
    with _refusals():
        return Composed(_plain(_compose(resume.overrides(cli.keyed(list(overrides)), "train"))), overrides)


def train(config: Composed) -> dict[str, Any]:
    """Trains and tests in worker processes, as the config's layout needs them; returns the summary that summary.json
    in the run's folder holds, and `folder`. The calling process may have computed before, on a GPU too.

    Raises:
        Refusal: bad input; nothing was started, or kept.
        lockstep.launch.agent.WorkerFailed: a worker died.
        KeyboardInterrupt: the run was interrupted; its checkpoint is saved.
    """
    if not isinstance(config, Composed):
        raise Refusal("train() takes what compose() returns")
    with _refusals(), _hydra_config(resume.overrides(config.overrides, "train")) as cfg:
        raw = _plain(cfg)
        if raw != config:
            key = next(key for key in sorted({*raw, *config}) if raw.get(key) != config.get(key))
            raise Refusal(f"{key} was changed after compose(): give it there, as on the command line")
        checked = check(raw, given=resume.given())

        from lockstep.loading import open_data
        from lockstep.run.supervisor import run_in_workers
        from lockstep.run.training import train as work

        splits = open_data(checked.data, checked.data_dir, checked.seed)
        folder = Path(HydraConfig.get().run.dir).absolute()
        (folder / ".hydra").mkdir(parents=True, exist_ok=True)
        export(**{STARTED: str(time.time())})
        try:
            with resume.recorded(cfg, folder, cli.BAD_INPUT), has_computed():
                summary: dict[str, Any] = run_in_workers(work, checked, splits, folder)
        except Refusal:
            if HydraConfig.get().output_subdir is not None:  # not a run that goes on
                cli.forget(folder)
            raise
        except Interrupted as interrupted:
            raise KeyboardInterrupt(str(interrupted)) from None
        return {**summary, "folder": str(folder)}


def _compose(overrides: list[str]) -> DictConfig:
    """The config with Hydra's own node, where a run's folder stands."""
    cli.register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra_compose("train", overrides=overrides, return_hydra_config=True)


def _plain(cfg: DictConfig) -> dict[str, Any]:
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return OmegaConf.to_container(own, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


@contextmanager
def _hydra_config(overrides: list[str]) -> Iterator[DictConfig]:
    """The composed config; inside, `HydraConfig` is what it is under Hydra's own main."""
    instance = HydraConfig.instance()
    before, cfg = instance.cfg, _compose(overrides)
    instance.set_config(cfg)
    with open_dict(cfg):
        cfg.pop("hydra")
    try:
        yield cfg
    finally:
        instance.cfg = before


@contextmanager
def _refusals() -> Iterator[None]:
    """Bad input is one line here too."""
    try:
        yield
    except Refusal:
        raise
    except cli.BAD_INPUT as error:
        raise Refusal(cli.line(error, "train")) from None
