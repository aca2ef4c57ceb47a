# SPDX-License-Identifier: Apache-2.0
"""How gradients travel in an elastic job, where a step is a unit and sources stay intact.

All operations of a step are in one scope (session/elastic.py). So after a loss all survivors have
all averages of the step, of the same contributors, or make all of them again. Until then nothing
may be written to what was sent: averages land in other memory, and when the step is complete the
two change roles. A gradient stays the same tensor, and lies in the other memory then; nothing is
copied. elastic_kind() makes the class of such an exchange; in other jobs none of this is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from fastps.frameworks.elastic_views import history_of
from fastps.frameworks.torch.gradients.buckets import (
    Bucket,
    FlatBucket,
    LooseGradient,
    Memory,
    slots_of,
)
from fastps.frameworks.torch.gradients.exchange import GradientExchange
from fastps.frameworks.torch.gradients.module_buffers import BufferSync
from fastps.frameworks.torch.ops.tensors import Array, make_room, tensor_over
from fastps.session import current
from fastps.session.elastic import RootLostError
from fastps.session.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from fastps.frameworks.gradient_round import Waitable
    from fastps.session.elastic_handle import Scope
    from fastps.session.session import Session
    from fastps.worker.handle import Handle

_address_of = torch.Tensor.data_ptr

E = TypeVar("E", bound=GradientExchange)


class TwoSidedBucket(FlatBucket):
    """Gradients side by side in one of two arrays; results land in the other."""

    landing: Array
    _mine: list[torch.Tensor]  # over the array, as the slots
    _others: list[torch.Tensor]  # over the landing
    _view = 0  # in which the arrays were made: they lie in its shared memory

    def make_room(self, session: Session) -> None:
        """Allocate both arrays, again in a new view; gradients move along."""
        view: int = getattr(session, "view", 0)
        if not self._slots:
            super().make_room(session)
            self._mine = [slot.data for slot in self._slots]
            self._make_landing(session)
        elif self._view != view and list(map(_address_of, self._slots)) == self._addresses:
            self._make_landing(session)
            with torch.no_grad():
                torch._foreach_copy_(self._others, self._slots)
            self._change_sides()
            self._make_landing(session)
        self._view = view

    def _make_landing(self, session: Session) -> None:
        self.landing = make_room(session, self.array.size, self.code).reshape(self.shape)
        self._others = slots_of(self.landing.reshape(-1), self.parameters, self._dtype)

    def _change_sides(self) -> None:
        """Let the slots, which may be gradients, lie over the other array."""
        for slot, other in zip(self._slots, self._others, strict=True):
            slot.data = other
        self.array, self.landing = self.landing, self.array
        self._mine, self._others = self._others, self._mine
        self._addresses = list(map(_address_of, self._slots))

    def store(self) -> None:
        """Check that gradients are as load() left them, and let them be what has landed."""
        self._check_each()
        self._change_sides()
        super().store()


class TwoSidedGradient(LooseGradient):
    """One gradient, sent from autograd's own memory; it lies over what has landed afterwards."""

    landing: Array
    _spare: Array | None = None  # where the next result lands: nobody else's memory

    def load(self, session: Session, memory: Memory) -> None:
        """Make the tensor to send, as LooseGradient, and room for the result."""
        super().load(session, memory)
        spare, self._spare = self._spare, None
        if spare is None or spare.shape != self.array.shape or spare.dtype != self.array.dtype:
            spare = np.empty(self.array.shape, self.array.dtype)
        self.landing = spare

    def store(self) -> None:
        """Let the gradient be the result; FastPSError if it has changed since load()."""
        copied, wire, context, is_in_place = self._loaded
        landed, sent = tensor_over(self.landing, wire.dtype), self.array
        self._loaded = copied, landed, context, is_in_place
        super().store()
        if not is_in_place:
            self._spare = self.landing
            return
        gradient = copied.gradient
        gradient.data = torch.view_as_complex(landed) if gradient.is_complex() else landed
        self._spare = sent


class ElasticStep(GradientExchange):
    """What makes a step of an exchange a unit; comes before the exchange's own class."""

    _flat_kind, _loose_kind = TwoSidedBucket, TwoSidedGradient
    _scope: Scope | None = None  # of the step whose gradients are being sent

    def __init__(self, *, process_set: ProcessSet = global_process_set, **options: Any) -> None:
        if process_set is not global_process_set:
            current.check_not_elastic("process_set=", "leave it out")
        super().__init__(**options)
        self._history = history_of(current.current())

    def wait(self) -> None:
        """Wait for the whole step, and write the results; raise its first error."""
        self.all_sent(is_awaited=True)
        super().wait()

    def take_in_flight(self) -> list[tuple[Waitable, Sequence[Bucket]]]:
        """Return each handle in flight, any of which completes when all of the step have."""
        self.all_sent()
        return super().take_in_flight()

    def all_sent(self, *, is_awaited: bool = False) -> None:
        """Close the scope of the step. is_awaited: as of Scope.close()."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close(is_awaited=is_awaited)
            self._history.add_step(scope)

    def _start_one(self, index: int) -> None:
        self._start([index])

    def _submit(
        self, buckets: Sequence[Bucket], priorities: Sequence[int], **options: Any
    ) -> list[tuple[Handle[Any], list[int]]]:
        two_sided: Any = buckets
        return super()._submit(
            buckets, priorities, landings=[one.landing for one in two_sided], **options
        )

    def _rate(self) -> dict[str, Any]:
        if self._scope is None:
            session: Any = current.current()
            self._scope = session.scope()
        return {**super()._rate(), "scope": self._scope}

    def _agree_on_sparse(self) -> None:
        super()._agree_on_sparse()
        if self._sparse:
            current.check_not_elastic("sparse gradients as rows", "pass sparse_as_dense=True")


def elastic_kind(kind: type[E]) -> type[E]:
    """Return the class of an exchange in an elastic job."""
    return type(f"Elastic{kind.__name__}", (ElasticStep, kind), {})


class ElasticBuffers(BufferSync):
    """Buffers that are copied from the first worker that is left."""

    def _copy(self, session: Session, root_rank: int, tensors: list[torch.Tensor]) -> bool:
        """Fill the slots with the root's buffers; from the next worker if the root is lost.

        Who is first may change at any moment. So each worker fills its slots, and takes what they
        hold in the end; a lost root leaves only slots half written.
        """
        while True:
            self._copy_each(self._slots, tensors)
            try:
                super()._copy(session, root_rank, tensors)
            except RootLostError:
                continue
            return True
