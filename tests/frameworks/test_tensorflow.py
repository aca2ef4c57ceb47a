# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow plugin in real jobs, each of many checks; the values are NumPy's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not here: make test-frameworks", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import fork_server  # noqa: E402
from harness import JobResult, clean_environ, run_example, run_workers  # noqa: E402

HEAD = """
import numpy as np, pytest
import tensorflow as tf
import fastps.tensorflow as fps
from fastps.frameworks.tensorflow.calls import is_native
fps.init()
rank = fps.rank()
def same(found, wanted):
    found, wanted = [np.asarray(one.numpy() if hasattr(one, "numpy") else one)
                     for one in (found, wanted)]
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found, wanted)
    assert found.tobytes() == wanted.tobytes(), (found, wanted)
"""
fork_server.EXPECTED.add("tensorflow")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "FASTPS_SHARED_MEMORY": "1"}


def run(script: str, folder: Path, **options: Any) -> JobResult:
    environ = QUIET | options.pop("environ", {})
    return run_workers(HEAD + textwrap.dedent(script), folder, environ=environ, **options).check()


OPERATIONS = """
    for dtype in "float32 float16 bfloat16 int8 int32 uint8 uint16".split():
        for shape in [(), (0,), (3, 5), (40_001,)]:
            x = tf.cast(tf.fill(shape, 3 + rank), dtype)
            half = tf.cast(tf.fill(shape, 3.5 if "float" in dtype else 3), dtype)
            name = f"{dtype}{shape}"
            same(fps.push_pull(x, name), half)
            graph = tf.function(lambda x: fps.push_pull(x, name, average=False))
            same(graph(x), tf.cast(tf.fill(shape, 7), dtype))
    for wrap in (lambda f: f, tf.function):
        run = wrap(lambda x: fps.allreduce(x, "max", op=fps.Max))
        same(run(tf.range(3) * (1 - 2 * rank)), np.array([0, 1, 2], "i4"))
        same(wrap(lambda x: fps.broadcast(x, 1, name="b"))(tf.fill((2, 2), rank)),
             np.full((2, 2), 1, "i4"))
        for dtype in (tf.float32, tf.bfloat16):
            same(wrap(lambda x: fps.allgather(x, f"ag {dtype}"))(tf.cast(tf.fill((rank + 1, 2),
                 rank), dtype)), tf.cast(tf.constant([[0, 0], [1, 1], [1, 1]]), dtype))
        same(wrap(lambda x: fps.reducescatter(x, "rs", op=fps.Sum))(tf.range(4) + rank),
             np.array([[1, 3], [5, 7]], "i4")[rank])
        same(wrap(lambda x: fps.alltoall(x, name="aa"))(tf.range(2) + 10 * rank),
             np.array([rank, 10 + rank], "i4"))
        found, counts = wrap(lambda x: fps.alltoall(x, [1, 2], name="as"))(tf.range(3) + 10 * rank)
        same(found, np.array([[0, 10], [1, 2, 11, 12]][rank], "i4"))
        same(counts, np.array([[1, 1], [2, 2]][rank]))
        x = tf.Variable(tf.range(6.0) * (rank + 1))
        def square(x):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(fps.push_pull(x, "g") ** 2)
            return tape.gradient(y, x)
        same(wrap(square)(x), np.arange(6, dtype="f4") * 3)
        deep = tf.reshape(tf.range(2.0) + rank, (2, *[1] * 17))  # more than our operation takes
        same(wrap(lambda x: fps.push_pull(x, "deep"))(deep),
             np.array([0.5, 1.5], "f4").reshape(deep.shape))
        slices = tf.IndexedSlices(tf.fill((1, 2), 2.0 + rank), tf.constant([rank]),
                                  tf.constant([4, 2]))
        found = wrap(lambda v, i: fps.push_pull(tf.IndexedSlices(v, i, tf.constant([4, 2])), "s"))(
            slices.values, slices.indices)
        same(found.values, np.array([[1, 1], [1.5, 1.5]], "f4"))
        same(found.indices, np.array([0, 1], "i4"))
    same(fps.push_pull(slices, "dense", average=False, sparse_as_dense=True),
         np.array([[2, 2], [3, 3], [0, 0], [0, 0]], "f4"))
    variables = [tf.Variable(tf.cast(tf.fill((3,), rank), kind)) for kind in
                 (tf.float32, tf.bfloat16, tf.int64)]
    fps.broadcast_variables(variables, 1)
    for variable in variables:
        same(variable, tf.cast(tf.ones(3), variable.dtype))
    other = tf.Variable(tf.fill((2, 2), rank))  # of an optimizer, as Horovod's programs have it
    fps.broadcast_variables([other], 1)
    same(other, np.ones((2, 2), "i4"))
    some = fps.add_process_set([1])
    if rank == 1:
        same(fps.push_pull(tf.ones(3), "alone", process_set=some), np.ones(3, "f4"))
    assert fps.broadcast_object({"a": rank}) == {"a": 0}
    assert is_native()
    with pytest.raises(ValueError, match="average is True or False"):
        fps.push_pull(np.ones(3, "f4"), "x", average=fps.Sum)
    with pytest.raises(ValueError, match="needs a name"):
        fps.push_pull(tf.ones(3), "")
    with pytest.raises(Exception, match="MismatchError.*'differ'|'differ'"):
        tf.function(lambda x: fps.push_pull(x, "differ"))(tf.ones(3 + rank))
    from fastps.frameworks.tensorflow import calls, sums  # where TensorFlow lacks our operation
    calls.is_native = sums.is_native = lambda: False
    for dtype in (tf.float32, tf.bfloat16):
        x = tf.cast(tf.fill((2, 3), 1 + rank), dtype)
        same(tf.function(lambda x: fps.push_pull(x, f"back {dtype}"))(x),
             tf.cast(tf.fill((2, 3), 1.5), dtype))
        same(tf.function(lambda x: fps.allgather(x, f"rows back {dtype}"))(x),
             tf.cast(tf.constant([[1] * 3] * 2 + [[2] * 3] * 2), dtype))
"""


