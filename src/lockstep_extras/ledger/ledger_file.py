"""Write and read `ledger.jsonl`.

A line holds hashes: of a checkpoint, of the samples since the line before, and of the line before. So somebody can
train the run's steps again and compare. With `exact=true` the bits are the same on every layout. Without it they are
the same on the run's own layout only, so the ledger then records the layout.

A line is written after its checkpoint, which stores the line too. If a run is killed in between, the next start adds
the missing line. It also removes lines after the checkpoint from which the run continues.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lockstep.arithmetic.order import DataOrder
from lockstep.config.check import Config
from lockstep.config.instantiate import locate
from lockstep.config.schema import CACHE_KEYS
from lockstep.data import Splits
from lockstep.data.datasets import changed
from lockstep.errors import UserError
from lockstep.report.provenance import code_sha256, git_info, versions
from lockstep.report.summary import weights_sha256
from lockstep_extras.ledger import LEDGER_FILE

LOG = logging.getLogger("lockstep")
ENCODING = "latin-1"  # decodes any bytes; lines that Lockstep writes are ASCII
MAX_BYTES = 1 << 28  # about half a million lines; a larger file is refused as too long for a ledger
# Keys of train.yaml that do not affect the bits of the weights. For the layout see `decisive_config`.
NOT_DECISIVE = (
    *("name", "outputs", "data_dir", "num_workers", "logger", "sweep"),
    *("devices", "num_nodes", "accumulate_grad_batches", "max_restarts", "elastic", "survive"),
    *("hang_timeout", "log_every", "checkpoint_every", "checkpoint_keep", "resume"),
)
# The keys of a checkpoint, other than the weights, that affect the next step. `MixedPrecision` is Lightning's loss
# scaler, and the last two are those of EMA.
STATE = ("optimizer_states", "lr_schedulers", "MixedPrecision", "current_model_state", "averaging_state")


class LedgerFile:
    """Writes `ledger.jsonl`. Only rank zero has a LedgerFile. The thread that writes checkpoints calls its methods.

    Keys of a line: `step` is the number of optimizer steps at its checkpoint, and `since` that at the line before.
    `before` is no number of steps, but the SHA-256 of the line before. docs/extras/ledger.md has all keys.

    Args:
        folder: the run's folder.
        resumed: the checkpoint from which the run continues; empty: none.
        weights: the module's state_dict at the start.
    """

    def __init__(
        self, folder: Path, config: Config, splits: Splits, resumed: Mapping[str, Any], weights: Mapping[str, Any]
    ) -> None:
        self._path = folder / LEDGER_FILE
        self._order = splits.order(config.layout, config.seed)
        # The value of the key `about`: config, data, code and versions. The first line has this key, and later lines
        # have it where its value has changed.
        self._about: dict[str, Any] = {"config": decisive_config(config), "data": splits.fingerprint}
        self._about |= {"data_dir": config.data_dir, "samples": len(splits.train)}
        if splits.content:
            self._about["content"] = splits.content
        # the ledger line that the resumed checkpoint stores; empty: none
        self._resumed_line: str = resumed.get("ledger", "") if isinstance(resumed.get("ledger"), str) else ""
        # the first line, if a new ledger begins
        self._opening = {"step": resumed.get("global_step", 0), "since": resumed.get("global_step", 0)}
        self._opening |= hashes(resumed) if resumed else {"weights_sha256": weights_sha256(weights)}
        self._last: dict[str, Any] | None = None  # the last line; None until the file is repaired
        self._changed = False  # whether `_about` differs from the last `about` in the file
        self._last_start = self._next_start = 0  # byte positions of the file's last line, and of the line to write next

    def before_write(self, checkpoint: dict[str, Any]) -> None:
        """Store in the checkpoint, under `ledger`, the line that `after_write` will append to the file."""
        previous, step = self.repair(), checkpoint["global_step"]
        # The line of a second checkpoint of the same step replaces the file's last line. But if `_about` has changed
        # since, the last line stays: it shows which code and config made the steps up to here.
        replaces_last = previous["step"] == step and not self._changed
        self._next_start = self._last_start if replaces_last else self._next_start
        since = previous["since"] if replaces_last else previous["step"]
        # the hash of the line that will stand before the new one
        previous_sha256 = previous["before"] if replaces_last else line_sha256(text_of(previous))
        line = {"step": step, "since": since, "before": previous_sha256, **hashes(checkpoint)}
        line["samples_sha256"] = samples_sha256(self._order, since, step)
        line |= self._config_keys(replaces_last, previous)
        self._last, self._changed = line, False
        checkpoint["ledger"] = text_of(line)

    def after_write(self) -> None:
        """Write the line of the checkpoint that has just been written."""
        assert self._last is not None
        self._write(self._next_start, text_of(self._last))

    def repair(self) -> dict[str, Any]:
        """Repair the file, at the first call. Return its last line.

        Lines after the checkpoint from which the run continues are removed. The checkpoint's own line is added if it is
        missing. If the file has neither this line nor the one before it, a new ledger begins.
        """
        if self._last is not None:
            return self._last
        self._about |= {**git_info(), "code_sha256": code_sha256(), "versions": versions()}
        lines = read(self._path) if self._path.exists() else []
        resumed = parse_line(self._resumed_line) if self._resumed_line else {}
        # the checkpoint's own line, and the one before it
        last_two = [line for line in lines if line == self._resumed_line or line_sha256(line) == resumed.get("before")]
        if resumed.get("step") == self._opening["step"] and last_two:
            valid_lines = lines[: lines.index(last_two[-1]) + 1]
            valid_lines += [self._resumed_line] * (valid_lines[-1] != self._resumed_line)
            last_about: dict[str, Any] = next(
                (about for line in reversed(valid_lines) if (about := parse_line(line).get("about"))), {}
            )
            self._changed = changed(last_about, self._about) not in ([], ["data_dir"])
        else:
            opening = {**self._opening, "before": None, **self._config_keys(False, {}, is_first=True)}
            valid_lines = [text_of(opening)]
            if self._opening["step"]:
                LOG.warning(
                    "%s has no lines up to step %d: a new ledger begins there", LEDGER_FILE, self._opening["step"]
                )
        self._next_start = sum(len(line) + 1 for line in valid_lines[:-1])
        self._write(self._next_start, valid_lines[-1])
        self._last = parse_line(valid_lines[-1])
        return self._last

    def _config_keys(self, replaces_last: bool, previous: Mapping[str, Any], is_first: bool = False) -> dict[str, Any]:
        """Return a line's keys on the config: its hash, and `about` if the lines before do not have it."""
        about: dict[str, Any] = {"about": self._about} if is_first or self._changed else {}
        about |= {"about": previous["about"]} if replaces_last and "about" in previous else {}
        return {"config_sha256": config_sha256(self._about["config"]), **about}

    def _write(self, start: int, line: str) -> None:
        """Write a line at byte `start`, and make it the last one of the file."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise type(error)(error.errno, f"can't write ({error.strerror})", str(self._path)) from error
        with open(descriptor, "r+b") as file:
            file.seek(start)
            file.truncate()
            file.write(f"{line}\n".encode(ENCODING))
            self._last_start, self._next_start = start, file.tell()
            file.flush()
            os.fsync(file.fileno())


class RepairLedger(Callback):
    """Repairs the ledger at the end of a run, also of one that had no step left and so wrote no checkpoint."""

    def __init__(self, ledger: LedgerFile) -> None:
        self.ledger = ledger

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.ledger.repair()


def decisive_config(config: Config) -> dict[str, Any]:
    """Return the part of the resolved config that affects the weights' bits: the layout too, unless `exact=true`."""
    layout, record = config.layout, config.record
    decisive = {key: value for key, value in record.items() if key not in NOT_DECISIVE}
    decisive["data"] = {key: value for key, value in record["data"].items() if key not in CACHE_KEYS}
    callbacks = {name: options for name, options in config.callbacks.items() if options and may_change(name, options)}
    sync = record["strategy"].get("sync_batchnorm", False)
    strategy = {"sync_batchnorm": sync, "compression": config.strategy.compression}
    extras = {name: record["extras"][name] for name, extra in config.extras.items() if extra.changes_weights}
    layout_keys = {"name": layout.strategy, "devices": layout.devices, "num_nodes": layout.num_nodes}
    layout_keys["shares"] = list(layout.shares)
    speed: dict[str, Any] = {"memory_format": config.speed.memory_format}
    if layout.accelerator == "gpu":
        speed["tf32"] = config.speed.tf32
    return decisive | {
        "callbacks": callbacks,
        "strategy": strategy if layout.exact else strategy | layout_keys,
        "extras": extras,
        "speed": speed,
        "accelerator": layout.accelerator,
        "pieces": layout.pieces,
        "precision": config.precision,
        "threads": config.worker_threads,
    }


