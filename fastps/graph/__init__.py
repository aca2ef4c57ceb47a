# SPDX-License-Identifier: Apache-2.0
"""Operations among neighbours on a graph of workers, and one-sided windows.

Decides who sends what to whom on a graph, and the weights of what a worker receives, also when
workers are lost. Must never know a framework or an optimizer. Threads: as in collectives/; a
helper (windows) for one-sided actions. Read schedule.py and weights.py (pure), neighbors.py,
_windows.pyx, windows.py.
"""
