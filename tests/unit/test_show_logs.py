# SPDX-License-Identifier: Apache-2.0
"""FASTPS_LOG_LEVEL in programs that set up logging themselves, or do not."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
{setup}
import fastps
fastps.init(log_level={level!r})
fastps.shutdown()
fastps.init(log_level={level!r})
logging.getLogger("fastps.session.server_links").info("said once")
fastps.shutdown()
"""
OWN = "logging.basicConfig(format='own: %(message)s')"


@pytest.mark.parametrize(
    ("setup", "level", "shown"),
    [
        ("", "INFO", "INFO fastps.session.server_links: said once"),
        (OWN, "INFO", "own: said once"),
        ("", "WARNING", ""),
        ("logging.getLogger('fastps').setLevel('ERROR')", "INFO", ""),
    ],
)
def test_messages_are_shown_once_as_asked(setup, level, shown):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setup=setup, level=level)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if "said once" in line]
    assert lines == ([shown] if shown else [])
