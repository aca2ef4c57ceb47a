# SPDX-License-Identifier: Apache-2.0
"""Local SGD: steps of one's own, and now and then an exchange of what they have changed.

All workers keep the same *agreed* parameters, besides the model that each trains. What a worker's
steps have changed since is averaged over all, and an outer optimizer makes the next agreed
parameters of it: DiLoCo (Douillard et al., "DiLoCo: Distributed low-communication training of
language models", 2023, algorithm 1). Fragments of the model leave in turn, and may arrive some
steps later: Streaming DiLoCo (Douillard et al., 2025, sections 2.2 and 2.3). Everything runs in
the thread that steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastps.current import current
from fastps.frameworks.torch.compression import Compressing, OnTheWay, compressor_of
from fastps.frameworks.torch.tensors import (
    check_tensor,
    make_room,
    submit_broadcast,
    submit_push_pull,
    tensor_over,
    view_of,
    wire_dtype,
)
from fastps.rules import Choice as Rule
from fastps.types import dtype_of
from fastps.worker.handle import Array, Handle

_STATE = ("steps", "inner", "outer", "agreed", "under_way")


@dataclass
class _Fragment:
    """Parameters that travel together.

    agreed: what all workers have, of the same number; float32 for halves. changes: views of
    `rooms`, by which they travel, one for each type. handles: of what is under way or not applied
    yet, and due, the step after which it is; sent: that after which it left.
    """

    parameters: list[torch.Tensor]
    agreed: list[torch.Tensor]
    changes: list[torch.Tensor] = field(default_factory=list)
    rooms: list[Array] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    due: int | None = None
    sent: int = 0

    def make_rooms(self, name: str) -> None:
        """Lay out what changed: tensors of one type side by side."""
        views: dict[int, torch.Tensor] = {}
        for dtype in sorted({one.dtype for one in self.agreed}, key=str):
            places = [i for i, one in enumerate(self.agreed) if one.dtype is dtype]
            sizes = [self.agreed[i].numel() for i in places]
            room = make_room(current(), sum(sizes), wire_dtype(dtype, name))
            parts = torch.split(tensor_over(room, dtype), sizes)
            views |= {i: part.view(self.agreed[i].shape)
                      for i, part in zip(places, parts, strict=True)}  # fmt: skip
            self.rooms.append(room)
            self.names.append(f"{name}.{str(dtype).removeprefix('torch.')}")
        self.changes = [views[i] for i in range(len(self.agreed))]

    def declare(self, how: Mapping[str, Any]) -> None:
        """Tell all workers and servers how what changed travels; blocks."""
        current().declare(
            [
                (name, room.shape, dtype_of(room.dtype))
                for room, name in zip(self.rooms, self.names, strict=True)
            ],
            **how,
        )

    def send(self, how: Mapping[str, Any], now: int, delay: int) -> None:
        """Begin to average what the worker has changed; what was agreed minus what it has."""
        for change, agreed, parameter in zip(
            self.changes, self.agreed, self.parameters, strict=True
        ):
            torch.sub(agreed, parameter.detach(), out=change)
        self.handles = [
            current().push_pull_async(room, name, out=room, **how)
            for room, name in zip(self.rooms, self.names, strict=True)
        ]
        self.sent, self.due = now, now + delay

    def wait(self) -> None:
        """Wait for the average."""
        while self.handles:
            self.handles[-1].wait()
            self.handles.pop()

    def take(self, keep: float) -> None:
        """Give the model what is agreed now; keep: the share of its own that it keeps."""
        for parameter, agreed in zip(self.parameters, self.agreed, strict=True):
            if keep:
                agreed = agreed + keep * (parameter.detach() - agreed)
            parameter.copy_(agreed)


class LocalSGD:
    """Train with steps of one's own, and exchange what they changed every so many steps."""

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer | None = None,
        *,
        sync_every: int,
        fragments: int = 1,
        delay: int = 0,
        keep: float | None = None,
        compression: Compressing = None,
        rule: Rule = None,
        average_buffers: bool = True,
        prefix: str = "",
    ) -> None:
        """Take rank 0's parameters on all workers, and keep them as what is agreed; blocks.

        model: its parameters that train are exchanged. inner: any optimizer of them; its state
        stays each worker's own. outer: an optimizer of the same parameters that has not stepped
        yet; it is handed the agreed ones in their place, and its gradient is the average, over
        the workers, of agreed minus own. None is SGD with a rate of 1, so what is agreed is the
        average of the models; DiLoCo is torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9,
        nesterov=True). sync_every: H, steps from one exchange of a parameter to the next.
        fragments: in how many parts the model leaves, one every H / fragments steps. delay: steps
        from the moment a fragment leaves until it is put into the model, meanwhile it travels;
        less than H. keep: which share of its own parameters a worker keeps then, 0 to 1; by
        default 0, and 0.5 with a delay, whose steps would be lost (alpha of Streaming DiLoCo).
        compression: of fastps.push_pull(), say fastps.Compression.int4(ef="vanilla"). rule: of
        fastps.push_pull(), in the place of the average, of each fragment by itself and of buffers,
        where some workers may lie (docs/byzantine.md); not with compression.
        average_buffers: of floats, as BatchNorm's, that are saved with the model, whenever the
        first fragment is sent. prefix: another one for a second model. All workers call it alike.
        Raises ValueError, TypeError, and what push_pull() does.
        """
        self._check(sync_every, fragments, delay)
        self.keep = (0.5 if delay else 0.0) if keep is None else float(keep)
        if not 0 <= self.keep <= 1:
            raise ValueError(f"keep={self.keep} is not between 0 and 1")
        self.inner, self.sync_every, self.delay = inner, sync_every, delay
        self.steps = 0
        self._how = {"compression": _choice_of(compression), "rule": rule}
        self._prefix = f"{prefix}LocalSGD"
        self._model, self._average_buffers = model, average_buffers
        with torch.no_grad():
            self._fragments = self._divide(fragments)
        self.outer = self._adopt(outer)

    def _check(self, sync_every: int, fragments: int, delay: int) -> None:
        if not 1 <= fragments <= sync_every:
            raise ValueError(
                f"fragments={fragments} and sync_every={sync_every}: there is at least one "
                "fragment, and a step for each"
            )
        if not 0 <= delay < sync_every:
            raise ValueError(
                f"delay={delay} is not 0 to {sync_every - 1}: a fragment has to be back before it "
                "leaves again"
            )

    def _divide(self, count: int) -> list[_Fragment]:
        """Deal out the parameters, each to the fragment that has the fewest bytes so far."""
        named = [(name, one) for name, one in self._model.named_parameters() if one.requires_grad]
        if len(named) < count:
            raise ValueError(f"{len(named)} parameters are not {count} fragments")
        tensors = [check_tensor(one, name).detach() for name, one in named]
        whole = [one.contiguous() for one in tensors]
        for handle in submit_broadcast(
            current(), whole, [f"{self._prefix}.{name}" for name, _ in named], 0
        ):
            handle.wait()
        fragments = [_Fragment([], []) for _ in range(count)]
        for tensor, values, (_, parameter) in zip(tensors, whole, named, strict=True):
            tensor.copy_(values)
            lightest = min(fragments, key=lambda one: sum(p.nbytes for p in one.parameters))
            lightest.parameters.append(parameter)
            lightest.agreed.append(_wide(tensor))
        for number, fragment in enumerate(fragments):
            fragment.make_rooms(f"{self._prefix}.{number}")
            fragment.declare(self._how)
        return fragments

    def _adopt(self, outer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        """Hand the outer optimizer the agreed parameters in place of the model's."""
        agreed = {
            parameter: one
            for fragment in self._fragments
            for parameter, one in zip(fragment.parameters, fragment.agreed, strict=True)
        }
        if outer is None:
            return torch.optim.SGD(agreed.values(), lr=1.0)
        if outer.state:
            raise ValueError("the outer optimizer has stepped already; give a new one")
        given = [one for group in outer.param_groups for one in group["params"]]
        if set(given) != set(agreed):
            raise ValueError(
                "the outer optimizer has other parameters than those of the model that train; "
                "make it of model.parameters()"
            )
        for group in outer.param_groups:
            group["params"] = [agreed[one] for one in group["params"]]
        return outer

    # ---- steps ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step of the inner optimizer, then advance(); give the closure's loss."""
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self.advance()
        return loss

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Clear the gradients of the model."""
        self.inner.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def advance(self) -> None:
        """Count a step that somebody else did, say a GradScaler; all workers count alike.

        Begins to send the fragment whose turn it is, without waiting, and puts into the model the
        one that is due; blocks for that one until it is there.
        """
        self.steps += 1
        for number, fragment in enumerate(self._fragments):
            if (self.steps + self._offset(number)) % self.sync_every == 0:
                fragment.send(self._how, self.steps, self.delay)
                if number == 0:
                    self._mix_buffers()
            if fragment.due == self.steps:
                self._apply(fragment)

    def _offset(self, number: int) -> int:
        """Give by how many steps a fragment is before the first one."""
        return number * self.sync_every // len(self._fragments)

    def _apply(self, fragment: _Fragment) -> None:
        fragment.wait()
        fragment.due = None
        for agreed, change in zip(fragment.agreed, fragment.changes, strict=True):
            agreed.grad = change
        self.outer.step()
        for agreed in fragment.agreed:
            agreed.grad = None
        fragment.take(self.keep)

    def _mix_buffers(self) -> None:
        saved = self._model.state_dict().keys()
        named = [
            (name, one)
            for name, one in self._model.named_buffers()
            if self._average_buffers and one.is_floating_point() and name in saved
        ]
        whole = [one.detach().contiguous() for _, one in named]
        for handle, _ in submit_push_pull(
            current(),
            [view_of(one) for one in whole],
            [wire_dtype(one.dtype, name) for name, one in named],
            [f"{self._prefix}.{name}" for name, _ in named],
            average=True,
            priorities=[0] * len(named),
            rule=self._how["rule"],
        ):
            handle.wait()
        for (_, one), found in zip(named, whole, strict=True):
            one.copy_(found)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange now what has changed, so that all workers have the same model; blocks.

        For the end of training, or before a test. All workers call it after as many steps. What
        has just been exchanged is not sent again.
        """
        for fragment in self._fragments:
            if fragment.due is not None:
                self._apply(fragment)
        behind = [fragment for fragment in self._fragments if fragment.sent < self.steps]
        for fragment in behind:
            fragment.send(self._how, self.steps, 0)
        for fragment in behind:
            self._apply(fragment)
        for fragment in self._fragments:
            fragment.take(0.0)
        self._mix_buffers()

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Give all that is needed to go on, but the model's own state; waits for fragments.

        What codecs with error feedback keep stays behind: it is at most what one round left out.
        Each worker saves its own: the states of inner optimizers differ.
        """
        for fragment in self._fragments:
            fragment.wait()
        return {
            "steps": self.steps,
            "inner": self.inner.state_dict(),
            "outer": self.outer.state_dict(),
            "agreed": [[one.clone() for one in fragment.agreed] for fragment in self._fragments],
            "under_way": [
                (fragment.sent, fragment.due, [one.clone() for one in fragment.changes])
                for fragment in self._fragments
            ],
        }  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state_dict(); the model's own state is loaded besides. ValueError else."""
        agreed: Sequence[Sequence[torch.Tensor]] = state.get("agreed", ())
        sizes = [[one.shape for one in fragment.agreed] for fragment in self._fragments]
        if set(state) != set(_STATE) or [[one.shape for one in some] for some in agreed] != sizes:
            raise ValueError(
                "this is no state of a LocalSGD of this model with as many fragments; load it "
                "into one that was made as the one that was saved"
            )
        self.steps = state["steps"]
        self.inner.load_state_dict(state["inner"])
        self.outer.load_state_dict(state["outer"])
        for fragment, some, under_way in zip(
            self._fragments, agreed, state["under_way"], strict=True
        ):
            fragment.wait()
            fragment.sent, fragment.due, changes = under_way
            for own, one in zip(
                fragment.agreed + fragment.changes, [*some, *changes], strict=True
            ):
                own.copy_(one)


def _choice_of(compression: Compressing) -> Any:
    """Give the codec; TypeError for what would cast a tensor before it is sent."""
    given = compressor_of(compression)
    if compression is None or isinstance(given, OnTheWay):
        return given.choice if isinstance(given, OnTheWay) else None
    raise TypeError(
        "LocalSGD sends what changed through a codec: give fastps.Compression.fp16() in the place "
        "of fastps.torch.Compression.fp16, or another of fastps.Compression"
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a parameter, so wide that small changes of it add up."""
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
