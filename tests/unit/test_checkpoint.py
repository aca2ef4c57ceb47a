# SPDX-License-Identifier: Apache-2.0
"""What is restored is what was saved, and what has changed since is refused.

Workers are threads here, whose words cross a barrier; tests/cluster/test_checkpoints.py has jobs.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aids.thread_teams import save_by
from fastps import checkpoint
from fastps.checkpoint import folders, formats, saving, shares, trees
from fastps.checkpoint.shares import Piece
from fastps.checkpoint.trees import Shard, Tensor
from fastps.errors import CheckpointError, StallError

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
SMALL = {"w": np.arange(6, dtype=np.int16), "step": 3}


class Pair(NamedTuple):
    """A state as optimizers have them."""

    first: Any
    second: Any


def errors_of(handles: list[saving.SaveHandle]) -> list[BaseException]:
    """Return the errors of saves that have all failed."""
    assert all(handle._error is not None for handle in handles)
    return [handle._error for handle in handles if handle._error is not None]


def same(one: Any, other: Any) -> bool:
    """Return whether two states are the same, types, dtypes and bits."""
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and (one.dtype.newbyteorder("="), one.shape) == (other.dtype, other.shape)
            and one.astype(other.dtype).tobytes() == other.tobytes()
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


DTYPES = [
    *(np.dtype(name) for name in trees.CODES if hasattr(np, name if name != "bool" else "bool_")),
    np.dtype(ml_dtypes.bfloat16), np.dtype(">f4"),
]  # fmt: skip
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def tensors_of(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Draw an array of any dtype and shape, perhaps not contiguous."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    count = math.prod(shape)
    data = rng.integers(0, 2 if dtype.kind == "b" else 256, count * dtype.itemsize, np.uint8)
    array = data.view(dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=5),
    st.binary(max_size=5),
)  # fmt: skip
KEYS = st.one_of(st.text(max_size=4), st.integers(0, 9), st.tuples(st.integers(0, 3)))
STATES = st.recursive(
    st.one_of(tensors_of(), PLAIN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(state=STATES, workers=st.integers(1, 5), own=STATES)
def test_what_is_restored_is_what_was_saved(tmp_path_factory, state, workers, own):
    folder = tmp_path_factory.mktemp("saved")
    for handle in save_by([state] * workers, folder, own=[own] * workers):
        assert handle.wait() == folder / "step-1.1"
    found = checkpoint.restore(folder)
    assert found is not None
    assert same(state, found.state)
    assert len(found.own) == workers
    assert all(same(own, one) for one in found.own)
    assert checkpoint.verify(folder) == []
    shutil.rmtree(folder)


TENSORS = st.lists(
    st.builds(
        Tensor, st.just(""), st.sampled_from(["uint8", "float32", "float64"]), SHAPES,
        st.just("numpy"), st.sampled_from([False, False, False, True]),
    ),
    max_size=6,
)  # fmt: skip


@given(TENSORS, st.integers(1, 7))
def test_shares_cover_all_tensors_and_have_about_the_same_bytes(tensors, workers):
    found = [shares.share_of(tensors, worker, workers) for worker in range(workers)]
    for number, tensor in enumerate(tensors):
        pieces = [piece for share in found for piece in share if piece.tensor == number]
        assert shares.covers(tensor.shape, pieces) or tensor.is_sharded
        assert not (pieces and tensor.is_sharded)
        for piece in pieces:
            span = shares.flat_range(tensor, piece)
            assert span is not None
            whole = np.arange(math.prod(tensor.shape)).reshape(tensor.shape)
            box = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.shape, strict=True))
            assert whole[box].reshape(-1).tolist() == list(range(*span))
    for share in found:
        assert len({piece.tensor for piece in share}) == len(share)
    plain = [tensor for tensor in tensors if not tensor.is_sharded]
    row = max((tensor.nbytes // shares._rows(tensor) for tensor in plain), default=0)
    sizes = [
        sum(piece.n_elements * trees.itemsize_of(tensors[piece.tensor].dtype) for piece in share)
        for share in found
    ]
    assert max(sizes) <= sum(sizes) / workers + 2 * row


BOXES = st.lists(
    st.tuples(
        st.tuples(st.integers(-1, 3), st.integers(-1, 3)),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=4,
)  # fmt: skip


@given(st.tuples(st.integers(0, 3), st.integers(0, 3)), BOXES)
def test_covers_finds_gaps_and_overlaps(shape, boxes):
    count = np.zeros(shape, int)
    is_inside = True
    for offsets, size in boxes:
        is_inside &= all(
            at >= 0 and at + n <= whole for at, n, whole in zip(offsets, size, shape, strict=True)
        )
        if is_inside:
            count[tuple(slice(at, at + n) for at, n in zip(offsets, size, strict=True))] += 1
    pieces = [Piece(0, offsets, size) for offsets, size in boxes]
    assert shares.covers(shape, pieces) == (is_inside and bool((count == 1).all()))


@settings(max_examples=40)
@given(data=st.data(), shape=arrays.array_shapes(max_dims=3, max_side=6))
def test_parts_of_tensors_come_back_from_other_parts(tmp_path_factory, data, shape):
    """Workers hold slices of a tensor, and others of another number take other slices."""
    folder = tmp_path_factory.mktemp("sharded")
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    n_cuts = data.draw(st.integers(0, 3))
    inner = sorted(data.draw(st.integers(0, shape[axis])) for _ in range(n_cuts))
    cuts = [0, *inner, shape[axis]]
    states = []
    for start, stop in itertools.pairwise(cuts):
        part = whole.take(range(start, stop), axis)
        offsets = [start if one == axis else 0 for one in range(len(shape))]
        states.append({"w": Shard(part, shape, offsets), "b": np.ones(5)})
    for handle in save_by(states, folder):
        handle.wait()
    restored = checkpoint.restore(folder)
    assert restored is not None
    assert same(whole, restored.state["w"])
    box = []
    for length in shape:
        start = data.draw(st.integers(0, length))
        box.append(slice(start, data.draw(st.integers(start, length))))
    restored = checkpoint.restore(folder, parts={"w": tuple(box)})
    assert restored is not None
    assert same(np.ascontiguousarray(whole[tuple(box)]), restored.state["w"])
    assert same(np.ones(5), restored.state["b"])
    shutil.rmtree(folder)


def test_parts_that_leave_a_gap_are_refused(tmp_path):
    states = [{"w": Shard(np.zeros(2), [5], [at])} for at in (0, 3)]
    for error in errors_of(save_by(states, tmp_path / "a")):
        assert "the pieces of tensor 'w' do not cover it" in str(error)
    assert os.listdir(tmp_path / "a") == []
    with pytest.raises(ValueError, match="lies outside"):
        Shard(np.zeros(3), [4], [2])


# ---- what has changed


def expect_refusal(folder: Path, *names: str) -> None:
    """Check that restoring raises, and names what has changed."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(folder)
    for name in names:
        assert name in str(caught.value)


