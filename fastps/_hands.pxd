# SPDX-License-Identifier: Apache-2.0
# Threads that help with a long copy or sum, where cores are idle. See _hands.pyx.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps._floats cimport fps_floats, fps_floats_enter, fps_floats_leave

# A rule of fastps.reduce, which makes one of n sources; 1: success, else a negative status.
ctypedef int64_t (*rule_fn)(const void* const* sources, int64_t n, void* dst, int64_t count,
                            const void* args) noexcept nogil
# Call a rule on this thread, in the state of floating point that all kernels compute in.
cdef inline int64_t run_rule(rule_fn rule, const void* const* sources, int64_t n, void* dst,
                             int64_t count, const void* args) noexcept nogil:
    cdef fps_floats before
    cdef int64_t made
    fps_floats_enter(&before)
    made = rule(sources, n, dst, count, args)
    fps_floats_leave(&before)
    return made

# Does a piece of a task; pieces are done in any order, on any thread.
ctypedef void (*piece_fn)(void* context, int64_t piece) noexcept nogil

cdef enum:
    MAX_HANDS = 15

# Whether there are hands for an operation of so many bytes.
cdef bint hands_help(uint64_t of) noexcept nogil
# Have a task done; returns when all its pieces are. Any thread; a second task at a time is done by
# its own thread alone, as are all while there are no hands.
cdef void hands_do(piece_fn run, void* context, int64_t n_pieces) noexcept nogil
# fps_copy(); of: bytes of the operation that this is a part of.
cdef void hands_copy(void* to, const void* source, uint64_t n, uint64_t whole,
                     uint64_t of) noexcept nogil
# A rule that treats each element by itself, on count of them; as hands_copy().
cdef int64_t hands_fold(rule_fn rule, const void* const* sources, int64_t n, void* dst,
                        int64_t count, uint32_t itemsize, const void* args,
                        uint64_t of) noexcept nogil
