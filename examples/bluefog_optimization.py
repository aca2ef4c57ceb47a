# SPDX-License-Identifier: Apache-2.0
"""A script for BlueFog: the shape of its pytorch_optimization.py, two import lines changed.

Each worker has its own data. All together minimise a convex function by one of four recursions
over a graph. Diffusion ends near the optimum, with a bias; the others end at it.

fastps-run -np 4 -s 0 python examples/bluefog_optimization.py --method push_diging
"""

import argparse

import torch

import fastps.bluefog.torch as bf  # was: import bluefog.torch as bf
from fastps.bluefog.common import topology_util  # was: from bluefog.common import topology_util

parser = argparse.ArgumentParser(description="Decentralized convex optimization")
parser.add_argument("--max-iters", type=int, default=None)
parser.add_argument("--lr", type=float, default=None)
parser.add_argument("--topology", default="mesh", choices=["mesh", "expo2", "star", "ring"])
parser.add_argument("--task", default="logistic", choices=["logistic", "linear"])
parser.add_argument(
    "--method", default="exact_diffusion",
    choices=["diffusion", "exact_diffusion", "gradient_tracking", "push_diging"],
)  # fmt: skip
parser.add_argument("--seed", type=int, default=123417)
ROWS, COLUMNS, RHO = 20, 5, 1e-2
DOUBLE = torch.double


def data_of(task):
    """Draw what this worker knows: rows of X, and y that depends on them."""
    torch.manual_seed(args.seed * (bf.rank() + 1))
    X = torch.randn(ROWS, COLUMNS, dtype=DOUBLE)
    truth = torch.randn(COLUMNS, 1, dtype=DOUBLE)
    if task == "linear":
        return X, X.mm(truth) + 0.1 * torch.randn(ROWS, 1, dtype=DOUBLE)
    return X, 2.0 * (torch.rand(ROWS, 1, dtype=DOUBLE) < torch.sigmoid(X.mm(truth))) - 1.0


def gradient_at(w):
    """Give the gradient of this worker's function."""
    w = w.detach().clone().requires_grad_()
    if args.task == "linear":
        loss = 0.5 * (X.mm(w) - y).square().mean()
    else:
        loss = torch.nn.functional.softplus(-y * X.mm(w)).mean() + 0.5 * RHO * w.square().sum()
    loss.backward()
    return w.grad


def diffusion(w):
    for _ in range(args.max_iters):
        w = bf.neighbor_allreduce(w - args.lr * gradient_at(w), name="w")
    return w


def exact_diffusion(w):
    own, of_others = topology_util.GetRecvWeights(bf.load_topology(), bf.rank())
    lazy = {"self_weight": (own + 1) / 2,
            "src_weights": {rank: weight / 2 for rank, weight in of_others.items()}}  # fmt: skip
    psi_before = w.clone()
    for _ in range(args.max_iters):
        psi = w - args.lr * gradient_at(w)
        w = bf.neighbor_allreduce(psi + w - psi_before, name="w", **lazy)
        psi_before = psi
    return w


def gradient_tracking(w):
    before = gradient_at(w)
    q = before.clone()
    for _ in range(args.max_iters):
        mixed_w = bf.neighbor_allreduce_nonblocking(w, name="w")
        mixed_q = bf.neighbor_allreduce_nonblocking(q, name="q")
        w = bf.synchronize(mixed_w) - args.lr * q
        gradient = gradient_at(w)
        q = bf.synchronize(mixed_q) + gradient - before
        before = gradient
    return w


def push_diging(w):
    """Keep one vector of u, y and v in a window, of which shares are given away."""
    neighbors = bf.out_neighbor_ranks()
    before = gradient_at(w)
    all_in_one = torch.cat([w, before, torch.ones(1, 1, dtype=DOUBLE)]).contiguous()
    u, y, v = all_in_one[:COLUMNS], all_in_one[COLUMNS:-1], all_in_one[-1:]
    assert bf.win_create(all_in_one, name="w", zero_init=True)
    share = 1 / (2 * len(neighbors))
    for _ in range(args.max_iters):
        u.sub_(args.lr * y)
        bf.neighbor_win_accumulate(
            all_in_one, name="w", self_weight=0.5, dst_weights=dict.fromkeys(neighbors, share),
            require_mutex=True,
        )  # fmt: skip
        bf.barrier()
        bf.win_update_then_collect(name="w")
        bf.barrier()
        w = u / v
        gradient = gradient_at(w)
        y.add_(gradient - before)
        before = gradient
    bf.win_free(name="w")
    return w


METHODS = {  # the recursion, its step and its number of them
    "diffusion": (diffusion, 0.1, 400), "exact_diffusion": (exact_diffusion, 0.5, 800),
    "gradient_tracking": (gradient_tracking, 0.2, 800), "push_diging": (push_diging, 0.2, 800),
}  # fmt: skip
args = parser.parse_args()
method, lr, iterations = METHODS[args.method]
args.lr, args.max_iters = args.lr or lr, args.max_iters or iterations
bf.init()
torch.set_num_threads(1)
graph = {
    "mesh": topology_util.MeshGrid2DGraph, "expo2": topology_util.ExponentialGraph,
    "star": topology_util.StarGraph, "ring": topology_util.RingGraph,
}[args.topology]  # fmt: skip
bf.set_topology(graph(bf.size()), is_weighted=True)
X, y = data_of(args.task)
w = method(torch.zeros(COLUMNS, 1, dtype=DOUBLE))
first = bf.allreduce(gradient_at(torch.zeros_like(w)), name="gradient").norm().item()
middle = bf.allreduce(w, name="middle")
apart = (w - middle).norm().item() / middle.norm().item()
norm = bf.allreduce(gradient_at(w), name="gradient").norm().item() / first
print(f"[{args.method}] rank {bf.rank()}: gradient {norm:.3g}, apart {apart:.3g}", flush=True)
is_exact = args.method != "diffusion"
assert (norm < 1e-6 and apart < 1e-6) if is_exact else 1e-6 < apart < 0.5
bf.barrier()
bf.shutdown()
