# SPDX-License-Identifier: Apache-2.0
"""Which machines a job is to have, from the words of a user or a file: pure.

`-H a:4,b:4,c:0+1` names hosts with their numbers of workers, servers and validators; a hostfile
has a line for each, as Open MPI, Horovod and PBS write them. Asks no name service and starts
nothing. What is wrong raises ValueError with a sentence for the user.
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
    """One machine: how ssh reaches it, and what it is to run; None: nothing was said."""

    name: str
    counts: tuple[int, int, int] | None = None  # workers, servers, validators

    @property
    def address(self) -> str:
        """Return the name without the user's."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read a list with commas between its hosts."""
    return _merged([_host(word.strip()) for word in text.split(",") if word.strip()], "-H")


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    """Read the lines of a file; name: what errors call it."""
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
    """Lay a job out on hosts, seen from the first.

    workers, servers, validators: what options say of each machine, None if nothing. total: of
    workers, where it was given in its stead; hosts with numbers are filled in their order.
    """
    if total is not None and workers is not None:
        raise ValueError("-np says how many workers each machine has, -n how many all: give one")
    told = [host.counts for host in hosts if host.counts is not None]
    if told and len(told) != len(hosts):
        bare = next(host.name for host in hosts if host.counts is None)
        raise ValueError(f"how many workers has {bare}? Give all hosts a number, or none: {SHAPE}")
    columns = list(zip(*told, strict=True)) or [(), (), ()]
    for option, given, column in (
        ("-np", workers, columns[0]),
        ("-s", servers, columns[1] if any(columns[1]) else ()),
        ("-v", validators, columns[2] if any(columns[2]) else ()),
    ):
        is_total = option == "-np" and len(column) > 1 and tuple(given or ()) == (sum(column),)
        if given is not None and column and tuple(given) != tuple(column) and not is_total:
            raise ValueError(
                f"{option} {','.join(map(str, given))} and the hosts' own numbers, "
                f"{','.join(map(str, column))}, say different things: leave {option} out"
            )
    counts = columns[0] or workers or (1,)
    if total is not None:
        counts = _fill(columns[0] or _even(total, len(hosts)), total)
    layout = make_layout(
        counts,
        (columns[1] if any(columns[1]) else servers) or (0,),
        (columns[2] if any(columns[2]) else validators) or (0,),
        machines=len(hosts),
        machine=0,
    )
    return layout if total is None else _without_idle(layout)


def share(total: int, workers: Sequence[int] | None, machines: int) -> tuple[int, ...]:
    """Return each machine's number of workers of a total, where no hosts are named."""
    if workers is not None:
        raise ValueError("-np says how many workers each machine has, -n how many all: give one")
    return _even(total, machines)


def check_all_have_work(layout: Layout, hosts: Sequence[Host]) -> None:
    """Refuse hosts that would do nothing; the first has the scheduler."""
    rows = zip(hosts, layout.workers, layout.servers, layout.validators, strict=True)
    for number, (host, *counts) in enumerate(rows):
        if number and not any(counts):
            raise ValueError(
                f"{host.name} has neither workers nor servers: give it some, or leave it out"
            )


def _host(word: str) -> Host:
    """Read NAME or NAME:COUNTS, the name perhaps an IPv6 address in brackets."""
    if found := _IPV6.fullmatch(word):
        user, address, counts = found.groups()
        return Host(user + address, _counts(counts, word))
    name, colon, counts = word.partition(":")
    if ":" in counts:
        raise ValueError(f"{word!r}: write an IPv6 address in brackets, such as [fd00::1]:4")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{word!r} is not {SHAPE}")
    return Host(name, _counts(counts if colon else None, word))


def _counts(text: str | None, word: str) -> tuple[int, int, int] | None:
    if text is None:
        return None
    words = text.split("+")
    if len(words) > 3 or not all(_is_count(one) for one in words):
        raise ValueError(
            f"{word!r}: after the colon stands a number of workers, +servers and +validators may "
            f"follow, each at most {MAX_COUNT}; {SHAPE}"
        )
    workers, servers, validators = [*map(int, words), 0, 0][:3]
    return workers, servers, validators


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= MAX_COUNT


def _with_slots(host: Host, words: Iterable[str]) -> Host:
    """Read what follows a name in a hostfile: slots=4, servers=1."""
    counts: list[int] | None = None
    for word in words:
        key, _, value = word.partition("=")
        if key not in _KEYS or not _is_count(value):
            raise ValueError(
                f"{word!r} is not understood; a line is `a slots=4`, perhaps with servers=1 and "
                "validators=1, or `a:4+1`"
            )
        if host.counts is not None:
            raise ValueError(f"{host.name} has its number twice, after the colon and as {word!r}")
        place = _KEYS[key]
        if place is not None:
            counts = counts or [0, 0, 0]
            counts[place] = int(value)
    return host if counts is None else Host(host.name, (counts[0], counts[1], counts[2]))


def _merged(hosts: Sequence[Host], source: str) -> tuple[Host, ...]:
    """Count a host that stands there often without a number, as PBS lists them, so many times."""
    if not hosts:
        raise ValueError(f"{source} names no host; {SHAPE}")
    names = [host.name for host in hosts]
    if len(set(names)) == len(names):
        return tuple(hosts)
    if twice := [host.name for host in hosts if host.counts and names.count(host.name) > 1]:
        raise ValueError(f"{source} names {twice[0]} twice; give it one number for all")
    return tuple(Host(name, (names.count(name), 0, 0)) for name in dict.fromkeys(names))


def _even(total: int, machines: int) -> tuple[int, ...]:
    if total % machines:
        raise ValueError(
            f"{total} workers cannot be the same number on {machines} machines; say it of each: "
            f"-H {SHAPE}"
        )
    return (total // machines,) * machines


def _fill(slots: Sequence[int], total: int) -> tuple[int, ...]:
    if total > sum(slots):
        raise ValueError(f"{total} workers do not fit: the hosts have room for {sum(slots)}")
    found: list[int] = []
    for room in slots:
        found.append(min(room, total - sum(found)))
    return tuple(found)


def _without_idle(layout: Layout) -> Layout:
    """Leave out the last hosts, which a smaller total did not reach."""
    rows = list(zip(layout.workers, layout.servers, layout.validators, strict=True))
    while len(rows) > 1 and not any(rows[-1]):
        rows.pop()
    workers, servers, validators = (tuple(column) for column in zip(*rows, strict=True))
    return Layout(workers, servers, 0, validators)
