# SPDX-License-Identifier: Apache-2.0
"""What an end of a connection says about encryption: by settings, addresses and the machine."""

from __future__ import annotations

import dataclasses
import json
import socket

import pytest

from fastps.config import load
from fastps.control import rendezvous
from fastps.errors import ConfigError
from fastps.launch import leader
from fastps.launch.options import parse
from fastps.security import ciphers
from fastps.security.handshake import Option
from fastps.transport import encryption, rdma, sockets
from fastps.transport.encryption import check_encryption, encryption_options, status_tls

TOKEN = {"FASTPS_TOKEN": "c5d1f8a0b3e7f6d2a9"}


def settings(**given: str):
    return load(
        environ={**TOKEN, **{f"FASTPS_{name.upper()}": one for name, one in given.items()}}
    )


@pytest.fixture
def pair():
    """A TCP connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with near, far:
            yield near, far


@pytest.mark.parametrize(
    ("mode", "option"),
    [("off", Option.NONE), ("auto", Option.AUTO), ("integrity", Option.INTEGRITY),
     ("on", Option.ON)],
)  # fmt: skip
def test_options_by_mode(pair, mode, option, monkeypatch):
    monkeypatch.setattr(ciphers, "has_aes", lambda: True)
    for sock in pair:
        assert encryption_options(sock, settings(encrypt=mode)) == option
    monkeypatch.setattr(sockets, "is_same_host", lambda sock: False)
    monkeypatch.setattr(sockets, "is_own_address", lambda host: False)
    leaves = Option.LEAVES if option else Option.NONE
    assert encryption_options(pair[0], settings(encrypt=mode)) == option | leaves
    monkeypatch.setattr(ciphers, "has_aes", lambda: False)
    slow = Option.NO_AES if option else Option.NONE
    assert encryption_options(pair[0], settings(encrypt=mode)) == option | leaves | slow


def test_unix_sockets_are_never_encrypted():
    near, far = socket.socketpair()
    with near, far:
        assert encryption_options(near, settings(encrypt="on")) == Option.NONE


def test_without_a_library(pair, monkeypatch, caplog):
    def missing():
        raise ConfigError("no libcrypto")

    monkeypatch.setattr(ciphers, "load", missing)
    encryption._has_library.cache_clear()
    for mode in ("on", "integrity"):
        with pytest.raises(ConfigError, match="no libcrypto"):
            encryption_options(pair[0], settings(encrypt=mode))
        with pytest.raises(ConfigError):
            check_encryption(settings(encrypt=mode))
    assert Option.NO_LIBRARY in encryption_options(pair[0], settings(encrypt="auto"))
    assert "encrypts nothing: no libcrypto" in caplog.text
    encryption._has_library.cache_clear()


@pytest.mark.parametrize("mode", ["on", "integrity"])
def test_rdma_is_refused_or_replaced(mode):
    with pytest.raises(ConfigError, match="cannot encrypt RDMA"):
        check_encryption(settings(encrypt=mode, transport="rdma"))
    mine = rdma.probe(settings())
    found = rdma.takes_rdma(settings(encrypt=mode), mine, "here", host_id="there", gid="0:1")
    assert found == (False, f"FASTPS_ENCRYPT={mode} cannot encrypt it")


@pytest.mark.parametrize("mode", ["on", "integrity"])
def test_a_status_that_leaves_in_clear_is_refused(mode):
    open_to_all = {"encrypt": mode, "metrics_host": "0.0.0.0"}
    with pytest.raises(ConfigError, match="set FASTPS_METRICS_CERT_FILE"):
        status_tls(settings(**open_to_all), is_local=False)
    assert status_tls(settings(**open_to_all), is_local=True) is None
    assert status_tls(settings(encrypt="auto"), is_local=False) is None
    with pytest.raises(ConfigError, match="cannot be used: No such file"):
        status_tls(settings(**open_to_all, metrics_cert_file="/none.pem"), is_local=False)
    with pytest.raises(ConfigError, match="without a password"):
        status_tls(settings(**open_to_all, metrics_cert_file=__file__), is_local=False)


@pytest.mark.parametrize("mode", ["on", "integrity"])
def test_srun_does_not_carry_a_token_in_clear(mode):
    """Whichever way the mode is given; ssh may carry it, and encrypts."""
    nodes = dataclasses.replace(parse(["true"]), has_srun=True)
    for options, environ in (
        (dataclasses.replace(nodes, encrypt=mode), {}),
        (dataclasses.replace(nodes, environment=(("FASTPS_ENCRYPT", mode),)), {}),
        (nodes, {"FASTPS_ENCRYPT": mode}),
    ):
        with pytest.raises(ConfigError, match=r"srun would carry the job token .* with -H: they"):
            leader._token(options, environ)
        assert leader._token(dataclasses.replace(options, has_srun=False), environ)
    assert leader._token(nodes, {"FASTPS_ENCRYPT": "auto"})


@pytest.mark.parametrize("mode", ["on", "integrity"])
def test_a_token_that_travels_in_clear_is_refused(mode):
    class Posted:
        def __init__(self, **job: str) -> None:
            self._text = json.dumps(job)

        def read(self, *, timeout_s: float) -> str:
            return self._text

    def find(mode: str, *, is_one_machine: bool = False, **job: str) -> object:
        return rendezvous.find(
            settings(encrypt=mode), Posted(**job), is_one_machine=is_one_machine
        )

    with pytest.raises(ConfigError, match="set FASTPS_TOKEN_FILE"):
        find(mode, token="x")
    assert find(mode) == {}
    assert find("auto", token="x") == find(mode, token="x", is_one_machine=True) == {"token": "x"}
