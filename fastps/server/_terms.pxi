# SPDX-License-Identifier: Apache-2.0
# Part of _store.pyx: what a contract says of a key, for its policy.

cdef int set_compensation(Entry* model, how, dtype) except -1:
    """Note how delays are made up for; ValueError for elements for which there is no formula."""
    if how.strength and dtype not in (DType.FLOAT32, DType.FLOAT64):
        raise ValueError("delays are compensated for float32 and float64 alone")
    model.compensation.strength = how.strength
    model.compensation.is_adaptive = how.is_adaptive
    model.compensation.decay = how.decay
    return 0


cdef int set_gathering(Entry* model, int policy, how, dtype, uint32_t least) except -1:
    """Note how rounds end, and what moves the value; ValueError for what cannot be.

    least: updates without which no deadline ends a round.
    """
    cdef Store* store = model.store
    if policy != contract.Policy.GATHERED:
        return 0
    how.check()
    if dtype not in (DType.FLOAT32, DType.FLOAT64):
        raise ValueError("values are moved in float32 and float64 alone")
    if store.absences == NULL:
        store.absences = <int64_t*>calloc(2 * store.n_members, sizeof(int64_t))
    if store.absences == NULL:
        raise MemoryError("no memory to count who is late")
    model.gathers = True
    model.gathering.deadline_ns = <int64_t>(how.deadline_s * 1e9)
    model.gathering.step = how.step
    model.gathering.lr, model.gathering.eps = how.lr, how.eps
    model.gathering.first, model.gathering.second = how.first, how.second
    model.gathering.least = least
    return 0
