# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_survivors.py do: go on while others die."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from run_program import mark, now

import fastps
from fastps import topology
from fastps.errors import TransportError
from fastps.session import current

COUNT = 100_000  # elements: a message that is asked for, in several chunks
PAUSE_S = 0.002  # between operations, as computation would be


def begin(deaths: dict[str, float], codecs: Iterable[Any] = ()) -> int:
    """Join, and die later if we are told to, at no point in particular."""
    fastps.init()
    rank = fastps.rank()
    for dtype in (np.float32, np.float64):  # kernels are loaded at their first use
        fastps.neighbor_allreduce(np.zeros(9, dtype))
        fastps.neighbor_allreduce(np.zeros(9, dtype), self_weight=1.0, src_weights={})
    for codec in codecs:
        fastps.neighbor_allreduce(np.zeros(COUNT, np.float32), name="kernels", compression=codec)
    fastps.barrier()
    if str(rank) in deaths:
        die_after(deaths[str(rank)])
    mark("READY")
    return rank


def die_after(seconds: float) -> None:
    """Die then, whatever this process does."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def edges(graph: str, rank: int, size: int) -> Iterator[dict[str, Any]]:
    """Give the keywords of each round: other edges each time, or always those of a graph."""
    if graph != "one peer":
        known = {"ring": topology.ring_graph, "full": topology.fully_connected_graph}
        fastps.set_topology(known.get(graph, topology.exponential_graph)(size))
        while True:
            yield {}
    for sends, receives in topology.one_peer(topology.exponential_graph(size), rank):
        share = 1 / (len(receives) + 1)
        src = dict.fromkeys(receives, share)
        yield {"self_weight": share, "src_weights": src, "dst_weights": sends}


def mixes(*, steps: int, graph: str, deaths: dict[str, float]) -> dict[str, Any]:
    """Mix what begins as our rank, and nobody adds to.

    Weights of a row always sum to one, so all stays between the least and the largest rank; an
    array of one worker counts as a whole or not at all, so all elements are the same.
    """
    rank = begin(deaths)
    x = np.full(COUNT, float(rank))
    how = edges(graph, rank, fastps.size())
    slowest = 0.0
    for step in range(steps):
        before = now()
        x = fastps.neighbor_allreduce(x, **next(how))
        slowest = max(slowest, now() - before)
        assert not np.ptp(x), f"step {step}: {x.min()} to {x.max()}"
        assert -1e-9 <= x[0] <= fastps.size() - 1 + 1e-9, f"step {step}: {x[0]}"
        time.sleep(PAUSE_S)
    fastps.barrier()  # of those who are left
    found = {"value": float(x[0]), "slowest": slowest, "lost": fastps.lost_ranks()}
    fastps.barrier()  # who shuts down before others have asked is gone too
    fastps.shutdown()
    return found


def push_sum(*, steps: int, deaths: dict[str, float]) -> dict[str, Any]:
    """Average with weights of columns: what each has is divided among those it sends to.

    The last element is the weight that goes with the others. Gives what there is of it once all
    know who is lost, and after as many steps more, in which none gets lost.
    """
    rank = begin(deaths)
    x = np.append(np.full(COUNT, float(rank)), 1.0)
    topology_ = topology.exponential_graph(fastps.size())
    turns, totals = topology.one_peer(topology_, rank), []
    for _ in range(2):
        for _ in range(steps):
            sends, receives = next(turns)
            x = fastps.neighbor_allreduce(
                x, self_weight=0.5, src_weights=dict.fromkeys(receives, 1.0),
                dst_weights=dict.fromkeys(sends, 0.5),
            )  # fmt: skip
            assert not np.ptp(x[:-1])
            assert -1e-9 <= x[0] / x[-1] <= fastps.size() - 1 + 1e-9
            time.sleep(PAUSE_S)
        fastps.barrier()
        totals.append(float(x[-1]))
    fastps.shutdown()
    return {"totals": totals, "value": float(x[0] / x[-1])}


def needs_all(*, deaths: dict[str, float]) -> dict[str, Any]:
    """All-reduce until somebody is missing; then go on with neighbours, and without the lost."""
    rank = begin(deaths)
    ones = np.ones(COUNT)
    try:
        while True:
            fastps.allreduce(ones)
    except fastps.PeerLostError as error:
        text, at = str(error), now()
    again = ""
    for _ in range(1 + rank):  # as who was through with an operation when others were not yet
        try:
            fastps.allreduce(ones)
        except fastps.PeerLostError as error:
            again = str(error)
    mean = fastps.neighbor_allreduce(ones)
    rows = fastps.neighbor_allgather(np.full((rank + 1, 2), rank))
    fastps.barrier()
    lost = fastps.lost_ranks()
    left = fastps.add_process_set([one for one in range(fastps.size()) if one not in lost])
    total = fastps.allreduce(ones, op=fastps.Sum, process_set=left)
    try:
        fastps.push_pull(ones, "x")
    except fastps.ConfigError as error:
        refusal = str(error)
    fastps.shutdown()
    return {"text": text, "again": again, "at": at, "mean": float(mean.max()), "lost": lost,
            "total": float(total[0]), "rows": sorted({int(one) for one in rows[:, 0]}),
            "refusal": refusal}  # fmt: skip


def trains(*, steps: int, optimizers: dict[str, int], deaths: dict[str, float]) -> list[Any]:
    """Fit a line by one decentralized optimizer of torch after the other.

    optimizers: their names, and the rank that dies at work. Gives the first and last loss of each.
    """
    import torch  # noqa: PLC0415  (which the other programs do not wait for)

    import fastps.torch as fps  # noqa: PLC0415

    rank, losses = begin(deaths), []
    chance = torch.Generator().manual_seed(rank)
    truth = torch.linspace(-1, 1, 16)
    for name, dead in optimizers.items():
        torch.manual_seed(7)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)
        )
        inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
        outer = getattr(fps, f"Distributed{name}Optimizer")(inner, model)
        own = []
        for step in range(steps):
            if step == steps // 5 and rank == dead:
                die_after(0.02)
            inputs = torch.randn(32, 16, generator=chance)
            outer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs)[:, 0], inputs @ truth)
            loss.backward()
            outer.step()
            own.append(loss.item())
        fastps.barrier()
        losses.append((own[0], float(np.mean(own[-20:]))))
    lost = fastps.lost_ranks()
    fastps.barrier()
    fastps.shutdown()
    return [losses, lost]


def pushes(*, steps: int, deaths: dict[str, float]) -> dict[str, Any]:
    """Push shares of a model that nobody trains: what there is of it, once all know of a death.

    Gives P and x twice, before and after as many steps more, and the model at last.
    """
    import torch  # noqa: PLC0415

    import fastps.torch as fps  # noqa: PLC0415

    rank = begin(deaths)
    model = torch.nn.Linear(COUNT, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, float(rank))
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = fps.DistributedPushSumOptimizer(inner, model)
    turns = topology.one_peer(fps.load_topology(), rank)
    totals = []
    for part in range(2):
        for _ in range(steps):
            if part:  # before: the default, all out-neighbours
                optimizer.dst_weights = dict.fromkeys(next(turns)[0], 0.25)
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.zero_grad(set_to_none=False)
            model.weight.sum().backward()
            optimizer.step()
            assert not np.ptp(model.weight.detach().numpy())
            assert -1e-9 <= float(model.weight[0, 0]) <= fastps.size() - 1 + 1e-9
            time.sleep(PAUSE_S)
        fastps.barrier()
        p = fps.win_associated_p("PushSum.0")
        totals.append([p, p * float(model.weight[0, 0])])
    found = {"totals": totals, "value": float(model.weight[0, 0]), "lost": fastps.lost_ranks()}
    optimizer.unregister_window()
    fastps.shutdown()
    return found


def averages(*, steps: int, optimizer: str, dies_at: dict[str, int]) -> dict[str, Any]:
    """Begin as the documentation does, and train with averages of all, then of those left.

    dies_at: steps, at some moment of which, or a little later, these die. Gives the prints of the
    weights after each step: those who are left have the same ones.
    """
    import torch  # noqa: PLC0415

    import fastps.torch as fps  # noqa: PLC0415

    rank, size = begin({}), fastps.size()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(20, 600), torch.nn.Tanh(),
                                torch.nn.Linear(600, 600), torch.nn.Linear(600, 1))  # fmt: skip
    inner = torch.optim.Adam(model.parameters(), lr=1e-3 * (rank + 1))
    model(torch.ones(20)).sum().backward()
    inner.step()  # states, which are others' on each worker
    root = size - 1
    fps.broadcast_parameters(model.state_dict(), root)
    fps.broadcast_optimizer_state(inner, root)
    assert inner.param_groups[0]["lr"] == pytest.approx(1e-3 * size)
    inner.param_groups[0]["lr"] = 1e-3
    if optimizer == "gradients":
        outer = fps.DistributedGradientAllreduceOptimizer(inner, model)
    else:
        kind = fps.CommunicationType.allreduce
        outer = fps.DistributedAdaptThenCombineOptimizer(inner, model, kind)
    prints, losses = [], []
    truth = torch.linspace(-1, 1, 20)
    for step in range(steps):
        if step == dies_at.get(str(rank)):
            die_after(random.uniform(0.0, 0.01))
        inputs = torch.randn(16, 20)
        outer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs)[:, 0], inputs @ truth)
        loss.backward()
        outer.step()
        losses.append(loss.item())
        prints.append(zlib.crc32(b"".join(one.detach().numpy().tobytes()
                                          for one in model.parameters())))  # fmt: skip
    fastps.barrier()
    lost = fastps.lost_ranks()
    with torch.no_grad():
        model[0].weight.fill_(float(rank))
    fps.average_parameters({"weight": model[0].weight})
    mean = float(model[0].weight.detach()[3, 4])
    texts = []
    for one in sorted({root, *lost}):  # a root that is lost has nothing to give
        try:
            fps.broadcast_parameters({"weight": model[0].weight}, one)
        except fastps.PeerLostError as error:
            texts.append(str(error))
    fastps.barrier()
    fastps.shutdown()
    return {"prints": prints, "losses": losses, "lost": lost, "mean": mean, "texts": texts}


def waits(*, asks: bool = False) -> dict[str, Any]:
    """Mix until told to end; who is stopped and comes back is not wanted any more.

    asks: the scheduler, at the end: whose links ended while it was stopped may have hastened
    through the rest alone before it heard why.
    """
    fastps.init()
    for step in range(100_000):
        fastps.neighbor_allreduce(np.ones(9))
        mark("STEP", step)
        time.sleep(PAUSE_S)
        if len(fastps.lost_ranks()) == fastps.size() - 1:
            break
    if asks:
        fastps.barrier()
    fastps.shutdown()
    return {}


def mixes_coded(*, steps: int, graph: str, deaths: dict[str, float]) -> dict[str, Any]:
    """Mix what travels encoded, with error feedback and without; those that are left agree."""
    ef, plain = fastps.Compression.int4(ef="vanilla"), fastps.Compression.int8
    rank = begin(deaths, (ef, plain))
    x = np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32)
    how = edges(graph, rank, fastps.size())
    slowest = 0.0
    for step in range(steps):
        before, keywords = now(), next(how)
        x = fastps.neighbor_allreduce(x, name="x", compression=ef, **keywords)
        y = fastps.neighbor_allreduce(np.full(COUNT, 3, np.float32), **keywords,
                                      compression=plain)  # fmt: skip
        slowest = max(slowest, now() - before)
        assert np.isfinite(x).all()
        assert np.allclose(y, 3, rtol=1e-6), f"step {step}: {y.min()} to {y.max()}"
        time.sleep(PAUSE_S)
    fastps.barrier()
    found = {"value": x[:50].tolist(), "slowest": slowest, "lost": fastps.lost_ranks()}
    fastps.barrier()
    fastps.shutdown()
    return found


def puts(*, deaths: dict[str, float]) -> dict[str, Any]:
    """Put into all neighbours' buffers until one is dead; then go on with the others."""
    rank = begin(deaths)
    fastps.set_topology(topology.fully_connected_graph(fastps.size()))
    x = np.full(COUNT, float(rank))
    for name in ("x", "sums"):
        fastps.win_create(x, name, zero_init=True)
    mark("PUTS")
    found: dict[str, Any] = {"text": "", "again": "", "got": ""}
    while not found["text"]:
        try:
            fastps.win_put(x, "x")
            fastps.win_accumulate(x, "sums", dst_weights=dict.fromkeys(
                fastps.out_neighbor_ranks(), 0.5))  # fmt: skip
            fastps.win_update_then_collect("sums")
            x[...] = rank
        except fastps.PeerLostError as error:
            found["text"], found["at"] = str(error), now()
    fastps.barrier()
    lost = fastps.lost_ranks()
    for what, call in (("again", fastps.win_put), ("got", fastps.win_get)):
        try:
            call(*((x, "x") if what == "again" else ("x",)))
        except fastps.PeerLostError as error:
            found[what] = str(error)
    left = [one for one in fastps.out_neighbor_ranks() if one not in lost]
    for _ in range(20):
        x[...] = rank
        fastps.win_put(x, "x", dst_weights=left)
    fastps.barrier()
    share = 1 / (len(left) + 1)
    fastps.win_update("x", share, dict.fromkeys(left, share))
    found["value"] = [float(x.min()), float(x.max())]
    fastps.barrier()  # until then others may not have taken what the accumulate adds to
    with fastps.win_mutex("x", ranks=left):
        fastps.win_accumulate(x, "x", dst_weights=left)
    fastps.barrier()
    found["freed"] = fastps.win_free()
    new = np.full(5, float(rank))
    fastps.win_create(new, "new", zero_init=True)
    fastps.win_put(new, "new")
    fastps.barrier()
    fastps.win_update("new")
    found["mean"] = float(new[0])
    found["lost"] = lost
    fastps.barrier()
    fastps.shutdown()
    return found


