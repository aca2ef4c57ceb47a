# SPDX-License-Identifier: Apache-2.0
# The face of the store; what it shares with the policies of its keys stands in _policies.pxd.
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from fastps._core cimport BufferPool
from fastps.server._policies cimport Store, Tensor
from fastps.transport._link cimport LinkOwner

cdef class ServerStore(LinkOwner):
    cdef Store* store
    cdef BufferPool pool
    cdef dict rosters           # contract.Roster -> address of the C Roster; face_lock
    cdef dict states            # of rules, by tensor id; face_lock
    cdef list engine_bytes      # bytes of keys given to each engine; face_lock
    cdef uint64_t n_ruled       # keys given to threads for rules; face_lock
    cdef uint64_t n_tensors     # face_lock
    cdef object face_lock       # one thread declares, fails or forgets at a time
    cdef bint is_closed
    cdef int start_engine(self, int index) except -1
    cdef uintptr_t intern(self, roster) except 0
    cdef bint try_forget(self, uint64_t tensor_id, int64_t deadline) except -1
    cdef int unburden_engines(self, Tensor* tensor) except -1
    cdef int engine_of_rules(self) except -2
    cdef int choose_engine(self, uint32_t unit, uint32_t inline_bytes, uint64_t nbytes) except -2
    cdef int drop_all(self) except -1
