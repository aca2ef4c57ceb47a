# SPDX-License-Identifier: Apache-2.0
"""The status of a process while it runs: /status.json and /metrics, read-only, by HTTP.

Over an abstract Unix socket, whose name has job, role and number, for processes of the same user;
`watch.py` finds them there. Also over TCP where FASTPS_METRICS_PORT is set, on the loopback by
default, for clients that show the token where one is set. Threads: fastps:status, one for each
socket, which sleep until a client asks; nothing is counted for them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastps.config import Config
from fastps.config.token import read_secret
from fastps.errors import ConfigError
from fastps.transport import sockets
from fastps.transport.traffic import Traffic, together

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler

PREFIX = "fastps-status"
# The numbers of statistics() that may fall again; all others only grow.
GAUGES = frozenset({
    "step_seconds", "exposed_share", "exposed_share_of_step", "credit_bytes", "links", "tensors",
    "size", "members", "half_open", "generation",
})  # fmt: skip
_ANSWER_S = 5.0  # for a client to send its request, and to read the answer
_STOP_S = 5.0
JSON, METRICS = "application/json", "text/plain; version=0.0.4; charset=utf-8"

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
        self._listeners: list[socket.socket] = []
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
        port = config.metrics_port + slot
        for one in sockets.listen(config.metrics_host, port, port_setting="FASTPS_METRICS_PORT"):
            one.setblocking(True)
            yield one

    def close(self) -> None:
        """Stop; idempotent."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        for thread in self._threads:
            thread.join(_STOP_S)
        sockets.close_all(self._listeners)

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        sockets.close_all(self._listeners)

    # ---- on a thread of the service ----

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, address = listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(_ANSWER_S)
                    if not sockets.is_unix(sock) or sockets.is_own_user(sock):
                        make_handler()(sock, address, self)  # type: ignore[arg-type]

    def answer(self, path: str, shown: str, *, is_known: bool) -> tuple[int, str, bytes]:
        """Return status, type and body of an answer.

        shown: the header Authorization. is_known: the kernel has checked the client's user.
        """
        wanted = b"Bearer " + self._secret
        if self._secret and not is_known and not hmac.compare_digest(shown.encode(), wanted):
            return 401, "text/plain", b"show the token of FASTPS_METRICS_TOKEN_FILE\n"
        if path == "/status.json":
            found = {"numbers": dict(self._tell()), "links": list(self._links())}
            return 200, JSON, json.dumps(self._about | found).encode()
        if path != "/metrics":
            return 404, "text/plain", b"there are /metrics and /status.json\n"
        try:
            return 200, METRICS, render(self._about, self._tell(), self._links())
        except ImportError:
            return 501, "text/plain", b"needs `pip install prometheus-client`\n"


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
                kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
                family = kind(
                    f"fastps_{name}", f"{name} of fastps.statistics()", labels=list(labels)
                )
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


def make_handler() -> type[BaseHTTPRequestHandler]:
    """Return the class that answers one request; its server is a StatusService."""
    # imported here: http.server costs 10 MB, and most processes are never asked
    from http.server import BaseHTTPRequestHandler  # noqa: PLC0415

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = self.server.answer(  # type: ignore[attr-defined]
                self.path,
                self.headers.get("Authorization", ""),
                is_known=sockets.is_unix(self.connection),
            )
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: scrapers ask all the time."""

    return Handler
