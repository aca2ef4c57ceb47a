# SPDX-License-Identifier: Apache-2.0
"""Algorithms that correct the errors of plain mixing, and gossip of outer updates.

The errors are those of momentum, and the bias where workers have different data. Letters and
threads as in optimizer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fastps.frameworks.torch.decentralized.optimizer import (
    AdaptWithCombine,
    Algorithm,
    DecentralizedOptimizer,
    Mixer,
    Models,
    adopt,
)
from fastps.ops.neighbors import (
    in_neighbor_ranks,
    out_neighbor_ranks,
    start_neighbor_allreduce,
)
from fastps.session.current import current
from fastps.worker.handle import Waitable


class DecentLaM(Algorithm):
    """Correct momentum: m <- beta m + (x - A(x - lr g)) / lr; x <- x - lr m.

    Yuan et al., "DecentLaM: decentralized momentum SGD for large-batch deep training", ICCV 2021,
    algorithm 2. The optimizer gets the corrected gradient, so its own momentum is m.
    """

    def mixed_step(self) -> None:
        """Replace the gradient by (x - A(x - lr g)) / lr, and step."""
        rates = {one: float(group["lr"]) for group in self.optimizer.param_groups
                 for one in group["params"]}  # fmt: skip
        before = {one: one.detach().clone() for one in self.parameters}
        for one in self.parameters:
            if one.grad is not None:
                one.sub_(one.grad, alpha=rates[one])
        self.mixer.mix()
        for one in self.parameters:
            is_moving = rates[one] != 0.0
            one.grad = (before[one] - one) / rates[one] if is_moving else torch.zeros_like(one)
            one.copy_(before[one])
        self.optimizer.step_of()


class ExactDiffusion(Algorithm):
    """Correct the bias: psi = x - opt(g); x <- (A + I) / 2 (psi + x - psi_before).

    Yuan, Ying, Zhao and Sayed, "Exact diffusion for distributed optimization and learning", 2019.
    """

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Start with psi_before = x, at the first step."""
        self._psi: dict[torch.Tensor, torch.Tensor] = {}

    def mixed_step(self) -> None:
        """Step, correct, mix, and average with the values before mixing."""
        before = {one: one.detach().clone() for one in self.parameters}
        self.optimizer.step_of()
        for one in self.parameters:
            psi = one.detach().clone()
            one.add_(before[one]).sub_(self._psi.get(one, before[one]))
            self._psi[one] = psi
            before[one] = one.detach().clone()
        self.mixer.mix()
        for one in self.parameters:
            one.add_(before[one]).mul_(0.5)


class Extra(AdaptWithCombine):
    """Correct the bias, with A(x) during forward and backward: EXTRA.

    s = (A + I) / 2 x; psi = s - opt(g); x <- psi + s - psi_before, at first psi_before = x. With
    SGD that is x+ = 2 s - s_before - lr (g - g_before). Shi, Ling, Wu and Yin, "EXTRA: an exact
    first-order algorithm for decentralized consensus optimization", 2015, algorithm 1.
    """

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Start with psi_before = x, at the first step."""
        super().watch(models)
        self._psi: dict[torch.Tensor, torch.Tensor] = {}

    def mixed_step(self) -> None:
        """Take over half of A(x), step, and correct."""
        self._begin()
        last = [self._psi.get(one, one.detach().clone()) for one in self.parameters]
        own = [one.detach().clone() for one in self.parameters]
        self.receive()
        self._forwards, self._has_begun = 0, False
        for one, before in zip(self.parameters, own, strict=True):
            before.add_(one).mul_(0.5)
            one.copy_(before)
        self.optimizer.step_of()
        for one, half, psi in zip(self.parameters, own, last, strict=True):
            self._psi[one] = one.detach().clone()
            one.add_(half).sub_(psi)


class GradientTracking(Algorithm):
    """Follow the average of gradients: x <- A(x) - opt(q); q <- A(q) + g - g_before.

    With compression that has error feedback this is BEER (Zhao, Li, Li, Richtarik and Chi, "BEER:
    fast O(1/T) rate for decentralized nonconvex optimization with communication compression",
    2022): neighbours know h of x and another one of q, and C(x - h) and C(q - h) travel.
    Di Lorenzo and Scutari, "NEXT", 2016; Nedic, Olshevsky and Shi, "Achieving geometric
    convergence for distributed optimization over time-varying graphs", 2017.
    """

    tracker: type[Mixer] = Mixer

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Start with q = g."""
        self._q = [torch.zeros_like(one) for one in self.parameters]
        self._before = [torch.zeros_like(one) for one in self.parameters]
        self._tracker = self.tracker(self.optimizer, self._q, f"{self.name}gradients")

    def mixed_step(self) -> None:
        """Wait for A(q), which was mixed during forward and backward; send q and x again."""
        self._tracker.finish()
        for one, q, before in zip(self.parameters, self._q, self._before, strict=True):
            gradient = torch.zeros_like(one) if one.grad is None else one.grad
            q.add_(gradient).sub_(before)
            before.copy_(gradient)
        self.mixer.start_all()
        self._tracker.start_all()
        self.mixer.finish()
        for one, q in zip(self.parameters, self._q, strict=True):
            one.grad = q.clone()
        self.optimizer.step_of()


