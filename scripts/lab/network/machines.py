"""Make network namespaces that act as machines, each with an address, a name and a link of its own.

Linux and root only. A link can be limited to a rate, cut and restored; all processes of a machine can be killed.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from threading import current_thread, main_thread
from types import TracebackType
from typing import Any

NETWORK = "10.71.33"
HOSTS = Path("/etc/netns")
QUEUE = "100ms"  # longest wait of a packet for a limited link; later packets are dropped


class NoMachines(Exception):
    """This system can't create namespaces. The message has the reason."""


class Machines:
    """`count` machines on one switch, as a context manager.

    At the end, SIGTERM included, all their processes are killed. Each machine has its own hostname, one of `names`, and
    a hosts file with the names of the others.

    Args:
        rate: of each machine's link, in each direction, in tc's notation (`200mbit`). None: as fast as memory.
        burst: bytes that an idle link passes at once. They should be few compared to the timed messages, but more than
            the link carries in the milliseconds for which a busy machine neglects it.

    Raises:
        NoMachines: this system or user can't create them.
    """

    def __init__(self, count: int, rate: str | None = None, burst: int = 32_768) -> None:
        self.rate = rate
        self.burst = burst
        self._prefix = f"ls{uuid.uuid4().hex[:6]}"
        self._switch = f"{self._prefix}s"
        self.names = [f"{self._prefix}m{index}" for index in range(count)]

    def __enter__(self) -> "Machines":
        if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
            raise NoMachines(f"{missing[0]} is not installed (packages iproute2 and util-linux)")
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and current_thread() is main_thread():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that __exit__ runs
        try:
            self._build()
            self.limit(self.rate)
        except NoMachines:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for index, name in enumerate(self.names):
            self.kill(index)
            shutil.rmtree(HOSTS / name, ignore_errors=True)
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def address(self, index: int) -> str:
        return f"{NETWORK}.{index + 1}"

    def command(self, index: int, command: Sequence[str], hidden: Sequence[str | Path] = ()) -> list[str]:
        """Return a command that runs `command` on the machine, under its host name and with the same pid.

        Args:
            hidden: folders of other machines. The command sees empty ones instead.
        """
        mounts = "".join(f"mount -t tmpfs none {shlex.quote(str(folder))} && " for folder in hidden)
        named = f'{mounts}hostname {self.names[index]} && exec "$@"'
        return ["ip", "netns", "exec", self.names[index], "unshare", "--uts", "sh", "-c", named, "sh", *command]

    def rank(self, index: int, command: Sequence[str], port: int) -> list[str]:
        """Return a command that runs `command` on a machine as one rank of a run over all, with `env://` variables."""
        place = {"RANK": index, "WORLD_SIZE": len(self.names), "MASTER_ADDR": self.address(0), "MASTER_PORT": port}
        return self.command(index, ["env", *(f"{name}={value}" for name, value in place.items()), *command])

    def start(
        self, index: int, command: Sequence[str], hidden: Sequence[str | Path] = (), **options: Any
    ) -> subprocess.Popen[str]:
        """Start the command on a machine. `options` are Popen's."""
        return subprocess.Popen(self.command(index, command, hidden), text=True, **options)

    def kill(self, index: int) -> None:
        """Send SIGKILL to all processes of the machine."""
        for pid in self.processes(index):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def processes(self, index: int) -> list[int]:
        """Return the pids of all processes of the machine."""
        listed = subprocess.run(["ip", "netns", "pids", self.names[index]], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def link(self, index: int, up: bool) -> None:
        """Cut the machine's link, or restore it. Packets are lost; no process gets an error."""
        _ip("-n", self._switch, "link", "set", f"p{index}", "up" if up else "down")

    def part(self, apart: Sequence[int]) -> None:
        """Part the network: the machines `apart` reach each other, and the others reach each other."""
        for index in range(len(self.names)):
            _ip("-n", self._switch, "link", "set", f"p{index}", "master", "apart" if index in apart else "switch")

    def limit(self, rate: str | None) -> None:
        """Set the rate of every link in each direction. None: as fast as memory."""
        self.rate = rate
        for index, name in enumerate(self.names):
            for namespace, device in ((name, "eth0"), (self._switch, f"p{index}")):
                place = ("tc", "-n", namespace, "qdisc")
                if rate is not None:
                    shape = ("tbf", "rate", rate, "burst", str(self.burst), "latency", QUEUE)
                    _run(*place, "replace", "dev", device, "root", *shape)
                elif "tbf" in _run(*place, "show", "dev", device):
                    _run(*place, "delete", "dev", device, "root")

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        for bridge in ("switch", "apart"):
            _ip("-n", self._switch, "link", "add", bridge, "type", "bridge")
            _ip("-n", self._switch, "link", "set", bridge, "up")
        for index, name in enumerate(self.names):
            HOSTS.joinpath(name).mkdir(parents=True)
            hosts = {other: self.address(at) for at, other in enumerate(self.names)}
            hosts[name] = "127.0.1.1"  # as on Debian, where a machine's own name is a loopback address
            lines = ["127.0.0.1 localhost", *(f"{address} {other}" for other, address in hosts.items())]
            HOSTS.joinpath(name, "hosts").write_text("\n".join([*lines, ""]))
            _ip("netns", "add", name)
            port = ("type", "veth", "peer", "name", f"p{index}", "netns", self._switch)
            _ip("-n", name, "link", "add", "eth0", *port)
            _ip("-n", self._switch, "link", "set", f"p{index}", "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoMachines(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1] if done.stderr else 'failed'}")
    return done.stdout
