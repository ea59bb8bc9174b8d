"""Network namespaces as machines: several hosts on this one, each with an address, a name and a link of its own.

Linux and root only. A link can be limited to a rate, cut and mended; a machine can be killed whole.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

NETWORK = "10.71.33"
HOSTS = Path("/etc/netns")


class NoMachines(Exception):
    """Namespaces can't be made here. The message says why."""


class Machines:
    """`count` machines on one switch, while it is entered; all that runs on them is killed at the end.

    Args:
        rate: of each machine's link, in each direction, in tc's words (`200mbit`); None: as fast as memory.

    Raises:
        NoMachines: this system or user can't make them.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self.rate = rate
        self._prefix = f"ls{uuid.uuid4().hex[:6]}"
        self._switch = f"{self._prefix}s"
        self.names = [f"{self._prefix}m{index}" for index in range(count)]

    def __enter__(self) -> Machines:
        if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
            raise NoMachines(f"{missing[0]} is not installed (packages iproute2 and util-linux)")
        try:
            self._build()
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
        """What runs `command` on the machine, under its name; its pid is the command's own.

        Args:
            hidden: folders that other machines have: empty there, and gone with the command.
        """
        mounts = "".join(f"mount -t tmpfs none {shlex.quote(str(folder))} && " for folder in hidden)
        named = f'{mounts}hostname {self.names[index]} && exec "$@"'
        return ["ip", "netns", "exec", self.names[index], "unshare", "--uts", "sh", "-c", named, "sh", *command]

    def start(
        self, index: int, command: Sequence[str], hidden: Sequence[str | Path] = (), **options: Any
    ) -> subprocess.Popen[str]:
        """The command, started there; `options` are Popen's."""
        return subprocess.Popen(self.command(index, command, hidden), text=True, **options)

    def kill(self, index: int) -> None:
        """SIGKILL to all that runs on the machine."""
        for pid in self.processes(index):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def processes(self, index: int) -> list[int]:
        """All that run on the machine."""
        listed = subprocess.run(["ip", "netns", "pids", self.names[index]], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def link(self, index: int, up: bool) -> None:
        """Plugs the machine's cable out, or in: nobody is told, packets just don't arrive."""
        _ip("-n", self._switch, "link", "set", f"p{index}", "up" if up else "down")

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for index, name in enumerate(self.names):
            HOSTS.joinpath(name).mkdir(parents=True)
            own = f"127.0.0.1 localhost\n127.0.1.1 {name}\n"  # as Debian's: its own name is a loopback address
            others = (f"{self.address(at)} {other}\n" for at, other in enumerate(self.names) if at != index)
            HOSTS.joinpath(name, "hosts").write_text(own + "".join(others))
            _ip("netns", "add", name)
            port = ("type", "veth", "peer", "name", f"p{index}", "netns", self._switch)
            _ip("-n", name, "link", "add", "eth0", *port)
            _ip("-n", self._switch, "link", "set", f"p{index}", "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            if self.rate:
                for namespace, device in ((name, "eth0"), (self._switch, f"p{index}")):
                    shape = ("tbf", "rate", self.rate, "burst", "32kb", "latency", "100ms")
                    _said("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)


def _ip(*arguments: str) -> None:
    _said("ip", *arguments)


def _said(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoMachines(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1] if done.stderr else 'failed'}")
