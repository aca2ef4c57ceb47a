# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: values of which changes travel encoded, both of pushes and of answers.
#
# A push is decoded when it has landed; what its codec lost stays with who pushed it, and is in its
# next push (error feedback), whenever that comes: what a server has got of it counts once, like
# any other push. An answer is by how much the value differs from what the member has of it,
# encoded; the member adds that to what it has, as we do to a copy of it (Caller.backups). What the
# codec lost of an answer is so in the difference of the next one, and no residual is needed: of
# one who was away for long the difference is larger, and nothing of it is lost. Members who have
# been answered for the same rounds have the same bits: the codec's lots go by the stamp.
#
# Operations marked FLAG_PLAIN travel whole, both ways: what the value is in the beginning, or
# after a checkpoint, and what is read. From then on a member has just that.
#
# Memory, while the entry lives: a copy of the value for each contributor. Called by who works on
# turns, not under entry.lock; units are whole partitions.

cdef inline bint is_coded(Caller* caller) noexcept nogil:
    return caller.value.entry.code != NULL and not caller.flags & FLAG_PLAIN


cdef inline bint is_aside(Caller* caller) noexcept nogil:
    """Tell whether a member reads what the outer optimizer keeps, in place of the value."""
    return (caller.value.entry.gathers and caller.kind == KIND_PULL
            and caller.wanted >= ASIDE)


cdef int unpack(Caller* caller) noexcept nogil:
    """Decode what landed: from here on it is elements."""
    cdef Entry* entry = caller.value.entry
    cdef Code* code = <Code*>entry.code
    cdef char* plain = lend(entry, entry.nbytes)
    cdef char* scratch = lend(entry, code.scratch_bytes)
    cdef uint32_t unit
    if plain == NULL or scratch == NULL:
        give_back(entry, &plain)
        give_back(entry, &scratch)
        return E_NOMEM
    for unit in range(code.n_units):
        code_decode(code, unit, caller.version, caller.buffers[0] + unit * code.unit_bytes, plain,
                    scratch)
    give_back(entry, &scratch)
    give_back(entry, &caller.buffers[0])
    caller.buffers[0] = plain
    return OK


cdef void subtract_all(Real* difference, const Real* x, const Real* y,
                       uint32_t count) noexcept nogil:
    cdef uint32_t i
    for i in range(count):
        difference[i] = x[i] - y[i]


cdef void encode_difference(Caller* caller, uint32_t stamp, char* difference, char* packed,
                            char* scratch) noexcept nogil:
    cdef Entry* entry = caller.value.entry
    cdef Code* code = <Code*>entry.code
    cdef fps_floats before
    cdef const char* value = caller.value.sums[0]
    cdef char* theirs = caller.backups[0]
    cdef uint32_t unit, count = entry.nbytes / entry.itemsize
    fps_floats_enter(&before)
    if entry.itemsize == sizeof(float):
        subtract_all(<float*>difference, <const float*>value, <const float*>theirs, count)
    else:
        subtract_all(<double*>difference, <const double*>value, <const double*>theirs, count)
    for unit in range(code.n_units):
        code_encode(code, unit, stamp, difference, 1.0, packed + unit * code.unit_bytes, scratch)
        code_add(code, unit, stamp, packed + unit * code.unit_bytes, theirs, scratch)
    fps_floats_leave(&before)


cdef int pack(Caller* caller, uint32_t stamp) noexcept nogil:
    """Encode the answer of a member, with the stamp that it will have."""
    cdef Entry* entry = caller.value.entry
    cdef char* difference = lend(entry, entry.nbytes)
    cdef char* scratch = lend(entry, (<Code*>entry.code).scratch_bytes)
    if caller.packed == NULL:
        caller.packed = lend(entry, entry.coded_bytes)
    if difference != NULL and scratch != NULL and caller.packed != NULL:
        encode_difference(caller, stamp, difference, caller.packed, scratch)
    else:
        give_back(entry, &caller.packed)
    give_back(entry, &difference)
    give_back(entry, &scratch)
    return OK if caller.packed != NULL else E_NOMEM


cdef inline bint lacks_answer(Caller* caller) noexcept nogil:
    """Tell whether there was no memory to encode what a member waits for."""
    return is_coded(caller) and caller.n_answered < caller.n_taken and caller.packed == NULL


cdef void put_packed(Caller* caller, SendItem* item) noexcept nogil:
    """Let an answer that was encoded take the place of what was pushed."""
    cdef Entry* entry = caller.value.entry
    give_back(entry, &caller.buffers[0])
    caller.buffers[0], caller.packed = caller.packed, NULL
    item.nbytes = entry.coded_bytes if caller.buffers[0] != NULL else 0
    caller.seen = caller.value.stamp
