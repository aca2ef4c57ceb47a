# SPDX-License-Identifier: Apache-2.0
"""Payloads in private memory that go from process to process by one copy, which both ends do."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing as mp
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipes import CHUNK, OFFSET, PIPE, Pipes, pipes
from transport_nets import IN_ORDER, OPEN, PEER_LOST, collect, outcome, payload_of

from aids.mailbox import Mailbox
from fastps.errors import PeerLostError, ShutdownError, StallError
from fastps.transport import shm
from fastps.transport._link import Mapping
from fastps.transport.pipe._transport import PipeTransport, pipe_memory_bytes

__all__ = ["pipes"]

WHOLE, PART = 256 << 10, 64 << 10
HEAD, LINE = 320, 64  # of a pipe, before its frames; the lines of its head
SHARE, READABLE, WRITING = 3 * LINE, 3 * LINE + 32, 4 * LINE
ACTIVE, FAILED = 1, 2
DEADLINE_S = 60.0


@pytest.fixture
def seeing(pipes):
    """Make pipes whose ranks have shown their memory."""

    def make(n: int = 2, *, shows: tuple[int, ...] | None = None) -> Pipes:
        net = pipes(n)
        show(net, shows)
        return net

    return make


def show(net: Pipes, shows: tuple[int, ...] | None = None) -> None:
    """Let ranks, all if none are named, reach into each other's memory, and know that."""
    n = len(net.ends)
    for index in range(n) if shows is None else shows:
        net.ends[index].show_memory(1000 + index, 0)
    for index in range(n):  # whoever has written something has looked
        for other in set(range(n)) - {index}:
            net.boxes[index].post(other, b"", kick=2)
    net.settle()
    for index in range(n):
        for _ in range(n - 1):
            net.boxes[index].receive(timeout_s=0.0)


def post(net: Pipes, source: Any, **options: Any) -> Any:
    return net.boxes[0].post(1, source, chunk_bytes=CHUNK, kick=2, is_whole=True, **options)


def frames(net: Pipes) -> int:
    return net.ends[0].statistics()["frames_sent"] - 1  # but for that of show()


@pytest.mark.parametrize("nbytes", [WHOLE, WHOLE + 1, 1 << 20, 17 * PART - 3, (9 << 20) + 7])
@pytest.mark.parametrize("who", ["both", "reader", "writer"])
@pytest.mark.parametrize("where", ["private", "from an arena", "to an arena", "arenas"])
def test_a_payload_goes_as_one_frame_whoever_copies(seeing, nbytes, who, where):
    net = seeing()
    data = payload_of(nbytes)
    target = np.zeros(nbytes, np.uint8) if "arena" not in where else net.lent(1, bytes(nbytes))
    if where in ("to an arena", "arenas"):
        net.boxes[1].place(target)
    parcel = post(net, net.lent(0, data) if where in ("from an arena", "arenas") else data)
    assert net.ends[1].step()  # it is opened
    if who == "reader":
        while net.ends[1].step():
            pass
    elif who == "writer":
        while net.ends[0].step():
            pass
    net.settle()
    found = net.boxes[1].receive(timeout_s=0.0)[2]
    assert (bytes(target) if where in ("to an arena", "arenas") else found) == data
    assert outcome(parcel) == "OK"
    assert frames(net) == 1


