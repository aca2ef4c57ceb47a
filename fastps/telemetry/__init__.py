# SPDX-License-Identifier: Apache-2.0
"""What a job tells of itself: a timeline of every stage, and how fast and how well hidden it is.

Decides what the spans of fastps/native/core_trace.pxi are called, where they are kept and how
those of all processes become one timeline. Moves no tensor.
"""
