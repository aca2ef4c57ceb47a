# SPDX-License-Identifier: Apache-2.0
"""How every face of the library starts the operations among members of a process set.

On C-contiguous arrays, dtype as for push_pull_async(). Knows first dimensions that differ, which
way an operation goes, and what travels together. Threads: any, but nameless operations of one set
come from one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastps.collectives._calls import Calls, current_epoch
from fastps.collectives.adasum import adasum
from fastps.collectives.channels import grouped_of, part_of, rest_of
from fastps.collectives.descriptions import Brought, brought_of
from fastps.collectives.overlap import is_apart
from fastps.collectives.row_counts import Rows, gather_objects, row_counts_of_each, tell
from fastps.collectives.size_cache import SizesDifferError
from fastps.collectives.staged import Stages
from fastps.errors import (
    ArgumentError,
)
from fastps.session.current import current, in_one_scope
from fastps.session.process_sets import (
    ProcessSet,
    checked_set,
    global_process_set,
)
from fastps.types import DType, Op, dtype_of
from fastps.worker.handle import Array, Handle, MappedHandle, completed, scale

if TYPE_CHECKING:
    from fastps.collectives._exchange import Operation
    from fastps.collectives.group import Group

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT
BAND = Op.BAND
BOR = Op.BOR
BXOR = Op.BXOR
Adasum = Op.ADASUM

# All-reduced together where a copy costs less than an operation; see docs/collectives.md
FUSED_BYTES = 16 << 10

_guesses = Calls()  # of rows as many as before


def start_allreduce(
    array: Array,
    out: Array | None,
    op: Op,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
    priority: int = 0,
    brought: Brought = (),
    factor: float = 1.0,
) -> Handle[Any]:
    """Start an all-reduce: by servers where push_pull() does the same, else among members.

    A name that was declared with another shape goes among members too, so that names may be used
    again for something else. brought: all arrays of the grouped operation that begins with it.
    factor: what the result is multiplied by.
    """
    code = _code_of(array, dtype)
    if op is Adasum:
        found = _adasum([array], code, name, process_set, factor)[0]
        if out is not None:
            out[...] = found
        return completed(found if out is None else out)
    if name is not None and _goes_by_servers([array], [name], op, process_set, code):
        handle = current().push_pull_async(
            array, str(name), average=op is Average, priority=priority, out=out, dtype=dtype
        )
        return handle.scale(factor, code)
    group = checked_set(process_set).group()
    return group.allreduce(
        array, out, op=op, name=name, dtype=dtype, priority=priority, brought=brought
    ).scale(factor, code)


def _adasum(
    arrays: Sequence[Array], code: DType, name: str | None, process_set: ProcessSet, factor: float
) -> list[Array]:
    """Do an Adasum of each array; blocks, since a level needs the one before."""
    found = adasum(arrays, code, checked_set(process_set).group(), name)
    for array in found:
        if factor != 1.0:
            scale(array, code, factor)
    return found


class _Part(NamedTuple):
    """What is under way for some of several arrays, by place, and how its result is cut."""

    handle: Handle[Any]
    places: list[int]
    split: Callable[[Any], Sequence[Array]]


def start_grouped(
    arrays: Sequence[Array],
    op: Op,
    name: str | None,
    process_set: ProcessSet,
    codes: Sequence[DType],
    *,
    is_in_place: bool = False,
    factor: float = 1.0,
) -> Handle[list[Array]]:
    """Start to all-reduce several arrays, those of one dtype together where that helps.

    The result has for each an array, its own at best if is_in_place, times a factor.
    """
    is_elastic = current().is_elastic
    if is_elastic:
        names = [f"{name}.{place}" for place in range(len(arrays))]
        if name is not None and all(
            _goes_by_servers([one], [label], op, process_set, code)
            for one, label, code in zip(arrays, names, codes, strict=True)
        ):
            return _start_in_scope(arrays, op, name, names, codes, is_in_place, factor)
        is_in_place = False  # a part could be there before another is lost
    parts: list[_Part] = []
    brought = _brought_of(arrays, codes)
    for code, places in _by_dtype(codes):
        all_brought = () if parts else brought
        parts += _start_some(
            arrays, places, op, name, process_set, code, is_in_place, all_brought, factor,
            is_apart=is_elastic,
        )  # fmt: skip
    return _joined(parts, len(arrays))


def _by_dtype(codes: Sequence[DType]) -> list[tuple[DType, list[int]]]:
    """Return the places of each dtype."""
    return [
        (code, [place for place, one in enumerate(codes) if one is code])
        for code in dict.fromkeys(codes)
    ]


def _start_in_scope(
    arrays: Sequence[Array],
    op: Op,
    name: str,
    names: Sequence[str],
    codes: Sequence[DType],
    is_in_place: bool,
    factor: float,
) -> Handle[list[Array]]:
    """Start to all-reduce arrays in an elastic job, so that all are of the same workers."""
    session, parts = current(), list[_Part]()
    session.routes.group(name, names)
    with in_one_scope(session) as scope:
        for code, places in _by_dtype(codes):
            some = [arrays[place] for place in places]
            handle = session.push_pull_async(
                some, [names[place] for place in places], average=op is Average, dtype=code,
                out=some if is_in_place else None, **scope,
            )  # fmt: skip
            parts.append(_Part(handle.scale(factor, code), places, list))
    return _joined(parts, len(arrays))


def _joined(parts: Sequence[_Part], count: int) -> Handle[list[Array]]:
    """Return the handle of all arrays, by place."""

    def finish(found: list[Any]) -> list[Array]:
        made: dict[int, Array] = {}
        for part, given in zip(parts, found, strict=True):
            made.update(zip(part.places, part.split(given), strict=True))
        return [made[place] for place in range(count)]

    return MappedHandle([part.handle for part in parts], finish)


def _start_some(
    arrays: Sequence[Array],
    places: list[int],
    op: Op,
    name: str | None,
    process_set: ProcessSet,
    code: DType,
    is_in_place: bool,
    brought: Brought,
    factor: float,
    *,
    is_apart: bool = False,
) -> list[_Part]:
    """Start to all-reduce the arrays of one dtype: in one submit to servers, or side by side.

    brought: all arrays, also of other dtypes; none: those of another have begun. is_apart: none by
    servers, in an elastic job where not all can go so: these would be made again, others not.
    """
    some = [arrays[place] for place in places]
    if op is Adasum:
        sums = _adasum(some, code, name, process_set, factor)
        return [_Part(MappedHandle([], lambda _: sums), places, list)]
    names = [f"{name}.{place}" for place in places]
    if name is not None and not is_apart and _goes_by_servers(some, names, op, process_set, code):
        outs, session = some if is_in_place else None, current()
        session.routes.group(name, names)
        handle = session.push_pull_async(some, names, average=op is Average, out=outs, dtype=code)
        return [_Part(handle.scale(factor, code), places, list)]
    small = [place for place in places if arrays[place].nbytes <= FUSED_BYTES]
    if brought:
        checked_set(process_set).group().check_single(name)
    parts = []
    if small:
        parts.append(_start_fused(arrays, small, op, name, process_set, code, brought, factor))
    for place in places:
        if arrays[place].nbytes > FUSED_BYTES:
            out = arrays[place] if is_in_place else None
            some_brought = () if parts else brought
            if is_apart:
                group = checked_set(process_set).group()
                one: Handle[Any] = group.allreduce(
                    arrays[place], out, op=op, name=grouped_of(name), dtype=code,
                    brought=some_brought,
                ).scale(factor, code)  # fmt: skip
            else:
                is_named = may_go_by_servers(op, process_set)
                label = part_of(name, f".{place}") if is_named else grouped_of(name)
                one = start_allreduce(
                    arrays[place], out, op, label, process_set, dtype=code, brought=some_brought,
                    factor=factor,
                )  # fmt: skip
            parts.append(_Part(one, [place], lambda array: [array]))
    return parts


def may_go_by_servers(op: Op, process_set: ProcessSet) -> bool:
    """Return whether push_pull() does the same as an all-reduce with a name, if that is free."""
    return op in (Sum, Average) and process_set is global_process_set


def _goes_by_servers(
    arrays: Sequence[Array], names: Sequence[str], op: Op, process_set: ProcessSet, code: DType
) -> bool:
    """Return whether push_pull() does the same as an all-reduce under these names."""
    if not may_go_by_servers(op, process_set):
        return False
    is_free = current().is_free_for
    return all(is_free(name, array.shape, code) for name, array in zip(names, arrays, strict=True))


def _start_fused(
    arrays: Sequence[Array],
    places: list[int],
    op: Op,
    name: str | None,
    process_set: ProcessSet,
    code: DType,
    brought: Brought,
    factor: float,
) -> _Part:
    """Start to all-reduce arrays side by side, among members; brought: of _start_some()."""
    some = [arrays[place] for place in places]
    flat = _side_by_side(some)
    group, label = checked_set(process_set).group(), grouped_of(name)
    brought = brought or brought_of(*some, dtype=code)
    handle = group.allreduce(flat, flat, op=op, name=label, dtype=code, brought=brought)
    return _Part(handle.scale(factor, code), places, lambda whole: _cut_like(whole, some))


def _side_by_side(arrays: Sequence[Array]) -> Array:
    flat: Array = np.concatenate([array.reshape(-1) for array in arrays])
    return flat


def _cut_like(whole: Array, arrays: Sequence[Array]) -> list[Array]:
    """Cut what lies side by side into the shapes of arrays."""
    cut = np.split(whole, list(accumulate(array.size for array in arrays))[:-1])
    return [part.reshape(array.shape) for part, array in zip(cut, arrays, strict=True)]


def _brought_of(arrays: Sequence[Array], codes: Sequence[DType]) -> Brought:
    return tuple((int(code), tuple(one.shape)) for one, code in zip(arrays, codes, strict=True))


def _codes(arrays: Sequence[Array], dtypes: Sequence[DType | None]) -> list[DType]:
    return [_code_of(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


def _start_parts(
    codes: Sequence[DType],
    nbytes: Sequence[int],
    one: Callable[[int, DType], _Part],
    side_by_side: Callable[[list[int], DType], _Part],
) -> Handle[list[Array]]:
    """Start with each array by itself, or, of one dtype and few bytes, side by side.

    nbytes: of each; the same on all members.
    """
    parts: list[_Part] = []
    for code in dict.fromkeys(codes):
        places = [place for place, its in enumerate(codes) if its is code]
        small = [place for place in places if nbytes[place] <= FUSED_BYTES]
        fused = small if len(small) > 1 else []
        if fused:
            parts.append(side_by_side(fused, code))
        parts += [one(place, code) for place in places if place not in fused]

    return _joined(parts, len(codes))


def start_allgather(
    array: Array,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
    counts: Sequence[int] | None = None,
    out: Array | None = None,
    is_awaited: bool = False,
) -> tuple[Handle[Any], list[int]]:
    """Start to gather arrays of any first dimension; also gives the rows of each member.

    counts: these, where they are known; else the list is filled when all members have told them.
    out: where all of them go; ours may lie there already. is_awaited: blocks until the last
    exchange has begun.
    """
    group = checked_set(process_set).group()
    array = array if array.ndim else array.reshape(1)
    if counts is not None:
        out = _place_for(array, counts, group.rank, name, out)
        sizes = [count * width_of(array) for count in counts]
        return group.allgather(array, out, counts=sizes, name=name, dtype=dtype), list(counts)
    code, told = _code_of(array, dtype), list[int]()
    rows = Rows(group, "allgather", array, [len(array)], code, name, "allgather")
    return _in_stages(rows, out, told, lambda rows: _gathering(rows, out, told), is_awaited)


def _gathering(rows: Rows, out: Array | None, counts: list[int]) -> Stages:
    blocks = yield from tell(rows)
    counts[:] = blocks.counts
    group, array = rows.group, rows.array
    out = _place_for(array, counts, group.rank, rows.name, out)
    if blocks.is_whole:
        return completed(blocks.land(out))
    sizes = [count * rows.width for count in counts]
    return group.allgather(array, out, counts=sizes, name=rest_of(rows.name), dtype=rows.code)


def _place_for(
    array: Array, counts: Sequence[int], rank: int, name: str | None, out: Array | None
) -> Array:
    """Return where everybody's rows go."""
    if out is not None and not is_apart(array, out, sum(counts[:rank]) * width_of(array)):
        raise _overlap("allgather", name, array, out)
    return _result_of("allgather", name, (sum(counts), *array.shape[1:]), array.dtype, out)


