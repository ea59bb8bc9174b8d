"""Tests of a user's module."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import pytest

from lockstep.testing.fake_gpu import ON_CPU, WAITS
from lockstep.testing.probe import EXPORTED
from lockstep.testing.runs import SAVED, STEPS, Runs
from lockstep.testing.server import server
from lockstep.text import join_names, plural

METRIC = 1e-5  # relative difference of a metric that counts as rounding: torchmetrics' states are float32
RULES = "`lockstep docs module-rules` prints what a module must respect"


class ModuleTests:
    """Tests of a module. Inherit them: `class TestMine(ModuleTests): overrides = ["model=mine"]`.

    The runs are short: four optimizer steps of 16 samples in 4 pieces, with evenly spaced samples of the data set, on
    the CPU, in a process of their own. Each is made when a test first needs it. A test that can't hold for a module is
    left out by setting it to None: `test_it_exports = None`.

    Attributes:
        overrides: command-line overrides that choose the module, its data set and its options. `batch_size=` and
            `pieces=` may be among them; layout, precision and length are the tests' choice.
    """

    overrides: ClassVar[Sequence[str]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
        """Return the runs of this class; each is made when a test first needs it."""
        return Runs(cls.overrides, tmp_path_factory.mktemp(cls.__name__), server(request.session))

    def test_it_builds(self, runs: Runs) -> None:
        """Check that two modules built with one seed have the same weights and buffers."""
        if names := runs.result("probe")["initial"]:
            fail(
                f"built twice with one seed, the module has other weights: {join_names(names)}: draw them from torch's "
                "default generator, which `seed` seeds (torch.nn.init, torch.randn), and not from numpy's default_rng()"
            )

    def test_it_trains(self, runs: Runs) -> None:
        """Check that a run completes, that its weights are finite, and that training changes them."""
        assert (runs.result("exact_one")["status"], runs.result("exact_one")["steps"]) == ("completed", STEPS)
        if names := [name for name, value in runs.weights("exact_one").items() if not value.isfinite().all()]:
            listed = join_names(names)
            fail(f"after {STEPS} steps these are not finite: {listed}: use a smaller lr, or a loss without log(0)")
        if not runs.result("probe")["trains"]:
            fail(
                f"{plural(STEPS, 'step')} changed no weight: training_step must return a loss that follows from the "
                "weights, and configure_optimizers must give the optimizer self.parameters()"
            )

    def test_its_hyperparameters_are_plain(self, runs: Runs) -> None:
        """Check that checkpoints can hold what `save_hyperparameters` saves: numbers, texts, lists, dicts, tensors."""
        if named := runs.result("probe")["hyperparameters"]:
            listed = join_names([f"{name} ({kind})" for name, kind in named.items()])
            fail(
                f"hyperparameters that are no plain data: {listed}: checkpoints leave them out, so write "
                f"self.save_hyperparameters(ignore={list(named)})"
            )

    def test_training_step_returns_a_mean(self, runs: Runs) -> None:
        """Check that the loss is the mean over samples, or by the weight that `training_step` returns beside it."""
        keeps(runs, "mean")

    def test_a_sample_does_not_depend_on_its_batch(self, runs: Runs) -> None:
        """Check that neither the loss of a sample nor its output in evaluation depends on the other samples."""
        keeps(runs, "samples")

    def test_pieces_share_what_they_change(self, runs: Runs) -> None:
        """Check that a pass changes only what pieces on other devices change alike."""
        keeps(runs, "pieces")

    def test_a_repetition_has_the_same_bits(self, runs: Runs) -> None:
        """Check that a piece has the same loss when it is computed again, and a second run the same bits."""
        keeps(runs, "again")
        if differing(runs, "exact_one", "again"):
            fail(f"a second run with the same seed has other weights: {RULES}")

    @pytest.mark.parametrize("layout", ["ddp", "dp"])
    def test_a_layout_has_the_same_weights(self, runs: Runs, layout: str) -> None:
        """Check in float64 that ddp on two devices and dp on three take the steps of one device, up to rounding."""
        verdict = runs.verdict("float64_one", f"float64_{layout}")
        if verdict.code:
            fail(f"with {runs.layout(f'float64_{layout}')} and on one device: {verdict.line}{hint(runs)}")

    @pytest.mark.parametrize("layout", ["ddp", "dp"])
    def test_a_layout_has_the_same_bits_with_exact(self, runs: Runs, layout: str) -> None:
        """Check that with exact=true ddp on two devices and dp on three give the bits of one device."""
        if names := differing(runs, "exact_one", f"exact_{layout}"):
            fail(
                f"with {runs.layout(f'exact_{layout}')} these have other bits than on one device: "
                f"{join_names(names)}{hint(runs)}"
            )

    def test_a_killed_run_continues_to_the_same_bits(self, runs: Runs) -> None:
        """Check that a run that is killed and started again ends with the bits of one that was never killed."""
        if names := differing(runs, "exact_one", "resumed"):
            fail(
                f"killed after step {SAVED + 1} and continued from the checkpoint of step {SAVED}, the run has other "
                f"weights: {join_names(names)}: what a later step needs must follow from self.global_step, be a "
                f"parameter, or be saved in on_save_checkpoint and restored in on_load_checkpoint{hint(runs)}"
            )

    def test_evaluation_counts_each_sample_once(self, runs: Runs) -> None:
        """Check that validation and test give the same numbers in batches of one and four, and on two devices."""
        advice = "log a mean over the samples of a batch by self.log without batch_size=, or log a torchmetrics metric"
        compared = [("float64_one", "float64_ddp", "val")]
        if measured(runs.result("exact_one")["metrics"], "test"):
            compared = [("tested_batch_1", "tested_one_device", ""), ("tested_one_device", "tested_ddp", ""), *compared]
        for one, other, part in compared:
            before, after = (measured(runs.result(name)["metrics"], part) for name in (one, other))
            for name in sorted({*before, *after}):
                values = [numbers.get(name, float("nan")) for numbers in (before, after)]
                if abs(values[0] - values[1]) <= METRIC * max(map(abs, values)):
                    continue
                if one == "tested_batch_1":
                    first, second = "in batches of one sample", "in batches of four"
                    why = "it depends on how samples are grouped"
                else:
                    first, second = "on one device", "on two"
                    why = "what a module collects itself has one device's samples"
                fail(f"{name} is {values[0]:.6g} {first} and {values[1]:.6g} {second}: {why}: {advice}")

    def test_no_line_waits_for_a_gpu(self, runs: Runs) -> None:
        """Check on a GPU that is not there that no step reads a number: the host would wait until it is computed.

        What torchmetrics reads to check its input counts in `training_step` only.
        """
        if lines := on_gpu(runs, WAITS):
            fail(
                f"on a GPU, the host would wait at each call of {join_names(lines)}: compute with tensors instead of "
                ".item(), float(), .cpu(), `if` and masks (torch.where), and give metrics validate_args=False"
            )

    def test_every_constant_is_on_the_gpu(self, runs: Runs) -> None:
        """Check on a GPU that is not there that no step mixes tensors of two devices."""
        if lines := on_gpu(runs, ON_CPU):
            fail(
                f"on a GPU, {join_names(lines)} would have a tensor that is on the CPU: make a constant a buffer "
                "(register_buffer), or create it where the batch is (device=x.device)"
            )

    def test_it_exports(self, runs: Runs) -> None:
        """Check that torch.export exports `forward` for batches of any size, with the same numbers."""
        probed = runs.result("probe")
        if probed.get("transfer"):
            fail(
                "on_after_batch_transfer changes images in evaluation, and an exported file would not: move this into "
                "forward, or do it only if self.trainer.training"
            )
        if probed["skipped"]:
            fail(f"{probed['skipped']}: forward(images) must return logits [n, num_classes]")
        if error := probed["export"]:
            sizes = ", ".join(map(str, EXPORTED))
            fail(
                f"forward can't be exported for batches of {sizes}: {error}: compute with torch's operations only, "
                "without .item(), and without `if` and loops that depend on values or on the size of the batch"
            )


def on_gpu(runs: Runs, kind: str) -> list[str]:
    """Return the lines with this kind of fault on a GPU; skip the test if this is unknown."""
    result = runs.result("probe")["gpu"]
    if isinstance(result, str):
        pytest.skip(f"the steps can't be called outside a run: {result}")
    return [line for line, fault in result.items() if fault == kind]


def fail(message: str) -> NoReturn:
    """Fail the test with a message and without a traceback, which would show our code."""
    pytest.fail(message, pytrace=False)


def differing(runs: Runs, one: str, other: str) -> list[str]:
    """Return the names of the weights and running statistics of two runs whose bits differ."""
    first, second = runs.weights(one), runs.weights(other)
    return [name for name in first if first[name].numpy().tobytes() != second[name].numpy().tobytes()]


def measured(metrics: Mapping[str, Any], part: str) -> dict[str, float]:
    """Return the numbers of validation or test whose names begin with `part`."""
    return {
        name: float(value) for name, value in metrics.items() if name.startswith(part) and not name.startswith("train")
    }


def keeps(runs: Runs, rule: str) -> None:
    """Fail the test with what the judge has found of a rule."""
    if texts := [each.text for each in runs.findings() if each.rule == rule]:
        fail("\n".join(texts))


def hint(runs: Runs) -> str:
    """Return lines about why runs differ: what the judge has found, and what changes and is in no checkpoint."""
    lines = [each.text for each in runs.findings() if each.rule != "samples"]
    if names := runs.attributes():
        lines.append(f"changes from step to step, and is no parameter: {join_names(names)}")
    return "\n" + "\n".join(lines or [RULES])
