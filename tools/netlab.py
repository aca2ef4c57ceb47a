#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a small network of shaped links on one Linux machine, and run programs on its hosts.

    tools/netlab.py run --hosts 8 --rate 200mbit --cc cubic -- CMD ...   up, CMD, down
    tools/netlab.py up --hosts 8 --rate 200mbit                          prints the lab's NAME
    tools/netlab.py exec NAME 0 -- CMD ...                               CMD on host 0
    tools/netlab.py down NAME

Decides how a lab is wired; knows nothing of what runs in it. A host is a network namespace with
one interface, eth0. All hosts hang on a bridge in one more namespace. Both ends of every cable
carry a token bucket: the host's end limits what it sends, the bridge's end what it receives.

    from tools.netlab import NetLab
    with NetLab(hosts=2, rate="50mbit", cc="cubic") as lab:
        lab.popen(0, ["ip", "route", "get", lab.address(1)]).wait()

Invariants. No command names an interface outside the lab's namespaces, and no cable ends in one,
so neither the machine's network nor its settings change: congestion control is set by route.
Names are random, so labs do not meet. `down` ends every process that is left on a host.

The file system is shared: a Unix socket with a path joins hosts without using the links. Inside
`run`, NETLAB_NAME and NETLAB_HOSTS tell CMD which lab it has. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

PREFIX = "fastps-"
NETWORK = "10.90"  # the third byte counts in 250s, the fourth within them
UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
NOBODY = "02:00:00:00:00:01"  # a link address that no host has
MTU = 1500
FRAME_BYTES = 1514  # a full packet as the bucket counts it: MTU and the Ethernet header
SEGMENT_BYTES = 1448  # TCP payload of a full packet with timestamps
PAYLOAD_SHARE = SEGMENT_BYTES / FRAME_BYTES  # 0.956: what is left of the rate for payload
MIN_BURST_BYTES = 80_000  # a whole offloaded packet of 64 KiB with its headers
BURST_S = 0.001  # a bucket this long at high rates, where timers are coarse
MIN_QUEUE_BYTES = 4 << 16
COMMAND_TIMEOUT_S = 60
END_WAIT_S = 5.0  # for processes on a host to be gone after SIGKILL


class NetLabError(RuntimeError):
    """Tell that the lab cannot be made, and what the command that failed said."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and packets of one host's link, as its buckets counted them; headers included."""

    sent: int
    received: int
    drops_sent: int
    drops_received: int

    def since(self, earlier: Traffic) -> Traffic:
        """Give what came on top of an earlier reading."""
        return Traffic(
            self.sent - earlier.sent,
            self.received - earlier.received,
            self.drops_sent - earlier.drops_sent,
            self.drops_received - earlier.drops_received,
        )


def parse_rate(text: str) -> int:
    """Read a rate such as 200mbit or 1gbit as bits per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
    rate = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if rate < 1:
        raise ValueError(f"{text!r} is not a rate; examples: 200mbit, 1gbit")
    return rate


def missing() -> str:
    """Say what this machine lacks for a lab; empty if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not installed (iproute2)"
    name = f"{PREFIX}{secrets.token_hex(3)}-try"
    try:
        _call("ip", "netns", "add", name)
        script = "link add try0 type veth peer name try1\n"
        _call("ip", "-n", name, "-batch", "-", text=script)
        _call("tc", "-n", name, "qdisc", "add", "dev", "try0", "root",
              "tbf", "rate", "1mbit", "burst", "9kb", "limit", "9kb")  # fmt: skip
    except NetLabError as error:
        return f"this kernel or container allows no lab: {error}"
    finally:
        _call("ip", "netns", "del", name, is_checked=False)
    return ""