def _in_stages(
    rows: Rows, out: Array | None, counts: list[int], stages: Callable[[Rows], Stages],
    is_awaited: bool,
) -> tuple[Handle[Any], list[int]]:  # fmt: skip
    """Do what finds out the rows of others first; counts: what is filled with them."""
    begin = rows.group.run if is_awaited else rows.group.follow
    return begin(rows.name, _as_before(rows, out, counts, stages)), counts


def _as_before(
    rows: Rows, out: Array | None, counts: list[int], stages: Callable[[Rows], Stages]
) -> Stages:
    """Exchange as many rows as before in one round; where they differ, do the stages."""
    before = current_epoch()
    key = (
        id(rows.group), rows.kind, rows.array, out, tuple(rows.counts), rows.code, rows.name,
        rows.root,
    )  # fmt: skip
    known = _guesses.begin(key, {})
    if (begun := known or _begin_guess(rows, out)) is not None:
        operation, result = begun
        try:
            yield operation
        except SizesDifferError:
            pass
        else:
            counts[:] = operation.guess.came
            if known is None:
                _guesses.remember(key, {}, result, (operation,), before)
            return completed(result, operation)
    last = yield from stages(rows)
    return MappedHandle([last], itemgetter(0))  # which is not all of it


def _begin_guess(rows: Rows, out: Array | None) -> tuple[Operation, Array] | None:
    """Start the exchange of a guess; None: there is none, or out is for other sizes, or wrong."""
    group, array, nbytes = rows.group, rows.array, rows.width * rows.array.itemsize
    guess = group.steady.guess(rows.key, rows.counts)
    if guess is None:
        return None
    here, there = [nbytes * n for n in rows.counts], [nbytes * n for n in guess.came]
    shape, gets_all = (sum(guess.came), *array.shape[1:]), rows.root in (-1, group.rank)
    try:
        out = _result_of(rows.kind, rows.name, shape, array.dtype, out) if gets_all else None
        operation = group.guess(
            rows.kind, array, out, here, there, rows.name, rows.code, rows.root, rows.brought,
            guess,
        )  # fmt: skip
    except ValueError:
        return None
    return operation, array if out is None else out


