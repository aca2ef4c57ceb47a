# SPDX-License-Identifier: Apache-2.0
"""An operation of TensorFlow's, "FastpsCall", that calls Python with its tensors' memory.

TensorFlow exports a stable C interface for operations and kernels (tensorflow/c/ops.h, kernels.h).
The part of it that is used is declared here, and its functions are found by name in the library
that is loaded; so neither header nor library is needed to build. A node has a number, which
chooses the Python function and says what its outputs are. Inputs are held as long as Python holds
them. An output is of one of three kinds: TensorFlow allocates it before the call; it is a slot,
memory of ours that TensorFlow releases by a flag, without the GIL; or it is copied from an array
whose shape is known only then. The GIL is held while Python runs, except where it copies or waits.

Kernels are asynchronous. A function that may wait for other workers is a Pending call, which a
thread of ours runs: TensorFlow's threads, which may be few, go on to the operations that other
workers wait for. TensorFlow continues after a call when its callback runs, once. The C interface
passes the callback as the address of a std::function that lives until the kernel's function
returns; therefore a call that ends later keeps a copy. The layout of std::function is that of
GNU's libstdc++, with which TensorFlow's packages for Linux are built.
"""

from libc.stdbool cimport bool
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free

from fastps.frameworks._borrowed_memory cimport BorrowedMemory, array_at
from fastps.native.atomic cimport fps_load32, fps_store32

import numpy as np

from fastps.errors import MismatchError

ctypedef void *Pointer

# std::function<void()> of libstdc++: what is called, and the function that copies and frees it.
cdef struct Callback:
    void *stored[2]
    bool (*manage)(Callback *, const Callback *, int) noexcept nogil
    void (*invoke)(const Callback *) noexcept nogil

# Functions of TensorFlow's, by what they are used for here; FUNCTIONS has their names.
cdef struct TensorflowApi:
    void *(*new_status)() noexcept nogil
    void (*delete_status)(void *) noexcept nogil
    void (*set_status)(void *, int, const char *) noexcept nogil
    int (*get_code)(const void *) noexcept nogil
    const char *(*message)(const void *) noexcept nogil
    void *(*new_definition)(const char *) noexcept nogil
    void (*add_attribute)(void *, const char *) noexcept nogil
    void (*add_input)(void *, const char *) noexcept nogil
    void (*add_output)(void *, const char *) noexcept nogil
    void (*set_stateful)(void *, bool) noexcept nogil
    void (*set_shapes)(void *, void (*)(void *, void *) noexcept nogil) noexcept nogil
    void (*register_definition)(void *, void *) noexcept nogil
    void (*unknown_shape)(void *, void *) noexcept nogil
    void *(*new_kernel)(
        const char *, const char *, void *(*)(void *) noexcept nogil,
        void (*)(void *, void *, void *) noexcept nogil, void (*)(void *) noexcept nogil,
    ) noexcept nogil
    void (*register_kernel)(const char *, void *, void *) noexcept nogil
    void (*get_number)(void *, const char *, int64_t *, void *) noexcept nogil
    void (*fail_construction)(void *, void *) noexcept nogil
    void (*fail_call)(void *, void *) noexcept nogil
    int (*inputs)(void *) noexcept nogil
    void (*get_input)(void *, int, void **, void *) noexcept nogil
    void *(*allocate)(void *, int, int, const int64_t *, int, size_t, void *) noexcept nogil
    void (*set_output)(void *, int, const void *, void *) noexcept nogil
    void *(*new_tensor)(
        int, const int64_t *, int, void *, size_t,
        void (*)(void *, size_t, void *) noexcept nogil, void *,
    ) noexcept nogil
    void (*delete_tensor)(void *) noexcept nogil
    void *(*data)(const void *) noexcept nogil
    size_t (*nbytes)(const void *) noexcept nogil
    int (*type)(const void *) noexcept nogil
    int (*rank)(const void *) noexcept nogil
    int64_t (*extent)(const void *, int) noexcept nogil
    void (*run_callback)(void *) noexcept nogil

# In the order of the struct.
FUNCTIONS = (
    "TF_NewStatus", "TF_DeleteStatus", "TF_SetStatus", "TF_GetCode", "TF_Message",
    "TF_NewOpDefinitionBuilder", "TF_OpDefinitionBuilderAddAttr",
    "TF_OpDefinitionBuilderAddInput", "TF_OpDefinitionBuilderAddOutput",
    "TF_OpDefinitionBuilderSetIsStateful",
    "TF_OpDefinitionBuilderSetShapeInferenceFunction", "TF_RegisterOpDefinition",
    "TF_ShapeInferenceContextSetUnknownShape",
    "TF_NewAsyncKernelBuilder", "TF_RegisterKernelBuilder", "TF_OpKernelConstruction_GetAttrInt64",
    "TF_OpKernelConstruction_Failure", "TF_OpKernelContext_Failure", "TF_NumInputs",
    "TF_GetInput", "TF_AllocateOutput", "TF_SetOutput", "TF_NewTensor", "TF_DeleteTensor",
    "TF_TensorData", "TF_TensorByteSize", "TF_TensorType", "TF_NumDims", "TF_Dim",
    "TF_RunAsyncOpKernelDoneCallback",
)  # fmt: skip

