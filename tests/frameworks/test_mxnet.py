# SPDX-License-Identifier: Apache-2.0
"""The MXNet plugin in real jobs, each of many checks; the values are NumPy's."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mxnet")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

from harness import JobResult, clean_environ, run_example, run_workers  # noqa: E402

HEAD = """
import threading
import mxnet as mx, numpy as np, pytest
import fastps.mxnet as fps
fps.init()
rank = fps.rank()
nd, gluon = mx.nd, mx.gluon
def same(found, wanted):
    found, wanted = found.asnumpy(), np.asarray(wanted)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found, wanted)
    assert found.tobytes() == wanted.tobytes(), (found, wanted)
"""
SHARED = {"FASTPS_SHARED_MEMORY": "1"}


def run(script: str, folder: Path, **options: Any) -> JobResult:
    return run_workers(HEAD + textwrap.dedent(script), folder, **options).check()


SUMS = """
    for dtype in "float32 float16 float64 int8 int32 int64 uint8".split():
        for shape in [(1,), (3, 5), (40_001,)]:
            x, half = nd.full(shape, 3 + rank, dtype=dtype), 3.5 if "float" in dtype else 3
            same(fps.push_pull(x, f"{dtype}{shape}"), np.full(shape, half, dtype))
            same(fps.push_pull(x, f"{dtype}{shape}", average=False), np.full(shape, 7, dtype))
            same(x, np.full(shape, 3 + rank, dtype))  # not written to
    with mx.util.np_shape(True):  # where arrays may be scalar or empty
        for shape in [(), (0,), (0, 3)]:
            same(fps.push_pull(mx.np.full(shape, 3.0 + rank, dtype="float32"), f"np{shape}"),
                 np.full(shape, 3.5, "f4"))
    rows = [np.random.default_rng(i).normal(size=99).astype("f4") for i in range(2)]
    wanted = rows[0] + rows[1]
    x = nd.array(rows[rank])
    for _ in range(3):  # what is pushed on it before and afterwards is done before and afterwards
        y = x * 2
        fps.byteps_push_pull(y, name="in place", is_average=False)
        same(y / 2, wanted)
    fps.byteps_push_pull(x, name="mean")
    same(x, wanted / 2)
    def work(n):
        for step in range(5):
            same(fps.push_pull(nd.full((n + 1,), rank + step), f"thread {n}", average=False),
                 np.full((n + 1,), 1 + 2 * step, "f4"))
        done.append(n)
    done = []
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(done) == 4
    fps.byteps_declare_tensor("coded", byteps_compressor_type="topk", byteps_compressor_k="1")
    z = nd.zeros(50_000)
    z[7 + rank] = 8
    fps.byteps_push_pull(z, name="coded", is_average=False)
    assert z.asnumpy().sum() in (8, 16) and z.shape == (50_000,)
"""


@pytest.mark.parametrize(
    "environ",
    [{}, SHARED, {"MXNET_ENGINE_TYPE": "NaiveEngine"}],
    ids=["servers", "shared", "naive"],
)
def test_sums_are_those_of_numpy(tmp_path, environ):
    run(SUMS, tmp_path, environ=environ)


OTHERS = """
    same(fps.allreduce(nd.array([1 - rank, rank]), "max", op=fps.Max), np.array([1, 1], "f4"))
    same(fps.allgather(nd.full((rank + 1, 2), rank), "rows"),
         np.array([[0, 0], [1, 1], [1, 1]], "f4"))
    same(fps.broadcast(nd.array([rank, 7]), 1, name="b"), np.array([1, 7], "f4"))
    same(fps.reducescatter(nd.arange(4) + rank, "rs", op=fps.Sum),
         np.array([[1, 3], [5, 7]], "f4")[rank])
    same(fps.alltoall(nd.arange(2) + 10 * rank, name="aa"), np.array([rank, 10 + rank], "f4"))
    found, counts = fps.alltoall(nd.arange(3) + 10 * rank, [1, 2], name="as")
    same(found, np.array([[0, 10], [1, 2, 11, 12]][rank], "f4"))
    assert counts == [[1, 1], [2, 2]][rank]
    with pytest.raises(TypeError, match="bfloat16"):  # of MXNet's own: its Python has no such type
        nd.ones(3, dtype="bfloat16")
    params = {"a": nd.full((2, 2), rank, dtype="float16"), "b": nd.array([rank], dtype="int32")}
    fps.broadcast_parameters(params, 1)
    same(params["a"], np.full((2, 2), 1, "f2"))
    same(params["b"], np.array([1], "i4"))
    with pytest.raises(TypeError, match="dict"):
        fps.broadcast_parameters([1])
    with pytest.raises(ValueError, match="average is True or False"):
        fps.push_pull(nd.ones(3), "x", average=fps.Sum)
    with pytest.raises(ValueError, match="needs a name"):
        fps.byteps_push_pull(nd.ones(3))
    with pytest.raises(TypeError, match="row_sparse"):
        fps.push_pull(nd.ones((2, 2)).tostype("row_sparse"), "sparse")
    with pytest.raises((fps_errors.MismatchError, mx.base.MXNetError), match="'differ'"):
        fps.push_pull(nd.ones(3 + rank), "differ").asnumpy()
    pair = fps.add_process_set([1])
    if rank == 1:
        same(fps.push_pull(nd.ones(3), "alone", process_set=pair), np.ones(3, "f4"))
    from fastps.frameworks.mxnet.engine import engine
    def fail(): raise fps_errors.FastPSError("told to fail")
    x, y = nd.ones(3), nd.ones(3)
    engine.push(fail, lambda: None, writes=[x])
    engine.push(lambda: None, fail, writes=[y])
    for one in (x, y):
        with pytest.raises(mx.base.MXNetError, match="FastPSError: told to fail"):
            one.asnumpy()
    for _ in range(30):  # MXNet keeps errors where two threads at once would spoil its memory
        both = [nd.ones(3) for _ in range(200)]
        nd.waitall()
        for i, one in enumerate(both):
            engine.push(*((fail, lambda: None) if i % 2 else (lambda: None, fail)), writes=[one])
        for one in both:
            with pytest.raises(mx.base.MXNetError, match="FastPSError: told to fail"):
                one.asnumpy()
        nd.waitall()
    gate, x = threading.Event(), nd.ones(3)
    engine.push(lambda: None, lambda: gate.wait(60), writes=[x])
    y = x + 1
    same(nd.ones(3) * 2, np.full(3, 2, "f4"))  # what does not need it goes on
    gate.set()
    same(y, np.full(3, 2, "f4"))
