# SPDX-License-Identifier: Apache-2.0
"""A server behind a relay: it listens on one address, and sends others to another.

    _delayed_server.py ADDRESS     what comes there is handed on to FASTPS_HOST by tools/delay.py

Started by tuning.py.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from fastps.control import listen
from fastps.server import main, server


def main_behind(address: str) -> int:
    """Run a server whose door is announced at that address."""

    def open_listeners(*args: Any, **options: Any) -> listen.Listeners:
        made = listen.open_listeners(*args, **options)
        return dataclasses.replace(made, address=(address, made.address[1]), unix="")

    server.open_listeners = open_listeners  # type: ignore[attr-defined]
    return main.main([])


if __name__ == "__main__":
    sys.exit(main_behind(sys.argv[1]))
