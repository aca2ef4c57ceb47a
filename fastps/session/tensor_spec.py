# SPDX-License-Identifier: Apache-2.0
"""What users give with an operation on declared tensors: checked, and in the form of sequences.

Pure. Errors name the tensor.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from fastps.config import Config
from fastps.contract.codec import PLAIN, Coding
from fastps.contract.contract import (
    ALONE,
    ANY_STALENESS,
    PROMPT,
    Compensation,
    Gathering,
    Givers,
    Policy,
    is_followed,
)
from fastps.contract.partition import ALIGNMENT, MAX_PARTITION_BYTES
from fastps.contract.rule import SUMMED, Rule
from fastps.control.protocol import Layout, Parts
from fastps.errors import ConfigError
from fastps.session.array_checks import check_output, not_an_array_text
from fastps.types import DType, dtype_of
from fastps.worker.handle import Array

# Partitions of codecs that take one as a whole: of a large one nothing could be summed before all
# of it is there. Measured, onebit on links of 200 Mbit/s: 64 MB take 140 ms so, 161 ms in 4 MB.
MAX_WHOLE_BYTES = 512 << 10
RULED_BYTES = 1 << 20  # of a piece under a rule: those of all workers stay in the caches
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1  # the field of the frame header

Names: TypeAlias = str | Sequence[str]
Arrays: TypeAlias = Array | Sequence[Array]


def pair(name: Names, tensor: Arrays) -> tuple[Sequence[str], Sequence[Array]]:
    """Make sequences of names and arrays; one name goes with one array."""
    if isinstance(name, str):
        if not isinstance(tensor, np.ndarray):
            raise TypeError(f"tensor {name!r} is {not_an_array_text(tensor)}")
        return (name,), (tensor,)
    if isinstance(tensor, str) or not all(isinstance(one, str) for one in name):
        raise TypeError(
            "pass the tensor, or a sequence of tensors, first, then its name, or their names"
        )
    if isinstance(tensor, np.ndarray) or len(name) != len(tensor):
        raise ValueError("tensors and names must be sequences of the same length")
    check_distinct(name)
    return name, tensor


def check_distinct(names: Sequence[str]) -> None:
    """Refuse a name that appears twice."""
    if len(set(names)) != len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(
            f"the name {twice!r} appears twice in one call; each tensor needs a name of its own"
        )


def outputs_of(
    tensor: Arrays,
    arrays: Sequence[Array],
    out: Arrays | None,
    make: Callable[[Array], Array],
    *,
    is_single: bool,
) -> Sequence[Array]:
    """Return the arrays that results go to: tensor's own in place, or new ones of make."""
    if out is tensor:
        return arrays
    if out is None:
        return list(map(make, arrays))
    if isinstance(out, np.ndarray):
        if not is_single:
            raise ValueError("a sequence of tensors needs a sequence of outputs")
        return (out,)
    if len(out) != len(arrays):
        raise ValueError(f"{len(arrays)} tensors need as many outputs, not {len(out)}")
    return out


def checked_priorities(priority: int | Sequence[int], count: int) -> list[int]:
    """Return one priority per tensor; they are integers of any type, of 32 bits."""
    given = [priority] * count if isinstance(priority, int | np.integer) else priority
    found = [operator.index(one) for one in given]
    if len(found) != count:
        raise ValueError(f"{count} tensors need as many priorities, not {len(found)}")
    for number in found:
        if not MIN_PRIORITY <= number <= MAX_PRIORITY:
            raise ValueError(f"priority must fit 32 bits, got {number}")
    return found


def check_arrays(
    name: str, array: Array, output: Array, dtype: DType | None, *, average: bool
) -> None:
    """Refuse what cannot be reduced; the message names the tensor."""
    if not name:
        raise ValueError("a tensor needs a name, the same on all workers")
    code = dtype_of(array.dtype) if dtype is None else dtype
    if code.itemsize != array.dtype.itemsize:
        raise TypeError(
            f"tensor {name!r}: dtype {code.name.lower()} does not fit an array of {array.dtype}"
        )
    if average and code is DType.BOOL:
        raise TypeError(f"tensor {name!r}: booleans have no average; use average=False")
    check_output(f"tensor {name!r}", array, output)


