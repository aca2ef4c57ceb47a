# SPDX-License-Identifier: Apache-2.0
"""Measure what a machine and its network give: the command fastps-bench.

A driver (main.py) starts one job per mode and one that measures the floors, lets them take turns,
and reports. Order of reading: options, figures (pure); teams, member, floors (processes);
conditions (what the kernel knows); screen, plot (output); main.
Nothing here is imported by the library.
"""


class BenchError(Exception):
    """Say why something cannot be measured, read or drawn; the message names the cure."""