def creates(*, deaths: dict[str, float], rounds: int) -> dict[str, Any]:
    """Create, use and free windows of one name while somebody dies; each call fails on nobody."""
    rank = begin(deaths)
    fastps.set_topology(topology.fully_connected_graph(fastps.size()))
    x, errors, slowest = np.full(9, float(rank)), [], 0.0
    for step in range(rounds):
        before = now()
        try:
            assert fastps.win_create(x, "x", zero_init=True), step
        except fastps.FastPSError as error:
            errors.append(f"{step}: create: {error}")
            break
        left = [one for one in fastps.out_neighbor_ranks() if one not in fastps.lost_ranks()]
        for one in left:
            try:
                fastps.win_put(x, "x", dst_weights=[one])
            except fastps.PeerLostError:
                assert str(one) in deaths
            except fastps.FastPSError as error:
                errors.append(f"{step}: put: {error}")
        try:
            assert fastps.win_free("x")
        except fastps.FastPSError as error:
            errors.append(f"{step}: free: {error}")
            break
        slowest = max(slowest, now() - before)
    fastps.shutdown()
    return {"errors": errors, "slowest": slowest}


def cut_apart(*, when: str, steps: int) -> dict[str, Any]:
    """Mix with all, where two workers that live do not reach each other."""
    fastps.init()
    fastps.set_topology(topology.fully_connected_graph(fastps.size()))
    connections, rank = current.current().connections, fastps.rank()
    if rank == 0 and when == "start":
        reach = connections.peer_links.reach

        def reach_some(peer: int) -> None:
            if peer == 1:
                raise TransportError("no route to it")
            reach(peer)

        connections.peer_links.reach = reach_some
    slowest = 0.0
    for step in range(steps):
        if rank == 0 and when == "later" and step == steps // 2:
            connections.exchange.lose(1)
        before = now()
        fastps.neighbor_allreduce(np.ones(9))
        slowest = max(slowest, now() - before)
        time.sleep(PAUSE_S)
    while not (lost := fastps.lost_ranks()):  # the scheduler says it
        time.sleep(PAUSE_S)
    fastps.barrier()
    works = fastps.win_create(np.ones(9), "x") and fastps.win_free("x")
    fastps.shutdown()
    return {"lost": lost, "slowest": slowest, "works": works}


