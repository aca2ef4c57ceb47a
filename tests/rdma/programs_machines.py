# SPDX-License-Identifier: Apache-2.0
"""What runs on the machines of guest_machines.py: parts of jobs, and what happens to machines."""

from __future__ import annotations

import fcntl
import itertools
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine_hand import address_of, own_machine

import fastps
from fastps.errors import FastPSError
from fastps.launch import run
from fastps.server import main as server_main

COUNT = 200_003  # elements; some partitions of 256 KiB, and a rest
ROUNDS = 4
COUNTED = ("work_requests", "announced", "standing", "bytes_sent", "server_work_requests")
BUSY_ROUNDS = 3
PAUSE_S = 1.5  # a third: everybody has the last result; all: the other machine is gone
DOWN_S = 9.0  # of a network that comes back; the other end has noticed by then
CARD = "eth0"
NOBODY = "52:54:00:00:09:77"
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 1


def server(role: str = "server") -> int:
    """Be a server or the scheduler of the job that the environment describes."""
    return server_main.main(["--role", role])


def sums() -> dict[str, float]:
    """Sum floats and whole numbers, round after round; give what the links counted."""
    fastps.init()
    ranks = range(1, fastps.size() + 1)
    for dtype in (np.float32, np.int64):
        mine = np.arange(COUNT, dtype=dtype) % 1000
        total = mine * sum(ranks)
        mine *= fastps.rank() + 1
        found = np.empty_like(mine)
        for _ in range(ROUNDS):
            fastps.push_pull(mine, np.dtype(dtype).name, average=False, out=found)
            np.testing.assert_array_equal(found, total)
    counts = {name: fastps.statistics().get(name, 0) for name in COUNTED}
    fastps.shutdown()
    return counts


def astray() -> dict[str, float]:
    """Sum while the device's packets vanish: its address is in a network that has no switch."""
    own = own_machine()
    commands = [
        f"address add 10.20.{own}.1/24 dev {CARD}",
        f"route add 10.20.{1 - own}.0/24 dev {CARD}",
        f"neighbour add 10.20.{1 - own}.1 lladdr {NOBODY} dev {CARD}",
    ]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, timeout=30)
    try:
        return sums()
    finally:
        command = f"address del 10.20.{own}.1/24 dev {CARD}"
        subprocess.run(["ip", *command.split()], check=True, timeout=30)


def refused() -> dict[str, Any]:
    """Join a job that cannot be; say after which time and why."""
    begin = time.monotonic()
    try:
        fastps.init()
    except FastPSError as error:
        return said(error, begin)
    return {}


def until_lost(trouble: str = "") -> dict[str, Any]:
    """Sum until it fails; say how long the last try took, why it ended, and shutdown() too.

    trouble: what happens to this machine after some rounds. Without, this worker pauses then, so
    that it pushes to somebody who is in trouble: a device that sends nothing notices nothing.
    """
    fastps.init()
    array = np.ones(COUNT, np.float32)
    begin = 0.0
    try:
        for turn in itertools.count():
            if turn == BUSY_ROUNDS:
                wait(PAUSE_S / 3 if trouble else PAUSE_S)
            if turn == BUSY_ROUNDS and trouble:
                TROUBLES[trouble]()
            begin = time.monotonic()
            fastps.push_pull(array, "a", out=array)
    except FastPSError as error:
        found = said(error, begin)
    begin = time.monotonic()
    fastps.shutdown()
    found["shutdown_s"] = time.monotonic() - begin
    if trouble == "cut":
        wait(DOWN_S - found["after_s"] - found["shutdown_s"])
        set_card(is_up=True)
    return found


def wait(seconds: float) -> None:
    """Let time pass."""
    threading.Event().wait(max(0.0, seconds))


def said(error: FastPSError, begin: float) -> dict[str, Any]:
    """Tell an error as plain values."""
    after_s = time.monotonic() - begin
    return {"type": type(error).__name__, "text": str(error), "after_s": after_s}


def launch(words: list[str]) -> int:
    """Run fastps-run as the documentation says, with workers that sum."""
    token = Path("/run/job.token")
    token.touch(mode=0o600)
    token.write_text("the same secret on all machines", encoding="ascii")
    place = ["--machine-rank", str(own_machine()), "--token-file", str(token)]
    hand = Path(__file__).with_name("machine_hand.py")
    return run.main([*words, *place, sys.executable, str(hand), "--ask", "sums"])


# ---- what happens to a machine ----


def set_card(*, is_up: bool) -> None:
    """Take the network card up or down, at once: a command would take its time to start."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name = struct.pack("16s16x", CARD.encode())
        flags = struct.unpack_from("H", fcntl.ioctl(sock, SIOCGIFFLAGS, name), 16)[0]
        flags = flags | IFF_UP if is_up else flags & ~IFF_UP
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", CARD.encode(), flags))


def cut() -> None:
    """Take this machine off the network."""
    set_card(is_up=False)


def readdress() -> None:
    """Take its address from this machine and give it back."""
    address = f"{address_of(own_machine())}/24"
    for verb in ("del", "add"):
        subprocess.run(["ip", "address", verb, address, "dev", CARD], check=True, timeout=30)


def vanish() -> None:
    """Let the machine go without a word, as when its power fails."""
    Path("/run/job/status").write_text("0\n", encoding="ascii")  # it is no failure of the run
    Path("/proc/sysrq-trigger").write_text("b", encoding="ascii")


TROUBLES = {"cut": cut, "readdress": readdress, "vanish": vanish}
