# SPDX-License-Identifier: Apache-2.0
"""Train a classifier of handwritten digits with TensorFlow, on any number of workers.

fastps-run -np 2 python examples/tensorflow_digits.py

Each worker draws its share of every batch; gradients are averaged within the compiled step.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import fastps.tensorflow as fps


def begin(seed: int) -> list[tf.Variable]:
    """Make the weights of two layers."""
    draw = np.random.default_rng(seed)
    shapes = [(64, 128), (128,), (128, 10)]
    return [tf.Variable(draw.normal(0, 0.1, shape).astype(np.float32)) for shape in shapes]


def logits(weights: list[tf.Variable], images: tf.Tensor) -> tf.Tensor:
    """Score the ten digits for each image."""
    return tf.nn.relu(images @ weights[0] + weights[1]) @ weights[2]


def main() -> None:
    """Train, and tell how many of the images that were left out are read rightly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    fps.init()
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target
    kept = np.flatnonzero(np.arange(len(labels)) % 6)  # one in six is left out
    weights = begin(fps.rank())
    fps.broadcast_variables(weights)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with fps.DistributedGradientTape(tf.GradientTape()) as tape:
            scores = logits(weights, images)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            loss = tf.reduce_mean(loss)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.5 * gradient)
        return fps.push_pull(loss, "loss")

    draw = np.random.default_rng(0)
    for _ in range(arguments.steps):
        batch = draw.choice(kept, 128)[fps.rank() :: fps.size()]
        loss = step(tf.constant(images[batch]), tf.constant(labels[batch]))
    right = (logits(weights, images[::6]).numpy().argmax(1) == labels[::6]).mean()
    if fps.rank() == 0:
        print(f"loss {loss:.4f}, test accuracy {right:.3f}")
    fps.shutdown()


if __name__ == "__main__":
    main()
