# SPDX-License-Identifier: Apache-2.0
"""One worker's membership of a job: from init() to shutdown().

Decides which way the operations of a name go, and owns what a job consists of for one process:
connections, process sets, objects, join(), forget(), watches and autotuning. Must never know a
framework, or how a caller writes an operation (ops/ does). Threads: any thread of the program may
start operations; the control client's thread calls back into the watches.
Read session.py, host.py (what the parts need of it), connections.py, groups.py, join.py first.
"""
