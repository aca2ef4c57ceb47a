# SPDX-License-Identifier: Apache-2.0
"""Measure the speed of fastps on a machine and its network: the command fastps-bench.

A driver (main.py) starts one job per mode and one that measures the floors, runs them in turns,
and reports. Order of reading: options, figures (pure); teams, member, floors (processes);
conditions (from the kernel); screen, plot (output); main. The library does not import this room.
"""


class BenchError(Exception):
    """A measurement, result file or picture failed; the message says what to do."""
