#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a command in a virtual machine that has an RDMA device, whatever this machine has.

    tools/rdma-vm/setup.sh
    tools/rdma-vm/run.py [-t SECONDS] [-e NAME[=VALUE]] [--] COMMAND [ARGUMENT]...

The guest sees this machine's files, so the same Python and the same code; what it writes is lost
when it ends. Its device is rxe0 (Soft-RoCE) at 10.9.0.1 and 10.9.0.2, its user root, its network
its own. Nothing is accelerated: Python runs some twenty times slower there. Output comes as it is
written, the exit status is the command's; 124: out of time, 125: the guest itself failed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CACHE = Path(os.environ.get("FASTPS_RDMA_VM", "/var/cache/fastps-rdma-vm"))
PASSED = ("CI", "HOME", "LANG", "PATH", "VIRTUAL_ENV")
PASSED_PREFIXES = ("PYTHON", "PYTEST_", "FASTPS_")
OUT_OF_TIME, GUEST_FAILED = 124, 125
PR_SET_PDEATHSIG = 1
# Without the flags memcpy would use `rep movsb`, which the emulator does byte by byte.
CPU = "max,la57=off,erms=off,fsrm=off"
LAST_LINES = 20
READ_BYTES = 1 << 16


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], usage="%(prog)s [OPTION]... [--] COMMAND..."
    )
    parser.add_argument("-t", dest="timeout_s", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("-m", dest="memory_mib", type=int, default=2048, metavar="MIB")
    parser.add_argument("-e", dest="environment", action="append", default=[], metavar="NAME")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command:
        parser.error("no command given")
    return options


def script(command: list[str], extra: list[str]) -> str:
    """Write the shell script that the guest runs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name.startswith(PASSED_PREFIXES)
    }
    for item in extra:
        name, is_given, value = item.partition("=")
        kept[name] = value if is_given else os.environ.get(name, "")
    kept["FASTPS_RDMA_GUEST"] = "1"
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


def emulator(job: str, output: int, memory_mib: int) -> list[str]:
    """Give the emulator's command line; the guest's output goes to a descriptor."""
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-accel", "tcg,thread=multi", "-cpu", CPU),
        *("-m", str(memory_mib), "-smp", str(min(2, os.cpu_count() or 1))),
        *("-serial", f"file:{job}/console"),
        *("-add-fd", f"fd={output},set=1"),
        *("-chardev", "file,id=out,path=/dev/fdset/1,append=on"),
        *("-device", "virtio-serial-pci", "-device", "virtserialport,chardev=out,nr=1"),
        *("-kernel", str(CACHE / "kernel"), "-initrd", str(CACHE / "initramfs")),
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on"),
        *share("host", "/", is_readonly=True),
        *share("job", job, is_readonly=False),
    ]


def die_with_parent() -> None:
    """Let the guest end with this process, however it ends; runs in the child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def copy_output(source: int, deadline: float) -> bool:
    """Write what the guest writes until it ends; False when the time is over first."""
    while select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = os.read(source, READ_BYTES)
        if not data:
            return True
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    return False


def run(options: argparse.Namespace, job: Path) -> int:
    """Boot the guest and wait for it; give the exit status."""
    (job / "script").write_text(script(options.command, options.environment), encoding="utf-8")
    source, output = os.pipe()
    guest = subprocess.Popen(
        emulator(str(job), output, options.memory_mib),
        stdin=subprocess.DEVNULL,
        pass_fds=[output],
        preexec_fn=die_with_parent,
    )
    os.close(output)
    is_over = False
    try:
        is_over = copy_output(source, time.monotonic() + options.timeout_s)
    finally:
        os.close(source)
        if not is_over:
            guest.kill()
        guest.wait()
    if (job / "status").exists():
        return int((job / "status").read_text(encoding="ascii"))
    if not is_over:
        print(f"run.py: ended after {options.timeout_s:g} s", file=sys.stderr)
        return OUT_OF_TIME
    console = job / "console"
    lines = console.read_text(encoding="utf-8", errors="replace") if console.exists() else ""
    print("\n".join(lines.splitlines()[-LAST_LINES:]), file=sys.stderr)
    print("run.py: the guest ended without a status", file=sys.stderr)
    return GUEST_FAILED


def main() -> int:
    """Check what is there, then run."""
    options = parse(sys.argv[1:])
    if not (CACHE / "initramfs").exists() or not shutil.which("qemu-system-x86_64"):
        print("run.py: run tools/rdma-vm/setup.sh first", file=sys.stderr)
        return GUEST_FAILED
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="fastps-rdma-vm-") as job:
        return run(options, Path(job))


if __name__ == "__main__":
    sys.exit(main())