def may_change(name: str, options: Mapping[str, Any]) -> bool:
    """Check whether a callback may change the weights. It may not if its class has `changes_weights = False`."""
    target = locate(f"callbacks.{name}._target_", str(options.get("_target_")))
    return bool(getattr(target, "changes_weights", True))


# --- lines ------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[str]:
    """Return the lines of a ledger, without a last line that a kill has cut short.

    Raises:
        UserError: The file can't be read.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path} is too long for a ledger: it must have at most {MAX_BYTES >> 20} MiB")
    return content.decode(ENCODING).split("\n")[:-1]


def parse_line(line: str) -> dict[str, Any]:
    """Return the content of a ledger's line; empty if the line is not valid."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    valid = isinstance(content, dict) and all(type(content.get(key)) is int for key in ("step", "since"))
    return content if valid and isinstance(content.get("about", {}), dict) else {}


def text_of(line: Mapping[str, Any]) -> str:
    return json.dumps(line, sort_keys=True, default=str)


def line_sha256(line: str) -> str:
    return hashlib.sha256(line.encode(ENCODING)).hexdigest()


def config_sha256(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(text_of(config).encode()).hexdigest()


def samples_sha256(order: DataOrder, since: int, step: int) -> str:
    """Return the SHA-256 of the sample ids, int64, of steps `since` to `step` - 1, counted from 0, in order."""
    sha256 = hashlib.sha256()
    for position in map(order.position, range(since, step)):
        sha256.update(order.step(*position).astype("<i8").tobytes())
    return sha256.hexdigest()


def hashes(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return the hashes of a checkpoint: of its weights, and of the other state that affects the next step.

    That state is the optimizer's, the schedule's and others of STATE. With an extra that applies gradients some steps
    late, it also has the gradients that are not applied yet.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.state_dict", {})
    state = {name: checkpoint[name] for name in STATE if name in checkpoint}
    state["waiting"] = loop.get("gradients", {}).get("waiting", [])
    sha256 = hashlib.sha256()
    for part in _identifying_bytes(state):
        sha256.update(part)
    return {"weights_sha256": weights_sha256(checkpoint["state_dict"]), "optimizer_sha256": sha256.hexdigest()}


def _identifying_bytes(value: Any) -> Iterator[Any]:
    """Yield bytes that identify a value, for a hash."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{list(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, Mapping):
        yield f"{{{len(value)}".encode()
        for key in sorted(value, key=str):
            yield f"{key}:".encode()
            yield from _identifying_bytes(value[key])
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}".encode()
        for part in value:
            yield from _identifying_bytes(part)
    else:
        yield f"{value!r};".encode()
