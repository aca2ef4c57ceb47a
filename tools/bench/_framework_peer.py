# SPDX-License-Identifier: Apache-2.0
"""One process of a training in any framework; takes commands from frameworks.py, steps, answers.

Started with a framework's name, and with "local" where nobody averages. All train the same models
by plain SGD in their own usual way: PyTorch eagerly, TensorFlow in a tf.function, Keras by
train_on_batch(), JAX under jit, MXNet by Gluon. One thread computes. RIVALS are frameworks with
an exchange of their own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

BATCH = 16
RATE = 1e-3
# Shapes of the weights; each has a bias. wide: layer after layer; many: added to what goes past.
WIDTHS = {"wide": (2048, 6), "many": (32, 200)}

Step = Callable[[], None]
Weights = Callable[[], Sequence[Any]]


def arrays_of(model: str) -> list[np.ndarray]:
    """Make the weights, the same in all frameworks."""
    width, count = WIDTHS[model]
    draw = np.random.default_rng(0)
    found = []
    for _ in range(count):
        found += [draw.normal(0, width**-0.5, (width, width)), np.zeros(width)]
    return [array.astype(np.float32) for array in found]


def batch_of(model: str, rank: int) -> np.ndarray:
    """Draw a worker's batch."""
    draw = np.random.default_rng(1 + rank)
    return draw.normal(size=(BATCH, WIDTHS[model][0])).astype(np.float32)


def forward(model: str, weights: Sequence[Any], x: Any, relu: Callable[[Any], Any]) -> Any:
    """Compute a model's output in any framework."""
    for place in range(0, len(weights), 2):
        y = x @ weights[place] + weights[place + 1]
        x = relu(y) if model == "wide" else x + 0.05 * y
    return x


def with_torch(model: str, rank: int, face: Any) -> tuple[Step, Weights]:
    """Train in PyTorch."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    weights = [torch.nn.Parameter(torch.from_numpy(one)) for one in arrays_of(model)]
    optimizer = torch.optim.SGD(weights, lr=RATE)
    if face:
        named = [(f"{model}.{i}", one) for i, one in enumerate(weights)]
        optimizer = face.DistributedOptimizer(optimizer, named)
    x = torch.from_numpy(batch_of(model, rank))

    def step() -> None:
        optimizer.zero_grad()
        forward(model, weights, x, torch.relu).square().mean().backward()
        optimizer.step()

    return step, lambda: [one.detach().numpy() for one in weights]


def with_tensorflow(model: str, rank: int, face: Any) -> tuple[Step, Weights]:
    """Train in TensorFlow."""
    import tensorflow as tf  # noqa: PLC0415

    weights = [tf.Variable(one) for one in arrays_of(model)]
    x = tf.constant(batch_of(model, rank))

    @tf.function
    def step() -> None:
        plain = tf.GradientTape()
        with face.DistributedGradientTape(plain, prefix=model) if face else plain as tape:
            loss = tf.reduce_mean(tf.square(forward(model, weights, x, tf.nn.relu)))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(RATE * gradient)

    return step, lambda: [one.numpy() for one in weights]


def with_jax(model: str, rank: int, face: Any) -> tuple[Step, Weights]:
    """Train in JAX."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    import optax  # noqa: PLC0415

    optimizer = optax.sgd(RATE)
    if face:
        optimizer = face.distributed(optimizer, prefix=model)
    x = jnp.asarray(batch_of(model, rank))
    now = [jnp.asarray(one) for one in arrays_of(model)]
    state = optimizer.init(now)

    def run(weights: Any, state: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean(jnp.square(forward(model, weights, x, jax.nn.relu)))

        updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    compiled = jax.jit(run, donate_argnums=(0, 1))

    def step() -> None:
        nonlocal now, state
        now, state = compiled(now, state)
        jax.block_until_ready(now)

    return step, lambda: [np.asarray(one) for one in now]


def with_strategy(model: str, rank: int, face: Any) -> tuple[Step, Weights]:
    """Train in TensorFlow, whose own strategy averages over the processes."""
    import tensorflow as tf  # noqa: PLC0415

    strategy = _strategy()
    with strategy.scope():
        weights = [tf.Variable(one) for one in arrays_of(model)]
    x = tf.constant(batch_of(model, rank))

    def run() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(forward(model, weights, x, tf.nn.relu)))
        gradients = tape.gradient(loss, weights)
        context = tf.distribute.get_replica_context()
        means = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        for weight, mean in zip(weights, means, strict=True):
            # each replica has the same mean: nothing is left to be agreed on
            weight.assign_sub(RATE * mean)

    @tf.function
    def step() -> None:
        strategy.run(run)

    return step, lambda: [strategy.experimental_local_results(one)[0].numpy() for one in weights]


