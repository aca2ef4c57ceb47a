# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx.
#
# The rule of a key whose workers may lie: what a combiner makes of their contributions.
#
# A rule like any other: the store hands it units, and what it keeps of the key. Units are whole
# partitions; or, under a rule that decides by lengths or distances, frames: it looks at each when
# all have sent it, while others still come, and after the last one makes them one by one. It works
# on the store's threads for rules, without the GIL unless it is a function of the user's in
# Python. Where a key has a codec, the rule sees what was decoded, and what it makes is encoded
# once; what that loses is kept for the next round (error feedback), as for a sum.

cdef struct Ruled:              # what the rule of a partition keeps
    Combining* how
    Code* code                  # NULL: elements travel as they are
    Table* table                # of a rule that looks at all units first: of this round; or NULL


cdef inline uint64_t plain_bytes(Code* code) noexcept nogil:
    """Return the bytes of a decoded partition in whole cache lines."""
    return round_up(<uint64_t>code.count * code.itemsize)


cdef uint64_t scratch_bytes(Ruled* ruled, int64_t n) noexcept nogil:
    """Return the scratch bytes for n contributions: rule, codec and n + 1 decoded partitions."""
    cdef uint64_t nbytes = round_up(ruled.how.scratch_bytes)
    if ruled.code != NULL:
        nbytes += round_up(ruled.code.scratch_bytes) + (n + 1) * plain_bytes(ruled.code)
    return nbytes


cdef int64_t combine_coded(Ruled* ruled, const void* const* sources, int64_t n, char* dst,
                           RuleArgs* rule_args, char* scratch) noexcept nogil:
    """Decode all contributions, combine them, and encode the result."""
    cdef const void* decoded[MAX_VOICES]
    cdef Code* code = ruled.code
    cdef char* work = scratch + round_up(ruled.how.scratch_bytes)
    cdef char* made = work + round_up(code.scratch_bytes)
    cdef float ratio = (<const float*>sources[0])[1] if n else 1.0
    cdef uint32_t unit
    cdef int64_t i, status
    for i in range(n):
        decoded[i] = made + (i + 1) * plain_bytes(code)
        for unit in range(code.n_units):
            code_decode(code, unit, rule_args.version,
                        <const char*>sources[i] + unit * code.unit_bytes, <char*>decoded[i], work)
    status = combine(ruled.how, decoded, n, made, rule_args.version, rule_args.refused, scratch)
    for unit in range(code.n_units):
        code_encode(code, unit, rule_args.version, made, ratio, dst + unit * code.unit_bytes, work)
    return status


cdef int64_t look_by_rule(const void* const* sources, int64_t n, void* dst, int64_t count,
                          const void* args) noexcept nogil:
    """Look at a unit; dst is NULL. After the last one, weigh the updates."""
    cdef RuleArgs* rule_args = <RuleArgs*>args
    cdef Ruled* ruled = <Ruled*>rule_args.state
    cdef int64_t status = 1
    memset(rule_args.refused, 0, n)
    if n:
        status = look(ruled.how, sources, n, rule_args.first, count, ruled.table)
    if status == 1 and rule_args.first + <uint64_t>count == ruled.how.count:
        weigh(ruled.how, n, ruled.table, rule_args.refused)
    return status


cdef int64_t make_by_rule(const void* const* sources, int64_t n, void* dst, int64_t count,
                          const void* args) noexcept nogil:
    cdef RuleArgs* rule_args = <RuleArgs*>args
    cdef Ruled* ruled = <Ruled*>rule_args.state
    cdef char* scratch
    cdef int64_t made
    if ruled.table != NULL:
        memset(rule_args.refused, 0, n)      # the look has reported them
        return finish(ruled.how, sources, n, dst, rule_args.first, count, ruled.table)
    scratch = <char*>(<BufferPool>rule_args.pool).c_loan(scratch_bytes(ruled, n))
    if scratch == NULL:
        return E_NOMEM
    if ruled.code != NULL:
        made = combine_coded(ruled, sources, n, <char*>dst, rule_args, scratch)
    else:
        made = combine(ruled.how, sources, n, dst, rule_args.version, rule_args.refused, scratch)
    (<BufferPool>rule_args.pool).c_give_back(scratch)
    return made


@cython.final
cdef class RuledRule:
    """The robust rule of a partition, and its state, for ServerStore.declare().

    coder: of a partition that travels encoded. is_at_once: units are partitions for
    all rules.
    """

    cdef readonly Combiner combiner     # keeps it
    cdef readonly Coder coder           # or None
    cdef Ruled ruled
    cdef Table table
    cdef char* room             # of the table

    def __cinit__(self, Combiner combiner not None, Coder coder=None, bint is_at_once=False):
        self.combiner = combiner
        self.coder = coder
        self.ruled.how = &combiner.how
        self.ruled.code = NULL if coder is None else &coder.code
        if (coder is None and combiner.how.is_weighed and not combiner.how.bucket
                and not is_at_once):
            self.room = <char*>calloc(1, combiner.how.scratch_bytes)
            if self.room == NULL:
                raise MemoryError("no memory for the table of a robust rule")
            lay_out(&combiner.how, &self.table, self.room)
            self.ruled.table = &self.table

    def __dealloc__(self):
        free(self.room)

    @property
    def kernel(self):
        """Address of the rule."""
        return <uintptr_t>make_by_rule

    @property
    def look(self):
        """Address of the function that looks at all units first; 0: units are partitions."""
        return <uintptr_t>look_by_rule if self.ruled.table != NULL else 0

    @property
    def state(self):
        """Address of its state."""
        return <uintptr_t>&self.ruled
