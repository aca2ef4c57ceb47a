# SPDX-License-Identifier: Apache-2.0
"""A clean Debian in which a newcomer types: made once by debootstrap, empty again in each run.

The base is kept; what a run writes goes to an overlay beside it. Each task has namespaces of its
own for mounts and processes, so that all it started ends with it, and nothing is mounted outside.
The room has the network and pip's settings of this machine, with the folders that they name.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
PACKAGES = "ca-certificates,iproute2,openssh-server,openssh-client,procps,python3,python3-venv"
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}  # Debian 12 and 13
USER = "newcomer"
HOSTS = "127.0.0.1 localhost\n127.0.1.1 debian\n"  # as Debian's installer writes them
# This shell is process 1, with which all others end. chroot is not: the kernel forgets to end
# what changes its user.
ENTER = """set -e
hostname debian
mount -t overlay overlay -o lowerdir={base},upperdir={upper},workdir={work} {root}
mount -t proc proc {root}/proc
mount -t sysfs sysfs {root}/sys
mount -t tmpfs tmpfs -o mode=755 {root}/dev
cd {root}/dev
mknod -m 666 null c 1 3; mknod -m 666 zero c 1 5; mknod -m 666 full c 1 7
mknod -m 666 random c 1 8; mknod -m 666 urandom c 1 9; mknod -m 666 tty c 5 0
ln -s pts/ptmx ptmx; ln -s /proc/self/fd fd; mkdir pts shm
mount -t devpts devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 {root}/dev/pts
mount -t tmpfs tmpfs -o mode=1777 {root}/dev/shm
mount -t tmpfs tmpfs -o mode=755 {root}/run
mkdir -p {root}/run/netns {root}/run/sshd
{binds}
chroot {userspec} {root} env -i {environment} bash /tmp/task.sh || exit $?
"""


@dataclass(frozen=True)
class Done:
    """What a task's commands did."""

    status: int | None  # None: the time was up
    seconds: float
    output: str


def pip_settings() -> dict[str, str]:
    """Return the settings of this machine's pip, by name."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    pairs = (line.partition("=") for line in said.splitlines())
    return {key.rpartition(".")[2]: ast.literal_eval(value) for key, _, value in pairs}


def local_paths(settings: dict[str, str]) -> list[Path]:
    """Return the files and folders of this machine that settings name: folders of an index too."""
    words = [word.removeprefix("file://") for value in settings.values() for word in value.split()]
    paths = {Path(word) for word in words if word.startswith("/") and Path(word).exists()}
    return sorted({path.parent if path.name == "simple" else path for path in paths})


class Room:
    """One Debian with a newcomer's home."""

    def __init__(self, suite: str, folder: Path) -> None:
        """Take a name of a Debian, and the folder that has or gets the rooms."""
        self.suite = suite
        self.python = PYTHONS[suite]
        self.base = folder / f"{suite}.base"
        self.layer = folder / suite
        self.upper = self.layer / "upper"

    def make(self) -> None:
        """Make the base, unless it is there: a minute, and 300 MB."""
        if self.base.exists():
            return
        new = self.base.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", self.suite, new]
        self._call(*words, MIRROR)
        self._call("chroot", new, "useradd", "--create-home", "--shell", "/bin/bash", USER)
        new.rename(self.base)

    def empty(self) -> None:
        """Forget what earlier runs wrote."""
        shutil.rmtree(self.layer, ignore_errors=True)

    def write(self, files: dict[str, str]) -> None:
        """Write files into the newcomer's home; names may have folders."""
        home = self.upper / "home" / USER
        for name, text in files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._give(home)

    def bring(self, wheel: Path) -> None:
        """Put a wheel into the newcomer's home, in dist/, and pip's settings into /etc."""
        home = self.upper / "home" / USER
        (home / "dist").mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, home / "dist")
        self._give(home)
        settings = "\n".join(f"{key} = {value}" for key, value in pip_settings().items())
        (self.upper / "etc").mkdir(exist_ok=True)
        (self.upper / "etc/pip.conf").write_text(f"[global]\n{settings}\n")
        (self.upper / "etc/hosts").write_text(HOSTS)
        shutil.copy("/etc/resolv.conf", self.upper / "etc/resolv.conf")

    def type(self, script: str, *, limit_s: float, machines: bool = False) -> Done:
        """Run a script as the newcomer in the home; or as root, who may make machines."""
        (self.layer / "work").mkdir(parents=True, exist_ok=True)
        (self.layer / "root").mkdir(exist_ok=True)
        (self.upper / "tmp").mkdir(parents=True, exist_ok=True)
        (self.upper / "tmp").chmod(0o1777)
        (self.upper / "tmp/task.sh").write_text(f"cd\n{script}\n")
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child"]
        words += ["--mount", "--pid", "--uts", "--ipc"]
        words += ["--net"] if machines else []
        begun = time.monotonic()
        with subprocess.Popen(
            [*words, "bash", "-c", self._enter(machines=machines)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            status: int | None
            try:
                output = process.communicate(timeout=limit_s)[0]
                status = process.returncode
            except subprocess.TimeoutExpired:
                process.kill()
                output, status = process.communicate()[0], None
        return Done(status, time.monotonic() - begun, output)

    def _enter(self, *, machines: bool) -> str:
        root = self.layer / "root"
        binds = []
        for path in local_paths(pip_settings()):
            there = f"{root}{path}"
            make = f"mkdir -p {there}" if path.is_dir() else f"install -D /dev/null {there}"
            binds.append(f"{make}; mount --bind -o ro {path} {there}")
        home = f"/home/{USER}"
        environment = {
            "HOME": home,
            "LANG": "C.UTF-8",
            "PATH": f"{home}/fps/bin:/usr/local/bin:/usr/bin:/bin" + ":/usr/sbin:/sbin" * machines,
            "TERM": "xterm",
            "USER": USER,
        }
        return ENTER.format(
            base=self.base, upper=self.upper, work=self.layer / "work", root=root,
            binds="\n".join(binds), userspec="" if machines else f"--userspec={USER}:{USER}",
            environment=shlex.join(f"{key}={value}" for key, value in environment.items()),
        )  # fmt: skip

    def _give(self, home: Path) -> None:
        owner = (self.base / "home" / USER).stat()
        for path in (home, *home.rglob("*")):
            if not path.is_symlink():
                os.chown(path, owner.st_uid, owner.st_gid)

    def _call(self, *words: object) -> None:
        done = subprocess.run(
            list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{shlex.join(map(str, words))} failed; the room is not made\n{done.stdout}")
