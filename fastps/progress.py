# SPDX-License-Identifier: Apache-2.0
"""Who is late: workers ask each other how far they are when an answer waits for the slowest.

Only a policy that lets workers be ahead of others has somebody to name; asked for when an
operation did not end in time, never before. Threads: hear() runs on the control thread, which
answers also while its worker is at something else; the rest on users'.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING

from fastps.contract import ANY_STALENESS, Policy
from fastps.control.blame import VERDICT_WAIT_S, stall_text
from fastps.errors import FastPSError, StallError
from fastps.objects import decode_object, encode_object

if TYPE_CHECKING:
    from fastps.control.protocol import TensorSpec, Told
    from fastps.session import Session

_ASKED, _SAID = "asked", "said"


class Progress:
    """What one worker hears from the others of how far they are; one for each session."""

    def __init__(self, session: Session) -> None:
        self._session: Session = weakref.proxy(session)  # which goes at once when it ends
        self._news = threading.Condition()
        self._said: dict[tuple[str, int], int] = {}

    def hear(self, event: Told) -> bool:
        """Take what a worker tells, if it is of this kind; on the control thread."""
        kind, name, version = decode_object(event.data)
        if kind == _ASKED:
            told = (_SAID, name, self._session.version_of(name))
            self._session.tell([event.member], encode_object(told))
        elif kind == _SAID:
            with self._news:
                self._said[name, event.member] = version
                self._news.notify_all()
        return kind in (_ASKED, _SAID)

    def stall(
        self, name: str, spec: TensorSpec | None, root: int, others: set[int], timeout_s: float
    ) -> StallError:
        """Word the error of an operation on a tensor that did not end; blocks to VERDICT_WAIT_S.

        root: of a broadcast, else negative. others: whom to ask.
        """
        late = ""
        if spec is not None and spec.policy == Policy.ACCUMULATE:
            with contextlib.suppress(FastPSError):
                late = self._late_text(spec, root, sorted(others))
        if not late:
            return StallError(stall_text(f"tensor {name!r} was not reduced", timeout_s))
        return StallError(
            f"tensor {name!r} had no answer within {timeout_s:g} s: {late}. Let all workers make "
            "as many steps, allow more staleness, or raise FASTPS_OP_TIMEOUT_S"
        )

    def _late_text(self, spec: TensorSpec, root: int, others: list[int]) -> str:
        """Name those for whom an operation waits; nothing if there are none."""
        mine = self._session.version_of(spec.name)
        least = mine - spec.staleness
        if root >= 0:
            others, least = [rank for rank in others if rank == root], mine
        elif spec.staleness == ANY_STALENESS:
            return ""
        found = self._ask(spec.name, others)
        late = [
            f"worker {rank} has begun {version} operations on it"
            for rank, version in sorted(found.items())
            if version < least
        ]
        late += [f"worker {rank} does not say how many" for rank in others if rank not in found]
        return f"{', '.join(late)}; this worker {mine}" if late else ""

    def _ask(self, name: str, others: list[int]) -> dict[int, int]:
        with self._news:
            for rank in others:
                self._said.pop((name, rank), None)
        self._session.tell(others, encode_object((_ASKED, name, 0)))
        with self._news:
            self._news.wait_for(
                lambda: all((name, rank) in self._said for rank in others), VERDICT_WAIT_S
            )
            return {rank: self._said[name, rank] for rank in others if (name, rank) in self._said}
