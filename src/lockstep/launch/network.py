"""Network addresses: the one under which others reach this machine, and the interface that leads to another one."""

import socket
import struct
import sys
from contextlib import suppress
from ipaddress import ip_address

from lockstep.errors import UserError

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # get the address of an interface; from Linux's sockios.h


def resolve_address(host: str, port: int) -> str:
    """Return the address of a host that other machines can reach.

    A machine's own name may resolve to a loopback address (Debian's /etc/hosts). Then return the machine's address on
    the network.

    Raises:
        UserError: the name can't be resolved, or resolves to a loopback address and the machine has not exactly one
            other address.
    """
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise UserError(
            f"{host}: this machine can't resolve the name ({error.strerror}): give a name or an address that every "
            "machine can reach"
        ) from None
    intended = host == address or host.startswith("localhost")
    if intended or not ip_address(address).is_loopback:
        return address
    addresses = sorted({candidate for _, candidate in _interfaces() if not ip_address(candidate).is_loopback})
    if len(addresses) != 1:
        right = f"give one of {', '.join(addresses)}" if addresses else "connect this machine to a network"
        raise UserError(f"{host}: its address {address} can't be reached from other machines: {right}")
    return addresses[0]


def interface_towards(address: str) -> str | None:
    """Return the network interface that leads to an IPv4 address; None if it is unknown."""
    with suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        local_address = str(probe.getsockname()[0])
        if ip_address(local_address).is_loopback:
            return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        return next((name for name, interface_address in _interfaces() if interface_address == local_address), None)
    return None


def _interfaces() -> list[tuple[str, str]]:
    """Return names and IPv4 addresses of this machine's network interfaces. The list is empty except on Linux."""
    if sys.platform != "linux":
        return []
    import fcntl

    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                interfaces.append((name, socket.inet_ntoa(reply[20:24])))
    return interfaces


def bind_socket(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at one address of this machine, on a port (0: a free one)."""
    return socket.create_server((address, port), family=_family(address))


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
