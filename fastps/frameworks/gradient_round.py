# SPDX-License-Identifier: Apache-2.0
"""What every framework's plugin shares: operations, names, and the round of one optimizer step.

Decides which gradients travel together, which start their communication when, which are still
missing at the end, and what a name must look like. Must never know a framework: parameters are
positions in a list here, and a handle is anything with wait(). No I/O; one thread at a time (the
one that runs backward).

A round is what lies between two optimizer steps. Gradients travel in buckets of one or several;
a gradient is ready after `passes` arrivals, and each bucket goes through

    IDLE -> (all its gradients are ready) -> IN FLIGHT -> FINISHED -> (next round) IDLE

and one that never fills goes from IDLE to IN FLIGHT when the round is synchronized, so that
every rank sends every bucket exactly once per round, whatever its forward pass used.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from fastps.contract.codec import PLAIN, Coding
from fastps.contract.compression import Choice, coding_of
from fastps.errors import FastPSError, PeerLostError, ShutdownError, StallError
from fastps.types import DType, Op

if TYPE_CHECKING:
    from fastps.control.protocol import Parts
    from fastps.session.session import Session

# Errors that another worker's own error may have led to.
_CONSEQUENCES = (PeerLostError, StallError, ShutdownError)
# Once one operation of a step has failed the others are given this long, together, to end too.
_GRACE_S = 5.0

# Below this size of a gradient what an operation costs by itself outweighs what its bytes cost.
SMALL_BYTES = 64 << 10
# Large enough for that to vanish, small enough that the rest of backward hides it.
BUCKET_BYTES = 1 << 20

ACCUMULATE = (
    "give backward_passes_per_step=<passes> to DistributedOptimizer to accumulate gradients; "
    "where a step is left out, call optimizer.synchronize() (GradScaler has done it) and then "
    "optimizer.zero_grad() before the next backward pass; between two backward passes of one "
    "step, do not read optimizer.param_groups, which waits for all gradients"
)

P = TypeVar("P", bound=Hashable)
F = TypeVar("F")


Average = Op.AVERAGE
Sum = Op.SUM


class Waitable(Protocol):
    """The part of a session's handle that is needed to end an operation."""

    def wait(self, timeout_s: float | None = None) -> object:
        """Block until the operation is done; raise its error."""


def check_op(op: object) -> Op:
    """Return the operation; ValueError names the two that there are for gradients."""
    if op not in (Average, Sum):
        raise ValueError(f"op must be Average or Sum, not {op!r}")
    return Op(op)


def op_of(average: object) -> Op:
    """Return Average for True and Sum for False; ValueError for an op in its place."""
    if not isinstance(average, bool):
        raise ValueError(f"average is True or False, not {average!r}; Sum is average=False")
    return Average if average else Sum


def op_of_words(op: Op | None, average: bool | None) -> Op:
    """Return what is asked for by Horovod's two words: the average where neither is given."""
    if op is not None and average is not None:
        raise ValueError("give op or average, not both: average is the older word")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, Op):
        raise ValueError(f"op must be one of {', '.join(Op.__members__)}, not {op!r}")
    return op


def of_gradient(name: str) -> str:
    """Name what is done to the gradient of an operation's result."""
    return f"{name}.gradient"


def part_name(name: str | None, place: int) -> str | None:
    """Name one of several tensors of an operation; nameless ones go by their order."""
    return None if name is None else f"{name}.{place}"


def check_name(name: str | None, call: str) -> str:
    """Return the name back, or raise ValueError that shows how to give one.

    A name made up here would differ between ranks that call in a different order, or be new at
    every call and cost server memory each time; therefore the caller must choose.
    """
    if isinstance(name, str) and name:
        return name
    raise ValueError(
        f"{call} needs a name that is the same on all workers and is used once at a time, "
        f"for example {call}(tensor, name='loss'); got {name!r}"
    )


def free_names(
    home: Session, wanted: Sequence[tuple[str, tuple[int, ...], DType]], parts: Parts | None = None
) -> list[str]:
    """Return the names, all with one number where one of them stands for something else already.

    wanted: names, shapes and dtypes. parts: of session.declare(), with the first. Workers that use
    names alike get the same ones; MismatchError comes where their shapes differ.
    """
    number, ending = 1, ""
    while not all(
        home.is_free_for(name + ending, shape, code, None if place else parts)
        for place, (name, shape, code) in enumerate(wanted)
    ):
        number += 1
        ending = f" ({number})"
    return [name + ending for name, _, _ in wanted]


