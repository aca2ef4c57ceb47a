# SPDX-License-Identifier: Apache-2.0
"""The timeline of a job, with every stage of every tensor, and its metrics.

Decides the names of the spans of native/core_trace.pxi, where they are stored, and how those of
all processes become one timeline. Must never know what an operation computes; moves no tensor.
Threads: fastps:clock and fastps:status, where they are asked for.
Read spans.py (names), recorder.py (what is stored), timeline.py (merging), status.py (metrics),
statistics.py (the table of all numbers).
"""