def start_allgather_alike(
    arrays: Sequence[Array], name: str | None, process_set: ProcessSet, *, dtypes: Sequence[DType]
) -> Handle[list[Array]]:
    """Start to gather arrays of which each member has as many rows; does not block."""
    group = checked_set(process_set).group()
    first = arrays[0]
    rows = Rows(group, "allgather", first, [len(first)], dtypes[0], name, "allgather")

    def stages(rows: Rows) -> Stages:
        counts: list[int] = []
        handles = [(yield from _gathering(rows, None, counts))]
        for array, code in zip(arrays[1:], dtypes[1:], strict=True):
            sizes = [count * width_of(array) for count in counts]
            out = _place_for(array, counts, group.rank, name, None)
            handles.append(
                group.allgather(array, out, counts=sizes, name=rest_of(name), dtype=code)
            )
        return MappedHandle(handles, list)

    return MappedHandle([group.follow(name, stages(rows))], itemgetter(0))


def _code_of(array: Array, dtype: DType | None) -> DType:
    return dtype_of(array.dtype) if dtype is None else dtype


def start_grouped_allgather(
    arrays: Sequence[Array],
    name: str | None,
    process_set: ProcessSet,
    *,
    dtypes: Sequence[DType | None],
    is_awaited: bool = False,
) -> tuple[Handle[list[Array]], list[list[int]]]:
    """Start start_allgather() of several arrays, those of few bytes side by side as one.

    Gives the rows of each array too; these, and is_awaited, as of start_allgather().
    MismatchError on all members where further dimensions differ.
    """
    group = checked_set(process_set).group()
    rows = [np.atleast_1d(array) for array in arrays]
    codes, counts = _codes(rows, dtypes), [list[int]() for _ in rows]

    def stages() -> Stages:
        told = yield from row_counts_of_each(group, _brought_of(rows, codes), name)
        for its, found in zip(counts, told, strict=True):
            its[:] = found
        return _gathering_each(rows, codes, told, name, process_set)

    begin = group.run if is_awaited else group.follow
    return MappedHandle([begin(name, stages())], itemgetter(0)), counts