cdef enum:
    RANK = 16  # dimensions of an output, at most; tensors of more go another way
    CLONE = 2  # of a std::function; these two are what its manage() is asked for
    DESTROY = 3
    INVALID_ARGUMENT = 3
    FAILED_PRECONDITION = 9  # as of Horovod's operations where workers differ

MAX_RANK = RANK

cdef struct Output:
    int type  # TensorFlow's number
    int rank
    int64_t[RANK] extents
    int64_t nbytes
    bint is_slot  # Python sets it
    bint is_open  # allocated when its shape is known

cdef struct Kernel:
    int64_t number
    bint may_wait  # for other workers
    int count
    Output *outputs

cdef TensorflowApi api
cdef list _functions = None  # by number, f(inputs, outputs)
cdef dict _results = None  # by number, (may_wait, [(type, shape, is_slot) of each output])
cdef object _defer = None  # f(call) runs call() in another thread
# TF_DataType as NumPy types; bfloat16 as the 16 bits that it is.
_DTYPES = {
    1: np.dtype(np.float32), 2: np.dtype(np.float64), 3: np.dtype(np.int32),
    4: np.dtype(np.uint8), 5: np.dtype(np.int16), 6: np.dtype(np.int8), 9: np.dtype(np.int64),
    10: np.dtype(np.bool_), 14: np.dtype(np.uint16), 17: np.dtype(np.uint16),
    19: np.dtype(np.float16), 22: np.dtype(np.uint32), 23: np.dtype(np.uint64),
}


def register(addresses, list functions, dict results, defer):
    """Register the operation with TensorFlow; once for each process.

    addresses: of FUNCTIONS. functions: by number, f(inputs, outputs), called in threads of
    TensorFlow, and of defer. results: by number, whether f may wait for other workers, and for
    each output (TensorFlow's type, shape or None where f decides it, whether f sets a slot for
    it). Both may grow. defer: f(call) runs call() in another thread at once. RuntimeError where
    TensorFlow refuses the operation.
    """
    global _functions, _results, _defer
    cdef Pointer *table = <Pointer *>&api
    cdef Py_ssize_t place
    if len(addresses) * sizeof(Pointer) != sizeof(api):
        raise ValueError(f"expected {len(FUNCTIONS)} addresses, got {len(addresses)}")
    for place in range(len(addresses)):
        table[place] = <void *><uintptr_t>addresses[place]
    _functions, _results, _defer = functions, results, defer
    cdef void *status = api.new_status()
    cdef void *built = api.new_definition(b"FastpsCall")
    for attribute in (b"number: int", b"Tin: list(type) >= 0", b"Tout: list(type) >= 0"):
        api.add_attribute(built, attribute)
    api.add_input(built, b"inputs: Tin")
    api.add_output(built, b"outputs: Tout")
    api.set_stateful(built, True)
    api.set_shapes(built, api.unknown_shape)
    api.register_definition(built, status)
    if api.get_code(status) == 0:
        built = api.new_kernel(b"FastpsCall", b"CPU", create, compute, destroy)
        api.register_kernel(b"FastpsCall", built, status)
    text = api.message(status).decode() if api.get_code(status) else ""
    api.delete_status(status)
    if text:
        raise RuntimeError(text)


cdef class Tensors(BorrowedMemory):
    """Tensors of one call, held as long as this object lives."""

    cdef void **tensors
    cdef bint is_writable

    def __cinit__(self):
        self.tensors = NULL

    def __dealloc__(self):
        cdef Py_ssize_t place
        if self.tensors == NULL:
            return
        for place in range(self.count):
            if self.tensors[place] != NULL:
                api.delete_tensor(self.tensors[place])
        free(self.tensors)

    cdef int reserve(self, Py_ssize_t count) except -1:
        self.tensors = <void **>calloc(max(count, 1), sizeof(void *))
        if self.tensors == NULL:
            raise MemoryError
        self.make_room(count)
        return 0

    cdef int take(self, Py_ssize_t place, void *tensor) except -1:
        self.tensors[place] = tensor
        self.addresses[place] = api.data(tensor)
        self.sizes[place] = <int64_t>api.nbytes(tensor)
        return 0

    cdef object array(self, Py_ssize_t place):
        cdef int axis
        cdef void *tensor = self.tensors[place]
        if tensor == NULL:
            raise ValueError(f"output {place} has neither a slot nor an array")
        shape = tuple([api.extent(tensor, axis) for axis in range(api.rank(tensor))])
        dtype = _DTYPES.get(api.type(tensor))
        if dtype is None:
            raise TypeError(
                f"TensorFlow's data type {api.type(tensor)} is not supported: cast to tf.float32, "
                "or another dtype that NumPy has"
            )
        return array_at(self.addresses[place], dtype, shape, self.is_writable)


