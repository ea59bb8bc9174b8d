"""Engines that start a run's processes: real ones. Where one is not installed its tests are skipped, and say why;
install.sh beside this file installs them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Program, Run
from engines.cluster import Cluster, NoCluster
from engines.sites import JOB, Site
from network.machines import Machines, NoMachines


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run JOB on one device: every engine must end with its bits."""
    return Program(tmp_path_factory.mktemp("one_device") / "outputs")(*JOB)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    """Yield three machines on one switch, whose own names are loopback addresses to them, as on Debian."""
    try:
        with Machines(3) as made:
            yield made
    except NoMachines as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Yield a SLURM cluster of two nodes."""
    try:
        with Cluster(2) as made:
            yield made
    except (NoCluster, NoMachines) as reason:
        pytest.skip(str(reason))
