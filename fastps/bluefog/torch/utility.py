# SPDX-License-Identifier: Apache-2.0
"""Parameters and optimizer states made the same on all workers: bluefog.torch.utility."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

import fastps.torch as fps

Parameters = (
    Mapping[str, torch.Tensor] | Iterable[tuple[str | None, torch.Tensor]] | Iterable[torch.Tensor]
)


def broadcast_parameters(params: Parameters, root_rank: int) -> None:
    """Overwrite tensors on all workers with the root's.

    params: model.state_dict(), or model.named_parameters() or model.parameters(), listed or not.
    """
    pairs = _pairs(params)
    fps.broadcast_parameters([(name, one) for name, one in pairs if name], root_rank)
    nameless = [fps.broadcast_async_(one, root_rank) for name, one in pairs if not name]
    for handle in nameless:
        handle.wait()


def allreduce_parameters(params: Parameters) -> None:
    """Overwrite tensors on all workers with their average; skip integers."""
    fps.average_parameters([(name or str(place), one)
                            for place, (name, one) in enumerate(_pairs(params))])  # fmt: skip


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Copy the state of the root's optimizer to that of every worker."""
    fps.broadcast_optimizer_state(optimizer, root_rank)


def _pairs(params: Parameters) -> list[tuple[str | None, torch.Tensor]]:
    """Return pairs of name and tensor; name None for tensors that are matched by order."""
    if isinstance(params, Mapping):
        return list(params.items())
    if isinstance(params, torch.Tensor | str):
        raise ValueError(
            f"params must be a dict, or a list of tensors or pairs, not {type(params).__name__}"
        )
    return [one if isinstance(one, tuple) else (None, one) for one in params]