def test_operations_are_those_of_numpy(tmp_path):
    run(OPERATIONS, tmp_path)


TRAINING = """
    def begin(seed):
        draw = np.random.default_rng(seed)
        shapes = [(8, 300), (300,), (300, 200)]
        return [tf.Variable(draw.normal(size=shape).astype("f4")) for shape in shapes]
    def batch(step, part, parts):
        x = np.random.default_rng(step).normal(size=(8, 8)).astype("f4")
        y = np.repeat(x.sum(1, keepdims=True), 200, 1)
        return x[part::parts], y[part::parts]
    def train(tape_of, weights, part, parts, wrap):
        def step(x, y):
            with tape_of() as tape:
                h = tf.tanh(x @ weights[0] + weights[1])
                loss = tf.reduce_mean((h @ weights[2] - y) ** 2)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
        step = wrap(step)
        for number in range(5):
            step(*batch(number, part, parts))
    alone = begin(0)
    train(tf.GradientTape, alone, 0, 1, tf.function)
    for kind in (fps.Compression.none, fps.Compression.fp16, fps.Compression.bf16):
        for x in (tf.constant([0.5, 3.0]), tf.constant([0.5, 3.0], tf.float64), tf.constant([7])):
            sent, context = kind.compress(x)
            is_small = kind is not fps.Compression.none and x.dtype.is_floating
            assert (sent.dtype.size == 2) == is_small
            same(kind.decompress(sent, context), x)
    ways = ({}, {"bucket_bytes": 0}, {"compression": fps.Compression.fp16},
            {"compression": fps.Compression.none})
    for place, way in enumerate(ways):
        for wrap in (lambda f: f, tf.function):
            weights = begin(rank)
            fps.broadcast_variables(weights)
            def tape_of():
                return fps.DistributedGradientTape(tf.GradientTape(), prefix=f"way {place}", **way)
            train(tape_of, weights, rank, 2, wrap)
            for one, two in zip(weights, alone, strict=True):
                np.testing.assert_allclose(one, two, rtol=0.02, atol=0.02)
            report([weight.numpy().tobytes().hex() for weight in weights])
"""


