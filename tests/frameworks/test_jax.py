# SPDX-License-Identifier: Apache-2.0
"""The JAX plugin in real jobs, each of many checks; the values are NumPy's."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import programs_jax_elastic  # noqa: E402
from harness import JobResult, clean_environ, run_example, run_workers  # noqa: E402
from job import Job  # noqa: E402

HEAD = """
import jax, jax.numpy as jnp, numpy as np, pytest
import fastps.jax as fps
fps.init()
rank = fps.rank()
def same(found, wanted):
    found, wanted = jax.tree.map(np.asarray, (found, wanted))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == two.dtype and one.shape == two.shape, (one, two)
        assert one.tobytes() == two.tobytes(), (one, two)
"""
SHARED = {"FASTPS_SHARED_MEMORY": "1"}


def run(script: str, folder: Path, **options: Any) -> JobResult:
    return run_workers(HEAD + textwrap.dedent(script), folder, **options).check()


SUMS = """
    for dtype in "float32 float16 bfloat16 int8 int16 int32 uint8 uint16".split():
        for shape in [(), (0,), (0, 3), (1,), (3, 5), (40_001,)]:
            x = jnp.full(shape, 3 + rank, dtype)
            half = jnp.full(shape, 3.5 if "float" in dtype else 3, dtype)
            name = f"{dtype}{shape}"
            same(fps.push_pull(x, name), half)
            same(jax.jit(lambda x: fps.push_pull(x, name, average=False))(x),
                 jnp.full(shape, 7, dtype))
    same(fps.push_pull(jnp.array([rank == 0, False]), "flags", average=False),
         np.array([True, False]))
    with pytest.raises(TypeError, match="complex64"):
        fps.push_pull(jnp.ones(3, "complex64"), "complex")
    tree = {"w": jnp.full((300, 300), 1.0 + rank), "b": [jnp.arange(3) + rank, jnp.float32(rank)]}
    wanted = {"w": np.full((300, 300), 3, "f4"),
              "b": [np.array([1, 3, 5], "i4"), np.float32(1)]}
    same(fps.push_pull(tree, "tree", average=False), wanted)
    same(jax.jit(lambda t: fps.push_pull(t, "tree", average=False))(tree), wanted)
    same(fps.push_pull({}, "nothing"), {})
    begun = jax.jit(lambda t: fps.push_pull_finish(fps.push_pull_start(t, "t", average=False)))
    for _ in range(3):
        same(begun(tree), wanted)
    same(fps.push_pull_finish(fps.push_pull_start(tree, "t", average=False)), wanted)
    same(tree["w"], np.full((300, 300), 1 + rank, "f4"))  # not written to
"""


def test_sums_are_those_of_numpy(tmp_path):
    run(SUMS, tmp_path)


TRANSFORMED = """
    x = jnp.arange(6.0) * (rank + 1)
    mean = np.arange(6, dtype="f4") * np.float32(1.5)
    f = lambda x: (fps.push_pull(x, "g") ** 2).sum()
    for gradient in (jax.grad(f), jax.jit(jax.grad(f))):
        same(gradient(x), 2 * mean)
    both = {"x": x, "n": jnp.arange(3)}  # integers have no gradient
    g = lambda x: fps.push_pull({"x": x, "n": both["n"]}, "mixed")["x"].sum()
    same(jax.grad(g)(x), np.ones(6, "f4"))
    def body(c, _):
        c = fps.push_pull(c * (rank + 1), "s", average=False)
        return c, c.sum()
    out, sums = jax.jit(lambda x: jax.lax.scan(body, x, None, length=3))(x)
    same(out, np.arange(6, dtype="f4") * 45)
    same(sums, np.array([75, 225, 675], "f4"))
    same(jax.grad(lambda x: jax.lax.scan(body, x, None, length=2)[0].sum())(x),
         np.full(6, 6 * (rank + 1), "f4"))
    same(jax.vmap(lambda x: fps.push_pull(x, "v"))(jnp.ones((2, 3)) * (rank + 1)),
         np.full((2, 3), 1.5, "f4"))
    same(jax.jit(lambda x: jax.lax.cond(x[5] > 1, lambda x: fps.push_pull(x, "c"),
                                        lambda x: x, x))(x), mean)
    def loop(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1,
            fps.push_pull_finish(fps.push_pull_start(c[1], "w"))), (0, x))[1]
    same(jax.jit(loop)(x), mean)
    same(jax.jit(jax.grad(jax.checkpoint(f)))(x), 2 * mean)  # adds again on the way back
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    shard = jax.jit(jax.shard_map(lambda x: fps.push_pull(x, "shard", average=False), mesh=mesh,
                                  in_specs=spec, out_specs=spec))
    same(shard(jnp.arange(8.0) + rank), 2 * np.arange(8, dtype="f4") + 1)