def saved_small(folder: Path) -> Path:
    """Save the small state, and return the folder of the checkpoint."""
    return checkpoint.save(SMALL, folder, step=3)


@pytest.mark.parametrize("name", ["00000-of-00001.safetensors", formats.MANIFEST])
def test_each_flipped_bit_is_found(tmp_path, name):
    path = saved_small(tmp_path / "a") / name
    data = path.read_bytes()
    for bit in range(len(data) * 8):
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        expect_refusal(tmp_path / "a", name)
    path.write_bytes(data)
    assert checkpoint.restore(tmp_path / "a") is not None


@pytest.mark.parametrize("name", ["00000-of-00001.safetensors", formats.MANIFEST])
def test_each_truncation_and_a_missing_file_are_found(tmp_path, name):
    path = saved_small(tmp_path / "a") / name
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        expect_refusal(tmp_path / "a", name)
    path.write_bytes(data + b"\n")
    expect_refusal(tmp_path / "a", name)
    path.unlink()
    expect_refusal(tmp_path / "a", name, "missing")
    assert "missing" in checkpoint.verify(tmp_path / "a")[0]


def test_changed_tensors_are_named(tmp_path):
    state = {"a": np.zeros(8), "b": np.ones((4, 2), np.float32)}
    handles = save_by([state, state], tmp_path)
    path = handles[0].wait() / "00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (fault,) = checkpoint.verify(tmp_path)
    assert "tensor 'b'" in fault
    assert path.name in fault
    expect_refusal(tmp_path, "tensor 'b'", str(path))


