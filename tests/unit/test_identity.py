# SPDX-License-Identifier: Apache-2.0
"""Names of machines: what processes of one host have in common, and what tells them apart."""

from __future__ import annotations

import os

from fastps.config import load
from fastps.control.identity import host_id, host_of, machine_name

CONFIG = load({}, {})


def test_processes_of_one_host_have_one_name():
    boot_id, _, namespace = host_id().partition("/")
    assert len(boot_id) == 36
    assert int(namespace) == os.stat("/proc/self/ns/net").st_ino
    assert machine_name(CONFIG, is_shared=True) == host_id()


def test_without_shared_memory_each_process_is_alone():
    names = {machine_name(CONFIG, is_shared=False) for _ in range(10)}
    assert len(names) == 10
    assert {host_of(name) for name in names} == {host_id()}


def test_a_configured_name_comes_first():
    named = load({"machine": "left"}, {})
    assert machine_name(named, is_shared=True) == "left"
    alone = machine_name(named, is_shared=False)
    assert alone.startswith(f"left#{os.getpid()}-")
    assert host_of(alone) == "left"