def _gathering_each(
    rows: list[Array], codes: list[DType], told: list[list[int]], name: str | None,
    process_set: ProcessSet,
) -> Handle[list[Array]]:  # fmt: skip
    """Start to gather arrays whose rows are known."""
    group, widths, label = process_set.group(), [width_of(one) for one in rows], rest_of(name)

    def one(place: int, code: DType) -> _Part:
        handle, _ = start_allgather(
            rows[place], label, process_set, dtype=code, counts=told[place]
        )
        return _Part(handle, [place], lambda array: [array])

    def side_by_side(places: list[int], code: DType) -> _Part:
        blocks = [[count * widths[place] for count in told[place]] for place in places]
        sizes = [sum(of_member) for of_member in zip(*blocks, strict=True)]
        flat = _side_by_side([rows[place] for place in places])
        handle = group.allgather(flat, counts=sizes, name=label, dtype=code)

        def split(whole: Array) -> list[Array]:
            cut = np.split(
                whole, list(accumulate(chain.from_iterable(zip(*blocks, strict=True))))[:-1]
            )
            return [
                np.concatenate(cut[turn :: len(places)]).reshape(-1, *rows[place].shape[1:])
                for turn, place in enumerate(places)
            ]

        return _Part(handle, places, split)

    most = [max(counts) * w * a.itemsize for counts, w, a in zip(told, widths, rows, strict=True)]
    return _start_parts(codes, most, one, side_by_side)


