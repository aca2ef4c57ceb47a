# SPDX-License-Identifier: Apache-2.0
"""BytePS's variables: understood, or answered once; slips of the pen are told."""

from __future__ import annotations

import logging

import pytest

from fastps import config
from fastps.config import byteps
from fastps.errors import ConfigError


def test_every_variable_has_one_row():
    aliases = {a for s in config.SETTINGS for a in s.aliases if isinstance(a, str)}
    assert not byteps.INSTEAD.keys() & aliases
    assert not byteps.INSTEAD.keys() & byteps.UNDERSTOOD.keys()
    labels = [a.label for s in config.SETTINGS for a in s.aliases if not isinstance(a, str)]
    assert all(any(name in label for label in labels) for name in byteps.UNDERSTOOD)
    names = {s.name for s in config.SETTINGS}
    assert set(byteps.UNDERSTOOD.values()) <= names
    for answer in byteps.INSTEAD.values():
        for word in answer.replace(",", " ").replace(";", " ").split():
            if word.startswith("FASTPS_"):
                assert word.partition("=")[0] in names, answer


def said(caplog: pytest.LogCaptureFixture, environ: dict[str, str]) -> list[str]:
    config._warn_once.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        config.load({}, environ)
        config.load({}, environ)
    return [record.getMessage() for record in caplog.records]


def test_what_does_nothing_is_answered_once(caplog):
    assert said(caplog, {"BYTEPS_NCCL_NUM_RINGS": "2", "BYTEPS_ENABLE_IPC": ""}) == [
        "environment variable BYTEPS_NCCL_NUM_RINGS of BytePS does nothing here: there is "
        "no NCCL; tensors on a GPU are copied through the host"
    ]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("BYTEPS_PARTITION_BYTE", "BYTEPS_PARTITION_BYTES"),
        ("DMLC_NUM_WORKERS", "DMLC_NUM_WORKER"),
        ("FASTPS_RNAK", "FASTPS_RANK"),
    ],
)
def test_slips_are_told(caplog, wrong, right):
    found = said(caplog, {wrong: "1"})
    assert len(found) == 1
    assert said(caplog, {wrong: "1", "FASTPS_LOCAL_RANK": "1"}) == []
    assert "is unknown and ignored; did you mean" in found[0]
    assert right in found[0]


def test_what_is_understood_says_nothing(caplog):
    environ = {"DMLC_NUM_WORKER": "2", "BYTEPS_SCHEDULING_CREDIT": "4", "DMLC_ROLE": "server"}
    assert said(caplog, environ) == []


def test_roles():
    assert config.role_given({}) is None
    assert config.role_given({"DMLC_ROLE": "scheduler"}) == "scheduler"
    assert config.role_given({"DMLC_ROLE": "server", "FASTPS_ROLE": "worker"}) == "worker"
    with pytest.raises(ConfigError, match="one of worker, server, scheduler"):
        config.role_given({"DMLC_ROLE": "joint"})


def test_zenops_names_its_validators():
    environ = {
        "DMLC_ROLE": "worker", "DMLC_WORKER_TYPE": "validator", "DMLC_NUM_VALIDATOR": "2",
        "DMLC_VALIDATOR_ID": "1", "DMLC_NUM_WORKER": "4", "DMLC_NUM_SERVER": "1",
    }  # fmt: skip
    found = config.load({}, environ)
    assert (found.role, found.rank, found.size, found.num_validators) == ("validator", 1, 4, 2)
    assert found.n_programs == 6
    workers = environ | {"DMLC_WORKER_TYPE": "worker", "DMLC_WORKER_ID": "3"}
    assert (config.load({}, workers).role, config.load({}, workers).rank) == ("worker", 3)
    with pytest.raises(ConfigError, match="FASTPS_NUM_VALIDATORS above it"):
        config.load({}, environ | {"DMLC_VALIDATOR_ID": "2"})