def test_a_payload_is_sent_when_all_of_it_was_read(seeing):
    net = seeing()
    parcel = post(net, payload_of(WHOLE))
    for _ in range(1 + WHOLE // PART):  # it is opened, then read
        assert net.ends[1].step()
        with pytest.raises(StallError):
            parcel.wait(timeout_s=0.0)
    net.settle()
    parcel.wait(timeout_s=0.0)


@pytest.mark.parametrize("shows", [(), (0,), (1,)], ids=["nobody", "the writer", "the reader"])
def test_both_have_to_show_their_memory(seeing, shows):
    net = seeing(shows=shows)
    data = payload_of(WHOLE)
    post(net, data)
    net.settle()
    assert collect(net.boxes[1], WHOLE) == data
    assert frames(net) == WHOLE // CHUNK


def test_memory_that_is_not_the_peers_is_not_read(pipes):
    net = pipes()
    for end in net.ends:
        end.show_memory(7, 0)
    mail = net.memory.address + OFFSET
    ctypes.c_int64.from_address(mail + 32).value = 8  # as if its number were of another process
    data = payload_of(WHOLE)
    net.boxes[1].post(0, b"", kick=2)
    post(net, data)
    net.settle()
    assert collect(net.boxes[1], WHOLE) == data
    assert net.ends[0].statistics()["frames_sent"] == WHOLE // CHUNK


def test_small_and_unready_payloads_go_through_the_pipe(seeing):
    net = seeing()
    post(net, payload_of(WHOLE - 1))
    net.boxes[0].post(1, payload_of(WHOLE), chunk_bytes=CHUNK, kick=2)  # it has no one place
    net.settle()
    assert frames(net) == 2 * WHOLE // CHUNK


def test_a_payload_that_has_begun_goes_on_as_it_began(pipes):
    net = pipes()
    data = payload_of(2 * PIPE)
    post(net, data)  # as much of it as fits, before anybody knows the other's memory
    for index, end in enumerate(net.ends):
        end.show_memory(1000 + index, 0)
    for index in (1, 0):
        net.boxes[index].post(1 - index, b"", key=9, kick=2)
    net.settle()
    found = arrived(net)
    assert found == {(0, 1, 0): data, (0, 1, 9): b"", (1, 0, 9): b""}


def test_what_nobody_wants_is_not_copied():
    small = Mailbox(max_frame=WHOLE - 1, adopts=True)
    other = Pipes()
    try:
        other.ends[1] = PipeTransport(
            other.memory, OFFSET, [arena.mapping for arena in other.arenas], 1
        )
        other.boxes[1] = small
        other.ends[1].adopt(0, small, 0)
        show(other)
        parcel = other.boxes[0].post(1, payload_of(WHOLE), is_whole=True, kick=2)
        other.settle()
        assert outcome(parcel) == "OK"
        assert small.ended(0) == OPEN
    finally:
        other.close()


def secret_memory(nbytes: int) -> mmap.mmap:
    """Give memory that only its process can touch, as a device's is."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(447, 0)
    if descriptor < 0:
        pytest.skip("this kernel has no secret memory")
    os.ftruncate(descriptor, nbytes)
    memory = mmap.mmap(descriptor, nbytes)
    os.close(descriptor)
    return memory


@pytest.mark.parametrize(("secret", "first"), [("source", 1), ("target", 0), ("both", 1)])
def test_memory_out_of_reach_goes_through_the_pipe(seeing, secret, first):
    net = seeing()
    data = payload_of(WHOLE)
    source: Any = data
    if secret != "target":
        source = secret_memory(WHOLE)
        source[:] = data
    if secret != "source":
        net.boxes[1].place(np.frombuffer(secret_memory(WHOLE), np.uint8))
    n_posts = 1 if secret == "target" else 3  # who could not write once does not try again
    for key in range(n_posts):
        parcel = post(net, source, key=key)
        assert net.ends[1].step()  # it is opened
        while net.ends[first].step():  # whoever cannot reach the other's memory goes first
            pass
        net.settle()
        assert outcome(parcel) == "OK"
    assert arrived(net) == {(0, 1, key): data for key in range(n_posts)}
    assert frames(net) == n_posts * (1 + WHOLE // CHUNK)


def test_several_at_once_out_of_reach(seeing):
    net = seeing()
    for key in range(4):
        post(net, payload_of(WHOLE, key) if key == 2 else secret_memory(WHOLE), key=key)
    while net.ends[1].step():
        pass
    net.settle()
    expected = {(0, 1, key): bytes(WHOLE) for key in (0, 1, 3)}
    assert arrived(net) == {(0, 1, 2): payload_of(WHOLE, 2)} | expected


def test_who_leaves_is_heard_after_what_has_to_come_again(seeing):
    net = seeing()
    parcel = post(net, secret_memory(WHOLE), key=1)
    net.ends[0].leave()
    while net.ends[1].step():
        pass
    net.settle()
    assert arrived(net) == {(0, 1, 1): bytes(WHOLE)}
    assert outcome(parcel) == "OK"
    assert [net.boxes[1].ended(0), net.boxes[0].ended(1)] == [IN_ORDER, IN_ORDER]


def test_a_reader_that_waits_for_the_writer_is_told(seeing):
    """The pipe is full, so the writer has nothing to write when it sees what was declined."""
    net = seeing()
    post(net, secret_memory(WHOLE), key=1)
    post(net, payload_of(WHOLE), key=2)
    filling = payload_of(2 * PIPE)
    net.boxes[0].post(1, filling, key=3, chunk_bytes=CHUNK, kick=2)
    while net.ends[1].step():  # it declines the first, and may not end the second yet
        pass
    net.settle()
    expected = {(0, 1, 1): bytes(WHOLE), (0, 1, 2): payload_of(WHOLE), (0, 1, 3): filling}
    assert arrived(net) == expected


def test_what_was_declined_comes_back_when_the_reader_leaves(seeing):
    net = seeing()
    parcel = post(net, secret_memory(WHOLE))
    while net.ends[1].step():
        pass
    net.ends[1].leave()
    net.settle()
    assert net.boxes[0].ended(1) == IN_ORDER
    with pytest.raises(ShutdownError):
        parcel.wait(timeout_s=0.0)


def test_others_go_by_one_copy_after_one_that_could_not(seeing):
    net = seeing()
    post(net, secret_memory(WHOLE), key=1)
    while net.ends[1].step():
        pass
    net.settle()
    before = frames(net)
    post(net, payload_of(WHOLE), key=2)
    net.settle()
    assert frames(net) == before + 1
    assert arrived(net) == {(0, 1, 1): bytes(WHOLE), (0, 1, 2): payload_of(WHOLE)}


def test_a_target_out_of_reach_is_filled_by_the_reader(seeing):
    net = seeing()
    target = np.frombuffer(secret_memory(WHOLE), np.uint8)
    net.boxes[1].place(target)
    post(net, payload_of(WHOLE))
    while net.ends[1].step():
        pass
    assert bytes(target) == payload_of(WHOLE)
    assert frames(net) == 1


@settings(deadline=None)
@given(data=st.data())
def test_any_order_of_posts_and_steps(data):
    net = Pipes(data.draw(st.integers(2, 3), label="ranks"))
    try:
        show(net)
        _post_and_step(net, data)
    finally:
        net.close()


def _post_and_step(net: Pipes, data: st.DataObject) -> None:
    n = len(net.ends)
    sizes = st.sampled_from([1, CHUNK, WHOLE, WHOLE + 9, 3 * PART * 5 + 1])
    sent: dict[tuple[int, int, int], bytes] = {}
    parcels = []
    for number in range(data.draw(st.integers(0, 25), label="steps")):
        index = data.draw(st.integers(0, n - 1))
        if data.draw(st.booleans(), label="step"):
            for _ in range(data.draw(st.integers(1, 4))):
                net.ends[index].step()
            continue
        other = (index + data.draw(st.integers(1, n - 1))) % n
        payload = payload_of(data.draw(sizes), number)
        sent[index, other, number] = payload
        is_whole = data.draw(st.booleans(), label="whole")
        box = net.boxes[index]
        parcels.append(box.post(other, payload, key=number, chunk_bytes=CHUNK, kick=2,
                                is_whole=is_whole))  # fmt: skip
    net.settle()
    assert arrived(net) == sent
    assert {outcome(parcel) for parcel in parcels} <= {"OK"}


def arrived(net: Pipes) -> dict[tuple[int, int, int], bytes]:
    """Collect what each rank got of each other, by key."""
    found: dict[tuple[int, int, int], bytes] = {}
    for index, box in enumerate(net.boxes):
        while True:
            try:
                peer, header, part = box.receive(timeout_s=0.0)
            except StallError:  # nothing more came
                break
            name = (peer, index, header["key"])
            found[name] = found.get(name, b"") + part
    return found


def test_two_threads_that_copy_at_once(seeing):
    net = seeing()
    is_over = threading.Event()

    def work(end: Any) -> None:
        while not is_over.is_set():
            if not end.step():
                time.sleep(0)

    threads = [threading.Thread(target=work, args=(end,)) for end in net.ends]
    for thread in threads:
        thread.start()
    try:
        for number in range(60):
            sizes = [WHOLE + number, 40 * PART + number, (3 << 20) + number]
            sent = [payload_of(nbytes, number) for nbytes in sizes]
            back = payload_of(10 * PART, number)
            for key, payload in enumerate(sent):
                post(net, payload, key=key)
            net.boxes[1].post(0, back, is_whole=True, kick=2)
            found = {}
            for _ in sent:
                _, header, part = net.boxes[1].receive(timeout_s=DEADLINE_S)
                found[header["key"]] = part
            assert found == dict(enumerate(sent))
            assert net.boxes[0].receive(timeout_s=DEADLINE_S)[2] == back
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


# ---- two processes ----


class Side:
    """One of two ranks that are processes."""

    def __init__(self, descriptors: list[int], index: int) -> None:
        memory, *arenas = [Mapping(one, os.fstat(one).st_size) for one in descriptors]
        self.memory = memory
        self.end = PipeTransport(memory, OFFSET, arenas, index)
        self.box = Mailbox(adopts=True)
        self.end.adopt(1 - index, self.box, 1 - index)
        self.end.show_memory(1000 + index, os.getppid())

    def word(self, place: int) -> ctypes.c_int64:
        """Give a word of the pipe from 0 to 1."""
        pipe = OFFSET + 2 * LINE + HEAD + PIPE
        return ctypes.c_int64.from_address(self.memory.address + pipe + place)

    def step_until(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline
            self.end.step()
            time.sleep(0.001)


@pytest.fixture
def descriptors():
    sizes = (OFFSET + pipe_memory_bytes(2), 4096, 4096)
    made = [shm.create_memory(nbytes) for nbytes in sizes]
    yield made
    for one in made:
        os.close(one)


@pytest.fixture
def child():
    """Start a process that is a rank; it is ended with the test."""
    started = []

    def start(work: Callable[..., None], *args: Any) -> Any:
        process = mp.get_context("fork").Process(target=work, args=args)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()
        process.close()


def write_and_end(descriptors: list[int], ending: signal.Signals) -> None:
    """Be a writer that takes a part, and then goes no further."""
    side = Side(descriptors, 0)
    side.step_until(lambda: side.word(READABLE).value)
    side.box.post(1, np.ones(WHOLE, np.uint8), is_whole=True, kick=2)
    side.word(WRITING).value = ACTIVE
    os.kill(os.getpid(), ending)


def naps() -> int:
    """Count how often this thread has slept."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_that_is_given_up_writes_no_more(descriptors, child, ending):
    writer = child(write_and_end, descriptors, ending)
    side = Side(descriptors, 1)
    side.step_until(lambda: side.box.post(0, b"", kick=2) and side.word(READABLE).value)
    side.step_until(lambda: side.word(WRITING).value == ACTIVE)
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    while side.end.step():  # it reads what is left, and waits for that part
        pass
    before = naps()
    side.end.abort()
    side.step_until(lambda: side.box.ended(0) == PEER_LOST)
    assert (naps() - before > 10_000) == (ending == signal.SIGSTOP)  # it waits for it for a while
    writer.join(DEADLINE_S)
    assert writer.exitcode == -signal.SIGKILL


def read_and_die(descriptors: list[int]) -> None:
    """Be a reader that dies when it has opened a payload."""
    side = Side(descriptors, 1)
    side.step_until(lambda: side.box.post(0, b"", kick=2) and side.word(SHARE).value)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_that_died_is_written_no_more(descriptors, child):
    reader = child(read_and_die, descriptors)
    side = Side(descriptors, 0)
    side.step_until(lambda: side.word(READABLE).value)
    parcel = side.box.post(1, payload_of(1 << 20), is_whole=True, kick=2)
    reader.join(DEADLINE_S)
    assert side.word(SHARE).value & 0xFFFFFF == (1 << 20) // PART  # there is some to write
    while side.end.step():
        pass
    assert side.word(WRITING).value == FAILED
    side.end.abort()
    side.step_until(lambda: side.box.ended(1) == PEER_LOST)
    with pytest.raises(PeerLostError):
        parcel.wait(timeout_s=0.0)


SET_DUMPABLE = 4  # prctl(): whether others of the same user may look into a process


def become_nobody() -> None:
    """Be a user without rights, who lets others of his own look."""
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 1, 0, 0, 0)


