# SPDX-License-Identifier: Apache-2.0
# Part of _partition.pyx.
#
# The coder of one partition: what encodes and decodes it, with what is kept from round to round.
#
# Calls the kernels of a codec in their order; knows neither keys nor peers. Workers encode what
# they push, servers the sum of what they decoded, in the same way: prepare (momentum, what the
# last round lost), then encode, which leaves in the residual what this round loses. See
# contract/codec.py for the layout of units.

cdef uint32_t HEAD_BYTES = rules.HEAD_BYTES


cdef inline uint32_t elements_of(const Code* code, uint32_t unit) noexcept nogil:
    cdef uint32_t left = code.count - unit * code.unit_count
    return left if left < code.unit_count else code.unit_count


cdef inline void fill_args(const Code* code, uint32_t version, int64_t* args) noexcept nogil:
    cdef uint64_t seed = mix_bits(mix_bits(code.stream ^ version) + code.rank)
    args[0] = code.k
    args[1] = <int64_t>(seed >> 32)
    args[2] = <int64_t><uint32_t>seed
    if code.state[1]:
        args[1] = <int64_t>code.state[0]
        args[2] = <int64_t>code.state[1]
    args[3] = code.option


cdef inline float* array_of(const Code* code, char* scratch, int which) noexcept nogil:
    return <float*>(scratch + code.work_bytes + which * round_up(4 * <uint64_t>code.unit_count))


cdef void encode_prepared(Code* code, uint32_t unit, uint32_t version, float* v, float ratio,
                          char* payload, char* scratch) noexcept nogil:
    cdef int64_t args[4]
    fill_args(code, version, args)
    code.encode(v, elements_of(code, unit), <uint8_t*>payload + HEAD_BYTES, <float*>payload,
                scratch, args)
    if code.state[1]:
        code.state[0] = <uint64_t>args[1]
        code.state[1] = <uint64_t>args[2]
    (<float*>payload)[1] = ratio


cdef float* prepared(Code* code, uint32_t unit, float* g, float scale, float ratio,
                     float* spare) noexcept nogil:
    """Add momentum and residual; spare: where the result may lie."""
    cdef uint64_t first = <uint64_t>unit * code.unit_count
    cdef float[3] numbers
    cdef float* v = spare if code.residual == NULL else code.residual + first
    numbers[0], numbers[1], numbers[2] = scale, ratio * code.decay, code.mu
    if code.prepare == NULL:
        if scale != 1.0:
            code.scale(g, NULL, elements_of(code, unit), NULL, numbers)
        return g
    code.prepare(v, g, elements_of(code, unit),
                 NULL if code.momentum == NULL else code.momentum + first, numbers)
    return v


cdef void code_encode(Code* code, uint32_t unit, uint32_t version, const char* elements,
                      float ratio, char* payload, char* scratch) noexcept nogil:
    cdef uint64_t first = <uint64_t>unit * code.unit_count
    cdef fps_floats before
    cdef float* g = <float*>(elements + first * code.itemsize)   # not written: see prepared()
    cdef float* v
    fps_floats_enter(&before)
    if code.widen != NULL:
        g = array_of(code, scratch, 0)
        code.widen(g, elements + first * code.itemsize, elements_of(code, unit))
    v = prepared(code, unit, g, 1.0, ratio, array_of(code, scratch, 1))
    encode_prepared(code, unit, version, v, ratio, payload, scratch)
    fps_floats_leave(&before)


cdef void decode_into(Code* code, code_fn decode, uint32_t unit, uint32_t version,
                      const char* payload, float* v, char* scratch) noexcept nogil:
    cdef int64_t args[4]
    fill_args(code, version, args)
    decode(v, elements_of(code, unit), <uint8_t*>payload + HEAD_BYTES, <float*>payload, scratch,
           args)


cdef void code_decode(Code* code, uint32_t unit, uint32_t version, const char* payload,
                      char* elements, char* scratch) noexcept nogil:
    cdef char* place = elements + <uint64_t>unit * code.unit_count * code.itemsize
    cdef float* v = <float*>place if code.narrow == NULL else array_of(code, scratch, 0)
    cdef fps_floats before
    fps_floats_enter(&before)
    decode_into(code, code.decode, unit, version, payload, v, scratch)
    if code.narrow != NULL:
        code.narrow(v, place, elements_of(code, unit))
    fps_floats_leave(&before)