def check_passes(passes: int) -> int:
    """Return the number of backward passes per step back, or raise ValueError below one."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an integer from 1, not {passes!r}")
    return passes


def derived_names(sizes: Sequence[int]) -> list[str]:
    """Name unnamed parameters by group and place: unique over all groups, equal on all ranks."""
    return [f"group{group}.{place}" for group, size in enumerate(sizes) for place in range(size)]


def given_names(pairs: Iterable[object], kind: type[P]) -> dict[P, str]:
    """Map each parameter to its name; the first one wins where a parameter has two.

    Raises ValueError when an entry is not a tuple of a name and a parameter, or when two
    parameters share a name (all shared names are listed).
    """
    names: dict[P, str] = {}
    for pair in pairs:
        name, parameter = _pair_of(pair, kind)
        names.setdefault(parameter, name)
    counts = Counter(names.values())
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"names in named_parameters must be unique; used more than once: {', '.join(twice)}"
        )
    return names


def _pair_of(pair: object, kind: type[P]) -> tuple[str, P]:
    """Return one entry of named_parameters with its types checked."""
    if isinstance(pair, tuple) and len(pair) == 2:
        name, parameter = pair
        if isinstance(name, str) and isinstance(parameter, kind):
            return name, parameter
    raise ValueError(
        "named_parameters must hold tuples (name, parameter), as model.named_parameters() "
        f"gives them; found {_brief(pair)}"
    )


def _brief(thing: object) -> str:
    """Describe a wrong argument by type, and by value only where that is short."""
    if isinstance(thing, tuple):
        return f"a tuple of {len(thing)}: ({', '.join(type(part).__name__ for part in thing)})"
    return type(thing).__name__


def codec_of(
    choice: Choice, name: str, code: DType, nbytes: int, *, min_bytes: int
) -> tuple[Coding, bool]:
    """Return the codec of a gradient, and whether the gradient travels alone because of it.

    A codec of whole partitions (onebit, topk, randomk, dithering) has one scale or one k, which
    gradients side by side would share. So a gradient of min_bytes or more travels alone under
    such a codec, and a smaller one goes without, as it does by itself.
    """
    coding = coding_of(choice, name) or PLAIN
    if not coding.is_whole:
        return coding, False
    return (coding, True) if coding.fits(code, nbytes, min_bytes=min_bytes) else (PLAIN, False)


def plan_buckets(
    kinds: Sequence[Hashable],
    sizes: Sequence[int],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    small_bytes: int = SMALL_BYTES,
    alone: Sequence[bool] | None = None,
) -> list[list[int]]:
    """Put small gradients of one kind that backward makes one after the other into buckets.

    sizes: bytes, in the order of the layers; backward goes through them from the end, so the
    bucket that is left partly filled is that of the front layers, which is sent last. Larger
    gradients travel alone, as all do where bucket_bytes is 0, and those for which alone says so.
    Gives the positions of each bucket, in rising order, buckets by their first position.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for place in range(len(sizes) - 1, -1, -1):
        size = sizes[place]
        is_alone = alone is not None and alone[place]
        if is_alone or not bucket_bytes or size > min(small_bytes, bucket_bytes):
            buckets.append([place])
            continue
        bucket, filled = filling.get(kinds[place], ([], 0))
        if not bucket or filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.insert(0, place)
        filling[kinds[place]] = bucket, filled + size
    return sorted(buckets)


def wait_all(handles: Iterable[Waitable]) -> None:
    """Wait for every handle; once all have ended or had their grace, raise what went wrong.

    Of several errors the first counts, but one that says that somebody is gone or late only
    where no other says why.
    """
    errors: list[Exception] = []
    deadline = 0.0
    for handle in handles:
        try:
            handle.wait(max(0.0, deadline - time.monotonic()) if errors else None)
        except Exception as error:
            errors.append(error)
            if len(errors) == 1:
                deadline = time.monotonic() + _GRACE_S
    if errors:
        causes = [error for error in errors if not isinstance(error, _CONSEQUENCES)]
        raise (causes or errors)[0]


class _Stage(enum.Enum):
    IDLE = 0
    IN_FLIGHT = 1
    FINISHED = 2


_IDLE = _Stage.IDLE  # looking it up takes longer than comparing it