cdef class Outputs(Tensors):
    """Outputs of one call; Python sets those that are slots or open."""

    cdef Kernel *kernel
    cdef void *context
    cdef dict slots  # by place

    def set_slot(self, Py_ssize_t place, Slot slot):
        """Make a slot an output, without a copy; it is busy until TensorFlow releases it.

        The function may write to it until it returns.
        """
        if not 0 <= place < self.count or not self.kernel.outputs[place].is_slot:
            raise IndexError(place)
        cdef int64_t nbytes = self.kernel.outputs[place].nbytes
        if slot.nbytes != nbytes:
            raise ValueError(f"output {place} needs {nbytes} bytes, its slot has {slot.nbytes}")
        self.slots[place] = slot
        self.addresses[place], self.sizes[place] = slot.address, nbytes

    def copy_array(self, Py_ssize_t place, array):
        """Allocate an open output and copy an array to it; TypeError for another dtype."""
        cdef int axis, rank = array.ndim
        cdef void *tensor
        cdef void *status
        cdef int64_t *extents
        if not 0 <= place < self.count or not self.kernel.outputs[place].is_open:
            raise IndexError(place)
        extents = <int64_t *>calloc(max(rank, 1), sizeof(int64_t))
        if extents == NULL:
            raise MemoryError
        status = api.new_status()
        try:
            for axis in range(rank):
                extents[axis] = array.shape[axis]
            tensor = api.allocate(
                self.context, <int>place, self.kernel.outputs[place].type, extents, rank,
                array.nbytes, status,
            )
            check(status)
        finally:
            free(extents)
            api.delete_status(status)
        self.take(place, tensor)
        np.copyto(self.array(place), array, casting="no")

    cdef object array(self, Py_ssize_t place):
        cdef Slot slot = self.slots.get(place)
        return Tensors.array(self, place) if slot is None else slot.array

    cdef int hand_over(self, void *context, void *status) except -1:
        """Make tensors of the slots; TensorFlow copies one that is not aligned."""
        cdef Output *output
        cdef Slot slot
        cdef Py_ssize_t place
        for place, slot in self.slots.items():
            output = &self.kernel.outputs[place]
            fps_store32(slot.flag, 1)
            self.tensors[place] = api.new_tensor(
                output.type, output.extents, output.rank, slot.address, output.nbytes,
                release_slot, slot.flag,
            )
            api.set_output(context, <int>place, self.tensors[place], status)
            check(status)
        return 0


cdef int check(void *status) except -1:
    """Raise RuntimeError where a status is bad."""
    if api.get_code(status):
        raise RuntimeError(api.message(status).decode("utf-8", "replace"))
    return 0


cdef void release_slot(void *data, size_t nbytes, void *flag) noexcept nogil:
    """Mark a slot as free; called in any thread of TensorFlow's."""
    fps_store32(<int32_t *>flag, 0)


cdef class Slot:
    """An array that TensorFlow borrows as a tensor, again and again; never freed."""

    cdef readonly object array  # keeps the memory
    cdef void *address
    cdef int64_t nbytes
    cdef int32_t *flag  # 1 while TensorFlow has it; never freed: TensorFlow may end after us

    def __init__(self, array):
        cdef uintptr_t address = array.ctypes.data
        self.array = array
        self.address = <void *>address
        self.nbytes = array.nbytes
        self.flag = <int32_t *>calloc(1, sizeof(int32_t))
        if self.flag == NULL:
            raise MemoryError

    @property
    def is_busy(self):
        """Whether TensorFlow still reads it."""
        return fps_load32(self.flag) != 0


cdef void *create(void *construction) noexcept nogil:
    """Return the kernel of a node: its number, and what its outputs are."""
    cdef void *status = api.new_status()
    cdef Kernel *kernel = NULL
    cdef int64_t number = -1
    api.get_number(construction, b"number", &number, status)
    if api.get_code(status) == 0:
        kernel = described(number, status)
    if kernel == NULL:
        api.fail_construction(construction, status)
    api.delete_status(status)
    return kernel


