# SPDX-License-Identifier: Apache-2.0
"""What the owner of a key does when members push: the store, and the command fastps-server.

Decides when a round is complete, what becomes of its contributions, and where late frames end.
Must never know how bytes travel, or whether they are compressed: codecs and robust rules are rules
of a key. Threads: those of the links, without the GIL; rules on engine threads of the store.
Read _policies.pxd (a key and its policy), then a frame's way: _store.pyx (lookups), _rounds.pxi
(arrivals; _rounds_state.pxi has the theory), _rounds_sum.pxi, _rounds_send.pxi (results, errors).
Then _accumulate*.pxi (asynchronous pushes), dataplane.py (what a process needs around a store).
"""
