# SPDX-License-Identifier: Apache-2.0
"""Operations among the members of a process set, and the messages they consist of.

Decides which messages an operation is on each member, what is folded where, and how members learn
that they disagree. Must never know who owns keys, or the session: group_host.py says what a group
needs of it. Threads: callers begin operations; links' threads run them without the GIL.
Read schedule.py (pure), group.py and group_base.py, then _exchange.pyx and its pieces: _steps.pxi
(what is sent), _frames.pxi (what comes), _folds.pxi (sums), _messages.pxi (their table). A call
made before skips group.py: _calls.pyx, _repeated.pxi. Operations of several exchanges:
row_counts.py. In shared memory the threads are those of worker/_local_threads.pxi.
"""
