# SPDX-License-Identifier: Apache-2.0
"""Links: frames in, frames out, between two members.

Decides how bytes travel: TCP, Unix sockets, RDMA, pipes in shared memory, or within a process;
priority, credit, and when a link has ended. Must never know what a key or a payload means: the
owner of a link says where a frame lands. Threads: I/O threads without the GIL; fastps:accept for
handshakes. Read _link.pxd (the contract of an owner and a link), _io_thread.pxi (queues, credit,
ends), tcp/, peer_links.py (links at their first use), handshake_gate.py (authentication).
"""
