# SPDX-License-Identifier: Apache-2.0
"""Keras 3 on each back end that is here, and the same bits from all frameworks in one job."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("Keras is not here: make test-frameworks", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import fork_server  # noqa: E402
from harness import JobResult, run_example, run_workers  # noqa: E402

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "FASTPS_SHARED_MEMORY": "1"}
BACKENDS = [name for name in ("tensorflow", "jax", "torch") if importlib.util.find_spec(name)]
fork_server.EXPECTED.update(BACKENDS)


def run(script: str, folder: Path, **environ: Any) -> JobResult:
    result = run_workers(textwrap.dedent(script), folder, environ=QUIET | environ)
    return result.check()


FIT = """
    import numpy as np, keras, pytest
    import fastps.keras as fps
    fps.init()
    rank = fps.rank()
    def model_of(seed, optimizer):
        keras.utils.set_random_seed(seed)
        layers = [keras.Input((8,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(100)]
        model = keras.Sequential(layers)
        model.compile(optimizer, loss="mse", jit_compile=keras.backend.backend() == "jax")
        return model
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("f4")
    y = np.repeat(x.sum(1, keepdims=True), 100, 1)
    rates = []
    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))
    def fit(model, part, parts, *callbacks):
        return model.fit(x[part::parts], y[part::parts], batch_size=16 // parts, epochs=2,
                         shuffle=False, verbose=0, callbacks=list(callbacks))
    alone = model_of(0, keras.optimizers.SGD(0.01, momentum=0.9))
    fit(alone, 0, 1)
    model = model_of(rank, fps.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)))
    history = fit(model, rank, 2, fps.callbacks.BroadcastGlobalVariablesCallback(0),
                  fps.callbacks.MetricAverageCallback())
    for one, two in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)
    report([one.tobytes().hex() for one in model.get_weights()])
    report(history.history["loss"])
    warm = fps.callbacks.LearningRateWarmupCallback(warmup_epochs=2)
    fit(model, rank, 2, warm, Rates())
    assert len(rates) == 8 and rates == sorted(rates) and rates[0] < 0.0065
    assert rates[-1] == pytest.approx(0.01)
    seen = []  # the rate and the momentum of each step
    eager = model_of(0, fps.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.5),
                                                 prefix="eager"))
    eager.compile(eager.optimizer, loss="mse", run_eagerly=True, jit_compile=False)
    optimizer, apply = eager.optimizer, eager.optimizer.apply
    def watched(*args, **options):
        seen.append((float(optimizer.learning_rate), float(optimizer.momentum)))
        return apply(*args, **options)
    optimizer.apply = watched
    fit(eager, rank, 2, fps.callbacks.LearningRateWarmupCallback(warmup_epochs=2))
    before = 0.01
    assert len(seen) == 8
    for rate, momentum in seen:  # corrected for the first step of a new rate
        assert momentum == pytest.approx(0.5 * rate / before, rel=1e-4), seen
        before = rate
    assert optimizer.momentum == 0.5
    path = f"{__file__}.{rank}.keras"
    model.save(path)
    again = fps.load_model(path)
    assert type(again.optimizer).__name__ == "SGD"
    assert not hasattr(keras.models.load_model(path).optimizer, "is_distributed")  # without us
    fit(again, rank, 2)
    resumed = fps.load_model(path) if rank == 0 else model_of(  # without momenta so far
        1, fps.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)))
    resumed.fit(x, y, epochs=1, steps_per_epoch=1, verbose=0,
                callbacks=[fps.callbacks.BroadcastGlobalVariablesCallback(0)])
    class Own(keras.optimizers.SGD):
        pass
    model_of(0, fps.DistributedOptimizer(Own(0.1), prefix="own")).save(path)
    found = fps.load_model(path, custom_optimizers=[Own]).optimizer
    assert isinstance(found, Own)
    assert type(found) is not Own
    report([one.tobytes().hex() for one in again.get_weights()])
    with pytest.raises(TypeError, match="Keras optimizer"):
        fps.DistributedOptimizer(3)
    with pytest.raises(ValueError, match="already"):
        fps.DistributedOptimizer(again.optimizer)
