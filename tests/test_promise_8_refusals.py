"""Promise 8: bad input is refused early, in one line that names what is wrong and what would be right."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Program, Run, composed
from refusals import checked, refused, refused_with

from lockstep.checkpoint.io import CheckpointError
from lockstep.config import check as config
from lockstep.config.arguments import check_arguments
from lockstep.config.check import check
from lockstep.data import Spec
from lockstep.errors import UserError
from lockstep.launch import machine
from lockstep.run.cli import BAD_INPUT, error_line
from lockstep.run.evaluation import check_same_images, config_of, find_checkpoint

pytestmark = pytest.mark.usefixtures("two_cores_no_gpu")

# Each case: overrides, and what the line must hold, in this order: what is wrong, then what would be right. Keys of
# lightning-hydra-template: tests/docs/test_coming_from_page.py. Some are in EARLY, as real processes.
REFUSED: list[tuple[str, str]] = [
    ("model=vgg", "model=vgg.*fast_cnn, mnist_cnn, multi_label"),
    (
        "data=digit",
        "data=digit: did you mean digits.*cifar10, digits, fashion_mnist, huggingface, image_folder, image_list, "
        "mnist, shards, synthetic",
    ),
    ("optimizer=lion", "optimizer=lion: known: adam, adamw, muon, rmsprop, sgd"),
    ("batchsize=64", "batchsize: there is no such key.*batch_size"),
    ("model.dropuot=0.5", "model.dropuot: there is no such key.*dropout"),
    (
        "model=resnet18 model.nrom=1",
        "model.nrom: .*did you mean norm.*known: .*label_smoothing, name, norm, pretrained, stem, train_only$",
    ),
    ("debug.one_batch=true", "debug.one_batch: .*files of debug add keys: give debug=<name>, one of batch, overfit"),
    ("+trainer.max_epochs=3", "trainer.max_epochs: there is no such key; did you mean max_epochs"),
    ("trainer=ddp", "trainer: there is no such key; .*at the top level: strategy=ddp devices=2"),
    ("model.optimizer.lr=8", "model.optimizer.lr: there is no such key; did you mean lr"),
    ("weight_decay=0.1", "weight_decay: there is no such key; did you mean optimizer.weight_decay"),
    ("ckpt_path=some", "ckpt_path: there is no such key; did you mean resume or init_from"),
    ("learning_rate=1", "learning_rate: there is no such key; did you mean lr"),
    ("train=false", "train: there is no such key; .*src/evaluate.py checkpoint="),
    ("optimizer.momentun=1", "did you mean momentum. known: lr, lr_scale, momentum, nesterov, param_groups, "),
    (
        "debug=overfit callbacks.checkpoint.monitor=x",
        "monitor: there is no such key: callbacks.checkpoint is null here",
    ),
    ("model.freeze=[a", "model.freeze=.a: a bracket or a quotation mark in the value of model.freeze is not closed$"),
    ("name=a=b", "name=a=b: a value with .* must be quoted: \"name='a=b'\"$"),
    ("devices=0", "devices=0: must be greater than or equal to 1"),
    ("devices=64", "devices=64: must be at most 8"),
    ("threads=100000", "threads=100000: must be less than or equal to 1024"),
    ("strategy=ddp devices=2 pieces=8 strategy.shares=[1,nan]", "shares=.1.0, nan.: must be finite numbers above 0"),
    ("strategy=dp devices=2 pieces=8 strategy.shares=[1,inf]", "shares=.1.0, inf.: must be finite numbers above 0"),
    ("optimizer.weight_decay=inf", "optimizer.weight_decay=inf: must be finite"),
    ("optimizer=adamw optimizer.betas=[0.9,nan]", "optimizer.betas=.0.9, nan.: must be finite"),
    ("~model._target_", "model._target_=null: must be a dotted path such as"),
    ("accelerator=gpu", "accelerator=gpu.*no GPU.*accelerator=cpu simulates"),
    ("compile=reduce-overhead", "compile=reduce-overhead: must be a valid boolean"),
    ("speed.resident=true", "speed.resident=true and .*: there is no GPU.*resident=auto"),
    ("num_nodes=2 devices=4", "num_nodes=2: .* On each machine: torchrun --nnodes=2 --nproc-per-node=4 .*train.py"),
    ("elastic=true", "elastic=true and strategy=single .*: only ddp on several devices.*max_restarts=1"),
    ("batch_size=64 devices=3 strategy=dp", "batch_size=64.*3 equal pieces.*: use batch_size=63 or 66, or pieces=4"),
    ("pieces=4 accumulate_grad_batches=3", "pieces=4 on 1 device means accumulate_grad_batches=4"),
    ("pieces=3 devices=4", "pieces=3.*4 devices.*pieces=4 or more"),
    ("pieces=8 devices=2 accumulate_grad_batches=2", "pieces=8 on 2 dev.*accumulate_grad_batches=4, not 2.*pieces=4"),
    ("accumulate_grad_batches=auto", "accumulate_grad_batches=auto: must be a valid integer"),
    ("gradient_clip_algorithm=value", "gradient_clip_algorithm=value and gradient_clip_val=null don't go together"),
    ("accumulate_grad_batches=0", "accumulate_grad_batches=0: must be greater than or equal to 1"),
    ("lr=inf", "lr=inf: must be a finite number"),
    ("precision=33", "precision=33: must be 'auto', '64-true', .* or 'bf16-mixed'"),
    ("precision=16-mixed", "precision=16-mixed and .*: fp16 needs a GPU; precision=auto"),
    ("seed=4294967296", "seed=4294967296: must be .*equal to 4294967295"),
    ("callbacks.pictures=true", "callbacks.pictures=true: must be a valid dictionary"),
    ("exact=true precision=bf16-true", "precision=bf16-true and exact=true .*64-true, 32-true, bf16-mixed"),
    ("name=../elsewhere", "name=../elsewhere.*letter or digit"),
    ("strategy=ddp devices=2 strategy.shares=[1,2,3]", "strategy.shares=.*must be 2 numbers"),
    (
        "strategy=ddp devices=2 strategy.shares=[7,3]",
        "strategy.shares=.7.0, 3.0.: 2 pieces would be .*: give pieces=4$",
    ),
    ("strategy=ddp devices=2 strategy.shares=[1,-1]", "strategy.shares=.*: must be finite numbers above 0"),
    ("strategy=ddp devices=2 strategy.shares=auto", "strategy.shares=auto: must be a valid tuple"),
    ("strategy=ddp strategy.compression=zip", "strategy.compression=zip: must be 'none', 'bf16', .* or 'powersgd'"),
    ("data.augment.fill=white", "data.augment.fill=white: must be 'zero' or 'reflect'"),
    ("+sweep.job=2", "sweep.job: there is no such key; did you mean jobs"),
    ("~batch_size", "batch_size must be given: batch_size="),
    ("outputs=''", "outputs=: must be a folder"),
    ("strategy=dp devices=2 +strategy.compression=bf16", "strategy.compression: DP takes no such option; leave it out"),
    (
        "model._target_=timn.create_model",
        "model._target_=timn.create_model: .* no module timn, neither in src/ nor inst",
    ),
    ("+debug.trainer.max_steps=3", "debug.trainer.max_steps=3: must be 'benchmark', .* or 'profiler'"),
    ("+debug.trainer.benchmark=true exact=true", "debug.trainer.benchmark=true and exact=true don't go together"),
    ("+debug.one_bacth=true", "debug.one_bacth: there is no such key; did you mean one_batch"),
    ("data._target_=open", "data._target_=open: must be a dotted path"),
    ("scheduler.interval=foo", "scheduler.interval=foo: must be 'step' or 'epoch'"),
    ("optimizer.lr_scale=0.1", "optimizer.lr_scale=0.1: must be a valid dictionary"),
    ("model=torchvision model.options=[1]", r"override model.options=\[1\]: Cannot merge"),
    ("+model.net._target_=nowhere.Net", "model.net._target_=nowhere.Net: there is no module nowhere"),
    ("scheduler._target_=nowhere.Cosine", "scheduler._target_=nowhere.Cosine: there is no module nowhere"),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_refused_in_one_line(overrides: str, says: str) -> None:
    refused_with(overrides, says)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("logger=null", "logger=null: takes one name; .*none"),
        ("debug=true", "debug=true: takes one name; known: batch, overfit, profile"),
        ("model=1", "model=1: takes one name; known: fast_cnn, mnist_cnn, multi_label, regression, resnet18, resnet9"),
        (
            "model={name:mnist_cnn}",
            "model={name:mnist_cnn}: .*known: fast_cnn, mnist_cnn, multi_label, regression, resnet18, resnet9",
        ),
        ("foo", "foo: an override is <key>=<value>"),
        ("model=[mnist_cnn,resnet18]", "model=.*: takes one name; .*known: fast_cnn"),
    ],
)
def test_what_is_no_override_or_no_name_of_a_group_is_refused(argument: str, says: str) -> None:
    check_arguments(
        chosen := ["model=mnist_cnn,resnet18", "logger='csv'", "experiment=[mnist_cnn]", "logger=[csv,none]"]
    )
    with pytest.raises(UserError, match=says):
        check_arguments([*chosen, argument])


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


@pytest.mark.parametrize(
    "overrides",
    [
        "devices=4",
        "devices=8 batch_size=64",
        "pieces=8 devices=3",
        "pieces=6 devices=3 accumulate_grad_batches=2 batch_size=96",
        "strategy=dp devices=3 batch_size=66",
        "elastic=true devices=2",
        "precision=64-true",
        "experiment=mnist_cnn",
        "+debug.trainer.limit_val_batches=0 +debug.trainer.benchmark=true",
    ],
)
def test_what_fits_is_taken(overrides: str) -> None:
    """The control: a check that refused everything would pass all tests above."""
    assert checked(*overrides.split()).layout.batch_size > 0


def test_auto_is_refused_only_where_it_means_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ("precision=auto", "+optimizer.fused=true", "gradient_clip_val=1")
    monkeypatch.setattr(config, "computes_bf16", lambda accelerator: False)
    assert checked(*task).precision == "32-true"
    monkeypatch.setattr(config, "computes_bf16", lambda accelerator: True)
    refused_with(" ".join(task), "fused=true with precision=auto and gradient_clip_val")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            "devices=2 strategy.sync_batchnorm=true exact=true",
            "sync_batchnorm=true and exact=true .*depend on other pieces",
        ),
        (
            "devices=2 pieces=4 strategy.sync_batchnorm=true strategy.shares=[1,2]",
            "and strategy.shares .*same number of pieces",
        ),
        (
            "devices=2 strategy.sync_batchnorm=true pieces=3 batch_size=48",
            "and pieces=3 .*pieces must be a multiple of the 2 devices",
        ),
        ("devices=2 strategy.sync_batchnorm=true compile=true", "and compile=true .*wait for other ranks"),
        ("strategy.sync_batchnorm=true", "with ddp on GPUs only"),
        ("devices=2 strategy.compression=fp16 exact=true", "compression=fp16 and exact=true .*rounds gradients"),
        ("devices=2 strategy.compression=fp16 precision=64-true", "and precision=64-true .*float32 gradients only"),
        (
            "+optimizer.fused=true gradient_clip_val=1 precision=bf16-mixed",
            "fused=true with precision=bf16-mixed and gradient_clip_val .*loss scale.*fused=false",
        ),
        ("+debug.trainer.deterministic=false exact=true", "deterministic=false and exact=true .*deterministic kernels"),
        ("+debug.trainer.deterministic=warn exact=true", "deterministic=warn and exact=true .*deterministic kernels"),
        ("+debug.trainer.deterministic=null exact=true", "deterministic=null and exact=true .*deterministic kernels"),
        ("devices=2 strategy.sync_batchnorm=true elastic=true", "and elastic=true .*could not share the pieces evenly"),
        ("compile=true strategy=dp devices=2", "dp runs the network with copies of its weights; use strategy=ddp"),
        ("precision=16-mixed exact=true", "precision=16-mixed and exact=true .*64-true, 32-true, bf16-mixed"),
    ],
)
def test_what_can_not_go_together_on_gpus(monkeypatch: pytest.MonkeyPatch, overrides: str, says: str) -> None:
    monkeypatch.setattr(config, "gpu_count", lambda: 2)
    monkeypatch.setattr(config, "compiler_lacking", lambda accelerator: None)  # a compiler, say
    refused_with(overrides, says)
    assert checked("devices=2", "strategy.sync_batchnorm=true").strategy.__dict__["sync_batchnorm"]  # the control


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "gpu_count", lambda: 2)
    assert checked("devices=2").layout.accelerator == "gpu"
    assert re.search("devices=3.*2 GPUs.*accelerator=cpu", refused("devices=3", "batch_size=96"))
    assert checked("devices=3", "batch_size=96", "accelerator=cpu").layout.accelerator == "cpu"


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
    found = checked("precision=auto")
    assert (found.precision, found.record["precision"]) == (precision, "auto")
    assert checked().precision == "32-true"
    assert checked("precision=bf16-mixed").precision == "bf16-mixed"  # who asks by name gets it


@pytest.mark.parametrize(("capabilities", "computes"), [([(8, 0), (9, 0)], True), ([(9, 0), (7, 5)], False)])
def test_gpus_are_asked_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], computes: bool
) -> None:
    """A parent that has touched CUDA can't fork its workers."""
    import torch

    asked = []

    def capability(device: int) -> tuple[int, int]:
        asked.append(device)
        return capabilities[device]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    machine._gpus_compute_bf16.cache_clear()
    assert machine.computes_bf16("gpu") is computes
    assert asked == []
    machine._gpus_compute_bf16.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # a notebook's: its workers are spawned
    assert machine.computes_bf16("gpu") is computes
    assert asked == [0, 1]
    machine._gpus_compute_bf16.cache_clear()


