# SPDX-License-Identifier: Apache-2.0
"""The status of a process answers its clients, whatever other clients do."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aids.free_ports import free_ports
from fastps.config import load
from fastps.telemetry import status
from fastps.telemetry.http_request import MAX_HEAD_BYTES, Request, host_name, parse
from fastps.telemetry.status import MAX_CLIENTS, StatusService

LIMIT_S = 20.0


@contextlib.contextmanager
def service(**settings: object) -> Iterator[int]:
    """Serve a status at a free port of the loopback."""
    (port,) = free_ports(1)
    config = load({"metrics_port": port, "status": False, **settings}, {})
    with contextlib.closing(StatusService(config, role="worker", rank=0, slot=0, tell=dict)):
        yield port


def connect(port: int) -> socket.socket:
    """Connect and return the socket."""
    sock = socket.create_connection(("127.0.0.1", port), LIMIT_S)
    sock.settimeout(LIMIT_S)
    return sock


def ask(port: int, *lines: str, path: str = "/status.json") -> bytes:
    """Send a request and return all of the answer."""
    with connect(port) as sock:
        sock.sendall("\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode("latin-1"))
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(65536):
                data += part
    return data


def code_of(answer: bytes) -> int:
    """Return the status of an answer."""
    return int(answer.split(b" ")[1])


def test_clients_that_send_nothing_hold_up_nobody():
    with service() as port, contextlib.ExitStack() as silent:
        for _ in range(MAX_CLIENTS - 1):
            silent.enter_context(connect(port))
        began = time.monotonic()
        answer = ask(port, "Host: localhost")
        assert time.monotonic() - began < status._ANSWER_S / 2
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["role"] == "worker"


def test_a_client_that_sends_a_byte_now_and_then_has_one_deadline(monkeypatch):
    monkeypatch.setattr(status, "_ANSWER_S", 0.5)
    with service() as port, connect(port) as sock:
        began = time.monotonic()
        wake = threading.Event()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < LIMIT_S:
                sock.sendall(b"G")
                wake.wait(0.1)
        assert time.monotonic() - began < LIMIT_S / 2


def test_a_service_ends_while_clients_send_nothing():
    with service() as port:
        silent = [connect(port) for _ in range(MAX_CLIENTS + 2)]
        assert code_of(ask(port, "Host: localhost")) == 200  # after those have had their time
        silent += [connect(port) for _ in range(MAX_CLIENTS)]
        began = time.monotonic()
    assert time.monotonic() - began < status._STOP_S
    for sock in silent:
        sock.close()
    assert not [one for one in threading.enumerate() if one.name == "fastps:status"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9400", "localhost.evil", "10.0.0.1"]
)
def test_a_web_page_that_gives_its_name_our_address_learns_nothing(host):
    with service() as port:
        answer = ask(port, f"Host: {host}")
        assert code_of(answer) == 421
        assert b"FASTPS_METRICS_TOKEN_FILE" in answer
        assert b"worker" not in answer


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:9400", "[::1]:9400", "::1"]
)
def test_names_of_this_machine(host):
    with service() as port:
        assert code_of(ask(port, f"Host: {host}")) == (421 if host == "::1" else 200)
        assert code_of(ask(port)) == 200  # browsers always send the name


def test_by_token_any_name_will_do(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text("a token of scrapers")
    path.chmod(0o600)
    with service(metrics_token_file=str(path)) as port:
        shown = "Authorization: Bearer a token of scrapers"
        assert code_of(ask(port, "Host: pod.cluster.local", shown)) == 200
        for wrong in ("Authorization: Bearer x", "Authorization: \xff", "X: y"):
            assert code_of(ask(port, "Host: localhost", wrong)) == 401
        assert code_of(ask(port, shown, shown)) == 400


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_by_tls_nothing_is_served_in_clear(tmp_path: Path):
    """And clients that send nothing, or no TLS, hold up nobody."""
    path = tmp_path / "status.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", path, "-out", path.with_suffix(".crt")],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    path.write_bytes(path.read_bytes() + path.with_suffix(".crt").read_bytes())
    known = ssl.create_default_context(cafile=str(path.with_suffix(".crt")))
    with service(metrics_cert_file=str(path), encrypt="on") as port:
        for _ in range(2):
            with (
                connect(port),  # which sends nothing
                connect(port) as sock,
                known.wrap_socket(sock, server_hostname="localhost") as client,
            ):
                client.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.recv(65536).startswith(b"HTTP/1.0 200")
            assert b"HTTP" not in ask(port, "Host: localhost")


@pytest.mark.parametrize("data", [
    b"\r\n\r\n", b"GET\r\n\r\n", b"GET / FTP/1.0\r\n\r\n", b"\xff\xfe\r\n\r\n",
    b"GET / HTTP/1.1\r\nx\r\n\r\n", b"x" * MAX_HEAD_BYTES,
])  # fmt: skip
def test_what_is_no_request_is_refused(data):
    with service() as port:
        with connect(port) as sock:
            sock.sendall(data)
            assert code_of(sock.recv(65536)) == 400
        assert code_of(ask(port)) == 200


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(data):
    with contextlib.suppress(ValueError):
        assert isinstance(parse(b"GET / HTTP/1.1\r\n" + data), Request)
    with contextlib.suppress(ValueError):
        parse(data)


def test_a_host_without_its_port():
    assert [host_name(host) for host in ("a:1", "a", "[::1]:2", "[::1", "")] == [
        "a", "a", "::1", "::1", "",
    ]  # fmt: skip


def test_numbers_that_may_fall_are_gauges():
    about = {"job": "j", "role": "worker", "rank": 0}
    numbers = {"operations": 2, "messages_kept": 1, "server_tensors": 3, "server_bytes_summed": 9,
               "accepted_share_of_worker_1": 0.5}  # fmt: skip
    text = status.render(about, numbers, []).decode()
    kinds = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    assert {name.removesuffix("_total"): kind for name, kind in kinds.items()} == {
        "fastps_operations": "counter", "fastps_messages_kept": "gauge",
        "fastps_server_tensors": "gauge", "fastps_server_bytes_summed": "counter",
        "fastps_accepted_share_of_worker_1": "gauge",
        "fastps_link_bytes_sent": "counter", "fastps_link_bytes_received": "counter",
    }  # fmt: skip