@functools.cache
def _strategy() -> Any:
    import tensorflow as tf  # noqa: PLC0415

    return tf.distribute.MultiWorkerMirroredStrategy()


def with_mxnet(model: str, rank: int, face: Any) -> tuple[Step, Weights]:
    """Train in MXNet by Gluon."""
    import mxnet as mx  # noqa: PLC0415

    net = _gluon(model)
    values = net.collect_params()
    if face:
        trainer = face.DistributedTrainer(values, "sgd", {"learning_rate": RATE}, prefix=model)
    else:
        trainer = mx.gluon.Trainer(values, "sgd", {"learning_rate": RATE}, kvstore=None)
    return _gluon_step(net, trainer, model, rank), lambda: _gluon_weights(net)


def with_mxnet_store(model: str, rank: int, face: Any) -> tuple[Step, Weights]:
    """Train in MXNet by Gluon, over MXNet's own servers."""
    import mxnet as mx  # noqa: PLC0415

    net = _gluon(model)
    settings = {"learning_rate": RATE, "rescale_grad": 1 / int(os.environ["WORLD_SIZE"])}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", settings, kvstore="dist_sync")
    return _gluon_step(net, trainer, model, rank), lambda: _gluon_weights(net)


def _gluon(model: str) -> Any:
    import mxnet as mx  # noqa: PLC0415

    width, count = WIDTHS[model]

    class Net(mx.gluon.nn.HybridBlock):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = [mx.gluon.nn.Dense(width, in_units=width) for _ in range(count)]
            for layer in self.layers:
                self.register_child(layer)

        def hybrid_forward(self, name_space: Any, x: Any) -> Any:
            for layer in self.layers:
                y = layer(x)
                x = name_space.relu(y) if model == "wide" else x + 0.05 * y
            return x

    net = Net()
    net.initialize()
    arrays = arrays_of(model)
    for layer, weight, bias in zip(net.layers, arrays[::2], arrays[1::2], strict=True):
        layer.weight.set_data(mx.nd.array(weight.T))
        layer.bias.set_data(mx.nd.array(bias))
    net.hybridize()
    return net


def _gluon_step(net: Any, trainer: Any, model: str, rank: int) -> Step:
    import mxnet as mx  # noqa: PLC0415

    x = mx.nd.array(batch_of(model, rank))

    def step() -> None:
        with mx.autograd.record():
            loss = net(x).square().mean()
        loss.backward()
        trainer.step(1)
        mx.nd.waitall()

    return step


def _gluon_weights(net: Any) -> list[np.ndarray]:
    return [one.data().asnumpy() for one in net.collect_params().values()]


def with_keras(model: str, rank: int, face: Any) -> tuple[Step, Weights]:
    """Train in Keras, as its back end does."""
    import keras  # noqa: PLC0415

    width, count = WIDTHS[model]
    x = layer = keras.Input((width,))
    for _ in range(count):
        y = keras.layers.Dense(width)(layer)
        layer = keras.ops.relu(y) if model == "wide" else layer + 0.05 * y
    net = keras.Model(x, layer)
    optimizer = keras.optimizers.SGD(RATE)
    if face:
        optimizer = face.DistributedOptimizer(optimizer, prefix=model)
    is_jax = keras.backend.backend() == "jax"
    net.compile(optimizer, loss="mse", jit_compile=is_jax)
    net.set_weights(arrays_of(model))
    batch = batch_of(model, rank)
    target = np.zeros_like(batch)
    return lambda: net.train_on_batch(batch, target), net.get_weights


