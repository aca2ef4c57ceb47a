# SPDX-License-Identifier: Apache-2.0
"""Shared memory of the processes of one machine: allocate it and exchange its descriptors.

Memory is a memfd, or an unlinked file of /dev/shm where the kernel has no memfd. It has no name,
so names cannot collide, and it is freed with its last process, however that ends. Descriptors
travel over an abstract Unix socket, whose name is derived from the job's key. Both sides prove
that they know the key and run as the same user before a descriptor is sent.

Knows nothing of operations; worker/local.py decides what the memory holds. Threads: any.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import hmac
import logging
import mmap
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from fastps.errors import AuthError, TransportError, TransportTimeout
from fastps.native.condition import Flag
from fastps.security.handshake import ClientHandshake, Purpose, ServerHandshake
from fastps.transport import sockets
from fastps.transport._link import Block, Mapping

log = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE
PROBE_BYTES = 64 << 10
CLOSE_S = 5.0  # for the accepting thread to end
LOOK_S = 0.02  # between looks whether a member that is awaited is lost
DESCRIPTORS_PER_MESSAGE = 128  # the kernel allows 253
CGROUP = Path("/sys/fs/cgroup")
RESERVE_BYTES = 64 << 20  # that an arena leaves free of a container's memory
BACKED_BYTES = 1 << 20  # allocated at once: asking for the free memory reads several files
LINE_BYTES = 64
PACKED_BYTES = PAGE_BYTES // 2  # the largest blocks that share pages
SHELF_BYTES = 16 * PAGE_BYTES  # of packed blocks of one size
# No process can shrink the memory, which would kill the others by SIGBUS.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


# ---- memory ----


def create_memory(nbytes: int) -> int:
    """Make nbytes of memory that other processes can map; return its descriptor.

    Pages that are never used take no memory. Raises OSError.
    """
    try:
        descriptor = os.memfd_create("fastps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
        descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, nbytes)
        with contextlib.suppress(PermissionError):  # a file of /dev/shm has no seals
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def can_share(limit_bytes: int = 0) -> str:
    """Return why this process cannot have an Arena of limit_bytes; empty when it can."""
    nbytes = arena_bytes(limit_bytes)
    try:
        descriptor = create_memory(nbytes)
        try:
            os.posix_fallocate(descriptor, 0, PROBE_BYTES)
            Mapping(descriptor, nbytes)
        finally:
            os.close(descriptor)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM):
            return ""
    except OSError as error:
        return f"the system gives no shared memory: {error.strerror or error}"


def arena_bytes(limit_bytes: int) -> int:
    """Return the size of an arena: the limit, or the machine's memory."""
    return _round_up(limit_bytes or os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES)


def memory_left() -> int:
    """Return the free bytes of the machine, or of this process's container if those are fewer."""
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    available = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return min([*available, *_cgroup_left()], default=1 << 62)


