# SPDX-License-Identifier: Apache-2.0
"""On slow links push and pull overlap, and no byte travels that need not.

Real processes on hosts made by tools/netlab.py, each host with a link of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools import netlab
from tools.bench import shaped
from tools.bench._hosts import on_hosts
from tools.netlab import NetLab

pytestmark = [pytest.mark.root, pytest.mark.alone, pytest.mark.timeout(110)]

SHAPE = shaped.Shape(workers=2, servers=2)
RATE = "50mbit"
NBYTES = 2 << 20
SETTINGS = {  # pieces small beside the tensor, as they are beside a real model
    "FASTPS_PARTITION_BYTES": "262144",
    "FASTPS_CHUNK_BYTES": "65536",
}
MOST_OF_BOUND = 1.6  # push, then pull takes 2
MOST_OF_BYTES = 1.05  # of theory, headers included


@pytest.fixture(scope="module")
def lack() -> str:
    return netlab.missing()


@pytest.fixture
def lab(lack: str) -> Iterator[NetLab]:
    if lack:
        pytest.skip(f"no make-believe hosts here: {lack}")
    with NetLab(hosts=SHAPE.hosts, rate=RATE, cc="cubic") as made:
        yield made


def output_of(lab: NetLab, host: int, *argv: str) -> str:
    process = lab.popen(host, argv, stdout=subprocess.PIPE, text=True)
    return process.communicate(timeout=60)[0]


def test_push_and_pull_overlap_and_move_only_what_they_must(lab):
    team = shaped.Team(lab, SHAPE, shaped.System("fastps", SETTINGS), number=0)
    try:
        turn = team.reduce(NBYTES, iterations=3)  # ends the run if a sum is wrong
    finally:
        team.close()
    assert min(turn.seconds) <= MOST_OF_BOUND * SHAPE.bound_s(NBYTES, lab.bytes_per_s)
    assert min(turn.seconds) >= SHAPE.bound_s(NBYTES, lab.bytes_per_s) * 0.9  # links are shaped
    theory = turn.iterations * SHAPE.worker_bytes(NBYTES) / netlab.PAYLOAD_SHARE
    assert SHAPE.worker_bytes(NBYTES) == SHAPE.server_bytes(NBYTES)  # as many of one as the other
    for traffic in turn.traffic:  # what arrives: a full queue makes TCP send some of it again
        assert 1 / MOST_OF_BYTES <= traffic.received / theory <= MOST_OF_BYTES


SLOW = """
import os, socket
import numpy as np
import fastps

def unsent():
    "What the kernel may hold unsent of each connection to another host."
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                is_inet = sock.family == socket.AF_INET
                if is_inet and sock.getpeername()[0] != sock.getsockname()[0]:
                    found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT))
        except OSError:
            pass
    return [nbytes for nbytes in found if nbytes]

fastps.init()
arrays = [np.full(1 << 16, i + fastps.rank(), np.float32) for i in range(32)]
for _ in range(2):
    flying = [fastps.push_pull_async(array, f"{i}", priority=i, average=False)
              for i, array in enumerate(arrays)]  # later ones are more urgent, as in backward
    for i, one in enumerate(flying):
        assert (fastps.synchronize(one) == 2 * i + 1).all()
held = unsent()
assert held and max(held) <= 64 << 10, held
fastps.shutdown()
"""


def test_the_kernel_holds_little_of_a_slow_link(lack):
    """What it has taken goes before all that is more urgent: of 50 Mbit/s it needs few KiB."""
    if lack:
        pytest.skip(f"no make-believe hosts here: {lack}")
    assert on_hosts(2, RATE, [sys.executable, "-c", SLOW]) == 0


def test_hosts_have_their_own_names_networks_and_congestion_control(lab):
    names = [output_of(lab, host, "hostname").strip() for host in range(lab.hosts)]
    assert names == [lab.host_name(host) for host in range(lab.hosts)]
    assert len(set(names)) == lab.hosts
    links = output_of(lab, 0, "ip", "-o", "link")
    assert {line.split()[1].split("@")[0].rstrip(":") for line in links.splitlines()} == {
        "lo",
        "eth0",
    }
    assert "congctl cubic" in output_of(lab, 0, "ip", "route")


def test_labs_do_not_meet_and_end_what_runs_in_them(lab):
    with NetLab(hosts=1, rate="1gbit") as other:
        assert other.name != lab.name
        process = other.popen(0, ["sleep", "100"])
    assert process.wait(timeout=30) < 0
    spaces = netlab.namespaces()
    assert not [space for space in spaces if space.startswith(other.name)]
    assert lab.host_name(0) in spaces
    assert output_of(lab, 0, "hostname").strip() == lab.host_name(0)


def test_a_lab_that_cannot_be_made_leaves_nothing(lack):
    if lack:
        pytest.skip(f"no make-believe hosts here: {lack}")
    lab = NetLab(hosts=1, rate="1gbit", cc="no-such-control")
    with pytest.raises(netlab.NetLabError, match="ip -n"):
        lab.up()
    assert not [space for space in netlab.namespaces() if space.startswith(lab.name)]


@pytest.mark.parametrize(
    ("text", "bps"), [("200mbit", 200_000_000), ("1gbit", 10**9), ("1.5kbit", 1500), ("9bit", 9)]
)
def test_rates_are_read(text, bps):
    assert netlab.parse_rate(text) == bps


@pytest.mark.parametrize("text", ["", "fast", "-1mbit", "0bit", "200", "1tbit"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match="is not a rate"):
        netlab.parse_rate(text)


def test_the_bound_is_the_slowest_link():
    assert shaped.Shape(4, 4).bound_s(1000, 100) == 10
    assert shaped.Shape(4, 2).bound_s(1000, 100) == 20  # servers move twice as much
    assert shaped.Shape(2, 4).bound_s(1000, 100) == 10