SYSTEMS = {
    "torch": with_torch, "tensorflow": with_tensorflow, "jax": with_jax, "keras": with_keras,
    "mxnet": with_mxnet, "tensorflow-mwms": with_strategy, "mxnet-dist": with_mxnet_store,
}  # fmt: skip
RIVALS = ("tensorflow-mwms", "mxnet-dist")


def _face_of(name: str) -> Any:
    """Join the job, and give the framework's face."""
    import importlib  # noqa: PLC0415

    face = importlib.import_module(f"fastps.{name}")
    face.init()
    return face


def _mark_of(name: str) -> Callable[[], None] | None:
    """Give what marks the end of a step; None where the optimizer does."""
    import fastps  # noqa: PLC0415

    return None if name == "torch" else fastps.mark_step


def _one_thread(name: str) -> None:
    """Let one thread compute, where the environment does not say so."""
    framework = name.partition("-")[0]
    if framework in ("tensorflow", "keras") and os.environ.get("KERAS_BACKEND") in (
        None,
        "tensorflow",
    ):
        import tensorflow as tf  # noqa: PLC0415

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)


def time_of(step: Step, steps: int, mark: Callable[[], None] | None) -> list[float]:
    """Give the seconds of each step; mark: tells fastps that one has ended."""
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
        if mark is not None:
            mark()
    return seconds


class Exposure:
    """How much of its communication a framework waits for; of each model by itself."""

    def __init__(self) -> None:
        self._before = (0.0, 0.0)

    def take(self) -> float:
        """Give the share since the last call, of all that was under way; NaN without any."""
        import fastps  # noqa: PLC0415

        found = fastps.statistics()
        busy = found.get("communication_seconds", 0.0)
        waited = busy * found.get("exposed_share", 0.0)
        since = busy - self._before[0], waited - self._before[1]
        self._before = busy, waited
        return since[1] / since[0] if since[0] > 0 else float("nan")


def describe(weights: Sequence[np.ndarray]) -> dict[str, Any]:
    """Give a digest of the weights, their length, and how many there are."""
    hashes = hashlib.sha256(b"".join(one.tobytes() for one in weights))
    square = sum(float(np.square(one.astype(np.float64)).sum()) for one in weights)
    count = sum(one.size for one in weights)
    return {"digest": hashes.hexdigest(), "length": square**0.5, "parameters": count}


def main() -> int:
    """Obey the driver until it hangs up."""
    name, is_local = sys.argv[1], sys.argv[2:] == ["local"]
    _one_thread(name)
    face = None if is_local or name in RIVALS else _face_of(name)
    rank = face.rank() if face else int(os.environ["RANK"])
    mark = _mark_of(name) if face else None
    exposure = Exposure()
    host, _, port = os.environ["BENCH_DRIVER"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.settimeout(None)
        file = sock.makefile("rw", encoding="utf-8")
        trainings: dict[str, tuple[Step, Weights]] = {}

        def say(message: dict[str, Any]) -> None:
            file.write(json.dumps(message) + "\n")
            file.flush()

        say({"rank": rank})
        for line in file:
            command = json.loads(line)
            model = command["model"]
            if command["op"] == "forget":
                say({"known": trainings.pop(model, None) is not None})
                continue
            if model not in trainings:
                trainings[model] = SYSTEMS[name](model, rank, face)
            step, weights = trainings[model]
            if command["op"] == "time":
                say({"seconds": time_of(step, command["steps"], mark)})
            else:
                exposed = exposure.take() if face else float("nan")
                say(describe(weights()) | {"exposed": exposed})
    return 0


if __name__ == "__main__":
    sys.exit(main())
