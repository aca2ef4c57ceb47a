# SPDX-License-Identifier: Apache-2.0
"""Which operations a worker that has run out of data takes part in, and what it brings."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fastps.collectives.objects import encode_object
from fastps.config import load
from fastps.control.protocol import Told
from fastps.session import join
from fastps.session.join import JoinState, Started, neutral
from fastps.types import DType, ReduceOp


class Session:
    """As much of a session as news need: worker 0 of 3, which has started nothing."""

    rank, size = 0, 3
    config = load({}, {})

    def __init__(self) -> None:
        self.versions_of: dict[str, int] = {}
        self.told: list[tuple[list[int], bytes]] = []

    def version_of(self, name: str) -> int:
        return self.versions_of.get(name, 0)

    def started(self, _names: object = None) -> list[object]:
        return []

    def tell(self, members: list[int], data: bytes) -> None:
        self.told.append((members, data))


def operation(number: int) -> Started:
    return Started("w", number, (0, 1, 2), ((4,), int(DType.FLOAT32), -1))


def hear(uneven: JoinState, rank: int, *words: object) -> None:
    uneven.on_message(Told(rank, encode_object((0, *words))))


def wanted(uneven: JoinState) -> list[int]:
    return [one.number for one in uneven._wanted(uneven._rounds[0])]


def test_operations_are_taken_in_their_order_when_all_at_work_have_told() -> None:
    session = Session()
    uneven = JoinState(session, session)  # type: ignore[arg-type]
    hear(uneven, 0, "joined", ({}, []))
    for rank, number in ((1, 2), (2, 2), (1, 1)):  # a later one may be told first
        hear(uneven, rank, "started", tuple(operation(number)))
        assert wanted(uneven) == []
    hear(uneven, 2, "started", tuple(operation(1)))
    assert wanted(uneven) == [1]
    session.versions_of["w"] = 1
    assert wanted(uneven) == [2]
    hear(uneven, 1, "started", tuple(operation(2)))  # again
    session.versions_of["w"] = 2
    assert wanted(uneven) == []


def test_who_joins_tells_what_may_be_over_for_it() -> None:
    session = Session()
    uneven = JoinState(session, session)  # type: ignore[arg-type]
    hear(uneven, 0, "joined", ({}, []))
    past = [tuple(operation(1)), tuple(operation(2))]
    hear(uneven, 1, "joined", ({"w": 2}, past))
    assert wanted(uneven) == [], "member 2 is at work, and has not told"
    hear(uneven, 2, "joined", ({"w": 2}, past))
    assert wanted(uneven) == [1]
    session.versions_of["w"] = 1
    assert wanted(uneven) == [2]


def test_who_has_joined_since_need_not_tell() -> None:
    session = Session()
    uneven = JoinState(session, session)  # type: ignore[arg-type]
    hear(uneven, 0, "joined", ({}, []))
    hear(uneven, 1, "started", tuple(operation(1)))
    assert wanted(uneven) == []
    hear(uneven, 2, "joined", ({"v": 3}, []))
    assert wanted(uneven) == [1]
    assert uneven.correction("w", 1, range(3)) == 3.0
    assert uneven.correction("v", 3, range(3)) == 1.5
    assert uneven.correction("v", 4, range(3)) == 3.0


def test_one_worker_makes_no_others_remember_without_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(join, "MANY_STARTED", 10)
    session = Session()
    uneven = JoinState(session, session)  # type: ignore[arg-type]
    for number in range(-100, 100):
        uneven.on_message(Told(0, encode_object((number, "started", tuple(operation(1))))))
    assert sorted(uneven._rounds) == [-1, 0, 1]
    for number in range(100):
        hear(uneven, 0, "started", tuple(operation(number)))
    assert len(uneven._rounds[0].senders) == 10
    hear(uneven, 0, "joined", ({}, [tuple(operation(number)) for number in range(200, 230)]))
    assert len(uneven._rounds[0].senders) == 10
    monkeypatch.setattr(join, "MANY_STARTED", 1000)
    hear(uneven, 0, "joined", ({}, [tuple(operation(number)) for number in range(200, 400)]))
    assert len(uneven._rounds[0].senders) == 10 + join.MANY_PAST


def test_nobody_corrects_before_anybody_has_joined() -> None:
    session = Session()
    uneven = JoinState(session, session)  # type: ignore[arg-type]
    assert not uneven.is_on
    assert uneven.correction("w", 1, range(3)) == 1.0
    assert uneven.refusal(SimpleNamespace(about=None)) == ""  # type: ignore[arg-type]


FOLD = {
    ReduceOp.SUM: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply, ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("rule", list(FOLD))
@pytest.mark.parametrize("code", [code for code in DType if code is not DType.BFLOAT16])
def test_what_is_brought_changes_nothing(rule: ReduceOp, code: DType) -> None:
    if not rule.has_meaning(code):
        return
    kind = np.dtype(code.name.lower())
    values = np.array([0, 1] if code is DType.BOOL else [0, 1, 5, 100], kind)
    found = FOLD[rule](values, neutral(rule, code, values.nbytes))
    is_logical = code is DType.BOOL and rule in (ReduceOp.SUM, ReduceOp.PRODUCT)
    assert (found == values).all() or is_logical


def test_halves_without_a_numpy_dtype_have_their_own_numbers() -> None:
    bits = [neutral(rule, DType.BFLOAT16, 2)[0] for rule in list(FOLD)[:4]]
    as_floats = (np.array(bits, np.uint32) << 16).view(np.float32)
    assert as_floats.tolist() == [0.0, np.inf, -np.inf, 1.0]
