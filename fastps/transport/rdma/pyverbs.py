# SPDX-License-Identifier: Apache-2.0
"""The data path of RDMA by pyverbs, used where the native one was not built.

Every call holds the GIL, so a busy Python thread delays it by milliseconds. Written for pyverbs
44 and later. That shows no descriptor of a completion channel, frees work requests only when they
are closed, and configures logging when it is imported; this module works around each.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import logging
import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from fastps.errors import TransportError

PARTS = ("addr", "cq", "device", "fork", "mr", "pd", "pyverbs_error", "qp", "wr")
HOP_LIMIT = 64
MIN_RNR_TIMER = 12  # 0.64 ms; credits keep it from ever mattering
ACCESS_LOCAL, ACCESS_REMOTE = 1, 3  # Access of _transport.pxd
OPCODE_SEND, OPCODE_WRITE, OPCODE_WRITE_WITH_IMM = 0, 1, 2  # Opcode of _transport.pxd
TROUBLE_DEVICE, TROUBLE_PORT, TROUBLE_ADDRESS = 1, 2, 3  # Trouble of _transport.pxd
PORT_ACTIVE = 4
FORK_UNNEEDED = 2
MAX_PKEYS = 128
FULL_MEMBER = 0x80  # in the first byte of a partition's key: may talk to all of its members
EVENT_LINK = "anon_inode:[infinibandevent]"

_event_lock = threading.Lock()  # held between two listings of the open descriptors

# (work, status, is a receive, has an immediate number, length, immediate number)
Completion = tuple[int, int, bool, bool, int, int]


@contextlib.contextmanager
def _untouched_logging() -> Iterator[None]:
    """Undo what pyverbs does to the root logger while it is imported."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def load_pyverbs() -> Any:
    """Import pyverbs; return a namespace of its modules that are used.

    Raises ImportError when it is not installed for this Python.
    """
    with _untouched_logging():
        parts = {name: importlib.import_module(f"pyverbs.{name}") for name in PARTS}
        try:  # the name in pyverbs 44
            parts["enums"] = importlib.import_module("pyverbs.enums")
        except ImportError:  # and later
            parts["enums"] = importlib.import_module("pyverbs.libibverbs_enums")
    return SimpleNamespace(**parts, Failure=parts["pyverbs_error"].PyverbsRDMAError)


