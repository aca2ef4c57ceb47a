#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a command in a virtual machine that has an RDMA device, whatever this machine has.

    tools/rdma-vm/setup.sh
    tools/rdma-vm/run.py [-t SECONDS] [-p COUNT] [-e NAME[=VALUE]] [--] COMMAND [ARGUMENT]...
    tools/rdma-vm/run.py --machines 2 [--without-rdma 1] [--] COMMAND [ARGUMENT]...

The guest sees this machine's files, so the same Python and the same code; what it writes is lost
when it ends. Its device is rxe0 (Soft-RoCE) at 10.9.0.1 and 10.9.0.2, its user root, its network
its own. Nothing is accelerated: Python runs some twenty times slower there, and several guests at
once each take at most one processor (-p 1), or they wait for each other in their kernels' locks.
Output comes as it is written, the exit status is the command's; 124: out of time, 125: the guest
itself failed.

Several machines run the same command at the same time. Each has one processor, a kernel and a
name of its own, one device over one network card: machine K, as RDMA_VM_MACHINE says, is
10.9.0.(K+1). The cards meet in a switch in this program. Each line of output begins with
the number of its machine; the exit status is the first that is not 0, by machine. A machine that
is to be lost in the middle first says how that counts, then goes without a word to the others:

    echo 0 >/run/job/status; echo b >/proc/sysrq-trigger
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("RDMA_VM_CACHE", "/var/cache/fastps-rdma-vm"))
PASSED = ("CI", "HOME", "LANG", "PATH", "VIRTUAL_ENV")
PASSED_PREFIXES = ("PYTHON", "PYTEST_", "FASTPS_")
OUT_OF_TIME, GUEST_FAILED = 124, 125
PR_SET_PDEATHSIG = 1
# Without the flags memcpy would use `rep movsb`, which the emulator does byte by byte.
CPU = "max,la57=off,erms=off,fsrm=off"
LAST_LINES = 60  # a panic's own and its trace
# While the kernel starts it counts ticks for 60 ms and panics if there are too few, as there are
# where the emulator has to wait for a processor: it is told not to look.
KERNEL_WORDS = "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on no_timer_check"
READ_BYTES = 1 << 16
MAX_MACHINES = 4
FRAMES_AT_ONCE = 16  # that the switch takes from one cable before it looks at the others
BUSY_S = 0.2  # a machine that takes no frame for so long loses what comes


@dataclass(frozen=True)
class Guest:
    """One machine: what it wrote so far, how it ended, and what leads to it."""

    rank: int
    folder: Path  # shared with the guest, which leaves its exit status here
    process: subprocess.Popen[bytes]
    output: int  # what its command writes; ends with it
    cable: socket.socket | None  # datagrams are Ethernet frames
    label: bytes
    line: bytearray  # written, but not yet whole

    def status(self) -> int | None:
        """Give the exit status of the command; None: the guest left none."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "status").read_text(encoding="ascii"))
        return None

    def console(self) -> str:
        """Give the last that the kernel said."""
        path = self.folder / "console"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-LAST_LINES:])

    def was_killed(self) -> bool:
        """Tell whether it ended by force, once it has ended."""
        return self.process.returncode == -signal.SIGKILL

    def close(self) -> None:
        """End it, if it runs."""
        self.process.kill()
        self.process.wait()
        os.close(self.output)
        if self.cable is not None:
            self.cable.close()


# ---- starting ----


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], usage="%(prog)s [OPTION]... [--] COMMAND..."
    )
    parser.add_argument("-t", dest="timeout_s", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("-m", dest="memory_mib", type=int, default=2048, metavar="MIB")
    parser.add_argument("-e", dest="environment", action="append", default=[], metavar="NAME")
    parser.add_argument("-p", dest="processors", type=int, default=2, metavar="COUNT")
    parser.add_argument("--machines", type=int, default=1, choices=range(1, MAX_MACHINES + 1))
    parser.add_argument(
        "--without-rdma", action="append", type=int, default=[], metavar="MACHINE",
        help="a machine, of several, that has no device; may be given more than once",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command:
        parser.error("no command given")
    if set(options.without_rdma) - set(range(options.machines if options.machines > 1 else 0)):
        parser.error("--without-rdma names a machine, from 0, of several")
    return options


def script(command: list[str], extra: list[str], rank: int) -> str:
    """Write the shell script that the guest runs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name.startswith(PASSED_PREFIXES)
    }
    for item in extra:
        name, is_given, value = item.partition("=")
        kept[name] = value if is_given else os.environ.get(name, "")
    kept |= {"RDMA_VM_GUEST": "1", "RDMA_VM_MACHINE": str(rank)}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in kept.items()]
    folder = f"cd {shlex.quote(str(Path.cwd()))} || exit {GUEST_FAILED}"
    return "\n".join([*exports, folder, f"exec {shlex.join(command)}", ""])


