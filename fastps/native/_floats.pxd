# SPDX-License-Identifier: Apache-2.0
# The floating-point state of kernels: round to nearest, keep subnormals, no traps. A program may
# set another state for its threads (torch.set_flush_denormal(), fesetround()), and new threads
# inherit it. Ranks would then get different bits, depending on the thread that sums. So every
# computation stands between enter and leave, which only read the state if nothing has to change.
# Compiled into each user.

cdef extern from *:
    """
    #include <stdint.h>
    #if defined(__x86_64__)
    #include <xmmintrin.h>
    typedef struct { uint32_t word; } fps_floats;
    #define FPS_FLOATS_DEFAULT 0x1F80u
    #define FPS_FLOATS_FLAGS 0x3Fu  /* sticky exception flags; they change no result */
    #define FPS_FLOATS_READ(to) (*(to) = _mm_getcsr())
    #define FPS_FLOATS_WRITE(value) _mm_setcsr(value)
    #elif defined(__aarch64__)
    typedef struct { uint64_t word; } fps_floats;
    #define FPS_FLOATS_DEFAULT 0u
    #define FPS_FLOATS_FLAGS 0u
    #define FPS_FLOATS_READ(to) __asm__ volatile("mrs %0, fpcr" : "=r"(*(to)))
    #define FPS_FLOATS_WRITE(value) __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)(value)))
    #else
    #include <fenv.h>
    typedef struct { fenv_t all; } fps_floats;
    #endif
    #if defined(FPS_FLOATS_READ)
    static inline void fps_floats_enter(fps_floats *before) {
        FPS_FLOATS_READ(&before->word);
        if ((before->word & ~FPS_FLOATS_FLAGS) != FPS_FLOATS_DEFAULT)
            FPS_FLOATS_WRITE(FPS_FLOATS_DEFAULT);
        __asm__ volatile("" ::: "memory");  /* nothing is computed before */
    }
    static inline void fps_floats_leave(const fps_floats *before) {
        fps_floats now;
        __asm__ volatile("" ::: "memory");
        FPS_FLOATS_READ(&now.word);  /* a user's rule may have changed it */
        if ((before->word ^ now.word) & ~FPS_FLOATS_FLAGS)
            FPS_FLOATS_WRITE(before->word);
    }
    #else
    static inline void fps_floats_enter(fps_floats *before) {
        fegetenv(&before->all);
        fesetenv(FE_DFL_ENV);
    }
    static inline void fps_floats_leave(const fps_floats *before) {
        fesetenv(&before->all);
    }
    #endif
    """
    ctypedef struct fps_floats:
        pass
    void fps_floats_enter(fps_floats* before) noexcept nogil
    void fps_floats_leave(const fps_floats* before) noexcept nogil
