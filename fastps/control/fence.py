# SPDX-License-Identifier: Apache-2.0
"""Ends processes of this machine that the job takes for lost, before it goes on without them.

A process that was only stopped could go on to write into memory that it shares with others. So a
survivor on its machine kills it, and waits for its end. It is known by a descriptor (pidfd) that
was opened while it was in the job, since a process id may be another's by then. Threads: any.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time

from fastps.control.protocol import Job, PeerLost

log = logging.getLogger(__name__)

ENDS_WITHIN_S = 10.0  # a killed process; one that takes longer hangs in the kernel


class Fence:
    """The other processes of a job on this machine."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], int] = {}  # descriptors, by host name and pid
        self._ending: list[tuple[str, int]] = []

    def watch(self, job: Job) -> None:
        """Take the members of a view that share memory with this one."""
        self.close()
        me = job.members[job.me]
        for member in job.members:
            if member is not me and member.machine == me.machine:
                with contextlib.suppress(OSError):  # it has ended already
                    self._known[member.hostname, member.pid] = os.pidfd_open(member.pid)

    def end(self, lost: PeerLost) -> None:
        """Kill a lost process if it is on this machine. Does not wait."""
        found = self._known.get((lost.host, lost.pid))
        if found is not None:
            self._ending.append((lost.host, lost.pid))
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(found, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until all killed processes have ended; blocks up to ENDS_WITHIN_S."""
        deadline = time.monotonic() + ENDS_WITHIN_S
        while self._ending:
            host, pid = self._ending.pop()
            descriptor = self._known.pop((host, pid), None)
            if descriptor is None:
                continue
            left_ms = max(deadline - time.monotonic(), 0) * 1e3
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(left_ms):
                log.warning("process %d was killed and has not ended; it hangs in the kernel", pid)
            os.close(descriptor)

    def close(self) -> None:
        """Forget all processes."""
        for descriptor in self._known.values():
            os.close(descriptor)
        self._known.clear()
