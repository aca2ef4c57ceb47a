# SPDX-License-Identifier: Apache-2.0
"""Pieces of the Cython core, and the C primitives that every extension module inlines.

Decides how threads, queues, memory and copies work; must never know tensors, peers or jobs.
core_*.pxi are the parts of fastps/_core.pyx, which includes them. The .pxd files declare atomics,
futexes, POSIX calls, a table of ids and copies. _floats.pyx sets a thread's floating-point mode
while fastps computes; condition.py has a condition and a flag that Ctrl-C cannot leave locked.
Threads: any. Only the core's pools and queues have state. Read atomic.pxd, core_sync.pxi,
core_queue.pxi, core_thread.pxi, core_pulse.pxi, core_pool.pxi in this order.
"""
