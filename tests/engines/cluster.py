"""A real SLURM on this machine: a controller and nodes that are network namespaces."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from engines.sites import SECONDS, Site, environment
from network.machines import HOSTS, Machines

NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "nsenter")
CONF = """ClusterName=lockstep
SlurmctldHost={controller}({address})
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,requeue_delay=0
KillWait=20
SlurmctldTimeout=10
SlurmdTimeout=10
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class NoCluster(Exception):
    """A cluster can't be made here. The message says why."""


class Cluster:
    """A SLURM cluster while it is entered: machine 0 is the controller and the login node, the others are its nodes.

    Raises:
        NoCluster: something is not installed.
        NoMachines: this system or user can't make namespaces.
    """

    def __init__(self, nodes: int) -> None:
        self.machines = Machines(nodes + 1)
        self.folder = Path(tempfile.gettempdir())  # until it is entered
        self.jobs: dict[str, Path] = {}  # the output of each job
        self._open = ExitStack()

    def __enter__(self) -> "Cluster":
        if missing := [tool for tool in NEEDED if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
            raise NoCluster(f"{missing[0]} is not installed (packages slurm-wlm and munge)")
        with ExitStack() as opened:
            self.folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="lockstep_slurm_")))
            opened.enter_context(self.machines)
            self._configure()
            self._daemon(opened, self._munged())
            wait_until((self.folder / "munge" / "socket").exists, "munge")
            self._daemon(opened, self.machines.command(0, ["slurmctld", "-D", "-i"]))
            for index in range(1, len(self.machines.names)):
                self._daemon(opened, self._slurmd(index))
            wait_until(lambda: self.ask("sinfo", "--noheader", "--format=%t %D") == f"idle {self.nodes}", "the nodes")
            self._open = opened.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        for job in self.jobs:
            self.ask("scancel", "--signal=KILL", "--full", job)
            self.ask("scancel", job)
        self._open.close()

    @property
    def nodes(self) -> int:
        return len(self.machines.names) - 1

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *command: str) -> list[str]:
        """Return what runs a command on the login node."""
        return self.machines.command(0, command)

    def ask(self, *command: str) -> str:
        """Return what one of SLURM's commands answers; nothing where it fails."""
        done = subprocess.run(
            self.command(*command), env=environment() | self.variables, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    def submit(self, site: Site, *command: str, output: str = "output") -> str:
        """Queue a script with sbatch, in the site's folder; return the job's number."""
        file = site.home / f"{output}.txt"
        done = subprocess.run(
            self.command("sbatch", "--parsable", f"--output={file}", *command),
            cwd=site.home,
            env=environment() | self.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        self.jobs[job] = file
        return job

    def state(self, job: str) -> dict[str, str]:
        """Return what the controller knows of a job, by `scontrol show job`'s names: JobState, ExitCode, Restarts,
        ..."""
        pairs = (word.partition("=") for word in self.ask("scontrol", "show", "job", job).split())
        return {key: value for key, _, value in pairs}

    def output(self, job: str) -> str:
        return self.jobs[job].read_text() if self.jobs[job].exists() else ""

    def wait(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states, or else has ended; return what the controller knows of it."""
        self.wait_until(job, lambda: self.state(job).get("JobState") in (states or ENDS))
        return self.state(job)

    def wait_until(self, job: str, done: Callable[[], bool]) -> None:
        """Wait for something that a job does; fail when the job has ended without it."""
        deadline = time.monotonic() + SECONDS
        while not done():
            known = self.state(job)
            if (known.get("JobState") in ENDS or time.monotonic() > deadline) and not done():
                pytest.fail(f"waited in vain for job {job}: {known}\n{self.output(job)}")
            time.sleep(0.1)

    def kill(self, node: int) -> None:
        """Kill a node whole, as if its power failed."""
        self.machines.kill(node)

    def start(self, node: int) -> None:
        """Start a node that was killed."""
        self._daemon(self._open, self._slurmd(node))

    def _configure(self) -> None:
        self.folder.chmod(0o755)
        for name in ("munge", "state", *(f"spool.{name}" for name in self.machines.names[1:])):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        shutil.chown(self.folder / "munge", "munge", "munge")
        shutil.chown(self.folder / "munge.key", "munge", "munge")
        (self.folder / "munge.key").chmod(0o400)
        nodes = [
            f"NodeName={name} NodeAddr={self.machines.address(index)} CPUs=2 RealMemory=4000 State=UNKNOWN"
            for index, name in enumerate(self.machines.names)
            if index
        ]
        names = {"controller": self.machines.names[0], "address": self.machines.address(0), "folder": self.folder}
        (self.folder / "slurm.conf").write_text(CONF.format(nodes="\n".join(nodes), **names))

    def _munged(self) -> list[str]:
        places = {"key-file": "munge.key", "socket": "munge/socket", "pid-file": "munge/pid"}
        places |= {"seed-file": "munge/seed", "log-file": "munge/log"}
        options = [f"--{option}={self.folder / place}" for option, place in places.items()]
        user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        return [*user, "munged", "--foreground", "--force", *options]

    def _slurmd(self, index: int) -> list[str]:
        """Return what starts a node. Not by `ip netns exec`, which hides /sys/fs/cgroup from it."""
        name = self.machines.names[index]
        inside = f"mount --bind {HOSTS / name / 'hosts'} /etc/hosts && hostname {name} && exec slurmd -D -N {name}"
        return ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "sh", "-c", inside]

    def _daemon(self, opened: ExitStack, command: Sequence[str]) -> None:
        """Start a daemon; it is ended, by its id, with the cluster."""
        env = environment() | self.variables
        env["PATH"] += ":/usr/sbin"
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, env=env, stdin=quiet, stdout=quiet, stderr=quiet)

        def end() -> None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        opened.callback(end)


def wait_until(done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not done():
        if time.monotonic() > deadline:
            raise NoCluster(f"{what} did not come up within 60 s")
        time.sleep(0.1)
