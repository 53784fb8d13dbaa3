// Sixteen lanes of float32, written with the compiler's vector types: one source for every instruction set.
//
// Every file that includes this is compiled once for each instruction set, into a namespace of that name
// (SRV_ISA): no function here may be shared between them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace srv::SRV_ISA {

constexpr int LANES = 16;
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Four = float __attribute__((vector_size(16)));
using FourInts = int32_t __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

struct BFloat16 {
    uint16_t bits;
};

inline Floats all(float value) { return value - Floats{}; }

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

// Round to nearest, ties to even; NaN stays NaN.
inline BFloat16 to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

inline void put(float* to, float value) { *to = value; }
inline void put(BFloat16* to, float value) { *to = to_bfloat16(value); }

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline Floats load(const BFloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

// The processor's own conversion makes zeros of what is below 2^-126 in magnitude.
inline void store(BFloat16* to, Floats value) {
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(value));
#else
    const Words bits = reinterpret_cast<Words>(value);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words chosen = (bits & 0x7fffffffu) > 0x7f800000u ? Words{} + 0x7fc0u : rounded;
    const Halves halves = __builtin_convertvector(chosen, Halves);
#endif
    std::memcpy(to, &halves, sizeof(halves));
}

// The first `count` lanes; the others are zero, and nothing past them is read.
template <class T>
inline Floats load_some(const T* from, int64_t count) {
    T padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <class T>
inline void store_some(T* to, Floats value, int64_t count) {
    T padded[LANES];
    store(padded, value);
    std::memcpy(to, padded, count * sizeof(T));
}

// The value as it is after a store and a load: what the models published in T compute with.
inline Floats rounded(Floats value, const float*) { return value; }

inline Floats rounded(Floats value, const BFloat16*) {
    BFloat16 stored[LANES];
    store(stored, value);
    return load(stored);
}

// The lanes made four by `both`, a half with the other half, and again.
template <class Both>
inline Four quartered(Floats value, const Both& both) {
    using Eight = float __attribute__((vector_size(32)));
    Eight halves[2];
    std::memcpy(halves, &value, sizeof(halves));
    const Eight eight = both(halves[0], halves[1]);
    Four quarters[2];
    std::memcpy(quarters, &eight, sizeof(quarters));
    return both(quarters[0], quarters[1]);
}

// The lanes made one.
template <class Both>
inline float folded(Floats value, const Both& both) {
    const Four four = quartered(value, both);
    const Four two = both(four, __builtin_shuffle(four, FourInts{2, 3, 0, 1}));
    return both(two, __builtin_shuffle(two, FourInts{1, 0, 3, 2}))[0];
}

// The lanes of two vectors made one each.
template <class Both>
inline Four folded(Floats first, Floats second, const Both& both) {
    const Four a = quartered(first, both), b = quartered(second, both);
    const Four two = both(__builtin_shuffle(a, b, FourInts{0, 4, 1, 5}), __builtin_shuffle(a, b, FourInts{2, 6, 3, 7}));
    return both(two, __builtin_shuffle(two, FourInts{2, 3, 0, 1}));
}

constexpr auto added = [](auto a, auto b) { return a + b; };
constexpr auto larger = [](auto a, auto b) { return a > b ? a : b; };

inline float sum(Floats value) { return folded(value, added); }
inline float largest(Floats value) { return folded(value, larger); }

// e^x: x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts: Cody and Waite 1980), then the Taylor series of
// e^r to r^7, whose error is below float32's own. Under -87 the result is 0, over 88 infinity; NaN stays NaN.
inline Floats exponential(Floats x) {
    const Floats clamped = x < -87.33f ? all(-87.33f) : (x > 88.72f ? all(88.72f) : x);
    const Floats scaled = clamped * 1.44269504088896341f;
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = (scaled + magic) - magic;
    const Floats r = (clamped - n * 0.693145751953125f) - n * 1.428606765330187e-6f;
    Floats p = all(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // n = 128 has no float32 of its own: 2^n is made in two factors.
    const Ints whole = __builtin_convertvector(n, Ints);
    const Ints half = whole >> 1;
    const Floats first = reinterpret_cast<Floats>((half + 127) << 23);
    const Floats second = reinterpret_cast<Floats>((whole - half + 127) << 23);
    Floats result = p * first * second;
    result = x < -87.33f ? Floats{} : result;
    result = x > 88.72f ? all(__builtin_inff()) : result;
    return x != x ? x : result;
}

// e^x for x up to 0, as a weight of type T needs it: 0 under -87, NaN stays NaN.
inline Floats weight_of(Floats x, const float*) { return exponential(x); }

// In base 2, n + r with |r| <= 1/2, and 2^r by its Taylor series to r^5: off by 2.4e-6 of itself, a thousandth of what
// rounding to bfloat16 takes. n is added to the exponent, from the low bits of the magic sum that holds it.
inline Floats weight_of(Floats x, const BFloat16*) {
    constexpr float LOG2_E = 1.44269504088896341f;
    const Floats clamped = x < -87.0f ? all(-87.0f) : x;
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = clamped * LOG2_E + magic;
    const Floats r = clamped * LOG2_E - (n - magic);
    Floats p = all(1.33335581e-3f);
    p = p * r + 9.61812911e-3f;
    p = p * r + 5.55041087e-2f;
    p = p * r + 2.40226507e-1f;
    p = p * r + 6.93147181e-1f;
    p = p * r + 1.0f;
    const Floats result = reinterpret_cast<Floats>(reinterpret_cast<Ints>(p) + (reinterpret_cast<Ints>(n) << 23));
    return x < -87.0f ? Floats{} : x != x ? x : result;
}

// Whether any lane is larger than the other value; NaN is not.
inline bool any_larger(Floats values, float than) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(values), _mm512_set1_ps(than), _CMP_GT_OQ) != 0;
#else
    return largest(values) > than;
#endif
}

}  // namespace srv::SRV_ISA
