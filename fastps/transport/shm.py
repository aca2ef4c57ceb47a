# SPDX-License-Identifier: Apache-2.0
"""Shared memory of the processes of one machine: where it comes from and how it is handed round.

Memory is a memfd, or an unlinked file of /dev/shm where there are none: it has no name, so it
collides with nobody's and is gone with its last process, however that ended. Descriptors travel
over an abstract Unix socket whose name follows from the job's key; both sides prove that they
know the key, and that they belong to the same user, before anything is handed over.

Knows nothing of ranks' work; worker/local.py decides what the memory holds. Threads: any one.
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
from fastps.security.handshake import ClientHandshake, Purpose, ServerHandshake
from fastps.transport import sockets
from fastps.transport._link import Block, Mapping

log = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE
PROBE_BYTES = 64 << 10
CLOSE_S = 5.0  # for the thread of the meeting to end
DESCRIPTORS_PER_MESSAGE = 128  # the kernel allows 253
CGROUP = Path("/sys/fs/cgroup")
RESERVE_BYTES = 64 << 20  # what an arena leaves of a container's memory
BACKED_BYTES = (
    1 << 20
)  # that get their memory at once: to ask how much is left reads several files
LINE_BYTES = 64
PACKED_BYTES = PAGE_BYTES // 2  # the largest blocks that share pages
SHELF_BYTES = 16 * PAGE_BYTES  # of packed blocks of one size
# nobody can take memory away from under the others, who would die of SIGBUS
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


# ---- memory ----


def create_memory(nbytes: int) -> int:
    """Make nbytes of memory that other processes can map; give its descriptor.

    It takes up room only where it is used. Raises OSError.
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
        return f"shared memory is not to be had here: {error.strerror or error}"


def arena_bytes(limit_bytes: int) -> int:
    """Return the size of an arena: the limit, or what the machine has."""
    return _round_up(limit_bytes or os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES)


def memory_left() -> int:
    """Return the bytes that the machine, or this process's container, has left."""
    return min([_available(), *_cgroup_left()])