def _cgroup_left() -> list[int]:
    """List the bytes that each control group above this process still allows."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text("ascii").splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), "/").lstrip("/")
        for group in (CGROUP / path, *(CGROUP / path).parents):
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                most = int((group / "memory.max").read_text("ascii"))
                used = int((group / "memory.current").read_text("ascii"))
                found.append(max(most - used, 0))
    return found


class Arena:
    """The memory that one process shares with the others of its machine.

    limit_bytes: its size, 0 for the machine's memory. Blocks are page-aligned, and their pages are
    allocated before they are lent. Freed blocks are lent again; the kernel gets the memory back
    when the last block is gone. Any thread.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.nbytes = arena_bytes(limit_bytes)
        self.descriptor = create_memory(self.nbytes)
        try:
            self.mapping = Mapping(self.descriptor, self.nbytes, is_forked=True)
        except OSError:
            os.close(self.descriptor)
            raise
        self._lock = threading.Lock()  # all below; a block's end takes no lock
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # (offset, nbytes), sorted
        self._lent: dict[int, int] = {}
        self._packed: dict[int, deque[int]] = {}  # by size, free offsets within shelves
        self._shelves: list[Block] = []
        self._returned: deque[int] = deque()  # a block may end on any thread, even within allocate
        self._backed = 0  # bytes from the start that have memory
        self._is_frozen = False
        self._inherited: list[tuple[_Children, set[int]]] = []  # offsets that were lent at a fork
        _arenas.add(self)

    def holds(self, address: int, nbytes: int) -> bool:
        """Return whether a range of addresses lies in this arena."""
        start = self.mapping.address
        return start <= address <= start + self.mapping.nbytes - nbytes

    def allocate(self, nbytes: int) -> tuple[Block, int]:
        """Lend at least nbytes; return the block and its offset.

        Raises MemoryError that names the limit and how to raise it.
        """
        with self._lock:  # allocating pages releases the GIL
            self._check_open()
            return self._allocate(nbytes, _round_up(max(nbytes, 1)))

    def allocate_packed(self, nbytes: int) -> tuple[Block, int]:
        """Do allocate(), but let small blocks share pages; they are aligned to cache lines.

        For memory that fastps alone writes. Shelves (the shared pages) stay until the arena ends.
        """
        if nbytes > PACKED_BYTES:
            return self.allocate(nbytes)
        size = max(LINE_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            self._check_open()
            free = self._packed.setdefault(size, deque())  # a block's end appends, without a lock
            if not free:
                shelf, start = self._allocate(SHELF_BYTES, SHELF_BYTES)
                self._shelves.append(shelf)
                free.extend(range(start, start + SHELF_BYTES, size))
            offset = free.popleft()
            return Block(self.mapping, offset, nbytes, free), offset

    def _check_open(self) -> None:
        if self.descriptor < 0:
            raise MemoryError(
                "the shared memory of this session has ended; call fastps.init(), and use what is "
                "made then"
            )

    def _allocate(self, nbytes: int, size: int) -> tuple[Block, int]:
        if self._is_next(size):  # common: a loop whose results have one size
            offset = self._returned.popleft()
            return Block(self.mapping, offset, nbytes, self._returned), offset
        self._take_back()
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                self._back(offset + size)
                self._free[index : index + 1] = [(offset + size, room - size)] * (room > size)
                self._lent[offset] = size
                return Block(self.mapping, offset, nbytes, self._returned), offset
        raise MemoryError(
            f"no {nbytes} bytes of shared memory left: {self.nbytes} are allowed; raise "
            "FASTPS_SHARED_MEMORY_BYTES or use smaller tensors"
        )

    @property
    def used_bytes(self) -> int:
        """Bytes that are lent now."""
        with self._lock:
            self._take_back()
            on_shelves = sum(size * len(free) for size, free in self._packed.items())
            return sum(self._lent.values()) - on_shelves

    def freeze(self) -> None:
        """Never lend freed blocks again: a lost process may still write to them."""
        self._is_frozen = True
        self._packed = {}

    def close(self) -> None:
        """Lend no more blocks; lent ones stay valid. Idempotent."""
        with self._lock:
            self._free.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def keep_for(self, children: _Children) -> None:
        """Reuse the blocks that are lent now only after children have ended: they map them too."""
        with self._lock:
            self._take_back()
            self._forget_children()
            self._inherited.append((children, set(self._lent)))

    def _forget_children(self) -> None:
        self._inherited = [one for one in self._inherited if not one[0].have_ended()]

    def _is_next(self, size: int) -> bool:
        """Return whether the block freed first has exactly this size and may be lent again."""
        is_plain = bool(self._returned) and not self._is_frozen and not self._inherited
        return is_plain and self._lent[self._returned[0]] == size

    def _take_back(self) -> None:
        if not self._returned:
            return
        self._forget_children()
        used: set[int] = set().union(*(offsets for _, offsets in self._inherited))
        for _ in range(len(self._returned)):
            offset = self._returned.popleft()
            if offset in used:
                self._returned.append(offset)
                continue
            size = self._lent.pop(offset)
            if not self._is_frozen:
                bisect.insort(self._free, (offset, size))
        self._free = _merged(self._free)

    def _back(self, end: int) -> None:
        """Allocate the pages below end."""
        if end <= self._backed:
            return
        missing = end - self._backed
        left = memory_left()
        ahead = min(max(missing, BACKED_BYTES), self.nbytes - self._backed)
        if ahead + RESERVE_BYTES <= left:
            end, missing = self._backed + ahead, ahead
        if missing + RESERVE_BYTES > left:
            raise MemoryError(
                f"{missing} bytes of shared memory are needed, but the machine or its container "
                f"has {left} left; give it more (docker run --memory), use smaller tensors, or "
                "set FASTPS_SHARED_MEMORY=0"
            )
        try:
            os.posix_fallocate(self.descriptor, self._backed, missing)
            self.mapping.populate(self._backed, missing)
        except OSError as error:
            raise MemoryError(
                f"cannot allocate {missing} bytes of shared memory: {error.strerror}; raise the "
                "limit (docker run --memory, --shm-size; ulimit -f), or set "
                "FASTPS_SHARED_MEMORY=0"
            ) from error
        self._backed = end


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that touch."""
    joined: list[tuple[int, int]] = []
    for offset, size in ranges:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined


# ---- forked children ----

_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()  # of this process
_forking = threading.local()  # the pipe of the fork under way on this thread


class _Children:
    """The children of one fork: they keep a pipe open as long as one of them lives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def have_ended(self) -> bool:
        """Return whether the other end of the pipe is closed."""
        return bool(self._poll.poll(0))

    def __del__(self) -> None:
        os.close(self._descriptor)


def _before_fork() -> None:
    _forking.pipe = None
    if any(arena.used_bytes for arena in list(_arenas)):
        with contextlib.suppress(OSError):  # too many files: then children are not tracked
            _forking.pipe = os.pipe()


def _after_fork_in_parent() -> None:
    if _forking.pipe is not None:
        os.close(_forking.pipe[1])
        children = _Children(_forking.pipe[0])
        for arena in list(_arenas):
            arena.keep_for(children)


def _after_fork_in_child() -> None:
    if _forking.pipe is not None:
        os.close(_forking.pipe[0])  # the other end stays open until this process ends
    _arenas.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)  # fmt: skip