GRADIENTS = """
    def back(f, x):  # the gradient of what f gives, weighted by 1, 2, 3...
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
            weights = tf.reshape(tf.range(1.0, 1.0 + tf.cast(tf.size(y), tf.float32)), tf.shape(y))
            loss = tf.reduce_sum(y * weights * (rank + 1))
        return tape.gradient(loss, x)
    for wrap in (lambda f: f, tf.function):
        x = tf.fill((rank + 1, 2), 1.0)  # gathered: three rows; ranks weigh them by 1 and 2
        same(wrap(lambda x: back(lambda x: fps.allgather(x, "ag"), x))(x),
             np.arange(1, 7, dtype="f4").reshape(3, 2)[rank : 1 + 2 * rank] * np.float32(1.5))
        x = tf.fill((2, 2), 1.0)
        same(wrap(lambda x: back(lambda x: fps.broadcast(x, 1, name="b"), x))(x),
             np.arange(1, 5, dtype="f4").reshape(2, 2) * np.float32(1.5 * rank))
        whole = np.array([[1, 2], [2, 4]], "f4")  # what each rank's row is weighed by
        same(wrap(lambda x: back(lambda x: fps.reducescatter(x, "rs", op=fps.Sum), x))(x),
             2 * whole)
        same(wrap(lambda x: back(lambda x: fps.reducescatter(x, "rm"), x))(x), whole)
        x = tf.fill((3, 1), 1.0)  # one row goes to rank 0, two to rank 1
        same(wrap(lambda x: back(lambda x: fps.alltoall(x, [1, 2], name="as")[0], x))(x),
             np.array([[[1], [2], [4]], [[2], [6], [8]]], "f4")[rank])
        x = tf.fill((2, 1), 1.0)
        same(wrap(lambda x: back(lambda x: fps.alltoall(x, name="aa"), x))(x),
             np.array([[[1], [2]], [[2], [4]]], "f4")[rank])
"""


def test_operations_have_gradients(tmp_path):
    run(GRADIENTS, tmp_path)


OPTIMIZERS = """
    for passes in (1, 2):
        for asynchronous in (False, True):
            weight = tf.Variable(tf.fill((3,), float(rank)))
            fps.broadcast_variables([weight], 1)
            optimizer = fps.DistributedOptimizer(tf.keras.optimizers.SGD(0.5), prefix=f"k{passes}",
                backward_passes_per_step=passes, asynchronous=asynchronous, staleness=0)
            step = tf.function(lambda g: optimizer.apply_gradients([(g, weight)]))
            for gradient in (1.0, 3.0):
                step(tf.fill((3,), gradient + 4 * rank))
            each = np.array([1, 3, 5, 7]) * 0.5 * (1 if asynchronous else 0.5) / passes
            same(weight, np.full(3, 1 - each.sum(), "f4"))
    with pytest.raises(TypeError, match="legacy are Keras 2's"):
        fps.DistributedOptimizer(3)
    old = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    with pytest.raises(ValueError, match="tf.keras.optimizers"):
        fps.DistributedOptimizer(old, backward_passes_per_step=2)
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        fps.broadcast_global_variables(0)
    v1 = tf.compat.v1
    with tf.Graph().as_default():  # as programs of TensorFlow 1
        w = v1.get_variable("w", initializer=tf.fill((2, 300), float(rank)))
        rows = v1.get_variable("rows", initializer=tf.fill((4, 2), float(rank)))
        half = v1.get_variable("half", initializer=tf.cast(tf.fill((2,), rank), tf.bfloat16))
        step = v1.train.get_or_create_global_step()
        x = v1.placeholder(tf.float32, (None, 2))
        loss = tf.reduce_sum(x @ w) + 4 * tf.reduce_sum(tf.gather(rows, [rank, 3]))
        plain = v1.train.MomentumOptimizer(0.5, 0.9)
        optimizer = fps.DistributedOptimizer(plain, prefix="session")
        train = optimizer.minimize(loss, global_step=step, var_list=[w, rows])
        assert optimizer.get_slot(w, "momentum") is not None and optimizer.variables()
        hook = fps.BroadcastGlobalVariablesHook(1)
        options = v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
        with v1.train.MonitoredTrainingSession(hooks=[hook], config=options) as sess:
            same(sess.run(half).astype("f4"), np.ones(2, "f4"))
            same(sess.run(w), np.ones((2, 300), "f4"))
            sess.run(train, {x: np.full((1, 2), 1.0 + rank)})
            same(sess.run(w), np.full((2, 300), 1 - 0.5 * 1.5, "f4"))
            wanted = 1 - 0.5 * np.array([2, 2, 0, 4], "f4")
            same(sess.run(rows), np.repeat(wanted[:, None], 2, 1))
            assert sess.run(step) == 1
"""