cdef void code_add(Code* code, uint32_t unit, uint32_t version, const char* payload,
                   char* elements, char* scratch) noexcept nogil:
    cdef char* place = elements + <uint64_t>unit * code.unit_count * code.itemsize
    cdef double* wide = <double*>place
    cdef float* v = array_of(code, scratch, 0)
    cdef fps_floats before
    cdef uint32_t i
    fps_floats_enter(&before)
    if code.narrow == NULL:
        decode_into(code, code.add, unit, version, payload, <float*>place, scratch)
    else:
        decode_into(code, code.decode, unit, version, payload, v, scratch)
        for i in range(elements_of(code, unit)):
            wide[i] = wide[i] + v[i]
    fps_floats_leave(&before)


cdef void code_sum(Code* code, uint32_t unit, uint32_t version, const void* const* payloads,
                   int64_t n, int64_t divisor, char* payload, char* scratch) noexcept nogil:
    cdef float* total = array_of(code, scratch, 0)
    cdef float ratio = (<const float*>payloads[0])[1]
    cdef float* v
    cdef fps_floats before
    cdef int64_t i
    fps_floats_enter(&before)
    for i in range(n):
        decode_into(code, code.add if i else code.decode, unit, version,
                    <const char*>payloads[i], total, scratch)
    v = prepared(code, unit, total, <float>(1.0 / divisor), ratio, total)
    encode_prepared(code, unit, version, v, ratio, payload, scratch)
    fps_floats_leave(&before)


cdef void release_views(Py_buffer* views) noexcept:
    PyBuffer_Release(&views[0])
    PyBuffer_Release(&views[1])


def _kernel_name(coding):
    """Return the name of a codec's kernels."""
    if coding.codec == Codec.DITHERING:
        name = "natural" if coding.has(Option.NATURAL) else "linear"
    else:
        name = "pairs" if coding.is_paired else Codec(coding.codec).name.lower()
    return f"byteps_{name}" if coding.has(Option.BYTEPS) else name


def _k_of(coding, count):
    """Return args[0] of a codec's kernels."""
    if coding.codec == Codec.DITHERING:
        return int(coding.k) | coding.code_bits << 8
    if coding.codec == Codec.ONEBIT:
        return int(coding.has(Option.SCALING))
    if coding.codec == Codec.SPARSE:
        return int(coding.k)
    return coding.kept(count) if coding.codec in (Codec.TOPK, Codec.RANDOMK) else 0


