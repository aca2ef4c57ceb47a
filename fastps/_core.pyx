# SPDX-License-Identifier: Apache-2.0
"""Queue, complete, thread, lend memory, copy, trace and inject faults without the GIL.

Theory of operation
===================
This room moves addresses and wakes threads. It decides which item leaves next, which memory is
lent and when a waiter may go on. It must never know what a tensor, a frame, a socket protocol or a
role is. Other Cython rooms cimport the C functions of ``_core.pxd``. Python sees a few classes and
functions, which convert, check, release the GIL in the smallest block and call C.

Completion. One 16-byte record per operation: a count of parts still to finish, the first error,
and one futex word. The word is 0 (pending), 2 (pending, a thread may sleep) or 1 (done). The
thread that finishes the last part *exchanges* the word for 1 and wakes only if it was 2: after
that exchange it never reads the record again, so a waiter that saw 1 may free it at once. A
waiter pauses for at most 2 us, yields up to ``spin_us``, then sleeps on the futex.

Queue. A binary heap in one array under one mutex, with one condition variable on the monotonic
clock. A sequence number breaks ties, so equal items leave in order of arrival. A pop is allowed
while fewer than ``credit_bytes`` of items at least as urgent as the head are out. A smaller item
never overtakes the head (ByteScheduler, Peng et al., SOSP 2019). A small table counts the bytes
out by priority. All priorities together have a wider bound, and loans widen both bounds until as
many bytes have come back. Invariant: while an item may go and a consumer sleeps, one signal is
under way. A push or a returned credit sends it, and a consumer that leaves such a state behind
passes it on (queue_unlock()). Lock order: a queue's mutex is a leaf.

Threads. A thread is named, pinned and has signals blocked before its function runs, and
``thread_create`` returns after that, so name and placement are valid at once. Joining waits on a
Completion with a deadline and only then calls pthread_join, which cannot block.

Pool. Slabs are mapped once, page-aligned, pre-faulted by the thread that asked (so its NUMA
policy decides the node), excluded from fork, and unmapped only when closed and no loan is out.
A slab is cut into blocks of a size class (1, 2, 3, 4, 6, 8, 12.. pages) that stay blocks; a loan
above half a slab gets a slab of its own. Each slab has a table from page to block, so an address
that is given back is checked in O(log slabs). Lock order: grow, then mutex. The registration
hook needs the GIL: the pool's statistics() calls it for every slab that is new.

Traces, long copies and sums, huge pages: see the pieces of these names.

Faults. One global names the armed point; an unarmed check compares it and goes on.

A forked child owns none of this: it has no thread of _core, and slabs are not mapped there.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, EINVAL, errno
from libc.math cimport isnan
from libc.signal cimport SIGKILL, SIGSTOP
from libc.stdint cimport (
    INT64_MAX, UINT64_MAX, int32_t, int64_t, uint32_t, uint64_t, uintptr_t,
)
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy, memset, strerror
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, madvise, mmap,
    munmap,
)
from posix.signal cimport kill, sigdelset, sigfillset, sigset_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, nanosleep, timespec
from posix.unistd cimport _exit, close, getpid, read, write

from fastps.native._floats cimport fps_floats, fps_floats_enter
from fastps.native.atomic cimport (
    fps_add32, fps_add64, fps_cas32, fps_cas64, fps_fence, fps_load32, fps_load64, fps_store32,
    fps_store64, fps_swap32,
)
from fastps.native.copy cimport fps_copy
from fastps.native.crc cimport fps_crc_portable, fps_crc_short
from fastps.native.futex cimport FPS_ALL, FPS_ANYBODY, FPS_OWN, fps_relax, fps_sleep, fps_wake
from fastps.native.posix cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_TRUNC, SHUT_RD, eventfd,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_trylock, pthread_mutex_unlock, recv, sched_yield, send, shutdown, syscall,
)

import logging
import re
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fastps.errors import ConfigError, FastPSError, error_of

__all__ = [
    "Beats",
    "BufferPool",
    "CopyPool",
    "Drain",
    "HugePages",
    "PoolStatistics",
    "Pulse",
    "arm_fault",
    "clock_ns",
    "copy_array",
    "debug_counters",
    "is_on",
    "mark",
    "may_gather",
    "overdue_s",
    "set_thread_placement",
]

_LOG = logging.getLogger(__name__)

# ---- constants; each fits in a C int ----
cdef enum:
    PAUSE_SPIN_NS = 2000            # longer pause-spins starve the other thread of a busy core
    PAUSES_PER_CHECK = 16           # one clock read costs about as much as these
    NS_PER_US = 1000
    NS_PER_MS = 1000000
    NS_PER_S = 1000000000
    SIGNAL_SLICE_NS = 100000000     # how late Ctrl-C may be seen by a waiting Python thread
    NAME_BYTES = 16                 # the kernel's limit, with the final zero
    START_TIMEOUT_S = 10            # for a new thread to name and pin itself
    JOIN_TIMEOUT_S = 5              # for a thread whose owner is collected
    MAX_INTERVAL_S = 3600           # of a pulse
    CPU_WORDS = MAX_CPUS // 64
    QUEUE_MIN_CAPACITY = 16
    MAX_LEVELS = 128                # priorities counted apart; simulated BERT-large has 80 out
    SPARE_CREDITS = 64              # all priorities together: so much beyond the credit of one..
    SPARE_BYTES = 33554432          # ..and no more than this; simulated BERT-large needs 30 MiB
    SIZE_CLASSES = 64               # the last is 2^32 pages: more than an address space
    SLAB_BYTES = 33554432           # default slab: eight default partitions; pre-faults in ~2 ms
    MAX_LOAN_PAGES = 1073741824     # 4 TiB; far above it rounding could overflow

include "native/core_sync.pxi"
include "native/core_queue.pxi"
include "native/core_thread.pxi"
include "native/core_pulse.pxi"
include "native/core_probe.pxi"
include "native/core_pool.pxi"
include "native/core_trace.pxi"
include "native/core_copy_pool.pxi"
include "native/core_huge_pages.pxi"
include "native/core_face.pxi"