class Round(Generic[F]):
    """Count arrivals of gradients and remember what is in flight until the next step.

    F is what the plugin needs to finish one bucket. `names` only serve messages, `cure` says what
    to do when a gradient arrives too often. Not safe for several threads at once; a framework
    runs the hooks of one backward pass one after the other.
    """

    def __init__(self, names: Sequence[str], passes: int = 1, *, cure: str = ACCUMULATE) -> None:
        self._names: list[str] = []
        self._passes = check_passes(passes)
        self._cure = cure
        self._counts: list[int] = []
        self._bucket_of: list[int] = []
        self._members: list[list[int]] = []  # of each bucket
        self._open: list[int] = []  # how many members of each bucket are not ready
        self._stages: list[_Stage] = []  # of each bucket
        self._waiting: dict[int, None] = {}  # ready gradients of buckets that are not
        self._flights: list[tuple[Waitable, Sequence[F]]] = []
        self._flying: list[int] = []  # buckets
        self._is_closed = False
        self.extend(names)

    @property
    def passes(self) -> int:
        """Backward passes that make one step."""
        return self._passes

    @property
    def is_closed(self) -> bool:
        """Whether the round is complete, and the next arrival opens a new one."""
        return self._is_closed

    def is_ready(self, index: int) -> bool:
        """Return whether a gradient has had its backward passes in this round."""
        return not self._is_closed and self._counts[index] == self._passes

    def is_finished(self, index: int) -> bool:
        """Return whether a gradient's communication has ended in this round."""
        return not self._is_closed and self._stages[self._bucket_of[index]] is _Stage.FINISHED

    @property
    def in_flight(self) -> bool:
        """Whether any gradient is being communicated, or is ready to be with its bucket."""
        return bool(self._flights or self._waiting)

    @property
    def is_sending(self) -> bool:
        """Whether any gradient is being communicated."""
        return bool(self._flights)

    @property
    def has_arrivals(self) -> bool:
        """Whether any gradient has arrived in this round."""
        return not self._is_closed and any(self._counts)

    def names_in_flight(self) -> list[str]:
        """List the gradients in flight in the order they were started, then those ready."""
        flying = [index for bucket in self._flying for index in self._members[bucket]]
        return [self._names[index] for index in (*flying, *self._waiting)]

    def bucket_of(self, index: int) -> int:
        """Return the bucket that a gradient travels in."""
        return self._bucket_of[index]

    def extend(self, names: Sequence[str], buckets: Iterable[Sequence[int]] | None = None) -> None:
        """Watch more gradients, which take the next positions, in more buckets.

        buckets: positions in `names`, each in one bucket; None gives every gradient its own.
        """
        first = len(self._names)
        self._names.extend(names)
        self._counts.extend([0] * len(names))
        self._bucket_of.extend([0] * len(names))
        for places in ([place] for place in range(len(names))) if buckets is None else buckets:
            for place in places:
                self._bucket_of[first + place] = len(self._members)
            self._members.append([first + place for place in places])
            self._open.append(len(places))
            self._stages.append(_Stage.IDLE)

    def regroup(self, buckets: Iterable[Sequence[int]]) -> None:
        """Let the same gradients travel in other buckets; nothing may be in flight."""
        self.check_idle("a new layout")
        names, self._names = self._names, []
        for each in (self._counts, self._bucket_of, self._members, self._open, self._stages):
            each.clear()
        self.extend(names, buckets)

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step; FastPSError while in flight."""
        check_passes(passes)
        self.check_idle("set_backward_passes_per_step()")
        self._passes = passes

    def check_idle(self, call: str) -> None:
        """Raise FastPSError when gradients are in flight that `call` would disturb."""
        if self.in_flight:
            raise FastPSError(
                f"{call} was called while gradients are being communicated ("
                f"{shortened(self.names_in_flight())}): call step() or synchronize() first"
            )

    def arrived(self, index: int) -> bool:
        """Count one backward pass of a gradient; True when its bucket is to start now."""
        if self._is_closed:
            self.reopen()
        bucket = self._bucket_of[index]
        if self._stages[bucket] is not _IDLE or index in self._waiting:
            raise FastPSError(
                f"gradient of {self._names[index]!r} was computed more than {self._passes} "
                f"time(s) since the last step: {self._cure}"
            )
        self._counts[index] += 1
        if self._counts[index] != self._passes:
            return False
        self._waiting[index] = None
        self._open[bucket] -= 1
        return not self._open[bucket]

    def started(self, handle: Waitable, buckets: Sequence[int], flights: Sequence[F]) -> None:
        """Note that these buckets travel under one handle."""
        for bucket in buckets:
            self._stages[bucket] = _Stage.IN_FLIGHT
            for index in self._members[bucket]:
                self._waiting.pop(index, None)
        self._flying.extend(buckets)
        self._flights.append((handle, flights))

    def missing(self, buckets: Iterable[int]) -> list[int]:
        """Return those of the buckets that have not been sent in this round."""
        return [bucket for bucket in buckets if self._stages[bucket] is _Stage.IDLE]

    def take_each(self) -> list[tuple[Waitable, Sequence[F]]]:
        """Hand over each handle in flight, with what it carries; all count as finished then."""
        taken = self._flights
        for bucket in self._flying:
            self._stages[bucket] = _Stage.FINISHED
        self._flights, self._flying = [], []
        self._waiting.clear()
        return taken

    def take(self) -> tuple[list[Waitable], list[F]]:
        """Hand over everything in flight, to be waited for; it counts as finished from now on."""
        taken = self.take_each()
        return [handle for handle, _ in taken], [flight for _, group in taken for flight in group]

    def close(self) -> None:
        """Note that the round is complete: the next arrival opens a new one."""
        self._is_closed = True

    def reopen(self) -> None:
        """Start a new round; nothing may be in flight."""
        self.check_idle("a new step")
        self._counts = [0] * len(self._names)
        self._open = [len(members) for members in self._members]
        self._stages = [_Stage.IDLE] * len(self._members)
        self._is_closed = False


def shortened(names: Sequence[str], most: int = 5) -> str:
    """Join names, leaving out what would make a message unreadable."""
    more = len(names) - most
    tail = f" and {more} more" if more > 0 else ""
    return ", ".join(names[:most]) + tail