"""


def test_every_transformation_goes_through_it(tmp_path):
    run(TRANSFORMED, tmp_path, environ={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})


COLLECTIVES = """
    for wrap in (lambda f: f, jax.jit):
        same(wrap(lambda x: fps.allreduce(x, "max", op=fps.Max))(jnp.arange(3) * (1 - 2 * rank)),
             np.array([0, 1, 2], "i4"))
        same(wrap(lambda x: fps.allreduce(x, "mean"))(jnp.full((2,), rank, "bfloat16")),
             jnp.full((2,), 0.5, "bfloat16"))
        same(wrap(lambda x: fps.broadcast(x, 1, name="b"))(jnp.full((2, 2), rank)),
             np.full((2, 2), 1, "i4"))
        same(wrap(lambda x: fps.allgather(x, "ag"))(jnp.full((1, 2), rank, "bfloat16")),
             jnp.array([[0, 0], [1, 1]], "bfloat16"))
        same(wrap(lambda x: fps.reducescatter(x, "rs", op=fps.Sum))(jnp.arange(4) + rank),
             np.array([[1, 3], [5, 7]], "i4")[rank])
        same(wrap(lambda x: fps.alltoall(x, name="aa"))(jnp.arange(2) + 10 * rank),
             np.array([rank, 10 + rank], "i4"))
    same(fps.allgather(jnp.full((rank + 1,), rank), "uneven"), np.array([0, 1, 1], "i4"))
    words = jnp.full((2, 1), 0xFF00 + rank, "uint16")
    for wrap in (lambda f: f, jax.jit):
        for f in (fps.allgather, lambda x, name: fps.broadcast(x, 1, name=name),
                  lambda x, name: fps.alltoall(x, name=name)):
            assert wrap(lambda x: f(x, "words"))(words).dtype == words.dtype
            assert int(wrap(lambda x: f(x, "words"))(words)[-1, 0]) == 0xFF01
    found, counts = fps.alltoall(jnp.arange(3) + 10 * rank, [1, 2], name="splits")
    same(found, np.array([[0, 10], [1, 2, 11, 12]][rank][:4] if rank else [0, 10], "i4"))
    assert counts.tolist() == [[1, 1], [2, 2]][rank]
    with pytest.raises(ValueError, match="under jit"):
        jax.jit(lambda x: fps.alltoall(x, name="aa"))(jnp.arange(3))
    pair = fps.add_process_set([1])
    if rank == 1:
        same(jax.jit(lambda x: fps.push_pull(x, "alone", process_set=pair))(jnp.ones(3)),
             np.ones(3, "f4"))
    state = {"m": jnp.full((3,), rank, "bfloat16"), "n": np.int32(rank), "on": rank == 0}
    same(fps.broadcast_parameters(state, 1),
         {"m": jnp.full((3,), 1, "bfloat16"), "n": np.int32(1), "on": np.False_})
    told = fps.broadcast_object({"a": jnp.arange(2)} if rank == 0 else None)
    assert told["a"].tolist() == [0, 1]
    gone = jnp.arange(2)
    gone.delete()
    assert fps.broadcast_object(3 if rank == 0 else gone) == 3
    with pytest.raises(TypeError, match="worker 1 could not send .*RuntimeError.*has been"):
        fps.broadcast_object(gone, 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"MismatchError: .*'differ'"):
        fps.push_pull(jnp.ones(3 + rank), "differ")
    with pytest.raises(ValueError, match="average is True or False"):
        fps.push_pull(np.ones(3, "f4"), "x", average=fps.Sum)
    with pytest.raises(ValueError, match="needs a name"):
        fps.push_pull(jnp.ones(3), "")
    from fastps.frameworks.jax import calls, sums  # as on a device that lends no memory
    calls.is_native = sums.is_native = lambda: False
    for dtype in ("float32", "bfloat16"):
        same(jax.jit(lambda x: fps.push_pull_finish(fps.push_pull_start(x, f"back {dtype}")))(
            jnp.full((3,), 1 + rank, dtype)), jnp.full((3,), 1.5, dtype))
