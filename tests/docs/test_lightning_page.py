"""docs/use/lightning.md: each row of its tables has a test, which is named here."""

import re
from pathlib import Path

from conftest import ROOT

TRAINER = "tests/trainer/"
ROWS = {
    # several devices
    'nothing: one device, or `strategy="dp"` on several': (
        "test_trainer.py::test_layouts_and_sources_of_data_give_one_hash"
    ),
    "Lockstep, on one machine": "test_launch.py::test_rank_zeros_result_is_returned",
    "torchrun, SLURM, MPI": "test_launch.py::test_bad_input_is_refused_in_one_line",
    # arguments
    "`batch_size`": "test_trainer.py::test_layouts_and_sources_of_data_give_one_hash",
    "`pieces`": "test_trainer.py::test_layouts_and_sources_of_data_give_one_hash",
    "`exact`": "test_programs.py::test_exact_with_no_pieces_logs_what_it_means",
    "`seed`": "test_programs.py::test_seed_everything_is_the_default_of_the_seed",
    "`strategy`": "test_programs.py::test_spellings_of_lightning_are_one_device",
    "`devices`, `num_nodes`, `accelerator`": "test_programs.py::test_spellings_of_lightning_are_one_device",
    "`accumulate_grad_batches=k`": "test_batches_of_steps.py::test_batches_count_as_with_lightning",
    "`batch_size` and `accumulate_grad_batches`": "test_trainer.py::test_layouts_and_sources_of_data_give_one_hash",
    "`limit_train_batches`, `overfit_batches`": "test_batches_of_steps.py::test_batches_count_as_with_lightning",
    "`val_check_interval`": "test_timed_validation.py::test_a_validation_comes_after_a_time_as_with_lightning",
    "`nonfinite`": "test_trainer.py::test_options_are_refused_in_one_line",
    "`checkpoint_every`": "test_trainer.py::test_a_checkpoint_is_written_before_an_older_one_is_removed",
    "all others": "test_programs.py::test_the_signature_has_lightnings_options",
    # data
    "`dataset`, `batch_size`, `shuffle`, `sampler`, `batch_sampler`, `generator`, `drop_last`, `collate_fn`": (
        "test_loaders.py::test_the_order_of_an_epoch_is_what_the_sampler_gives"
    ),
    "an `IterableDataset`": "test_iterables.py::test_a_stream_gives_each_layout_what_one_device_reads",
    "`num_workers`, `worker_init_fn`": (
        "test_loader_processes.py::test_loader_processes_are_set_up_by_the_users_function_and_get_the_epoch"
    ),
    "`train_dataloader`, `val_dataloader`, ... of the module": (
        "test_several_loaders.py::test_a_modules_loaders_are_used_where_lightning_uses_them"
    ),
    '`val_dataloaders=[a, b]`, `{"x": a, "y": b}`': (
        "test_several_loaders.py::test_several_loaders_give_what_lightning_gives"
    ),
    "`trainer.fit(module, dataset)`, `trainer.test(module, dataset)`": (
        "test_several_loaders.py::test_plain_data_sets_are_cut_by_the_trainers_batch_size"
    ),
    "`pin_memory`, `prefetch_factor`, `timeout`, `multiprocessing_context`": (
        "test_loaders.py::test_how_a_loader_moves_its_batches_is_ours"
    ),
    "`persistent_workers`": "test_against_lightning.py::test_a_hook_may_change_the_data_set_between_epochs",
    "`self.trainer.train_dataloader`, `self.trainer.datamodule.test_dataloader()`": (
        "test_programs.py::test_hooks_read_the_users_loaders"
    ),
    # hooks
    '`x, y = batch`, `batch["x"]`, `len(batch)` in `on_train_batch_start` and `_end`': (
        "test_batches_in_hooks.py::test_hooks_get_the_samples_of_the_step"
    ),
    "`outputs` of `on_train_batch_end`": "test_batches_in_hooks.py::test_hooks_get_the_samples_of_the_step",
    "`on_before_batch_transfer`, `transfer_batch_to_device`, `on_after_batch_transfer`": (
        "test_batches_in_hooks.py::test_hooks_of_the_transfer_get_pieces_by_position"
    ),
    # folders
    "Lightning's default": "test_run_folder.py::test_no_run_overwrites_a_file_of_another",
    "another": "test_run_folder.py::test_no_run_overwrites_a_file_of_another",
    "`False`": "test_run_folder.py::test_no_run_overwrites_a_file_of_another",
}


def test_each_row_of_a_table_has_a_test() -> None:
    page = (ROOT / "docs/use/lightning.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in re.findall(r"^\|.*", page, re.M)]
    heads = "what starts the workers", "argument", "what", "logger"
    rows = [row for row in rows if row not in heads and not row.startswith("|-")]
    assert sorted(rows) == sorted(ROWS)
    for place in ROWS.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in Path(ROOT / TRAINER / file).read_text(), place


def test_each_test_that_the_list_of_faults_names_exists() -> None:
    text = (ROOT / "docs/results/other-programs.md").read_text()
    named = set(re.findall(r"Test: `(\w+/[\w/]+\.py)(?:::(\w+))?`", " ".join(text.split())))
    assert len(named) > 100
    for file, test in named:
        content = (ROOT / "tests" / file).read_text()
        assert not test or f"def {test}(" in content, f"{file}::{test}"
