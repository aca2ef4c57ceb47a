# SPDX-License-Identifier: Apache-2.0
"""What the lent arrays of frameworks refuse before a byte is copied."""

from __future__ import annotations

import numpy as np
import pytest

from fastps.frameworks._borrowed_memory import BorrowedMemory

NO_ROWS = np.zeros((0, 3), np.int64)


def test_no_rows_copy_nothing():
    BorrowedMemory().gather(np.zeros(4, np.int8), NO_ROWS)
    BorrowedMemory().scatter(b"1234", NO_ROWS)


@pytest.mark.parametrize(
    ("flat", "table", "error"),
    [
        (np.zeros(4, np.int8), np.zeros((1, 3), np.int64), IndexError),
        (np.zeros(4, np.int8), np.zeros((1, 2), np.int64), ValueError),
        (np.zeros(4, np.int8), np.zeros((1, 3), np.int32), ValueError),
        (np.zeros(4, np.int8), np.zeros(3, np.int64), ValueError),
        (np.zeros(4, np.int8), np.zeros((3, 2), np.int64).T, ValueError),
        (np.zeros(8, np.int8)[::2], NO_ROWS, ValueError),
        (None, NO_ROWS, TypeError),
        (np.zeros(4, np.int8), None, TypeError),
    ],
)
def test_what_is_no_table_or_no_memory_is_refused(flat, table, error):
    for copy in (BorrowedMemory().gather, BorrowedMemory().scatter):
        with pytest.raises(error):
            copy(flat, table)


def test_arrays_are_not_gathered_into_what_is_read_only():
    flat = np.zeros(4, np.int8)
    flat.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        BorrowedMemory().gather(flat, NO_ROWS)
    with pytest.raises(BufferError):
        BorrowedMemory().gather(b"1234", NO_ROWS)
    BorrowedMemory().scatter(flat, NO_ROWS)
