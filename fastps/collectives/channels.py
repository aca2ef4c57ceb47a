# SPDX-License-Identifier: Apache-2.0
"""Names of operations among members, and of the parts that some of these consist of. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Container

from fastps.config.words import encoded_name

BARRIER = "of all workers"  # the name of their barriers
REST = " rest"  # ends the name of what follows when members have told sizes; its order is theirs


class Part(str):
    """The name of a part of an operation; forgotten with the name of the whole."""

    __slots__ = ("ending", "whole")

    whole: str
    ending: str

    def __new__(cls, whole: str, ending: str) -> Part:
        """Name the part of an operation that may be a part itself."""
        made = super().__new__(cls, whole + ending)
        made.whole, made.ending = str(whole), ending
        if isinstance(whole, Part):
            made.whole, made.ending = whole.whole, whole.ending + ending
        return made

    @property
    def said(self) -> str | None:
        """What users call it; None: nothing."""
        return self.whole or None


def whole_of(name: str) -> str:
    """Return the name that users gave, of which a name may be a part."""
    return name.whole if isinstance(name, Part) else name


def part_of(name: str | None, ending: str) -> str | None:
    """Name an operation that is part of one with a name; None: that has none."""
    return None if name is None else Part(name, ending)


def is_single(name: str | None) -> bool:
    """Return whether no two operations of a name are in flight at a time."""
    is_part_of_one = isinstance(name, Part) and (not name.ending or name.ending.endswith(REST))
    return name is not None and not is_part_of_one


def rest_of(name: str | None) -> Part:
    """Name what follows an operation that found out sizes; also of one without a name."""
    return Part(name or "", REST)


def grouped_of(name: str | None) -> str | None:
    """Name the operations of a grouped one, which may be in flight together, in one order."""
    return None if name is None else Part(name, "")


class Channels(dict[str, int]):
    """The numbers by which members know the operations of one name, or, "", those without."""

    def __init__(self, key: str) -> None:
        """Start without any; key: of the group, the same on all its members."""
        self._key = key
        self._parts: dict[str, list[str]] = {}  # by the name of the whole

    def of(self, name: str | None) -> int:
        """Return the number of a name."""
        words = name or ""
        channel = self.get(words)
        if channel is None:
            data = self._key.encode() + b"/" + encoded_name(words)
            channel = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
            self[words] = channel
            if isinstance(name, Part) and name.ending:
                self._parts.setdefault(name.whole, []).append(words)
        return channel

    def names_of(self, name: str) -> list[str]:
        """List the names that one stands for: itself, if it was used, and its parts."""
        return [one for one in (name, *self._parts.get(name, ())) if one in self]

    def forget(self, name: str, kept: Container[str] = ()) -> list[int]:
        """Forget what a name stands for, except for what is kept; give the numbers."""
        numbers = [self.pop(one) for one in self.names_of(name) if one not in kept]
        self._parts.pop(name, None)
        return numbers
