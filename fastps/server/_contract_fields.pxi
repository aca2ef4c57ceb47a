# SPDX-License-Identifier: Apache-2.0
# Part of _store.pyx: what a contract says of a key, for its policy.

cdef int set_compensation(Entry* model, how, dtype) except -1:
    """Set the compensation of delays; ValueError for element types other than float32, float64."""
    if how.strength and dtype not in (DType.FLOAT32, DType.FLOAT64):
        raise ValueError(
            f"compensation of delays supports float32 and float64, got {dtype.name.lower()}")
    model.compensation.strength = how.strength
    model.compensation.is_adaptive = how.is_adaptive
    model.compensation.decay = how.decay
    return 0


cdef int set_gathering(Entry* model, int policy, how, dtype, uint32_t least) except -1:
    """Set how rounds end and what moves the value; ValueError for parameters out of bounds.

    least: a deadline ends no round with fewer updates.
    """
    cdef Store* store = model.store
    if policy != contract.Policy.DEADLINE_ROUNDS:
        return 0
    how.check()
    if dtype not in (DType.FLOAT32, DType.FLOAT64):
        raise ValueError(
            f"deadline rounds support float32 and float64, got {dtype.name.lower()}")
    if store.absences == NULL:
        store.absences = <int64_t*>calloc(2 * store.n_members, sizeof(int64_t))
    if store.absences == NULL:
        raise MemoryError("no memory for the counts of late updates")
    model.gathers = True
    model.gathering.deadline_ns = <int64_t>(how.deadline_s * 1e9)
    model.gathering.step = how.step
    model.gathering.lr, model.gathering.eps = how.lr, how.eps
    model.gathering.first, model.gathering.second = how.first, how.second
    model.gathering.least = least
    return 0


cdef int fill_tensor(ServerStore store, Tensor* tensor, Entry* model, uint64_t tensor_id, places,
                     states, coders, uint32_t unit_bytes, uint32_t inline_bytes) except -1:
    """Make the entries of a tensor, which the caller frees if this raises; see declare().

    unit_bytes: 0 for a partition.
    """
    cdef Entry* entry
    for (index, nbytes, _), roster in places:
        model.roster = <Roster*><uintptr_t>roster
        model.key = tensor_id << KEY_BITS | <uint64_t>index
        model.rule_state = <void*><uintptr_t>(states[index].state if states else 0)
        if coders:
            model.code = &(<Coder?>coders[index]).code
            model.coded_bytes = (<Coder>coders[index]).code.wire_bytes
        model.engine = store.engine_of_rules() if model.is_ruled else store.choose_engine(
            min(nbytes, unit_bytes) if unit_bytes else nbytes, inline_bytes, nbytes)
        entry = make_entry(model, nbytes, unit_bytes == 0)
        if entry == NULL:
            raise MemoryError(f"no memory for partition {index} of tensor {tensor_id}")
        tensor.entries[<uint32_t>index] = tensor.owned[tensor.n_owned] = entry
        tensor.n_owned += 1
    return 0