def share(tag: str, path: str, *, is_readonly: bool) -> list[str]:
    """Give the emulator's options for one folder that the guest sees."""
    backend = f"local,id={tag},path={path},security_model=none,multidevs=remap"
    return [
        "-fsdev",
        backend + (",readonly=on" if is_readonly else ""),
        "-device",
        f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
    ]


def card(rank: int, cable: int) -> list[str]:
    """Give the emulator's options for a network card whose frames go through a descriptor."""
    return [
        *("-netdev", f"dgram,id=net,local.type=fd,local.str={cable}"),
        *("-device", f"virtio-net-pci,netdev=net,romfile=,mac=52:54:00:00:09:{rank + 1:02x}"),
    ]


def emulator(options: argparse.Namespace, rank: int, job: str, output: int) -> list[str]:
    """Give the emulator's command line; the guest's output goes to a descriptor."""
    is_single = options.machines == 1
    words = [KERNEL_WORDS]
    if not is_single:  # the kernel hands what it does not know to the guest's init
        words += [f"machine={rank}", f"device={'none' if rank in options.without_rdma else 'rxe'}"]
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-accel", "tcg,thread=multi", "-cpu", CPU),
        *("-m", str(options.memory_mib)),
        *("-smp", str(min(options.processors, os.cpu_count() or 1) if is_single else 1)),
        *("-serial", f"file:{job}/console"),
        *("-add-fd", f"fd={output},set=1"),
        *("-chardev", "file,id=out,path=/dev/fdset/1,append=on"),
        *("-device", "virtio-serial-pci", "-device", "virtserialport,chardev=out,nr=1"),
        *("-kernel", str(CACHE / "kernel"), "-initrd", str(CACHE / "initramfs")),
        *("-append", " ".join(words)),
        *share("host", "/", is_readonly=True),
        *share("job", job, is_readonly=False),
    ]


