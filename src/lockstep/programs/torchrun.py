"""Run torchrun on several machines with the settings that restarts need:

    lockstep torchrun --nnodes=1:3 --max-restarts=100 --rdzv-endpoint=10.0.0.1:29500 src/train.py strategy=ddp pieces=6

Type the same command on each machine, in any order; one of them has the endpoint. All arguments go to torchrun. They
override what this command sets: --rdzv-conf=..., --local-addr=...

Workers are forks of a process that has imported everything; with PYTHON_EXEC=python they are new Python processes.
"""

import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import NoReturn

from lockstep.launch.environment import STORE
from lockstep.launch.rendezvous import address_towards, interface_towards, resolve_address

PORT = 29400  # torchrun's
# A lost machine is detected after 3 s instead of 15 s. The clocks of all machines must agree within 3 s.
HEARTBEATS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,read_timeout=60"


def between_machines(endpoint: str, nodes: str) -> tuple[list[str], dict[str, str]]:
    """Return torchrun's options and the variables for machines that meet at an endpoint, `host` or `host:port`.

    Args:
        nodes: the number of machines, `2` or `1:3`.

    Raises:
        UserError: this machine can't resolve the endpoint.
    """
    host, _, port = endpoint.partition(":")
    address = resolve_address(host, int(port or PORT))
    # This machine's own name may resolve to a loopback address (Debian: 127.0.1.1), which others can't reach.
    local = address_towards(address) or address
    variables = {}
    if interface := os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(address):
        variables["GLOO_SOCKET_IFNAME"] = interface
    if ":" in nodes:
        # Fewer machines may continue the run, so rank zero takes no step after 3 s without an answer of the store:
        # lockstep/callbacks/store_lease.py.
        variables[STORE] = f"{address}:{port or PORT}"
    conf = f"is_host={int(local == address)},{HEARTBEATS}"
    return ["--rdzv-backend=c10d", f"--local-addr={local}", f"--rdzv-conf={conf}"], variables


def option(arguments: Sequence[str], name: str) -> str:
    """Return the value of one of torchrun's options, `--name=value` or `--name value`; empty without it."""
    following = [*arguments[1:], ""]
    for argument, after in zip(arguments, following, strict=True):
        word, equals, value = argument.partition("=")
        if word.replace("_", "-") == name:
            return value if equals else after
    return ""


def start(arguments: list[str], of_torchrun: Sequence[str]) -> NoReturn:
    """Become torchrun.

    Args:
        arguments: all arguments.
        of_torchrun: those that are not the program's.

    Raises:
        UserError: this machine can't resolve the endpoint.
    """
    settings: list[str] = []
    # Each round of workers uses a new store. The agents' store has keys of the earlier round, with which half of the
    # restarts hang.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if endpoint := option(of_torchrun, "--rdzv-endpoint"):
        settings, between = between_machines(endpoint, option(of_torchrun, "--nnodes"))
        variables |= between
    module = "torch.distributed.run" if os.environ.get("PYTHON_EXEC") else "lockstep.programs.workers.torchrun"
    os.execve(sys.executable, [sys.executable, "-m", module, *settings, *arguments], {**os.environ, **variables})


def main(arguments: list[str]) -> int:
    """Become torchrun, or print what this command adds to it."""
    of_torchrun = list(takewhile(lambda each: not each.endswith(".py"), arguments))
    if {"-h", "--help"} & {*of_torchrun}:
        print(__doc__)
        return 0
    start(arguments, of_torchrun)
