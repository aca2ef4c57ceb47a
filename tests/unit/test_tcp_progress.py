# SPDX-License-Identifier: Apache-2.0
"""When a link counts as one that carries no large packet."""

from __future__ import annotations

from fastps.transport.tcp.progress import SUSPECT_S, Progress


def test_a_link_that_sends_the_same_again_is_suspected_in_time():
    progress = Progress()
    progress.look([(3, 70, 500, 1500), (4, 71, 500, 1500)], 100.0)
    progress.look([(3, 70, 500, 1500), (4, 71, 900, 1500)], 100.0 + SUSPECT_S - 1)
    assert progress.peers == []
    progress.look([(3, 70, 500, 1500), (4, 71, 900, 1500)], 100.0 + SUSPECT_S)
    assert progress.peers == [3]
    text = progress.trouble_of(3)
    assert "acknowledged for 10 s, in packets of 1500 bytes" in text
    assert "ping -M do -s 1472" in text
    progress.look([], 120.0)  # it has ended, and the error is yet to be worded
    assert progress.trouble_of(3) == text
    assert progress.trouble_of(4) == ""


def test_progress_ends_a_suspicion():
    progress = Progress()
    for now in (0.0, SUSPECT_S):
        progress.look([(3, 70, 500, 1500)], now)
    assert progress.peers == [3]
    progress.look([(3, 70, 501, 1500)], SUSPECT_S + 1)
    assert progress.peers == []


def test_a_link_that_was_idle_begins_anew():
    progress = Progress()
    progress.look([(3, 70, 500, 1500)], 0.0)
    progress.look([], 5.0)
    progress.look([(3, 70, 500, 1500)], SUSPECT_S)
    assert progress.peers == []
