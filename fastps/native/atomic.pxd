# SPDX-License-Identifier: Apache-2.0
# Atomics and a tiny spinless lock for C fields shared between threads; compiled into each user.
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #define fps_load32(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define fps_store32(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    #define fps_add32(p, v) __atomic_add_fetch((p), (v), __ATOMIC_ACQ_REL)
    #define fps_swap32(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
    #define fps_or32(p, v) __atomic_fetch_or((p), (v), __ATOMIC_SEQ_CST)
    #define fps_and32(p, v) __atomic_fetch_and((p), (v), __ATOMIC_SEQ_CST)
    #define fps_load64(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define fps_store64(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    #define fps_add64(p, v) __atomic_add_fetch((p), (v), __ATOMIC_ACQ_REL)
    #define fps_swap64(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
    #define fps_or64(p, v) __atomic_fetch_or((p), (v), __ATOMIC_SEQ_CST)
    #define fps_load_ptr(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
    #define fps_store_ptr(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
    #define fps_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
    #define fps_swap_ptr(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
    static inline int fps_cas_ptr(void** p, void* expected, void* desired) {
        return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_SEQ_CST,
                                           __ATOMIC_SEQ_CST);
    }
    static inline int fps_cas64(int64_t* p, int64_t expected, int64_t desired) {
        return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_ACQ_REL,
                                           __ATOMIC_ACQUIRE);
    }
    static inline int fps_cas32(int32_t* p, int32_t expected, int32_t desired) {
        return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_ACQ_REL,
                                           __ATOMIC_ACQUIRE);
    }
    """
    int32_t fps_load32(int32_t* p) noexcept nogil
    void fps_store32(int32_t* p, int32_t v) noexcept nogil
    int32_t fps_add32(int32_t* p, int32_t v) noexcept nogil         # returns the new value
    int32_t fps_swap32(int32_t* p, int32_t v) noexcept nogil        # returns the old value
    int32_t fps_or32(int32_t* p, int32_t v) noexcept nogil          # returns the old value
    int32_t fps_and32(int32_t* p, int32_t v) noexcept nogil         # returns the old value
    int64_t fps_load64(int64_t* p) noexcept nogil
    void fps_store64(int64_t* p, int64_t v) noexcept nogil
    int64_t fps_add64(int64_t* p, int64_t v) noexcept nogil
    int64_t fps_swap64(int64_t* p, int64_t v) noexcept nogil        # returns the old value
    int64_t fps_or64(int64_t* p, int64_t v) noexcept nogil          # returns the old value
    void* fps_load_ptr(void** p) noexcept nogil
    void fps_store_ptr(void** p, void* v) noexcept nogil
    void* fps_swap_ptr(void** p, void* v) noexcept nogil            # returns the old value
    bint fps_cas_ptr(void** p, void* expected, void* desired) noexcept nogil
    void fps_fence() noexcept nogil
    bint fps_cas64(int64_t* p, int64_t expected, int64_t desired) noexcept nogil
    bint fps_cas32(int32_t* p, int32_t expected, int32_t desired) noexcept nogil