"""


def test_the_other_operations_and_errors(tmp_path):
    run("    import fastps.errors as fps_errors" + OTHERS, tmp_path, environ=SHARED)


VALIDATED = """
    import fastps
    from fastps import byzantine
    def make(number):
        net = gluon.nn.Dense(1, in_units=3, use_bias=False)
        net.initialize(mx.init.Constant(number))
        return net
    def train(net, trainer, weight):
        with mx.autograd.record():
            loss = (net(nd.array([[1, 2, 3]])) * weight).sum()
        loss.backward()
        trainer.step(1)
    if fastps.role() == "validator":
        judge = fps.validator_of(make(5).collect_params(), "average")
        for _ in range(2):
            judge.round()
        judge.close()
    else:
        with pytest.raises(ValueError, match="call the net once"):
            unknown = gluon.nn.Dense(1)
            unknown.initialize()
            fps.ValidatedTrainer(unknown.collect_params(), "sgd")
        net = make(rank)
        trainer = fps.ValidatedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.5},
                                       local_steps=2)
        same(net.weight.data(), np.full((1, 3), 5, "f4"))  # the validator's
        for step in range(4):
            train(net, trainer, rank + 1)
            if step % 2:  # workers changed it by 2 steps of 0.5 and of 1
                same(net.weight.data(), 5 - 1.5 * (step // 2 + 1) * np.array([[1, 2, 3]], "f4"))
    fps.shutdown()
"""


def test_validators_judge_what_trainers_change(tmp_path):
    run(VALIDATED, tmp_path, servers=1, validators=1)


TRAINING = """
    def make(seed):
        mx.random.seed(seed)
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Conv2D(16, 3, activation="relu"),
                gluon.nn.Conv2D(32, 3, activation="relu"), gluon.nn.Flatten(),
                gluon.nn.Dense(300, activation="tanh"), gluon.nn.Dense(10))
        net.initialize(mx.init.Xavier())
        net.hybridize()
        return net
    def values(net):
        return [p.data().asnumpy() for p in net.collect_params().values()]
    def train(net, trainer, part, parts, size=4):
        for step in range(5):
            draw = np.random.default_rng(step)
            x = draw.normal(size=(8, 2, 6, 6)).astype("f4")[part::parts]
            y = draw.integers(0, 10, 8)[part::parts]
            with mx.autograd.record():
                loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(nd.array(x)), nd.array(y))
            loss.backward()
            trainer.step(size)
        return values(net)
    def begin(seed=0):
        net = make(seed)
        net(nd.zeros((1, 2, 6, 6)))
        return net
    alone = begin()
    wanted = train(alone, gluon.Trainer(alone.collect_params(), "adam", {"learning_rate": 0.01},
                                        kvstore=None), 0, 1, 8)
    def close(found):
        for one, two in zip(found, wanted):
            np.testing.assert_allclose(one, two, rtol=2e-3, atol=2e-3)
        for i, one in enumerate(found):
            same(fps.broadcast(nd.array(one), 0, name=f"check {i} {one.shape}"), one)
    for way in ({}, {"bucket_bytes": 0, "prefix": "loose"}):
        net = begin(rank)
        trainer = fps.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.01},
                                         **way)
        close(train(net, trainer, rank, 2))
    net = begin()
    close(train(net, gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01},
                                   kvstore="fastps"), rank, 2, 8))
    net = begin()
    updater = mx.optimizer.get_updater(
        fps.DistributedOptimizer(mx.optimizer.Adam(learning_rate=0.01, rescale_grad=1 / 4)))
    class Steps:
        def step(self, _):
            for i, p in enumerate(net.collect_params().values()):
                updater(i, p.grad(), p.data())
    close(train(net, Steps(), rank, 2))
    net = make(rank)  # shapes are not known yet
    for prefix in ("later ", "twice "):
        fps.broadcast_parameters(net.collect_params(), 1, prefix=prefix)
    net(nd.zeros((1, 2, 6, 6)))
    for i, one in enumerate(values(net)):
        same(fps.broadcast(nd.array(one), 0, name=f"later {i}"), one)
    onebit = {"compressor": "onebit", "scaling": True, "ef": "vanilla", "momentum": "nesterov"}
    for params in (onebit, {"fp16": True}):
        net = begin()
        options = {"learning_rate": 0.01, "momentum": 0.9}
        trainer = fps.DistributedTrainer(net.collect_params(), "sgd", options, prefix=str(params),
                                         compression_params=params)
        found = train(net, trainer, rank, 2)
        assert trainer.optimizer.momentum == (0.9 if "fp16" in params else 0.0)
        for i, one in enumerate(found):
            same(fps.broadcast(nd.array(one), 0, name=f"coded {i} {one.shape}"), one)
    sparse = gluon.nn.Embedding(5, 2, sparse_grad=True)
    sparse.initialize()
    trainer = fps.DistributedTrainer(sparse.collect_params(), "sgd", prefix="sparse")
    with mx.autograd.record():
        loss = sparse(nd.array([1])).sum()
    loss.backward()
    with pytest.raises(TypeError, match="row_sparse"):
        trainer.step(1)
    fps.shutdown()
