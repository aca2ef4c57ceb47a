# SPDX-License-Identifier: Apache-2.0
# Copies of arrays. Large targets, which no cache holds, are written past the caches (streaming
# stores): memory is not read before it is overwritten, a third less traffic. Other targets are
# copied by a loop of our own. memcpy() of many C libraries is one instruction (rep movsb), which
# some processors execute ten times slower when the target lies a few bytes further into its page
# than the source. That is common: arrays of malloc() and shared memory. Compiled into each user.
from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    enum { FPS_BY_LIBRARY, FPS_BY_MOVES, FPS_BY_STREAMS };
    #define FPS_PAST_CACHES (8ul << 20)  /* smaller arrays stay in the cache for their readers */
    #if defined(__x86_64__)
    #include <immintrin.h>
    __attribute__((target("avx2"), always_inline, unused))
    static inline void fps_pass(char *to, const char *from) {  /* two cache lines */
        __m256i a = _mm256_loadu_si256((const __m256i *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
        _mm256_stream_si256((__m256i *)(to + 64), c);
        _mm256_stream_si256((__m256i *)(to + 96), d);
    }
    #define FPS_STRIDE 4096ul
    /* Four pages side by side, because memory serves several rows at a time: two processes that
       copy 64 MB each need 5.6 ms, and 9 ms page by page. Whole cache lines, because the processor
       waits for the rest of a line that is written in part. */
    __attribute__((target("avx2"), unused))
    static void fps_stream(char *to, const char *from, uint64_t n) {
        uint64_t head = -(uintptr_t)to & 63, i = 0, line, page;
        if (head > n) head = n;
        memcpy(to, from, head);
        to += head, from += head, n -= head;
        for (; i + 4 * FPS_STRIDE <= n; i += 4 * FPS_STRIDE)
            for (line = i; line < i + FPS_STRIDE; line += 128)
                for (page = line; page < line + 4 * FPS_STRIDE; page += FPS_STRIDE)
                    fps_pass(to + page, from + page);
        for (; i + 128 <= n; i += 128)
            fps_pass(to + i, from + i);
        memcpy(to + i, from + i, n - i);
        _mm_sfence();
    }
    #define FPS_SHORT 1024  /* bytes; memcpy() is as fast below */
    __attribute__((target("avx2"), unused))
    static void fps_move(char *to, const char *from, uint64_t n) {
        uint64_t i = 0;
        for (; i + 128 <= n; i += 128) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(from + i));
            __m256i b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
            __m256i c = _mm256_loadu_si256((const __m256i *)(from + i + 64));
            __m256i d = _mm256_loadu_si256((const __m256i *)(from + i + 96));
            _mm256_storeu_si256((__m256i *)(to + i), a);
            _mm256_storeu_si256((__m256i *)(to + i + 32), b);
            _mm256_storeu_si256((__m256i *)(to + i + 64), c);
            _mm256_storeu_si256((__m256i *)(to + i + 96), d);
        }
        memcpy(to + i, from + i, n - i);
    }
    /* With equal offsets in their pages that instruction is fast, and a fifth to a quarter faster
       for lines that are in no near cache. */
    static inline int fps_copy_way(const void *to, const void *from, uint64_t n,
                                   uint64_t whole) {
        if (n < FPS_SHORT || !__builtin_cpu_supports("avx2"))
            return FPS_BY_LIBRARY;
        if (whole >= FPS_PAST_CACHES)
            return FPS_BY_STREAMS;
        return ((uintptr_t)to ^ (uintptr_t)from) & 4095 ? FPS_BY_MOVES : FPS_BY_LIBRARY;
    }
    static inline void fps_copy(void *to, const void *from, uint64_t n, uint64_t whole) {
        int way = fps_copy_way(to, from, n, whole);
        if (way == FPS_BY_LIBRARY)
            memcpy(to, from, n);
        else if (way == FPS_BY_STREAMS)
            fps_stream((char *)to, (const char *)from, n);
        else
            fps_move((char *)to, (const char *)from, n);
    }
    #else
    static inline int fps_copy_way(const void *to, const void *from, uint64_t n,
                                   uint64_t whole) {
        return FPS_BY_LIBRARY;
    }
    static inline void fps_copy(void *to, const void *from, uint64_t n, uint64_t whole) {
        memcpy(to, from, n);
    }
    #endif
    """
    const int FPS_BY_LIBRARY, FPS_BY_MOVES, FPS_BY_STREAMS
    # Return the way in which fps_copy() copies.
    int fps_copy_way(const void* to, const void* source, uint64_t n, uint64_t whole) noexcept nogil
    # memcpy() of n bytes into an array of `whole` bytes; whole = 0: the array is read soon.
    void fps_copy(void* to, const void* source, uint64_t n, uint64_t whole) noexcept nogil
