# SPDX-License-Identifier: Apache-2.0
"""Whether this machine can use RDMA, and by which device, address and data path.

Reads the kernel's tables of devices; opens one only in open_device(). _transport has the frames
and queue pairs. Calls to a device go by one of two data paths: the native one (_verbs, built
where the header of libibverbs is installed), else pyverbs. Threads: those of the transports that
it opens.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import math
import os
import resource
import socket
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastps.config import Config, load
from fastps.errors import ConfigError, FastPSError, TransportError
from fastps.transport.encryption import STRICT
from fastps.transport.sockets import watch_closely

if TYPE_CHECKING:  # what needs no device must not load what drives one
    from fastps.transport._link import LinkOwner
    from fastps.transport.rdma._transport import Opening, RdmaTransport, VerbsDevice

log = logging.getLogger(__name__)

DEVICES = Path("/sys/class/infiniband")
VERBS_DEVICES = Path("/sys/class/infiniband_verbs")
DEVICE_FILES = Path("/dev/infiniband")
STATUS = Path("/proc/self/status")
DEBIAN_PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
MTUS = {0: 0, 256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}  # bytes -> as the verbs count them
ACK_UNIT_S = 4.096e-6
MAX_ACK_TIMEOUT = 31
ACTIVE = "4:"  # how a port's state begins
CHANNEL_ADAPTER = "1:"  # and a kind of device; others (iWARP, EFA) cannot write with a number
UNUSABLE = 9
RDMA_LANE = 0x80  # in the lane that a connecting worker sends: it asks for RDMA
LINK_BYTES = 512 << 10  # that every link pins for its messages
CAP_IPC_LOCK = 14  # the right to pin without limit
ROLES = 2  # worker and server may be one process
CREDIT_PARTITIONS = 4  # that a link may push before the first result; chunks are partitions
INSTALL = (
    "apt-get install ibverbs-providers; where fastps was built without libibverbs-dev, build it "
    "again with it, or apt-get install python3-pyverbs and let this Python see it: fastps doctor "
    "--link-pyverbs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """The RDMA that this process can use; reason says why there is none, else it is empty."""

    device: str = ""
    port: int = 0
    gid_index: int = 0
    gid: str = ""
    data_path: str = ""
    reason: str = ""

    @property
    def is_usable(self) -> bool:
        """Return whether there is a device, an address and a data path."""
        return not self.reason

    @property
    def usable_gid(self) -> str:
        """Return the address for other members, empty when RDMA cannot be used."""
        return self.gid if self.is_usable else ""

    def describe(self) -> str:
        """Return one line for a log or `fastps doctor`."""
        if self.reason:
            return f"no RDMA: {self.reason}"
        return (
            f"RDMA over {self.device} port {self.port}, GID {self.gid_index} ({self.gid}), "
            f"by the {self.data_path} data path"
        )


def ack_timeout_of(timeout_s: float, retries: int) -> int:
    """Return the exponent of the verbs' timeout, so that all retries together take timeout_s."""
    one_try = timeout_s / (retries + 1)
    return min(max(round(math.log2(one_try / ACK_UNIT_S)), 1), MAX_ACK_TIMEOUT)


def wants_rdma(transport: str, mine: Capability, theirs: str) -> tuple[bool, str]:
    """Decide about one link: (whether it uses RDMA, why or why not).

    transport: the setting, tcp, rdma or auto. theirs: the GID of the peer, empty without RDMA.
    Raises ConfigError when settings demand RDMA and one end cannot use it.
    """
    if transport == "tcp":
        return False, "FASTPS_TRANSPORT=tcp"
    if mine.is_usable and theirs:
        return True, mine.describe()
    why = mine.reason or "the peer has no RDMA device that it can use"
    if transport == "rdma":
        raise ConfigError(
            f"FASTPS_TRANSPORT=rdma, but {why}; see `fastps doctor`, or set FASTPS_TRANSPORT=auto "
            "to fall back to TCP"
        )
    return False, why


# ---- detection ----


