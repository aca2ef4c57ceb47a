# SPDX-License-Identifier: Apache-2.0
"""The plan of a worker: its tensors, and the stages that need no link.

Pieces: _tensor (a declared tensor and its tickets), _codec (COMPRESS and DECOMPRESS), _local* (the
ranks of one machine, in shared memory; _local_ring.pxi has the theory of operation). The links are
a stage of _engine.pyx, which makes the plan. _stage.pxd is the seam between stages.
"""

cimport cython
cimport numpy
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

from fastps._core cimport (
    E_MISMATCH, E_NOMEM, E_PEER_LOST, E_PROTOCOL, E_TIMEOUT, OK, PROBE_LOCAL_ARRIVE,
    PROBE_LOCAL_CHUNK, PROBE_LOCAL_STAGE, SPAN_DECODE, SPAN_ENCODE, SPAN_REDUCE, SPAN_SPREAD,
    SPAN_WAIT, Completion, Queue, Thread, completion_is_done, completion_wait, deadline_of,
    is_traced, now_ns, pooled_copy, pooled_fold, probe_hit, queue_close, queue_create, queue_free,
    queue_pop, queue_push, rule_fn, thread_create, thread_join, trace_span, tracing,
)
from fastps.native.atomic cimport (
    fps_add32, fps_add64, fps_cas32, fps_cas64, fps_cas_ptr, fps_fence, fps_load32, fps_load64,
    fps_load_ptr, fps_store32, fps_store64, fps_store_ptr, fps_swap32, fps_swap_ptr,
)
from fastps.native.copy cimport fps_copy
from fastps.native.futex cimport FPS_ALL, FPS_SHARED, fps_relax, fps_sleep, fps_wake
from fastps.native.id_table cimport table_clear, table_each, table_get
from fastps.native.posix cimport (
    CPU_COUNT, CPU_ISSET, CPU_SET, CPU_ZERO, cpu_set_t, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_unlock, sched_getaffinity, sched_getcpu, sched_setaffinity,
    sched_yield, syscall,
)
from fastps.reduce._partition cimport Code, code_add, code_decode, code_encode
from fastps.transport._link cimport Mapping
from fastps.transport.frame cimport FLAG_AVERAGE, FLAG_BROADCAST, FLAG_PLAIN, KEY_BITS, KIND_PULL
from fastps.transport.pipe._transport cimport PipeTransport, pipes_has_news, pipes_step
from fastps.worker._stage cimport (
    CODED, MAX_STAGES, OWES, SHARED, SPEAKS, Partition, Stage, TensorRecord, key_of, stage_done,
)

from numpy import ndarray

from fastps.errors import DuplicateNameError, FastPSError, error_of
from fastps.transport.pipe._transport import pipe_memory_bytes
from fastps.types import DType, numpy_dtype

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    NS_PER_US = 1000
    SIGNAL_SLICE_NS = 100000000     # how often a thread that works looks for Ctrl-C

include "_tensor.pxi"
include "_codec.pxi"
include "_local_ring.pxi"
include "_local_work.pxi"
include "_local_start.pxi"
include "_local_threads.pxi"
include "_local_stages.pxi"