def test_a_file_of_another_checkpoint_is_found(tmp_path):
    one, other = (
        checkpoint.save({"w": np.full(6, value)}, tmp_path, step=value) for value in (1, 2)
    )
    name = "00000-of-00001.safetensors"
    shutil.copy(one / name, other / name)
    expect_refusal(tmp_path, "tensor 'w'", "the one before is of step 1", "fallback=True")
    assert checkpoint.restore(tmp_path, fallback=True).step == 1
    assert checkpoint.restore(tmp_path, step=1).step == 1
    (one / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tensor 'w'.*0 bytes"):
        checkpoint.restore(tmp_path, fallback=True)


def digested(words: Any) -> bytes:
    """Return a manifest with the right digest, whatever it says."""
    rest = json.dumps(words)[1:].encode()
    return formats._FIRST.format(formats.digest_of(rest)).encode() + rest


def edits(words: Any) -> Iterator[Any]:
    """Yield each value within a manifest, replaced or removed."""
    for key in list(words) if isinstance(words, dict) else range(len(words)):
        before = words[key]
        if isinstance(before, dict | list):
            yield from edits(before)
        for value in (None, -1, 1 << 40, "x", [], [[]], {}, 0.5, True):
            words[key] = value
            yield before
        words[key] = before
        if isinstance(words, dict):
            del words[key]
            yield before
            words[key] = before


def test_a_manifest_that_nobody_has_written_is_refused_or_reads_the_same(tmp_path):
    path = saved_small(tmp_path / "a") / formats.MANIFEST
    words = json.loads(path.read_bytes())
    del words["sha256"]
    for before in edits(words):
        path.write_bytes(digested(words))
        try:
            found = checkpoint.restore(tmp_path / "a")
        except CheckpointError:
            continue
        assert found is not None
        assert before is not words["format"]


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\x80\x04.", b'{"sha256": "0"}'])
def test_foreign_files_are_refused(tmp_path, text):
    folder = tmp_path / "a" / "step-7.1"
    folder.mkdir(parents=True)
    (folder / formats.MANIFEST).write_bytes(text)
    expect_refusal(tmp_path / "a", "not a manifest of fastps")


@needs_root
def test_what_others_can_write_is_refused(tmp_path):
    path = saved_small(tmp_path / "a")
    file = path / formats.MANIFEST
    os.chown(file, NOBODY, NOBODY)
    expect_refusal(tmp_path / "a", "belongs to user")
    os.chown(file, 0, 0)
    for place in (file, path, tmp_path / "a"):
        mode = place.stat().st_mode
        place.chmod(0o777)
        expect_refusal(tmp_path / "a", "other users can write")
        place.chmod(mode)
    file.rename(tmp_path / "m")
    file.symlink_to(tmp_path / "m")
    expect_refusal(tmp_path / "a", "not a regular file")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(CheckpointError, match="belongs to user"):
        checkpoint.save(SMALL, theirs, step=1)
    assert os.listdir(theirs) == []


# ---- folders


def test_the_newest_is_the_last_that_was_saved(tmp_path):
    for step in (5, 20, 10, 10):
        checkpoint.save({"w": np.full(3, step)}, tmp_path, step=step, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["step-10.3", "step-10.4", "step-20.2"]
    assert checkpoint.steps(tmp_path) == [20, 10]
    assert checkpoint.latest_step(tmp_path) == 10
    assert checkpoint.restore(tmp_path).path == tmp_path / "step-10.4"
    assert checkpoint.restore(tmp_path, step=20).state["w"].tolist() == [20, 20, 20]
    with pytest.raises(CheckpointError, match=r"of step 6, only \[20, 10, 10\]"):
        checkpoint.restore(tmp_path, step=6)


def test_an_empty_folder_has_none(tmp_path):
    assert checkpoint.restore(tmp_path / "none") is None
    assert checkpoint.latest_step(tmp_path) is None
    assert checkpoint.steps(tmp_path) == []
    (tmp_path / "other.txt").write_text("x")
    (tmp_path / "step-x").mkdir()
    assert checkpoint.restore(tmp_path) is None
    assert "no complete checkpoint" in checkpoint.verify(tmp_path)[0]


def test_another_job_is_kept_out(tmp_path):
    saved_small(tmp_path)
    with (
        folders.locked(tmp_path),
        pytest.raises(CheckpointError, match="another job writes checkpoints"),
    ):
        saved_small(tmp_path)
    saved_small(tmp_path)


def test_training_may_change_the_state_at_once(tmp_path):
    weights = np.zeros(1 << 20)
    handle = checkpoint.save_async({"w": weights}, tmp_path, step=1)
    weights[...] = 7
    handle.wait()
    assert not checkpoint.restore(tmp_path).state["w"].any()
    second = checkpoint.save_async({"w": weights}, tmp_path, step=2)
    third = checkpoint.save_async({"w": weights + 1}, tmp_path, step=3)
    assert second.poll()  # the third has waited for it
    third.wait()
    assert (checkpoint.restore(tmp_path).state["w"] == 8).all()


def test_a_wait_can_end_before_the_save(tmp_path, monkeypatch):
    go = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (go.wait(60), fsync(fd))[1])
    handle = checkpoint.save_async(SMALL, tmp_path, step=1)
    assert not handle.poll()
    with pytest.raises(StallError, match="step 1 is not complete"):
        handle.wait(timeout_s=0.01)
    go.set()
    assert handle.wait() == tmp_path / "step-1.1"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [1, object()]}, r"state\['a'\]\[1\] is of type object"),
        ({"a": np.array(["x"])}, r"state\['a'\]: arrays of dtype <U1"),
        ({"a": np.ma.masked_array([1])}, "masked"),
        ({object(): 1}, "state is of type list"),
        ((trees.MARK, 0), "must not begin"),
    ],
)
def test_values_that_cannot_be_saved_are_named(tmp_path, state, words):
    with pytest.raises(TypeError, match=words):
        checkpoint.save(state, tmp_path, step=1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("wish", "words"),
    [({"step": -1}, "0 or more"), ({"step": 1, "keep": 0}, "1 or more, or None")],
)
def test_arguments_are_checked(tmp_path, wish, words):
    with pytest.raises(ValueError, match=words):
        checkpoint.save_async(SMALL, tmp_path, **wish)
    with pytest.raises(TypeError):
        checkpoint.save_async(SMALL, tmp_path, step="1")