class NetLab:
    """Hosts with shaped links; a context manager, or `up` and `down`.

    rate: of every link and direction, as 200mbit. queue_ms: how long a full bucket queue takes to
    drain. cc: congestion control of all TCP connections of the hosts; empty leaves the machine's.
    """

    def __init__(
        self,
        *,
        hosts: int = 2,
        rate: str = "1gbit",
        cc: str = "",
        queue_ms: float = 20.0,
        name: str = "",
    ) -> None:
        """Describe a lab; nothing is made yet."""
        self.hosts = hosts
        self.rate_bps = parse_rate(rate)
        self.cc = cc
        self.queue_ms = queue_ms
        self.name = name or f"{PREFIX}{secrets.token_hex(3)}"

    def __enter__(self) -> NetLab:
        """Make the lab."""
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the lab and end what runs in it."""
        self.down()

    @property
    def bytes_per_s(self) -> float:
        """Give what a link can carry of TCP payload, one way."""
        return self.rate_bps / 8 * PAYLOAD_SHARE

    def host_name(self, host: int) -> str:
        """Name a host: its namespace and its hostname."""
        return f"{self.name}-h{host}"

    def address(self, host: int) -> str:
        """Give the address of a host."""
        return f"{NETWORK}.{host // 250}.{host % 250 + 1}"

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    # ---- making and removing

    def up(self) -> None:
        """Make the lab; on failure nothing is left and NetLabError says why."""
        try:
            self._make_switch()
            for host in range(self.hosts):
                self._make_host(host)
        except BaseException:
            self.down()
            raise

    def _make_switch(self) -> None:
        _call("ip", "netns", "add", self._switch)
        script = f"link add bridge mtu {MTU} type bridge\nlink set bridge up\n"
        _call("ip", "-n", self._switch, "-batch", "-", text=script)

    def _make_host(self, host: int) -> None:
        name, port = self.host_name(host), f"port{host}"
        _call("ip", "netns", "add", name)
        _call("ip", "link", "add", port, "netns", self._switch, "mtu", MTU,
              "type", "veth", "peer", "name", "eth0", "netns", name)  # fmt: skip
        self._quieten(name)
        _call("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        address, network = self.address(host), f"{NETWORK}.0.0/16"
        route = f"route change {network} dev eth0 src {address} congctl {self.cc}\n"
        script = (
            f"link set lo up\naddress add {address}/16 dev eth0\nlink set eth0 mtu {MTU} up\n"
            + (route if self.cc else "")
        )
        _call("ip", "-n", name, "-batch", "-", text=script)
        self._shape(name, "eth0")
        self._shape(self._switch, port)

    def _quieten(self, name: str) -> None:
        """Leave IPv6 out: its neighbour discovery would be counted as traffic."""
        settings = [f"net.ipv6.conf.{which}.disable_ipv6=1" for which in ("all", "default")]
        for setting in settings:
            _call("ip", "netns", "exec", name, "sysctl", "-qw", setting, is_checked=False)

    def _shape(self, name: str, device: str) -> None:
        bytes_per_s = self.rate_bps / 8
        burst = max(MIN_BURST_BYTES, int(bytes_per_s * BURST_S))
        limit = max(MIN_QUEUE_BYTES, int(bytes_per_s * self.queue_ms / 1000))
        _call("tc", "-n", name, "qdisc", "replace", "dev", device, "root",
              "tbf", "rate", f"{self.rate_bps}bit", "burst", burst, "limit", limit)  # fmt: skip

    def down(self) -> None:
        """End every process on the hosts and remove the lab; one that is not there is fine."""
        names = [name for name in namespaces() if _belongs(name, self.name)]
        pids = [pid for name in names for pid in _processes(name)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + END_WAIT_S
        while any(map(_is_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)  # not all are our children: there is nothing to wait on
        for name in names:
            _call("ip", "netns", "del", name, is_checked=False)

    # ---- using

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Give the command that runs argv on a host, under the host's own name."""
        name = self.host_name(host)
        return [
            "ip", "netns", "exec", name,
            "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *argv,
        ]  # fmt: skip

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start argv on a host; the process's pid is argv's own. Options are Popen's."""
        return subprocess.Popen(self.command(host, argv), **options)

    def cut(self, source: int, *targets: int) -> None:
        """Drop all packets from one host to others, silently; those of the way back arrive."""
        self._neighbours("replace", source, targets, f"lladdr {NOBODY} nud permanent")

    def heal(self, source: int, *targets: int) -> None:
        """Let packets from one host to others arrive again."""
        self._neighbours("del", source, targets)

    def _neighbours(self, verb: str, source: int, targets: Sequence[int], more: str = "") -> None:
        lines = [f"neigh {verb} {self.address(one)} dev eth0 {more}\n" for one in targets]
        _call("ip", "-n", self.host_name(source), "-batch", "-", text="".join(lines))

    def traffic(self) -> list[Traffic]:
        """Read the counters of every host's link, in the order of hosts."""
        ports = _buckets(self._switch)
        return [
            Traffic(
                sent=own["bytes"],
                received=ports[f"port{host}"]["bytes"],
                drops_sent=own["drops"],
                drops_received=ports[f"port{host}"]["drops"],
            )
            for host in range(self.hosts)
            for own in [_buckets(self.host_name(host))["eth0"]]
        ]


