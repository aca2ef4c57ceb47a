# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, names, buckets, and the round of one optimizer step, for all frameworks.

Decides which gradients travel together, when each bucket starts, which are missing at the end, and
which names are valid. Must never know a framework: parameters are positions in a list here, and a
handle is any object with wait(). No I/O; one thread at a time (the one that runs backward).

A round is the time between two optimizer steps. Gradients travel in buckets of one or several. A
gradient is ready after `passes` arrivals, and each bucket goes through

    IDLE -> (all its gradients are ready) -> IN FLIGHT -> FINISHED -> (next round) IDLE

A bucket that never fills goes from IDLE to IN FLIGHT when the round is synchronized. So every rank
sends every bucket exactly once per round, whatever its forward pass used.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fastps.contract.codec import PLAIN, Coding
from fastps.contract.compression import Choice, coding_of
from fastps.errors import FastPSError, PeerLostError, ShutdownError, StallError
from fastps.types import DType, Op

if TYPE_CHECKING:
    from fastps.control.protocol import Parts
    from fastps.session.session import Session

# Errors that may be consequences of another worker's error.
_CONSEQUENCES = (PeerLostError, StallError, ShutdownError)
# After one operation of a step has failed, the others together have this long to end too.
_GRACE_S = 5.0

# Below this size of a gradient the fixed cost of an operation is larger than that of its bytes.
SMALL_BYTES = 64 << 10
# Large enough to make the fixed cost small, small enough to overlap with the rest of backward.
BUCKET_BYTES = 1 << 20

ACCUMULATE = (
    "pass backward_passes_per_step=<passes> to DistributedOptimizer to accumulate gradients; "
    "to skip a step, call optimizer.synchronize() (GradScaler has done it) and then "
    "optimizer.zero_grad() before the next backward pass; between two backward passes of one "
    "step, do not read optimizer.param_groups, which waits for all gradients"
)

P = TypeVar("P", bound=Hashable)
F = TypeVar("F")
T = TypeVar("T")

Average = Op.AVERAGE
Sum = Op.SUM


class Waitable(Protocol):
    """The part of a session's handle that ends an operation."""

    def wait(self, timeout_s: float | None = None) -> object:
        """Block until the operation is done; raise its error."""


def check_op(op: object) -> Op:
    """Return the operation; ValueError unless it is Average or Sum."""
    if op not in (Average, Sum):
        raise ValueError(f"op must be Average or Sum for gradients, not {op!r}")
    return Op(op)


def op_of(average: object) -> Op:
    """Return Average for True and Sum for False; ValueError for other values."""
    if not isinstance(average, bool):
        raise ValueError(f"average is True or False, not {average!r}: for a sum use average=False")
    return Average if average else Sum


def op_of_words(op: Op | None, average: bool | None) -> Op:
    """Return the operation of Horovod's two arguments, the average if neither is given."""
    if op is not None and average is not None:
        raise ValueError(
            f"pass op or average, not both, got op={op!r} and average={average!r}: average is the "
            "older word"
        )
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, Op):
        raise ValueError(f"op must be one of {', '.join(Op.__members__)}, not {op!r}")
    return op


def of_gradient(name: str) -> str:
    """Return the name of the operation on the gradient of a result."""
    return f"{name}.gradient"


def part_name(name: str | None, place: int) -> str | None:
    """Return the name of one of several tensors of an operation; None without a name."""
    return None if name is None else f"{name}.{place}"


def check_name(name: str | None, call: str) -> str:
    """Return the name back; ValueError if it is not a string, or empty.

    A generated name would differ between ranks that call in a different order. Or it would be new
    at every call, and cost server memory each time. Therefore the caller must choose.
    """
    if isinstance(name, str) and name:
        return name
    raise ValueError(
        f"{call} needs a name that is the same on all workers and is used once at a time, "
        f"for example {call}(tensor, name='loss'); got {name!r}"
    )


def check_optional_name(name: str | None, call: str) -> str | None:
    """Return the name back, or None: nameless operations meet in the order of calls."""
    return None if name is None else check_name(name, call)


def on_each(
    operation: Callable[..., T], tensors: Iterable[Any], name: str | None, **options: Any
) -> list[T]:
    """Call an operation on each of several tensors, under names of their own."""
    return [operation(one, part_name(name, place), **options) for place, one in enumerate(tensors)]


def free_names(
    home: Session, wanted: Sequence[tuple[str, tuple[int, ...], DType]], parts: Parts | None = None
) -> list[str]:
    """Return the names, all with the same number if one of them stands for another tensor already.

    wanted: names, shapes and dtypes. parts: of session.declare(), for the first. Workers that use
    names alike get the same ones; declaring them raises MismatchError if their shapes differ.
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
    """Return the number of backward passes per step back; ValueError if it is below one."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an integer >= 1, got {passes!r}")
    return passes


def derived_names(sizes: Sequence[int]) -> list[str]:
    """Return names of parameters by group and place: unique, and the same on all ranks."""
    return [f"group{group}.{place}" for group, size in enumerate(sizes) for place in range(size)]


def given_names(pairs: Iterable[object], kind: type[P]) -> dict[P, str]:
    """Return the name of each parameter, the first one if a parameter has two.

    ValueError if an entry is not a tuple of a name and a parameter, or if two parameters share a
    name (all shared names are listed).
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
    """Return an entry of named_parameters; ValueError for other types."""
    if isinstance(pair, tuple) and len(pair) == 2:
        name, parameter = pair
        if isinstance(name, str) and isinstance(parameter, kind):
            return name, parameter
    raise ValueError(
        "named_parameters must hold tuples (name, parameter), as those of "
        f"model.named_parameters(); found {_type_text(pair)}"
    )


def _type_text(value: object) -> str:
    """Return the type of a value, and the types of a tuple's items."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