class ShareMixer(Mixer):
    """Mix by column-stochastic weights: a worker keeps one share, and sends one to each target."""

    def mixing(self) -> tuple[Callable[..., Waitable], dict[str, Any]] | None:
        """Return the optimizer's operation among its neighbours, by shares of the sender."""
        found = super().mixing()
        if found is None or found[0] is not start_neighbor_allreduce:
            return found
        operation, how = found
        if how["rule"] is not None or how["compression"] is not None:
            raise ValueError(
                "push_pull=True supports neither rule nor compression, got "
                f"rule={how['rule']} and compression={how['compression']}: set the optimizer's "
                "attributes to None"
            )
        targets, sources = how["dst_weights"], how["src_weights"]
        targets = out_neighbor_ranks() if targets is None else list(targets)
        sources = in_neighbor_ranks() if sources is None else list(sources)
        share = 1 / (len(targets) + 1)
        how |= {"self_weight": share, "src_weights": dict.fromkeys(sources, 1.0),
                "dst_weights": dict.fromkeys(targets, share)}  # fmt: skip
        return operation, how


class PushPull(GradientTracking):
    """Gradient tracking on directed graphs: x <- R(x) - opt(q); q <- C(q) + g - g_before.

    R takes means, and C shares; neither needs to be both. Xin and Khan, "A linear algorithm for
    optimization over directed graphs with geometric convergence", 2018; Pu, Shi, Xu and Nedic,
    "Push-pull gradient methods for distributed optimization in networks", 2021.
    """

    tracker = ShareMixer


class NoLoCo(Algorithm):
    """Gossip of outer updates: after some local steps, with one other worker at random.

    m = alpha m + beta mean(x - s) - gamma (s - mean(s)); s <- s + m; x <- s, where s is x after
    the last exchange and means are of the two workers. After Kolehmainen et al., "NoLoCo:
    No-all-reduce low communication training method for large models", 2025; the outer step is
    that of the authors' programs.
    """

    outer_lr, outer_momentum, gamma, seed = 0.7, 0.5, 0.7, 0

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Start with s = x and m = 0."""
        self._round = 0
        self._slow = [one.detach().clone() for one in self.parameters]
        self._momentum = [torch.zeros_like(one) for one in self.parameters]
        self._means = [one.clone() for one in self._slow]
        self._slow_mixer = Mixer(self.optimizer, self._means, f"{self.name}slow")

    def mixed_step(self) -> None:
        """Step, and then mix the changes since the last exchange."""
        self.optimizer.step_of()
        self._choose_peer()
        for one, slow, mean in zip(self.parameters, self._slow, self._means, strict=True):
            one.sub_(slow)
            mean.copy_(slow)
        for mixer in (self.mixer, self._slow_mixer):
            mixer.start_all()
        for mixer in (self.mixer, self._slow_mixer):
            mixer.finish()
        for one, slow, mean, momentum in zip(
            self.parameters, self._slow, self._means, self._momentum, strict=True
        ):
            momentum.mul_(self.outer_momentum).add_(one, alpha=self.outer_lr)
            momentum.sub_(slow - mean, alpha=self.gamma)
            slow.add_(momentum)
            one.copy_(slow)

    def _choose_peer(self) -> None:
        """Set the optimizer's weights for this round's peer."""
        peer = pair_of(current().rank, current().size, seed=self.seed, number=self._round)
        self._round += 1
        self.optimizer.self_weight = 1.0 if peer is None else 0.5
        self.optimizer.src_weights = {} if peer is None else {peer: 0.5}
        self.optimizer.dst_weights = [] if peer is None else [peer]


def pair_of(rank: int, size: int, *, seed: int, number: int) -> int | None:
    """Return a worker's peer in a round of random pairs, the same on all; None: it has none."""
    order = [int(one) for one in np.random.default_rng([seed, number]).permutation(size)]
    place = order.index(rank) ^ 1
    return order[place] if place < size else None