def probe(config: Config | None = None, *, devices: Path = DEVICES) -> Capability:
    """Look for a device with an active port, an address on it and a data path.

    Reads a few small files; never raises for a machine without RDMA. config: None: default
    settings. devices: the kernel's table of devices.
    """
    config = config or load(environ={})
    found = _find_address(config, devices)
    if not found.is_usable:
        return found
    why = "" if devices != DEVICES else _why_closed(found.device)
    data_path, missing = _find_data_path(config.rdma_data_path)
    return replace(found, data_path=data_path, reason=why or missing)


def _find_address(config: Config, devices: Path) -> Capability:
    names = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if not names:
        return Capability(reason="the kernel knows no RDMA device (ibv_devinfo lists them)")
    wanted = config.rdma_device
    if wanted and wanted not in names:
        reason = f"FASTPS_RDMA_DEVICE={wanted}: no such device; there are {', '.join(names)}"
        return Capability(reason=reason)
    why = ""
    for name in [wanted] if wanted else names:
        kind = _read(devices / name / "node_type")
        if not kind.startswith(CHANNEL_ADAPTER):
            why = why or f"{name} is {kind or 'unknown'}: neither InfiniBand nor RoCE"
            continue
        ports = sorted(int(path.name) for path in (devices / name / "ports").iterdir())
        for port in [config.rdma_port] if config.rdma_port else ports:
            found = _find_on_port(devices / name, port, config.rdma_gid_index)
            if found.is_usable:
                return found
            why = why or found.reason
    return Capability(reason=why)


def _find_on_port(device: Path, port: int, gid_index: int) -> Capability:
    folder = device / "ports" / str(port)
    state = _read(folder / "state")
    if not state.startswith(ACTIVE):
        reason = f"port {port} of {device.name} is {state or 'not there'}, not active"
        return Capability(reason=reason)
    best: tuple[int, int, str] | None = None
    wanted = range(gid_index, gid_index + 1) if gid_index >= 0 else _gid_indices(folder)
    for index in wanted:
        rank, gid = _rank_of(folder, index)
        if rank < UNUSABLE and (best is None or rank < best[0]):
            best = (rank, index, gid)
        if rank == 0:
            break  # the table may have a thousand entries
    if best is None:
        return Capability(
            reason=f"port {port} of {device.name} has no usable address (GID); give its network "
            "interface an IPv4 address, or set FASTPS_RDMA_GID_INDEX"
        )
    return Capability(device=device.name, port=port, gid_index=best[1], gid=best[2])


def _gid_indices(folder: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(folder / "gids"))
    except OSError:
        return []


def _rank_of(folder: Path, index: int) -> tuple[int, str]:
    """Order addresses: routable RoCE v2 over IPv4, over IPv6, InfiniBand, link-local, RoCE v1.

    The kernel has one name for addresses of InfiniBand and of RoCE v1; the port knows.
    """
    gid = _read(f"{folder}/gids/{index}")
    if not gid.replace(":", "").strip("0"):
        return UNUSABLE, ""
    kind = _read(f"{folder}/gid_attrs/types/{index}")
    address = ipaddress.IPv6Address(gid)
    if kind.startswith("RoCE v2"):
        if address.ipv4_mapped:
            return 0, gid
        return (3 if address.is_link_local else 1), gid
    if kind.startswith("IB"):
        return (2 if _read(folder / "link_layer") == "InfiniBand" else 4), gid
    return UNUSABLE, gid


