# SPDX-License-Identifier: Apache-2.0
"""The calls of librdmacm that the router makes, by ctypes.

Why not pyverbs.cmid: it holds the GIL in every call, gives neither the status of an event (so
"nobody listens" and "the peer refuses" look alike) nor its descriptor, and would make the native
data path need pyverbs. Here the GIL is free while a call is in the kernel, and what has to be
installed is librdmacm1, which is a dependency of python3-pyverbs too. The structures below have
been the same since librdmacm 1.0.

An id is an address, as the library gives it: a connection, or what listens. It belongs to one
channel; destroy() ends it. One thread at a time uses a channel and its ids. Every call raises
OSError with the kernel's reason when it fails; none of them waits for a peer.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import socket
from enum import IntEnum
from typing import Any, NamedTuple

from fastps.errors import ConfigError

PORT_SPACE = 0x0106  # RDMA_PS_TCP: reliable connections
OPTION_ID, OPTION_ID_TOS = 0, 0
BACKLOG = 1024  # requests that the kernel keeps until we read them
RETRIES = 7  # written into the request; queue pairs are joined with fastps' own setting


class Kind(IntEnum):
    """What an event tells."""

    ADDRESS_RESOLVED = 0
    ADDRESS_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11


class State(IntEnum):
    """States of a queue pair for which the library gives attributes."""

    INIT = 1
    RTR = 2
    RTS = 3


class Event(NamedTuple):
    """One event, copied.

    id: whom it concerns; of a CONNECT_REQUEST a new one, which is the reader's to destroy.
    status: a negative errno, or the reason of a REJECTED. private: what the peer sent along,
    perhaps with zeros behind.
    """

    kind: int
    id: int
    status: int
    queue_pair: int
    private: bytes


class _Parameters(ctypes.Structure):  # struct rdma_conn_param
    _fields_ = (
        ("private_data", ctypes.c_void_p),
        ("private_data_len", ctypes.c_uint8),
        ("responder_resources", ctypes.c_uint8),
        ("initiator_depth", ctypes.c_uint8),
        ("flow_control", ctypes.c_uint8),
        ("retry_count", ctypes.c_uint8),
        ("rnr_retry_count", ctypes.c_uint8),
        ("srq", ctypes.c_uint8),
        ("qp_num", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):  # struct rdma_cm_event, as far as we read it
    _fields_ = (
        ("id", ctypes.c_void_p),
        ("listen_id", ctypes.c_void_p),
        ("event", ctypes.c_int),
        ("status", ctypes.c_int),
        ("conn", _Parameters),
    )


class _Path(ctypes.Structure):  # struct ibv_ah_attr with its struct ibv_global_route
    _fields_ = (
        ("gid", ctypes.c_uint8 * 16),
        ("flow_label", ctypes.c_uint32),
        ("gid_index", ctypes.c_uint8),
        ("hop_limit", ctypes.c_uint8),
        ("traffic_class", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 1),
        ("lid", ctypes.c_uint16),
        ("service_level", ctypes.c_uint8),
        ("src_path_bits", ctypes.c_uint8),
        ("static_rate", ctypes.c_uint8),
        ("is_global", ctypes.c_uint8),
        ("port_num", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 1),
    )


class Attributes(ctypes.Structure):
    """What a queue pair is to be joined with: struct ibv_qp_attr."""

    _fields_ = (
        ("qp_state", ctypes.c_int),
        ("cur_qp_state", ctypes.c_int),
        ("path_mtu", ctypes.c_int),
        ("path_mig_state", ctypes.c_int),
        ("qkey", ctypes.c_uint32),
        ("rq_psn", ctypes.c_uint32),
        ("sq_psn", ctypes.c_uint32),
        ("dest_qp_num", ctypes.c_uint32),
        ("access_flags", ctypes.c_uint32),
        ("capacity", ctypes.c_uint32 * 5),
        ("path", _Path),
        ("other_path", _Path),
        ("pkey_index", ctypes.c_uint16),
        ("other_pkey_index", ctypes.c_uint16),
        ("others", ctypes.c_uint8 * 12),
        ("rate_limit", ctypes.c_uint32),
        ("spare", ctypes.c_uint8 * 64),  # should a later library write more
    )


_POINTER = ctypes.c_void_p
_NUMBER = ctypes.c_int
_CALLS: dict[str, tuple[Any, ...]] = {  # name -> result, arguments
    "rdma_create_event_channel": (_POINTER,),
    "rdma_destroy_event_channel": (None, _POINTER),
    "rdma_create_id": (_NUMBER, _POINTER, ctypes.POINTER(_POINTER), _POINTER, _NUMBER),
    "rdma_destroy_id": (_NUMBER, _POINTER),
    "rdma_bind_addr": (_NUMBER, _POINTER, ctypes.c_char_p),
    "rdma_listen": (_NUMBER, _POINTER, _NUMBER),
    "rdma_get_src_port": (ctypes.c_uint16, _POINTER),
    "rdma_set_option": (_NUMBER, _POINTER, _NUMBER, _NUMBER, _POINTER, ctypes.c_size_t),
    "rdma_resolve_addr": (_NUMBER, _POINTER, ctypes.c_char_p, ctypes.c_char_p, _NUMBER),
    "rdma_resolve_route": (_NUMBER, _POINTER, _NUMBER),
    "rdma_connect": (_NUMBER, _POINTER, ctypes.POINTER(_Parameters)),
    "rdma_accept": (_NUMBER, _POINTER, ctypes.POINTER(_Parameters)),
    "rdma_reject": (_NUMBER, _POINTER, ctypes.c_char_p, ctypes.c_uint8),
    "rdma_establish": (_NUMBER, _POINTER),
    "rdma_init_qp_attr": (
        _NUMBER,
        _POINTER,
        ctypes.POINTER(Attributes),
        ctypes.POINTER(_NUMBER),
    ),
    "rdma_get_cm_event": (_NUMBER, _POINTER, ctypes.POINTER(ctypes.POINTER(_Event))),
    "rdma_ack_cm_event": (_NUMBER, ctypes.POINTER(_Event)),
}


@functools.cache
def _load() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Load librdmacm and libibverbs."""
    try:
        library = ctypes.CDLL("librdmacm.so.1", use_errno=True)
        verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
        for name, (result, *arguments) in _CALLS.items():
            call = getattr(library, name)
            call.restype, call.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"FASTPS_RDMA_CM=1 needs librdmacm: {error}; run apt-get install librdmacm1, or unset "
            "FASTPS_RDMA_CM"
        ) from error
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_get_device_name.argtypes = [_POINTER]
    return library, verbs


