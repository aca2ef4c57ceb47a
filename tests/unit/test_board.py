# SPDX-License-Identifier: Apache-2.0
"""All survivors read the same from a board that one of them has sealed, whoever dies when."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.transport import shm
from fastps.transport._link import Block, Mapping
from fastps.worker._board import Board, board_bytes

SIZE, TENSORS = 3, 3
OFFSET = 128
ROW = LINE = 64
SEALED = 1 << 62


class Boards:
    """The boards of all ranks, and their memory as numbers of 64 bits."""

    def __init__(self) -> None:
        descriptor = shm.create_memory(OFFSET + board_bytes(SIZE))
        try:
            mappings = [Mapping(descriptor, OFFSET + board_bytes(SIZE)) for _ in range(SIZE)]
        finally:
            os.close(descriptor)
        self.ranks = [Board(one, OFFSET, n=SIZE, index=rank) for rank, one in enumerate(mappings)]
        block = Block(mappings[0], OFFSET, LINE + SIZE * ROW + TENSORS * SIZE * 8, None)
        self.words = np.frombuffer(block, np.int64)

    def row(self, rank: int) -> int:
        return (LINE + rank * ROW) // 8

    def mark(self, tensor: int, rank: int) -> int:
        return (LINE + SIZE * ROW) // 8 + tensor * SIZE + rank


@pytest.fixture
def boards() -> Boards:
    return Boards()


def test_what_all_have_reported_is_there_for_all(boards):
    for rank, board in enumerate(boards.ranks):
        assert not any(one.has(1, 5) for one in boards.ranks), rank
        assert board.report([(1, 5), (2, 1)])
    assert all(one.has(1, 5) and one.has(2, 1) and one.has(1, 4) for one in boards.ranks)
    assert not any(one.has(1, 6) or one.has(0, 1) for one in boards.ranks)


def test_versions_go_round(boards):
    last = (1 << 32) - 1
    for board in boards.ranks:
        board.report([(0, last)])
    assert boards.ranks[0].has(0, last)
    assert not boards.ranks[0].has(0, 0)
    for board in boards.ranks:
        board.report([(0, 0)])
    assert boards.ranks[0].has(0, 0)
    assert boards.ranks[0].has(0, last)


def test_a_rank_that_is_killed_within_a_report_has_not_reported(boards):
    for board in boards.ranks:
        board.report([(0, 1), (1, 1)])
    for board in boards.ranks[1:]:
        board.report([(0, 2), (1, 2)])
    boards.words[boards.mark(0, 0)] = 2 << 32 | 2
    assert not boards.ranks[1].has(0, 2)
    assert boards.ranks[1].has(0, 1)  # which it may still wait for
    boards.ranks[1].seal()
    assert [board.has(0, 1) and not board.has(0, 2) for board in boards.ranks] == [True] * 3


def test_a_sealed_board_takes_nothing(boards):
    boards.ranks[2].seal()
    assert [board.report([(0, 1)]) for board in boards.ranks] == [False] * 3
    assert not boards.ranks[0].has(0, 1)


def test_what_has_no_place_is_refused(boards):
    with pytest.raises(ValueError, match="room for"):
        boards.ranks[0].report([(1 << 18, 1)])
    with pytest.raises(ValueError, match="does not fit"):
        Board(boards.ranks and Mapping(_memory(4096), 4096), 0, n=2, index=0)


def _memory(nbytes: int) -> int:
    return shm.create_memory(nbytes)


@contextmanager
def waiting(board: Board, timeout_s: float = 30.0) -> Iterator[list[bool]]:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(board.wait(0, 1, timeout_s, 20)))
    thread.start()
    time.sleep(0.05)
    yield found
    thread.join(10)
    assert not thread.is_alive()


def test_a_rank_waits_for_the_last_one(boards):
    with waiting(boards.ranks[0]) as found:
        for board in boards.ranks:
            assert not found
            board.report([(0, 1)])
    assert found == [True]


@pytest.mark.parametrize("end", ["end", "seal"])
def test_a_rank_does_not_wait_beyond_the_end(boards, end):
    with waiting(boards.ranks[0]) as found:
        getattr(boards.ranks[0], end)()
    assert found == [False]
    assert not boards.ranks[0].wait(0, 1, 30.0, 20)


def test_another_rank_that_seals_does_not_end_the_wait_before_its_time(boards):
    boards.ranks[1].seal()
    assert not boards.ranks[0].wait(0, 1, 0.05, 20)


events = st.one_of(
    st.tuples(st.just("report"), st.integers(0, SIZE - 1), st.integers(1, 7)),
    st.tuples(st.just("die"), st.integers(0, SIZE - 1), st.integers(0, 7)),
    st.tuples(st.just("look"), st.integers(0, SIZE - 1), st.integers(0, TENSORS - 1)),
    st.tuples(st.just("seal"), st.integers(0, SIZE - 1), st.integers(0, SIZE - 1)),
)


@given(st.lists(events, max_size=40))
def test_survivors_agree_when_a_view_ends(history):
    """A rank may die within a report, and others see a board of which some rows are sealed."""
    boards = Boards()
    living = set(range(SIZE))
    landed = [[0] * TENSORS for _ in range(SIZE)]  # the last version of each tensor
    handed_out = [[0] * TENSORS for _ in range(SIZE)]
    batches: list[tuple[int, list[tuple[int, int]]]] = []

    def look(rank: int, tensor: int) -> None:
        version = landed[rank][tensor]
        if boards.ranks[rank].has(tensor, version):
            assert all(one[tensor] >= version for one in landed), "it has not landed everywhere"
            handed_out[rank][tensor] = version

    for kind, rank, what in history:
        if rank not in living:
            continue
        if kind in ("report", "die"):
            # a rank begins what follows only after it has handed out what came before
            some = [
                (tensor, landed[rank][tensor] + 1)
                for tensor in range(TENSORS)
                if what >> tensor & 1 and landed[rank][tensor] == handed_out[rank][tensor]
            ]
            for tensor, version in some:
                landed[rank][tensor] = version
            batches.append((rank, some))
            if kind == "report":
                boards.ranks[rank].report(some)
                continue
            if len(living) > 1:
                living.remove(rank)
            reports = int(boards.words[boards.row(rank)])
            if not reports & SEALED:
                for tensor, version in some[: what % 3]:
                    boards.words[boards.mark(tensor, rank)] = version << 32 | reports + 1
            if rank in living:
                return
        elif kind == "look":
            look(rank, what)
        else:
            boards.words[boards.row(what)] |= SEALED
    for rank in living:
        boards.ranks[rank].seal()
        for tensor in range(TENSORS):
            look(rank, tensor)
    survivors = [handed_out[rank] for rank in living]
    assert all(one == survivors[0] for one in survivors)
    for rank in range(SIZE):  # the lost ones handed out nothing that survivors make again
        assert all(ours <= kept for ours, kept in zip(handed_out[rank], survivors[0], strict=True))
    for rank, some in batches:
        if rank not in living and all(landed[one] == landed[rank] for one in range(SIZE)):
            kept = {version <= survivors[0][tensor] for tensor, version in some}
            assert len(kept) <= 1, "half of a report counts"


NOTES = OFFSET + board_bytes(SIZE)  # beside the board: stop | last handed out, and at the end
ROUNDS = 6


def work(descriptor: int, rank: int) -> None:
    """Report results as they are committed, until told to stop; then seal, and note the rest."""
    mapping = Mapping(descriptor, NOTES + 4096)
    board = Board(mapping, OFFSET, n=SIZE, index=rank)
    notes = np.frombuffer(Block(mapping, NOTES, 4096, None), np.int64)
    ours, last = (notes[1 + (rank + at * SIZE) * TENSORS :][:TENSORS] for at in range(2))
    version = 0
    while not notes[0]:
        version += 1
        if not board.report([(tensor, version) for tensor in range(TENSORS)]):
            break
        for tensor in range(TENSORS):
            while not board.wait(tensor, version, 0.001, 5) and not notes[0]:
                pass
            if board.has(tensor, version):
                ours[tensor] = version
    board.seal()
    for tensor in range(TENSORS):
        last[tensor] = max(one for one in (version - 1, version) if board.has(tensor, one))
    assert not board.report([(0, version + 1)])


def forked(descriptor: int, rank: int) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            work(descriptor, rank)
            code = 0
        finally:
            os._exit(code)
    return child


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_agree_whenever_a_process_is_killed_or_stopped(how):
    """A stopped one wakes when the others have read the board, and adds nothing to it."""
    rng = random.Random(int(how))
    for turn in range(ROUNDS):
        descriptor = _memory(NOTES + 4096)
        notes = np.frombuffer(
            Block(Mapping(descriptor, NOTES + 4096), NOTES, 4096, None), np.int64
        )
        children = [forked(descriptor, rank) for rank in range(SIZE)]
        begun = notes[1 : 1 + SIZE * TENSORS].reshape(SIZE, TENSORS)
        last = notes[1 + SIZE * TENSORS :][: SIZE * TENSORS].reshape(SIZE, TENSORS)
        deadline = time.monotonic() + 60
        while begun.min() < 20 and time.monotonic() < deadline:
            os.sched_yield()
        for _ in range(rng.randrange(3000)):
            os.sched_yield()
        victim = turn % SIZE
        os.kill(children[victim], how)
        notes[0] = 1
        others = [rank for rank in range(SIZE) if rank != victim]
        assert [os.waitpid(children[rank], 0)[1] for rank in others] == [0, 0]
        found = last[others].tolist()
        if how == signal.SIGSTOP:
            os.kill(children[victim], signal.SIGCONT)
        status = os.waitpid(children[victim], 0)[1]
        os.close(descriptor)
        assert status == (0 if how == signal.SIGSTOP else signal.SIGKILL)
        assert found[0] == found[1]
        assert found[0][0] >= 20
        assert len(set(found[0])) == 1, "half of a report counts"
        assert (begun <= found[0]).all(), "handed out what survivors make again"
        if how == signal.SIGSTOP:
            assert last[victim].tolist() == found[0]
