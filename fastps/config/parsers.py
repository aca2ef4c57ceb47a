# SPDX-License-Identifier: Apache-2.0
"""Parsers of variables and keywords; the text of their ValueError says what is allowed.

Pure; knows no setting.
"""

from __future__ import annotations

import operator
import os

ALIGNMENT = 64  # bytes; partitions and chunks start on cache lines
MOST_PARTITION_BYTES = 1 << 30  # as contract/partition.py has it
_BYTEPS_PARTITIONS = range(MOST_PARTITION_BYTES, (1 << 31) + 1)  # programs say "none" by 2**31 - 1
PATH_MTUS = (0, 256, 512, 1024, 2048, 4096)


def as_text(value: object) -> str:
    """Return a copy of a text: a forked child overwrites that of a token."""
    if isinstance(value, str):
        plain = value.encode(errors="ignore").decode().replace("\0", "")
        if plain == value:
            return plain
    raise ValueError("a text in UTF-8 without zero bytes")


def as_path(value: object) -> str:
    """Return a path as text."""
    if isinstance(value, (str, os.PathLike)) and "\0" not in (path := os.fsdecode(value)):
        return path
    raise ValueError("a path without zero bytes")


def as_integer(value: object) -> int:
    """Read an integer."""
    if isinstance(value, bool):
        raise ValueError("an integer")
    try:
        return int(value, 10) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError("an integer") from None


def as_aligned(value: object) -> int:
    """Read bytes, rounded up to whole cache lines."""
    return -(-as_integer(value) // ALIGNMENT) * ALIGNMENT


def as_partition(value: object) -> int:
    """Read bytes as as_aligned() does; up to 2 GiB, which BytePS takes, means the largest."""
    nbytes = as_aligned(value)
    return MOST_PARTITION_BYTES if nbytes in _BYTEPS_PARTITIONS else nbytes


def as_path_mtu(value: object) -> int:
    """Read one of the packet sizes of RDMA."""
    size = as_integer(value)
    if size not in PATH_MTUS:
        raise ValueError(f"one of {', '.join(map(str, PATH_MTUS))}")
    return size


def as_seconds(value: object) -> float:
    """Read seconds."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("a number of seconds")
    try:
        return float(value)  # nan and inf are out of all bounds
    except ValueError:
        raise ValueError("a number of seconds") from None


def as_boolean(value: object) -> bool:
    """Read yes or no."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("1 or 0")


def as_log_level(value: object) -> str:
    """Accept the levels of `logging` in any case, and BytePS's TRACE and FATAL."""
    word = as_text(value).strip().upper()
    return {"TRACE": "DEBUG", "FATAL": "CRITICAL", "WARN": "WARNING"}.get(word, word)