# Through real processes: exit code, one line, no traceback, no folder.

EARLY = [
    ("strategy=fsdp", "strategy=fsdp.*auto, ddp, dp"),
    ("batch_size=100 pieces=6 lr=0.2", "batch_size=100.*6 equal pieces.*: use batch_size=96 or 102, or pieces=10"),
    ("outputs=/dev/null/here", "/dev/null/here.*[Nn]ot a directory"),
    ("-m lr=0.1,0.2 --epochs 3", "--epochs: there is no such flag; an override has no dashes, max_epochs=<value>"),
]
LATE = [
    ("data=synthetic data.samples=20", "batch_size=64 is more than the 18 samples of the training set: .*"),
    ("optimizer=adamw optimizer.betas=[2,1] strategy=ddp devices=2", "optimizer: Invalid beta parameter at index 0: 2"),
    ("model.freeze=null", "model.freeze=null: must be an instance of Sequence"),
    ("callbacks=early_stopping callbacks.early_stopping.mode=up", "callbacks.early_stopping: `mode` can be min, max, "),
    ("callbacks=early_stopping callbacks.early_stopping.patience=[3]", ".patience=.3.: must be a valid integer"),
    ("callbacks.console.line_seconds=x", "callbacks.console.line_seconds=x: must be a valid number"),
    ("+callbacks.console.every_epochs=0", "callbacks.console.every_epochs=0: must be at least 1"),
    ("+debug.trainer.limit_val_batches=-1", "debug.trainer: You have passed invalid value -1"),
]