"""


WAYS = """
    import numpy as np, keras, pytest
    import fastps.keras as fps
    fps.init()
    rank = fps.rank()
    for passes in (1, 2):
        for asynchronous in (False, True):
            weight = keras.Variable(np.full((3,), rank, "f4"))
            fps.broadcast_variables([weight], 1)
            optimizer = fps.DistributedOptimizer(keras.optimizers.SGD(0.5), prefix=f"k{passes}",
                backward_passes_per_step=passes, asynchronous=asynchronous, staleness=0)
            for gradient in (1.0, 3.0):
                optimizer.apply([keras.ops.full((3,), gradient + 4 * rank)], [weight])
            each = np.array([1, 3, 5, 7]) * 0.5 * (1 if asynchronous else 0.5) / passes
            found = keras.ops.convert_to_numpy(weight.value)
            assert found.tolist() == [1 - each.sum()] * 3, (passes, asynchronous, found)
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        fps.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)
    x = np.random.default_rng(rank).normal(size=(64, 8)).astype("f4")
    keras.utils.set_random_seed(rank)
    both = fps.add_process_set([0, 1])
    for way in ({"asynchronous": True}, {"compression": fps.Compression.fp16},
                {"process_set": both}, {"backward_passes_per_step": 2}):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        optimizer = fps.DistributedOptimizer(keras.optimizers.SGD(0.05), prefix=str(list(way)),
                                             **way)
        model.compile(optimizer, loss="mse", jit_compile=keras.backend.backend() == "jax")
        fps.broadcast_variables(model.variables, prefix=str(list(way)) + " begin")
        loss = model.fit(x, x.sum(1), batch_size=8, epochs=4, verbose=0).history["loss"]
        assert loss[-1] < 0.2 * loss[0], loss
    weights = [one.tolist() for one in model.get_weights()]
    report(weights)  # in step, so the same
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_passes_and_paces(tmp_path, backend):
    one, two = run(WAYS, tmp_path, KERAS_BACKEND=backend, FASTPS_SHARED_MEMORY="0").reports
    assert one == two