# ---- what users call ----


def DistributedDecentLaMOptimizer(
    optimizer: torch.optim.Optimizer, model: Models, **options: Any
) -> DecentralizedOptimizer:
    """Correct the bias of momentum, for SGD with momentum.

    Options as for DistributedAdaptWithCombineOptimizer().
    """
    return adopt(optimizer, DecentLaM, model, **options)


def DistributedExactDiffusionOptimizer(
    optimizer: torch.optim.Optimizer, model: Models, *, extra: bool = False, **options: Any
) -> DecentralizedOptimizer:
    """Converge to the exact optimum on a static graph with symmetric weights.

    extra: mix during forward and backward instead of within step() (EXTRA); needs smaller learning
    rates. Options as for DistributedAdaptWithCombineOptimizer().
    """
    return adopt(optimizer, Extra if extra else ExactDiffusion, model, **options)


def DistributedGradientTrackingOptimizer(
    optimizer: torch.optim.Optimizer, model: Models, *, push_pull: bool = False, **options: Any
) -> DecentralizedOptimizer:
    """Converge to the exact optimum also on changing graphs; sends twice as much.

    Weights must be doubly stochastic. push_pull: on directed graphs weights of receivers only sum
    to 1, and gradients travel in equal shares to all targets instead, whatever factors dst_weights
    has (Push-Pull). Options as for DistributedAdaptWithCombineOptimizer().
    """
    return adopt(optimizer, PushPull if push_pull else GradientTracking, model, **options)


def DistributedNoLoCoOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 50,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    gamma: float | None = None,
    seed: int = 0,
    prefix: str = "",
    average_buffers: bool = False,
) -> DecentralizedOptimizer:
    """Do local steps, and exchange what they changed with one random worker at a time (NoLoCo).

    m = outer_momentum m + outer_lr mean(x - s) - gamma (s - mean(s)); x = s = s + m, every
    num_steps_per_communication steps. gamma: how strongly two workers pull together, by default
    outer_lr; with too little, workers drift apart. seed: of the pairs, the same on all workers.
    Sends twice the parameters to one worker each time. The optimizer sets its weights itself. A
    worker without a peer, or whose peer is lost, takes the outer step alone.
    """
    if not 0 <= outer_momentum < 1 or outer_lr <= 0 or (gamma is not None and gamma < 0):
        raise ValueError(
            f"{outer_lr=} must be above 0, {outer_momentum=} at least 0 and below 1, and {gamma=} "
            "at least 0"
        )
    found = adopt(
        optimizer, NoLoCo, model, num_steps_per_communication=num_steps_per_communication,
        prefix=prefix, average_buffers=average_buffers,
    )  # fmt: skip
    algorithm = found._algorithm
    assert isinstance(algorithm, NoLoCo)
    algorithm.outer_lr, algorithm.outer_momentum = outer_lr, outer_momentum
    algorithm.gamma = outer_lr if gamma is None else gamma
    algorithm.seed = seed
    return found