@pytest.mark.parametrize(("overrides", "says"), EARLY)
def test_a_typing_mistake_is_told_before_torch_is_imported(tmp_path: Path, overrides: str, says: str) -> None:
    must_be_refused(without_torch(tmp_path, overrides), says)


@pytest.mark.parametrize(("overrides", "says"), LATE)
def test_a_refused_run_ends_with_2_and_leaves_nothing(tmp_path: Path, overrides: str, says: str) -> None:
    must_be_refused(Program(tmp_path / "outputs")(*overrides.split(), ok=False), says)


def test_a_run_needs_torch(tmp_path: Path) -> None:
    """The control."""
    assert "torch is not here" in without_torch(tmp_path, LATE[0][0]).stderr


def without_torch(folder: Path, overrides: str) -> Run:
    (folder / "torch.py").write_text("raise ImportError('torch is not here')")
    train = Program(folder / "outputs", fresh=True)
    return train(*overrides.split(), env={"PYTHONPATH": str(folder)}, ok=False)


def must_be_refused(run: Run, says: str) -> None:
    assert run.returncode == 2, str(run)
    assert run.stdout == ""
    assert re.fullmatch(f"error: .*{says}.*\n", run.stderr), run.stderr
    assert run.folders == []


def test_a_config_file_that_is_no_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mine\n_target_ project.models.MnistCNN\n")
    said = refused(f"hydra.searchpath=[file://{tmp_path}]", "model=mine")
    assert said == f"{tmp_path}/model/mine.yaml:3: not valid YAML: could not find expected ':'"