def start_alltoall(
    array: Array,
    splits: Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
    out: Array | None = None,
    is_awaited: bool = False,
) -> tuple[Handle[Any], list[int]]:
    """Start an all-to-all of rows, into out, and give how many come from each member.

    That list, and is_awaited: as of start_allgather().
    """
    group, code = checked_set(process_set).group(), _code_of(array, dtype)
    sent, received = _splits(array, splits, process_set), list[int]()
    rows = Rows(group, "alltoall", array, sent, code, name, "alltoall")
    return _in_stages(rows, out, received, lambda rows: _swapping(rows, out, received), is_awaited)


def _swapping(rows: Rows, out: Array | None, received: list[int]) -> Stages:
    blocks = yield from tell(rows)
    received[:] = blocks.counts
    group, array = rows.group, rows.array
    if out is not None and not is_apart(array, out):
        raise _overlap("alltoall", rows.name, array, out)
    shape = sum(received), *array.shape[1:]
    out = _result_of("alltoall", rows.name, shape, array.dtype, out)
    if blocks.is_whole:
        return completed(blocks.land(out))
    return group.alltoall(
        array, out, name=rest_of(rows.name), dtype=rows.code,
        send_counts=[count * rows.width for count in rows.counts],
        receive_counts=[count * rows.width for count in received],
    )  # fmt: skip


def start_reducescatter(
    array: Array,
    op: Op,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
    out: Array | None = None,
    brought: Brought = (),
    factor: float = 1.0,
) -> Handle[Any]:
    """Start a reduce-scatter of rows, into out; the first members get one more if join_state.

    brought: all arrays of the grouped operation that begins with it. factor: what the result is
    multiplied by.
    """
    group = checked_set(process_set).group()
    rows = _rows_of_each(array, group)
    shape = rows[group.rank], *array.shape[1:]
    out = _result_of("reducescatter", name, shape, array.dtype, out)
    counts = [count * width_of(array) for count in rows]
    return group.reducescatter(
        array, out, counts=counts, op=op, name=name, dtype=dtype, brought=brought
    ).scale(factor, _code_of(array, dtype))


def start_grouped_reducescatter(
    arrays: Sequence[Array],
    op: Op,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtypes: Sequence[DType | None],
    factor: float = 1.0,
) -> Handle[list[Array]]:
    """Start start_reducescatter() of several arrays, those of few bytes side by side as one."""
    group = checked_set(process_set).group()
    group.check_single(name)
    rows = [_rows_of_each(array, group) for array in arrays]
    label = grouped_of(name)
    first = iter([_brought_of(arrays, _codes(arrays, dtypes))])  # says what all of them are

    def one(place: int, code: DType) -> _Part:
        handle = start_reducescatter(
            arrays[place], op, label, process_set, dtype=code, brought=next(first, ()),
            factor=factor,
        )  # fmt: skip
        return _Part(handle, [place], lambda array: [array])

    def side_by_side(places: list[int], code: DType) -> _Part:
        cuts = [np.split(arrays[i], list(accumulate(rows[i]))[:-1]) for i in places]
        blocks = [list(of_member) for of_member in zip(*cuts, strict=True)]
        sizes = [sum(block.size for block in of_member) for of_member in blocks]
        flat = _side_by_side([block for of_member in blocks for block in of_member])
        handle = group.reducescatter(
            flat, counts=sizes, op=op, name=label, dtype=code,
            brought=next(first, ()) or brought_of(*(arrays[i] for i in places), dtype=code),
        ).scale(factor, code)  # fmt: skip
        return _Part(handle, places, lambda whole: _cut_like(whole, blocks[group.rank]))

    nbytes = [array.nbytes for array in arrays]
    return _start_parts(_codes(arrays, dtypes), nbytes, one, side_by_side)


def _rows_of_each(array: Array, group: Group) -> list[int]:
    """Divide rows evenly, in the order of members; the first get what is left."""
    if not array.ndim:
        raise ValueError(
            "reducescatter() divides rows and needs an array of 1 or more dimensions, got shape "
            "(): pass array.reshape(1)"
        )
    each, rest = divmod(len(array), group.size)
    return [each + (member < rest) for member in range(group.size)]


