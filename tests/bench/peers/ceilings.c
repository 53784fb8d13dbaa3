/* The machine's ceilings: bytes read per second, and operations per second of products in float32, bfloat16 and int8.
 *
 *     cc -O3 -march=native -fopenmp ceilings.c -o ceilings && OMP_NUM_THREADS=2 ./ceilings
 *
 * Prints one JSON object: GB/s and Gop/s (a multiplication and an addition count as two), the best of several passes;
 * null if the processor has no instruction for a product. For int8 the instruction multiplies and adds four pairs (VNNI).
 * On AVX2 it adds two pairs in 16 bits; eight such sums fit 16 bits if one operand has 4 bits, before they are widened
 * to 32. Operands stay in registers, so that only arithmetic is timed. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <omp.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { SUMS = 12, STEPS = 4000000, PASSES = 5 };
static const size_t READ = (size_t)1 << 30;

/* The bytes of the widest vector, and a barrier that makes the compiler assume that an operand has changed; without it
 * the products would be moved out of their loop. */
#if defined(__AVX512F__)
enum { VECTOR = 64 };
#define CHANGED(x) __asm__ volatile("" : "+v"(x))
#elif defined(__x86_64__)
#ifdef __AVX2__
enum { VECTOR = 32 };
#else
enum { VECTOR = 16 };
#endif
#define CHANGED(x) __asm__ volatile("" : "+x"(x))
#else
enum { VECTOR = 16 };
#define CHANGED(x) __asm__ volatile("" : "+w"(x))
#endif
typedef float floats __attribute__((vector_size(VECTOR)));
typedef uint64_t uint64s __attribute__((vector_size(64)));

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

static volatile uint64_t sink; /* results go here, so that they are not optimized away */

static double read_pass(const char *bytes) {
    double begun = now();
#pragma omp parallel
    {
        size_t part = READ / omp_get_num_threads();
        const uint64s *at = (const uint64s *)(bytes + part * omp_get_thread_num());
        uint64s a = {0}, b = {0}, c = {0}, d = {0};
        for (size_t i = 0; i + 4 <= part / sizeof(uint64s); i += 4) {
            a ^= at[i];
            b ^= at[i + 1];
            c ^= at[i + 2];
            d ^= at[i + 3];
        }
        a ^= b ^ c ^ d;
        sink ^= a[0] ^ a[3] ^ a[7];
    }
    return READ / (now() - begun) * 1e-9;
}

/* One pass with SUMS independent accumulators per thread; the vectors stay in registers. */
#define PASS(NAME, TYPE, PER_STEP, LEFT, RIGHT, STEP)                                                           \
    static double NAME(void) {                                                                                  \
        double begun = now();                                                                                   \
        _Pragma("omp parallel") {                                                                               \
            TYPE sums[SUMS];                                                                                    \
            for (int i = 0; i < SUMS; i++) memset(&sums[i], i, sizeof sums[i]);                                 \
            LEFT;                                                                                               \
            RIGHT;                                                                                              \
            for (int step = 0; step < STEPS; step++) {                                                          \
                CHANGED(left);                                                                                  \
                CHANGED(right);                                                                                 \
                _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; i++) sums[i] = STEP;                         \
            }                                                                                                   \
            for (int i = 0; i < SUMS; i++) {                                                                    \
                uint64_t part;                                                                                  \
                memcpy(&part, &sums[i], sizeof part);                                                           \
                sink += part;                                                                                   \
            }                                                                                                   \
        }                                                                                                       \
        return (double)omp_get_max_threads() * SUMS * STEPS * (PER_STEP) / (now() - begun) * 1e-9;              \
    }

PASS(float32_pass, floats, VECTOR / 2, floats left = (floats){0} + 0.5f, floats right = (floats){0} + 1.0f,
     sums[i] * left + right)
#ifdef __AVX512BF16__
PASS(bfloat16_pass, __m512, 64, __m512i left = _mm512_set1_epi16(0x3f00), __m512i right = left,
     _mm512_dpbf16_ps(sums[i], (__m512bh)left, (__m512bh)right))
#endif
#ifdef __AVX512VNNI__
PASS(int8_pass, __m512i, 128, __m512i left = _mm512_set1_epi8(1), __m512i right = left,
     _mm512_dpbusd_epi32(sums[i], left, right))
#elif defined(__AVX2__) && !defined(__AVX512F__)
/* The sum of eight products with 4-bit weights fits 16 bits. */
static inline __m256i eight(__m256i sum, __m256i left, __m256i right) {
    __m256i shorts = _mm256_maddubs_epi16(left, right);
    _Pragma("GCC unroll 7") for (int i = 1; i < 8; i++) {
        CHANGED(right);
        shorts = _mm256_add_epi16(shorts, _mm256_maddubs_epi16(left, right));
        CHANGED(shorts); /* otherwise all products come first and do not fit in registers */
    }
    return _mm256_add_epi32(sum, _mm256_madd_epi16(shorts, left));
}
PASS(int8_pass, __m256i, 512, __m256i left = _mm256_set1_epi8(1), __m256i right = left, eight(sums[i], left, right))
#endif

static void print_best(const char *name, double (*pass)(void), const char *after) {
    double best = 0;
    for (int i = 0; pass && i < PASSES; i++) {
        double one = pass();
        if (one > best) best = one;
    }
    if (pass) printf("\"%s\": %.1f%s", name, best, after);
    else printf("\"%s\": null%s", name, after);
}

int main(void) {
    char *bytes = aligned_alloc(4096, READ);
    if (!bytes) return 1;
    memset(bytes, 1, READ);
    double best = 0;
    for (int i = 0; i < PASSES; i++) {
        double one = read_pass(bytes);
        if (one > best) best = one;
    }
    double (*passes[3])(void) = {float32_pass};
#ifdef __AVX512BF16__
    passes[1] = bfloat16_pass;
#endif
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
    passes[2] = int8_pass;
#endif
    printf("{\"read\": %.1f, ", best);
    print_best("f32", passes[0], ", ");
    print_best("bf16", passes[1], ", ");
    print_best("int8", passes[2], "}\n");
    return 0;
}