def test_a_model_file_without_a_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: project.models.MnistCNN\n")
    run = Program(tmp_path / "outputs")(f"hydra.searchpath=[file://{tmp_path}]", "model=mine", ok=False)
    must_be_refused(run, "model.name: conf/model/mine.yaml has no name for the run's folder: add the line `name: mine`")


def test_what_only_the_first_step_can_refuse_leaves_nothing_either(project: Path, tmp_path: Path) -> None:
    task = ("data=synthetic", "strategy=ddp", "devices=2", "batch_size=8", "model._target_=mine.Hungry")
    run = Program(tmp_path, home=project)(*task, ok=False)
    assert run.returncode == 2, str(run)
    assert re.search("error: step 1: out of memory in 2 pieces of 4 samples.*\n$", run.stderr), run.stderr
    assert run.folders == []


def test_flags_of_hydra_are_taken(run_train: Program) -> None:
    """The control."""
    assert "batch_size: 32" in run_train("batch_size=32", "--cfg", "job", "--resolve").stdout


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    no_text = "must be a .ckpt file, a run folder, or last"
    for value, says in (
        (
            str(tmp_path),
            rf"{tmp_path}: this folder has no checkpoint: it must hold checkpoints/best\.ckpt or last\.ckpt",
        ),
        ("last", f"checkpoint=last: no run in {tmp_path} has a checkpoint"),
        (None, f"checkpoint=null: {no_text}"),
        (True, f"checkpoint=true: {no_text}"),
        (["a"], rf"checkpoint=\['a'\]: {no_text}"),
    ):
        with pytest.raises((UserError, CheckpointError), match=says):
            find_checkpoint({"checkpoint": value, "outputs": str(tmp_path)})
    evaluate = Program(tmp_path / "outputs", "src/evaluate.py")
    run = evaluate("checkpoint=5", ok=False)  # a file's name
    assert (run.returncode, run.folders) == (2, []), str(run)
    assert re.fullmatch(r"error: 5: no such file.*\n", run.stderr), run.stderr
    run = evaluate(ok=False)
    assert run.returncode == 2
    assert re.fullmatch("error: checkpoint must be given: checkpoint=.*\n", run.stderr), run.stderr


