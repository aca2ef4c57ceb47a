# SPDX-License-Identifier: Apache-2.0
"""Measure what a machine and its network give: the command fastps-bench.

A driver (main.py) starts one job per mode and plain processes that measure the floors, lets them
take turns, and reports. Order of reading: options, modes, figures (pure); channel, teams, member,
floors, usage (processes); turns, hereabouts (who moves when); report, compare, plot (output).
Nothing here is imported by the library.
"""


class BenchError(Exception):
    """Say why something cannot be measured, read or drawn; the message names the cure."""
