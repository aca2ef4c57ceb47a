# SPDX-License-Identifier: Apache-2.0
"""Weights that drift apart: what rank 0 keeps of what others tell it."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from fastps.collectives.objects import encode_object
from fastps.control.protocol import MAX_TEXT_CHARS, Told
from fastps.session.drift import Drift


def hear(drift: Drift, rank: int, what: str, prints: list[int]) -> None:
    assert drift.on_message(Told(rank, encode_object(("stepped alone", what, prints))))


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_keeps_a_few_words_of_each(rank, caplog):
    session = Mock(rank=rank, size=2)
    drift = Drift(session, Mock())
    for number in range(3):
        hear(drift, 1, "w" * 100_000, [number] * 100_000)
    assert drift._told == ({1: ("w" * MAX_TEXT_CHARS, [0, 0])} if rank == 0 else {})
    hear(drift, 0, "w" * MAX_TEXT_CHARS, [0, 1])
    assert ("worker 1" in caplog.text) is (rank == 0)
