# SPDX-License-Identifier: Apache-2.0
"""What the workers of an elastic job agree on, between the losses: members, and one's values.

Survivors may be in different operations when a member is lost, and learn of the loss at different
moments. So all that is here goes by operations that go on past a loss, push_pull() and
broadcast_object(): all survivors have the same results of them, and decide by these alone.
Threads: the one that trains; fastps:view notes the members of each view.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from fastps.errors import PeerLostError, ViewChangedError

if TYPE_CHECKING:
    from fastps.frameworks.saved_states import Room
    from fastps.session.elastic_handle import Scope
    from fastps.session.view import View

Members: TypeAlias = tuple[str, ...]  # the workers of a view by rank, in words of all views
_T = TypeVar("_T")
_NEWS, _STATE = "elastic news", "elastic state"


class Parcel(NamedTuple):
    """Values taken apart, as commits have them.

    plain: for encode_object(). described: a plain description of each tensor, or None where plain
    says why there are no values. tensors: their bytes.
    """

    plain: Any
    described: Sequence[Any] | None
    tensors: Sequence[memoryview]


def members_of(session: Any) -> Members:
    """Return the workers of the present view by rank."""
    if session.expected is not None:  # a newcomer that has yet to join
        return ()
    job = session.connections.job  # replaced as a whole, unlike the session's rank and size
    return tuple(f"{one.hostname} {one.pid}" for one in job.workers[: job.n_workers])


def name_of(session: Any) -> str:
    """Return this worker's name among members."""
    job = session.connections.job
    me = job.workers[job.me]
    return f"{me.hostname} {me.pid}"


def lost_errors() -> tuple[type[PeerLostError], ...]:
    """Return the errors of operations that survivors may call again."""
    from fastps.session.elastic import RootLostError  # noqa: PLC0415  (most jobs are not elastic)

    return ViewChangedError, RootLostError


class News(NamedTuple):
    """What a worker knows, or any of them.

    has_failed: the function has. is_changed: members are others. is_awaited: newcomers wait to
    join. is_busy: they cannot join here. view: in which all workers have told that, by its number.
    """

    has_failed: bool
    is_changed: bool
    is_awaited: bool
    is_busy: bool
    view: int = 0


def exchange_news(session: Any, mine: News) -> News:
    """Return what any worker knows, the same on all; blocks until all have come here."""
    handle = session.push_pull_async(np.array(mine[:4], np.int32), _NEWS, average=False)
    has_failed, is_changed, is_awaited, is_busy = map(bool, handle.wait())
    return News(has_failed, is_changed, is_awaited, is_busy, handle.view)


def take_over(session: Any, offer: Callable[[], Parcel], room: Room[_T]) -> tuple[Any, list[_T]]:
    """Return rank 0's plain values and tensors on all workers; blocks.

    Where rank 0 is lost meanwhile, those of the next rank 0, which then calls offer(). A sum
    carries the tensors' bytes, to which all others contribute zeros. If its first byte is 0, rank
    0 was lost before. In a broadcast of arrays, a worker that came after the loss would take
    another root than those that came before it.
    """
    me = name_of(session)
    while True:
        parcel = _offered(offer) if session.rank == 0 else None
        try:
            head = session.broadcast_object(parcel and _head_of(me, parcel), 0, _STATE)
        except lost_errors():
            continue
        if head is None:  # became rank 0 when it had nothing to offer
            continue
        root, plain, described, nbytes = head
        if described is None:
            raise TypeError(f"the worker {root} could not send its values: {plain}")
        whole = np.zeros(1 + nbytes, np.uint8)
        if root == me and parcel is not None:
            whole[0] = 1
            _copy_in(parcel.tensors, whole[1:])
        whole = session.push_pull(whole, f"{_STATE} of {nbytes} bytes", average=False)
        if whole[0]:
            return plain, _tensors_of(described, whole[1:], room)


def _offered(offer: Callable[[], Parcel]) -> Parcel:
    """Return what a worker offers, or why it cannot: the others wait for the outcome."""
    try:
        return offer()
    except Exception as error:
        return Parcel(str(error) or type(error).__name__, None, ())


def _head_of(name: str, parcel: Parcel) -> tuple[Any, ...]:
    described = parcel.described
    nbytes = sum(one.nbytes for one in parcel.tensors)
    return name, parcel.plain, None if described is None else list(described), nbytes


def _copy_in(tensors: Sequence[memoryview], whole: Any) -> None:
    at = 0
    for one in tensors:
        whole[at : at + one.nbytes] = np.asarray(one)
        at += one.nbytes


def _tensors_of(described: Sequence[Any], whole: Any, room: Room[_T]) -> list[_T]:
    found, at = [], 0
    for about in described:
        tensor, place = room(about)
        np.asarray(place)[...] = whole[at : at + place.nbytes]
        at += place.nbytes
        found.append(tensor)
    return found


class ViewHistory:
    """The members of each view, and the views in which steps of gradients were made."""

    def __init__(self, session: Any) -> None:
        """Begin with the present view."""
        self._session = weakref.ref(session)
        self._members: dict[int, Members] = {}
        self._runs: list[list[int]] = []  # view, and how many steps in a row were made in it
        self._under_way: deque[Scope] = deque()
        session.call_in_views(self._note)
        self._members.setdefault(session.view, members_of(session))

    def _note(self, view: View) -> None:
        self._members[view.number] = members_of(self._session())

    def members(self, view: int) -> Members:
        """Return the members of a view by its number; nobody in view 0."""
        return self._members.get(view, ())

    def add_step(self, scope: Scope) -> None:
        """Note a step whose operations have begun."""
        self._count_complete()
        self._under_way.append(scope)

    @property
    def n_steps(self) -> int:
        """Number of steps that have begun."""
        return sum(count for _, count in self._runs) + len(self._under_way)

    def views_since(self, first: int) -> list[int]:
        """Return the view of each step from one on, by its number: its workers took part in it.

        Of a step that is not complete, the view in which it was begun last; 0 if it has failed.
        """
        self._count_complete()
        complete = [view for view, count in self._runs for _ in range(count)]
        return [*complete, *map(_view_of, self._under_way)][first:]

    def _count_complete(self) -> None:
        """Forget the operations of steps that are complete."""
        while self._under_way and all(
            one.is_committed or one.error is not None for one in self._under_way[0].handles
        ):
            view = _view_of(self._under_way.popleft())
            if not self._runs or self._runs[-1][0] != view:
                self._runs.append([view, 0])
            self._runs[-1][1] += 1


def _view_of(scope: Scope) -> int:
    if any(one.error is not None for one in scope.handles):
        return 0
    return min((one.view for one in scope.handles), default=0)


_histories: weakref.WeakKeyDictionary[Any, ViewHistory] = weakref.WeakKeyDictionary()


def history_of(session: Any) -> ViewHistory:
    """Return the history of a session's views, which begins with the first call."""
    found = _histories.get(session)
    if found is None:
        found = _histories[session] = ViewHistory(session)
    return found