"""


def test_the_other_operations_and_errors(tmp_path):
    run(COLLECTIVES, tmp_path, environ=SHARED)


DIFFERING = """
    import time
    def fails(tree, name, *words):
        began = time.monotonic()
        with pytest.raises(Exception, match="MismatchError") as caught:
            jax.block_until_ready(fps.push_pull(tree, name))
        assert time.monotonic() - began < 30
        for word in words:
            assert word in str(caught.value), caught.value
    few = {"a": jnp.ones(3), "b": jnp.ones((3, 5))}
    more = {"a": jnp.ones(3), "b": jnp.ones((5, 3))}  # as many bytes
    fails((few, more)[rank], "shapes", "shapes['b']", "(3, 5)", "(5, 3)", "worker 1")
    more = few | {"c": jnp.ones((2, 2), "float16")}
    fails((few, more)[rank], "count", "count['c']", "no such", "float16 of shape (2, 2)")
    more = few | {"c": jnp.ones(40_000)}
    fails((few, more)[rank], "large", "large['c']", "(40000,)")
    more = few | {"0": jnp.ones(2)}  # comes first
    fails((few, more)[rank], "first", "'first'", "worker 0", "worker 1")
    for count in (4, 2, 4, 2):  # one name for one tree after another, of other shapes
        for length in (3, 5, 40_000, 3):
            tree = {str(i): jnp.full(length, i + rank, "float32") for i in range(count)}
            same(fps.push_pull(tree, "again"),
                 {str(i): np.full(length, i + 0.5, "f4") for i in range(count)})
    same(fps.push_pull(few, "later"), few)
    fails((few, {"a": jnp.ones(3), "b": jnp.ones(4)})[rank], "later", "'later'", "(3, 5)", "(4,)")
    some = fps.add_process_set([0, 1])
    with pytest.raises(Exception, match=r"MismatchError.*\\(3, 5\\).*\\(5, 3\\)"):
        tree = {"a": jnp.ones(3), "b": jnp.ones((5, 3) if rank else (3, 5))}
        jax.block_until_ready(fps.push_pull(tree, "set", process_set=some))
"""


@pytest.mark.parametrize("environ", [{}, SHARED], ids=["servers", "shared memory"])
def test_trees_that_differ_are_a_mismatch_at_once(tmp_path, environ):
    run(DIFFERING, tmp_path, environ=environ | {"FASTPS_STALL_WATCH_S": "1"})


GRADIENTS = """
    def back(f, x):  # the gradient of what f gives, weighted by 1, 2, 3... times rank + 1
        def loss(x):
            y = f(x)
            return jnp.sum(y * (jnp.arange(1.0, 1.0 + y.size) * (rank + 1)).reshape(y.shape))
        return jax.grad(loss)(x)
    def gathered(x):
        return back(lambda x: fps.allgather(x, "ag"), x)
    weights = np.arange(1, 9, dtype="f4").reshape(4, 2)
    for wrap in (lambda f: f, jax.jit):
        x = jnp.ones((2, 2))
        for op, times in ((fps.Average, 1.5), (fps.Sum, 3)):
            same(wrap(lambda x: back(lambda x: fps.allreduce(x, f"r{times}", op=op), x))(x),
                 weights[:2] * np.float32(times))
            same(wrap(lambda x: back(lambda x: fps.reducescatter(x, f"s{times}", op=op), x))(x),
                 np.array([[1, 2], [2, 4]], "f4") * (2 if op is fps.Sum else 1))
        same(wrap(gathered)(x), weights[2 * rank : 2 + 2 * rank] * np.float32(1.5))
        same(wrap(lambda x: back(lambda x: fps.broadcast(x, 1, name="b"), x))(x),
             weights[:2] * np.float32(1.5 * rank))
        same(wrap(lambda x: back(lambda x: fps.alltoall(x, name="aa"), x))(jnp.ones((2, 1))),
             np.array([[[1], [2]], [[2], [4]]], "f4")[rank])
    x = jnp.ones((rank + 1, 2))  # three rows
    same(gathered(x), weights[rank : 1 + 2 * rank] * np.float32(1.5))
    x = jnp.ones((3, 1))  # one row goes to rank 0, two to rank 1
    same(back(lambda x: fps.alltoall(x, [1, 2], name="as")[0], x),
         np.array([[[1], [2], [4]], [[2], [6], [8]]], "f4")[rank])
    kept = jax.checkpoint(lambda x: fps.allgather(x, "again"))  # done again on the way back
    for wrap in (lambda f: f, jax.jit):
        same(wrap(lambda x: back(kept, x))(jnp.ones((2, 2))),
             weights[2 * rank : 2 + 2 * rank] * np.float32(1.5))
    with pytest.raises(ValueError, match="cannot be differentiated"):
        back(lambda x: fps.allreduce(x, "max", op=fps.Max), x)
