# SPDX-License-Identifier: Apache-2.0
"""Names of machines: what processes of one host have in common, and what tells them apart."""

from __future__ import annotations

import os

from fastps.config import load
from fastps.control import identity
from fastps.control.identity import host_id, host_of, machine_name

CONFIG = load({}, {})


def test_workers_of_an_elastic_job_share_memory_where_process_ids_are_the_same(
    monkeypatch, tmp_path
):
    elastic = load({"size": 2, "elastic_min": 1}, {})
    names = [machine_name(elastic, is_shared=True)]
    assert host_of(names[0]) == host_id()
    assert machine_name(elastic, is_shared=True) == names[0]
    monkeypatch.setattr(identity, "PROCESSES_FILE", tmp_path)
    names.append(machine_name(elastic, is_shared=True))
    assert names[0] != names[1]
    assert host_of(names[0]) == host_of(names[1])


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