# ---- what fails on one worker, fails on all


def test_a_worker_whose_state_cannot_be_saved_is_named(tmp_path):
    first, second = errors_of(save_by([SMALL, {"w": object()}], tmp_path))
    assert isinstance(first, CheckpointError)
    assert "worker 1: state['w'] is of type object" in str(first)
    assert isinstance(second, TypeError)
    assert os.listdir(tmp_path) == []


def test_workers_that_differ_are_told(tmp_path):
    for error in errors_of(save_by([SMALL, {"w": np.zeros(5)}], tmp_path)):
        assert "workers 0 and 1 have different tensors" in str(error)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_to_all_and_survived(tmp_path, monkeypatch):
    state = {"w": np.arange(4000.0)}
    save_by([state] * 3, tmp_path)[0].wait()
    write, names = os.write, {}

    def fill(descriptor: int, data: Any) -> int:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "00002-of" in name and names.setdefault(name, 0) > 100:
            raise OSError(28, "No space left on device")
        names[name] = names.get(name, 0) + len(data)
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill)
        for error in errors_of(save_by([state] * 3, tmp_path, step=2, keep=1)):
            assert isinstance(error, CheckpointError)
            assert "worker 2" in str(error)
            assert "No space left on device" in str(error)
            assert "00002-of-00003.safetensors" in str(error)
    assert os.listdir(tmp_path) == ["step-1.1"]  # with nothing left of the other
    save_by([state] * 3, tmp_path, step=3, keep=1)[0].wait()
    assert os.listdir(tmp_path) == ["step-3.2"]


