# SPDX-License-Identifier: Apache-2.0
"""Operations among the members of a process set, and the messages they consist of.

Decides which messages an operation is on each member, what is folded where, and how members learn
that they disagree. Must never know who owns keys, or the session: group_host.py says what a group
needs of it. Threads: callers begin operations; links' threads run them without the GIL.
Read schedule.py (pure), group.py and group_base.py, _exchange.pyx with its pieces, row_counts.py.
"""