def _check(result: int) -> None:
    if result:
        error = ctypes.get_errno() if result < 0 else result
        raise OSError(error, os.strerror(error))


class Channel:
    """Ids and their events.

    Raises ConfigError when librdmacm is not installed, OSError when the kernel has no rdma_cm.
    """

    def __init__(self) -> None:
        self._library, self._verbs = _load()
        self._channel = self._library.rdma_create_event_channel()
        if not self._channel:
            _check(-1)
        # Its only field; readable when there is an event.
        self.descriptor: int = ctypes.c_int.from_address(self._channel).value
        os.set_blocking(self.descriptor, False)

    def close(self) -> None:
        """Close the channel; its ids must be destroyed."""
        if self._channel:
            self._library.rdma_destroy_event_channel(self._channel)
            self._channel = None

    def take_event(self) -> Event | None:
        """Read the next event, None when there is none."""
        found = ctypes.POINTER(_Event)()
        try:
            _check(self._library.rdma_get_cm_event(self._channel, ctypes.byref(found)))
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return None
            raise
        event = found.contents
        length = event.conn.private_data_len if event.conn.private_data else 0
        private = ctypes.string_at(event.conn.private_data, length) if length else b""
        copied = Event(event.event, event.id, event.status, event.conn.qp_num, private)
        # At once: what destroys an id waits until all its events have been given back.
        self._library.rdma_ack_cm_event(found)
        return copied

    def create(self) -> int:
        """Make an id."""
        made = _POINTER()
        library = self._library
        _check(library.rdma_create_id(self._channel, ctypes.byref(made), None, PORT_SPACE))
        return made.value or 0

    def destroy(self, id: int) -> None:
        """End an id; a connection that exists is ended, a request refused."""
        _check(self._library.rdma_destroy_id(id))

    def listen(self, id: int, address: bytes) -> int:
        """Listen at an address, as socket_address() gives it; give the port."""
        _check(self._library.rdma_bind_addr(id, address))
        _check(self._library.rdma_listen(id, BACKLOG))
        return socket.ntohs(self._library.rdma_get_src_port(id))

    def set_traffic_class(self, id: int, traffic_class: int) -> None:
        """Let the packets of an id carry a traffic class; before its address is resolved."""
        value = ctypes.c_uint8(traffic_class)
        option = (OPTION_ID, OPTION_ID_TOS)
        _check(self._library.rdma_set_option(id, *option, ctypes.byref(value), 1))

    def resolve_address(self, id: int, own: bytes, peer: bytes, *, timeout_s: float) -> None:
        """Begin to look for the device and the peer's hardware; tells ADDRESS_RESOLVED."""
        _check(self._library.rdma_resolve_addr(id, own, peer, round(timeout_s * 1000)))

    def resolve_route(self, id: int, *, timeout_s: float) -> None:
        """Begin to look for the path, on InfiniBand by the subnet manager; ROUTE_RESOLVED."""
        _check(self._library.rdma_resolve_route(id, round(timeout_s * 1000)))

    def connect(self, id: int, queue_pair: int, private: bytes) -> None:
        """Ask the peer; tells CONNECT_RESPONSE, REJECTED or UNREACHABLE."""
        _check(self._library.rdma_connect(id, self._parameters(queue_pair, private)))

    def accept(self, id: int, queue_pair: int, private: bytes) -> None:
        """Say yes to a request; tells ESTABLISHED when the peer has said so too."""
        _check(self._library.rdma_accept(id, self._parameters(queue_pair, private)))

    def reject(self, id: int, private: bytes) -> None:
        """Say no to a request, or to the answer to ours."""
        _check(self._library.rdma_reject(id, private, len(private)))

    def establish(self, id: int) -> None:
        """Say that the answer has come."""
        _check(self._library.rdma_establish(id))

    def attributes(self, id: int, state: State) -> Attributes:
        """Give what a queue pair needs to get into a state."""
        found = Attributes(qp_state=state)
        mask = ctypes.c_int()
        found_at, mask_at = ctypes.byref(found), ctypes.byref(mask)
        _check(self._library.rdma_init_qp_attr(id, found_at, mask_at))
        return found

    def device_of(self, id: int) -> str:
        """Name the device of an id, empty when it has none yet."""
        # The first field of an id is its context, the first field of that its device.
        context = ctypes.c_void_p.from_address(id).value
        device = ctypes.c_void_p.from_address(context).value if context else None
        name: bytes | None = self._verbs.ibv_get_device_name(device) if device else None
        return (name or b"").decode(errors="replace")

    def _parameters(self, queue_pair: int, private: bytes) -> Any:
        data = ctypes.create_string_buffer(private, len(private))
        parameters = _Parameters(
            private_data=ctypes.addressof(data),
            private_data_len=len(private),
            retry_count=RETRIES,
            rnr_retry_count=RETRIES,
            qp_num=queue_pair,
        )
        parameters.keep = data  # until the call is over
        return parameters
