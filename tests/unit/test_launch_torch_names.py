# SPDX-License-Identifier: Apache-2.0
"""The variables that tools around PyTorch read, and the port that is kept for rank 0."""

from __future__ import annotations

import socket
import threading

import pytest

from fastps.launch.layout import Layout
from fastps.launch.options import parse
from fastps.launch.plan import Identity, inherited_environment, make_plan
from fastps.launch.torch_names import KeptPort, port_beside, worker_variables

MASTER = ("10.0.0.1", 7655)


def test_places_on_three_machines():
    layouts = [Layout((2, 0, 1), (0, 1, 0), machine) for machine in range(3)]
    found = [worker_variables(layouts[0], rank, rank, MASTER) for rank in range(2)]
    found.append(worker_variables(layouts[2], 2, 0, MASTER))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
             "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
    assert [tuple(one[name] for name in names) for one in found] == [
        ("0", "0", "3", "2", "0", "2", "10.0.0.1", "7655"),
        ("1", "1", "3", "2", "0", "2", "10.0.0.1", "7655"),
        ("2", "0", "3", "1", "1", "2", "10.0.0.1", "7655"),  # a machine of servers counts not
    ]
    assert "MASTER_ADDR" not in worker_variables(layouts[0], 0, 0, None)


def test_workers_alone_are_told_and_the_user_may_choose():
    outer = {"RANK": "7", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/root"}
    inherited = inherited_environment(outer)
    assert inherited == {"HOME": "/root"}
    options = parse(["-np", "2", "-s", "1", "-v", "1", "--env", "MASTER_PORT=9", "true"])
    identity = Identity("job-x", None, ("127.0.0.1", 1), ("127.0.0.1", 2))
    plan = make_plan(options, identity, cpus=1, inherited=inherited)
    told = [(spec.role, spec.environment.get("RANK"), spec.environment.get("MASTER_PORT"))
            for spec in plan]  # fmt: skip
    assert told == [
        ("server", None, None), ("worker", "0", "9"), ("worker", "1", "9"),
        ("validator", None, None),
    ]  # fmt: skip


def test_the_port_beside_is_a_port():
    assert port_beside(7654) == 7655
    assert port_beside(65535) == 65534


def test_a_kept_port_is_for_whoever_asks_for_it():
    kept = KeptPort()
    try:
        with socket.create_server(("", kept.number)) as server:  # as rank 0's store does
            thread = threading.Thread(target=lambda: server.accept()[0].close())
            thread.start()
            socket.create_connection(("127.0.0.1", kept.number), timeout=10).close()
            thread.join(10)
    finally:
        kept.close()
    kept.close()
    with socket.create_server(("", 0)) as taken, pytest.raises(OSError, match="in use"):
        KeptPort(taken.getsockname()[1])
