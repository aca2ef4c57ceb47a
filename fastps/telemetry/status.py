# SPDX-License-Identifier: Apache-2.0
"""The status of a process while it runs: /status.json and /metrics, read-only, by HTTP.

Over an abstract Unix socket, whose name has job, role and number, for processes of the same user;
`watch.py` finds them there. Also over TCP where FASTPS_METRICS_PORT is set, on the loopback by
default, for clients that show the token where one is set, and by TLS where there is a certificate.
Without a token a request must name this machine as its host, so that no web page can ask through a
browser by a name of its own. Threads: fastps:status, one for each socket, which sleep until a
client asks, and one for each client that asks, up to MAX_CLIENTS a socket; nothing is counted for
them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastps.config import Config
from fastps.config.token import read_secret
from fastps.errors import ConfigError
from fastps.security.ciphers import wipe_bytes
from fastps.telemetry.http_request import Request, host_name, read_request, send_answer
from fastps.telemetry.statistics import GAUGE, find_statistic
from fastps.transport import sockets
from fastps.transport.encryption import status_tls
from fastps.transport.traffic import Traffic, together

PREFIX = "fastps-status"
MAX_CLIENTS = 8  # at one time, of one socket; the kernel lets more of them wait
_ANSWER_S = 5.0  # for a client to send its request, and to read the answer; both together
_STOP_S = 5.0
TEXT, JSON = "text/plain", "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"

Numbers = Mapping[str, float]
Links = Sequence[Mapping[str, str | int]]  # each: peer, way, bytes_sent, bytes_received


class StatusService:
    """The listeners of one process, until close()."""

    def __init__(
        self,
        config: Config,
        *,
        role: str,
        rank: int,
        slot: int,
        tell: Callable[[], Numbers],
        links: Callable[[], Links] = list,
    ) -> None:
        """Listen where the settings say. Raises ConfigError.

        slot: the number of this process on its machine, which is added to FASTPS_METRICS_PORT.
        tell: returns the numbers. links: returns the traffic of each link. A thread of the service
        calls both.
        """
        self._about = {"job": config.job_id, "role": role, "rank": rank, "size": config.size,
                       "pid": os.getpid(), "host": socket.gethostname()}  # fmt: skip
        self._tell, self._links = tell, links
        self._secret = read_secret(config.metrics_token_file, "FASTPS_METRICS_TOKEN_FILE")
        self._hosts = {"localhost", config.metrics_host.lower()}
        self._listeners: list[socket.socket] = []
        self._clients: dict[threading.Thread, socket.socket] = {}  # that are answered now
        self._lock = threading.Lock()  # of the line above
        self._tls: Any = None
        try:
            for one in self._open(config, slot):
                self._listeners.append(one)
        except BaseException:
            sockets.close_all(self._listeners)
            raise
        self._threads = [
            threading.Thread(target=self._serve, args=[one], name="fastps:status", daemon=True)
            for one in self._listeners
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def of_scheduler(cls, config: Config, tell: Callable[[], Numbers]) -> StatusService:
        """Serve the scheduler's status; its port follows those of the members."""
        slot = config.n_programs + config.num_servers
        return cls(config, role="scheduler", rank=0, slot=slot, tell=tell)

    def _open(self, config: Config, slot: int) -> Iterator[socket.socket]:
        about = self._about
        if config.status:
            words = (PREFIX, about["job"], about["role"], about["rank"], about["pid"])
            with contextlib.suppress(ConfigError):  # the name is taken: go on without a status
                yield sockets.listen_unix_at("/".join(map(str, words)))
        if not config.metrics_port:
            return
        if not (self._secret or sockets.is_loopback(config.metrics_host)):
            raise ConfigError(
                f"FASTPS_METRICS_HOST={config.metrics_host} is open to other machines; set "
                "FASTPS_METRICS_TOKEN_FILE to a file of mode 0600 with the token they must show"
            )
        self._tls = status_tls(config, is_local=sockets.is_loopback(config.metrics_host))
        port = config.metrics_port + slot
        for one in sockets.listen(config.metrics_host, port, port_setting="FASTPS_METRICS_PORT"):
            one.setblocking(True)
            yield one

    def close(self) -> None:
        """Stop; idempotent."""
        deadline = time.monotonic() + _STOP_S
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        with self._lock:
            clients = dict(self._clients)
            for sock in clients.values():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in (*clients, *self._threads):
            thread.join(max(deadline - time.monotonic(), 0.0))
        sockets.close_all(self._listeners)

    def abandon(self) -> None:
        """Close the descriptors in a forked child, and forget the token."""
        sockets.close_all([*self._listeners, *self._clients.values()])
        wipe_bytes(self._secret)

    # ---- on a thread of the service ----

    def _serve(self, listener: socket.socket) -> None:
        places = threading.BoundedSemaphore(MAX_CLIENTS)
        with contextlib.suppress(OSError):
            while True:
                places.acquire()  # _ANSWER_S at most, which is a client's time
                sock, _ = listener.accept()
                if sockets.is_unix(sock) and not sockets.is_own_user(sock):
                    sock.close()
                    places.release()
                    continue
                thread = threading.Thread(
                    target=self._serve_client, args=[sock, places], name="fastps:status",
                    daemon=True,
                )  # fmt: skip
                with self._lock:
                    self._clients[thread] = sock
                try:
                    thread.start()
                except RuntimeError:  # no more threads; the next client may have one
                    self._clients.pop(thread).close()
                    places.release()

    def _serve_client(self, sock: socket.socket, places: threading.Semaphore) -> None:
        deadline = time.monotonic() + _ANSWER_S
        try:
            is_known = sockets.is_unix(sock)
            with contextlib.suppress(OSError), self._secured(sock, is_known=is_known) as sock:
                try:
                    request = read_request(sock, deadline)
                    found = self.answer(request, is_known=is_known)
                except ValueError:
                    found = 400, TEXT, b"this is not a request of HTTP/1\n"
                status, kind, body = found
                send_answer(sock, deadline, status=status, kind=kind, body=body)
        finally:
            with self._lock:
                del self._clients[threading.current_thread()]
            places.release()

    def _secured(self, sock: socket.socket, *, is_known: bool) -> socket.socket:
        """Return the socket of a client as it is to be read: by TLS, if there is a certificate.

        Its first read shakes hands, within that read's time.
        """
        if self._tls is None or is_known:
            return sock
        with sock:  # TLS has a socket of its own, or raises
            made: socket.socket = self._tls.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False
            )
        with self._lock:
            self._clients[threading.current_thread()] = made
        return made

    def answer(self, request: Request, *, is_known: bool) -> tuple[int, str, bytes]:
        """Return status, type and body of an answer.

        is_known: the kernel has checked the client's user.
        """
        if self._secret and not is_known:
            wanted = b"Bearer " + self._secret
            if not hmac.compare_digest(request.authorization, wanted):
                return 401, TEXT, b"show the token of FASTPS_METRICS_TOKEN_FILE\n"
        elif not is_known and not self._is_our_name(request.host):
            return (
                421,
                TEXT,
                (
                    b"this port is of the loopback: ask for localhost or an address, or set "
                    b"FASTPS_METRICS_TOKEN_FILE\n"
                ),
            )
        if request.method != "GET":
            return 501, TEXT, b"there is only GET\n"
        path = request.path
        if path == "/status.json":
            found = {"numbers": dict(self._tell()), "links": list(self._links())}
            return 200, JSON, json.dumps(self._about | found).encode()
        if path != "/metrics":
            return 404, TEXT, b"there are /metrics and /status.json\n"
        try:
            return 200, METRICS, render(self._about, self._tell(), self._links())
        except ImportError:
            return 501, TEXT, b"needs `pip install prometheus-client`\n"

    def _is_our_name(self, host: str) -> bool:
        """Return whether a header Host cannot be the name of a foreign web page."""
        name = host_name(host).lower()
        return not host or name in self._hosts or sockets.is_loopback(name)


