# SPDX-License-Identifier: Apache-2.0
"""Links whose bytes are no longer acknowledged, and the likely cause. Pure.

A path may have a smaller MTU than the interfaces and drop the ICMP messages that report it (RFC
2923, section 2.1). Small frames pass then: members connect and heartbeats arrive, while a large
frame is retransmitted for ever. The kernel ends such a connection after its user timeout, with the
same error as for a machine that has failed.
"""

from __future__ import annotations

from collections.abc import Iterable

SUSPECT_S = 10.0  # without an acknowledgement, while bytes are retransmitted
ICMP_HEADERS_BYTES = 28  # of IPv4 and ICMP, in a packet of ping


class Progress:
    """When each link was last seen to make progress, by peer; for one thread."""

    def __init__(self) -> None:
        """Start with no link."""
        self._since: dict[tuple[int, int], tuple[int, float]] = {}
        self._texts: dict[int, str] = {}

    def look(self, stuck: Iterable[tuple[int, int, int, int]], now: float) -> None:
        """Take the links that unacknowledged() of each transport lists.

        The trouble of a peer is kept when its link has ended, until another link makes progress.
        """
        seen = {}
        for peer, link, nbytes, packet_nbytes in stuck:
            before = self._since.get((peer, link))
            is_same = before is not None and before[0] == nbytes
            began = before[1] if before is not None and is_same else now
            seen[peer, link] = (nbytes, began)
            if now - began >= SUSPECT_S:
                self._texts[peer] = _text(now - began, packet_nbytes)
            elif before is not None and not is_same:
                self._texts.pop(peer, None)
        self._since = seen

    def trouble_of(self, peer: int) -> str:
        """Return the trouble of the link to a peer; empty if none is known."""
        return self._texts.get(peer, "")

    @property
    def peers(self) -> list[int]:
        """List the peers with trouble."""
        return sorted(self._texts)


def _text(seconds: float, packet_nbytes: int) -> str:
    return (
        f"nothing sent was acknowledged for {seconds:.0f} s, in packets of {packet_nbytes} bytes: "
        "if that machine is alive, the path may not carry packets so large (MTU); check it by "
        f"`ping -M do -s {packet_nbytes - ICMP_HEADERS_BYTES}`, and lower the MTU of the interface"
    )