def write_and_close(descriptors: list[int], closes_at: str) -> None:
    """Be a writer that closes its memory before it writes, or when the other has begun to read."""
    become_nobody()
    side = Side(descriptors, 0)
    side.step_until(lambda: side.word(READABLE).value)
    if closes_at == "once":
        ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    parcel = side.box.post(1, payload_of(4 << 20), chunk_bytes=CHUNK, is_whole=True, kick=2)
    while closes_at == "amid" and not side.word(SHARE).value:
        time.sleep(0)
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    side.step_until(lambda: not side.word(READABLE).value)
    side.step_until(lambda: is_back(parcel))


def is_back(parcel: Any) -> bool:
    try:
        parcel.wait(timeout_s=0.0)
    except StallError:
        return False
    return True


def read_all(descriptors: list[int]) -> None:
    """Be a reader of what such a writer sends."""
    become_nobody()
    side = Side(descriptors, 1)
    side.step_until(lambda: side.box.post(0, b"", kick=2) and side.word(READABLE).value)
    side.step_until(lambda: not side.word(READABLE).value)
    found = b""
    while len(found) < 4 << 20:
        side.end.step()
        with contextlib.suppress(StallError):
            found += side.box.receive(timeout_s=0.0)[2]
    assert found == payload_of(4 << 20)
    side.end.step()


@pytest.mark.parametrize("closes_at", ["once", "amid"])
def test_memory_that_is_closed_later_goes_through_the_pipe(descriptors, child, closes_at):
    both = [child(write_and_close, descriptors, closes_at), child(read_all, descriptors)]
    for process in both:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in both] == [0, 0]
