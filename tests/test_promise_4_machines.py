"""Several machines take the steps of one device, to the bit; those that differ are refused; nobody else can listen."""

import shutil
import signal
import subprocess

import pytest
from conftest import Program, Run, listening, summary_of, workers_of
from PIL import Image
from several import JOB, Site, stop

pytestmark = pytest.mark.slow
SHORT = ("max_epochs=2",)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Program(tmp_path_factory.mktemp("one") / "outputs")(*JOB, *SHORT)


def test_a_sweep_of_two_machines_of_two_devices_goes_on_on_three_of_one(
    site: Site, one_device: Run, run_train: Program
) -> None:
    """Each resolves its own name to a loopback address, as on Debian. Then a job goes on on three machines, kept by
    another one, to which its folder was carried; the others have no checkpoint."""
    met = ("num_nodes=2", f"rdzv_endpoint={site.names[0]}:29506", "strategy=ddp", "devices=2", "name=sweep")
    runs = site.finish_all([site.start(index, "-m", *JOB, *SHORT, *met, "seed=0,1") for index in range(2)])
    assert [run.returncode for run in runs] == [0, 0], "\n".join(map(str, runs))
    folder, other = (file.parent for file in sorted(runs[0].outputs.rglob("sweep/**/summary.json")))
    two = summary_of(folder)["weights_sha256"]
    assert two == one_device.summary["weights_sha256"]
    assert two != summary_of(other)["weights_sha256"], "the control"
    assert not [*runs[1].outputs.rglob("sweep/**/summary.json")]

    shutil.copytree(folder, run_train.outputs / "copy")
    carried = site.homes[1] / "outputs" / "carried" / "there"
    shutil.move(folder, carried)
    shutil.rmtree(other)
    three = ("num_nodes=3", f"rdzv_endpoint={site.names[1]}:29501", "devices=1", "max_epochs=4")
    runs = site.finish_all([site.start(index, f"resume={carried}", *three) for index in (0, 1, 2)])
    assert [run.returncode for run in runs] == [0] * 3, "\n".join(map(str, runs))
    alone = ("devices=1", "strategy=auto", "num_nodes=1", "rdzv_endpoint=null", "max_epochs=4")
    run_train(f"resume={run_train.outputs / 'copy'}", *alone)
    on_one = summary_of(run_train.outputs / "copy")
    assert summary_of(carried)["weights_sha256"] == on_one["weights_sha256"] != two
    assert not [file for index in (0, 2) for file in site.homes[index].glob("outputs/[cs]*/**/*.ckpt")]


@pytest.mark.parametrize("script", ["evaluate.py", "predict.py"])
def test_a_checkpoint_of_one_machine_is_tested_and_predicted_with_on_two(
    site: Site, one_device: Run, script: str
) -> None:
    """Only the machine that keeps the run has the checkpoint: the other one sees nothing of its files."""
    checkpoint = site.homes[0] / "carried.ckpt"
    shutil.copy(one_device.folder / "checkpoints" / "best.ckpt", checkpoint)
    told, name = [f"checkpoint={checkpoint}"], script.removesuffix(".py")
    for index in range(2):
        (site.homes[index] / "images").mkdir(exist_ok=True)
        for number in range(5):
            shade = Image.new("L", (12, 12), 50 * number)
            shade.save(site.homes[index] / "images" / f"{number}.png")
    if script == "predict.py":
        told.append("images=images")
    met = ("num_nodes=2", f"rdzv_endpoint={site.names[0]}:29507", "strategy=ddp", f"name={name}_two")
    runs = site.finish_all([site.start(index, *told, *met, script=script) for index in range(2)])
    assert [run.returncode for run in runs] == [0, 0], "\n".join(map(str, runs))
    (two,) = runs[0].outputs.glob(f"{name}_two/*")
    alone = site.finish(0, site.start(0, *told, f"name={name}_one", script=script))
    (one,) = alone.outputs.glob(f"{name}_one/*")
    if script == "evaluate.py":
        assert summary_of(two)["metrics"]["test/correct"] == summary_of(one)["metrics"]["test/correct"] > 0
    else:
        assert (two / "predictions.csv").read_text() == (one / "predictions.csv").read_text()


