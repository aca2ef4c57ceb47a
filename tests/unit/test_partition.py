# SPDX-License-Identifier: Apache-2.0
"""Partitions cover their tensor once; keys are reversible; placements are balanced and known."""

from __future__ import annotations

import ctypes
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps import config
from fastps import partition as p
from fastps.errors import ConfigError
from fastps.partition import Placement, make_partitions

TENSORS = st.integers(0, p.MAX_TENSORS - 1)
INDEXES = st.integers(0, p.MAX_PARTITIONS - 1)
KEYS = st.builds(p.key_of, TENSORS, INDEXES)


@given(nbytes=st.integers(0, 1 << 22), step=st.integers(64, 1 << 20))
def test_pieces_cover_the_tensor_exactly_once(nbytes, step):
    pieces = make_partitions(0, nbytes, step)
    position = 0
    for offset, length in pieces:
        assert offset == position
        position += length
    assert position == nbytes
    assert all(offset % p.ALIGNMENT == 0 for offset, _ in pieces)
    assert all(0 < length < step + p.ALIGNMENT for _, length in pieces) or pieces == [(0, 0)]
    assert len({length for _, length in pieces[:-1]}) <= 1


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, [(0, 0)]),
        (1, [(0, 1)]),
        (127, [(0, 127)]),
        (128, [(0, 128)]),
        (129, [(0, 128), (128, 1)]),
        (256, [(0, 128), (128, 128)]),
    ],
)
def test_small_cases(nbytes, expected):
    assert make_partitions(5, nbytes, 128) == expected
    assert make_partitions(5, nbytes, 100) == expected


def test_largest_count_and_one_more():
    assert len(make_partitions(1, 64 << 16, 64)) == p.MAX_PARTITIONS
    with pytest.raises(ConfigError, match=r"tensor 9 of 4194305 bytes.*partition_bytes=128"):
        make_partitions(9, (64 << 16) + 1, 64)


@given(st.integers(1, 1 << 45), st.integers(1, 1 << 12))
def test_the_advice_works(nbytes, step):
    try:
        assert len(make_partitions(3, nbytes, step)) <= p.MAX_PARTITIONS
    except ConfigError as error:
        advised = int(str(error).split("partition_bytes=")[1].split()[0])
        assert advised > step
        assert p._round_up(advised) == advised
        assert advised * p.MAX_PARTITIONS >= nbytes


def test_a_tensor_beyond_all_settings():
    with pytest.raises(ConfigError, match="split the tensor"):
        make_partitions(0, (1 << 46) + 1, 1 << 30)
    with pytest.raises(ConfigError, match="set partition_bytes=1073741824 or more"):
        make_partitions(0, 1 << 46, 1 << 29)


@pytest.mark.parametrize(
    ("tensor_id", "nbytes", "step"),
    [(-1, 1, 64), (1 << 31, 1, 64), (0, -1, 64), (0, 1, 0), (0, 1, -64), (0, 1, (1 << 30) + 1)],
)
def test_impossible_requests_are_refused(tensor_id, nbytes, step):
    with pytest.raises(ConfigError):
        make_partitions(tensor_id, nbytes, step)


@given(TENSORS, INDEXES)
def test_keys_are_reversible(tensor_id, index):
    key = p.key_of(tensor_id, index)
    assert key == tensor_id * 2**16 + index
    assert (p.tensor_of(key), p.index_of(key)) == (tensor_id, index)
    assert key < 1 << 47


@pytest.mark.parametrize(("tensor_id", "index"), [(-1, 0), (1 << 31, 0), (0, -1), (0, 1 << 16)])
def test_keys_out_of_range_are_refused(tensor_id, index):
    with pytest.raises(ConfigError):
        p.key_of(tensor_id, index)


def test_partitions_are_joined_with_owners():
    joined = p.join_owners(2, [(0, 128), (128, 5)], [1, 0])
    assert joined == (
        p.Partition(2 << 16, 0, 0, 128, 1),
        p.Partition((2 << 16) + 1, 1, 128, 5, 0),
    )
    with pytest.raises(ValueError, match="zip"):
        p.join_owners(2, [(0, 128)], [1, 0])


# ---- placement


