# SPDX-License-Identifier: Apache-2.0
"""Measure the RDMA transport on a machine with a device: what the GIL costs, and bytes per second.

Latency: microseconds of a 64-byte round trip whose timing thread holds no GIL, first alone, then
beside a Python main thread that never rests; over both data paths and over TCP. A data path
whose median stays below a millisecond beside the busy thread passes. Throughput: seconds of a
round that pushes and receives 4 MiB (--keys of them at a time), over RDMA and TCP, beside what
perftest's ib_write_bw reaches for as many bytes; with the work requests, bytes copied and
processor seconds per GiB of the whole machine, and of these the ones in our own code, which is
what a device that moves bytes by itself leaves. The goals: 0.7 of ib_write_bw, TCP's rate, less
processor time than TCP, one work request per partition and direction, nothing copied.

    python tools/bench/rdma.py --json rdma.jsonl
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _common import ROOT, Report, add_options, positive

sys.path.insert(0, str(ROOT / "tests"))

from aids.boards import EchoBoard, PushBoard
from aids.faces import Buffer
from fastps._core import BufferPool
from fastps.config import load
from fastps.config.closed_pipe import ends_quietly
from fastps.transport import rdma
from fastps.transport.rdma._transport import RdmaTransport
from fastps.transport.tcp._transport import TcpTransport

MIB = 1 << 20
SMALL, LARGE = 64, 4 * MIB
TIMEOUT_S = 120.0
CLOSE_S = 30.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
GOAL_US = 1000.0
IDLE_FIELDS = (3, 4)  # of the line of all processors in /proc/stat: idle, waiting for a disk


def tcp_pair(host: str) -> tuple[socket.socket, socket.socket]:
    """Make two connected, non-blocking sockets over one address of this machine."""
    with socket.create_server((host, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return near, far


class Bench:
    """Boards joined over one transport; every array pinned where that means something."""

    def __init__(self, path: str, count: int, nbytes: int, host: str) -> None:
        chunk = 0
        if path == "tcp":
            self.transports: list[Any] = [TcpTransport(), TcpTransport()]
            chunk = 512 << 10  # what a job takes on one machine
        else:
            settings = load({"rdma_data_path": path}, {})
            self.transports = [RdmaTransport(rdma.open_device(settings)) for _ in range(2)]
        register = getattr(self.transports[1], "register", None)
        self.pool = BufferPool(on_slab=register)
        self.memory = Buffer(self.pool, 2 * count * nbytes)
        self.echo = EchoBoard(count, nbytes, self.memory, chunk_bytes=chunk)
        self.push = PushBoard(count, nbytes, chunk_bytes=chunk)
        near, far = tcp_pair(host)
        with near, far:
            openings = [
                self.transports[0].adopt(near.detach(), self.push, peer=0),
                self.transports[1].adopt(far.detach(), self.echo, peer=0),
            ]
        for opening in filter(None, openings):
            opening.wait(timeout_s=TIMEOUT_S)
        self.arrays = [[mmap.mmap(-1, nbytes) for _ in range(2)] for _ in range(count)]
        for key, (array, output) in enumerate(self.arrays):
            array[:] = os.urandom(nbytes)
            if path != "tcp":
                self.transports[0].hold(array)
                self.transports[0].hold(output)
            self.push.push(key, array, output)
            self.push.wait(key, timeout_s=TIMEOUT_S)

    def check(self) -> None:
        """Verify that what came back is what was pushed."""
        for array, output in self.arrays:
            assert array[:] == output[:], "the bytes differ"

    def counters(self) -> dict[str, int]:
        """Add up the counters of both ends."""
        numbers = [transport.statistics() for transport in self.transports]
        return {name: numbers[0][name] + numbers[1][name] for name in numbers[0]}

    def close(self) -> None:
        """End the link and give everything back."""
        self.push.end(-2)
        self.push.wait_ended(timeout_s=CLOSE_S)
        for transport in self.transports:
            transport.close(timeout_s=CLOSE_S)
        del self.echo
        self.memory.give_back()
        self.pool.close()


@contextmanager
def busy_main(is_busy: bool) -> Iterator[list[Any]]:
    """Let the caller's work run on a thread while this one computes; gives the list of work."""
    work: list[Any] = []
    yield work
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    while is_busy and any(thread.is_alive() for thread in threads):
        sum(number * number for number in range(1000))
    for thread in threads:
        thread.join()


