# SPDX-License-Identifier: Apache-2.0
# How threads wait for a word of memory: a pause between two reads, and sleep until a wake-up.
# Compiled into each user.
from libc.stdint cimport int32_t, int64_t

cdef extern from *:
    """
    #include <limits.h>
    #include <linux/futex.h>
    #include <stdint.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>
    enum { FPS_ALL = INT_MAX, FPS_ANYBODY = -1, FPS_SHARED = 0, FPS_OWN = FUTEX_PRIVATE_FLAG };
    #if defined(__x86_64__)
    #define fps_relax() __builtin_ia32_pause()
    #elif defined(__aarch64__)
    #define fps_relax() __asm__ volatile("yield")
    #else
    #define fps_relax() ((void)0)
    #endif
    static inline void fps_sleep(int32_t *word, int32_t expected, int64_t until_ns, int32_t whom,
                                 int scope) {
        struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
        syscall(SYS_futex, word, FUTEX_WAIT_BITSET | scope, expected, &until, NULL, whom);
    }
    static inline void fps_wake(int32_t *word, int count, int32_t whom, int scope) {
        syscall(SYS_futex, word, FUTEX_WAKE_BITSET | scope, count, NULL, NULL, whom);
    }
    """
    const int FPS_ALL           # count: wake all sleepers
    const int FPS_ANYBODY       # whom: all bits of the mask that distinguishes sleepers of a word
    const int FPS_SHARED        # scope: memory that other processes map
    const int FPS_OWN           # scope: private memory, which is faster
    void fps_relax() noexcept nogil
    # Sleep while the word has the expected value, at most until a time of CLOCK_MONOTONIC. Returns
    # on wake, change, signal or deadline alike; the caller reads the word again.
    void fps_sleep(int32_t* word, int32_t expected, int64_t until_ns, int32_t whom,
                   int scope) noexcept nogil
    void fps_wake(int32_t* word, int count, int32_t whom, int scope) noexcept nogil