def test_a_manifest_that_cannot_be_written_is_told_to_all(tmp_path, monkeypatch):
    save_by([SMALL] * 2, tmp_path)[0].wait()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system", "x")

    with monkeypatch.context() as patch:
        patch.setattr(folders.Folder, "rename", refuse)
        for error in errors_of(save_by([SMALL] * 2, tmp_path, step=2)):
            assert "x: Read-only file system" in str(error)
    assert os.listdir(tmp_path) == ["step-1.1"]


def test_a_worker_that_cannot_see_the_folder_is_named(tmp_path, monkeypatch):
    """As on a machine that does not share the file system."""
    seen = saving.open_folder

    def open_folder(path: Path, *, is_made: bool = True) -> Any:
        if threading.current_thread().name == "fastps-checkpoint" and not is_made:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return seen(path, is_made=is_made)

    monkeypatch.setattr(saving, "open_folder", open_folder)
    for error in errors_of(save_by([SMALL] * 2, tmp_path)):
        assert "worker 1" in str(error)
        assert "all workers need to see the same folder" in str(error)


def test_the_digest_is_of_what_was_copied(tmp_path):
    """Not of what was written: so bytes that the disk got wrong are found."""
    seen: list[bytes] = []
    write = os.write

    def spoil(descriptor: int, data: Any) -> int:
        seen.append(bytes(data))
        is_data = len(data) == SMALL["w"].nbytes
        return write(descriptor, bytes([data[0] ^ 1]) + bytes(data[1:]) if is_data else data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", spoil)
        saved_small(tmp_path)
    assert SMALL["w"].tobytes() in seen
    expect_refusal(tmp_path, "tensor 'w'")


def test_files_are_those_of_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    state = {"w": np.arange(6.0).reshape(2, 3), "n": {"b": np.ones(3, np.int8)}, "s": np.array(2)}
    path = checkpoint.save(state, tmp_path, step=1)
    found = safetensors.load_file(path / "00000-of-00001.safetensors")
    wanted = {"n.b": state["n"]["b"], "s": state["s"], "w": state["w"]}
    assert same(dict(sorted(found.items())), wanted)


class Duck:
    """An array of another framework."""

    dtype, shape = np.dtype(np.float32), (2, 2)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        """Return it as NumPy's."""
        return np.eye(2, dtype=np.float32)


def test_arrays_of_other_frameworks_are_saved_as_numpy_ones(tmp_path):
    checkpoint.save([Duck()], tmp_path, step=1)
    assert same(checkpoint.restore(tmp_path).state, [np.eye(2, dtype=np.float32)])


def test_names_are_unique(tmp_path):
    state = {"a": {"b": np.ones(1)}, "a.b": np.zeros(2), "__metadata__": np.ones(3)}
    checkpoint.save(state, tmp_path, step=1)
    assert same(checkpoint.restore(tmp_path).state, state)


def test_parts_are_checked(tmp_path):
    saved_small(tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"v": ()}, "no tensor 'v'"),
        ({"w": (slice(0, 1), slice(0, 1))}, "2 slices for tensor 'w'"),
        ({"w": (slice(0, 4, 2),)}, "stride 1"),
    ]
    for parts, words in cases:
        with pytest.raises(CheckpointError, match=words):
            checkpoint.restore(tmp_path, parts=parts)


def test_the_memory_of_a_snapshot_is_used_again(tmp_path):
    from fastps.checkpoint import snapshot  # noqa: PLC0415

    checkpoint.save({"w": np.zeros(1000)}, tmp_path, step=1)
    (memory,) = snapshot._spare
    checkpoint.save({"w": np.zeros(10)}, tmp_path, step=2)
    assert snapshot._spare == [memory]
