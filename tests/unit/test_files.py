# SPDX-License-Identifier: Apache-2.0
"""What other users put in the way of a job's files is not followed, read or waited for."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastps import _core, config
from fastps.collectives.objects import encode_object
from fastps.control.foreign_launch import FileBoard
from fastps.errors import ConfigError, FastPSError
from fastps.files import make_folders, open_folder, open_shared, read_file
from fastps.frameworks import saved_states
from fastps.launch import timeline
from fastps.telemetry.recorder import Recorder
from fastps.telemetry.spans import RECORD

NOBODY = 65534
LIMIT_S = 20.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def mode_of(path: Path) -> int:
    """Return the permissions of a file or folder."""
    return stat.S_IMODE(path.stat().st_mode)


def within(limit_s: float, work: Callable[[], object]) -> BaseException | None:
    """Run something that may block for ever; return its error."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            found.append(None)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert found, f"it still waits after {limit_s} s"
    return found[0]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Make a folder like /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def theirs(shared: Path) -> Path:
    """Make a folder of another user in the shared one."""
    folder = shared / "theirs"
    folder.mkdir(mode=0o755)
    os.chown(folder, NOBODY, NOBODY)
    return folder


def leave_trace(folder: Path) -> None:
    """Leave the trace of a process."""
    who = {"role": "worker", "rank": 0, "number": 0, "host": "h", "boot": "a", "pid": 1}
    for name, data in (("job-0.jsonl", json.dumps({"who": who}).encode() + b"\n"),
                       ("job-0.spans", np.zeros(0, RECORD).tobytes())):  # fmt: skip
        (folder / name).write_bytes(data)


# ---- folders


def test_a_closed_folder_is_not_the_working_folder(tmp_path):
    folder = open_folder(tmp_path)
    folder.close()
    with pytest.raises(OSError, match="the folder was closed"):
        folder.names()


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    with open_folder(tmp_path / "a" / "b") as folder:
        os.close(folder.make("new"))
    made = [tmp_path / "a", tmp_path / "a" / "b"]
    assert [mode_of(path) for path in made] == [0o700] * 2
    assert mode_of(made[1] / "new") == 0o600
    make_folders(tmp_path / "a" / "b")


def test_a_folder_that_others_can_write_is_refused_with_the_cure(tmp_path: Path) -> None:
    for mode in (0o777, 0o1777, 0o702):
        tmp_path.chmod(mode)
        with pytest.raises(PermissionError, match=rf"mode {mode:04o}.*chmod go-w {tmp_path}"):
            open_folder(tmp_path)
    tmp_path.chmod(0o755)
    open_folder(tmp_path).close()


@needs_root
def test_only_a_group_of_the_owner_s_number_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    open_folder(tmp_path).close()
    os.chown(tmp_path, 0, 100)
    tmp_path.chmod(0o770)
    with pytest.raises(PermissionError, match="other users can write"):
        open_folder(tmp_path)


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match=f"it is a link: name the folder itself, {tmp_path}"):
        open_folder(tmp_path / "link")


@needs_root
def test_a_folder_of_another_user_is_refused(theirs: Path) -> None:
    with pytest.raises(PermissionError, match=rf"user {NOBODY}; it must belong to user 0"):
        open_folder(theirs)


def test_a_folder_that_was_swapped_is_not_looked_at_again(tmp_path: Path) -> None:
    with open_folder(tmp_path / "a") as folder:
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").mkdir()
        with folder.replace("x") as file:
            file.write(b"1")
        assert folder.names() == ["x"]
        assert folder.has("x")
        assert not folder.has("y")
    assert (tmp_path / "b" / "x").read_bytes() == b"1"
    assert not list((tmp_path / "a").iterdir())


# ---- files


def test_what_is_read_is_a_regular_file_and_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as sock, open_folder(tmp_path) as folder:
        sock.bind(f"/proc/self/fd/{folder.descriptor}/socket")
        for name in ("pipe", "link", "folder", "socket"):
            error = within(LIMIT_S, lambda name=name: folder.read(name))
            assert isinstance(error, OSError), name
            assert "not a regular file" in str(error)
    error = within(LIMIT_S, lambda: read_file(tmp_path / "pipe"))
    assert "not a regular file" in str(error)
    with read_file(tmp_path / "link") as file:
        assert file.read() == b"x"


