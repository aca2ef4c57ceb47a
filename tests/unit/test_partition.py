# SPDX-License-Identifier: Apache-2.0
"""Pieces cover their tensor once; keys are reversible; placements follow the weights."""

from __future__ import annotations

import ctypes
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps import config
from fastps.config import parsers
from fastps.contract import partition as p
from fastps.contract.contract import pusher_of
from fastps.contract.partition import (
    Placement,
    check_pieces,
    check_tensor,
    cut_tensor,
    make_partitions,
    server_weights,
)
from fastps.errors import ConfigError, ProtocolError

TENSORS = st.integers(0, p.MAX_TENSORS - 1)
INDEXES = st.integers(0, p.MAX_PARTITIONS - 1)
KEYS = st.builds(p.key_of, TENSORS, INDEXES)
WEIGHTS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)
HASHES = st.sampled_from(["bytes", *p.KEY_HASHES])


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, 2)), max_size=4
    ),
    nbytes=st.integers(0, 400),
)
def test_pieces_fit_only_if_they_cover_the_tensor_once(pieces, nbytes):
    covered = [byte for offset, length, _ in pieces for byte in range(offset, offset + length)]
    in_order = [offset for offset, _, _ in pieces] == [
        sum(length for _, length, _ in pieces[:index]) for index in range(len(pieces))
    ]
    fits = (
        bool(pieces) and in_order and covered == list(range(nbytes))
        and all(owner < 2 for _, _, owner in pieces)
    )  # fmt: skip
    try:
        check_pieces("t", nbytes, 64, pieces, range(2))
    except ProtocolError:
        assert not fits
    else:
        assert fits


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
    with pytest.raises(ConfigError, match=r"tensor of 4194305 bytes.*partition_bytes=128"):
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


@given(st.lists(INDEXES, min_size=1, max_size=9, unique=True), st.integers(0, 1000))
def test_the_workers_of_a_machine_push_in_turn(ranks, first):
    turns = [pusher_of(ranks, index) for index in range(first, first + len(ranks))]
    assert sorted(turns) == sorted(ranks)
    assert pusher_of(ranks, first + len(ranks)) == turns[0]


# ---- weights and pieces


def test_weights_of_the_paper():
    """Two parts in n + 2 for one server apart, as the paper's bottleneck analysis says."""
    assert server_weights(4, 1, is_colocated=True) == (2, 1, 1, 1, 1)
    assert server_weights(4, 2, is_colocated=True) == (3, 3, 1, 1, 1, 1)
    assert server_weights(8, 0, is_colocated=True) == (1,) * 8
    assert server_weights(3, 3, is_colocated=True) == (1, 1, 1, 0, 0, 0)
    assert server_weights(1, 1, is_colocated=True) == (1, 0)
    assert server_weights(1, 0, is_colocated=True) == (1,)
    assert server_weights(5, 2, is_colocated=False) == (1, 1)
    assert server_weights(5, 0, is_colocated=False) == ()


@given(st.integers(2, 60), st.integers(0, 70))
def test_weights_keep_every_network_card_busy_for_the_same_time(machines, apart):
    """One byte per weight: what a card sends for all others' pushes and its own results."""
    weights = server_weights(machines, apart, is_colocated=True)
    assert len(weights) == apart + machines
    assert min(weights) >= 0
    if apart >= machines:
        assert set(weights[:apart]) == {1}
        assert not any(weights[apart:])
        return
    total, beside = sum(weights), weights[-1]
    of_worker = (total - beside) + (machines - 1) * beside  # pushes, and results of its server
    assert all(machines * weight == of_worker for weight in weights[:apart])


