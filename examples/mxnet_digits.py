# SPDX-License-Identifier: Apache-2.0
"""Train a classifier of handwritten digits with MXNet's Gluon, on any number of workers.

fastps-run -np 2 python examples/mxnet_digits.py

Each worker draws its share of every batch; gradients are averaged in MXNet's engine.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

import fastps.mxnet as fps

fps.compat()  # NumPy 1.24 and newer lack names that MXNet uses
import mxnet as mx  # noqa: E402
from mxnet import gluon  # noqa: E402


def make_net() -> gluon.HybridBlock:
    """Make two layers, whose input size shows with the first batch."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(128, activation="relu"), gluon.nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def main() -> None:
    """Train, and tell how many of the images that were left out are read rightly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    fps.init()
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target
    kept = np.flatnonzero(np.arange(len(labels)) % 6)  # one in six is left out
    mx.random.seed(1)
    net = make_net()
    trainer = fps.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 3e-3})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    draw = np.random.default_rng(0)
    for _ in range(arguments.steps):
        batch = draw.choice(kept, 128)[fps.rank() :: fps.size()]
        with mx.autograd.record():
            loss = loss_of(net(mx.nd.array(images[batch])), mx.nd.array(labels[batch]))
        loss.backward()
        trainer.step(len(batch))
    mean = fps.push_pull(loss.mean(), "loss").asscalar()
    scores = net(mx.nd.array(images[::6])).asnumpy()
    right = (scores.argmax(1) == labels[::6]).mean()
    if fps.rank() == 0:
        print(f"loss {mean:.4f}, test accuracy {right:.3f}")
    fps.shutdown()


if __name__ == "__main__":
    main()