def robust(*, deaths: dict[str, float]) -> dict[str, Any]:
    """Combine by rules until an honest neighbour is dead; worker 2 lies all the time."""
    rank = begin(deaths)
    fastps.set_topology(topology.fully_connected_graph(fastps.size()))
    x = np.full(9, 1e9 if rank == 2 else float(rank))
    rules = (fastps.TrimmedMean(1), fastps.AdaptiveClipping(0.34), fastps.SelfCentredClipping(1.0))
    taken = {"self_weight": 0.0, "src_weights": {1: 1.0}, "dst_weights": []}
    if rank == 1:
        taken |= {"src_weights": {}, "self_weight": 1.0, "dst_weights": [0, 2]}
    while True:
        lost = fastps.lost_ranks()
        found = [float(fastps.neighbor_allreduce(x, rule=rule)[0]) for rule in rules]
        found.append(float(fastps.neighbor_allreduce(x, **taken)[0]))
        fastps.barrier()
        if lost:
            break
    fastps.shutdown()
    return {"found": found}


def machines(*, deaths: dict[str, float]) -> dict[str, Any]:
    """Average inside machines and mix between them until somebody dies; go on without."""
    rank = begin(deaths)
    x = np.full(COUNT, float(rank))
    found: dict[str, Any] = {"text": ""}
    try:
        while True:
            fastps.hierarchical_neighbor_allreduce(x)
    except fastps.PeerLostError as error:
        found["text"] = str(error)
    while len(fastps.lost_ranks()) < len(deaths):
        time.sleep(PAUSE_S)
    fastps.barrier()
    found["mean"] = float(fastps.hierarchical_neighbor_allreduce(x).max())
    m, me = fastps.machine_size(), fastps.machine_rank()
    after, before = (me + 1) % m, (me - 1) % m
    moved = fastps.hierarchical_neighbor_allreduce(
        x, self_weight=0.25, src_machine_weights={before: 0.75}, dst_machine_weights=[after]
    )
    found["moved"] = float(moved.max())
    fastps.barrier()
    fastps.shutdown()
    return found


