# SPDX-License-Identifier: Apache-2.0
"""What a job tells of itself: a timeline of every stage, and how fast and how well hidden it is.

Decides what the spans of native/core_trace.pxi are called, where they are kept and how those of
all processes become one timeline. Must never know what an operation computes; moves no tensor.
Threads: fastps:clock and fastps:status, where they are asked for.
Read spans.py (names), recorder.py (what is kept), timeline.py (merging), status.py (metrics).
"""
