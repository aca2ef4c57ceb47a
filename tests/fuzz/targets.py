# SPDX-License-Identifier: Apache-2.0
"""All targets by name."""

from __future__ import annotations

from .control import Launcher, Member, Scheduler
from .files import Commits, MachineCode, Timeline, ViewLog
from .frames import ExchangeFrames, StoreFrames, TcpStream, WindowFrames
from .payloads import Codecs, Objects, Updates
from .target import Target
from .texts import Handshake, Hosts, Http, Meeting, Settings, Tokens

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        TcpStream(), StoreFrames(), ExchangeFrames(), WindowFrames(), Handshake(), Tokens(),
        Scheduler(), Member(), Launcher(), Codecs(), Objects(), Updates(), Http(), Hosts(),
        Settings(), Meeting(), Commits(), ViewLog(), Timeline(), MachineCode(),
    )
}  # fmt: skip
