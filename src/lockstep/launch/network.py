"""Addresses: at which one this machine is reached, and which of its interfaces leads to another one."""

import socket
import struct
import sys
from contextlib import suppress
from ipaddress import ip_address

from lockstep.errors import UserError

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # of Linux's sockios.h: the address of an interface


def resolve_address(host: str, port: int) -> str:
    """The address that a host's name stands for here.

    A machine's own name may stand for a loopback address (Debian's /etc/hosts), which is of no use to others: then it
    is the address that this machine has on the network.

    Raises:
        UserError: nobody here knows the name, or the machine has several addresses to choose from.
    """
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise UserError(f"{host}: no address is known here for it ({error.strerror})") from None
    meant = host == address or host.startswith("localhost")
    if meant or not ip_address(address).is_loopback:
        return address
    addresses = sorted({candidate for _, candidate in _interfaces() if not ip_address(candidate).is_loopback})
    if len(addresses) != 1:
        alternatives = f"has {', '.join(addresses)}" if addresses else "has none else"
        raise UserError(
            f"{host}: stands for {address} here, which others can't reach; give an address: this machine {alternatives}"
        )
    return addresses[0]


def interface_towards(address: str) -> str | None:
    """The network interface that leads to an IPv4 address; None where that can't be told."""
    with suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        local_address = str(probe.getsockname()[0])
        if ip_address(local_address).is_loopback:
            return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        return next((name for name, interface_address in _interfaces() if interface_address == local_address), None)
    return None


def _interfaces() -> list[tuple[str, str]]:
    """Names and IPv4 addresses of this machine's network interfaces (Linux; elsewhere none are known)."""
    if sys.platform != "linux":
        return []
    import fcntl

    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                interfaces.append((name, socket.inet_ntoa(answer[20:24])))
    return interfaces


def bind_socket(address: str, port: int = 0) -> socket.socket:
    """A socket on a port (0: a free one) that hears who connects to this address, and to no other one of this
    machine."""
    return socket.create_server((address, port), family=_family(address))


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
