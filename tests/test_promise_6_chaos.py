"""Promise 6: struck at random, a run goes on. scripts/lab/chaos.py, a short seed; a long one:
docs/devices/when-something-dies.md."""

import os
import signal
from pathlib import Path

import forks
import pytest
from conftest import ROOT, forked, wait_for
from network.machines import Machines, NoMachines

pytestmark = pytest.mark.usefixtures("processes")


CHAOS = ROOT / "scripts" / "lab" / "chaos.py"
# Its damage is an end cut off: a flipped bit may be one that nobody reads, see commands/test_fuzz.py.
SEED = "--seed=2"
SMALL = ("data=synthetic", "data.samples=800", "data.image_size=12", "data.num_classes=3", "checkpoint_every=2")


@pytest.mark.nightly
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = forks.Fork([str(CHAOS), *SMALL, "max_epochs=100000"], ROOT, os.environ | {"TMPDIR": str(tmp_path)})
    wait_for(lambda: [*tmp_path.rglob("last.ckpt")], process)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "interrupted: nothing is concluded\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_exact_survives_faults_on_changing_layouts() -> None:
    done = forked(CHAOS, "--exact", "--faults=4", SEED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 faults" in done.stdout


@pytest.mark.nightly
def test_a_run_that_goes_on_otherwise_is_distinguished() -> None:
    """The control: another seed after each fault, of which all four end a life. It trains for most of a life: a fault
    may strike when nothing is left to do, four won't."""
    trains = ("checkpoint_every=10", "max_epochs=20")
    done = forked(CHAOS, "--faults=4", "--layouts=single", "--control", "--seed=31", *SMALL, *trains)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROBLEM weights_sha256" in done.stdout


@pytest.fixture
def machines() -> None:
    try:
        with Machines(2):
            pass
    except NoMachines as reason:
        pytest.skip(str(reason))


STORM = ("--storm", "--machines=2", "--every=14", "--strikes=2", "--calm=3", "--store-every=0", "--seed=1")


@pytest.mark.nightly
@pytest.mark.usefixtures("machines")
def test_a_run_survives_a_storm(tmp_path: Path) -> None:
    """A machine is killed, one is cut off, and so is the one that serves torchrun's store: the run goes on with another
    one's. It ends with the bits of one device."""
    served = ("--every=20", "--strikes=3", "--store-every=40")
    done = forked(CHAOS, *STORM, *served, f"--picture={tmp_path / 'storm.png'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 x machine killed" in done.stdout
    assert "1 x machine cut off" in done.stdout
    assert "1 x store's host killed" in done.stdout
    assert "| rendezvous |" in done.stdout
    assert (tmp_path / "storm.png").exists()


@pytest.mark.nightly
@pytest.mark.usefixtures("machines")
def test_a_survivor_that_skips_a_step_is_distinguished() -> None:
    """The control: what frameworks do that continue without the samples of a lost machine."""
    done = forked(CHAOS, *STORM, "--control")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROBLEM weights_sha256" in done.stdout


@pytest.mark.nightly
@pytest.mark.usefixtures("machines")
def test_a_cut_network_has_one_run() -> None:
    """With one `outputs` for all machines, and with one for each. tests/lab/test_storm.py shows that the check can
    fail."""
    done = forked(CHAOS, "--cuts=4", "--machines=3", "--seed=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 x cut" in done.stdout
