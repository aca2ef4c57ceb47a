# SPDX-License-Identifier: Apache-2.0
# CRC-32C (Castagnoli; RFC 3720, appendix B.4), reflected: polynomial 0x82f63b78. Each function
# takes the CRC of the bytes before (0: none), and returns that of all of them. Compiled into each
# user.
#
# Chains. The instruction of x86-64 takes 8 bytes in one cycle and has its result after three. So
# three chains run side by side over neighbouring blocks; then their results are shifted to one
# place and added. A shift by n bits is a carry-less product with x^(n - 33): the reflected product
# stands one bit lower, and the instruction, which also reduces it, multiplies by x^32. On ARM,
# where not every processor has such a product, shifts and exclusive ors make it.
#
# Wide. Where a processor multiplies four pairs of 64 bits at a time (VPCLMULQDQ), 256 bytes are
# added to the 256 behind them, shifted: the two halves of each 128 bits by x^(2048 + 64) and
# x^2048, one bit less each as above. The rest of this division has no more than 64 bytes.
#
# Both. AMD's 4th generation begins such a product in every second cycle, so that 256 bytes take
# 16. Three chains over the bytes behind them use another unit, and take 96 bytes meanwhile. Intel
# needs 8 cycles for these 256 bytes and 12 for those 96: there the products alone are faster.
#
# Gigabytes per second in the near caches, from a far one, and from memory: Xeon, 4th generation:
# wide 110, 28; three chains 31, 28; one chain 11, 7. EPYC, 4th generation: both 68, 69, 30; wide
# 59, 59, 26. Without the prefetches the chains have 20 from a far cache of the Xeon, and both have
# 13 from memory: processors do not foresee several streams.
from libc.stdint cimport uint32_t, uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static uint32_t fps_crc_table[256];
    static int fps_crc_is_filled;

    static void fps_crc_fill(void) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0x82f63b78u & (0u - (crc & 1)));
            fps_crc_table[i] = crc;     /* racing threads write the same values */
        }
        __atomic_store_n(&fps_crc_is_filled, 1, __ATOMIC_RELEASE);
    }

    __attribute__((unused))
    static uint32_t fps_crc_portable(uint32_t crc, const void *data, uint64_t n) {
        const uint8_t *at = (const uint8_t *)data;
        if (!__atomic_load_n(&fps_crc_is_filled, __ATOMIC_ACQUIRE)) fps_crc_fill();
        for (crc = ~crc; n; n--) crc = fps_crc_table[(crc ^ *at++) & 255] ^ (crc >> 8);
        return ~crc;
    }

    __attribute__((always_inline, unused))
    static inline uint64_t fps_crc_word(const uint8_t *at) {
        uint64_t word;
        memcpy(&word, at, 8);
        return word;
    }

    #if defined(__x86_64__)
    #include <immintrin.h>
    #define FPS_CRC_ONE target("sse4.2")
    #define FPS_CRC_THREE target("sse4.2,pclmul")
    #define fps_crc_step(crc, word) _mm_crc32_u64((crc), (word))
    #define fps_crc_step_byte(crc, byte) _mm_crc32_u8((uint32_t)(crc), (byte))
    __attribute__((target("pclmul"), always_inline))
    static inline uint64_t fps_crc_times(uint64_t a, uint64_t factor) {
        return (uint64_t)_mm_cvtsi128_si64(_mm_clmulepi64_si128(
            _mm_cvtsi64_si128((long long)a), _mm_cvtsi64_si128((long long)factor), 0));
    }
    #elif defined(__aarch64__)
    #include <sys/auxv.h>
    #define FPS_HAS_CRC (1ul << 7)  /* HWCAP_CRC32 */
    #define FPS_CRC_ONE unused
    #define FPS_CRC_THREE unused
    #define FPS_ARM_CRC(what, crc, value) \\
        __asm__(".arch_extension crc\\n\\t" what : "+r"(crc) : "r"(value))
    static inline uint64_t fps_crc_step(uint64_t a, uint64_t word) {
        uint32_t crc = (uint32_t)a;
        FPS_ARM_CRC("crc32cx %w0, %w0, %x1", crc, word);
        return crc;
    }
    static inline uint64_t fps_crc_step_byte(uint64_t a, uint8_t byte) {
        uint32_t crc = (uint32_t)a;
        FPS_ARM_CRC("crc32cb %w0, %w0, %w1", crc, (uint32_t)byte);
        return crc;
    }
    /* A shift and an exclusive or for each bit of the factor that is set: it is a constant. */
    __attribute__((always_inline))
    static inline uint64_t fps_crc_times(uint64_t a, uint64_t factor) {
        uint64_t product = 0;
        #pragma GCC unroll 32
        for (int bit = 0; bit < 32; bit++)
            if (factor >> bit & 1) product ^= a << bit;
        return product;
    }
    #endif

    #ifdef FPS_CRC_ONE
    __attribute__((FPS_CRC_ONE, always_inline))
    static inline uint32_t fps_crc_end(uint64_t a, const uint8_t *at, uint64_t n) {
        for (; n >= 8; n -= 8, at += 8) a = fps_crc_step(a, fps_crc_word(at));
        while (n--) a = fps_crc_step_byte(a, *at++);
        return ~(uint32_t)a;
    }
    __attribute__((FPS_CRC_ONE, unused))
    static uint32_t fps_crc_one(uint32_t crc, const void *data, uint64_t n) {
        return fps_crc_end((uint32_t)~crc, (const uint8_t *)data, n);
    }
    /* Three blocks of n bytes, and the three behind them on their way to the cache; by_two and
       by_one shift by two blocks and by one. */
    __attribute__((FPS_CRC_THREE, always_inline))
    static inline uint64_t fps_crc_blocks(uint64_t a, const uint8_t *at, uint64_t n,
                                          uint64_t by_two, uint64_t by_one) {
        uint64_t b = 0, c = 0;
        for (uint64_t line = 0; line < n; line += 64) {
            __builtin_prefetch(at + 3 * n + line);
            __builtin_prefetch(at + 4 * n + line);
            __builtin_prefetch(at + 5 * n + line);
            for (uint64_t i = line; i < line + 64; i += 8) {
                a = fps_crc_step(a, fps_crc_word(at + i));
                b = fps_crc_step(b, fps_crc_word(at + n + i));
                c = fps_crc_step(c, fps_crc_word(at + 2 * n + i));
            }
        }
        return c ^ fps_crc_step(0, fps_crc_times(a, by_two) ^ fps_crc_times(b, by_one));
    }
    __attribute__((FPS_CRC_THREE, unused))
    static uint32_t fps_crc_three(uint32_t crc, const void *data, uint64_t n) {
        const uint8_t *at = (const uint8_t *)data;
        uint64_t a = (uint32_t)~crc;
        for (; n >= 3 * 1024; n -= 3 * 1024, at += 3 * 1024)
            a = fps_crc_blocks(a, at, 1024, 0xa51b6135u, 0x170076fau);
        for (; n >= 3 * 128; n -= 3 * 128, at += 3 * 128)
            a = fps_crc_blocks(a, at, 128, 0xb9e02b86u, 0x0d3b6092u);
        return fps_crc_end(a, at, n);
    }
    #endif

    #if defined(__x86_64__)
    __attribute__((target("avx512f,vpclmulqdq"), always_inline))
    static inline __m512i fps_crc_fold(__m512i a, __m512i factors, __m512i next) {
        __m512i low = _mm512_clmulepi64_epi128(a, factors, 0x11);   /* first: no register more */
        return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, factors, 0x00), low, next,
                                         0x96);     /* exclusive or of the three */
    }
    __attribute__((target("avx512f,vpclmulqdq"), always_inline))
    static inline __m512i fps_crc_factors(uint64_t high, uint64_t low) {
        return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)low, (long long)high));
    }
    #define FPS_CRC_BY_256 fps_crc_factors(0xe9a5d8be00000000u, 0x1426a81500000000u)
    /* Four neighbouring lines, each shifted and added to the next one, and divided. */
    __attribute__((target("avx512f,vpclmulqdq,sse4.2"), always_inline))
    static inline uint64_t fps_crc_lines(const __m512i lines[4]) {
        const __m512i by_64 = fps_crc_factors(0x1c19243b00000000u, 0x75bba45b00000000u);
        __m512i sum = lines[0];
        uint8_t rest[64];
        uint64_t crc = 0;
        for (int i = 1; i < 4; i++) sum = fps_crc_fold(sum, by_64, lines[i]);
        _mm512_storeu_si512(rest, sum);
        for (int i = 0; i < 64; i += 8) crc = _mm_crc32_u64(crc, fps_crc_word(rest + i));
        return crc;
    }
    __attribute__((target("avx512f,vpclmulqdq,sse4.2"), unused))
    static uint32_t fps_crc_wide(uint32_t crc, const void *data, uint64_t n) {
        const uint8_t *at = (const uint8_t *)data;
        const __m512i by_256 = FPS_CRC_BY_256;
        __m512i lines[4];
        for (int i = 0; i < 4; i++) lines[i] = _mm512_loadu_si512(at + 64 * i);
        lines[0] = _mm512_xor_si512(lines[0], _mm512_inserti32x4(
            _mm512_setzero_si512(), _mm_cvtsi32_si128((int)~crc), 0));
        for (at += 256, n -= 256; n >= 256; at += 256, n -= 256) {
            for (int line = 0; line < 256; line += 64) __builtin_prefetch(at + 2048 + line);
            #pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                lines[i] = fps_crc_fold(lines[i], by_256, _mm512_loadu_si512(at + 64 * i));
        }
        return fps_crc_end(fps_crc_lines(lines), at, n);
    }
    /* Blocks of 4352 bytes and of three times 512; their chains are a, b and c. */
    __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2"), unused))
    static uint32_t fps_crc_both(uint32_t crc, const void *data, uint64_t n) {
        const uint8_t *at = (const uint8_t *)data;
        const __m512i by_256 = FPS_CRC_BY_256;
        uint64_t before = (uint32_t)~crc;
        for (; n >= 5888; n -= 5888, at += 5888) {
            __m512i lines[4];
            uint64_t a = 0, b = 0, c = 0;
            for (int i = 0; i < 4; i++) lines[i] = _mm512_loadu_si512(at + 64 * i);
            for (int row = 0; row < 16; row++) {
                const uint8_t *wide = at + 256 + 256 * row, *ahead = at + 6912 + 352 * row;
                #pragma GCC unroll 6
                for (int line = 0; line < 384; line += 64) __builtin_prefetch(ahead + line);
                #pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const uint8_t *word = at + 4352 + 32 * row + 8 * i;
                    lines[i] = fps_crc_fold(lines[i], by_256, _mm512_loadu_si512(wide + 64 * i));
                    a = _mm_crc32_u64(a, fps_crc_word(word));
                    b = _mm_crc32_u64(b, fps_crc_word(word + 512));
                    c = _mm_crc32_u64(c, fps_crc_word(word + 1024));
                }
            }
            before = c ^ _mm_crc32_u64(0, fps_crc_times(before, 0x66c774ddu)
                ^ fps_crc_times(fps_crc_lines(lines), 0x9ef68d35u)
                ^ fps_crc_times(a, 0x170076fau) ^ fps_crc_times(b, 0xdd7e3b0cu));
        }
        if (n >= 256) return fps_crc_wide(~(uint32_t)before, at, n);
        return fps_crc_end(before, at, n);
    }
    #define FPS_CRC_WIDE 512    /* bytes from which it is faster */
    #define fps_crc_short(crc, p, n) (__builtin_cpu_supports("sse4.2") \\
        ? fps_crc_one((crc), (p), (n)) : fps_crc_portable((crc), (p), (n)))
    #define fps_crc_chains(crc, p, n) (__builtin_cpu_supports("pclmul") \\
        ? fps_crc_three((crc), (p), (n)) : fps_crc_short((crc), (p), (n)))
    static inline uint32_t fps_crc(uint32_t crc, const void *data, uint64_t n) {
        if (n >= FPS_CRC_WIDE && __builtin_cpu_supports("vpclmulqdq")
                && __builtin_cpu_supports("avx512f"))
            return __builtin_cpu_is("amd") ? fps_crc_both(crc, data, n)
                : fps_crc_wide(crc, data, n);
        return fps_crc_chains(crc, data, n);
    }
    #elif defined(__aarch64__)
    #define fps_crc_short(crc, p, n) (getauxval(AT_HWCAP) & FPS_HAS_CRC \\
        ? fps_crc_one((crc), (p), (n)) : fps_crc_portable((crc), (p), (n)))
    #define fps_crc_chains(crc, p, n) (getauxval(AT_HWCAP) & FPS_HAS_CRC \\
        ? fps_crc_three((crc), (p), (n)) : fps_crc_portable((crc), (p), (n)))
    #define fps_crc(crc, p, n) fps_crc_chains((crc), (p), (n))
    #else
    #define fps_crc_short(crc, p, n) fps_crc_portable((crc), (p), (n))
    #define fps_crc_chains(crc, p, n) fps_crc_portable((crc), (p), (n))
    #define fps_crc(crc, p, n) fps_crc_portable((crc), (p), (n))
    #endif
    """
    uint32_t fps_crc(uint32_t crc, const void* data, uint64_t n) noexcept nogil
    # The same by three chains at most.
    uint32_t fps_crc_chains(uint32_t crc, const void* data, uint64_t n) noexcept nogil
    # The same for some bytes, as those of a header: one chain.
    uint32_t fps_crc_short(uint32_t crc, const void* data, uint64_t n) noexcept nogil
    # The same by a table, as on processors without such an instruction: 0.4 GB/s.
    uint32_t fps_crc_portable(uint32_t crc, const void* data, uint64_t n) noexcept nogil