def _available() -> int:
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _cgroup_left() -> list[int]:
    """List what each control group above this process still allows."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text("ascii").splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), "/").lstrip("/")
        folder = CGROUP / path
        return [
            left
            for group in (folder, *folder.parents)
            if group.is_relative_to(CGROUP) and (left := _left_in(group)) is not None
        ]
    return []


def _left_in(group: Path) -> int | None:
    try:
        most = (group / "memory.max").read_text("ascii").strip()
        used = (group / "memory.current").read_text("ascii").strip()
        return None if most == "max" else max(int(most) - int(used), 0)
    except (OSError, ValueError):
        return None


class Arena:
    """The memory that one process shares with the others of its machine.

    limit_bytes: the most it may hold, 0 for what the machine has. Blocks are page-aligned and
    have their memory when they are given; what is given back is used again, and never returned
    to the kernel before the last block is gone. Any thread.
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
        self._packed: dict[int, deque[int]] = {}  # by size, what may be lent of the shelves
        self._shelves: list[Block] = []
        self._returned: deque[int] = deque()  # a block may end on any thread, even within allocate
        self._backed = 0  # bytes from the start that have memory
        self._is_frozen = False
        self._inherited: list[tuple[_Children, set[int]]] = []  # offsets that were lent at a fork
        _arenas.add(self)

    def holds(self, address: int, nbytes: int) -> bool:
        """Return whether bytes lie here."""
        start = self.mapping.address
        return start <= address <= start + self.mapping.nbytes - nbytes

    def allocate(self, nbytes: int) -> tuple[Block, int]:
        """Lend at least nbytes; give the block and its offset.

        Raises MemoryError that says which limit is reached and how to raise it.
        """
        with self._lock:  # finding memory for a range lets other threads run
            return self._allocate(nbytes, _round_up(max(nbytes, 1)))

    def allocate_packed(self, nbytes: int) -> tuple[Block, int]:
        """Do allocate(), in a page with other blocks where it is small; aligned to a cache line.

        For memory that fastps alone writes. Shelves stay until the arena is gone.
        """
        if nbytes > PACKED_BYTES:
            return self.allocate(nbytes)
        size = max(LINE_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            free = self._packed.setdefault(size, deque())  # a block's end appends, without a lock
            if not free:
                shelf, start = self._allocate(SHELF_BYTES, SHELF_BYTES)
                self._shelves.append(shelf)
                free.extend(range(start, start + SHELF_BYTES, size))
            offset = free.popleft()
            return Block(self.mapping, offset, nbytes, free), offset

    def _allocate(self, nbytes: int, size: int) -> tuple[Block, int]:
        if self._is_next(size):  # as in a loop whose results have one size
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
            "FASTPS_SHARED_MEMORY_BYTES"
        )

    @property
    def used_bytes(self) -> int:
        """Bytes that are lent just now."""
        with self._lock:
            self._take_back()
            on_shelves = sum(size * len(free) for size, free in self._packed.items())
            return sum(self._lent.values()) - on_shelves

    def freeze(self) -> None:
        """Lend nothing again that was lent before: a process that is gone may still write it."""
        self._is_frozen = True
        self._packed = {}

    def close(self) -> None:
        """Lend nothing any more; what is lent lives on. Idempotent."""
        with self._lock:
            self._free.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def keep_for(self, children: _Children) -> None:
        """Lend what is lent now again only when children have ended: they have it too."""
        with self._lock:
            self._take_back()
            self._forget_children()
            self._inherited.append((children, set(self._lent)))

    def _forget_children(self) -> None:
        self._inherited = [one for one in self._inherited if not one[0].have_ended()]

    def _is_next(self, size: int) -> bool:
        """Return whether what came back first has just this size, and may be lent as it is."""
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
        """Make sure that everything below end has memory."""
        if end <= self._backed:
            return
        missing = end - self._backed
        left = memory_left()
        ahead = min(max(missing, BACKED_BYTES), self.nbytes - self._backed)
        if ahead + RESERVE_BYTES <= left:
            end, missing = self._backed + ahead, ahead
        if missing + RESERVE_BYTES > left:
            raise MemoryError(
                f"{missing} bytes of shared memory are needed and the machine, or its "
                f"container, has {left} left; give it more (docker run --memory), use smaller "
                "tensors, or set FASTPS_SHARED_MEMORY=0"
            )
        try:
            os.posix_fallocate(self.descriptor, self._backed, missing)
            self.mapping.populate(self._backed, missing)
        except OSError as error:
            raise MemoryError(
                f"{missing} bytes of shared memory are not to be had: {error.strerror}; raise "
                "the limit (docker run --memory, --shm-size; ulimit -f), or set "
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
    """What a fork left behind: it holds a pipe open as long as one of it lives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def have_ended(self) -> bool:
        """Return whether nobody holds the other end."""
        return bool(self._poll.poll(0))

    def __del__(self) -> None:
        os.close(self._descriptor)


def _before_fork() -> None:
    _forking.pipe = None
    if any(arena.used_bytes for arena in list(_arenas)):
        with contextlib.suppress(OSError):  # too many files: then nobody is told apart
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


# ---- handing round ----


def exchange(
    descriptors: Sequence[int], *, ranks: Sequence[int], rank: int, key: bytes, deadline: float
) -> list[list[int]]:
    """Exchange descriptors among all: a list per rank, in the order of ranks.

    All of ranks, processes of one machine, call it; each gives its own descriptors, and the
    lists it gets hold new ones (its own too). The first of ranks leads. deadline:
    time.monotonic(). Raises TransportTimeout, TransportError, AuthError.
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
    """Fill in the connection of everybody expected, whoever else may come; TimeoutError."""
    # imported here: who leads nobody does without asyncio
    from fastps.transport.handshake_gate import GateThread, HandshakeGate  # noqa: PLC0415

    is_complete = threading.Event()

    async def welcome(sock: socket.socket, handshake: ServerHandshake, accept: bytes) -> None:
        if handshake.sender not in expected or handshake.sender in peers:
            raise TransportError(f"worker {handshake.sender} is not expected here")
        sock.send(accept)
        peers[handshake.sender] = sock.dup()
        if len(peers) == len(expected):
            is_complete.set()

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left_s = deadline - time.monotonic()
    memory = (Purpose.MEMORY,)
    gate = GateThread(
        HandshakeGate([listener], key=key, purposes=memory, timeout_s=left_s, welcome=welcome)
    )
    try:
        listener.bind("\0" + name)
        listener.listen(len(expected) + 8)
        listener.setblocking(False)
        gate.start()
        if not is_complete.wait(left_s):
            raise TimeoutError
    finally:
        gate.close(timeout_s=CLOSE_S)


def _follow(
    name: str, descriptors: Sequence[int], rank: int, count: int, key: bytes, deadline: float
) -> list[list[int]]:
    with _reach(name, deadline) as sock:
        try:
            if not sockets.is_own_user(sock):
                raise AuthError("the first worker of this machine is another user's")
            handshake = ClientHandshake(key, purpose=Purpose.MEMORY, sender=rank)
            sockets.shake_hands(sock, handshake.steps(), deadline=deadline)
            _send(sock, descriptors)
            found = _receive(sock, count * len(descriptors), deadline)
        except TimeoutError as error:
            raise TransportTimeout("the first worker of this machine shared no memory") from error
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
        data, batch, _, _ = socket.recv_fds(sock, 1, wanted)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the other worker left")
        found.extend(batch)
    return found
