# SPDX-License-Identifier: Apache-2.0
"""Texts of members as terminals and logs may show them: without control characters.

The scheduler cleans them once, as they come in, before it logs them or tells others. Names of
tensors stay as they are, for members compare them; texts show these by repr(). Pure.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

Message = TypeVar("Message", bound=msgspec.Struct)

# Fields that only people read; those with a stack may have several lines.
_LINES = ("waits", "stack")
_SHOWN = ("hostname", "cause", "message", "what", "started", *_LINES)


def printable(text: str, *, keeps_lines: bool = False) -> str:
    """Return a text whose control characters are escaped as in Python, such as \\x1b.

    keeps_lines: leave line ends and tabs.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if keeps_lines else ""
    shown = (one if one.isprintable() or one in kept else repr(one)[1:-1] for one in text)
    return "".join(shown)


def cleaned(message: Message) -> Message:
    """Return a member's message, printable where people read it."""
    changes: dict[str, object] = {}
    for name in _SHOWN:
        text = getattr(message, name, "")
        if isinstance(text, str) and not text.isprintable():
            changes[name] = printable(text, keeps_lines=name in _LINES)
    if isinstance(join := getattr(message, "join", None), msgspec.Struct):  # of a Rejoin
        changes["join"] = cleaned(join)
    return msgspec.structs.replace(message, **changes) if changes else message
