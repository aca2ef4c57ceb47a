# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: slabs, blocks and loans. Lock order: grow, then mutex.

cdef extern from "<sys/mman.h>" nogil:
    """
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23      /* Linux 5.14; older kernels answer EINVAL */
    #endif
    """
    enum:
        MADV_HUGEPAGE
        MADV_DONTFORK
        MADV_POPULATE_WRITE

cdef enum:
    CLASS_LARGE = -1        # a block that fills a slab of its own

cdef struct Block:          # made when first lent, freed with its slab
    char* address
    uint64_t nbytes         # of its size class
    int size_class
    bint is_loaned
    Block* next             # in its free list

cdef struct Slab:
    char* address           # page-aligned, on a huge page where the limit allows
    uint64_t nbytes
    uint64_t carved         # bytes already cut into blocks
    bint is_registered      # the hook ran, or runs
    Block** blocks          # per page: the block that starts there, or NULL

cdef struct Pool:
    pthread_mutex_t grow    # held while a slab is mapped; before mutex
    pthread_mutex_t mutex   # guards everything below
    Slab** slabs            # sorted by address
    uint64_t n_slabs
    uint64_t slab_room      # entries allocated
    Slab* current           # small blocks are cut from it
    Block* free[SIZE_CLASSES]
    Block* free_large
    uint64_t limit_bytes    # 0: unlimited
    uint64_t slab_bytes
    uint64_t mapped_bytes
    uint64_t loaned_bytes   # of blocks, so rounded up
    uint64_t peak_loaned_bytes
    uint64_t loans
    uint64_t total_loans
    uint64_t refusals
    bint is_closed
    int32_t generation      # fork_generation of the creator: a child has no slab mapped


