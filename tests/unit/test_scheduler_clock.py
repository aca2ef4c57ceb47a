# SPDX-License-Identifier: Apache-2.0
"""A scheduler notices that it got no processor, whatever it does first after that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from control_driver import make_config

from fastps.control.scheduler import Scheduler


class Loop:
    """A loop that keeps the last timer; `now` is the time, which only tests move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: tuple[float, Callable[..., None], tuple[Any, ...]]

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., None], *given: Any) -> Loop:
        self.due = when, call, given
        return self

    def call_soon(self, call: Callable[..., None], *given: Any) -> None:
        pass

    def cancel(self) -> None:
        pass


def test_a_pause_is_noticed_though_a_message_is_handled_first() -> None:
    async def make() -> Scheduler:
        return Scheduler(make_config(lease_s=6.0))

    scheduler, loop = asyncio.run(make()), Loop()
    scheduler._loop = loop
    noticed: list[float] = []
    scheduler.membership.delayed = noticed.append
    scheduler.membership.slept = lambda now, seconds: noticed.append(seconds) or []
    scheduler._look_at = loop.now + 1.0
    scheduler._set_timer()
    loop.now += 4.0
    scheduler._do([])
    when, call, given = loop.due
    assert when <= loop.now
    call(*given)
    assert noticed == [3.0]


def test_a_time_is_counted_once() -> None:
    """The deadline that was missed stays the next one until its tick is done."""

    async def make() -> Scheduler:
        return Scheduler(make_config(lease_s=6.0))

    scheduler, loop = asyncio.run(make()), Loop()
    scheduler._loop = loop
    noticed: list[float] = []
    scheduler.membership.delayed = noticed.append
    scheduler.membership.next_deadline = lambda: 100.5
    scheduler._look_at = loop.now + 1.0
    scheduler._set_timer()
    loop.now = 100.8
    for _ in range(2):  # the second time before what the first one has begun is done
        when, call, given = loop.due
        assert when <= loop.now
        call(*given)
        scheduler._set_timer()
        loop.now += 0.01
    assert sum(noticed) == pytest.approx(0.31)