def checked_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the extents as plain numbers; an array has no negative one."""
    extents = tuple(map(operator.index, shape))
    if any(extent < 0 for extent in extents):
        raise ValueError(f"tensor {name!r}: a shape has integers of 0 or more, got {extents}")
    return extents


def describe(dtype: int, shape: tuple[int, ...]) -> str:
    """Name what was declared, for errors."""
    return f"{DType(dtype).name.lower()} of shape {shape}"


def make_layout(
    config: Config, chunk_bytes: int, name: str, shape: tuple[int, ...], dtype: DType, *,
    is_sent: bool, policy: Policy = Policy.SUM, staleness: int = 0, coding: Coding | None = None,
    partition_bytes: int = 0, rule: Rule | None = None, n: int = 1,
    compensation: Compensation = PROMPT, givers: Givers = Givers.WORKERS,
    gathering: Gathering = ALONE, beside: str = "", updates: Coding | None = None,
    parts: Parts = (),
) -> Layout:  # fmt: skip
    """Return the layout of what is declared as `name`.

    is_sent: to servers; only then, and if it pays, it is compressed. staleness to gathering: of
    the contract. beside, updates, parts: of Layout. partition_bytes: 0 takes what settings say.
    n: workers. ConfigError for a codec or a rule under a policy that has none, and a rule that n
    workers cannot have; TypeError for elements that have no rules.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if (
        policy not in (Policy.SUM, Policy.DEADLINE_ROUNDS)
        and coding not in (None, PLAIN)
        and (policy is not Policy.ACCUMULATE or staleness != ANY_STALENESS)
    ):
        raise ConfigError(
            f"{name!r} is {coding}, but {policy.name} returns values uncompressed"
            + f" with a staleness of {staleness}" * (policy is Policy.ACCUMULATE)
            + "; declare it without compression"
        )
    fits = functools.partial(Coding.fits, code=dtype, nbytes=nbytes,
                             min_bytes=config.min_compress_bytes)  # fmt: skip
    coding = coding if coding is not None and is_sent and fits(coding) else PLAIN
    updates = updates if updates is not None and fits(updates) else PLAIN
    if is_followed(policy, coding) and dtype not in (DType.FLOAT32, DType.FLOAT64):
        raise ConfigError(
            f"{name!r} is {dtype.name.lower()}, and changes of held values can be compressed for "
            "float32 and float64 only; declare it without compression"
        )
    partition_bytes = partition_bytes or config.partition_bytes
    if coding.is_whole:
        partition_bytes = min(partition_bytes, MAX_WHOLE_BYTES)
    elif is_followed(policy, coding):
        partition_bytes = min(partition_bytes, RULED_BYTES)
    if rule is not None and rule.has_meaning():
        is_summed = policy in (Policy.SUM, Policy.DEADLINE_ROUNDS)
        check_rule(name, rule, dtype, n, is_sent=is_sent, is_summed=is_summed)
        partition_bytes = _piece_bytes(name, rule, nbytes, partition_bytes)
    return Layout(
        int(dtype), shape, nbytes, partition_bytes, chunk_bytes, policy, staleness, coding,
        SUMMED if rule is None else rule, compensation, givers, gathering, beside,
        updates, parts,
    )  # fmt: skip


def check_taking_part(name: str, above: int, config: Config, policy: Policy) -> None:
    """Refuse what all workers make together where some may be missing, or this is none of them.

    What servers hold (policy) does without those that are lost.
    above: by how much its number is above the workers'; a validator has one from 0 on.
    """
    if above >= 0:
        raise ConfigError(
            f"tensor {name!r}: only workers may call push_pull() and broadcasts, and this process "
            f"is validator {above}; use fastps.HeldParameters"
        )
    if config.goes_on and policy not in (Policy.DEADLINE_ROUNDS, Policy.ACCUMULATE):
        raise ConfigError(
            f"tensor {name!r}: push_pull() and declared tensors need all workers, but with "
            "FASTPS_ON_LOSS=reweight a job goes on without lost ones; use allreduce(), LocalSGD "
            "with deadline_s, or AsyncLocalSGD"
        )


def check_rule(
    name: str, rule: Rule, dtype: DType, n: int, *, is_sent: bool, is_summed: bool
) -> None:
    """Raise ConfigError or TypeError where a tensor of n workers cannot be under a rule."""
    if not is_summed:
        raise ConfigError(f"{name!r} is {rule}, which only push_pull() supports")
    if n > 1 and not is_sent:
        raise ConfigError(
            f"{name!r} is {rule}, which needs trusted servers, and workers of one machine reduce "
            "in shared memory; set FASTPS_FORCE_DISTRIBUTED=1 for all"
        )
    try:
        rule.check_voices(n, dtype)
    except ValueError as error:
        raise ConfigError(f"tensor {name!r}: {error}") from None
    except TypeError as error:
        raise TypeError(f"tensor {name!r}: {error}") from None


def _piece_bytes(name: str, rule: Rule, nbytes: int, partition_bytes: int) -> int:
    """Return the most bytes of a piece: all, where a rule compares whole tensors."""
    if not rule.wants_whole:
        return min(partition_bytes, RULED_BYTES)
    if nbytes > MAX_PARTITION_BYTES:
        raise ConfigError(
            f"tensor {name!r} has {nbytes} bytes, and {rule} needs all of it at once, at most "
            f"{MAX_PARTITION_BYTES}; split the tensor"
        )
    return max(partition_bytes, -(-nbytes // ALIGNMENT) * ALIGNMENT)
