# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: delays are compensated when a push is added (DC-ASGD; Zheng et al.,
# "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017, sections 3 to 5).
#
# A member computed its gradient g at what it was answered last, w_bak, and pushes d = -eta g when
# the value has become w. To first order the gradient at w is g + H (w - w_bak), and of the Hessian
# H the paper keeps lambda g*g, the scaled diagonal of the outer product (all products by element):
#
#     w <- w - eta (g + lambda g*g*(w - w_bak))
#        = w + d - (lambda / eta) d*d*(w - w_bak)
#
# lambda is the strength, or adapts to each element (DC-ASGD-a):
#
#     MeanSquare <- m MeanSquare + (1 - m) g*g     lambda = lambda_0 / sqrt(MeanSquare + epsilon)
#
# with g = -d / eta; m is the decay. eta comes with the push (header.status: bits of a float32);
# without one, 0, what is pushed is added as it is. In the element's own type, element by element
# and in the written order, so results are those of NumPy. Memory, for as long as the entry lives:
# w_bak for each contributor, and MeanSquare once. Called by the thread that works on turns.

cdef double EPSILON = 1e-7      # the paper's

ctypedef fused Real:
    float
    double


cdef inline bint is_delayed(MemberState* member) noexcept nogil:
    return member.rate > 0 and member.has_backup


cdef inline float rate_of(const Header* header) noexcept nogil:
    cdef float rate
    memcpy(&rate, &header.status, sizeof(rate))
    return rate


cdef int lend_all(Entry* entry, char** places) noexcept nogil:
    """Lend zeros for each unit, once."""
    cdef uint32_t unit
    for unit in range(entry.n_units):
        if places[unit] == NULL:
            places[unit] = lend(entry, unit_length(entry, unit))
            if places[unit] == NULL:
                return E_NOMEM
            memset(places[unit], 0, unit_length(entry, unit))
    return OK


cdef int prepare(MemberState* member, const Header* header) noexcept nogil:
    """Note the learning rate of a new operation, and lend its backups; entry.lock is held."""
    cdef Entry* entry = member.value.entry
    cdef bint is_push = header.kind == KIND_PUSH and not header.flags & FLAG_BROADCAST
    cdef float rate = rate_of(header) if is_push else 0
    cdef int status
    if not 0 <= rate < 1e38:        # NaN is neither
        return E_PROTOCOL
    member.rate = rate
    if member.index >= entry.roster.n_contributors:
        return OK
    member.has_backup = member.version != entry.born
    status = lend_all(entry, member.backups)
    if status == OK and entry.compensation.is_adaptive:
        status = lend_all(entry, member.value.squares)
    return status


cdef void keep_backup(MemberState* member, uint32_t unit) noexcept nogil:
    """Keep a copy of the value as the backup of a member that has it now."""
    cdef Entry* entry = member.value.entry
    if member.backups[unit] != NULL:
        memcpy(member.backups[unit], member.value.sums[unit], unit_length(entry, unit))


cdef void add_delayed(Real* w, const Real* d, const Real* w_bak, uint32_t count,
                      Real factor) noexcept nogil:
    """Add d to w; factor: lambda / eta."""
    cdef uint32_t i
    for i in range(count):
        w[i] = w[i] + d[i] - factor * d[i] * d[i] * (w[i] - w_bak[i])


cdef inline Real root(Real x) noexcept nogil:
    if Real is float:
        return sqrtf(x)
    else:
        return sqrt(x)


cdef void add_adapting(Real* w, const Real* d, const Real* w_bak, Real* square, uint32_t count,
                       Real eta, Real strength, Real decay) noexcept nogil:
    """Add d to w, with a lambda for each element."""
    cdef uint32_t i
    cdef Real g
    cdef Real factor
    cdef Real fresh = 1 - decay
    cdef Real epsilon = <Real>EPSILON
    for i in range(count):
        g = d[i] / eta
        square[i] = decay * square[i] + fresh * g * g
        factor = strength / root(square[i] + epsilon) / eta
        w[i] = w[i] + d[i] - factor * d[i] * d[i] * (w[i] - w_bak[i])


cdef void compensate_as(MemberState* member, uint32_t unit, Real* w) noexcept nogil:
    cdef Entry* entry = member.value.entry
    cdef Compensation* how = &entry.compensation
    cdef uint32_t count = unit_length(entry, unit) / sizeof(Real)
    cdef const Real* d = <const Real*>member.buffers[unit]
    cdef const Real* w_bak = <const Real*>member.backups[unit]
    if how.is_adaptive:
        add_adapting(w, d, w_bak, <Real*>member.value.squares[unit], count, <Real>member.rate,
                     <Real>how.strength, <Real>how.decay)
    else:
        add_delayed(w, d, w_bak, count, <Real>(how.strength / member.rate))


cdef void compensate(MemberState* member, uint32_t unit) noexcept nogil:
    """Add what a member pushed of a unit, as if it had known the value."""
    if member.value.entry.itemsize == sizeof(float):
        compensate_as(member, unit, <float*>member.value.sums[unit])
    else:
        compensate_as(member, unit, <double*>member.value.sums[unit])