# ---- size classes: 1, 2, 3, 4, 6, 8, 12, 16.. pages ----
cdef inline uint64_t class_bytes(int size_class) noexcept nogil:
    if size_class == 0:
        return PAGE_BYTES
    cdef uint64_t half = <uint64_t>PAGE_BYTES << ((size_class - 1) // 2)
    return half * 2 if size_class % 2 else half * 3


cdef inline int class_of(uint64_t nbytes) noexcept nogil:
    # Smallest class that holds nbytes; at most 1.5 times too large.
    cdef int size_class = 0
    while class_bytes(size_class) < nbytes:
        size_class += 1
    return size_class


cdef inline uint64_t max_loan_bytes() noexcept nogil:
    return <uint64_t>MAX_LOAN_PAGES * PAGE_BYTES


cdef inline uint64_t round_up(uint64_t nbytes, uint64_t unit) noexcept nogil:
    return (nbytes + unit - 1) // unit * unit


# ---- slabs ----
cdef char* map_slab(uint64_t nbytes) noexcept nogil:
    # Asks for a huge page more and trims both ends, so that the slab starts on a huge page.
    cdef uint64_t whole = nbytes + HUGE_PAGE_BYTES
    cdef void* mapped = mmap(
        NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0
    )
    if mapped == MAP_FAILED:
        return NULL
    cdef uint64_t start = <uint64_t>mapped
    cdef uint64_t address = round_up(start, HUGE_PAGE_BYTES)
    if address > start:
        munmap(<void*>start, address - start)
    if start + whole > address + nbytes:
        munmap(<void*>(address + nbytes), start + whole - address - nbytes)
    prepare_slab(<char*>address, nbytes)
    return <char*>address


cdef void prepare_slab(char* address, uint64_t nbytes) noexcept nogil:
    cdef uint64_t offset = 0
    madvise(address, nbytes, MADV_DONTFORK)
    madvise(address, nbytes, MADV_HUGEPAGE)     # refused where the kernel has none: 4 KiB pages
    if madvise(address, nbytes, MADV_POPULATE_WRITE) == 0:
        return
    while offset < nbytes:
        address[offset] = 0
        offset += PAGE_BYTES


cdef Slab* slab_create(uint64_t nbytes) noexcept nogil:
    cdef Slab* slab = <Slab*>calloc(1, sizeof(Slab))
    if slab == NULL:
        return NULL
    slab.nbytes = nbytes
    slab.blocks = <Block**>calloc(nbytes // PAGE_BYTES, sizeof(Block*))
    slab.address = map_slab(nbytes) if slab.blocks != NULL else NULL
    if slab.address == NULL:
        free(slab.blocks)
        free(slab)
        return NULL
    return slab


cdef void slab_free(Slab* slab, bint is_mapped) noexcept nogil:
    cdef uint64_t page
    for page in range(slab.nbytes // PAGE_BYTES):
        free(slab.blocks[page])
    if is_mapped:
        munmap(slab.address, slab.nbytes)
    free(slab.blocks)
    free(slab)


cdef Block* slab_carve(Slab* slab, uint64_t nbytes, int size_class) noexcept nogil:
    # Cut the next block; NULL when the slab has no room or there is no memory for the record.
    if slab == NULL or slab.nbytes - slab.carved < nbytes:
        return NULL
    cdef Block* block = <Block*>calloc(1, sizeof(Block))
    if block == NULL:
        return NULL
    block.address = slab.address + slab.carved
    block.nbytes = nbytes
    block.size_class = size_class
    slab.blocks[slab.carved // PAGE_BYTES] = block
    slab.carved += nbytes
    return block


# ---- the pool, with mutex held ----
cdef Block* pool_find(Pool* pool, void* address) noexcept nogil:
    # The block that starts at address, lent or not; NULL when none does.
    cdef char* wanted = <char*>address
    cdef uint64_t low = 0
    cdef uint64_t high = pool.n_slabs
    cdef uint64_t middle
    cdef Slab* slab
    while low < high:
        middle = (low + high) // 2
        slab = pool.slabs[middle]
        if wanted < slab.address:
            high = middle
        elif wanted >= slab.address + slab.nbytes:
            low = middle + 1
        elif (wanted - slab.address) % PAGE_BYTES != 0:
            return NULL
        else:
            return slab.blocks[(wanted - slab.address) // PAGE_BYTES]
    return NULL


cdef Block* pool_take(Pool* pool, uint64_t nbytes) noexcept nogil:
    # A block from a free list or from the current slab; NULL: a slab must be mapped.
    cdef int size_class
    if pool_is_large(pool, nbytes):
        return pool_take_large(pool, nbytes, 2 * nbytes)
    size_class = class_of(nbytes)
    cdef Block* block = pool.free[size_class]
    if block != NULL:
        pool.free[size_class] = block.next
        return block
    return slab_carve(pool.current, class_bytes(size_class), size_class)


cdef inline bint pool_is_large(Pool* pool, uint64_t nbytes) noexcept nogil:
    return class_bytes(class_of(nbytes)) > pool.slab_bytes // 2


cdef Block* pool_take_large(Pool* pool, uint64_t nbytes, uint64_t at_most) noexcept nogil:
    # The smallest free large block that holds nbytes. Few exist: a list is enough.
    cdef Block** best = NULL
    cdef Block** link = &pool.free_large
    cdef Block* block
    while link[0] != NULL:
        block = link[0]
        if nbytes <= block.nbytes <= at_most and (best == NULL or block.nbytes < best[0].nbytes):
            best = link
        link = &block.next
    if best == NULL:
        return NULL
    block = best[0]
    best[0] = block.next
    return block


cdef Block* pool_take_any(Pool* pool, uint64_t nbytes) noexcept nogil:
    # The limit allows no further slab: take a block that is too large rather than none.
    cdef int size_class = class_of(nbytes)
    cdef Block* block
    while size_class < SIZE_CLASSES:
        block = pool.free[size_class]
        if block != NULL:
            pool.free[size_class] = block.next
            return block
        size_class += 1
    return pool_take_large(pool, nbytes, max_loan_bytes())


cdef void pool_lend(Pool* pool, Block* block) noexcept nogil:
    block.is_loaned = True
    block.next = NULL
    pool.loans += 1
    pool.total_loans += 1
    pool.loaned_bytes += block.nbytes
    pool.peak_loaned_bytes = max(pool.peak_loaned_bytes, pool.loaned_bytes)
    count(COUNT_LOANS, 1)


cdef void pool_accept(Pool* pool, Block* block) noexcept nogil:
    block.is_loaned = False
    pool.loans -= 1
    pool.loaned_bytes -= block.nbytes
    pool_shelve(pool, block)
    count(COUNT_LOANS, -1)


cdef inline void pool_shelve(Pool* pool, Block* block) noexcept nogil:
    cdef Block** shelf = &pool.free_large
    if block.size_class != CLASS_LARGE:
        shelf = &pool.free[block.size_class]
    block.next = shelf[0]
    shelf[0] = block


cdef void pool_retire_current(Pool* pool) noexcept nogil:
    # Cut what is left of the current slab into the largest blocks that fit.
    cdef Slab* slab = pool.current
    cdef Block* block
    cdef uint64_t left
    cdef int size_class
    pool.current = NULL
    while slab != NULL and slab.carved < slab.nbytes:
        left = slab.nbytes - slab.carved
        size_class = class_of(left)
        if class_bytes(size_class) > left:
            size_class -= 1
        block = slab_carve(slab, class_bytes(size_class), size_class)
        if block == NULL:
            return
        pool_shelve(pool, block)


cdef bint pool_insert(Pool* pool, Slab* slab) noexcept nogil:
    # Keep the slabs sorted by address.
    cdef uint64_t place = pool.n_slabs
    cdef Slab** slabs
    if pool.n_slabs == pool.slab_room:
        slabs = <Slab**>realloc(pool.slabs, (2 * pool.slab_room + 8) * sizeof(Slab*))
        if slabs == NULL:
            return False
        pool.slabs = slabs
        pool.slab_room = 2 * pool.slab_room + 8
    while place > 0 and pool.slabs[place - 1].address > slab.address:
        pool.slabs[place] = pool.slabs[place - 1]
        place -= 1
    pool.slabs[place] = slab
    pool.n_slabs += 1
    return True


cdef uint64_t pool_next_slab_bytes(Pool* pool, uint64_t nbytes) noexcept nogil:
    # Size of the slab to map for a block of nbytes, within the limit; 0 when it cannot be.
    cdef uint64_t needed = round_up(nbytes, PAGE_BYTES)
    cdef uint64_t wanted = pool.slab_bytes
    cdef uint64_t room
    if pool_is_large(pool, nbytes):
        wanted = round_up(nbytes, HUGE_PAGE_BYTES)
    else:
        needed = class_bytes(class_of(nbytes))
    if pool.limit_bytes == 0:
        return wanted
    room = (pool.limit_bytes - pool.mapped_bytes) // PAGE_BYTES * PAGE_BYTES
    if needed > room:
        return 0
    return min(wanted, room)


# ---- the pool, taking the locks itself ----
cdef Pool* pool_create(uint64_t limit_bytes, uint64_t slab_bytes) noexcept nogil:
    cdef Pool* pool = <Pool*>calloc(1, sizeof(Pool))
    if pool == NULL:
        return NULL
    pthread_mutex_init(&pool.grow, NULL)
    pthread_mutex_init(&pool.mutex, NULL)
    pool.limit_bytes = limit_bytes
    pool.slab_bytes = round_up(slab_bytes, HUGE_PAGE_BYTES)
    watch_fork()
    pool.generation = fps_load32(&fork_generation)
    return pool


cdef inline bint pool_is_ours(Pool* pool) noexcept nogil:
    return pool.generation == fps_load32(&fork_generation)


cdef void* pool_loan(Pool* pool, uint64_t nbytes) noexcept nogil:
    cdef Block* block = NULL
    nbytes = max(nbytes, <uint64_t>1)
    if nbytes > max_loan_bytes():
        return NULL
    pthread_mutex_lock(&pool.mutex)
    if not pool.is_closed:
        block = pool_take(pool, nbytes)
        if block != NULL:
            pool_lend(pool, block)
    pthread_mutex_unlock(&pool.mutex)
    if block == NULL:
        block = pool_loan_growing(pool, nbytes)
    return block.address if block != NULL else NULL


cdef Block* pool_loan_growing(Pool* pool, uint64_t nbytes) noexcept nogil:
    # One thread maps at a time; the others find its slab when they come in.
    cdef Block* block = NULL
    cdef Slab* slab = NULL
    cdef uint64_t slab_bytes = 0
    pthread_mutex_lock(&pool.grow)
    pthread_mutex_lock(&pool.mutex)
    if not pool.is_closed:
        block = pool_take(pool, nbytes)
        slab_bytes = pool_next_slab_bytes(pool, nbytes) if block == NULL else 0
    pthread_mutex_unlock(&pool.mutex)
    if slab_bytes > 0:
        slab = slab_create(slab_bytes)
    pthread_mutex_lock(&pool.mutex)
    if slab != NULL:
        block = pool_adopt(pool, slab, nbytes)
    if block == NULL and not pool.is_closed:
        block = pool_take_any(pool, nbytes)
    if block != NULL:
        pool_lend(pool, block)
    else:
        pool.refusals += 1
    pthread_mutex_unlock(&pool.mutex)
    pthread_mutex_unlock(&pool.grow)
    return block


cdef Block* pool_adopt(Pool* pool, Slab* slab, uint64_t nbytes) noexcept nogil:
    # With both locks held: take the new slab in and cut the block it was mapped for.
    cdef bint is_large = pool_is_large(pool, nbytes)
    if not pool_insert(pool, slab):
        slab_free(slab, True)
        return NULL
    pool.mapped_bytes += slab.nbytes
    if is_large:
        return slab_carve(slab, slab.nbytes, CLASS_LARGE)
    pool_retire_current(pool)
    pool.current = slab
    return pool_take(pool, nbytes)


cdef int pool_give_back(Pool* pool, void* address) noexcept nogil:
    cdef int status = E_PROTOCOL
    pthread_mutex_lock(&pool.mutex)
    cdef Block* block = pool_find(pool, address)
    if block != NULL and block.is_loaned:
        pool_accept(pool, block)
        status = OK
    pthread_mutex_unlock(&pool.mutex)
    return status


cdef bint pool_close(Pool* pool) noexcept nogil:
    # No loan is made after this. True when none is out, so that slabs may be unmapped.
    pthread_mutex_lock(&pool.grow)
    pthread_mutex_lock(&pool.mutex)
    pool.is_closed = True
    cdef bint is_idle = pool.loans == 0
    pthread_mutex_unlock(&pool.mutex)
    pthread_mutex_unlock(&pool.grow)
    return is_idle


cdef void pool_unmap(Pool* pool, bint is_mapped) noexcept nogil:
    # After pool_close said True, or in a forked child (where is_mapped is False).
    cdef uint64_t i
    for i in range(pool.n_slabs):
        slab_free(pool.slabs[i], is_mapped)
    free(pool.slabs)
    pool.slabs = NULL
    pool.n_slabs = 0
    pool.slab_room = 0
    pool.current = NULL
    pool.free_large = NULL
    memset(pool.free, 0, sizeof(pool.free))
    pool.mapped_bytes = 0


cdef Slab* pool_next_unregistered(Pool* pool) noexcept nogil:
    # Return a slab that the hook has not seen, and mark it as seen; NULL: there is none.
    cdef Slab* found = NULL
    cdef uint64_t i
    pthread_mutex_lock(&pool.mutex)
    for i in range(pool.n_slabs):
        if not pool.slabs[i].is_registered:
            found = pool.slabs[i]
            found.is_registered = True
            break
    pthread_mutex_unlock(&pool.mutex)
    return found


# ---- Python face ----
class PoolStatistics(NamedTuple):
    """State of a BufferPool at one moment; sizes in bytes, block sizes rounded up."""

    mapped_bytes: int
    loaned_bytes: int
    peak_loaned_bytes: int
    slabs: int
    loans: int
    total_loans: int
    refusals: int


cdef class BufferPool:
    """Lend C code page-aligned, pre-faulted memory that is mapped once and never moves.

    limit_bytes bounds what is mapped (0: no bound); slab_bytes is rounded up to 2 MiB. on_slab,
    called with (address, nbytes) once per slab by the next statistics(), registers it; its
    result is kept until the slab is unmapped. Thread-safe, except that on_slab must not lend.
    """

    def __cinit__(
        self, uint64_t limit_bytes=0, *, uint64_t slab_bytes=SLAB_BYTES, object on_slab=None
    ):
        if not 0 < slab_bytes <= max_loan_bytes():
            raise ConfigError(f"slab_bytes must be 1 to {max_loan_bytes()}, got {slab_bytes}")
        self.state = pool_create(limit_bytes, slab_bytes)
        if self.state == NULL:
            raise MemoryError("no memory for a BufferPool")
        self.regions = {}
        self.on_slab = on_slab
        self.register_lock = threading.RLock()

    def __dealloc__(self):
        cdef Pool* pool = self.state
        if pool == NULL:
            return
        if not pool_is_ours(pool):
            pool_unmap(pool, False)
        elif pool_close(pool):
            pool_unmap(pool, True)
        else:
            return      # C code still holds a loan: its memory and the records stay
        pthread_mutex_destroy(&pool.mutex)
        pthread_mutex_destroy(&pool.grow)
        free(pool)

    def __del__(self) -> None:
        cdef Pool* pool = self.state
        if pool != NULL and pool_is_ours(pool) and pool.loans > 0:
            warnings.warn(f"BufferPool collected with {pool.loans} loans out", ResourceWarning)

    cdef void* c_loan(self, uint64_t nbytes) noexcept nogil:
        return pool_loan(self.state, nbytes)

    cdef int c_give_back(self, void* address) noexcept nogil:
        return pool_give_back(self.state, address)

    def statistics(self) -> PoolStatistics:
        """Return what is mapped and lent; calls the hook for every new slab first."""
        cdef Pool* pool = self.state
        cdef Pool copy
        if not pool_is_ours(pool):
            raise error_of(E_SHUTDOWN, "this BufferPool belongs to the parent of this fork")
        self._register_slabs()
        pthread_mutex_lock(&pool.mutex)
        copy = pool[0]
        pthread_mutex_unlock(&pool.mutex)
        return PoolStatistics(
            mapped_bytes=copy.mapped_bytes,
            loaned_bytes=copy.loaned_bytes,
            peak_loaned_bytes=copy.peak_loaned_bytes,
            slabs=copy.n_slabs,
            loans=copy.loans,
            total_loans=copy.total_loans,
            refusals=copy.refusals,
        )

    def close(self) -> None:
        """Lend no more, and unmap every slab as soon as no loan is out. Idempotent.

        With loans out the slabs stay until close() is called again.
        """
        if not pool_is_ours(self.state):
            return
        with self.register_lock:
            if pool_close(self.state):
                self.regions.clear()    # a region must end before the memory it covers
                pool_unmap(self.state, True)

    def _register_slabs(self) -> None:
        cdef Slab* slab
        if self.on_slab is None:
            return
        with self.register_lock:
            while True:
                slab = pool_next_unregistered(self.state)
                if slab == NULL:
                    return
                try:
                    region = self.on_slab(<uintptr_t>slab.address, slab.nbytes)
                except BaseException:
                    slab.is_registered = False
                    raise
                self.regions[<uintptr_t>slab.address] = region