@cython.final
cdef class Coder:
    """Encode and decode one partition of nbytes, of a tensor's name and element type.

    chunk_bytes: of a plain tensor's frames. rank: of this member among those that encode. pushes:
    it is a worker's, with momentum. Compiles the kernels, or loads them; blocks for that.
    """

    def __cinit__(self, coding, code not None, *, uint64_t nbytes, uint32_t chunk_bytes,
                  str name="", uint32_t partition=0, uint32_t rank=0, bint pushes=False):
        cdef bint has_residual = coding.has(Option.FEEDBACK)
        cdef bint has_momentum = pushes and coding.mu > 0
        units = rules.cut_units(coding, code, nbytes, chunk_bytes)
        self.code.count, self.code.unit_count = units.elements, units.unit_count
        self.code.unit_bytes, self.code.wire_bytes = units.unit_bytes, units.wire_bytes
        self.code.n_units = -(-units.elements // units.unit_count) if units.elements else 0
        self.code.itemsize = code.itemsize
        self.code.stream = rules.stream_of(coding, name, partition)
        self.code.state[0] = self.code.state[1] = coding.seed if coding.has(Option.BYTEPS) else 0
        self.code.rank = 0 if coding.codec == Codec.RANDOMK else rank + 1
        self.code.k = _k_of(coding, units.elements)
        self.code.option = coding.has(
            Option.L2 if coding.codec == Codec.DITHERING else Option.UNBIASED)
        self.code.mu = coding.mu
        self.code.decay = coding.decay if pushes else 1.0
        self.code.work_bytes = round_up(4 * <uint64_t>work_words(units.unit_count))
        self.code.scratch_bytes = self.code.work_bytes + 2 * round_up(
            4 * <uint64_t>units.unit_count)
        self.load(_kernel_name(coding), code, has_residual, has_momentum)
        if has_residual:
            self.code.residual = <float*>calloc(units.elements + 1, sizeof(float))
        if has_momentum:
            self.code.momentum = <float*>calloc(units.elements + 1, sizeof(float))
        if (has_residual and self.code.residual == NULL
                or has_momentum and self.code.momentum == NULL):
            raise MemoryError(f"no memory for residual and momentum of tensor {name!r}")

    cdef int load(self, str what, code, bint has_residual, bint has_momentum) except -1:
        """Find the kernels' addresses."""
        self.code.encode = <code_fn><uintptr_t>codec_kernel("encode", what, has_residual)
        self.code.decode = <code_fn><uintptr_t>codec_kernel("decode", what, False)
        self.code.add = <code_fn><uintptr_t>codec_kernel("decode", what, True)
        self.code.scale = <prepare_fn><uintptr_t>codec_kernel("prepare", "scale")
        if has_residual or has_momentum:
            self.code.prepare = <prepare_fn><uintptr_t>codec_kernel(
                "prepare", "nesterov" if has_momentum else "plain", has_residual)
        if code is not DType.FLOAT32:
            kind = code.name.lower()
            self.code.widen = <convert_fn><uintptr_t>codec_kernel("widen", kind)
            self.code.narrow = <convert_fn><uintptr_t>codec_kernel("narrow", kind)
        return 0

    @property
    def wire_bytes(self):
        """Bytes of the partition on the wire."""
        return self.code.wire_bytes

    def encode(self, elements, *, uint32_t version=1, float ratio=1.0):
        """Return the encoded bytes of a partition, as a worker pushes them."""
        wire = bytearray(self.code.wire_bytes)
        self.encode_into(elements, wire, version=version, ratio=ratio)
        return wire

    def encode_into(self, elements, wire, *, uint32_t version=1, float ratio=1.0):
        """Write the bytes of encode() to wire; does not hold the GIL meanwhile."""
        cdef Py_buffer[2] views
        cdef uint32_t unit
        self.lend(views, elements, wire, True)
        with nogil:
            for unit in range(self.code.n_units):
                code_encode(&self.code, unit, version, <const char*>views[0].buf, ratio,
                            <char*>views[1].buf + unit * self.code.unit_bytes, self.scratch)
        release_views(views)

    def decode(self, wire, elements, *, uint32_t version=1):
        """Decode wire to the elements of a partition; does not hold the GIL meanwhile."""
        cdef Py_buffer[2] views
        cdef uint32_t unit
        self.lend(views, elements, wire, False)
        with nogil:
            for unit in range(self.code.n_units):
                code_decode(&self.code, unit, version,
                            <const char*>views[1].buf + unit * self.code.unit_bytes,
                            <char*>views[0].buf, self.scratch)
        release_views(views)

    cdef int lend(self, Py_buffer* views, elements, wire, bint encodes) except -1:
        """Hold the memory of both until release_views(); refuse what check() does."""
        memset(views, 0, 2 * sizeof(Py_buffer))
        try:
            PyObject_GetBuffer(elements, &views[0], PyBUF_SIMPLE if encodes else PyBUF_WRITABLE)
            PyObject_GetBuffer(wire, &views[1], PyBUF_WRITABLE if encodes else PyBUF_SIMPLE)
            self.check(views[0].len, views[1].len)
        except BaseException:
            release_views(views)
            raise
        return 0

    cdef int check(self, Py_ssize_t nbytes, Py_ssize_t wire_bytes) except -1:
        """Allocate scratch for calls from Python; ValueError for arrays of other sizes."""
        if (nbytes != self.code.count * self.code.itemsize
                or wire_bytes != self.code.wire_bytes):
            raise ValueError(
                f"the partition has {self.code.count * self.code.itemsize} bytes of elements and "
                f"{self.code.wire_bytes} on the wire, got {nbytes} and {wire_bytes}")
        if self.scratch == NULL:
            self.scratch = <char*>malloc(self.code.scratch_bytes)
        if self.scratch == NULL:
            raise MemoryError(f"no memory for {self.code.scratch_bytes} bytes of scratch")
        return 0

    def kept(self):
        """Return copies of residual and momentum, each None where the codec has none."""
        return tuple([
            None if address == 0 else
            memoryview(bytes((<char*>address)[:4 * self.code.count])).cast("f")
            for address in (<uintptr_t>self.code.residual, <uintptr_t>self.code.momentum)])

    def restore(self, kept):
        """Restore what kept() returned of a coder with as many elements."""
        cdef Py_buffer given
        cdef bint is_alike
        cdef float* own
        for place, one in enumerate(kept):
            own = self.code.momentum if place else self.code.residual
            if one is None and own == NULL:
                continue
            PyObject_GetBuffer(b"" if one is None else one, &given, PyBUF_SIMPLE)
            is_alike = own != NULL and given.len == 4 * <Py_ssize_t>self.code.count
            if is_alike:
                memcpy(own, given.buf, given.len)
            PyBuffer_Release(&given)
            if not is_alike:
                raise ValueError(
                    f"the codec keeps {self.code.count} elements of float32, or none; the state "
                    "to restore is of another codec or partition")

    def __dealloc__(self):
        free(self.scratch)
        free(self.code.residual)
        free(self.code.momentum)