def test_optimizers_of_keras_and_of_sessions(tmp_path):
    run(OPTIMIZERS, tmp_path, environ={"FASTPS_SHARED_MEMORY": "0"})  # servers hold some


SESSIONS = """
    v1, order = tf.compat.v1, list(range(12))
    makers = {
        "average": lambda x, name: fps.push_pull(x, name),
        "max": lambda x, name: fps.allreduce(x, name, op=fps.Max),
        "half": lambda x, name: fps.allreduce(tf.cast(x, tf.bfloat16), name, op=fps.Min),
        "allgather": lambda x, name: fps.allgather(x[: 1 + rank], name),
        "broadcast": lambda x, name: fps.broadcast(x, 1, name=name),
        "reducescatter": lambda x, name: fps.reducescatter(x, name, op=fps.Sum),
        "alltoall": lambda x, name: fps.alltoall(x, name=name),
        "sparse": lambda x, name: fps.push_pull(
            tf.IndexedSlices(x[:1], tf.constant([rank]), tf.constant([4, 3])), name).values,
    }
    def wanted(kind, i):
        both = [np.full((4, 3), i + of, "f4") for of in range(2)]
        return {
            "average": lambda: (both[0] + both[1]) / 2,
            "max": lambda: both[1],
            "half": lambda: both[0],
            "allgather": lambda: np.concatenate([both[0][:1], both[1][:2]]),
            "broadcast": lambda: both[1],
            "reducescatter": lambda: (both[0] + both[1])[:2],
            "alltoall": lambda: np.concatenate([both[0][:2], both[1][:2]]),
            "sparse": lambda: np.concatenate([both[0][:1], both[1][:1]]) / 2,
        }[kind]()
    for threads in (1, 2):
        for kind, make in makers.items():
            with tf.Graph().as_default():  # each worker's threads take them as they like
                mine = order[::-1] if rank else order
                shape = (None, 3) if kind == "max" else (4, 3)
                given = {i: tf.fill((4, 3), float(i + rank)) for i in mine}
                made = {i: make(v1.placeholder_with_default(given[i], shape),
                                f"{kind} {i}") for i in mine}
                options = v1.ConfigProto(inter_op_parallelism_threads=threads,
                                         intra_op_parallelism_threads=1)
                with v1.Session(config=options) as session:
                    for _ in range(3):
                        for i, found in zip(mine, session.run([made[i] for i in mine])):
                            np.testing.assert_array_equal(found.astype("f4"), wanted(kind, i))
    with tf.Graph().as_default():  # all kinds at once, and an error of one of them
        made = [make(tf.fill((4, 3), float(rank)), f"all {kind}") for kind, make in makers.items()]
        wrong = fps.allreduce(tf.ones(3 + rank), "differ", op=fps.Max)
        with v1.Session() as session:
            for kind, found in zip(makers, session.run(made)):
                np.testing.assert_array_equal(found.astype("f4"), wanted(kind, 0))
            with pytest.raises(tf.errors.OpError, match="MismatchError"):
                session.run([wrong, *made])
    fps.barrier()
"""


def test_independent_operations_of_a_session_do_not_wait_for_each_other(tmp_path):
    run(SESSIONS, tmp_path)