def held(*, deaths: dict[str, float], exchanges: int, deadline_s: float | None) -> dict[str, Any]:
    """Train what servers hold, in rounds and without, while one dies; count what came."""
    fastps.init()
    rank = fastps.rank()
    rounds, free = {"w": np.zeros(COUNT)}, {"w": np.zeros(COUNT)}
    local = fastps.LocalSGD(
        rounds, sync_every=1, outer_on="servers", deadline_s=deadline_s,
        rule="programs_gathered:total",
    )  # fmt: skip
    alone = fastps.AsyncLocalSGD(free, sync_every=1, alpha=1.0)
    bound = fastps.ServerParameters({"w": np.zeros(9)}, staleness=2)
    fastps.barrier()
    if str(rank) in deaths:
        die_after(deaths[str(rank)])
    mark("READY")
    slowest = 0.0
    for made in range(1 << 30 if deaths.get(str(rank)) else exchanges):
        while (
            made == exchanges - 2 and not fastps.lost_ranks()
        ):  # some of it comes after the death
            time.sleep(PAUSE_S)
        began = now()
        for arrays, steps in ((rounds, local), (free, alone)):
            arrays["w"] += 1000.0**rank
            steps.step()
        bound.push([np.ones(9)])
        slowest = max(slowest, now() - began)
        time.sleep(PAUSE_S)
    local.synchronize()
    fastps.barrier()
    alone.exchange()
    found = {"lost": fastps.lost_ranks(), "slowest": slowest, "rounds": set(rounds["w"].tolist()),
             "free": set(free["w"].tolist())}  # fmt: skip
    with contextlib.suppress(fastps.ConfigError):
        fastps.push_pull(np.zeros(3), "everybody's")
        raise AssertionError("what servers sum needs everybody")
    fastps.barrier()
    fastps.shutdown()
    return {word: list(one) if isinstance(one, set) else one for word, one in found.items()}