"""


@pytest.mark.parametrize("environ", [{}, SHARED], ids=["servers", "shared"])
def test_training_is_that_of_one_process(tmp_path, environ):
    run(TRAINING, tmp_path, environ=environ)


NAMELESS = """
    import fastps.errors
    whole = np.arange(8, dtype="f4").reshape(4, 2)
    x = nd.array(whole) * (rank + 1)
    same(fps.allreduce(x), 1.5 * whole)
    same(fps.allreduce(x, average=False), 3 * whole)
    same(fps.allreduce(x, op=fps.Sum, prescale_factor=0.5, postscale_factor=4.0), 6 * whole)
    same(fps.allreduce(nd.array([2, 5], dtype="int32") * (rank + 1), op=fps.Sum,
                       prescale_factor=0.5), np.array([3, 7], "i4"))
    same(fps.allgather(x[: rank + 1]), np.concatenate([whole[:1], 2 * whole[:2]]))
    same(fps.broadcast(x, 1), 2 * whole)
    same(fps.reducescatter(x, op=fps.Sum, postscale_factor=2.0), 6 * whole[2 * rank :][:2])
    same(fps.alltoall(x), np.concatenate([whole[2 * rank :][:2], 2 * whole[2 * rank :][:2]]))
    found, counts = fps.alltoall(x, nd.array([1, 3], dtype="int32"))
    assert counts == [[1, 1], [3, 3]][rank] and found.shape == (sum(counts), 2)
    for name in (None, "together"):
        one, two = fps.grouped_allreduce([x, x[0]], name, op=fps.Sum)
        same(one, 3 * whole)
        same(two, 3 * whole[0])
    same(fps.grouped_allgather([x[:1]])[0], np.concatenate([whole[:1], 2 * whole[:1]]))
    same(fps.grouped_reducescatter([x], op=fps.Max)[0], 2 * whole[2 * rank :][:2])
    y, z = x.copy(), x.copy()
    assert fps.allreduce_(y, op=fps.Sum) is y and fps.broadcast_(z, 1, "root's") is z
    same(y, 3 * whole)
    same(z, 2 * whole)
    fps.grouped_allreduce_([y, z])
    same(y, 3 * whole)
    with mx.util.np_shape(True):
        same(fps.broadcast_(mx.np.array(rank, dtype="int32"), 1), np.array(1, "i4"))
    with pytest.raises(ValueError, match="op or average, not both"):
        fps.allreduce(x, op=fps.Sum, average=True)
    some = fps.add_process_set([1])
    if rank == 1:
        same(fps.allreduce(x, process_set=some), 2 * whole)
        same(fps.broadcast(x, 1, process_set=some), 2 * whole)
    with pytest.raises(fastps.errors.MismatchError):
        fps.allreduce(nd.ones(3 + rank), "differ", op=fps.Max)
    assert fps.cross_size() == 1 and fps.is_homogeneous() and not fps.mpi_built()
    fps.shutdown()
