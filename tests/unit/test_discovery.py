# SPDX-License-Identifier: Apache-2.0
"""The script that lists the hosts of a job: what it lists, and what is wrong with it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fastps.launch import discovery
from fastps.launch.discovery import HostScript, await_slots
from fastps.launch.hosts import Host
from fastps.launch.job import SignalInbox


class Script(HostScript):
    """A script whose text may change between its runs."""

    def __init__(self, folder: Path) -> None:
        self.path, self.said = folder / "list", list[str]()
        super().__init__(str(self.path), 2, self.said.append)

    def lists(self, text: str) -> tuple[Host, ...] | None:
        """Return what one run with this text comes to."""
        self.path.write_text(f"#!/bin/sh\n{text}\n")
        self.path.chmod(0o755)
        now = time.monotonic() + 1000  # when another run is due
        assert self.poll(now) is None
        if self._process is not None:
            self._process.wait(30)
        found = self.poll(now)
        self._due = 0.0
        return found


def test_hosts_are_listed_as_in_a_hostfile(tmp_path):
    script = Script(tmp_path)
    assert script.lists("echo a; echo b:3; echo 'c slots=1 # new'; echo d:0") == (
        Host("a", (2, 0, 0)), Host("b", (3, 0, 0)), Host("c", (1, 0, 0)),
    )  # fmt: skip
    assert script.lists("") == ()
    assert not script.said


def test_a_fault_is_told_once(tmp_path, monkeypatch):
    script = Script(tmp_path)
    for text, fault in (
        ("echo no answer >&2; exit 3", "ended with exit code 3: no answer"),
        ("echo a:1+1", "a has servers, which cannot join a job"),
        ("echo 'a b c'", "'b' is not understood"),
    ):
        assert script.lists(text) is None
        assert script.lists(text) is None
        (line,) = script.said
        assert fault in line
        script.said.clear()
        assert script.lists("echo a:1") == (Host("a", (1, 0, 0)),)
    script.path.unlink()
    assert script.poll(time.monotonic() + 1000) is None
    assert "cannot be started: No such file" in script.said.pop()
    script._due = 0.0
    script.path.write_text("#!/bin/sh\nsleep 100\n")
    script.path.chmod(0o755)
    monkeypatch.setattr(discovery, "LIMIT_S", 0.1)
    assert script.poll(now := time.monotonic()) is None
    assert script.poll(now + 0.2) is None
    assert "has not ended within 0.1 s" in script.said.pop()


@pytest.mark.parametrize(("least", "limit_s"), [(2, 60.0), (5, 0.3)])
def test_a_job_begins_when_there_is_place_for_it(tmp_path, least, limit_s):
    script = Script(tmp_path)
    assert script.lists("echo a:4") is not None
    with SignalInbox() as inbox:
        found = await_slots(script, least, limit_s, inbox)
    if least == 2:
        assert found == (Host("a", (4, 0, 0)),)
    else:
        assert "the job needs 5 to begin" in found.text
