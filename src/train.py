"""Train on any layout:  python src/train.py strategy=ddp devices=4 accumulate_grad_batches=2"""

if __name__ == "__main__":
    import lockstep.exit_on_signal  # noqa: F401  from here on Ctrl-C prints one line

from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint.resume import hydra_files_of
from lockstep.config.arguments import overridden_keys
from lockstep.config.check import check
from lockstep.config.portable import choose_kernels
from lockstep.run import cli


def train(raw: dict[str, Any], folder: Path) -> Any:
    """Train: check the config, open its data, and launch the workers, which train and test. Return the summary."""
    config = check(raw, overridden=overridden_keys())
    choose_kernels(config.layout.exact)

    # These import torch, which takes longer than the checks above.
    from lockstep.data.build import open_data
    from lockstep.run.supervisor import check_start_files, run_in_workers
    from lockstep.run.training import fit_and_test

    check_start_files(config, folder)
    splits = open_data(config.data, config.data_dir, config.seed)
    return run_in_workers(partial(fit_and_test, hydra_files=hydra_files_of(raw)), config, splits, folder)


if __name__ == "__main__":
    cli.command(train, "train", __file__)
