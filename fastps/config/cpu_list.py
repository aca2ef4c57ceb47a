# SPDX-License-Identifier: Apache-2.0
"""Which CPUs the library's threads may use, in the kernel's own notation.

Never pins anything: _core does, where threads are made. Threads: any; there is no state.
"""

from __future__ import annotations

import re

from fastps.errors import ConfigError

MAX_CPUS = 1024  # as in _core.pxd; bounds what a text like 0-999999999 can cost
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the CPU numbers of a list in the kernel's notation, as 0-3,8; ascending, each once.

    An empty text is an empty list. Raises ConfigError.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"CPU list {text!r}: {part!r} must be a CPU, as 3, or a range, as 0-3"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= MAX_CPUS:
            raise ConfigError(
                f"CPU list {text!r}: {part!r} must be ascending, within 0-{MAX_CPUS - 1}"
            )
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))
