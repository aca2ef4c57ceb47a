# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: values whose changes travel encoded, both in pushes and in answers.
#
# A push is decoded when it has landed. The worker adds what its codec lost to its next push (error
# feedback). An answer is the encoded difference between the value and the member's copy of it; the
# member adds it to that copy, as the server does to its own one (MemberState.backups). The next
# difference contains what the codec lost of an answer, so answers need no residual; after a long
# absence the difference is larger, and nothing is lost. Members that were answered for the same
# rounds have the same bits, since the stamp seeds the codec's random numbers.
#
# Operations marked FLAG_PLAIN travel whole, both ways: the first value, values from a checkpoint,
# and plain reads. The member's copy is then the value itself.
#
# Memory, while the entry lives: a copy of the value for each contributor. Called by the thread
# that works on turns, not under entry.lock; units are whole partitions.

cdef inline bint is_coded(MemberState* member) noexcept nogil:
    return member.value.entry.code != NULL and not member.flags & FLAG_PLAIN


cdef inline bint is_aside(MemberState* member) noexcept nogil:
    """Return whether a member reads a moment of the outer optimizer instead of the value."""
    return (member.value.entry.gathers and member.kind == KIND_PULL
            and member.wanted >= ASIDE)


cdef int unpack(MemberState* member) noexcept nogil:
    """Decode a push that landed, into a fresh buffer."""
    cdef Entry* entry = member.value.entry
    cdef Code* code = <Code*>entry.code
    cdef char* plain = lend(entry, entry.nbytes)
    cdef char* scratch = lend(entry, code.scratch_bytes)
    cdef uint32_t unit
    if plain == NULL or scratch == NULL:
        give_back(entry, &plain)
        give_back(entry, &scratch)
        return E_NOMEM
    for unit in range(code.n_units):
        code_decode(code, unit, member.version, member.buffers[0] + unit * code.unit_bytes, plain,
                    scratch)
    give_back(entry, &scratch)
    give_back(entry, &member.buffers[0])
    member.buffers[0] = plain
    return OK


cdef void subtract_all(Real* difference, const Real* x, const Real* y,
                       uint32_t count) noexcept nogil:
    cdef uint32_t i
    for i in range(count):
        difference[i] = x[i] - y[i]


cdef void encode_difference(MemberState* member, uint32_t stamp, char* difference, char* packed,
                            char* scratch) noexcept nogil:
    cdef Entry* entry = member.value.entry
    cdef Code* code = <Code*>entry.code
    cdef fps_floats before
    cdef const char* value = member.value.sums[0]
    cdef char* theirs = member.backups[0]
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


cdef int pack(MemberState* member, uint32_t stamp) noexcept nogil:
    """Encode the answer of a member, with the stamp that it will have."""
    cdef Entry* entry = member.value.entry
    cdef char* difference = lend(entry, entry.nbytes)
    cdef char* scratch = lend(entry, (<Code*>entry.code).scratch_bytes)
    if member.packed == NULL:
        member.packed = lend(entry, entry.coded_bytes)
    if difference != NULL and scratch != NULL and member.packed != NULL:
        encode_difference(member, stamp, difference, member.packed, scratch)
    else:
        give_back(entry, &member.packed)
    give_back(entry, &difference)
    give_back(entry, &scratch)
    return OK if member.packed != NULL else E_NOMEM


cdef inline bint lacks_answer(MemberState* member) noexcept nogil:
    """Return whether there was no memory to encode the answer that a member waits for."""
    return is_coded(member) and member.n_answered < member.n_taken and member.packed == NULL


cdef void put_packed(MemberState* member, SendItem* item) noexcept nogil:
    """Replace the pushed bytes of a buffer by the encoded answer."""
    cdef Entry* entry = member.value.entry
    give_back(entry, &member.buffers[0])
    member.buffers[0], member.packed = member.packed, NULL
    item.nbytes = entry.coded_bytes if member.buffers[0] != NULL else 0
    member.seen = member.value.stamp