@needs_root
def test_what_is_read_was_written_by_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    with open_folder(tmp_path) as folder:
        os.chmod(tmp_path / "x", 0o644)
        folder.read("x").close()
        with pytest.raises(PermissionError, match=r"mode 0644.*remove it"):
            folder.read("x", is_private=True)
        os.chmod(tmp_path / "x", 0o602)
        with pytest.raises(PermissionError, match=r"mode 0602.*chmod go-w"):
            folder.read("x")
        os.chmod(tmp_path / "x", 0o600)
        os.chown(tmp_path / "x", NOBODY, NOBODY)
        with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}"):
            folder.read("x")


def test_a_file_that_could_not_be_finished_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("before")
    with open_folder(tmp_path) as folder:
        with contextlib.suppress(ZeroDivisionError), folder.replace("x") as file:
            file.write(b"half")
            raise ZeroDivisionError
        assert folder.names() == ["x"]
    assert (tmp_path / "x").read_text() == "before"


# ---- who uses it


@needs_root
def test_a_timeline_in_a_shared_folder_overwrites_no_file_of_another_user(shared: Path) -> None:
    victim = shared / "victim"
    victim.write_text("precious")
    target = shared / "job.json"
    timeline.clear(target)
    leave_trace(timeline.parts_of(target))
    target.write_text("theirs")
    os.chown(target, NOBODY, NOBODY)
    with pytest.raises(FastPSError, match=rf"job.json: it belongs to user {NOBODY}"):
        timeline.collect(target, is_whole=False)
    target.unlink()
    target.symlink_to(victim)
    with pytest.raises(FastPSError, match="not a regular file"):
        timeline.collect(target, is_whole=False)
    target.unlink()
    shared.joinpath(f"job.json.{os.getpid()}.part").symlink_to(victim)
    timeline.collect(target, is_whole=True)
    assert mode_of(target) == 0o600
    assert victim.read_text() == "precious"
    assert not timeline.parts_of(target).exists()


@needs_root
def test_traces_are_neither_removed_from_nor_written_to_a_folder_of_another_user(
    theirs: Path,
) -> None:
    leave_trace(theirs)
    with pytest.raises(PermissionError, match=f"user {NOBODY}"):
        timeline.clear(theirs.rename(theirs.with_name("job.json.parts")).with_suffix(""))
    folder = theirs.with_name("job.json.parts")
    assert len(list(folder.iterdir())) == 2
    settings = config.load({"trace_dir": str(folder)}, environ={})
    with pytest.raises(ConfigError, match=rf"FASTPS_TRACE_DIR=.*user {NOBODY}.*only this user"):
        Recorder(settings, role="worker", rank=0, number=0, host_id="here", ping=_core.clock_ns)
    link = folder.with_name("link.parts")
    link.symlink_to(folder)
    with pytest.raises(OSError, match="it is a link"):
        timeline.clear(link.with_suffix(""))


