# SPDX-License-Identifier: Apache-2.0
"""CPU lists in the kernel's notation, and who gets which CPU."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps import affinity
from fastps.affinity import choose_cpus, format_cpu_list, parse_cpu_list
from fastps.errors import ConfigError

CPU_SETS = st.frozensets(st.integers(0, 63), min_size=1)


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


@given(st.frozensets(st.integers(0, affinity.MAX_CPUS - 1)))
def test_round_trip(cpus):
    text = format_cpu_list(cpus)
    assert parse_cpu_list(text) == tuple(sorted(cpus))
    assert len(text.split(",")) == max(1, sum(cpu - 1 not in cpus for cpu in cpus))


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(ConfigError):
        assert all(0 <= cpu < affinity.MAX_CPUS for cpu in parse_cpu_list(text))


def test_bounds_are_told():
    with pytest.raises(ConfigError, match="'0-1024' is not within 0-1023"):
        parse_cpu_list("0-1024")


def test_nodes_are_read_from_files(tmp_path):
    for node, text in {0: "0-1\n", 1: "2-3\n", 10: "\n"}.items():
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(text)
    (tmp_path / "node_states").mkdir()
    texts = affinity.read_node_texts(tmp_path)
    assert affinity.parse_node_texts(texts) == {0: (0, 1), 1: (2, 3), 10: ()}


def test_this_machine_is_read():
    nodes = affinity.parse_node_texts(affinity.read_node_texts())
    assert not nodes or set().union(*nodes.values()) >= os.sched_getaffinity(0)
    assert affinity.read_node_texts(affinity.NODE_ROOT / "none") == {}


def test_nothing_asked_is_nothing_pinned():
    assert choose_cpus(3, {0, 1}) == ((), (), ())


def test_a_list_is_dealt_out():
    assert choose_cpus(2, range(8), cpus="0-3") == ((0, 1), (2, 3))
    assert choose_cpus(3, range(8), cpus="4,6") == ((4,), (6,), (4,))
    assert choose_cpus(2, range(8), cpus="0-2") == ((0,), (1, 2))


def test_node_and_list_are_intersected():
    nodes = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    assert choose_cpus(1, range(8), numa_node=1, nodes=nodes) == ((4, 5, 6, 7),)
    assert choose_cpus(1, range(8), numa_node=0, nodes=nodes) == ((0, 1, 2, 3),)
    assert choose_cpus(1, range(8), cpus="3-5", numa_node=1, nodes=nodes) == ((4, 5),)
    with pytest.raises(ConfigError, match="leave no CPU"):
        choose_cpus(1, range(8), cpus="0-1", numa_node=1, nodes=nodes)


def test_unknown_node_is_named():
    with pytest.raises(ConfigError, match=r"FASTPS_NUMA_NODE=2 does not exist.*: 0, 1"):
        choose_cpus(1, range(8), numa_node=2, nodes={0: (0,), 1: (1,)})


def test_forbidden_cpus_are_never_chosen():
    with pytest.raises(ConfigError, match="may use 4-7"):
        choose_cpus(1, range(4, 8), cpus="0-3")


@given(allowed=CPU_SETS, wanted=CPU_SETS, num_threads=st.integers(1, 80))
def test_shares_are_allowed_and_fair(allowed, wanted, num_threads):
    both = allowed & wanted
    try:
        shares = choose_cpus(num_threads, allowed, cpus=format_cpu_list(wanted))
    except ConfigError:
        assert not both
        return
    assert len(shares) == num_threads
    assert set().union(*shares) == both
    counts = [len(share) for share in shares]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    if num_threads <= len(both):
        assert sum(counts) == len(both)