NAMELESS = """
    x = tf.reshape(tf.range(8.0), (4, 2)) * (rank + 1)
    whole = np.arange(8, dtype="f4").reshape(4, 2)
    whole_number = tf.constant([2, 5]) * (rank + 1)
    def everything():
        yield fps.allreduce(x), 1.5 * whole
        yield fps.allreduce(x, average=False), 3 * whole
        yield fps.allreduce(x, op=fps.Sum, prescale_factor=0.5, postscale_factor=4.0), 6 * whole
        yield (fps.allreduce(whole_number, op=fps.Sum, prescale_factor=0.5), [[3, 7], [3, 7]][0])
        yield fps.allreduce(x, op=fps.Max, postscale_factor=0.5), whole
        yield fps.allgather(x[: rank + 1]), np.concatenate([whole[:1], 2 * whole[:2]])
        yield fps.broadcast(x, 1), 2 * whole
        yield fps.reducescatter(x, op=fps.Sum, postscale_factor=2.0), 6 * whole[2 * rank :][:2]
        yield fps.alltoall(x), np.concatenate([whole[2 * rank :][:2], 2 * whole[2 * rank :][:2]])
        slices = tf.IndexedSlices(x[:1], tf.constant([rank]), tf.constant([4, 2]))
        yield (fps.allreduce(slices, postscale_factor=2.0).values,
               np.concatenate([whole[:1], 2 * whole[:1]]))
        for name in (None, "together"):
            one, two = fps.grouped_allreduce([x, x[0]], name, op=fps.Sum, prescale_factor=2.0)
            yield one, 6 * whole
            yield two, 6 * whole[0]
        yield from zip(fps.grouped_allreduce([x, x[0]], op=fps.Min), [whole, whole[0]])
        one, two = fps.grouped_allreduce([x, slices], op=fps.Sum)
        yield from zip([one, two.indices], [3 * whole, [0, 1]])
        firsts = np.concatenate([whole[:1], 2 * whole[:1]])
        yield from zip(fps.grouped_allgather([x[:1], x[0]]), [firsts, firsts.reshape(-1)])
        yield from zip(fps.grouped_reducescatter([x, x[:, 0]], op=fps.Sum),
                       [3 * whole[2 * rank :][:2], 3 * whole[2 * rank :, 0][:2]])
        yield fps.rank_op(), rank
        yield fps.size_op(), 2
        yield fps.local_rank_op(name="where"), rank
        yield fps.local_size_op(), 2
        yield fps.process_set_included_op(), 1
    def check(found, wanted):
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted))
    for found, wanted in everything():
        check(found, wanted)
    wanted = [one for _, one in everything()]
    for found, one in zip(tf.function(lambda: [one for one, _ in everything()])(), wanted):
        check(found, one)
    with tf.Graph().as_default():
        x, whole_number = tf.constant(x.numpy()), tf.constant(whole_number.numpy())
        pairs = list(everything())
        with tf.compat.v1.Session() as session:
            for found, (_, one) in zip(session.run([one for one, _ in pairs]), pairs):
                check(found, one)
        shapeless = tf.compat.v1.placeholder(tf.float32)
        total = fps.allreduce(shapeless, op=fps.Sum)
        slope, = tf.gradients(tf.reduce_sum(total * (rank + 1)), shapeless)
        with tf.compat.v1.Session() as session:
            for size in (2, 5):
                found = session.run([total, slope], {shapeless: np.full(size, 1.0 + rank)})
                check(found, np.full((2, size), 3.0))
            given = tf.constant(whole)
            slope, = tf.gradients(fps.broadcast(given, 1), given)
            check(session.run(slope), np.full((4, 2), rank))  # of the root alone
    x = tf.constant(whole) * (rank + 1)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(fps.allreduce(x, op=fps.Sum, prescale_factor=2.0) * (rank + 1))
    check(tape.gradient(loss, x), np.full((4, 2), 6.0))  # both weigh, 1 and 2, times 2
    with pytest.raises(ValueError, match="op or average, not both"):
        fps.allreduce(x, op=fps.Sum, average=True)
    with pytest.raises(ValueError, match="a name and a shape"):
        fps.allreduce(x, compression=fps.Compression.fp16)
    with pytest.raises(TypeError, match="dtype uint32 is not supported"):
        fps.allreduce(tf.cast(x, tf.uint32))
    words = tf.constant([[0xFF00 + rank]] * 2, tf.uint16)
    for move in (fps.allgather, lambda x: fps.broadcast(x, 1), fps.alltoall):
        found = move(words)
        found = found[0] if isinstance(found, tuple) else found
        assert found.dtype == tf.uint16
        assert found.numpy()[-1, 0] == 0xFF01
    variables = [tf.Variable(x), tf.Variable(rank)]
    fps.broadcast_(variables, 1)
    check(variables[0], 2 * whole)
    assert variables[1].numpy() == 1
    assert fps.broadcast_object_fn(1)({"rank": rank}) == {"rank": 1}
    assert fps.cross_size() == 1 and fps.cross_rank() == 0 and fps.is_homogeneous()
    assert not (fps.mpi_built() or fps.nccl_built() or fps.gloo_enabled())
"""


def test_horovods_names_and_operations_without_names(tmp_path):
    run(NAMELESS, tmp_path)