def _event_descriptors() -> set[int]:
    """List the descriptors of this process that deliver events of a device."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            if os.readlink(f"/proc/self/fd/{entry}") == EVENT_LINK:
                found.add(int(entry))
    return found


class Device:
    """An open device, its protection domain and the address that its queue pairs use.

    Raises OSError or pyverbs' own errors when it cannot be opened, TransportError when the port
    is down.
    """

    def __init__(
        self,
        name: str,
        *,
        port: int,
        gid_index: int,
        mtu: int = 0,
        traffic_class: int = 0,
        ack_timeout: int = 18,
        retries: int = 6,
    ) -> None:
        self.verbs = load_pyverbs()
        if self.verbs.fork.is_fork_initialized() != FORK_UNNEEDED:
            self.verbs.fork.fork_init()  # keeps pinned pages after a fork on kernels before 5.12
        self.port = port
        self.gid_index = gid_index
        self.traffic_class = traffic_class
        self.ack_timeout = ack_timeout
        self.retries = retries
        with _event_lock:
            before = _event_descriptors()
            self.context = self.verbs.device.Context(name=name)
            found = _event_descriptors() - before
        self.trouble_descriptor = found.pop() if len(found) == 1 else -1
        if self.trouble_descriptor >= 0:
            os.set_blocking(self.trouble_descriptor, False)
        attributes = self.context.query_port(port)
        if attributes.state != PORT_ACTIVE:
            self.context.close()
            raise TransportError(f"port {port} of {name} is not active; check its cable and link")
        self.gid = self.context.query_gid(port, gid_index).gid
        self.lid = attributes.lid
        self.mtu = min(mtu or 5, attributes.active_mtu)
        self.max_message_bytes = attributes.max_msg_sz
        self.pkey_index = self._find_partition()
        self.has_windows = self._has_windows()
        self.domain = self.verbs.pd.PD(self.context)

    def _find_partition(self) -> int:
        """Return the index of the first partition with full membership, else 0."""
        with contextlib.suppress(self.verbs.Failure):
            for index in range(MAX_PKEYS):
                key = self.context.query_pkey(self.port, index)
                if key.to_bytes(2, sys.byteorder)[0] & FULL_MEMBER:
                    return index
        return 0

    def _has_windows(self) -> bool:
        abilities = self.context.query_device()
        flag = self.verbs.enums.IBV_DEVICE_MEM_WINDOW_TYPE_2B
        return bool(abilities.device_cap_flags & flag) and abilities.max_mw > 0

    def open_port(self, sends: int, receives: int) -> Port:
        """Make a queue pair that can receive."""
        return Port(self, sends, receives)

    def pin(self, address: int, nbytes: int, access: int) -> Any:
        """Register memory; close() of the result ends it."""
        enums = self.verbs.enums
        flags = enums.IBV_ACCESS_LOCAL_WRITE if access & ACCESS_LOCAL else 0
        if access == ACCESS_REMOTE:
            by_key, by_window = enums.IBV_ACCESS_REMOTE_WRITE, enums.IBV_ACCESS_MW_BIND
            flags |= by_window if self.has_windows else by_key
        return self.verbs.mr.MR(self.domain, nbytes, flags, address=address)

    def open_window(self) -> Window:
        """Make an unbound window; close() of the result ends it and its key."""
        return Window(self)

    def take_trouble(self) -> int:
        """Read one event of the device; return its trouble, or 0."""
        enums = self.verbs.enums
        try:
            event = self.context.get_async_event()
        except self.verbs.Failure:
            return 0
        event.ack()
        if event.event_type == enums.IBV_EVENT_DEVICE_FATAL:
            return TROUBLE_DEVICE
        is_ours = event.event_type in (enums.IBV_EVENT_PORT_ERR, enums.IBV_EVENT_GID_CHANGE)
        return self.find_trouble() if is_ours else 0  # it may be of another port

    def find_trouble(self) -> int:
        """Query the state of the port and its address; return the trouble, or 0.

        A failed query is an answer too: a removed device has no port, and a removed network card
        leaves no address in the table.
        """
        try:
            state = self.context.query_port(self.port).state
        except self.verbs.Failure:
            return TROUBLE_DEVICE
        if state != PORT_ACTIVE:
            return TROUBLE_PORT
        try:
            gid = self.context.query_gid(self.port, self.gid_index).gid
        except self.verbs.Failure:
            return TROUBLE_ADDRESS
        return TROUBLE_ADDRESS if gid != self.gid else 0

    def close(self) -> None:
        """Close the domain and the device; queue pairs and regions must be closed."""
        self.domain.close()
        self.context.close()


class Window:
    """A memory window of type 2: a key for one range of a region, on one queue pair.

    pyverbs keeps the first key of a window, but the device needs the last one for the next bind.
    So each bind except the first makes a new window.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_used = False
        self.made = self._make()

    def _make(self) -> Any:
        verbs = self.device.verbs
        return verbs.mr.MW(self.device.domain, verbs.enums.IBV_MW_TYPE_2)

    def fresh(self) -> Any:
        """Return a window that was never bound; the previous one is closed."""
        if self.is_used:
            self.made.close()
            self.made = self._make()
        self.is_used = True
        return self.made

    def close(self) -> None:
        """End the window, bound or not."""
        self.made.close()


