# SPDX-License-Identifier: Apache-2.0
"""GradientExchange: what DistributedOptimizer and DistributedDataParallel do with gradients.

A hook on each parameter starts the push_pull of its bucket as soon as the bucket's gradients are
ready; finish() sends the missing buckets and waits for all, without the GIL. Invariants: every
rank sends every bucket exactly once per round (zeros for parameters that this rank did not use),
and a write to a gradient in flight is noticed. Hooks run in the thread that runs backward, of
which autograd has one for each device, and then by turns; everything else in the thread that
steps; the two must not overlap.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from fastps.byzantine.rules import rule_of
from fastps.contract.codec import PLAIN, Coding
from fastps.contract.rule import Choice as Rule
from fastps.errors import DuplicateNameError, FastPSError, MismatchError
from fastps.frameworks.gradient_round import (
    ACCUMULATE,
    BUCKET_BYTES,
    Average,
    Round,
    Sum,
    Waitable,
    check_op,
    codec_of,
    plan_buckets,
    wait_all,
)
from fastps.frameworks.torch.gradients import unwrapped
from fastps.frameworks.torch.gradients.accumulation import EarlierSums
from fastps.frameworks.torch.gradients.buckets import (
    ALIGNMENT,
    Bucket,
    FlatBucket,
    LooseGradient,
    Memory,
    bucket_name,
)
from fastps.frameworks.torch.gradients.sparse import SparseExchange, rows_of
from fastps.frameworks.torch.ops.compression import (
    Compressing,
    Compression,
    WeightDecayMomentum,
    WireCodec,
    compressor_of,
)
from fastps.frameworks.torch.ops.tensors import (
    check_tensor,
    real_of,
    submit_push_pull,
    wire_dtype,
)
from fastps.frameworks.torch.optimizer.weight_check import Entry, check_alike, check_weights
from fastps.session import current
from fastps.session.autotune import Layout
from fastps.session.process_sets import ProcessSet, checked_set, global_process_set
from fastps.types import DType, Op
from fastps.worker.handle import Handle, MappedHandle

Views: TypeAlias = bool | Literal["auto"]

# These work on each element by itself, so that gradients may be compressed side by side.
_BUILT_IN = (Compression.none, Compression.fp16, Compression.bf16)

_PREFIX = (
    "if two optimizers have gradients of the same name, give one of them another prefix: "
    "DistributedOptimizer(..., prefix='Second.')"
)


class GradientExchange:
    """Average or sum the gradients of a list of parameters over all workers, once per step.

    Priorities fall along the list, so that the layers the next forward pass needs first arrive
    first. Holds its parameters; the hooks hold it weakly. gradient_views and bucket_bytes are
    those of DistributedOptimizer. A user's own compressor gets each gradient by itself.
    """

    _flat_kind, _loose_kind = FlatBucket, LooseGradient

    def __init__(
        self,
        *,
        compression: Compressing,
        op: Op,
        prefix: str,
        gradient_views: Views,
        bucket_bytes: int,
        passes: int = 1,
        cure: str = ACCUMULATE,
        process_set: ProcessSet = global_process_set,
        sparse_as_dense: bool = False,
        rule: Rule = None,
    ) -> None:
        if gradient_views not in (True, False, "auto"):
            raise ValueError(
                f"gradient_views must be True, False or 'auto', not {gradient_views!r}"
            )
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 0:
            raise ValueError(f"bucket_bytes must be an integer >= 0, not {bucket_bytes!r}")
        self._compression, self._rule = compressor_of(compression), rule_of(rule)
        if self._rule is not None and (op is not Average or process_set is not global_process_set):
            raise ValueError(
                "rule= replaces the average over all workers, and needs op=Average and no "
                f"process_set=, got {op} and {process_set}: leave these out, or rule="
            )
        sparse_as_dense = sparse_as_dense or self._rule is not None  # rows would bypass it
        self.learning_rate: Callable[[], float | None] = lambda: None  # of the next step
        self.needs_rows = False  # whether results become sparse gradients, for SparseAdam
        self._average = check_op(op) is Average
        self._process_set = process_set
        self._sparse_as_dense = self._knows_sparse = sparse_as_dense
        self._sparse: frozenset[int] = frozenset()  # parameters whose gradients travel as rows
        self._sparse_query: Handle[Any] | None = None  # the sum that tells them
        self._unsent_rows: list[int] = []  # parameters whose rows this round still has to send
        self._rows: list[SparseExchange] = []
        if process_set is not global_process_set:
            checked_set(process_set).group()  # ValueError for a worker that is not in it
        self._prefix = prefix
        self._views = gradient_views
        self._layout = Layout(0, bucket_bytes)
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        self._ids: set[int] = set()  # of the parameters
        self._buckets: list[Bucket] = []
        self._codings: dict[str, Coding] = {}  # of each bucket, by its name
        self._members: list[list[int]] = []  # of each bucket
        self._hooked: list[bool] = []
        self._hooks: list[RemovableHandle] = []
        self._home = weakref.ref(current.current())
        unwrapped.stop(current.current())
        self._is_released = False
        # how often newcomers had joined when weights were compared, and when sparse gradients were
        self._compared = self._asked = -1
        # held by hooks if parameters are on several devices; torch.compile cannot trace a lock
        self._turn: threading.RLock | None = None
        self._memory: Memory = {}
        self._momenta: dict[int, torch.Tensor] = {}  # of weights that decay, by their ids
        self._sums = None if self._average else EarlierSums(self._parameters)
        self.round: Round[Bucket] = Round([], passes, cure=cure)
        weakref.finalize(self, _remove_all, self._hooks).atexit = False

    def watch(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Exchange the gradients of more parameters; declares them in one call."""
        for parameter, name in zip(parameters, names, strict=True):
            check_tensor(real_of(parameter), name)
        if len({one.device for one in (*self._parameters, *parameters)}) > 1:
            self._turn = self._turn or threading.RLock()
        full = [self._prefix + name for name in names]
        check_alike(
            self._describe(parameters, full), f"{self._prefix}parameters", self._process_set
        )
        plan = self._plan(parameters, full)
        buckets = self._fill(plan, parameters, full)
        self._declare(buckets)
        self._take_over(parameters)
        first = len(self._parameters)
        self._parameters.extend(parameters)
        self._names.extend(names)
        self._ids.update(map(id, parameters))
        self._buckets.extend(buckets)
        self._members.extend([first + place for place in places] for places in plan)
        self._hooked.extend([False] * len(full))
        self.round.extend(names, plan)
        self._knows_sparse = self._sparse_as_dense
        self._hook_trainable()

    @property
    def _hook_function(self) -> Callable[..., None]:
        return arrive

    @property
    def layout(self) -> Layout:
        """The sizes of partitions and buckets."""
        nbytes, bucket_bytes = self._layout
        return Layout(nbytes or current.current().config.partition_bytes, bucket_bytes)

    @property
    def can_lay_out(self) -> bool:
        """Whether results are the same in every layout; codecs and rules depend on it."""
        is_plain = self._compression in _BUILT_IN and self._rule is None
        return is_plain and self._process_set is global_process_set

    def lay_out(self, layout: Layout) -> None:
        """Change the sizes of partitions and buckets between two steps; blocks.

        All workers call it after the same step. Gradients stay where they are, and are copied once
        into new buckets. FastPSError while they are in flight.
        """
        self.round.check_idle("a new layout")
        if self._is_released:
            return
        current.current().forget([bucket.name for bucket in self._buckets])
        self._layout = layout
        names = [self._prefix + name for name in self._names]
        self._members = self._plan(self._parameters, names)
        self._buckets = self._fill(self._members, self._parameters, names)
        self.round.regroup(self._members)
        self._declare(self._buckets)
        self._leave_out_sparse()

    def has(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether this exchange has all of the parameters."""
        return self._ids.issuperset(map(id, parameters))

    def check_in_charge(self) -> None:
        """Raise FastPSError once a later exchange has taken over some of the parameters."""
        if self._is_released:
            raise FastPSError(
                "a DistributedOptimizer or DistributedDataParallel that was created later for the "
                "same parameters exchanges these gradients: use only that one, and no "
                "DistributedOptimizer together with a DistributedDataParallel"
            )

    def release(self) -> None:
        """Give up the parameters; FastPSError while their gradients are in flight."""
        if self.round.is_sending and self._home() is current.current():
            self.round.check_idle("another DistributedOptimizer or DistributedDataParallel")
        self._is_released = True
        self._sums = None
        _remove_all(self._hooks)

    def can_share_with(self, other: GradientExchange) -> bool:
        """Return whether two exchanges may watch one parameter."""
        return False

    def synchronize(self) -> None:
        """Make this step's gradients complete; the next backward pass begins a new step."""
        self.finish()
        self.round.close()

    def end_step(self) -> None:
        """Open the next round, and count a step of training."""
        self.round.reopen()
        current.current().steps.mark()

    def forget_sums(self) -> None:
        """Forget the sums of earlier rounds: all gradients are zeroed, perhaps in place."""
        if self._sums is not None:
            self._sums.forget()

    def check_weights(self) -> None:
        """Compare the weights of all workers, once, and after each join; MismatchError on all.

        Blocks. Not under a rule, where a lying worker could stop all others by it.
        """
        is_wanted = self._rule is None and current.current().config.check_weights
        joins = current.current().joins
        if self._compared == joins or not is_wanted:
            return
        self._compared = joins
        weights = [real_of(parameter) for parameter in self._parameters]
        check_weights(weights, f"{self._prefix}parameters", self._process_set)

    def finish(self) -> None:
        """Send the missing buckets, wait for all, and write the results."""
        self.send_missing()
        self.wait()

    def send_missing(self) -> None:
        """Send the buckets that are missing in this round, in one submit per dtype."""
        self.check_in_charge()
        self._hook_trainable()
        self._agree_on_sparse()
        self._start(self.round.missing(self._trainable_buckets()))
        self._send_rows()

    def wait(self) -> None:
        """Wait for the buckets in flight and write the results; raise their first error."""
        handles, buckets = self.round.take()
        rows, self._rows = self._rows, []
        self._memory.clear()
        wait_all([*handles, *rows])
        self.write(buckets)
        for gradient in rows:
            gradient.store()
        if self._sums is not None and (buckets or rows):
            self._sums.add_back()

    def all_sent(self) -> None:
        """Note that all gradients of a step are in flight: of use in an elastic job."""

    def take_in_flight(self) -> list[tuple[Waitable, Sequence[Bucket]]]:
        """Return each handle in flight with its buckets; the caller waits and calls write()."""
        self._memory.clear()
        return self.round.take_each()

    @property
    def has_rows(self) -> bool:
        """Whether gradients are in flight as rows."""
        return bool(self._rows)

    def write(self, buckets: Sequence[Bucket]) -> None:
        """Write the results of buckets that have arrived to p.grad, as rows for SparseAdam."""
        for bucket in buckets:
            bucket.store()
            for parameter in bucket.parameters if self.needs_rows else ():
                if parameter.grad is not None:
                    parameter.grad = rows_of(parameter)

    def on_hook(self, index: int) -> None:
        """Pass a gradient on, by turns if parameters are on several devices."""
        if self._turn is None:
            self.on_gradient(index)
        else:
            with self._turn:
                self.on_gradient(index)

    def on_gradient(self, index: int) -> None:
        """Count one backward pass; start the bucket after the last one of its last gradient."""
        if self._sums is not None:
            self._sums.check(index, self._names[index])
        if self.round.is_finished(index) and self._was_dropped(index):
            self.round.reopen()  # its step was skipped, as GradScaler does on overflow
        if self._is_round() and self.round.arrived(index):
            bucket = self.round.bucket_of(index)
            if not self._waits_for_sparse(bucket):
                self._start_one(bucket)

    def _is_round(self) -> bool:
        """Return whether this backward pass belongs to a round."""
        return True

    def _describe(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> list[Entry]:
        """Return the options, names, shapes and dtypes that all workers must share."""
        op = "average" if self._average else "sum"
        how = f"{self._layout.bucket_bytes} bytes a bucket, {op}"
        how += "" if self._rule is None else f", {self._rule}"
        entries: list[Entry] = [("options", (), how)]
        for name, parameter in zip(names, parameters, strict=True):
            kind = str(parameter.dtype) + ("" if parameter.requires_grad else ", frozen")
            entries.append((name, tuple(parameter.shape), kind))
        return entries

    def _plan(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> list[list[int]]:
        """Choose buckets by what is the same on all workers; frozen parameters travel apart."""
        codecs = self._codecs(parameters, names)
        plan = plan_buckets(
            [
                (parameter.dtype, parameter.requires_grad, coding)
                for parameter, (coding, _) in zip(parameters, codecs, strict=True)
            ],
            [
                -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
                if not parameter.is_complex()
                else BUCKET_BYTES  # alone
                for parameter in parameters
            ],
            bucket_bytes=self._layout.bucket_bytes if self._is_built_in else 0,
            alone=[is_alone for _, is_alone in codecs],
        )
        for places in plan:
            shapes = [parameters[i].shape for i in places]
            self._codings[bucket_name([names[i] for i in places], shapes)] = codecs[places[0]][0]
        return plan

    def _codecs(
        self, parameters: Sequence[torch.Tensor], names: Sequence[str]
    ) -> list[tuple[Coding, bool]]:
        """Return the codec of each gradient, and whether it travels alone because of it."""
        if not isinstance(self._compression, WireCodec):
            return [(PLAIN, False)] * len(parameters)
        choice = self._compression.of(self._prefix)
        least = current.current().config.min_compress_bytes
        return [
            codec_of(choice, name, wire_dtype(real.dtype, name), real.nbytes, min_bytes=least)
            for real, name in zip(map(real_of, parameters), names, strict=True)
        ]

    def _fill(
        self, plan: list[list[int]], parameters: Sequence[torch.Tensor], names: Sequence[str]
    ) -> list[Bucket]:
        return [
            self._make_bucket([parameters[i] for i in places], [names[i] for i in places])
            for places in plan
        ]

    def _make_bucket(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> Bucket:
        """Choose how the gradients of one bucket travel."""
        name = bucket_name(names, [parameter.shape for parameter in parameters])
        if not self._is_built_in or parameters[0].is_complex():
            return self._loose_kind(name, parameters[0], self._compression)
        session = current.current()
        is_alone = len(parameters) == 1
        dtype = self._wire_dtype(parameters[0])
        is_view = self._views is True
        if self._views == "auto":
            is_view = not is_alone or bool(getattr(session, "can_share", False))
        if is_alone and dtype is parameters[0].dtype and not is_view:
            return self._loose_kind(name, parameters[0], self._compression)
        bucket = self._flat_kind(name, parameters, names, dtype=dtype, is_view=is_view)
        if parameters[0].requires_grad and not is_alone:  # one may be sparse, and need none
            bucket.make_room(session)
        return bucket

    def _wire_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype that a built-in compression sends a gradient in."""
        wire, _ = self._compression.compress(parameter.new_empty(0))
        return wire.dtype

    def _declare(self, buckets: Sequence[Bucket]) -> None:
        """Declare all buckets at once, so that no hook blocks for it in backward."""
        if self._rule is not None and not self._is_built_in:
            raise ValueError(
                "rule= does not support a compressor of your own: use Compression.none, fp16 or "
                "bf16"
            )
        if not self._is_built_in or not buckets:
            return
        if self._process_set is not global_process_set:
            return
        try:
            current.current().declare([bucket.spec() for bucket in buckets], **self._choice())
        except MismatchError as error:
            raise _advised(error) from error

    @property
    def _is_built_in(self) -> bool:
        return isinstance(self._compression, WireCodec) or self._compression in _BUILT_IN

    def _choice(self) -> dict[str, Any]:
        """Return the keywords of declare() for compression, rule and layout."""
        partition_bytes = self._layout.partition_bytes
        found: dict[str, Any] = {"partition_bytes": partition_bytes} if partition_bytes else {}
        if isinstance(self._compression, WireCodec):
            found = {"compression": self._codings.__getitem__}
        return found if self._rule is None else found | {"rule": self._rule}

    def _rate(self) -> dict[str, Any]:
        """Return the keyword of push_pull_async() for the learning rate, if a codec needs it."""
        is_coded = isinstance(self._compression, WireCodec)
        return {"learning_rate": self.learning_rate()} if is_coded else {}

    def _take_over(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make other exchanges release these parameters."""
        for parameter in parameters:
            hooks: dict[int, object] = parameter._post_accumulate_grad_hooks or {}
            for hook in list(hooks.values()):
                rival = _exchange_of(hook)
                if rival is not None and rival is not self and not self.can_share_with(rival):
                    rival.release()

    def _trainable_buckets(self) -> Iterator[int]:
        return (
            bucket
            for bucket, members in enumerate(self._members)
            if any(self._parameters[index].requires_grad for index in members)
        )

    def _hook_trainable(self) -> None:
        """Put hooks on parameters that have none, as they were frozen until now."""
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and not self._hooked[index]:
                hook = partial(self._hook_function, weakref.ref(self), index)
                hooked: Any = parameter  # torch's hooks have no types
                self._hooks.append(hooked.register_post_accumulate_grad_hook(hook))
                if self._sums is not None:
                    self._sums.watch(index)
                self._hooked[index] = True

    def _was_dropped(self, index: int) -> bool:
        """Return whether a reduced gradient was set to None since, so that a new step began."""
        bucket, gradient = self._buckets[self.round.bucket_of(index)], self._parameters[index].grad
        return not self.round.in_flight and gradient is not None and not bucket.wrote(gradient)

    def _waits_for_sparse(self, bucket: int) -> bool:
        """Return whether a bucket is sent in send_missing() only, where all workers are.

        That is a bucket of sparse gradients alone, or with one that others may not know as sparse.
        """
        members = self._members[bucket]
        if self._knows_sparse:
            return bool(self._sparse) and self._sparse.issuperset(members)
        return any(_is_sparse(self._parameters[member]) for member in members)

    def ask_about_sparse(self) -> None:
        """Start to find out which gradients are sparse on any worker, unless that is known.

        A worker that has no gradient of a parameter yet cannot know it by itself. All ask again
        when newcomers have joined.
        """
        if self._asked != (joins := current.current().joins):
            self._asked, self._knows_sparse = joins, self._sparse_as_dense
        if self._knows_sparse or self._sparse_query is not None:
            return
        known = [
            index in self._sparse or _is_sparse(parameter)
            for index, parameter in enumerate(self._parameters)
        ]
        found = np.array(known, np.int32)
        name = f"{self._prefix}{len(found)}.sparse.alike"
        if self._process_set is global_process_set:
            self._sparse_query = current.current().push_pull_async(
                found, name, average=False, out=found
            )
        else:
            group = self._process_set.group()
            self._sparse_query = group.allreduce(found, found, op=Sum, name=name)

    def _agree_on_sparse(self) -> None:
        """Find out which gradients are sparse on any worker; blocks unless it is known."""
        self.ask_about_sparse()
        query, self._sparse_query = self._sparse_query, None
        if query is None:
            return
        found = np.asarray(query.wait())
        self._sparse = frozenset(map(int, found.nonzero()[0]))
        self._knows_sparse = True
        self._leave_out_sparse()

    def _leave_out_sparse(self) -> None:
        for bucket, members in zip(self._buckets, self._members, strict=True):
            if isinstance(bucket, FlatBucket):
                places = [i for i, member in enumerate(members) if member in self._sparse]
                bucket.leave_out(places)

    def _send_rows(self) -> None:
        """Start to exchange sparse gradients; all workers call it at this point."""
        unsent, self._unsent_rows = sorted(self._unsent_rows), []
        op = Average if self._average else Sum
        for index in unsent:
            if self._sums is not None:
                self._sums.set_apart(index)
            name = self._prefix + self._names[index]
            self._rows.append(SparseExchange(self._parameters[index], op, name, self._process_set))

    def _load(self, index: int) -> None:
        """Fill a bucket's array with this worker's part, without the sums of earlier rounds."""
        self._unsent_rows += self._sparse.intersection(self._members[index])
        self._decay(index)
        if self._sums is not None:
            for member in self._members[index]:
                if member not in self._sparse:
                    self._sums.set_apart(member)
        if self._sparse_as_dense:
            for parameter in (self._parameters[member] for member in self._members[index]):
                if _is_sparse(parameter) and parameter.grad is not None:
                    parameter.grad = parameter.grad.to_dense()
        self._buckets[index].load(current.current(), self._memory)

    def _decay(self, index: int) -> None:
        """Add weight decay to the gradients of a bucket, under Compression.wdmom()."""
        if isinstance(self._compression, WeightDecayMomentum):
            for member in self._members[index]:
                if self._parameters[member].requires_grad and member not in self._sparse:
                    self._compression.add_to(self._parameters[member], self._momenta)

    def _start_one(self, index: int) -> None:
        """Send one bucket by a call of its own: this happens within backward()."""
        if self._process_set is not global_process_set:
            self._start_within([index])
            return
        session, bucket = current.current(), self._buckets[index]
        self._load(index)
        try:
            handle = session.push_pull_async(
                bucket.array,
                bucket.name,
                average=self._average,
                priority=-self._members[index][0],
                out=bucket.array,
                # None, the array's own dtype, is what the short way of push_pull_async() takes
                dtype=bucket.code if bucket.code is DType.BFLOAT16 else None,
                **self._rate(),
            )
        except FastPSError as error:
            raise _advised(error) from error.__cause__
        self.round.started(handle, (index,), (bucket,))

    def _start_within(self, indices: Sequence[int]) -> None:
        """Send buckets to the members of the process set alone."""
        group, op = self._process_set.group(), Average if self._average else Sum
        for index in indices:
            bucket = self._buckets[index]
            self._load(index)
            handle = group.allreduce(
                bucket.array, bucket.array, op=op, name=bucket.name, dtype=bucket.code,
                priority=-self._members[index][0],
            )  # fmt: skip
            self.round.started(handle, (index,), (bucket,))

    def _start(self, indices: Sequence[int]) -> None:
        """Send buckets, all that have one dtype in one submit."""
        for index in [one for one in indices if self._sparse.issuperset(self._members[one])]:
            self._unsent_rows += self._members[index]
            self.round.started(MappedHandle([], list), (index,), ())
        indices = self.round.missing(indices)
        if not indices:
            return
        if self._process_set is not global_process_set:
            self._start_within(indices)
            return
        buckets = [self._buckets[index] for index in indices]
        for index in indices:
            self._load(index)
        try:
            started = self._submit(buckets, [-self._members[index][0] for index in indices])
        except FastPSError as error:
            raise _advised(error) from error.__cause__
        for handle, places in started:
            self.round.started(
                handle, [indices[place] for place in places], [buckets[place] for place in places]
            )

    def _submit(
        self, buckets: Sequence[Bucket], priorities: Sequence[int], **options: Any
    ) -> list[tuple[Handle[Any], list[int]]]:
        """Start to send loaded buckets; return the handles, with the places of their buckets."""
        return submit_push_pull(
            current.current(),
            [bucket.array for bucket in buckets],
            [bucket.code for bucket in buckets],
            [bucket.name for bucket in buckets],
            average=self._average,
            priorities=priorities,
            **options,
            **self._rate(),
        )


def arrive(exchange: weakref.ref[GradientExchange], index: int, _: torch.Tensor) -> None:
    """Pass a gradient on to its exchange; the hook of a parameter."""
    alive = exchange()
    if alive is not None:
        alive.on_hook(index)


def _exchange_of(hook: object) -> GradientExchange | None:
    """Return the exchange whose hook this is, if it is one and the exchange still exists."""
    if not isinstance(hook, partial) or not isinstance(next(iter(hook.args), None), weakref.ref):
        return None
    found = hook.args[0]()
    return found if isinstance(found, GradientExchange) else None


def _is_sparse(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


_ADVISED = (DuplicateNameError, FastPSError, MismatchError)


def _advised(error: FastPSError) -> FastPSError:
    """Return the error with a hint about names that two optimizers share, where that fits."""
    kind = type(error)
    return kind(f"{error}; {_PREFIX}") if kind in _ADVISED else error


def _remove_all(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