def test_a_trace_follows_no_link_and_is_private(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "trace"
    folder.mkdir(mode=0o700)
    name = f"job-worker0-{os.getpid()}"
    for suffix in (".jsonl", ".spans"):
        (folder / f"{name}{suffix}").symlink_to(victim)
    settings = config.load({"trace_dir": str(folder), "job_id": "job"}, environ={})
    Recorder(
        settings, role="worker", rank=0, number=0, host_id="here", ping=_core.clock_ns
    ).close()
    assert victim.read_text() == "precious"
    assert {mode_of(path) for path in folder.iterdir()} == {0o600}


@needs_root
def test_commits_of_another_user_are_not_loaded(theirs: Path, tmp_path: Path) -> None:
    def room(_: object) -> tuple[None, memoryview]:
        raise AssertionError("there are no tensors")

    path = theirs / "commit-1.fastps"
    for work in (
        lambda: saved_states.write(path, {"epoch": 1}, [], []),
        lambda: saved_states.read(path, room),
        lambda: saved_states.exists(path),
    ):
        with pytest.raises(FastPSError, match=f"belongs to user {NOBODY}"):
            work()
    own = tmp_path / "own" / path.name
    saved_states.write(own, {"epoch": 1}, [], [])
    assert mode_of(own) == 0o600
    assert saved_states.read(own, room) == ({"epoch": 1}, [])
    os.chown(own, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=rf"cannot be used: .*belongs to user {NOBODY}"):
        saved_states.read(own, room)
    assert own.exists()  # not taken for damaged


@pytest.mark.parametrize("head", [[], {"value": 1}, {"value": 1, "tensors": 2, "digests": []}])
def test_a_commit_with_another_head_is_damaged(tmp_path: Path, head: object) -> None:
    """Its digest is right, so no disk has changed it."""
    path, data = tmp_path / "commit-1.fastps", encode_object(head)
    end = saved_states._END.pack(saved_states._MAGIC, len(data), saved_states._digest(data))
    path.write_bytes(data + end)
    with pytest.raises(ConfigError, match="is not one of fastps"):
        saved_states.read(path, lambda _: (None, memoryview(b"")))


@pytest.mark.parametrize(("error", "named"), [(MemoryError, FastPSError), (KeyError, ConfigError)])
def test_a_description_of_which_no_tensor_can_be_made(tmp_path: Path, error, named) -> None:
    def room(_: object) -> tuple[None, memoryview]:
        raise error("x")

    path = tmp_path / "commit-1.fastps"
    saved_states.write(path, {}, ["huge"], [memoryview(b"1234")])
    with pytest.raises(named, match="tensor 0, 'huge'"):
        saved_states.read(path, room)
    assert path.exists()  # with too little memory it is not damaged


def test_a_commit_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "commits"
    folder.mkdir(mode=0o700)
    (folder / "commit-1.new").symlink_to(victim)
    saved_states.write(folder / "commit-1.fastps", {"epoch": 1}, [], [])
    assert victim.read_text() == "precious"


@needs_root
def test_a_meeting_waits_for_no_pipe_and_trusts_no_other_user(shared: Path) -> None:
    board = FileBoard(shared / "board")
    os.mkfifo(shared / "board", 0o600)
    error = within(LIMIT_S, lambda: board.read(timeout_s=1))
    assert isinstance(error, ConfigError)
    assert "not a regular file" in str(error)
    with pytest.raises(ConfigError, match="not a regular file"):
        board.post("secret")
    (shared / "board").unlink()
    (shared / "board").write_text("theirs")
    os.chmod(shared / "board", 0o600)
    os.chown(shared / "board", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=rf"not trusted .*user {NOBODY}"):
        board.read(timeout_s=1)
    with pytest.raises(ConfigError, match=f"user {NOBODY}"):
        board.post("secret")
    assert (shared / "board").read_text() == "theirs"


def test_a_token_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    environ = {"FASTPS_TOKEN_FILE": str(tmp_path / "token")}
    error = within(LIMIT_S, lambda: config.load({"size": 2}, environ).token_bytes())
    assert isinstance(error, ConfigError)
    assert "not a regular file" in str(error)


def test_a_disk_that_is_full_ends_no_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process may merge meanwhile: an error there is logged."""
    settings = config.load({"trace_dir": str(tmp_path / "trace")}, environ={})
    recorder = Recorder(
        settings, role="worker", rank=0, number=0, host_id="here", ping=_core.clock_ns
    )
    (tmp_path / "trace" / "foreign.jsonl").symlink_to("nowhere")
    with caplog.at_level(logging.WARNING):
        recorder.close()
    assert "not a regular file" in caplog.text


def test_a_shared_folder_is_opened_whoever_owns_it(shared: Path) -> None:
    with open_shared(shared) as folder, folder.replace("x") as file:
        file.write(b"1")
    assert mode_of(shared / "x") == 0o600
