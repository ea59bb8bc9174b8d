"""Suggestions for unknown keys: the names of Lightning's Trainer, lightning-hydra-template and others, and ours."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# A key of another project, or the last part of one -> our keys for it. A message names those that the program has.
RENAMED = {
    "learning_rate": ("lr",),
    "base_lr": ("lr",),
    "max_lr": ("lr",),
    "epochs": ("max_epochs",),
    "num_epochs": ("max_epochs",),
    "steps": ("max_steps",),
    "num_steps": ("max_steps",),
    "train_batch_size": ("batch_size",),
    "optim": ("optimizer",),
    "lr_scheduler": ("scheduler",),
    "datamodule": ("data",),
    "dataset": ("data",),
    "net": ("model",),
    "gpus": ("devices",),
    "num_gpus": ("devices",),
    "nodes": ("num_nodes",),
    "workers": ("num_workers",),
    "ckpt_path": ("resume", "init_from", "checkpoint"),
    "resume_from_checkpoint": ("resume",),
    "model_checkpoint": ("callbacks.checkpoint",),
    "save_top_k": ("checkpoint_keep",),
    "every_n_train_steps": ("checkpoint_every",),
    "check_val_every_n_epoch": ("val_every",),
    "val_check_interval": ("val_every",),
    "log_every_n_steps": ("log_every",),
    "gradient_accumulation_steps": ("accumulate_grad_batches",),
    "grad_clip": ("gradient_clip_val",),
    "max_grad_norm": ("gradient_clip_val",),
    "dtype": ("precision",),
    "amp": ("precision",),
    "deterministic": ("exact",),
    "fast_dev_run": ("debug=batch",),
    "overfit_batches": ("debug=overfit",),
    "task_name": ("name",),
    "experiment_name": ("name",),
    "default_root_dir": ("outputs",),
    "output_dir": ("outputs",),
    "log_dir": ("outputs",),
    "enable_progress_bar": ("callbacks.console",),
    "enable_checkpointing": ("callbacks.checkpoint",),
}
# Keys of other projects that have no single key here.
EXPLAINED = {
    "train": "train.py always trains; src/evaluate.py checkpoint=<file or run folder> tests only",
    "test": "train.py tests where the data set has a test set; src/evaluate.py tests again",
    "trainer": "the arguments of Lightning's Trainer are at the top level: strategy=ddp devices=2 max_epochs=3, say",
    "hparams_search": "scripts/search.py searches hyperparameters",
    "tags": "name=<name> names a run; a logger's own options are in conf/logger/",
}


def no_such_key_message(key: str, config: Mapping[str, Any], known: Iterable[str] = ()) -> str:
    """Return the message for an unknown dotted key. It names the key that is probably meant.

    Args:
        key: the dotted key.
        config: the whole composed config as plain containers.
        known: the keys of the same group, if they are not in `config`.
    """
    group, _, last = key.rpartition(".")
    siblings: Any = config  # the config that should have the key
    for part in group.split(".") if group else ():
        siblings = siblings.get(part) if isinstance(siblings, Mapping) else siblings
    refused = f"{key}: there is no such key"
    if hint := _suggestion(key, config):
        return f"{refused}; {hint}"
    if not siblings and not known:
        return f"{refused}: {group} is null here"
    if not isinstance(siblings, Mapping) and not known:
        return f"{refused}: {group} has no keys below it"
    names = known or [name for name in siblings if not name.startswith("_") and name != "hydra"]
    return f"{refused}; {unknown_name_message(last, names)}"


def _suggestion(key: str, config: Mapping[str, Any]) -> str:
    """Return `did you mean <key>?` or an explanation; "" if there is neither."""
    if key in EXPLAINED:
        return EXPLAINED[key]
    last = key.rpartition(".")[2]
    renamed = [each for name in (key, last) for each in RENAMED.get(name, ()) if re.split("[.=]", each)[0] in config]
    same = [each for each in _keys(config) if each.rpartition(".")[2] == last and each != key]
    candidates = renamed or [each for each in same if "." not in each] or same[:3]
    if candidates:
        return f"did you mean {' or '.join(dict.fromkeys(candidates))}?"
    return EXPLAINED.get(key.partition(".")[0], "")


def _keys(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted keys that a user may set."""
    for name, value in config.items():
        if not name.startswith("_") and (above or name != "hydra"):
            yield f"{above}{name}"
            if isinstance(value, Mapping):
                yield from _keys(value, f"{above}{name}.")


def unknown_name_message(name: str, known: Iterable[str]) -> str:
    """Return `did you mean X? known: ...`. Of more than 12 known names, return only the nearest."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3)
    nearest = f"did you mean {near[0]}?" if near else ""
    return f"{nearest} known: {', '.join(known)}".strip() if len(known) <= 12 else nearest or "--help lists them"