cdef Kernel *described(int64_t number, void *status) noexcept with gil:
    """Return the kernel of a number, whose outputs results[number] describes."""
    cdef Kernel *kernel = <Kernel *>calloc(1, sizeof(Kernel))
    cdef Output *output
    try:
        if kernel == NULL:
            raise MemoryError("cannot allocate the kernel of a node")
        may_wait, listed = _results[number]
        if max([len(shape or ()) for _, shape, _ in listed], default=0) > RANK:
            raise ValueError(f"outputs have at most {RANK} dimensions, reshape the tensor")
        kernel.number, kernel.may_wait = number, may_wait
        kernel.count = len(listed)
        kernel.outputs = <Output *>calloc(max(len(listed), 1), sizeof(Output))
        if kernel.outputs == NULL:
            raise MemoryError("cannot allocate the outputs of a node")
        for place, (kind, shape, is_slot) in enumerate(listed):
            output = &kernel.outputs[place]
            output.type, output.is_slot, output.is_open = kind, is_slot, shape is None
            output.rank, output.nbytes = len(shape or ()), _DTYPES[kind].itemsize
            for axis, extent in enumerate(shape or ()):
                output.extents[axis] = extent
                output.nbytes *= extent
    except BaseException as error:
        set_error(status, error)
        destroy(kernel)
        return NULL
    return kernel


cdef void destroy(void *kernel) noexcept nogil:
    if kernel != NULL:
        free((<Kernel *>kernel).outputs)
        free(kernel)


cdef void compute(void *kernel, void *context, void *done) noexcept nogil:
    """Run a node, in a thread of ours where it may wait for other workers."""
    if kernel != NULL and (<Kernel *>kernel).may_wait:
        if is_deferred(<Kernel *>kernel, context, <Callback *>done):
            return
    run_node(<Kernel *>kernel, context)
    api.run_callback(done)


cdef bint is_deferred(Kernel *kernel, void *context, Callback *done) noexcept with gil:
    """Let a thread of ours run a node; return whether one could be started."""
    cdef Pending pending = Pending.__new__(Pending)
    pending.kernel, pending.context = kernel, context
    pending.done = done[0]
    done.manage(&pending.done, done, CLONE)
    try:
        _defer(pending.run)
    except BaseException:
        pending.done.manage(&pending.done, &pending.done, DESTROY)
        return False
    return True


cdef class Pending:
    """A call of a node that TensorFlow waits for."""

    cdef Kernel *kernel  # these two live until the callback is run
    cdef void *context
    cdef Callback done  # copied when the call was deferred, freed by run()

    def run(self):
        """Run the node, then TensorFlow's callback, which may run more nodes here; once."""
        with nogil:
            run_node(self.kernel, self.context)
            api.run_callback(&self.done)
            self.done.manage(&self.done, &self.done, DESTROY)


cdef void run_node(Kernel *kernel, void *context) noexcept nogil:
    cdef void *status = api.new_status()
    if kernel == NULL or not run_python(kernel, context, status):
        api.fail_call(context, status)
    api.delete_status(status)


cdef bint run_python(Kernel *kernel, void *context, void *status) noexcept with gil:
    """Call the Python function; return whether it succeeded, else set the status."""
    cdef Outputs outputs
    try:
        outputs = outputs_of(kernel, context, status)
        _functions[kernel.number](inputs_of(context, status), outputs)
        outputs.hand_over(context, status)
    except BaseException as error:
        set_error(status, error)
        return False
    return True


cdef void set_error(void *status, object error) noexcept:
    text = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
    is_mismatch = isinstance(error, MismatchError)
    api.set_status(status, FAILED_PRECONDITION if is_mismatch else INVALID_ARGUMENT, text)


cdef Tensors inputs_of(void *context, void *status):
    cdef Tensors found = Tensors.__new__(Tensors)
    cdef int place
    cdef void *tensor
    found.reserve(api.inputs(context))
    for place in range(found.count):
        api.get_input(context, place, &tensor, status)
        check(status)
        found.take(place, tensor)
    return found


cdef Outputs outputs_of(Kernel *kernel, void *context, void *status):
    """Allocate the outputs of a call, except those that Python sets."""
    cdef Outputs found = Outputs.__new__(Outputs)
    cdef int place
    cdef void *tensor
    cdef Output *output
    found.reserve(kernel.count)
    found.kernel, found.context, found.slots = kernel, context, {}
    found.is_writable = True
    for place in range(kernel.count):
        output = &kernel.outputs[place]
        if output.is_slot or output.is_open:
            continue
        tensor = api.allocate(
            context, place, output.type, output.extents, output.rank, output.nbytes, status
        )
        check(status)
        found.take(place, tensor)
    return found
