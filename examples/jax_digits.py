# SPDX-License-Identifier: Apache-2.0
"""Train a classifier of handwritten digits with JAX and optax, on any number of workers.

fastps-run -np 2 python examples/jax_digits.py

Each worker draws its share of every batch; gradients are averaged within the compiled step.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import fastps.jax as fps


def begin(seed: int) -> dict[str, jax.Array]:
    """Make the weights of two layers."""
    one, two = jax.random.split(jax.random.key(seed))
    return {
        "hidden": jax.random.normal(one, (64, 128)) / 8,
        "bias": jnp.zeros(128),
        "out": jax.random.normal(two, (128, 10)) / 11,
    }


def logits(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Score the ten digits for each image."""
    return jax.nn.relu(images @ params["hidden"] + params["bias"]) @ params["out"]


def loss_of(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Give the mean cross entropy."""
    scores = logits(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def main() -> None:
    """Train, and tell how many of the images that were left out are read rightly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    fps.init()
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target
    kept = np.flatnonzero(np.arange(len(labels)) % 6)  # one in six is left out
    params = fps.broadcast_parameters(begin(fps.rank()))
    optimizer = fps.distributed(optax.adam(3e-3))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, images, labels):
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, fps.push_pull(loss, "loss")

    draw = np.random.default_rng(0)
    for _ in range(arguments.steps):
        batch = draw.choice(kept, 128)[fps.rank() :: fps.size()]
        params, state, loss = step(params, state, images[batch], labels[batch])
    right = (logits(params, images[::6]).argmax(1) == labels[::6]).mean()
    if fps.rank() == 0:
        print(f"loss {loss:.4f}, test accuracy {right:.3f}")
    fps.shutdown()


if __name__ == "__main__":
    main()
