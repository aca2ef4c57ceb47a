# SPDX-License-Identifier: Apache-2.0
"""Deadlines of rounds that are gathered: who looks when they are over. See _deadline_rounds.pxi.

A store has no clock: whoever has a thread to spare asks here, and again after the seconds that it
is told, or when the store has news.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint32_t

from fastps._core cimport now_ns
from fastps.native.atomic cimport fps_load64
from fastps.native.id_table cimport table_each
from fastps.server._accumulate cimport look_at_deadline
from fastps.server._policy cimport Tensor
from fastps.server._store cimport ServerStore

import math


cdef struct Search:
    int64_t now
    int64_t next                # the first deadline that is still to come


cdef void look_at(void* record, void* context) noexcept nogil:
    cdef Tensor* tensor = <Tensor*>record
    cdef Search* search = <Search*>context
    cdef uint32_t i
    for i in range(tensor.n_partitions):
        if tensor.entries[i] != NULL and tensor.entries[i].gathers:
            search.next = min(search.next, look_at_deadline(tensor.entries[i], search.now))


def end_late_rounds(ServerStore face not None, *, double ahead_s=0.0):
    """End the rounds whose deadline is over; give the seconds until the next one, or infinity.

    ahead_s: look as if it were so much later.
    """
    cdef Search search
    search.now = now_ns() + <int64_t>(1e9 * ahead_s)
    search.next = INT64_MAX
    if face.store.absences == NULL:     # nothing is gathered
        return math.inf
    with face.face_lock, nogil:
        table_each(face.store.tensors, look_at, &search)
    return math.inf if search.next == INT64_MAX else max(search.next - now_ns(), 0) / 1e9


def absences(ServerStore face not None):
    """Give, of each member that was ever late, the rounds without it and its late updates.

    A round of a tensor counts once: with the server that has its first piece.
    """
    found = {}
    if face.store.absences == NULL:
        return found
    for rank in range(face.store.n_members):
        missed = fps_load64(&face.store.absences[2 * rank])
        late = fps_load64(&face.store.absences[2 * rank + 1])
        if missed or late:
            found[rank] = (missed, late)
    return found