# ---- exchange of descriptors ----


def exchange(
    descriptors: Sequence[int], *, ranks: Sequence[int], rank: int, key: bytes, deadline: float
) -> list[list[int]]:
    """Exchange descriptors among the ranks of one machine; return a list per rank, in order.

    All of ranks call it with their own descriptors; the lists have new descriptors (of the caller
    too). The first of ranks leads. deadline: of time.monotonic(). Raises TransportTimeout,
    TransportError, AuthError.
    """
    name = "fastps-" + hmac.digest(key, b"meeting of %d" % ranks[0], "sha256").hex()[:32]
    if rank == ranks[0]:
        return _lead(name, descriptors, ranks, key, deadline)
    return _follow(name, descriptors, rank, len(ranks), key, deadline)


def _lead(
    name: str, descriptors: Sequence[int], ranks: Sequence[int], key: bytes, deadline: float
) -> list[list[int]]:
    found = {ranks[0]: [os.dup(descriptor) for descriptor in descriptors]}
    peers: dict[int, socket.socket] = {}
    try:
        _meet(name, ranks[1:], peers, key, deadline)
        for rank, sock in peers.items():
            found[rank] = _receive(sock, len(descriptors), deadline)
        everything = [found[rank] for rank in ranks]
        for sock in peers.values():
            _send(sock, [one for group in everything for one in group])
    except TimeoutError as error:
        missing = sorted(set(ranks[1:]) - set(peers)) or sorted(set(ranks) - set(found))
        raise TransportTimeout(
            f"workers {missing} of this machine did not come to share memory in time; are they "
            "stopped or overloaded? Raise FASTPS_START_TIMEOUT_S, or set FASTPS_SHARED_MEMORY=0"
        ) from error
    except OSError as error:
        raise TransportError(f"cannot share memory: {error.strerror or error}") from error
    finally:
        sockets.close_all(list(peers.values()))
    return everything


