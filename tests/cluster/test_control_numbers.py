# SPDX-License-Identifier: Apache-2.0
"""Numbers out of all bounds: an error where they are given, and of no consequence for others."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from control_cluster import WAIT_S, Member, started_job
from hypothesis import given
from hypothesis import strategies as st

from fastps.config import load
from fastps.control import protocol
from fastps.control.protocol import (
    LENGTH,
    Barrier,
    Joined,
    Layout,
    Malformed,
    TensorSpec,
    pack,
    unpack_to_member,
    unpack_to_scheduler,
)
from fastps.errors import ConfigError, ProtocolError
from fastps.session.session import Session

NONSENSE_S = [-1, -0.001, 2e9, math.inf, -math.inf, math.nan]
TIMEOUTS = pytest.mark.parametrize("timeout_s", NONSENSE_S)


def meet(workers: list[Member]) -> None:
    """See that the job goes on."""
    with ThreadPoolExecutor(len(workers)) as pool:
        futures = [pool.submit(w.client.barrier, "on", timeout_s=WAIT_S) for w in workers]
    assert [future.result() for future in futures] == [None] * len(workers)


def test_nonsense_of_one_worker_is_its_own_error() -> None:
    with started_job(num_servers=0) as (_, workers, _):
        client = workers[0].client
        layout = Layout(1, (10,), 40, 4096, 4096)
        for timeout_s in NONSENSE_S:
            for call in (
                lambda s: client.barrier("b", timeout_s=s),
                lambda s: client.blob("o", 1, None, timeout_s=s),
                lambda s: client.declare([TensorSpec("w", layout)], timeout_s=s),
            ):
                with pytest.raises(ValueError, match="timeout_s="):
                    call(timeout_s)
        for root in (-1, 1 << 16, 1 << 80, np.int64(0), 0.5, None):
            with pytest.raises(ConfigError, match="Blob cannot be sent"):
                client.blob("o", root, None, timeout_s=1)  # type: ignore[arg-type]
        changes: list[dict[str, Any]] = [{"nbytes": 1 << 70}, {"shape": (-1,)}, {"dtype": 0}]
        wrong = [TensorSpec("w", msgspec.structs.replace(layout, **change)) for change in changes]
        for spec in [*wrong, TensorSpec("x" * 2000, layout)]:
            with pytest.raises(ConfigError):
                client.declare([spec], timeout_s=1)
        meet(workers)


def test_a_malformed_request_is_refused_by_its_number() -> None:
    """A member that does not check, as of another version: it alone hears of it."""
    with started_job(num_servers=0) as (_, workers, _):
        client = workers[0].client
        for timeout_s in NONSENSE_S:
            message = Barrier(next(client._numbers), "b", timeout_s)
            future, epoch = client._enlist(message)
            client._write(pack(message), time.monotonic() + WAIT_S, epoch)
            answer = future.result(WAIT_S)
            assert "malformed" in answer.message
            assert answer.kind == "protocol"
        meet(workers)


@TIMEOUTS
def test_a_session_of_one_worker_checks_too(timeout_s: float) -> None:
    session = Session(load({"size": 1, "num_servers": 0}, {}))
    handle = session.push_pull_async(np.ones(3), "w")
    for call in (lambda: session.barrier(timeout_s=timeout_s), lambda: handle.wait(timeout_s)):
        with pytest.raises(ValueError, match="timeout_s="):
            call()
    assert handle.wait(0) is not None


def test_shapes_and_roots_are_checked() -> None:
    session = Session(load({"size": 1, "num_servers": 0}, {}))
    with pytest.raises(ValueError, match="a shape has integers"):
        session.declare([("w", (3, -1), 1)])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        session.declare([("w", (0.5,), 1)])  # type: ignore[list-item]
    for root in (-1, 1, 1 << 80):
        with pytest.raises(ValueError, match="root_rank must be from 0 to"):
            session.broadcast_object(None, root)
    with pytest.raises(TypeError):
        session.broadcast_object(None, 0.5)  # type: ignore[arg-type]
    assert session.broadcast_object(3, np.int64(0)) == 3  # type: ignore[arg-type]


@given(st.integers(0, 2**62 - 1), st.sampled_from(sorted(protocol._REQUESTS)), st.data())
def test_a_request_that_does_not_fit_has_a_number(
    number: int, name: str, data: st.DataObject
) -> None:
    scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5)
    rest = data.draw(st.lists(scalars | st.lists(scalars, max_size=3), max_size=16))
    message = unpack_to_scheduler(msgspec.msgpack.encode([name, number, *rest]))
    assert message.request == number  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "body",
    [["Barrier"], ["Barrier", -1, 2], ["Barrier", None], [], ["Nothing", 3], ["KeysReady", "x"],
     ["ReportLost", -1, "why"], {"Barrier": 1}, 3],
    ids=repr,
)  # fmt: skip
def test_what_has_no_number_breaks_the_protocol(body: object) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        unpack_to_scheduler(msgspec.msgpack.encode(body))
    assert isinstance(unpack_to_scheduler(msgspec.msgpack.encode(["Leave", 3])), Malformed)


def test_the_number_of_a_member_fits_the_handshake() -> None:
    whole = Joined(1, (1 << 32) - 1)
    assert unpack_to_member(bytes(pack(whole)[LENGTH.size :])) == whole
    with pytest.raises(ProtocolError):
        unpack_to_member(bytes(pack(Joined(1, 1 << 32))[LENGTH.size :]))