def test_torchrun_and_slurm(site: Site, one_device: Run) -> None:
    """Who starts workers by other means: torchrun on two machines, then SLURM's variables."""
    met = ("strategy=ddp", "num_nodes=2", "devices=1")
    endpoint = f"--rdzv-endpoint={site.names[0]}:29502"
    torchrun = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint)
    processes = [site.start(index, *JOB, *SHORT, *met, "name=torchrun", launcher=torchrun) for index in range(2)]
    runs = site.finish_all(processes)
    assert [run.returncode for run in runs] == [0, 0], "\n".join(map(str, runs))
    folders = [folder for run in runs for folder in run.outputs.glob("torchrun/*/summary.json")]
    assert [summary_of(file.parent)["weights_sha256"] for file in folders] == [one_device.summary["weights_sha256"]]

    job = {"JOB_ID": "7", "STEP_NUM_TASKS": "2", "LOCALID": "0", "NNODES": "2"}
    master = {"MASTER_ADDR": site.names[0], "MASTER_PORT": "29503"}

    def task(number: str) -> dict[str, str]:
        return {f"SLURM_{key}": value for key, value in (job | {"PROCID": number, "NODEID": number}).items()} | master

    processes = [site.start(index, *JOB, *SHORT, *met, "name=slurm", env=task(str(index))) for index in range(2)]
    runs = site.finish_all(processes)
    assert [run.returncode for run in runs] == [0, 0], "\n".join(map(str, runs))
    (folder,) = (file.parent for run in runs for file in run.outputs.glob("slurm/*/summary.json"))
    assert summary_of(folder)["weights_sha256"] == one_device.summary["weights_sha256"]


@pytest.mark.parametrize("differs", ["config", "code"])
def test_machines_that_differ_are_refused(site: Site, differs: str) -> None:
    own = "data.sample_seed=1" if differs == "config" else "lr=0.03"
    code = site.homes[1] / "src" / "project" / "schedules.py"
    before = code.read_text()
    code.write_text(before + "# another line\n" * (differs == "code"))
    options = (*JOB, *SHORT, "strategy=ddp", "num_nodes=2", f"rdzv_endpoint={site.names[0]}:29504")
    try:
        runs = site.finish_all([site.start(0, *options, "name=odd"), site.start(1, *options, "name=odd", own)])
    finally:
        code.write_text(before)
    said = {"config": "data.sample_seed is 1", "code": "the code in src/ is "}[differs]
    for run in runs:
        assert run.returncode == 2, str(run)
        assert run.stderr.startswith(f"error: machines differ: {said}"), run.stderr
        assert f" on {site.names[1]}, " in run.stderr
        assert len(run.stderr.splitlines()) == 1
        assert not [*run.outputs.glob("odd/*")], "no folder is left"


def test_a_machine_that_waits_says_for_whom_and_hears_signals(site: Site) -> None:
    """Either of them alone: the one that keeps the run, and the one that looks for it."""
    options = (*JOB, "strategy=ddp", "num_nodes=2", f"rdzv_endpoint={site.names[0]}:29505", "name=waits")
    for index, said, signum, code in (
        (0, "waiting for 1 more machine at", signal.SIGTERM, 143),
        (1, f"waiting for {site.names[0]}:29505", signal.SIGINT, 130),
    ):
        process = site.start(index, *options, launcher=("-u",))
        assert isinstance(process, subprocess.Popen)
        assert process.stderr is not None
        assert process.stderr.readline().startswith(said)
        stop(process, signum)
        run = site.finish(index, process)
        assert run.returncode == code, str(run)
        assert run.stderr == f"interrupted by {signum.name}\n"
        ended = [summary_of(file.parent)["status"] for file in run.outputs.glob("waits/*/summary.json")]
        assert ended == ["interrupted"] * (index == 0)


def test_nobody_hears_on_another_interface_and_a_third_machine_is_not_needed(site: Site) -> None:
    """All that listens does so at the address where the machines meet, or on the loopback device."""
    task = ("devices=2", "max_epochs=100000", "name=heard")
    processes = site.start_all(*task, count=2)
    site.saved(0, processes[0])
    heard = set()
    for process in processes:
        for pid in (process.pid, *workers_of(process)):
            heard |= listening(pid)
    met = ("strategy=ddp", "num_nodes=2", f"rdzv_endpoint={site.names[0]}:29500")
    third = site.finish(2, site.start(2, *JOB, *met, *task))
    assert third.returncode == 2, str(third)
    assert "has its 2 machines" in third.stderr
    assert all(process.poll() is None for process in processes)
    stop(processes[1])
    runs = site.finish_all(processes)
    assert [run.returncode for run in runs] == [143, 143], "\n".join(map(str, runs))
    assert heard >= {site.machines.address(0)}
    assert heard <= {"127.0.0.1", site.machines.address(0), site.machines.address(1)}