LAYERS = """
    import keras
    both = np.random.default_rng(0).normal(3, 2, (7, 5, 3)).astype("f4")
    mine = tf.constant(both[:2] if rank == 0 else both[2:])
    def through(layer, batch, run=lambda f: f):
        @run
        def step():
            with tf.GradientTape() as tape:
                tape.watch(batch)
                loss = tf.reduce_sum(layer(batch, training=True) ** 3)
            return loss, tape.gradient(loss, batch)
        return step()
    plain = keras.layers.BatchNormalization()
    plain.build((None, 5, 3))
    _, wanted = through(plain, tf.constant(both))
    for run in (lambda f: f, tf.function):
        layer = fps.SyncBatchNormalization()
        layer.build((None, 5, 3))
        _, found = through(layer, mine, run)
        np.testing.assert_allclose(found, wanted[:2] if rank == 0 else wanted[2:], atol=2e-4)
        for one, two in zip(layer.variables, plain.variables):
            np.testing.assert_allclose(one, two, atol=1e-5)
    dense, own = keras.layers.Dense(2), keras.layers.Dense(2)
    for one in (dense, own):
        one.build((None, 3))
    weights = [*dense.trainable_weights, *own.trainable_weights]
    with fps.PartialDistributedGradientTape(tf.GradientTape(), own) as tape:
        loss = tf.reduce_sum(dense(tf.ones((1, 3))) + own(tf.ones((1, 3)))) * (rank + 1.0)
    shared, local = np.split(np.array([np.max(one) for one in tape.gradient(loss, weights)]), 2)
    np.testing.assert_allclose(shared, 1.5)
    np.testing.assert_allclose(local, (rank + 1) / 2)  # divided by the workers
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fps.nothing
"""


def test_layers_over_all_batches_and_local_ones(tmp_path):
    run(LAYERS, tmp_path)


MIRRORED = """
    with strategy.scope():
        weights = [tf.Variable(tf.fill((2, 2), float(rank))), tf.Variable(tf.zeros(100_000))]
        optimizer = tf.keras.optimizers.SGD(0.5)
        optimizer.build(weights)
    fps.broadcast_variables(weights, 1)
    def replica():
        number = 2.0 * rank + tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group,
                                      tf.float32)
        optimizer.apply_gradients([(tf.fill(w.shape, number), w) for w in weights])
        return number
    @tf.function
    def step():
        return strategy.reduce("MEAN", strategy.run(replica), axis=None)  # of this worker
    same(fps.push_pull(step(), "mean"), np.float32(1.5))
    for weight, first in zip(weights, (1, 0), strict=True):
        for one in strategy.experimental_local_results(weight):
            same(one, np.full(weight.shape, first - 0.5 * 6, "f4"))  # a sum of four
"""
DEVICES = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
"""


def test_mirrored_replicas_add_with_those_of_all_workers(tmp_path):
    begin = '    strategy = fps.MirroredStrategy(["/cpu:0", "/cpu:1"])\n'
    script = DEVICES + HEAD + textwrap.dedent(begin + MIRRORED.lstrip("\n"))
    run_workers(script, tmp_path, environ=QUIET).check()


DIFFERING = """
    import time
    def fails(call, *words):
        began = time.monotonic()
        with pytest.raises(Exception, match="differs between|not the same") as caught:
            call()
        assert time.monotonic() - began < 30
        for word in words:
            assert word in str(caught.value), caught.value
    def gradients(*shapes, prefix):
        fps.exchange_gradients([None if s is None else tf.ones(s) for s in shapes], prefix=prefix)
    for wrap in (lambda f: f, tf.function):
        def differing(prefix, *sides):
            prefix += str(wrap is tf.function)
            return wrap(lambda: gradients(*sides[rank], prefix=prefix))
        fails(differing("shapes", [3, (3, 5)], [3, (5, 3)]), ".1'", "(3, 5)", "(5, 3)")
        fails(differing("count", [3, 4], [3, 4, 50_000]), ".2'", "no such tensor", "(50000,)")
        fails(differing("none", [None, 4], [3, 4]), "worker 0", "worker 1")
        for side in ([2], [3 + rank], [5 + rank]):  # the second name stays of no use
            one = lambda: fps.push_pull(tf.ones(side), f"one{wrap is tf.function}")
            wrap(one)() if side == [2] else fails(wrap(one), "(4,)")
        with pytest.raises(tf.errors.FailedPreconditionError, match="not the same operation"):
            wrap(lambda: fps.allgather(tf.ones((2, 2 + rank)), f"rows{wrap is tf.function}"))()
        for shapes in ([3, 4], [5, 6], [50_000, 3], [3], [3, 4]):  # one model after another
            differing("again", shapes, shapes)()
        fails(differing("again", [3, 4], [5, 6, 7]), "worker 0", "worker 1")
    variables = [tf.Variable(tf.ones(3)) for _ in range(2 + rank)]
    try:
        fps.broadcast_variables(variables)
        assert rank == 0  # the root may be through before the other tells
    except Exception as error:
        assert "not the same operation" in str(error)
    strategy = fps.MirroredStrategy(["/cpu:0"])
    def reduced(shape):
        def replica():
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones(shape))
        return strategy.run(replica)
    for shape in ((), (3,), (50_000,), ()):
        same(reduced(shape), np.full(shape, 2, "f4"))
    fails(lambda: reduced((3, 2 + rank)), "Mirrored", "(3, 2)", "(3, 3)")
