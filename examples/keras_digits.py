# SPDX-License-Identifier: Apache-2.0
"""Train a classifier of handwritten digits with model.fit(), on any number of workers.

KERAS_BACKEND=jax fastps-run -np 2 python examples/keras_digits.py

Each worker has its share of the images. The learning rate is multiplied by the number of workers,
and warms up over the first epochs. Metrics are those of all workers; worker 0 prints and saves.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import fastps.keras as fps


def main() -> None:
    """Train, and tell how many of the images that were left out are read rightly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", help="save the model to this file, *.keras")
    arguments = parser.parse_args()
    fps.init()
    keras.utils.set_random_seed(arguments.seed)
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.SGD(0.05 * fps.size(), momentum=0.9)
    model.compile(
        fps.DistributedOptimizer(optimizer),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend() == "jax",
    )
    left_out = slice(None, None, 6)
    kept = np.delete(np.arange(len(labels)), left_out)
    mine = kept[fps.rank() : len(kept) // fps.size() * fps.size() : fps.size()]
    model.fit(
        images[mine],
        labels[mine],
        batch_size=32,
        epochs=arguments.epochs,
        verbose=2 if fps.rank() == 0 else 0,
        callbacks=[
            fps.callbacks.BroadcastGlobalVariablesCallback(0),
            fps.callbacks.MetricAverageCallback(),
            fps.callbacks.LearningRateWarmupCallback(warmup_epochs=3),
        ],
    )
    guesses = model.predict(images[left_out], verbose=0).argmax(1)
    right = (guesses == labels[left_out]).mean()
    if fps.rank() == 0:
        if arguments.save:
            model.save(arguments.save)
        print(f"test accuracy {right:.3f}")
    fps.shutdown()


if __name__ == "__main__":
    main()