"""


def test_operations_have_gradients(tmp_path):
    run(GRADIENTS, tmp_path, environ=SHARED)


TRAINING = """
    optax = pytest.importorskip("optax")
    def loss(p, x, y):
        h = jnp.tanh(x @ p["in"] + p["b"])
        return jnp.mean((h @ p["out"] - y) ** 2)
    def begin(seed):
        k = jax.random.split(jax.random.key(seed), 2)
        return {"in": jax.random.normal(k[0], (8, 300)), "b": jnp.zeros(300),
                "out": jax.random.normal(k[1], (300, 200))}
    def batch(step, part, parts):
        x = np.random.default_rng(step).normal(size=(8, 8)).astype("f4")
        y = np.repeat(x.sum(1, keepdims=True), 200, 1)
        return x[part::parts], y[part::parts]
    def train(tx, params, part, parts):
        state = tx.init(params)
        @jax.jit
        def step(params, state, x, y):
            gradients = jax.grad(loss)(params, x, y)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state
        for number in range(5):
            params, state = step(params, state, *batch(number, part, parts))
        return params
    params = fps.broadcast_parameters(begin(rank))
    for way in ({}, {"bucket_bytes": 0}, {"op": fps.Sum}):
        scale = 0.5 if "op" in way else 1.0
        tx = optax.chain(fps.distributed(optax.scale(scale), prefix=str(way), **way),
                         optax.adam(0.01))
        found = train(tx, params, rank, 2)
        alone = train(optax.adam(0.01), params, 0, 1)
        for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(one, two, rtol=2e-3, atol=2e-3)
        same(found, fps.broadcast_parameters(found))  # bit by bit
    several = optax.MultiSteps(fps.distributed(optax.sgd(0.1), prefix="m"), 2)
    found = train(several, params, rank, 2)
    same(found, fps.broadcast_parameters(found))
    coded = fps.distributed(optax.sgd(0.01), prefix="coded", compression=fps.Compression.int8)
    found = train(coded, params, rank, 2)
    same(found, fps.broadcast_parameters(found))
    plain = train(optax.sgd(0.01), params, 0, 1)
    np.testing.assert_allclose(found["out"], plain["out"], atol=0.05)
    with pytest.raises(TypeError, match="optax"):
        fps.distributed(3)
"""


@pytest.mark.parametrize("environ", [{}, SHARED], ids=["servers", "shared memory"])
def test_optax_steps_alike_everywhere(tmp_path, environ):
    run(TRAINING, tmp_path, environ=environ)


APART = """
    optax = pytest.importorskip("optax")
    params = {"w": jnp.full((3, 200), 1.0 + 7 * rank), "b": [jnp.zeros(()), jnp.ones(5, "f2")]}
    tx = fps.distributed(optax.sgd(0.5), asynchronous=True, staleness=0)
    state, step = tx.init(params), jax.jit(tx.update)
    for gradient in (1.0, 3.0):
        like = jax.tree.map(lambda p: jnp.full(p.shape, gradient + 4 * rank, p.dtype), params)
        updates, state = step(like, state, params)
        params = optax.apply_updates(params, updates)
    fps.barrier()
    moved = 0.5 * (1 + 3 + 5 + 7)  # from rank 0's, of both workers
    same(params, {"w": np.full((3, 200), 1 - moved, "f4"),
                  "b": [np.float32(-moved), np.full(5, 1 - moved, "f2")]})
    free = fps.distributed(optax.adam(0.1), asynchronous=True, prefix="free")
    x, state = jnp.full((4,), 3.0), free.init(jnp.zeros(4))
    @jax.jit
    def train(x, state):
        updates, state = free.update(2 * x, state, x)
        return optax.apply_updates(x, updates), state
    for _ in range(80):
        x, state = train(x, state)
    assert float(jnp.abs(x).max()) < 1, x
    with pytest.raises(TypeError, match="update.gradients, state, params"):
        free.update(x, state)
    with pytest.raises(ValueError, match="asynchronous=True"):
        fps.distributed(optax.sgd(0.1), staleness=1)
    with pytest.raises(ValueError, match="does not compress"):
        fps.distributed(optax.sgd(0.1), asynchronous=True, compression=fps.Compression.fp16())
    fps.barrier()