def latencies(bench: Bench, rounds: int, *, is_busy: bool) -> list[float]:
    """Time round trips in microseconds, beside an idle or a busy main thread."""
    times: list[float] = []

    def measure() -> None:
        bench.push.time_rounds(rounds // 10 + 1, timeout_s=TIMEOUT_S)
        found = bench.push.time_rounds(rounds, timeout_s=TIMEOUT_S)
        times.extend(value / 1000 for value in found)

    with busy_main(is_busy) as work:
        work.append(measure)
    return times


def busy_seconds() -> float:
    """Read the processor time that this machine has spent on anything."""
    line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    ticks = [int(field) for field in line.split()[1:9]]
    return (sum(ticks) - sum(ticks[field] for field in IDLE_FIELDS)) / TICKS_PER_S


def write_bandwidth(host: str, device: str, gid_index: int, runs: int) -> list[float]:
    """Let perftest write 4 MiB at a time; bytes per second, nothing where it is missing.

    A run that it reports as 0.00 is none (it divides by the clock it has measured at its start,
    which a machine that is paused just then spoils), and is made again, twice at most for each.
    """
    tool = shutil.which("ib_write_bw")
    if tool is None:
        return []
    command = [tool, "-d", device, "-x", str(gid_index), "-s", str(LARGE), "-n", "25", "-F"]
    found = []
    for _ in range(3 * runs):
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            text = _connect_perftest([*command, host])
        finally:
            server.kill()
            server.wait()
        match = re.search(rf"^\s*{LARGE}\s+\d+\s+\S+\s+(\S+)", text, re.MULTILINE)
        rate = float(match[1]) * MIB if match else 0.0
        found += [rate] if rate > 0 else []
        if len(found) == runs:
            break
    return found


def _connect_perftest(command: list[str]) -> str:
    """Run the client again until its server listens."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode == 0:
            return done.stdout
        time.sleep(0.2)
    return ""


def measure_latency(report: Report, paths: list[str], rounds: int, host: str) -> None:
    """Add the rows of all paths, idle and busy."""
    for path in paths:
        bench = Bench(path, 1, SMALL, host)
        for is_busy in (False, True):
            times = latencies(bench, rounds, is_busy=is_busy)
            name = f"round trip, {path}, {'busy' if is_busy else 'idle'} main thread"
            summary = report.add(name, times, unit="us")
            if is_busy:
                verdict = "passes" if summary.median < GOAL_US else "fails"
                print(f"{path}: {summary.median:.0f} us beside a busy thread: {verdict}")
        bench.check()
        bench.close()


def measure_rounds(report: Report, path: str, keys: int, rounds: int, host: str) -> float:
    """Add one path's row; give its median rate in bytes per second, both directions together."""
    bench = Bench(path, keys, LARGE, host)
    bench.push.time_rounds(2, timeout_s=TIMEOUT_S)
    before, spent, own = bench.counters(), busy_seconds(), os.times().user
    times = [value / 1e9 for value in bench.push.time_rounds(rounds, timeout_s=TIMEOUT_S)]
    spent, own = busy_seconds() - spent, os.times().user - own
    after = bench.counters()
    grown = {name: after[name] - before[name] for name in after}
    moved = 2 * keys * LARGE
    fields: dict[str, Any] = {"MB/s": moved / sorted(times)[len(times) // 2] / 1e6}
    fields["cpu s/GiB"] = spent / (moved * rounds / (1 << 30))
    fields["own s/GiB"] = own / (moved * rounds / (1 << 30))
    if path != "tcp":
        requests = grown["work_requests"] - grown["credit_messages"]
        fields["requests/partition"] = requests / (2 * keys * rounds)
        fields["bytes copied"] = grown["bytes_copied"]
    summary = report.add(f"push and pull {keys} x 4 MiB, {path}", times, unit="s", **fields)
    bench.check()
    bench.close()
    return moved / summary.median


@ends_quietly
def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser)
    parser.add_argument("--paths", default="native,pyverbs,tcp", help="what to measure")
    parser.add_argument("--round-trips", type=positive, default=300, metavar="N")
    parser.add_argument("--rounds", type=positive, default=10, metavar="N", help="of 4 MiB")
    parser.add_argument("--keys", type=positive, default=4, metavar="N", help="pushed at a time")
    options = parser.parse_args()
    found = rdma.probe()
    if not found.is_usable:
        parser.exit(1, f"{found.describe()}\n")
    host = ".".join(str(int(found.gid.replace(":", "")[i : i + 2], 16)) for i in range(24, 32, 2))
    paths = options.paths.split(",")
    report = Report("rdma", unit="as told")
    measure_latency(report, paths, options.round_trips, host)
    limit = write_bandwidth(host, found.device, found.gid_index, options.runs)
    if limit:
        report.add("ib_write_bw, 4 MiB", [LARGE / rate for rate in limit], unit="s")
    rates = {
        path: measure_rounds(report, path, options.keys, options.rounds, host) for path in paths
    }
    report.finish(options.json)
    for path in set(paths) - {"tcp"}:
        if limit:
            print(f"{path} / ib_write_bw: {rates[path] / sorted(limit)[len(limit) // 2]:.2f}")
        if "tcp" in rates:
            print(f"{path} / tcp: {rates[path] / rates['tcp']:.2f}")


if __name__ == "__main__":
    sys.exit(main())
