# SPDX-License-Identifier: Apache-2.0
"""Which results the workers of an elastic job may hand out: those that have landed on all of them.

Each worker says what has landed on it. When all have, the scheduler commits the result and tells
all of them at once. It also decides who is lost, and a connection keeps the order: a survivor
knows of every commit of a view before it hears that the view has ended. What is not committed then
is made again, from arrays that nobody has changed. A worker that is cut off is told of no commit,
and hands nothing out.

An entry is "NAME#N": the N-th result of the name that was committed. Operations among members have
others: see session/elastic_groups.py. Pure: no thread, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastps.control.view_log import Replay


def entry_of(name: str, number: int) -> str:
    """Return the entry of the result of a name with this number."""
    return f"{name}#{number}"


def parts_of(entry: str) -> tuple[str, int]:
    """Return the name and the number in an entry; an operation's name ends with #."""
    is_operation = entry.endswith("#")
    name, _, number = entry.removesuffix("#").rpartition("#")
    return name + "#" * is_operation, int(number)


class Commits:
    """What has landed in the present view, on some of its workers."""

    def __init__(self, replay: Replay) -> None:
        """replay: says which results may be committed in this view; others wait."""
        self._replay = replay
        self._landed: dict[str, set[int]] = {}  # on which peers, by entry
        self.last: dict[str, int] = {}  # that was committed in this view, by name

    def land(self, peer: int, entries: Iterable[str], n_members: int) -> Sequence[str]:
        """Take what has landed on a peer; return what now has on all members."""
        done = []
        for entry in entries:
            peers = self._landed.setdefault(entry, set())
            peers.add(peer)
            name, number = parts_of(entry)
            if len(peers) == n_members and self._replay.allows(name, number):
                del self._landed[entry]
                self.last[name] = number
                self._replay.commit(name, number)
                done.append(entry)
        return done

    def end_view(self) -> None:
        """Forget what has landed in a view that has ended."""
        self._landed.clear()
        self.last = {}