def _result_of(
    call: str, name: str | None, shape: tuple[int, ...], dtype: np.dtype[Any], out: Array | None
) -> Array:
    """Return where a result goes: out, which has to be like it, or a new array."""
    if out is None:
        return current().groups.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        is_whole = "" if out.flags.c_contiguous else ", not C-contiguous"
        raise ValueError(
            f"{_shown(call, name)}: out is {out.dtype} {out.shape}{is_whole}, but the result is "
            f"{dtype} {shape}; pass such an array, C-contiguous, or leave out= away"
        )
    return out


def _overlap(call: str, name: str | None, array: Array, out: Array) -> ValueError:
    return ValueError(
        f"{_shown(call, name)}: array, of shape {array.shape}, and out, of shape {out.shape}, "
        "overlap in memory; pass two that are apart, or leave out= away"
    )


def _shown(call: str, name: str | None) -> str:
    return call if name is None else f"{call} {name!r}"


def start_reduce(
    array: Array,
    root_rank: int,
    op: Op,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
    out: Array | None = None,
) -> Handle[Any]:
    """Start the all-reduce to the root, in its out; what others get is no result."""
    group, root = checked_set(process_set).group(), process_set.member(root_rank, "root_rank")
    return group.reduce(array, out, root=root, op=op, name=name, dtype=dtype)


def start_gather(
    array: Array,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
    out: Array | None = None,
    is_awaited: bool = False,
) -> Handle[Any]:
    """Start the all-gather to the root, in its out or a new array.

    is_awaited: as of start_allgather().
    """
    group, root = checked_set(process_set).group(), process_set.member(root_rank, "root_rank")
    array = array if array.ndim else array.reshape(1)
    code = _code_of(array, dtype)
    rows = Rows(group, "gather", array, [len(array)], code, name, "gather", root)
    return _in_stages(rows, out, [], lambda rows: _gathering_to(rows, out), is_awaited)[0]


def _gathering_to(rows: Rows, out: Array | None) -> Stages:
    blocks = yield from tell(rows)
    group, array, root = rows.group, rows.array, rows.root
    shape = sum(blocks.counts), *array.shape[1:]
    is_root = group.rank == root
    out = _result_of("gather", rows.name, shape, array.dtype, out) if is_root else None
    if out is not None and not is_apart(array, out):
        raise _overlap("gather", rows.name, array, out)
    if blocks.is_whole:
        return completed(array if out is None else blocks.land(out))
    sizes = [count * rows.width for count in blocks.counts]
    return group.gather(
        array, out, root=root, counts=sizes, name=rest_of(rows.name), dtype=rows.code
    )


def start_broadcast(
    array: Array,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
) -> Handle[Any]:
    """Start a broadcast in place: by servers where it has a name and everybody takes part."""
    if name is not None and process_set is global_process_set:
        session = current()
        code = _code_of(array, dtype)
        if session.is_free_for(name, array.shape, code):
            return session.broadcast_async(array, root_rank, name, dtype=dtype)
    root = checked_set(process_set).member(root_rank, "root_rank")
    return process_set.group().broadcast(array, root=root, name=name, dtype=dtype)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the list of all members' objects, as broadcast_object() carries them.

    Blocks. TypeError on all members where one holds what cannot travel.
    """
    return gather_objects(checked_set(process_set).group(), obj, name)


def labels_of(name: str | None, count: int) -> list[str | None]:
    """Name operations that are under way together."""
    return [part_of(name, f".{place}") for place in range(count)]


def width_of(array: Array) -> int:
    """Count the elements of a row."""
    return math.prod(array.shape[1:])


def _splits(array: Array, splits: Sequence[int] | None, process_set: ProcessSet) -> list[int]:
    """Return how many rows go to each member; ValueError, or ArgumentError for no integers."""
    size, rows = process_set.size(), len(array) if array.ndim else 0
    if splits is None:
        if rows % size or not array.ndim:
            raise ValueError(
                f"{rows} rows do not divide evenly among {size} workers; pass splits="
            )
        return [rows // size] * size
    try:
        found = [operator.index(count) for count in splits]
    except TypeError:
        raise ArgumentError(
            f"splits must be integers, the rows for each worker, got {splits}"
        ) from None
    if len(found) != size or min(found) < 0 or sum(found) != rows:
        raise ValueError(f"splits must be {size} numbers of rows, {rows} in all, got {found}")
    return found
