"""The interface on which rank 0 listens: that of the address at which the other ranks find it, and no other.

MASTER_ADDR is          rank 0 listens on
127.0.0.1, localhost    the loopback interface: all ranks are on this host
an address of its own   that address
not its own             the interface towards it: rank 0 is reached through a service or a router
a name of this host that means loopback here, such as 127.0.1.1: the interface towards other hosts
"""

import ipaddress
import os
import socket
from contextlib import suppress

_OUTSIDE = "192.0.2.1"
"""An address of no host (RFC 5737): the route towards it leaves this host. Nothing is sent there."""


def own_address(master: str | None) -> tuple[socket.AddressFamily, str]:
    """The address on which this process listens for ranks that know ``master`` as its address.

    Args:
        master: ``MASTER_ADDR``; None if it is unknown.

    Returns:
        The address family and the address.
    """
    found = _resolved(master) if master else []
    own = [(family, address) for family, address in found if _can_listen(family, address)]
    for family, address in own:
        if not ipaddress.ip_address(address).is_loopback or _means_loopback(master or ""):
            return family, address
    towards = _towards(found[0][1] if found and not own else _OUTSIDE)
    return (socket.AF_INET, towards) if towards is not None else (own or [(socket.AF_INET, "127.0.0.1")])[0]


def _resolved(name: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses of a host, IPv6 first: torch's client tries them in this order."""
    with suppress(OSError):
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        found = {(family, str(at[0])) for family, _, _, _, at in entries}
        return sorted(found, key=lambda each: (each[0] != socket.AF_INET6, each[1]))
    return []


def _can_listen(family: socket.AddressFamily, address: str) -> bool:
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.bind((address, 0))
        return True
    return False


def _means_loopback(master: str) -> bool:
    """Whether a name or an address is the loopback interface on every host, and not by this host's table of names."""
    if master == "localhost" or os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE"):
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(master).is_loopback
    return False


def _towards(address: str) -> str | None:
    """This host's address on the interface towards another one; None without a route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect((address, 9))
        return str(trial.getsockname()[0])
    return None


def listen_for_store(master: str, port: int) -> socket.socket | None:
    """A listening socket for the job's store.

    Args:
        master: ``MASTER_ADDR``, to which all ranks connect, also those of this host.
        port: ``MASTER_PORT``.

    Returns:
        None if this process has a store at this port already, or if other hosts know another address by this name: the
        store then listens on all interfaces.
    """
    family, address = own_address(master)
    found = _resolved(master)
    if any(_can_listen(*each) for each in found) and (family, address) not in found:
        return None
    with suppress(OSError):
        return socket.create_server((address, port), family=family, backlog=128)
    return None