def test_help_shows_the_keys_of_what_is_chosen(run_train: Program) -> None:
    page = run_train("model=resnet18,mnist_cnn", "optimizer=adamw", "lr=0.1", "--help").stdout
    for name in ("model/resnet18", "model/mnist_cnn", "optimizer/adamw"):
        of_editors, _, text = (ROOT / "conf" / f"{name}.yaml").read_text().partition("\n")
        assert "schema" in of_editors
        assert text in page
    assert "scheduler" not in page
    assert "batch_size: 64 #" in run_train("lr=0.1", "--help").stdout, "nothing is chosen: the front page"
    run = run_train("model=resnet8", "--help", ok=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch("error: model=resnet8: did you mean resnet18.*\n", run.stderr)


def test_an_evaluation_finds_the_data_where_the_training_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = {"config": checked("data=mnist", "data_dir=images").record}
    monkeypatch.chdir("/")
    raw = composed("checkpoint=best.ckpt", page="evaluate")
    assert config_of(Path("best.ckpt"), record, raw).data_dir == str(tmp_path / "images")
    assert config_of(Path("best.ckpt"), record, raw | {"data_dir": "/moved"}).data_dir == "/moved"


def test_an_evaluation_takes_over_options_of_the_same_data_set_only(tmp_path: Path) -> None:
    record = {"config": composed("data=synthetic", "data.num_classes=3")}

    def data_of(*overrides: str) -> dict[str, Any]:
        raw = composed("checkpoint=best.ckpt", *overrides, page="evaluate")
        return config_of(tmp_path / "best.ckpt", record, raw).data

    of_training = {"mix", "mix_alpha", "sampling"}
    kept = {name: value for name, value in record["config"]["data"].items() if name not in of_training}
    assert data_of("++data.samples=7") == {**kept, "samples": 7}
    digits = data_of("+data=digits")
    assert (digits["_target_"], "samples" in digits) == ("project.data.digits", False)
    with pytest.raises(BAD_INPUT) as caught:
        data_of("data=digits")
    assert error_line(caught.value) == "data: there is no such key; +data=<name> adds it"


@pytest.mark.parametrize("key", ["model.pretrained", "seed", "optimizer.name", "lr"])
def test_an_evaluation_refuses_what_the_checkpoint_decides(key: str) -> None:
    asked = composed("checkpoint=best.ckpt", f"+{key}=0", page="evaluate")
    with pytest.raises(UserError, match=f"^{key.partition('.')[0]} comes from the checkpoint.*leave it out"):
        config_of(Path("best.ckpt"), {"config": composed()}, asked)


def test_an_evaluation_refuses_images_unlike_those_of_the_training() -> None:
    path, spec = Path("best.ckpt"), Spec(1, 12, ("cat", "dog"))
    record = {"spec": asdict(spec)}
    check_same_images(path, record, replace(spec, mean=(0.5,)))
    many = tuple(f"c{number}" for number in range(7))
    for changes, says in (
        ({"channels": 3}, "data: images have channels=3, but best.ckpt was trained on 1"),
        ({"classes": ("Dog", "cat")}, "only the data set has Dog, only best.ckpt has dog"),
        ({"classes": ("cat", "cow", "dog")}, "data: other classes than in training: only the data set has cow"),
        ({"classes": many}, "only the data set has c0, c1, c2, c3, c4 and 2 more, only best.ckpt has cat, dog"),
        ({"classes": ("dog", "cat")}, "data: other classes than in training: their order differs"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            check_same_images(path, record, replace(spec, **changes))


def test_a_traceback_for_those_who_ask(run_train: Program) -> None:
    run = run_train("lr=-1", env={"HYDRA_FULL_ERROR": "1"}, ok=False)
    assert run.returncode == 2
    assert "Traceback" in run.stderr
    assert run.stderr.endswith("error: lr=-1: must be greater than 0\n")
