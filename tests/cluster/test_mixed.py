# SPDX-License-Identifier: Apache-2.0
"""Any sequence of mixed operations, on several process sets at once, gives what NumPy gives.

Hypothesis makes programs, and a job of three workers that lives as long as it is well runs them.
FASTPS_MIXED_EXAMPLES: how many; make soak looks at more.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
from collections.abc import Iterator
from typing import Any

import programs_mixed
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from job import WAIT_S, Job, run_job
from test_collectives import WAYS

from fastps.types import DType

WORKERS = 3
EXAMPLES = int(os.environ.get("FASTPS_MIXED_EXAMPLES", "60"))
COUNTS = st.sampled_from([0, 1, 2, 7, 60, 900, 9_000, 40_001])

steps = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(sorted(programs_mixed.KINDS)),
        "dtype": st.sampled_from(sorted(programs_mixed.OPS)),
        "count": COUNTS,
        "op": st.integers(0, 7),
        "salt": st.integers(0, 5),
        "named": st.booleans(),
        "later": st.booleans(),
        "delays": st.lists(st.integers(0, 2), min_size=WORKERS, max_size=WORKERS),
    }
)
ranks = st.sets(st.integers(0, WORKERS - 1), min_size=1).map(sorted)
programs = st.lists(ranks, max_size=3).flatmap(
    lambda sets: st.fixed_dictionaries(
        {
            "sets": st.just(sets),
            "steps": st.tuples(*[st.lists(steps, max_size=8)] * (len(sets) + 1)),
        }
    )
)


class Fleet:
    """A job whose workers run what they are sent; a new one where the last is not well."""

    def __init__(self, way: str) -> None:
        self._way, self._number = way, 0
        self._stack = contextlib.ExitStack()
        self._links: list[socket.socket] = []

    def _start(self) -> None:
        address = f"fastps-mixed-{secrets.token_hex(8)}"
        door = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        door.settimeout(WAIT_S)
        door.bind("\0" + address)
        door.listen(WORKERS)
        self._job = self._stack.enter_context(
            Job(
                programs_mixed.serve, workers=WORKERS, servers=0,
                arguments={"address": address}, environment=WAYS[self._way],
            )
        )  # fmt: skip
        self._links = [self._stack.enter_context(door.accept()[0]) for _ in range(WORKERS)]
        for link in self._links:
            self._heard(link)

    def _heard(self, link: socket.socket) -> str:
        """Read a line."""
        data = b""
        while not data.endswith(b"\n"):
            assert select.select([link], [], [], WAIT_S)[0], f"no answer\n{self._job.report()}"
            more = link.recv(1 << 16)
            assert more, f"a worker has ended\n{self._job.report()}"
            data += more
        return data.decode()

    def run(self, program: dict[str, Any]) -> None:
        """Have a program run by all; AssertionError with what they say of what went wrong."""
        if not self._links:
            self._start()
        self._number += 1
        line = json.dumps(program | {"number": self._number}).encode() + b"\n"
        try:
            for link in self._links:
                link.sendall(line)
            failures = [json.loads(self._heard(link)) for link in self._links]
            assert not any(failures), "\n".join(failures)
        except BaseException:
            self._links = []
            self._stack.close()
            raise

    def end(self) -> None:
        """Let the workers leave in order."""
        if self._links:
            for link in self._links:
                link.shutdown(socket.SHUT_WR)
            assert self._job.results() == ["done"] * WORKERS
            self._job.end_in_order()
        self._stack.close()


@pytest.fixture(params=["memory", "tcp"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Give a fleet by each way."""
    made = Fleet(request.param)
    try:
        yield made
        made.end()
    finally:
        made._stack.close()


@pytest.mark.timeout(240 + 3 * EXAMPLES)
def test_any_mixture_gives_what_numpy_gives(fleet):
    @settings(
        max_examples=EXAMPLES,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate] + [Phase.shrink] * (EXAMPLES > 100),  # which takes minutes
        database=None,
    )
    @given(program=programs)
    def look(program: dict[str, Any]) -> None:
        fleet.run(program)

    look()


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_every_dtype_in_every_operation(way):
    found = run_job(programs_mixed.dtypes, workers=3, servers=0, environment=WAYS[way])
    names = {code.name.lower() for code in DType} | {"complex64"}
    if programs_mixed.ml_dtypes is None:
        names.discard("bfloat16")
    assert all(set(dtypes) == names for dtypes in found)