def find(name: str) -> NetLab:
    """Give the lab of that name as far as namespaces tell: its hosts, not its rate."""
    hosts = [space for space in namespaces() if re.fullmatch(rf"{re.escape(name)}-h\d+", space)]
    if not hosts:
        raise NetLabError(f"there is no lab named {name}; tools/netlab.py list shows them")
    return NetLab(hosts=len(hosts), name=name)


def namespaces() -> list[str]:
    """List the network namespaces of this machine that have a name."""
    lines = _call("ip", "netns", "list", is_checked=False).splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def _belongs(space: str, lab: str) -> bool:
    return re.fullmatch(rf"{re.escape(lab)}-(switch|h\d+)", space) is not None


def _processes(space: str) -> list[int]:
    return [int(pid) for pid in _call("ip", "netns", "pids", space, is_checked=False).split()]


def _is_running(pid: int) -> bool:
    """Tell whether a process still holds its namespace; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _buckets(space: str) -> dict[str, dict[str, int]]:
    found = json.loads(_call("tc", "-n", space, "-s", "-j", "qdisc", "show") or "[]")
    return {bucket["dev"]: bucket for bucket in found if bucket["kind"] == "tbf"}


def _call(*command: object, text: str = "", is_checked: bool = True) -> str:
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise NetLabError(f"{words[0]} is not installed") from None
    if done.returncode and is_checked:
        raise NetLabError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


# ---- the command


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, so that labs are removed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    old = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("up", "run"):
        sub = verbs.add_parser(verb, help=f"{verb}: make a lab")
        sub.add_argument("--hosts", type=int, default=2)
        sub.add_argument("--rate", default="1gbit")
        sub.add_argument("--queue-ms", type=float, default=20.0)
        sub.add_argument("--cc", default="", help="congestion control, e.g. cubic")
    verbs.add_parser("down", help="remove a lab").add_argument("name")
    sub = verbs.add_parser("exec", help="run a command on a host")
    sub.add_argument("name")
    sub.add_argument("host", type=int)
    verbs.add_parser("list", help="show the labs there are")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    options, command = make_parser().parse_args(words[:split]), words[split + 1 :]
    if options.verb in ("run", "exec") and not command:
        sys.stderr.write("netlab: give the command after --\n")
        return 2
    try:
        return _obey(options, command)
    except (NetLabError, ValueError) as error:
        sys.stderr.write(f"netlab: {error}\n")
        return 1


def _obey(options: argparse.Namespace, command: list[str]) -> int:
    if options.verb == "list":
        labs = {space.rpartition("-")[0] for space in namespaces() if space.startswith(PREFIX)}
        print(*sorted(labs), sep="\n")
    elif options.verb == "down":
        find(options.name).down()
    elif options.verb == "exec":
        words = find(options.name).command(options.host, command)
        os.execvp(words[0], words)
    else:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # an `ip` that fails is an error
        lab = NetLab(
            hosts=options.hosts, rate=options.rate, cc=options.cc, queue_ms=options.queue_ms
        )
        return _run(lab, command) if options.verb == "run" else _up(lab)
    return 0


def _up(lab: NetLab) -> int:
    lab.up()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(lab.name)
    return 0


def _run(lab: NetLab, command: list[str]) -> int:
    environment = {**os.environ, "NETLAB_NAME": lab.name, "NETLAB_HOSTS": str(lab.hosts)}
    with ended_by_signals(), lab:
        return subprocess.call(command, env=environment)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head -1` ends it quietly
    sys.exit(main())