@given(st.integers(1, 20), st.lists(st.integers(0, 3) | st.integers(0, 1 << 30), max_size=200))
def test_bytes_placement_is_balanced_within_one_partition(servers, sizes):
    placement = Placement(servers)
    sums: Counter[int] = Counter()
    for key, nbytes in enumerate(sizes):
        before = placement.loads
        owner = placement.place(key, nbytes)
        assert owner == before.index(min(before))
        sums[owner] += nbytes
    assert placement.loads == tuple(sums[owner] for owner in range(servers))
    assert max(placement.loads) - min(placement.loads) <= max(sizes, default=0)


@given(
    st.integers(1, 9),
    st.sampled_from(["bytes", *p.KEY_HASHES]),
    st.lists(st.tuples(KEYS, st.integers(0, 1 << 30)), max_size=50),
)
def test_placement_is_deterministic_and_within_range(servers, name, requests):
    first, second = (Placement(servers, name, built_in_hash_coef=3) for _ in range(2))
    owners = [first.place(*request) for request in requests]
    assert owners == [second.place(*request) for request in requests]
    assert all(0 <= owner < servers for owner in owners)
    assert sum(first.loads) == sum(nbytes for _, nbytes in requests)


@given(st.sampled_from(sorted(p.KEY_HASHES)), st.lists(KEYS, min_size=1, max_size=20))
def test_hash_placement_does_not_depend_on_history(name, keys):
    placement = Placement(5, name)
    for key in keys:
        assert placement.place(key, key) == Placement(5, name).place(key, 1)


def unsigned(value: int) -> int:
    return ctypes.c_uint64(value).value


def djb2(text: str) -> int:
    value = 5381
    for letter in text:
        value = unsigned((value << 5) + value + ord(letter))
    return value


def sdbm(text: str) -> int:
    value = 0
    for letter in text:
        value = unsigned(value * 65599 + ord(letter))
    return value


@given(KEYS, st.integers(1, 64))
def test_hashes_against_other_formulas(key, servers):
    expected = {
        "djb2": djb2(str(key)),
        "sdbm": sdbm(str(key)),
        "naive": unsigned((key // 65536 + key % 65536) * 9973),
    }
    for name, value in expected.items():
        assert p.KEY_HASHES[name](key) == value
        assert Placement(servers, name).place(key, 1) == value % servers


def test_published_values():
    """The djb2 of "0" by hand, and sdbm of one letter."""
    assert p.KEY_HASHES["djb2"](0) == 5381 * 33 + 48 == 177621
    assert p.KEY_HASHES["sdbm"](0) == 48
    assert p.KEY_HASHES["naive"](65537) == 2 * 9973


# Printed by a C++ program with std::hash<std::string>(std::to_string(key)), g++ 12 on x86-64.
STD_HASH = {
    0: 2297668033614959926,
    1: 10159970873491820195,
    65536: 243660463169716517,
    65537: 12950948673254219068,
    12345678: 10113836418918046885,
    99999999: 7622807250404811610,
    123456789: 12315982496267331008,
    4294967296: 11485500290571866357,
    140737488355327: 9174492770887415377,
    281474976710655: 6858603059827089674,
}


@pytest.mark.parametrize("key", STD_HASH)
def test_built_in_is_that_of_libstdcxx(key):
    assert p.KEY_HASHES["built_in"](key) == STD_HASH[key]
    assert Placement(7, "built_in").place(key, 1) == STD_HASH[key] % 7
    for coef in (1, 2, 77):
        owner = Placement(7, "built_in", built_in_hash_coef=coef).place(key, 1)
        assert owner == unsigned(STD_HASH[key] * coef) % 7


def test_the_names_are_those_of_the_settings():
    (row,) = [setting for setting in config.SETTINGS if setting.field == "key_hash"]
    assert set(row.allowed) == {"bytes", *p.KEY_HASHES}
    assert config.ALIGNMENT == p.ALIGNMENT


def test_bad_placements_are_refused():
    with pytest.raises(ConfigError, match="FASTPS_NUM_SERVERS"):
        Placement(0)
    with pytest.raises(ConfigError, match="md5"):
        Placement(1, "md5")
