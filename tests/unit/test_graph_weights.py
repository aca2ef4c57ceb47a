# SPDX-License-Identifier: Apache-2.0
"""Edges and weights of one call: of the graph, of the call, and without those that are lost."""

from __future__ import annotations

import numpy as np
import pytest

from fastps.graph.survivor_weights import is_of_columns, redirected, remaining, without
from fastps.graph.weights import Graph, Mixing, mixing
from fastps.topology import star_graph, with_destinations

STAR = star_graph(4)  # 0 hears 1, 2 and 3, which hear 0 alone
ALIKE, WEIGHTED = Graph(STAR, is_weighted=False), Graph(STAR, is_weighted=True)


def mixed(graph: Graph, me: int, own=None, sources=None, targets=None, is_checked=False) -> Mixing:
    return mixing(graph, me, own, sources, targets, is_checked=is_checked)


def test_without_weights_all_sources_count_alike():
    found = mixed(ALIKE, 0)
    assert found.edges.sources == (1, 2, 3)
    assert found.edges.targets == ((1, -1), (2, -1), (3, -1))
    assert (found.edges.ignored, found.edges.is_mean, found.edges.is_checked) == ((), True, False)
    assert found.weights == ()  # a mean needs none
    assert mixed(ALIKE, 0, is_checked=True).edges.is_checked


def test_weights_of_the_graph_count_if_they_are_to():
    found = mixed(WEIGHTED, 1)
    own, sources = STAR.receive_weights(1)
    assert found.weights == (sources[0], own)
    assert (found.edges.sources, found.edges.is_mean) == ((0,), own == sources[0] == 0.5)


def test_weights_of_a_call_are_in_the_order_of_ranks():
    found = mixed(ALIKE, 0, 0.5, {3: 0.25, np.int64(1): 0.125})
    assert found.weights == (0.5, 0.125, 0.25)
    assert (found.edges.sources, found.edges.ignored) == ((1, 3), (2,))
    assert found.edges.targets == ((1, -1), (2, -1), (3, -1))
    assert not found.edges.is_mean
    assert mixed(ALIKE, 3, 0.5, {0: 0.5}).edges.is_mean


def test_scaled_copies_are_made_once_for_each_factor():
    found = mixed(ALIKE, 1, 0.5, {0: 0.5}, {0: 2.0, 2: 1.0, 3: 0.5})
    assert found.edges.targets == ((0, 1), (2, -1), (3, 0))
    assert found.weights == (0.5, 0.5, 0.5, 2.0)  # of what is mixed, and of copies
    assert found.edges.n_copies == 2
    found = mixed(ALIKE, 1, 0.5, {0: 0.5}, [3, 0])
    assert (found.edges.targets, found.weights) == (((0, -1), (3, -1)), ())


@pytest.mark.parametrize(
    ("own", "sources", "targets", "text"),
    [
        (0.5, None, None, "both or neither"),
        (None, {1: 0.5}, None, "both or neither"),
        (0.5, {2: 0.5}, None, r"src_weights name \[2\]"),  # who does not send to 1
        (None, None, {0: 1.0}, "dst_weights came without src_weights"),
        (0.5, {0: 0.5}, [2, 2], "twice"),
        (0.5, {4: 0.5}, [2], r"src_weights name \[4\]"),
        (0.5, {-1: 0.5}, [2], r"src_weights name \[-1\]"),
        (0.5, {1: 0.5}, [2], r"src_weights name \[1\]"),
        (0.5, {0: 0.5}, [4], r"dst_weights name \[4\]"),
        (0.5, {0: 0.5}, {1: 1.0}, r"dst_weights name \[1\]"),
    ],
)
def test_weights_that_fit_no_edge_are_refused(own, sources, targets, text):
    with pytest.raises(ValueError, match=text):
        mixed(ALIKE, 1, own, sources, targets)


def test_source_weights_are_a_dictionary():
    with pytest.raises(TypeError, match="is a list"):
        mixed(ALIKE, 1, 0.5, [0])


def test_those_that_are_left_share_the_weights_of_all():
    assert remaining([0.5, 0.25, 0.25], [True, True, False], 0) == pytest.approx([2 / 3, 1 / 3])
    assert remaining([0.5, 0.7], [True, True], 1) == [0.5, 0.7]
    assert remaining([0.5, 0.7], [True, False], 0, keeps_sum=False) == [0.5]


def test_a_worker_that_only_takes_what_others_have_keeps_its_own_array_without_them():
    assert remaining([0.0, 1.0], [True, False], 0) == [1.0]
    assert remaining([0.5, 0.0, 0.25, 0.25], [False, True, False, False], 1) == [1.0]


def test_under_a_rule_those_left_weigh_no_more_than_before():
    found = remaining([0.2, 0.2, 0.4, 0.2], [False, True, True, True], 2, is_trusted=False)
    assert found == pytest.approx([0.2, 0.6, 0.2])


def test_what_a_lost_target_would_have_had_is_shared():
    assert redirected(0.5, {1: 0.25, 2: 0.25}, {2}) == (
        pytest.approx(2 / 3),
        {1: pytest.approx(1 / 3)},
    )
    assert redirected(0.5, {1: 1.0, 2: 1.0}, {2}) == (0.5, {1: 1.0})  # all get all of it
    assert redirected(0.0, {1: 0.5}, {1}) == (0.0, {})
    assert redirected(0.5, [1, 2], {1}) == (0.5, [2])
    for same in ((0.5, None, {1}), (None, {1: 0.5}, {1}), (0.5, {1: 0.5}, set())):
        assert redirected(*same) == same[:2]
    assert [is_of_columns(one) for one in (None, [1], {1: 1.0}, {1: 1.0, 2: 0.5})] == [
        False
    ] * 3 + [True]


def test_a_mixing_without_some_others():
    whole = mixed(ALIKE, 0)
    assert without(whole, 0, (), keeps_sum=True) is whole
    left = without(whole, 0, {2}, keeps_sum=True)
    assert (left.edges.sources, left.edges.targets) == ((1, 3), ((1, -1), (3, -1)))
    assert left.weights == pytest.approx((1 / 3,) * 3)
    assert not left.edges.is_mean
    assert without(whole, 0, {2}, keeps_sum=False).weights == (0.25,) * 3


def test_copies_and_ignored_messages_of_the_lost_go_too():
    graph = Graph(with_destinations([[1, 2], [0], [0]]), is_weighted=False)
    how = mixed(graph, 0, 0.5, {1: 0.5}, {1: 3.0, 2: 3.0})
    left = without(how, 0, {2}, keeps_sum=True)
    assert (left.edges.targets, left.weights) == (((1, 0),), (0.5, 0.5, 3.0))
    how = mixed(graph, 0, 0.5, {1: 0.5})
    assert without(how, 0, {2}, keeps_sum=True).edges.ignored == ()
    assert how.edges.ignored == (2,)
