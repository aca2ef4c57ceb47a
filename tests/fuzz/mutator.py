# SPDX-License-Identifier: Apache-2.0
"""Changes of bytes, of trees of plain values, and of lists of items; all by a given Random."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

NUMBERS = (0, 1, 2, 7, 127, 128, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
           1 << 32, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, -1, -(1 << 63), *NUMBERS, 0.5, -0.0, 1e308, math.inf, math.nan, "", "#1",
    "x" * 5000, "\x1b[2J\n", "\U0001f600", b"", b"\xff" * 300, [], {}, [[]], [None] * 300,
    {"": None}, [[[[[]]]]],
)  # fmt: skip
WORDS = (b"\0", b"\xff", b"\n", b" ", b",", b":", b"=", b"[", b"]", b"{", b'"', b"#", b"@",
         b"\r\n", b"%", b"-", b"+", b"\xc0\x80", b"\xed\xa0\x80", b"NaN", b"1e999",
         b"9" * 30)  # fmt: skip
MOST_BYTES = 1 << 16
DEEP = 20_000  # repetitions of what may be an opening bracket


def change_bytes(random: Random, data: bytes, other: bytes) -> bytes:
    """Change one place; other: an input of which a part may come in."""
    at = random.randrange(len(data) + 1)
    end = min(at + 1 + int(random.expovariate(0.1)), len(data))
    kind = random.randrange(9)
    if kind == 0:
        new = bytes([data[at] ^ 1 << random.randrange(8)]) if at < len(data) else b""
        end = at + len(new)
    elif kind == 1:
        new = random.randbytes(end - at)
    elif kind == 2:
        new = random.choice(WORDS)
    elif kind == 3:
        size = random.choice((1, 2, 4, 8))
        number = (random.choice(NUMBERS) + random.randint(-1, 1)) % (1 << 8 * size)
        new, end = number.to_bytes(size, random.choice(("little", "big"))), at + size
    elif kind == 4:
        new = b""
    elif kind == 5:
        new = data[at:end] * random.choice((2, 2, 3, 100))
    elif kind == 6:
        begin = random.randrange(len(other) + 1)
        new = other[begin : begin + 1 + int(random.expovariate(0.05))]
    elif kind == 7:
        new, end = b"", len(data)
    else:
        new = data[at : at + 1] * (DEEP if random.random() < 0.05 else 20)
    return (data[:at] + new + data[end:])[:MOST_BYTES]


def change_tree(random: Random, value: Any) -> Any:
    """Change one place of nested plain values, or of what lies in a MessagePack extension."""
    if isinstance(value, msgspec.msgpack.Ext) and random.random() < 0.9:
        return _change_extension(random, value)
    if isinstance(value, dict) and value and random.random() < 0.9:
        pairs = change_tree(random, [list(pair) for pair in value.items()])
        try:
            return dict(pairs)
        except (TypeError, ValueError):
            return pairs
    if isinstance(value, list) and value and random.random() < 0.9:
        return change_items(random, value, value, lambda item: change_tree(random, item))
    if isinstance(value, str | bytes) and value and random.random() < 0.4:
        raw = value.encode() if isinstance(value, str) else value
        raw = change_bytes(random, raw, raw)
        return raw.decode(errors="replace") if isinstance(value, str) else raw
    if isinstance(value, int) and random.random() < 0.3:
        return value + random.choice((-1, 1))
    return random.choice((*VALUES, [value], {"a": value}))


def change_items(
    random: Random, items: list[Any], others: list[Any], change: Callable[[Any], Any]
) -> list[Any]:
    """Change one item, or leave it out, double it, move it, or take one from elsewhere."""
    at = random.randrange(len(items)) if items else 0
    kind = random.randrange(8)
    if kind == 0 or not items:
        return [*items[:at], *(random.sample(others, 1) if others else ()), *items[at:]]
    if kind == 1:
        return items[:at] + items[at + 1 :]
    if kind == 2:
        return items[: at + 1] + items[at:]
    if kind == 3:
        to = random.randrange(len(items))
        rest = items[:at] + items[at + 1 :]
        return [*rest[:to], items[at], *rest[to:]]
    return [*items[:at], change(items[at]), *items[at + 1 :]]


def _change_extension(random: Random, value: msgspec.msgpack.Ext) -> Any:
    if random.random() < 0.15:
        return msgspec.msgpack.Ext(random.randint(-2, 14), value.data)
    data = bytes(value.data)
    try:
        data = msgspec.msgpack.encode(change_tree(random, msgspec.msgpack.decode(data)))
    except (ValueError, TypeError, RecursionError, OverflowError):
        data = change_bytes(random, data, data)
    return msgspec.msgpack.Ext(value.code, data)
