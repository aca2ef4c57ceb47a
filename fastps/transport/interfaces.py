# SPDX-License-Identifier: Apache-2.0
"""The address of this machine on which a process listens, and which the others get.

It is one address, never all: the configured host or interface, else the address from which this
machine reaches the scheduler. Reads the kernel's tables; starts nothing and sends nothing.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from fastps.config import Config
from fastps.errors import ConfigError
from fastps.transport import sockets

SIOCGIFADDR = 0x8915  # netdevice(7)
IFREQ = struct.Struct("16s24x")
IPV6_TABLE = Path("/proc/net/if_inet6")


def own_address(config: Config) -> str:
    """Choose the address to listen on: host, interface, or the route to the scheduler.

    Raises ConfigError naming the interfaces that exist when the wanted one does not.
    """
    if config.host:
        return config.host
    if config.interface:
        return _address_of_interface(config.interface)
    return _route_to(config.scheduler_host or "127.0.0.1")


def _address_of_interface(wanted: str) -> str:
    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return _address_of_name(wanted)
    if network.num_addresses == 1:
        return str(network.network_address)
    address = _route_to(str(network.network_address + 1))
    if ipaddress.ip_address(address) not in network:
        raise ConfigError(
            f"FASTPS_INTERFACE={wanted}: this machine has no address in that network; name "
            f"another network, or one of its interfaces {_interface_names()}"
        )
    return address


def _address_of_name(name: str) -> str:
    request = IFREQ.pack(name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, request)
        except OSError as error:
            address = _ipv6_address_of(name)
            if address:
                return address
            raise ConfigError(
                f"FASTPS_INTERFACE={name}: this machine has no such interface with an address "
                f"({error.strerror}); name one of {_interface_names()}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _ipv6_address_of(name: str) -> str:
    """Return an interface's first global IPv6 address, or an empty string."""
    if not IPV6_TABLE.exists():
        return ""
    for line in IPV6_TABLE.read_text().splitlines():
        digits, _, _, scope, _, interface = line.split()
        if interface == name and scope in ("00", "10"):
            return str(ipaddress.IPv6Address(int(digits, 16)))
    return ""


def _interface_names() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


def _route_to(host: str) -> str:
    """Return the address this machine would send from to reach host."""
    try:
        found = sockets.look_up(
            host, sockets.DISCARD_PORT, kind=socket.SOCK_DGRAM, timeout_s=sockets.LOOKUP_S
        )
    except socket.gaierror as error:
        raise ConfigError(
            f"unknown host {host!r} ({error.strerror}); set FASTPS_SCHEDULER_HOST to a name or "
            "address that this machine can resolve"
        ) from error
    failure: OSError | None = None
    own = ""
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as sock:
            try:
                sock.connect(address)  # looks up the route, sends nothing
            except OSError as error:
                failure = error
                own = str(address[0]) if sockets.is_loopback(str(address[0])) else own
                continue
            return str(sock.getsockname()[0])
    if own:  # the loopback is down: processes of this machine use Unix sockets
        return own
    raise ConfigError(
        f"no route to {host!r} ({failure}); set FASTPS_HOST or FASTPS_INTERFACE to the address "
        "or interface to use"
    )