"""


def test_horovods_names_and_operations_without_names(tmp_path):
    run(NAMELESS, tmp_path, environ=SHARED)


CODED = """
    from fastps.session.current import current
    from fastps.errors import ConfigError
    def make():
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(100, in_units=200), gluon.nn.Dense(30, in_units=100))
        net.initialize(mx.init.Constant(0.5))
        return net
    signs = {"compressor": "onebit", "scaling": False}
    def gradients(net, part):
        parts = []
        for i, p in enumerate(net.collect_params().values()):
            draw = np.random.default_rng([i, part])
            parts.append((draw.normal(size=p.shape) * 10 ** -i).astype("f4"))
        return parts
    def moved(prefix, params, **options):
        net = make()
        trainer = fps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0},
                                         prefix=prefix, compression_params=params, **options)
        before = [p.data().asnumpy() for p in net.collect_params().values()]
        for p, g in zip(net.collect_params().values(), gradients(net, rank)):
            p.data()._fresh_grad = True
            p.grad()[:] = nd.array(g)
        trainer.step(32)
        after = [p.data().asnumpy() for p in net.collect_params().values()]
        return [one - two for one, two in zip(before, after)]
    every = [gradients(make(), part) for part in range(2)]
    mean = [(one + two) / 64 for one, two in zip(*every)]
    both = [np.sign(one) + np.sign(two) for one, two in zip(*every)]
    is_coded = [g.nbytes >= least for g in mean]
    assert is_coded == [True, least == 0, least == 0, least == 0]
    for options in ({}, {"bucket_bytes": 0}):
        for i, found in enumerate(moved(f"signs{options}", signs, **options)):
            voted = np.where(both[i] < 0, -1, 1)  # divided by 32 before: a step is 1, not 1 / 32
            np.testing.assert_allclose(found, voted if is_coded[i] else mean[i], rtol=1e-4,
                                       atol=1e-5)
    for i, found in enumerate(moved("scaled", {"compressor": "onebit", "scaling": True})):
        sizes = np.unique(np.abs(found).round(7))  # one scale for each tensor, not for all
        assert (len(sizes) < 4) is is_coded[i], (i, sizes)
        assert np.abs(found).mean() < 4 * np.abs(mean[i]).mean()
    for i, found in enumerate(moved("topk", {"compressor": "topk", "k": 3})):
        assert (np.count_nonzero(found) <= 3) is is_coded[i], i  # k of each tensor
    plain = moved("plain", None)
    for i, found in enumerate(plain):
        np.testing.assert_allclose(found, mean[i], rtol=1e-4, atol=1e-5)
    optimizer = fps.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0, rescale_grad=1 / 32),
                                         compression=signs, prefix="module ")
    w = nd.zeros((100, 200))
    mx.optimizer.get_updater(optimizer)(0, nd.array(every[rank][0]), w)
    same(w, np.where(both[0] < 0, 1, -1).astype("f4"))
    assert optimizer.rescale_grad == 1 / 32
    net = make()
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore="fastps",
                            compression_params=signs)
    with pytest.raises(ConfigError, match="scaling=True"):
        trainer.step(32)
    fps.shutdown()
"""


@pytest.mark.parametrize("least", [0, 65536])
def test_each_tensor_is_divided_and_then_compressed_by_itself(tmp_path, least):
    environ = {"FASTPS_MIN_COMPRESS_BYTES": str(least)}
    run(f"    least = {least}" + CODED, tmp_path, environ=environ)


ALONE = """
import sys, numpy as np, fastps.mxnet as fps
assert "mxnet" not in sys.modules
names = ("bool", "int", "float", "object", "str")
for name in names:
    vars(np).pop(name, None)
fps.compat()
assert [vars(np)[name] for name in names] == [bool, int, float, object, str]
assert fps.push_pull and "mxnet" in sys.modules
assert not {"torch", "tensorflow", "keras", "jax"} & set(sys.modules)
np.__version__ = "2.1.0"
try:
    fps.compat()
except ImportError as error:
    assert "numpy<2" in str(error)
else:
    raise AssertionError("taken for one that works")
"""


def test_nothing_but_mxnet_is_imported_and_after_compat():
    subprocess.run([sys.executable, "-c", ALONE], env=clean_environ(), cwd=ROOT, check=True)


def test_the_example_reads_digits():
    result = run_example("examples/mxnet_digits.py")
    assert float(result.stdout.split()[-1]) > 0.9
