# SPDX-License-Identifier: Apache-2.0
"""Parse the machines of a job, from -H or a hostfile: pure.

`-H a:4,b:4,c:0+1` names hosts with their numbers of workers, servers and validators; a hostfile
has a line for each, as Open MPI, Horovod and PBS write them. Uses no name service and starts
nothing. Errors are ValueErrors with a sentence for the user.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from fastps.launch.layout import Layout, make_layout

MAX_COUNT = 4096
SHAPE = "HOST:WORKERS, or HOST:WORKERS+SERVERS, such as a:4,b:4,c:0+1"
# A name never begins with a hyphen, which ssh would take for an option.
_NAME = re.compile(r"(?:[\w.][\w.+\\-]*@)?[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"((?:[\w.][\w.+\\-]*@)?)\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\](?::(.*))?")
_KEYS = {"slots": 0, "max_slots": None, "max-slots": None, "servers": 1, "validators": 2}


@dataclasses.dataclass(frozen=True)
class Host:
    """One machine: how ssh reaches it, and how many processes it runs; None if not given."""

    name: str
    counts: tuple[int, int, int] | None = None  # workers, servers, validators

    @property
    def address(self) -> str:
        """Return the name without the user name of ssh."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse a comma-separated list of hosts."""
    return _merged([_host(word.strip()) for word in text.split(",") if word.strip()], "-H")


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    """Parse the lines of a hostfile; name: of the file, for errors."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts.append(_with_slots(_host(words[0]), words[1:]))
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
    return _merged(hosts, name)


def place(
    hosts: Sequence[Host],
    workers: Sequence[int] | None,
    servers: Sequence[int] | None,
    validators: Sequence[int] | None,
    *,
    total: int | None = None,
) -> Layout:
    """Lay out a job on hosts, seen from the first.

    workers, servers, validators: counts from the options, per machine, None if not given. total:
    number of all workers, if given instead; hosts with counts are filled in their order.
    """
    given_counts = [host.counts for host in hosts if host.counts is not None]
    if given_counts and len(given_counts) != len(hosts):
        bare = next(host.name for host in hosts if host.counts is None)
        raise ValueError(
            f"host {bare} has no number of workers, but other hosts have; give all hosts a "
            f"number, or none: {SHAPE}"
        )
    columns = list(zip(*given_counts, strict=True)) or [(), (), ()]
    for option, given, column in (
        ("-np", workers, columns[0]),
        ("-s", servers, columns[1] if any(columns[1]) else ()),
        ("-v", validators, columns[2] if any(columns[2]) else ()),
    ):
        is_total = option == "-np" and len(column) > 1 and tuple(given or ()) == (sum(column),)
        if given is not None and column and tuple(given) != tuple(column) and not is_total:
            raise ValueError(
                f"{option} {','.join(map(str, given))} contradicts the numbers of the hosts, "
                f"{','.join(map(str, column))}; leave {option} out"
            )
    counts = columns[0] or workers or (1,)
    if total is not None:
        counts = _fill(columns[0] or split_evenly(total, len(hosts)), total)
    layout = make_layout(
        counts,
        (columns[1] if any(columns[1]) else servers) or (0,),
        (columns[2] if any(columns[2]) else validators) or (0,),
        machines=len(hosts),
        machine=0,
    )
    return layout if total is None else _without_idle(layout)


def check_all_have_work(layout: Layout, hosts: Sequence[Host]) -> None:
    """Raise ValueError for a host without processes; the first one has the scheduler."""
    rows = zip(hosts, layout.workers, layout.servers, layout.validators, strict=True)
    for number, (host, *counts) in enumerate(rows):
        if number and not any(counts):
            raise ValueError(
                f"{host.name} has neither workers nor servers; give it some, or leave it out"
            )


def _host(word: str) -> Host:
    """Parse NAME or NAME:COUNTS; the name may be an IPv6 address in brackets."""
    if found := _IPV6.fullmatch(word):
        user, address, counts = found.groups()
        return Host(user + address, _counts(counts, word))
    name, colon, counts = word.partition(":")
    if ":" in counts:
        raise ValueError(f"{word!r}: write an IPv6 address in brackets, such as [fd00::1]:4")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{word!r} is not a host; write {SHAPE}")
    return Host(name, _counts(counts if colon else None, word))


def _counts(text: str | None, word: str) -> tuple[int, int, int] | None:
    if text is None:
        return None
    words = text.split("+")
    if len(words) > 3 or not all(_is_count(one) for one in words):
        raise ValueError(
            f"{word!r}: after the colon comes WORKERS, WORKERS+SERVERS or WORKERS+SERVERS+"
            f"VALIDATORS, each a whole number of at most {MAX_COUNT}"
        )
    workers, servers, validators = [*map(int, words), 0, 0][:3]
    return workers, servers, validators


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= MAX_COUNT


def _with_slots(host: Host, words: Iterable[str]) -> Host:
    """Parse what follows a name in a hostfile: slots=4, servers=1."""
    counts: list[int] | None = None
    for word in words:
        key, _, value = word.partition("=")
        if key not in _KEYS or not _is_count(value):
            raise ValueError(
                f"{word!r} is not understood; write a line as `a slots=4`, optionally with "
                "servers=1 and validators=1, or as `a:4+1`"
            )
        if host.counts is not None:
            raise ValueError(
                f"{host.name} has its number twice, after the colon and as {word!r}; remove one"
            )
        place = _KEYS[key]
        if place is not None:
            counts = counts or [0, 0, 0]
            counts[place] = int(value)
    return host if counts is None else Host(host.name, (counts[0], counts[1], counts[2]))


def _merged(hosts: Sequence[Host], source: str) -> tuple[Host, ...]:
    """Count a host that is listed several times without a number, as PBS does, so many times."""
    if not hosts:
        raise ValueError(f"{source} names no host; write {SHAPE}")
    names = [host.name for host in hosts]
    if len(set(names)) == len(names):
        return tuple(hosts)
    if twice := [host.name for host in hosts if host.counts and names.count(host.name) > 1]:
        raise ValueError(f"{source} names {twice[0]} twice; list it once, with the total number")
    return tuple(Host(name, (names.count(name), 0, 0)) for name in dict.fromkeys(names))


def split_evenly(total: int, machines: int) -> tuple[int, ...]:
    """Return the number of workers of each machine, all equal; ValueError if they cannot be."""
    if total % machines:
        raise ValueError(
            f"{total} workers cannot be split evenly over {machines} machines; give each machine "
            f"its own number: -H {SHAPE}"
        )
    return (total // machines,) * machines


def _fill(slots: Sequence[int], total: int) -> tuple[int, ...]:
    if total > sum(slots):
        raise ValueError(
            f"-n {total} is more than the {sum(slots)} workers of the hosts; lower it, or raise "
            "the numbers of the hosts"
        )
    found: list[int] = []
    for room in slots:
        found.append(min(room, total - sum(found)))
    return tuple(found)


def _without_idle(layout: Layout) -> Layout:
    """Remove the last hosts that got no process of a smaller total."""
    rows = list(zip(layout.workers, layout.servers, layout.validators, strict=True))
    while len(rows) > 1 and not any(rows[-1]):
        rows.pop()
    workers, servers, validators = (tuple(column) for column in zip(*rows, strict=True))
    return Layout(workers, servers, 0, validators)