class Port:
    """A queue pair with a completion queue and a channel of its own."""

    def __init__(self, device: Device, sends: int, receives: int) -> None:
        self.device = device
        verbs, enums = device.verbs, device.verbs.enums
        self.channel, self.descriptor = self._open_channel()
        self.queue = verbs.cq.CQ(device.context, sends + receives + 1, None, self.channel)
        capacity = verbs.qp.QPCap(max_send_wr=sends, max_recv_wr=receives)
        wanted = verbs.qp.QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=capacity
        )
        self.pair = verbs.qp.QP(device.domain, wanted, self._attributes())
        # Posting copies a request, so one serves for all sends. The list that it was made with
        # is lost, 16 bytes; closing it and the piece would free the piece twice.
        self.send_piece = verbs.wr.SGE(0, 0, 0)
        self.send = verbs.wr.SendWR(num_sge=1, sg=[self.send_piece])
        self.send.sg_list = self.send_piece
        self.opcodes = {
            OPCODE_SEND: enums.IBV_WR_SEND,
            OPCODE_WRITE: enums.IBV_WR_RDMA_WRITE,
            OPCODE_WRITE_WITH_IMM: enums.IBV_WR_RDMA_WRITE_WITH_IMM,
        }
        self.with_imm = enums.IBV_WC_RECV_RDMA_WITH_IMM
        self.receives = (enums.IBV_WC_RECV, self.with_imm)

    def _open_channel(self) -> tuple[Any, int]:
        with _event_lock:
            before = _event_descriptors()
            channel = self.device.verbs.cq.CompChannel(self.device.context)
            is_told = hasattr(channel, "fd")
            descriptors = {channel.fd} if is_told else _event_descriptors() - before
        if len(descriptors) != 1:
            channel.close()
            raise OSError(
                "pyverbs shows no descriptor of a completion channel; use another version"
            )
        descriptor = descriptors.pop()
        os.set_blocking(descriptor, False)
        return channel, descriptor

    def _attributes(self) -> Any:
        enums = self.device.verbs.enums
        attributes = self.device.verbs.qp.QPAttr(port_num=self.device.port)
        attributes.pkey_index = self.device.pkey_index
        attributes.qp_access_flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        return attributes

    def describe(self) -> tuple[int, int, int, bytes]:
        """Return path MTU, LID, number of the queue pair and GID."""
        gid = ipaddress.IPv6Address(self.device.gid).packed
        return self.device.mtu, self.device.lid, self.pair.qp_num, gid

    def connect(
        self, mtu: int, lid: int, gid: bytes, queue_pair: int, receive_from: int, send_from: int
    ) -> None:
        """Move the queue pair to the state in which it sends."""
        device, verbs = self.device, self.device.verbs
        attributes = self._attributes()
        attributes.path_mtu = mtu
        attributes.dest_qp_num = queue_pair
        attributes.rq_psn, attributes.sq_psn = receive_from, send_from
        attributes.min_rnr_timer, attributes.rnr_retry = MIN_RNR_TIMER, 0
        attributes.timeout, attributes.retry_cnt = device.ack_timeout, device.retries
        route = verbs.addr.GlobalRoute(
            dgid=verbs.addr.GID(ipaddress.IPv6Address(gid).exploded),
            sgid_index=device.gid_index,
            hop_limit=HOP_LIMIT,
            traffic_class=device.traffic_class,
        )
        attributes.ah_attr = verbs.addr.AHAttr(
            gr=route, is_global=1, port_num=device.port, dlid=lid
        )
        self.pair.to_rts(attributes)

    def post_send(
        self,
        work: int,
        opcode: int,
        address: int,
        length: int,
        lkey: int,
        remote: int,
        rkey: int,
        imm: int,
    ) -> None:
        """Post one send or write; its completion carries work."""
        piece, request = self.send_piece, self.send
        piece.addr, piece.length, piece.lkey = address, length, lkey
        request.wr_id = work
        request.opcode = self.opcodes[opcode]
        if opcode != OPCODE_SEND:
            request.set_wr_rdma(rkey, remote)
            request.imm_data = imm
        self.pair.post_send(request)

    def post_bind(self, work: int, window: Window, region: Any, address: int, nbytes: int) -> int:
        """Post the bind of a window to a range of a region; return its key."""
        verbs, enums = self.device.verbs, self.device.verbs.enums
        range_ = verbs.mr.MWBindInfo(region, address, nbytes, enums.IBV_ACCESS_REMOTE_WRITE)
        request = verbs.wr.SendWR(wr_id=work, opcode=enums.IBV_WR_BIND_MW)
        try:
            request.set_bind_wr(window.fresh(), range_)
            self.pair.post_send(request)
            return int(request.rkey)
        finally:
            request.close()

    def post_unbind(self, work: int, rkey: int) -> None:
        """Post the invalidation of a window's key, which pyverbs takes as immediate data."""
        verbs, enums = self.device.verbs, self.device.verbs.enums
        request = verbs.wr.SendWR(wr_id=work, opcode=enums.IBV_WR_LOCAL_INV, imm_data=rkey)
        try:
            self.pair.post_send(request)
        finally:
            request.close()

    def post_receive(self, work: int, address: int, length: int, lkey: int) -> None:
        """Post one buffer for a message."""
        wr = self.device.verbs.wr
        piece = wr.SGE(address, length, lkey)
        request = wr.RecvWR(wr_id=work, num_sge=1, sg=[piece])
        try:
            self.pair.post_recv(request)
        finally:
            request.close()
            piece.close()

    def poll(self, room: int) -> list[Completion]:
        """Return at most room completions."""
        _, found = self.queue.poll(room)
        return [
            (
                done.wr_id,
                done.status,
                done.opcode in self.receives,
                done.opcode == self.with_imm,
                done.byte_len,
                done.imm_data,
            )
            for done in found
        ]

    def arm(self) -> None:
        """Request an event for the next completion."""
        self.queue.req_notify()

    def take_event(self) -> None:
        """Take the event that made the descriptor readable."""
        with contextlib.suppress(self.device.verbs.Failure):
            self.channel.get_cq_event(self.queue)
            self.queue.ack_events(1)

    def halt(self) -> None:
        """Move the queue pair to its error state: no transfers after this."""
        verbs, enums = self.device.verbs, self.device.verbs.enums
        self.pair.modify(verbs.qp.QPAttr(qp_state=enums.IBV_QPS_ERR), enums.IBV_QP_STATE)

    def close(self) -> None:
        """Close all parts in order; nothing lands after this."""
        self.send_piece.close()
        for part in (self.pair, self.queue, self.channel):
            part.close()