def _meet(
    name: str,
    expected: Sequence[int],
    peers: dict[int, socket.socket],
    key: bytes,
    deadline: float,
) -> None:
    """Accept the connections of the expected ranks into peers; TimeoutError."""
    # imported here: only a leader needs asyncio
    from fastps.transport.handshake_gate import GateThread, HandshakeGate  # noqa: PLC0415

    is_complete = Flag()

    async def add_peer(sock: socket.socket, handshake: ServerHandshake, accept: bytes) -> None:
        if handshake.sender not in expected or handshake.sender in peers:
            raise TransportError(
                f"worker {handshake.sender} is not expected, or is connected already; "
                f"expected: {list(expected)}"
            )
        sock.send(accept)
        peers[handshake.sender] = sock.dup()
        if len(peers) == len(expected):
            is_complete.set()

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left_s = deadline - time.monotonic()
    memory = (Purpose.MEMORY,)
    gate = GateThread(
        HandshakeGate(
            [listener], key=key, purposes=memory, timeout_s=left_s, on_authenticated=add_peer
        )
    )
    try:
        listener.bind("\0" + name)
        listener.listen(len(expected) + 8)
        listener.setblocking(False)
        gate.start()
        while not is_complete.wait(min(max(deadline - time.monotonic(), 0), LOOK_S)):
            if sockets.is_interrupted() or time.monotonic() >= deadline:
                raise TimeoutError
    finally:
        gate.close(timeout_s=CLOSE_S)


def _follow(
    name: str, descriptors: Sequence[int], rank: int, count: int, key: bytes, deadline: float
) -> list[list[int]]:
    with _reach(name, deadline) as sock:
        try:
            if not sockets.is_own_user(sock):
                raise AuthError(
                    "the first worker of this machine runs as another user; run all workers of "
                    "a machine as one user"
                )
            handshake = ClientHandshake(key, purpose=Purpose.MEMORY, sender=rank)
            sockets.shake_hands(sock, handshake.steps(), deadline=deadline)
            _send(sock, descriptors)
            found = _receive(sock, count * len(descriptors), deadline)
        except TimeoutError as error:
            raise TransportTimeout(
                "the first worker of this machine shared no memory in time; is another worker "
                "stopped? Raise FASTPS_START_TIMEOUT_S"
            ) from error
        except OSError as error:
            raise TransportError(f"cannot share memory: {error.strerror or error}") from error
    width = len(descriptors)
    return [found[start : start + width] for start in range(0, len(found), width)]


def _reach(name: str, deadline: float) -> socket.socket:
    for _ in sockets.attempts(deadline, longest_s=sockets.RETRY_FIRST_S):
        with contextlib.suppress(ConnectionRefusedError, BlockingIOError, TimeoutError):
            return sockets.connect_unix(name, deadline=deadline)
    raise TransportTimeout(
        "the first worker of this machine did not offer shared memory in time; is it stopped? "
        "Raise FASTPS_START_TIMEOUT_S, or set FASTPS_SHARED_MEMORY=0"
    )


def _send(sock: socket.socket, descriptors: Sequence[int]) -> None:
    for start in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
        batch = descriptors[start : start + DESCRIPTORS_PER_MESSAGE]
        socket.send_fds(sock, [b"m"], list(batch))


def _receive(sock: socket.socket, count: int, deadline: float) -> list[int]:
    """Receive exactly count descriptors."""
    found: list[int] = []
    while len(found) < count:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        wanted = min(count - len(found), DESCRIPTORS_PER_MESSAGE)
        with sockets.waiting_on(sock):
            data, batch, _, _ = socket.recv_fds(sock, 1, wanted)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the other worker left")
        found.extend(batch)
    return found