def die_with_parent() -> None:
    """Let the guest end with this process, however it ends; runs in the child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def boot(options: argparse.Namespace, rank: int, folder: Path) -> Guest:
    """Start one machine."""
    folder.mkdir()
    text = script(options.command, options.environment, rank)
    (folder / "script").write_text(text, encoding="utf-8")
    source, output = os.pipe()
    words, handed = emulator(options, rank, str(folder), output), [output]
    cable = None
    if options.machines > 1:
        cable, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        cable.setblocking(False)
        handed.append(end.detach())
        words += card(rank, handed[-1])
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, pass_fds=handed, preexec_fn=die_with_parent
    )
    for descriptor in handed:
        os.close(descriptor)
    label = b"" if options.machines == 1 else b"%d: " % rank
    return Guest(rank, folder, process, source, cable, label, bytearray())


# ---- while they run ----


class Switch:
    """Carry Ethernet frames from machine to machine, each to where its address was last seen."""

    def __init__(self, cables: list[socket.socket]) -> None:
        self._cables = cables
        self._places: dict[bytes, socket.socket] = {}
        self._deaf: set[socket.socket] = set()

    def serve(self, cable: socket.socket) -> None:
        """Pass on what a machine has sent."""
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = cable.recv(READ_BYTES)
            except OSError:  # no more, or the machine is gone
                return
            target, source = frame[:6], frame[6:12]
            self._places[source] = cable
            known = self._places.get(target)
            for other in self._cables if known is None else [known]:
                if other is not cable:
                    self._send(other, frame)

    def _send(self, cable: socket.socket, frame: bytes) -> None:
        """Wait a little for a machine that is behind: what is lost costs RDMA a time-out.

        Only once: if it takes nothing, its card is down, and the others must not suffer.
        """
        with contextlib.suppress(OSError):
            try:
                cable.send(frame)
                self._deaf.discard(cable)
            except BlockingIOError:
                if cable not in self._deaf and select.select([], [cable], [], BUSY_S)[1]:
                    cable.send(frame)
                else:
                    self._deaf.add(cable)


def show(guest: Guest, data: bytes) -> None:
    """Write what a machine wrote: of several only whole lines, each with its number."""
    if not guest.label:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    guest.line.extend(data)
    lines = bytes(guest.line).split(b"\n") if data else [bytes(guest.line), b""]
    guest.line[:] = lines.pop()
    sys.stdout.buffer.writelines(guest.label + line + b"\n" for line in lines if data or line)
    sys.stdout.buffer.flush()


def serve(guests: list[Guest], deadline: float) -> bool:
    """Pass on frames and output until all have ended, or one has failed; False: out of time."""
    running = {guest.output: guest for guest in guests}
    cables = {guest.cable.fileno(): guest.cable for guest in guests if guest.cable is not None}
    switch = Switch(list(cables.values()))
    while running:
        left_s = max(0.0, deadline - time.monotonic())
        ready = select.select([*running, *cables], [], [], left_s)[0]
        if not ready:
            return False
        for descriptor in ready:
            if descriptor in cables:
                switch.serve(cables[descriptor])
                continue
            data = os.read(descriptor, READ_BYTES)
            show(running[descriptor], data)
            if not data and running.pop(descriptor).status() is None:
                return True
    return True


def run(options: argparse.Namespace, folder: Path) -> int:
    """Boot the machines and wait for them; give the exit status."""
    guests: list[Guest] = []
    is_over = False
    try:
        for rank in range(options.machines):
            guests.append(boot(options, rank, folder / str(rank)))
        is_over = serve(guests, time.monotonic() + options.timeout_s)
    finally:
        for guest in guests:
            guest.close()
    return judge(guests, None if is_over else options.timeout_s)


def judge(guests: list[Guest], timeout_s: float | None) -> int:
    """Say how it ended; timeout_s: None, or the time that was too short."""
    statuses = [guest.status() for guest in guests]
    failed = next((status for status in statuses if status), 0)
    if None not in statuses or (failed and timeout_s is None):
        return failed
    if timeout_s is not None:
        print(f"run.py: ended after {timeout_s:g} s", file=sys.stderr)
        return OUT_OF_TIME
    silent = [guest for guest in guests if guest.status() is None]
    guest = min(silent, key=Guest.was_killed)  # the others were, by close()
    code = guest.process.returncode
    print(guest.console(), file=sys.stderr)
    print(f"run.py: guest {guest.rank} ended without a status, its emulator with {code}",
          file=sys.stderr)  # fmt: skip
    return GUEST_FAILED


def main() -> int:
    """Check what is there, then run."""
    options = parse(sys.argv[1:])
    if not (CACHE / "initramfs").exists() or not shutil.which("qemu-system-x86_64"):
        print("run.py: run tools/rdma-vm/setup.sh first", file=sys.stderr)
        return GUEST_FAILED
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="fastps-rdma-vm-") as folder:
        return run(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
