# SPDX-License-Identifier: Apache-2.0
"""Tensors that an engine forgets, and frames of theirs that come late."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from test_engine import (  # noqa: F401
    CHUNK,
    MISMATCH,
    NBYTES,
    OK,
    OPEN,
    TENSOR,
    TIMEOUT_S,
    job,
    make,
)

from aids.wire import FrameKind
from fastps.errors import FastPSError, PeerLostError
from fastps.types import DType


def test_a_tensor_in_flight_is_not_forgotten(job):  # noqa: F811
    job.start()
    with pytest.raises(FastPSError, match="'t2' is in flight"):
        job.engine.forget(job.tensor)
    job.pushed()
    job.answer(bytes(NBYTES))
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    job.engine.forget(job.tensor)
    job.engine.forget(job.tensor)  # nothing is left of it
    with pytest.raises(FastPSError, match="declare it again"):
        job.start()
    assert job.engine.statistics()["tensors"] == 0


def test_nothing_is_started_on_a_tensor_that_is_retired(job):  # noqa: F811
    array = np.zeros(NBYTES // 4, np.float32)
    job.start()
    with pytest.raises(FastPSError, match="'t2' is in flight"):
        job.tensor.retire()
    job.pushed()
    job.answer(bytes(NBYTES))
    while not job.tensor.is_done:
        pass
    job.tensor.retire()  # nobody has waited for it
    with pytest.raises(FastPSError, match="'t2' is being forgotten"):
        job.tensor.retire()
    with pytest.raises(FastPSError, match="'t2' is being forgotten"):
        job.engine.start(job.tensor, array, array)
    with pytest.raises(FastPSError, match="'t2' is being forgotten"):
        job.engine.start_many([job.tensor], [array], [array], priorities=[0])
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    job.tensor.reinstate()
    job.start()
    job.pushed()
    job.answer(bytes(NBYTES), key_version=2)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK


def test_a_number_that_was_forgotten_counts_on(job):  # noqa: F811
    for version in (1, 2):
        job.start()
        job.pushed()
        job.answer(bytes(NBYTES), key_version=version)
        assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    job.engine.forget(job.tensor)
    with pytest.raises(FastPSError, match="version 1 of 2"):
        job.engine.declare(
            TENSOR, "new", nbytes=4, dtype=1, chunk_bytes=CHUNK, partitions=[(0, 4, 0)], version=1
        )
    tensor = job.engine.declare(
        TENSOR, "new", nbytes=4, dtype=1, chunk_bytes=CHUNK, partitions=[(0, 4, 0)], version=5
    )
    array = np.zeros(1, np.float32)
    job.engine.start(tensor, array, array)
    assert job.pushed(nbytes=4)[0]["key_version"] == 6
    job.post(payload=bytes(4), key_version=6)
    assert tensor.wait(timeout_s=TIMEOUT_S) == OK


@pytest.mark.parametrize("is_declared_again", [False, True])
def test_late_frames_of_a_forgotten_tensor_are_no_offence(make, is_declared_again):  # noqa: F811
    """A correct server may send results for long after a round has failed here."""
    job = make(2)  # noqa: F811
    job.start()
    for server in range(2):
        job.pushed(server)
    job.engine.fail_tensor(TENSOR, MISMATCH)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH
    job.engine.forget(job.tensor)
    if is_declared_again:  # smaller, and all of it on the other server
        tensor = job.engine.declare(
            TENSOR, "t", nbytes=4, dtype=1, chunk_bytes=CHUNK, partitions=[(0, 4, 1)], version=1
        )
        array = np.zeros(1, np.float32)
        job.engine.start(tensor, array, array)
        job.pushed(1, nbytes=4)
    job.answer(b"\x07" * NBYTES, 0)
    job.post(1, b"\x07" * CHUNK)
    job.post(1, kind=FrameKind.ERROR, status=MISMATCH)
    assert [server.ended(0) for server in job.servers] == [OPEN, OPEN]
    if is_declared_again:
        job.post(1, b"\x05" * 4, key=TENSOR << 16, key_version=2)
        assert tensor.wait(timeout_s=TIMEOUT_S) == OK
        assert array.tobytes() == b"\x05" * 4
    with pytest.raises(PeerLostError):  # but nobody has asked for this
        job.post(0, bytes(CHUNK), key_version=3)


def test_forgetting_while_late_frames_arrive(job):  # noqa: F811
    array = np.zeros(NBYTES // 4, np.float32)
    is_over = threading.Event()

    def be_late():
        while not is_over.is_set():
            job.post(payload=bytes(CHUNK), key=9 << 16)

    tensor = job.declare(9)
    job.engine.start(tensor, array, array)
    job.engine.fail_tensor(9, MISMATCH)
    late = threading.Thread(target=be_late)
    late.start()
    for version in range(1, 300):
        assert tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH
        job.engine.forget(tensor)
        tensor = job.engine.declare(
            9, "t9", nbytes=NBYTES, dtype=DType.FLOAT32, chunk_bytes=CHUNK,
            partitions=[(0, NBYTES, 0)], version=version,
        )  # fmt: skip
        job.engine.start(tensor, array, array)
        job.engine.fail_tensor(9, MISMATCH)
    is_over.set()
    late.join(TIMEOUT_S)
    assert tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH
    assert job.servers[0].ended(0) == OPEN
    assert not array.any()
