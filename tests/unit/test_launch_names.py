# SPDX-License-Identifier: Apache-2.0
"""Names of the scheduler's machine that come late, or that lead to the wrong machine."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from fastps.config import load
from fastps.control import dial
from fastps.errors import ConfigError, FastPSError, TransportTimeout
from fastps.launch import run


@pytest.fixture
def names(monkeypatch):
    """Let a test say what names stand for; one that is not there is unknown."""
    known: dict[str, str] = {}
    asked: list[str] = []
    theirs = socket.getaddrinfo

    def look_up(host, port, *, type=0, flags=0):
        if host not in known and "." in host:
            return theirs(host, port, type=type, flags=flags)
        if not flags & socket.AI_NUMERICHOST:
            asked.append(host)
        if flags & socket.AI_NUMERICHOST or host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return theirs(known[host], port, type=type, flags=flags)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known, asked


def test_the_own_name_may_come_late(names):
    known, asked = names
    said: list[str] = []

    def report(text: str) -> None:
        said.append(text)
        known["late"] = "127.0.0.1"

    listeners = run._listen("late", 0, timeout_s=60, report=report)
    assert [one.getsockname()[0] for one in listeners] == ["127.0.0.1"]
    for one in listeners:
        one.close()
    assert len(asked) == 2
    assert len(said) == 1
    assert said[0].startswith("cannot listen on 'late': unknown host (Name or service not known)")
    assert said[0].endswith("Retrying for up to 60 s")


def test_a_name_that_never_comes_is_refused_in_time(names):
    with pytest.raises(ConfigError, match=r"unknown host .*; set FASTPS_HOST"):
        run._listen("never", 0, timeout_s=0.05, report=lambda _: None)


@pytest.mark.parametrize(
    ("name", "is_said"), [("debian", True), ("localhost", False), ("127.0.0.1", False)]
)
def test_a_name_that_leads_here_is_said_where_others_dial_it(names, name, is_said):
    names[0].update(debian="127.0.1.1", localhost="127.0.0.1")
    with socket.create_server(("127.0.1.1", 0)) as free:
        port = free.getsockname()[1]
    config = load({"scheduler_host": name, "scheduler_port": port, "insecure": True}, {})
    with pytest.raises(TransportTimeout, match="no scheduler at") as caught:
        dial.dial(
            config, b"k" * 32, purpose=dial.Purpose.CONTROL, sender=0,
            deadline=time.monotonic() + 0.1,
        )  # fmt: skip
    words = "here debian resolves to 127.0.1.1, which is this machine: correct /etc/hosts"
    assert (words in str(caught.value)) == is_said


@pytest.mark.parametrize("listens", [False, True])
def test_a_process_that_waits_for_its_scheduler_says_where_and_why(listens, monkeypatch, caplog):
    monkeypatch.setattr(dial, "NOTICE_S", 0.05)
    monkeypatch.setattr(dial, "ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        settings = {"scheduler_host": "127.0.0.1", "scheduler_port": port, "insecure": True}
        deadline = time.monotonic() + 1.5
        with pytest.raises(FastPSError), dial.Notice(load(settings, {}), deadline) as notice:
            dial.dial(
                load(settings, {}), b"k" * 32, purpose=dial.Purpose.CONTROL, sender=0,
                deadline=deadline, notice=notice,
            )  # fmt: skip
    (text,) = [one.getMessage() for one in caplog.records if "waiting up to" in one.getMessage()]
    assert f"127.0.0.1:{port}" in text
    assert ("the port is open" if listens else "Connection refused") in text


def test_a_process_that_reaches_its_scheduler_soon_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr(dial, "NOTICE_S", 0.2)
    config = load({"scheduler_host": "localhost", "scheduler_port": 7, "insecure": True}, {})
    with dial.Notice(config, time.monotonic() + 9):
        pass
    time.sleep(0.4)
    assert not caplog.records


def test_the_machine_of_a_scheduler_that_died_is_not_awaited_if_it_does_not_answer():
    """A full queue of connections answers none, as a machine that is cut off."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        stack.enter_context(socket.create_connection(server.getsockname()))
        address = {"scheduler_host": "127.0.0.1", "scheduler_port": server.getsockname()[1]}
        config = load(address | {"insecure": True, "connect_timeout_s": 0.2}, {})
        token, began = dial.token_of(config), time.monotonic()
        with pytest.raises(TransportTimeout, match=r"no scheduler at .*: timed out"):
            dial.dial_control(config, token, deadline=began + 20, awaits_machine=False)
        assert time.monotonic() - began < 5
