# SPDX-License-Identifier: Apache-2.0
"""The members of the job: the scheduler, and each member's connection to it.

Decides ranks, tensor ids, owners of keys, which members are lost and which is to blame. Must never
know a tensor's bytes: it only moves small messages. Threads: the scheduler is one event loop; a
member has a reader (fastps:control) that hands answers to callers and events to the session.
Read protocol.py (the messages). Decisions, without I/O: membership.py and silence.py (losses),
blame.py (causes), declarations.py, newcomers.py (workers that join elastic jobs), landing.py and
commits.py (results of these jobs), recovery.py and journal.py (a scheduler that takes over from
one that died). Then scheduler.py (the loop), client.py (a member's side), rendezvous.py (jobs of
other launchers) and launcher_protocol.py (orders and news between the scheduler and fastps-run).
"""
