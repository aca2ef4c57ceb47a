# SPDX-License-Identifier: Apache-2.0
"""The operations that users call with NumPy arrays: collectives, neighbours, windows.

Decides how arguments become an operation among the members of a process set: shapes, dtypes,
divisors, row counts, and what travels together. Must never know sockets, frames or frameworks;
frameworks/ starts its operations here too. Threads: those of the program.
Read start.py (what every face shares), numpy_collectives.py, neighbors.py, windows.py.
"""
