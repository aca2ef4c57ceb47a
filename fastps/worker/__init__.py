# SPDX-License-Identifier: Apache-2.0
"""The engine of one worker: sends the parts of tensors, lands their results.

Decides which stages a part visits (shared memory, codec, links) and when an operation is complete.
Must never know a framework, a session, or the policy of an owner. Threads: callers start
with the GIL, links and helpers complete without it.
Read _stage.pxd (what a stage promises), _engine.pyx, _remote.pxi (links), _plan.pyx (tensors and
the other stages), handle.py (what callers wait for). Ranks of one machine: _local_ring.pxi (the
theory), _local_start.pxi, _local_work.pxi (one step of work, pipes too), _local_threads.pxi
(threads that do steps), _local_stages.pxi (memory, declaring); local.py brings the ranks together.
_board.pyx commits results of elastic jobs among them.
"""
