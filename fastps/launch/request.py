# SPDX-License-Identifier: Apache-2.0
"""Convert the options of one machine's share to JSON types, and back: pure."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from fastps.launch.layout import Layout
from fastps.launch.options import Options
from fastps.launch.secrets import TOKEN_NAMES

_PATHS = ("output_dir", "timeline")
# Options that only the leader uses, or that are converted below.
_LEADERS = ("command", "layout", "environment", "hosts", "is_placed", "is_counted", "has_srun",
            "ssh_port", "ssh_identity", "ssh_args", "remote_python", "is_dry_run", "token_file",
            "scheduler_host", "timeout_s", "restarts", "colour")  # fmt: skip


def pack(options: Options, machine: int) -> dict[str, Any]:
    """Convert the options of one machine to JSON types."""
    fields = [field.name for field in dataclasses.fields(Options) if field.name not in _LEADERS]
    found = {name: getattr(options, name) for name in fields}
    found |= {name: found[name] and str(found[name]) for name in _PATHS}
    layout = dataclasses.asdict(dataclasses.replace(options.layout, machine=machine))
    return found | {
        "command": options.command, "layout": layout,
        "environment": [pair for pair in options.environment if pair[0] not in TOKEN_NAMES],
    }  # fmt: skip


def unpack(words: Mapping[str, Any]) -> Options:
    """Convert JSON types back to options."""
    given = dict(words)
    layout = given.pop("layout")
    counts = (tuple(layout[name]) for name in ("workers", "servers", "validators", "names"))
    workers, servers, validators, names = counts
    given |= {name: given[name] and pathlib.Path(given[name]) for name in _PATHS}
    given["command"] = tuple(given["command"])
    given["environment"] = tuple((name, value) for name, value in given["environment"])
    here = Layout(
        workers, servers, int(layout["machine"]), validators, names, int(layout["first"])
    )
    return Options(layout=here, **given)