"""


def test_servers_hold_parameters(tmp_path):
    """In step, so that sums are exact; and at each one's pace, where only a minimum is sure."""
    run(APART, tmp_path, servers=1, environ={"FASTPS_SHARED_MEMORY": "0"})


AHEAD = """
    import time
    from fastps.frameworks.jax import calls
    def run(how, count, side):
        def late(device, inputs, outputs):
            if rank == 0:
                time.sleep(0.1)
            np.copyto(outputs[0], inputs[0])
        def step(x):
            here = calls.call("late", lambda: late, [x], calls.shapes_of([x]), is_pure=True)
            return fps.push_pull(here[0] @ here[0], how) / side
        x, step = jnp.ones((side, side)), jax.jit(step)
        for _ in range(count):
            x = step(x)
        if rank == 0:
            assert float(x.max()) == 1
            print("seen by rank 0", how)
    run("before shutdown", 5, 600)
    fps.shutdown()
    fps.init()
    run("before the end of the program", 5, 600)
"""


def test_nobody_leaves_before_its_steps_have_run(tmp_path):
    """JAX only starts them: rank 1 calls shutdown(), and ends, while rank 0 is at its first."""
    found = run(AHEAD, tmp_path)
    assert found.stdout.count("seen by rank 0") == 2


ROOM = """
    optax = pytest.importorskip("optax")
    def loss(params, x):
        for weights in params:
            x = jnp.tanh(x @ weights)
        return (x * x).mean()
    def temporary(optimizer):
        def step(params, state, x):
            updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
            return optax.apply_updates(params, updates), state
        state = optimizer.init(params)
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, jnp.ones((4, 512)))
        return lowered.compile().memory_analysis().temp_size_in_bytes
    params = [jnp.zeros((512, 512))] * 12  # 1 MiB each
    for optimizer in (optax.sgd(0.1), optax.adam(0.1)):
        assert temporary(fps.distributed(optimizer)) <= temporary(optimizer) + 2 * params[0].nbytes
    @jax.jit
    def some(tree):  # a program that needs one result ends with all
        return fps.push_pull_finish(fps.push_pull_start(tree, "some", average=False))["b"]
    for number in range(3):
        x = jnp.full((200, 200), number + rank)
        same(some({"a": x, "b": 2 * x, "c": 3 * x}), np.full((200, 200), 4 * number + 2, "i4"))
"""


def test_a_step_needs_little_memory_besides_that_of_one_without_averages(tmp_path):
    run(ROOM, tmp_path)


@pytest.mark.parametrize(
    "fault", ["local_arrive@40", "local_arrive@41", "local_arrive@42", "local_arrive@43"]
)
def test_a_tree_is_of_the_same_workers_when_one_dies(fault):
    with Job(
        programs_jax_elastic.steps, workers=3, servers=0,
        environment={**SHARED, "FASTPS_ELASTIC_MIN": "1"},
        each={("worker", 1): {"FASTPS_FAULT": f"{fault}:kill"}},
    ) as job:  # fmt: skip
        assert job.workers[1].wait() < 0
        found = [job.workers[rank].result()["found"] for rank in (0, 2)]
    assert found[0] == found[1]
    assert set(map(tuple, found[0])) == {(7.0,), (5.0,)}


def test_nothing_but_jax_is_imported():
    script = (
        "import sys, fastps.jax; "
        "assert not {'torch', 'tensorflow', 'keras', 'mxnet', 'optax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], env=clean_environ(), cwd=ROOT, check=True)


def test_the_example_reads_digits():
    result = run_example("examples/jax_digits.py")
    assert float(result.stdout.split()[-1]) > 0.9