VALUES = """
    import numpy as np, keras, pytest
    import fastps.keras as fps
    from fastps.errors import MismatchError
    fps.init()
    rank = fps.rank()
    tensor = keras.ops.full((2, 2), 1.0 + rank)
    assert fps.allreduce(tensor).tolist() == [[1.5, 1.5]] * 2
    assert fps.allreduce(3 + rank, average=False) == 7
    assert fps.allreduce(rank, "max", op=fps.Max, postscale_factor=2.0) == 2
    assert fps.allgather(tensor[: 1 + rank]).tolist() == [[1, 1], [2, 2], [2, 2]]
    assert fps.broadcast(tensor, 1).tolist() == [[2, 2]] * 2
    assert fps.broadcast(rank, 1) == 1
    assert fps.reducescatter(tensor, op=fps.Sum).tolist() == [[3, 3]]
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        fps.broadcast_global_variables(0)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    fps.DistributedOptimizer(scaled, compression=fps.Compression.onebit())
    with pytest.raises(ValueError, match="LossScaleOptimizer would divide"):
        fps.DistributedOptimizer(scaled, compression={"compressor": "onebit"})
    drop = keras.layers.Dropout(0.5, seed=5 + rank)
    before = keras.ops.convert_to_numpy(drop.seed_generator.state.value).tolist()
    fps.broadcast_variables(drop.variables, prefix="drop")
    assert keras.ops.convert_to_numpy(drop.seed_generator.state.value).tolist() == before
    metrics = fps.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0 + rank, "note": [rank]}
    metrics.on_epoch_end(0, logs)
    assert logs == {"loss": 1.5, "note": [rank]}
    logs = {"loss": 1.0, ("val_loss" if rank else "accuracy"): 2.0}
    with pytest.raises(MismatchError, match="epoch 1 .*worker 0 .*accuracy.*worker 1 .*val_"):
        metrics.on_epoch_end(1, logs)
    assert fps.cross_size() == 1 and fps.is_homogeneous() and not fps.gloo_built()
    fps.shutdown()
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_names_of_horovod(tmp_path, backend):
    run(VALUES, tmp_path, KERAS_BACKEND=backend)


LIVES = """
    import os
    import numpy as np, keras, pytest
    import fastps.keras as fps
    fps.init()
    rank, life = fps.rank(), os.environ["LIFE"]
    keras.utils.set_random_seed(10 * int(life) + rank)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("f4")
    with pytest.raises(ValueError, match="no variables yet"):
        fps.elastic.KerasState(keras.Sequential([keras.layers.Dense(3)]))
    optimizer = fps.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, loss="mse", jit_compile=keras.backend.backend() == "jax")
    state = fps.elastic.KerasState(model, batch=0, epoch=0)
    resets, seen = [], []
    state.register_reset_callbacks([lambda: resets.append(1)])
    class Seen(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(((state.epoch, state.batch), values()))
            if life == "1" and len(seen) == 6:
                raise KeyboardInterrupt
    def values():
        state.save()
        return [one.tobytes().hex() for name in ("model", "optimizer")
                for one in state._saved[name].arrays]
    @fps.elastic.run
    def train(state):
        begun = values()
        fit = dict(batch_size=8, epochs=3 - state.epoch, verbose=0, shuffle=False)
        model.fit(x, x[:, :3], **fit, callbacks=[
            fps.elastic.UpdateBatchStateCallback(state),
            fps.elastic.UpdateEpochStateCallback(state),
            fps.elastic.CommitStateCallback(state, batches_per_commit=2), Seen()])
        return begun
    if life == "1":
        with pytest.raises(KeyboardInterrupt):
            train(state)
        assert [one for one, _ in seen] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
        report([(state.epoch, state.batch), seen[-1][1]])
    else:
        begun = train(state)
        report([(1, 1), begun])
        assert state.epoch == 3 and len(seen) == 8
    assert resets == ([] if life == "1" else [1])
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_life_goes_on_from_the_last_commit(tmp_path, backend):
    where = {"KERAS_BACKEND": backend, "FASTPS_COMMIT_DIR": str(tmp_path / "commits")}
    first = run(LIVES, tmp_path, LIFE="1", **where).reports
    both = run(LIVES, tmp_path, LIFE="2", **where).reports  # behind what the first reported
    assert both == tuple((*one, *one) for one in first)
    assert first[0] == first[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_reads_digits(backend):
    result = run_example("examples/keras_digits.py", environ=QUIET | {"KERAS_BACKEND": backend})
    assert float(result.stdout.split()[-1]) > 0.9


@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_is_the_same_on_all_workers(tmp_path, backend):
    one, two = run(FIT, tmp_path, KERAS_BACKEND=backend).reports
    assert len(one) == 3
    assert one == two


ALIKE = """
    import ml_dtypes, numpy as np, jax, tensorflow as tf, torch
    import fastps, fastps.jax, fastps.tensorflow, fastps.torch
    fastps.init()
    rank = fastps.rank()
    for dtype in ("float32", "float16", "bfloat16", "int32"):
        for shape in ((), (0,), (1000, 41)):
            value = np.asarray(np.random.default_rng(rank).normal(size=shape) * 100)
            value = np.asarray(value.astype(dtype))
            name = f"{dtype}{shape}"
            wanted = fastps.push_pull(value, name)
            bits = "i4" if dtype.endswith("32") else "i2"
            pair = torch.from_numpy(value.view(bits).copy()).view(getattr(torch, dtype))
            found = {
                "jax": np.asarray(fastps.jax.push_pull(value, name)),
                "jit": np.asarray(jax.jit(lambda x: fastps.jax.push_pull(x, name))(value)),
                "tensorflow": fastps.tensorflow.push_pull(tf.constant(value), name).numpy(),
                "function": tf.function(lambda x: fastps.tensorflow.push_pull(x, name))(
                    tf.constant(value)).numpy(),
                "torch": fastps.torch.push_pull(pair, name=name).view(
                    getattr(torch, "int" + str(int(bits[1]) * 8))).numpy(),
            }
            for who, array in found.items():
                assert np.asarray(array).tobytes() == wanted.tobytes(), (who, name)
    report("alike")
"""


@pytest.mark.skipif(len(BACKENDS) < 3, reason="not all frameworks are here")
def test_all_frameworks_give_the_bits_of_numpy(tmp_path):
    assert run(ALIKE, tmp_path).reports == (("alike",), ("alike",))