@given(
    nbytes=st.integers(0, 1 << 23),
    step=st.integers(64, 1 << 21),
    weights=WEIGHTS,
    key_hash=HASHES,
)
def test_pieces_cover_a_tensor_once_and_are_aligned(nbytes, step, weights, key_hash):
    step = max(step, nbytes // 60000)
    placement = Placement(weights, key_hash)
    pieces = cut_tensor(nbytes, partition_bytes=step, placement=placement, tensor_id=7)
    assert len(pieces) <= p.most_pieces(nbytes, partition_bytes=step, placement=placement)
    position = 0
    for piece in pieces:
        assert piece.offset == position
        assert piece.offset % p.ALIGNMENT == 0
        position += piece.nbytes
    assert position == nbytes
    assert all(0 < piece.nbytes < step + p.ALIGNMENT for piece in pieces) or nbytes == 0
    assert 1 <= len(pieces) <= p.MAX_PARTITIONS
    assert all(weights[piece.owner] for piece in pieces)
    sums = Counter(dict.fromkeys(range(len(weights)), 0))
    for piece in pieces:
        sums[piece.owner] += piece.nbytes
    assert placement.loads == tuple(sums[owner] for owner in range(len(weights)))


@given(st.lists(st.integers(0, 1 << 23), min_size=1, max_size=20), WEIGHTS)
def test_shares_follow_the_weights(sizes, weights):
    """Large tensors to within 64 bytes each; the rest to within a few of the small ones."""
    placement = Placement(weights)
    servers, total = len(placement.owners), sum(weights)
    largest = errors = 0
    for tensor_id, nbytes in enumerate(sizes):
        before = placement.loads
        cut_tensor(nbytes, partition_bytes=1 << 20, placement=placement, tensor_id=tensor_id)
        gains = [after - old for old, after in zip(before, placement.loads, strict=True)]
        if nbytes < servers * p.MIN_SHARE_BYTES and nbytes <= 1 << 20:
            assert sorted(gains)[-1] == nbytes == sum(gains)
            largest = max(largest, nbytes)
            continue
        errors += p.ALIGNMENT
        for gain, weight in zip(gains, weights, strict=True):
            assert abs(gain - nbytes * weight / total) <= p.ALIGNMENT
    for load, weight in zip(placement.loads, weights, strict=True):
        share = sum(sizes) * weight / total
        slack = 2 * errors * servers  # what stripes disturb, small tensors mend or keep
        assert load <= share + largest + slack
        assert load >= share - largest * max((servers - 1) * weight / total, 1) - slack


@given(
    st.lists(st.integers(0, 1 << 23), max_size=20),
    WEIGHTS,
    st.sampled_from([1 << 16, 4096000]),
    HASHES,
)
def test_cuts_are_deterministic(sizes, weights, step, key_hash):
    first, second = (Placement(weights, key_hash) for _ in range(2))
    for tensor_id, nbytes in enumerate(sizes):
        one, other = (
            cut_tensor(nbytes, partition_bytes=step, placement=placement, tensor_id=tensor_id)
            for placement in (first, second)
        )
        assert one == other


@given(st.sampled_from(sorted(p.KEY_HASHES)), st.integers(1, 1 << 23), st.integers(1, 8))
def test_a_hash_owns_even_pieces(name, nbytes, servers):
    pieces = cut_tensor(
        nbytes, partition_bytes=1 << 20, placement=Placement((1,) * servers, name), tensor_id=3
    )
    assert len({piece.nbytes for piece in pieces[:-1]}) <= 1
    for index, piece in enumerate(pieces):
        assert piece.owner == p.KEY_HASHES[name](p.key_of(3, index)) % servers


def test_a_megabyte_fills_the_links_of_all_servers_evenly():
    pieces = cut_tensor(
        1 << 20, partition_bytes=4096000, placement=Placement((1,) * 4), tensor_id=0
    )
    assert [(piece.nbytes, piece.owner) for piece in pieces] == [(1 << 18, n) for n in range(4)]


def test_the_cut_refuses_what_the_check_refuses():
    placement = Placement((1, 1))
    check_tensor(64 * 65534, partition_bytes=64, n_owners=2)
    assert len(cut_tensor(64 * 65534, partition_bytes=64, placement=placement, tensor_id=0)) == (
        65534
    )
    before = placement.loads
    with pytest.raises(ConfigError, match="set partition_bytes=128 or more"):
        cut_tensor(64 * 65534 + 1, partition_bytes=64, placement=placement, tensor_id=0)
    with pytest.raises(ConfigError, match="too many tensors"):
        cut_tensor(1, partition_bytes=64, placement=placement, tensor_id=1 << 31)
    assert placement.loads == before


# ---- placement


@given(st.integers(1, 20), st.lists(st.integers(0, 3) | st.integers(0, 1 << 30), max_size=200))
def test_bytes_placement_is_balanced_within_one_partition(servers, sizes):
    placement = Placement((1,) * servers)
    sums: Counter[int] = Counter()
    for key, nbytes in enumerate(sizes):
        before = placement.loads
        owner = placement.place(key, nbytes)
        assert owner == before.index(min(before))
        sums[owner] += nbytes
    assert placement.loads == tuple(sums[owner] for owner in range(servers))
    assert max(placement.loads) - min(placement.loads) <= max(sizes, default=0)


@given(
    WEIGHTS,
    HASHES,
    st.lists(st.tuples(KEYS, st.integers(0, 1 << 30)), max_size=50),
)
def test_placement_is_deterministic_and_within_range(weights, name, requests):
    first, second = (Placement(weights, name, built_in_hash_coef=3) for _ in range(2))
    owners = [first.place(*request) for request in requests]
    assert owners == [second.place(*request) for request in requests]
    assert all(weights[owner] for owner in owners)
    assert sum(first.loads) == sum(nbytes for _, nbytes in requests)


@given(st.sampled_from(sorted(p.KEY_HASHES)), st.lists(KEYS, min_size=1, max_size=20))
def test_hash_placement_does_not_depend_on_history(name, keys):
    placement = Placement((1, 2, 0, 1, 1), name)
    for key in keys:
        assert placement.place(key, key) == Placement(placement.weights, name).place(key, 1)


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
        assert Placement((1,) * servers, name).place(key, 1) == value % servers


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
    assert Placement((1,) * 7, "built_in").place(key, 1) == STD_HASH[key] % 7
    for coef in (1, 2, 77):
        owner = Placement((1,) * 7, "built_in", built_in_hash_coef=coef).place(key, 1)
        assert owner == unsigned(STD_HASH[key] * coef) % 7


def test_the_names_are_those_of_the_settings():
    (row,) = [setting for setting in config.SETTINGS if setting.field == "key_hash"]
    assert set(row.allowed) == {"bytes", *p.KEY_HASHES}
    assert parsers.ALIGNMENT == p.ALIGNMENT


def test_bad_placements_are_refused():
    with pytest.raises(ConfigError, match="FASTPS_NUM_SERVERS"):
        Placement(())
    with pytest.raises(ConfigError, match="FASTPS_NUM_SERVERS"):
        Placement((0, 0))
    with pytest.raises(ConfigError, match="md5"):
        Placement((1,), "md5")
