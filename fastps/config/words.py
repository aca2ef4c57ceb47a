# SPDX-License-Identifier: Apache-2.0
"""Fields of a dataclass that command-line options set; each field describes its option.

Pure. An option that was not given leaves its field at the default.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from fastps.errors import ConfigError


def word(
    group: str, flags: str, default: Any, read: Any, sample: Any, text: str, **more: Any
) -> Any:
    """Return a field that an option sets; without a sample of its value it is a switch."""
    reading = {"type": read, "metavar": sample} if sample else {"action": "store_true"}
    metadata = {"group": group, "flags": flags.split(), "words": {"help": text, **reading, **more}}
    return dataclasses.field(default=default, metadata=metadata)


def add_words(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add the options of a dataclass to groups of the parser, which may exist."""
    groups = {group.title: group for group in parser._action_groups}
    for field in dataclasses.fields(options):
        if title := field.metadata.get("group"):
            group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
            group.add_argument(
                *field.metadata["flags"],
                dest=field.name,
                default=argparse.SUPPRESS,
                **field.metadata["words"],
            )


def number(what: str, read: Callable[[str], Any], least: float, most: float) -> Any:
    """Return the parser of a number within bounds."""

    def check(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if text.isascii() and least <= (value := read(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {least:g} to {most:g}")

    return check


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else -1


count = functools.partial(number, "a whole number", _whole)


def encoded_name(name: str) -> bytes:
    """Return a name in UTF-8. Raises ConfigError for surrogates, which UTF-8 cannot encode."""
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the name {name!r} is not valid Unicode: it holds surrogates, which os.fsdecode() "
            "makes of bytes that are not UTF-8. Replace them, for example by ascii(name)"
        ) from error
