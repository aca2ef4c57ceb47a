# SPDX-License-Identifier: Apache-2.0
"""CPU lists in the kernel's notation."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.config import cpu_list
from fastps.config.cpu_list import parse_cpu_list
from fastps.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", ()),
        ("\n", ()),
        ("3", (3,)),
        ("0-3,8\n", (0, 1, 2, 3, 8)),
        (" 8 , 0-1 ", (0, 1, 8)),
        ("5,5,4-6", (4, 5, 6)),
        ("1023", (1023,)),
    ],
)
def test_lists_are_read(text, cpus):
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    "text", ["a", "1-", "-1", "3-1", "1,,2", "0-1024", "0-999999999999", "1;2", "0-3:2", "１"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="CPU list"):
        parse_cpu_list(text)


@given(st.frozensets(st.integers(0, cpu_list.MAX_CPUS - 1)))
def test_every_list_of_numbers_is_read(cpus):
    assert parse_cpu_list(",".join(map(str, cpus))) == tuple(sorted(cpus))


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(ConfigError):
        assert all(0 <= cpu < cpu_list.MAX_CPUS for cpu in parse_cpu_list(text))


def test_bounds_are_told():
    with pytest.raises(ConfigError, match="'0-1024' must be ascending, within 0-1023"):
        parse_cpu_list("0-1024")