def links_of(found: Iterable[Traffic], members: Sequence[Any]) -> Links:
    """Return the traffic of links as /status.json has it; members: by number."""
    return [
        {
            "peer": f"{members[one.peer].role} {members[one.peer].rank}",
            "way": one.way,
            "bytes_sent": one.sent,
            "bytes_received": one.received,
        }
        for one in together(found)
    ]


def render(about: Mapping[str, Any], numbers: Numbers, links: Links) -> bytes:
    """Return numbers as Prometheus reads them. Raises ImportError without prometheus_client."""
    # imported here: most processes are never scraped
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415
    from prometheus_client.core import (  # noqa: PLC0415
        CounterMetricFamily,
        GaugeMetricFamily,
        Metric,
    )

    labels = {name: str(about[name]) for name in ("job", "role", "rank")}

    class Numbered:
        def collect(self) -> Iterator[Metric]:
            for name, value in numbers.items():
                row = find_statistic(name)
                is_gauge = row is not None and row.kind == GAUGE
                kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
                family = kind(f"fastps_{name}", row.meaning if row else name, labels=list(labels))
                family.add_metric(list(labels.values()), value)
                yield family
            for name in ("bytes_sent", "bytes_received"):
                family = CounterMetricFamily(
                    f"fastps_link_{name}", f"{name} of the links to one peer, by one way",
                    labels=[*labels, "peer", "way"],
                )  # fmt: skip
                for link in links:
                    words = [*labels.values(), str(link["peer"]), str(link["way"])]
                    family.add_metric(words, link[name])
                yield family

    registry = CollectorRegistry()
    registry.register(Numbered())
    text: bytes = generate_latest(registry)
    return text