"""


def test_lists_that_differ_are_a_mismatch_at_once(tmp_path):
    run(DIFFERING, tmp_path, servers=0, environ={"FASTPS_STALL_WATCH_S": "1"})


def test_a_tape_gives_the_same_on_all_workers(tmp_path):
    for environ in ({}, {"FASTPS_SHARED_MEMORY": "0"}):
        one, two = run(TRAINING, tmp_path, environ=environ).reports
        assert len(one) >= 6
        assert one == two


@pytest.mark.parametrize("program", ["digits", "synthetic_benchmark"])
def test_examples_run(program):
    words = run_example(f"examples/tensorflow_{program}.py", environ=QUIET).stdout.split()
    assert float(words[-1].strip("+-")) > (0.9 if program == "digits" else -1)


LIVES = """
    import os
    is_first = os.environ["LIFE"] == "1"
    if os.environ["GRAPH"] == "1":
        tf.compat.v1.disable_eager_execution()
        variables = [tf.compat.v1.Variable(np.full(3, 5.0 + rank, "f4"), name="a"),
                     tf.compat.v1.Variable(rank, dtype=tf.int64, name="b")]
        session = tf.compat.v1.Session()
        session.run(tf.compat.v1.global_variables_initializer())
        read = lambda one: one.eval(session)
        add = lambda one, more: one.load(read(one) + more, session)
        state = fps.elastic.TensorFlowState(session=session, step=0)
        assert len(state.variables) == 2
    else:
        variables = [tf.Variable(np.full(3, 5.0 + rank, "f4")), tf.Variable(rank, dtype=tf.int64),
                     tf.Variable(tf.cast([1.5 + rank], tf.bfloat16))]
        read, add = lambda one: one.numpy(), lambda one, more: one.assign_add(one * 0 + more)
        state = fps.elastic.TensorFlowState(variables, step=0)
        with pytest.raises(ValueError, match="no variables to hold"):
            fps.elastic.TensorFlowState()
    @fps.elastic.run
    def train(state):
        begun = state.step, [np.asarray(read(one), "f8").ravel().tolist() for one in variables]
        for state.step in range(state.step + 1, 4 if is_first else 6):
            for one in variables:
                add(one, 1 + rank if is_first and state.step == 3 else 1)
            if state.step < 3:
                state.commit()
        if is_first:
            state.restore()
            assert state.step == 2 and read(variables[0]).tolist() == [7] * 3
        return begun
    begun = [0, 1.5] if is_first else [2, 3.5]
    wanted = begun[0], [[5.0 + begun[0]] * 3, [float(begun[0])], begun[1:]][: len(variables)]
    found = train(state)
    assert found == wanted, (found, wanted)
    with pytest.raises(TypeError, match="first, not int"):
        fps.elastic.run(lambda state: None)(1)
"""


@pytest.mark.parametrize("graph", ["0", "1"], ids=["eager", "session"])
def test_another_life_goes_on_from_the_last_commit(tmp_path, graph):
    where = {"FASTPS_COMMIT_DIR": str(tmp_path / "commits"), "GRAPH": graph}
    for life in ("1", "2"):
        run(LIVES, tmp_path, environ={"LIFE": life, **where})


def test_nothing_but_tensorflow_is_imported():
    script = (
        "import sys, fastps.tensorflow; assert not {'torch', 'jax', 'mxnet'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], env=clean_environ(), cwd=ROOT, check=True)
