# SPDX-License-Identifier: Apache-2.0
"""Make-believe hosts with real ssh servers, each on a network of its own, and jobs over them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence

import pytest
from harness import ROOT, clean_environ

sys.path.insert(0, str(ROOT))

from aids.debian import require
from tools import netlab
from tools.netlab import NetLab

LIMIT_S = 90.0
NAMES = "abc"
DARK = "10.90.0.200"  # on the network of the hosts, and nobody's
SSHD = """
ListenAddress {address}
Port 22
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
"""
CONFIG = """
Host {names}
  IdentityFile {folder}/user
Host dark
  HostName {dark}
  ConnectTimeout 2
Host locked
  HostName {first}
  IdentityFile {folder}/other
Host stranger
  HostName {first}
  StrictHostKeyChecking yes
  UserKnownHostsFile /dev/null
Host *
  IdentitiesOnly yes
  IdentityAgent none
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known
"""


class SshHosts:
    """A lab whose hosts a, b and c can be reached by ssh, with our own keys, by those names."""

    def __init__(self, lab: NetLab, folder: pathlib.Path) -> None:
        self.lab, self.folder = lab, folder
        self.job_id = f"test-{uuid.uuid4().hex}"

    def write_settings(self) -> None:
        for name in ("host", "user", "other"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(key, check=True, timeout=LIMIT_S)
        aliases = "".join(
            f"Host {name}\n  HostName {self.lab.address(host)}\n"
            for host, name in enumerate(NAMES)
        )
        settings = CONFIG.format(
            names=" ".join(NAMES), folder=self.folder, first=self.lab.address(0), dark=DARK
        )
        (self.folder / "config").write_text(aliases + settings)

    def start_server(self, host: int) -> subprocess.Popen[bytes]:
        settings = self.folder / f"sshd.{host}"
        settings.write_text(SSHD.format(address=self.lab.address(host), folder=self.folder))
        log = (self.folder / f"sshd.{host}.log").open("wb")
        with log:
            return self.lab.popen(
                host, [require("sshd", "openssh-server"), "-D", "-e", "-f", str(settings)],
                stdout=log, stderr=log,
            )  # fmt: skip

    def wait_for_server(self, host: int) -> None:
        probe = f"import socket; socket.create_connection(({self.lab.address(host)!r}, 22), 5)"
        deadline = time.monotonic() + LIMIT_S
        while self.lab.popen(host, [sys.executable, "-c", probe], stderr=subprocess.DEVNULL).wait(
            LIMIT_S
        ):
            log = (self.folder / f"sshd.{host}.log").read_text()
            assert time.monotonic() < deadline, log

    def command(self, *words: str, code: str, program: Sequence[str]) -> list[str]:
        """Give a fastps-run that reaches the hosts by our settings."""
        (self.folder / "train.py").write_text(code)
        args = f"--ssh-args=-F {self.folder / 'config'}"
        return [sys.executable, "-m", "fastps.launch.run", args, "--job-id", self.job_id,
                *words, *(program or ("python", "train.py"))]  # fmt: skip

    @contextlib.contextmanager
    def started(
        self,
        *words: str,
        code: str = "",
        program: Sequence[str] = (),
        stderr: int = subprocess.PIPE,
        **more: str,
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a job from host a, whose name is not a."""
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**clean_environ(), "PYTHONPATH": str(ROOT), "PATH": path, **more}
        environ.pop("FASTPS_SHARED_MEMORY", None)
        leader = self.lab.popen(
            0, self.command(*words, code=code, program=program), cwd=self.folder, env=environ,
            text=True, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
        try:
            yield leader
        finally:
            leader.kill()
            leader.communicate(timeout=LIMIT_S)

    def run(
        self, *words: str, code: str = "", program: Sequence[str] = ()
    ) -> tuple[int, str, str]:
        """Run a job to its end; give exit code, stdout and stderr."""
        with self.started(*words, code=code, program=program) as leader:
            stdout, stderr = leader.communicate(timeout=LIMIT_S)
            return leader.returncode, stdout, stderr

    def processes(self) -> list[int]:
        """List what is left of the job: its processes, followers, and ssh's."""
        marks = (f"FASTPS_JOB_ID={self.job_id}\0".encode(), b"fastps.launch.follower")
        return [pid for pid, *texts in everybody() if any(m in t for m in marks for t in texts)]

    def wait_gone(self) -> None:
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)  # they are not our children
        assert not left, f"processes left behind: {left}"


def everybody() -> Iterator[tuple[int, bytes, bytes]]:
    """Give command line and environment of every process of this machine."""
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                yield (int(entry.name), (entry / "cmdline").read_bytes(),
                       (entry / "environ").read_bytes())  # fmt: skip


@contextlib.contextmanager
def hosts(folder: pathlib.Path) -> Iterator[SshHosts]:
    """Make the hosts and start their servers."""
    if lack := netlab.missing():
        pytest.skip(f"no make-believe hosts here: {lack}")
    require("ssh", "openssh-client")
    require("sshd", "openssh-server")
    pathlib.Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    assert socket.gethostname() not in NAMES
    with NetLab(hosts=len(NAMES), rate="1gbit") as lab, contextlib.ExitStack() as stack:
        made = SshHosts(lab, folder)
        made.write_settings()
        for host in range(lab.hosts):
            server = made.start_server(host)
            stack.callback(server.wait, LIMIT_S)
            stack.callback(server.terminate)
            made.wait_for_server(host)
        yield made