def _read(path: str | Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""  # an empty entry of the table reads as an error


def _why_closed(device: str) -> str:
    """Return why the device's file cannot be opened, or nothing."""
    for entry in VERBS_DEVICES.glob("uverbs*"):
        if _read(entry / "ibdev") == device:
            path = DEVICE_FILES / entry.name
            if os.access(path, os.R_OK | os.W_OK):
                return ""
            return f"{path} cannot be opened; it must be readable and writable for this user"
    return f"{device} has no file under {DEVICE_FILES}; modprobe ib_uverbs, unless it is removed"


def _find_data_path(wanted: str) -> tuple[str, str]:
    """Return (data path, why there is none)."""
    if wanted in ("auto", "native") and importlib.util.find_spec("fastps.transport.rdma._verbs"):
        try:
            importlib.import_module("fastps.transport.rdma._verbs")
            return "native", ""
        except ImportError:
            pass  # libibverbs is not installed
    if wanted in ("auto", "pyverbs") and importlib.util.find_spec("pyverbs"):
        return "pyverbs", ""
    return "", f"no data path: {INSTALL}"


# ---- opening a device ----


def open_device(config: Config | None = None) -> VerbsDevice:
    """Open the device that probe() finds.

    Raises ConfigError when there is none, TransportError when it cannot be opened.
    """
    config = config or load(environ={})
    found = probe(config)
    if not found.is_usable:
        raise ConfigError(found.reason)
    from fastps.transport.rdma._transport import PythonDevice  # noqa: PLC0415
    from fastps.transport.rdma.pyverbs import Device as PyverbsHandler  # noqa: PLC0415

    arguments = {
        "port": found.port,
        "gid_index": found.gid_index,
        "mtu": MTUS[config.rdma_mtu],
        "traffic_class": config.rdma_traffic_class,
        "ack_timeout": ack_timeout_of(config.rdma_timeout_s, config.rdma_retries),
        "retries": config.rdma_retries,
    }
    try:
        if found.data_path == "native":
            from fastps.transport.rdma._verbs import NativeDevice  # noqa: PLC0415

            return NativeDevice(found.device, **arguments)
        return PythonDevice(PyverbsHandler(found.device, **arguments), name=found.device)
    except TransportError:
        raise
    except Exception as error:  # pyverbs has classes of its own
        raise TransportError(f"cannot open {found.device}: {error}; see ibv_devinfo") from error


# ---- decisions by settings ----


def look_up(config: Config) -> Capability:
    """Probe, unless FASTPS_TRANSPORT=tcp."""
    if config.transport == "tcp":
        return Capability(reason="FASTPS_TRANSPORT=tcp")
    found = probe(config)
    why = _why_unlockable(config)
    if config.transport == "auto" and found.is_usable and why:
        found = replace(found, reason=why)
    log.debug("%s", found.describe())
    return found


def _why_unlockable(config: Config) -> str:
    """Return why this process may fail to pin the bytes of its settings; empty: it can."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    wanted = ROLES * config.rdma_pinned_bytes
    if limit == resource.RLIM_INFINITY or limit >= wanted or may_lock():
        return ""
    return (
        f"`ulimit -l` allows {limit >> 20} MiB, but a worker and a server in one process may pin "
        f"FASTPS_RDMA_PINNED_BYTES each, {wanted >> 20} MiB; raise the one or lower the other"
    )


def may_lock(status: Path = STATUS) -> bool:
    """Return whether this process may pin memory without limit."""
    for line in _read(status).splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> CAP_IPC_LOCK & 1)
    return False


def has_reason(config: Config, own_host: str, others: Sequence[tuple[str, str]]) -> bool:
    """Return whether RDMA may be used with any of the others, given as (GID, host id).

    Within one host only where settings demand it: shared memory and Unix sockets are faster.
    """
    is_forced = config.transport == "rdma"
    return any(gid and (is_forced or host != own_host) for gid, host in others)


def carries_all(config: Config, members: Sequence[tuple[str, str]]) -> bool:
    """Return whether everything between hosts goes by RDMA, from what all members know alike.

    members: (GID, host id) of all workers and servers.
    """
    hosts = {host for _, host in members}
    return all(gid for gid, _ in members) and (config.transport == "rdma" or len(hosts) > 1)


def choose_credit(config: Config) -> int:
    """Return the credit of an RDMA link in bytes: as configured, else some partitions."""
    return config.credit_bytes or CREDIT_PARTITIONS * config.partition_bytes


def takes_rdma(
    config: Config, mine: Capability, own_host: str, *, host_id: str, gid: str
) -> tuple[bool, str]:
    """Decide about the link to a member with that host id and GID, as wants_rdma() does."""
    if config.transport != "rdma" and host_id == own_host:
        return False, ""  # Unix sockets are faster
    if config.encrypt in STRICT:
        return False, f"FASTPS_ENCRYPT={config.encrypt} cannot encrypt it"
    return wants_rdma(config.transport, mine, gid)


def begin_link(
    transport: RdmaTransport,
    descriptor: int,
    owner: LinkOwner,
    config: Config,
    *,
    peer: int,
    lane: int = 0,
    greets_first: bool = True,
) -> Opening:
    """Start a link over an authenticated connection, which the transport owns from here on."""
    if config.encrypt in STRICT:
        os.close(descriptor)
        raise TransportError(f"FASTPS_ENCRYPT={config.encrypt} cannot encrypt RDMA")
    watch_closely(descriptor, config.rdma_timeout_s)
    return transport.adopt(
        descriptor,
        owner,
        peer=peer,
        lane=lane,
        credit_bytes=choose_credit(config),
        greets_first=greets_first,
    )


def give_up(config: Config, name: str, error: TransportError) -> None:
    """Log that TCP replaces a link that failed to come up; raise if settings demand RDMA."""
    if config.transport == "rdma":
        raise TransportError(f"{name} cannot be reached by RDMA: {error}") from error
    log.warning("%s: no RDMA, TCP takes its place: %s", name, error)


def open_transport(config: Config, *, n_links: int) -> RdmaTransport | None:
    """Open the device and make a transport that can pin what n_links need.

    Returns None, and logs why, when that fails and settings allow TCP instead. Otherwise raises
    ConfigError or TransportError.
    """
    try:
        from fastps.transport.rdma._transport import RdmaTransport  # noqa: PLC0415

        device = open_device(config)
        transport = RdmaTransport(
            device,
            io_threads=config.io_threads,
            spin_us=config.spin_us,
            pinned_bytes=config.rdma_pinned_bytes,
            greeting_timeout_s=config.handshake_timeout_s,
        )
        try:
            _rehearse(transport, n_links)
        except BaseException:
            transport.close(timeout_s=config.shutdown_timeout_s)
            raise
        return transport
    except (FastPSError, ImportError) as error:
        if config.transport == "rdma":
            raise
        log.warning("RDMA cannot be used, TCP takes its place: %s", error)
        return None


def _rehearse(transport: RdmaTransport, n_links: int) -> None:
    """Pin as much as the links will, so that a low limit shows before a peer relies on RDMA."""
    memory = np.empty(max(n_links, 1) * LINK_BYTES, np.uint8)
    transport.register(memory.ctypes.data, memory.nbytes).close()


def try_out(config: Config | None = None, *, timeout_s: float = 10.0) -> str:
    """Link this machine's device with itself; return why that fails, or an empty string.

    Blocks until a message has gone each way, at most timeout_s seconds.
    """
    try:
        from fastps.transport._link import LinkOwner  # noqa: PLC0415
        from fastps.transport.rdma._transport import RdmaTransport  # noqa: PLC0415

        transport = RdmaTransport(open_device(config), greeting_timeout_s=timeout_s)
        try:
            ends = socket.socketpair()
            for end in ends:
                end.setblocking(False)
            openings = [transport.adopt(end.detach(), LinkOwner(), peer=0) for end in ends]
            for opening in openings:
                opening.wait(timeout_s=timeout_s)
        finally:
            transport.close(timeout_s=timeout_s)
    except (FastPSError, ImportError) as error:
        return str(error)
    return ""


# ---- the distribution's pyverbs ----


def link_pyverbs(site: Path | None = None, *, installed: Path = DEBIAN_PYVERBS) -> Path:
    """Let this Python import the distribution's pyverbs, by one symbolic link; return its path.

    site: folder of packages, by default this Python's own. Raises ConfigError when pyverbs is
    not installed, was built for another Python, or something else stands there.
    """
    tag = f"cpython-{sys.version_info[0]}{sys.version_info[1]}"
    if not installed.is_dir():
        raise ConfigError(f"{installed} does not exist; run apt-get install python3-pyverbs")
    if not list(installed.glob(f"qp.{tag}-*.so")):
        raise ConfigError(f"{installed} was not built for {tag}; use the distribution's Python")
    link = (site or Path(sysconfig.get_path("platlib"))) / "pyverbs"
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise ConfigError(f"{link} exists and is not a symbolic link; remove it first")
    link.symlink_to(installed)
    return link