def codec_of(
    choice: Choice, name: str, code: DType, nbytes: int, *, min_bytes: int
) -> tuple[Coding, bool]:
    """Return the codec of a gradient, and whether the gradient travels alone because of it.

    A codec of whole partitions (onebit, topk, randomk, dithering) has one scale or one k, which
    gradients side by side would share. So a gradient of min_bytes or more travels alone under such
    a codec, and a smaller one is not compressed.
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
    """Return buckets of small gradients of one kind that backward computes consecutively.

    sizes: bytes, in the order of the layers. Backward goes through them from the end, so the
    bucket that is only partly filled is that of the front layers, which leaves last. Larger
    gradients travel alone, as do those that `alone` marks, and all if bucket_bytes is 0. A bucket
    is a list of rising positions; buckets are sorted by their first position.
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
    """Wait for every handle, then raise the error of one that failed.

    After the first error the others have a few seconds to end. Of several errors the first is
    raised; one about a worker that is lost or late only if there is no other.
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


_IDLE = _Stage.IDLE  # saves a lookup in arrived()


class Round(Generic[F]):
    """Count arrivals of gradients, and hold the handles in flight until the next step.

    F is the type of what the plugin needs to finish a bucket. `names` are for errors, and `cure`
    is the advice if a gradient arrives too often. Not safe for several threads at once; a
    framework runs the hooks of one backward pass one after the other.
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
        self._handles: list[tuple[Waitable, Sequence[F]]] = []  # in flight
        self._started: list[int] = []  # buckets in flight
        self._is_closed = False
        self.extend(names)

    @property
    def is_closed(self) -> bool:
        """Whether the round is complete; the next arrival opens a new one."""
        return self._is_closed

    def is_ready(self, index: int) -> bool:
        """Return whether a gradient has had its backward passes in this round."""
        return not self._is_closed and self._counts[index] == self._passes

    def is_finished(self, index: int) -> bool:
        """Return whether a gradient's communication has ended in this round."""
        return not self._is_closed and self._stages[self._bucket_of[index]] is _Stage.FINISHED

    @property
    def in_flight(self) -> bool:
        """Whether any gradient is being communicated, or is ready and waits for its bucket."""
        return bool(self._handles or self._waiting)

    @property
    def is_sending(self) -> bool:
        """Whether any gradient is being communicated."""
        return bool(self._handles)

    @property
    def has_arrivals(self) -> bool:
        """Whether any gradient has arrived in this round."""
        return not self._is_closed and any(self._counts)

    def names_in_flight(self) -> list[str]:
        """List the gradients in flight in the order of their starts, then those ready."""
        started = [index for bucket in self._started for index in self._members[bucket]]
        return [self._names[index] for index in (*started, *self._waiting)]

    def bucket_of(self, index: int) -> int:
        """Return the bucket that a gradient travels in."""
        return self._bucket_of[index]

    def extend(self, names: Sequence[str], buckets: Iterable[Sequence[int]] | None = None) -> None:
        """Add gradients, which take the next positions, in more buckets.

        buckets: positions in `names`, each in one bucket; None: a bucket for every gradient.
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
        """Put the same gradients into other buckets; FastPSError while in flight."""
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
        """Raise FastPSError if gradients are in flight, which `call` would disturb."""
        if self.in_flight:
            raise FastPSError(
                f"{call} was called while gradients are being communicated ("
                f"{shortened(self.names_in_flight())}): call step() or synchronize() first"
            )

    def arrived(self, index: int) -> bool:
        """Count one backward pass of a gradient; return whether its bucket can start now."""
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

    def started(self, handle: Waitable, buckets: Sequence[int], contents: Sequence[F]) -> None:
        """Mark buckets as in flight, under one handle."""
        for bucket in buckets:
            self._stages[bucket] = _Stage.IN_FLIGHT
            for index in self._members[bucket]:
                self._waiting.pop(index, None)
        self._started.extend(buckets)
        self._handles.append((handle, contents))

    def missing(self, buckets: Iterable[int]) -> list[int]:
        """Return the buckets among these that have not been sent in this round."""
        return [bucket for bucket in buckets if self._stages[bucket] is _Stage.IDLE]

    def take_each(self) -> list[tuple[Waitable, Sequence[F]]]:
        """Return each handle in flight with its contents, and mark all as finished."""
        taken = self._handles
        for bucket in self._started:
            self._stages[bucket] = _Stage.FINISHED
        self._handles, self._started = [], []
        self._waiting.clear()
        return taken

    def take(self) -> tuple[list[Waitable], list[F]]:
        """Return all handles in flight and all contents, and mark them as finished."""
        taken = self.take_each()
        return [handle for handle, _ in taken], [one for _, group in taken for one in group]

    def close(self) -> None:
        """Mark the round as complete; the next arrival opens a new one."""
        self._is_closed = True

    def reopen(self) -> None:
        """Start a new round; FastPSError while in flight."""
        self.check_idle("a new step")
        self._counts = [0] * len(self._names)
        self._open = [len(members) for members in self._members]
        self._stages = [_Stage.IDLE] * len(self._members)
        self._is_closed = False


def shortened(names: Sequence[str], most: int = 5) -> str:
    """Return names as a text, the first ones and the number of the others."""
    more = len(names) - most
    tail = f" and {more} more" if more > 0 else ""
    return ", ".join(names[:most]) + tail
