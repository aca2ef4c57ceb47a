# SPDX-License-Identifier: Apache-2.0
"""Fixtures that make objects for a test, and close them after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def closing_each(kind: Callable[..., T]) -> Iterator[Callable[..., T]]:
    """Yield a function that makes objects of a kind; close all of them afterwards."""
    made: list[Any] = []

    def create(*args: Any, **options: Any) -> T:
        made.append(kind(*args, **options))
        return made[-1]

    yield create
    for one in made:
        one.close()
