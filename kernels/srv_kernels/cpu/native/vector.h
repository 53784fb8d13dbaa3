// Vectors of sixteen 32-bit lanes on the compiler's vector types: one source for all instruction sets (see vec_pair.h).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "vec_pair.h"

namespace srv::SRV_ISA {

// Prefetches `bytes` from `ahead` bytes past `from` on. The addresses need not be mapped.
inline void prefetch(const void* from, int64_t bytes, int64_t ahead = 0) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(from) + ahead;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(reinterpret_cast<const void*>(first + line));
}

inline Float32x16 broadcast(float value) { return value - Float32x16{}; }

// 0, 1, 2, ...
inline Int32x16 iota() {
    static constexpr int32_t indices[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return build<Int32x16>([](auto& lanes, int lane) { std::memcpy(&lanes, indices + lane, sizeof(lanes)); });
}

struct BFloat16 {
    uint16_t bits;
};

struct Half {
    uint16_t bits;
};

// float8_e4m3fn, of which kernels read finite values only.
struct Fp8 {
    uint8_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline BFloat16 to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

inline void store_scalar(float* to, float value) { *to = value; }
inline void store_scalar(BFloat16* to, float value) { *to = to_bfloat16(value); }

inline Float32x16 load(const float* from) {
    return build<Float32x16>([=](auto& lanes, int lane) { std::memcpy(&lanes, from + lane, sizeof(lanes)); });
}

// Sixteen times four bytes, unaligned.
inline Int32x16 load_dwords(const void* from) {
    const auto* bytes = static_cast<const uint8_t*>(from);
    return build<Int32x16>([=](auto& lanes, int lane) { std::memcpy(&lanes, bytes + lane * 4, sizeof(lanes)); });
}

inline Int32x16 load(const int32_t* from) { return load_dwords(from); }

// Sixteen 16-bit integers, sign- or zero-extended to 32 bits.
template <class Number>
inline auto load_widened(const void* from) {
    using Wide = std::conditional_t<std::is_signed_v<Number>, int32_t, uint32_t>;
    const auto* bytes = static_cast<const uint8_t*>(from);
    return build<Vector<Wide>>([=](auto& lanes, int lane) {
        using Lanes = std::remove_reference_t<decltype(lanes)>;
        Vector<Number, LANES_OF<Lanes>> halves;
        std::memcpy(&halves, bytes + lane * sizeof(Number), sizeof(halves));
#if defined(__AVX2__) && !defined(__AVX512F__)
        // One instruction, for which GCC 12 emits five.
        const auto from_halves = reinterpret_cast<__m128i>(halves);
        if constexpr (std::is_signed_v<Number>) {
            lanes = reinterpret_cast<Lanes>(_mm256_cvtepi16_epi32(from_halves));
        } else {
            lanes = reinterpret_cast<Lanes>(_mm256_cvtepu16_epi32(from_halves));
        }
#else
        lanes = __builtin_convertvector(halves, Lanes);
#endif
    });
}

inline Float32x16 load(const BFloat16* from) { return bits_as<float>(load_widened<uint16_t>(from) << 16); }

// Sixteen values in half precision.
inline Float32x16 load_halves(const uint8_t* from) {
    return build<Float32x16>([=](auto& lanes, int lane) {
        using Lanes = std::remove_reference_t<decltype(lanes)>;
        Vector<uint16_t, LANES_OF<Lanes>> halves;
        std::memcpy(&halves, from + lane * 2, sizeof(halves));
#if defined(__AVX512F__)
        lanes = reinterpret_cast<Lanes>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(halves)));
#elif defined(__F16C__)
        lanes = reinterpret_cast<Lanes>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(halves)));
#else
        const auto words = __builtin_convertvector(halves, Vector<uint32_t, LANES_OF<Lanes>>);
        Lanes magnitude = reinterpret_cast<Lanes>((words & 0x7fffu) << 13) * 0x1p112f;
        magnitude = magnitude < 65536.0f ? magnitude : __builtin_inff() - Lanes{};
        lanes = reinterpret_cast<Lanes>(bits_as<uint32_t>(magnitude) | (words & 0x8000u) << 16);
#endif
    });
}

inline Float32x16 load(const Half* from) { return load_halves(reinterpret_cast<const uint8_t*>(from)); }

inline void store(float* to, const Float32x16& value) {
    for_each_register(value, [=](const auto& lanes, int lane) { std::memcpy(to + lane, &lanes, sizeof(lanes)); });
}

inline void store(int32_t* to, const Int32x16& value) {
    for_each_register(value, [=](const auto& lanes, int lane) { std::memcpy(to + lane, &lanes, sizeof(lanes)); });
}

#if defined(__AVX512BF16__)
// The processor's conversion flushes subnormals to zero.
inline void store(BFloat16* to, const Float32x16& value) {
    for_each_register(value, [=](const auto& lanes, int lane) {
        const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(lanes));
        std::memcpy(to + lane, &halves, sizeof(halves));
    });
}
#else
// Rounded to bfloat16 in the upper half of each lane: to nearest, ties to even; NaN stays NaN.
inline UInt32x16 bfloat16_bits(const Float32x16& value) {
    const UInt32x16 bits = bits_as<uint32_t>(value);
    const UInt32x16 nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return select(value == value, nearest, UInt32x16{} + 0x7fc00000u);
}

inline void store(BFloat16* to, const Float32x16& value) {
    const UInt32x16 upper = bfloat16_bits(value) >> 16;
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i halves =
        _mm256_packus_epi32(reinterpret_cast<__m256i>(upper.low), reinterpret_cast<__m256i>(upper.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(halves, 0xd8));
#else
    for_each_register(upper, [=](const auto& lanes, int lane) {
        const auto halves = __builtin_convertvector(lanes, Vector<uint16_t, LANES_OF<decltype(lanes)>>);
        std::memcpy(to + lane, &halves, sizeof(halves));
    });
#endif
}
#endif

// Rounds to nearest, ties to even; 65,520 and above become infinity, NaN stays NaN.
inline void store(Half* to, const Float32x16& value) {
    for_each_register(value, [=](const auto& lanes, int lane) {
#if defined(__AVX512F__)
        const auto halves = _mm512_cvtps_ph(reinterpret_cast<__m512>(lanes), _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
        const auto halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(lanes), _MM_FROUND_TO_NEAREST_INT);
#else
        using Lanes = std::remove_cvref_t<decltype(lanes)>;
        // Normal numbers are rounded and shifted. For subnormals, adding 0.5 aligns the mantissa, since the last bit of
        // 0.5 has the weight of a subnormal's.
        const auto bits = bits_as<uint32_t>(lanes), magnitude = bits & 0x7fffffffu;
        const auto full = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        const auto small = bits_as<uint32_t>(reinterpret_cast<Lanes>(magnitude) + 0.5f) - 0x3f000000u;
        const auto large = magnitude > 0x7f800000u ? magnitude * 0u + 0x7e00u : magnitude * 0u + 0x7c00u;
        const auto finite = magnitude < 0x38800000u ? small : full;
        const auto chosen = (magnitude < 0x47800000u ? finite : large) | (bits >> 16 & 0x8000u);
        const auto halves = __builtin_convertvector(chosen, Vector<uint16_t, LANES_OF<Lanes>>);
#endif
        std::memcpy(to + lane, &halves, sizeof(halves));
    });
}

// Stores the low byte of each lane.
inline void store_bytes(void* to, const Int32x16& value) {
#if defined(__x86_64__) && !defined(__AVX512F__)
    const Int32x16 low = value & 255;  // compilers narrow shorter vectors byte by byte
#if defined(__AVX2__)
    const __m256i words = _mm256_packs_epi32(reinterpret_cast<__m256i>(low.low), reinterpret_cast<__m256i>(low.high));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i halves[2] = {_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)};
#else
    const __m128i halves[2] = {
        _mm_packs_epi32(reinterpret_cast<__m128i>(low.low.low), reinterpret_cast<__m128i>(low.low.high)),
        _mm_packs_epi32(reinterpret_cast<__m128i>(low.high.low), reinterpret_cast<__m128i>(low.high.high))};
#endif
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm_packus_epi16(halves[0], halves[1]));
#else
    for_each_register(value, [=](const auto& lanes, int lane) {
        const auto bytes = __builtin_convertvector(lanes, Vector<int8_t, LANES_OF<decltype(lanes)>>);
        std::memcpy(static_cast<int8_t*>(to) + lane, &bytes, sizeof(bytes));
    });
#endif
}

// Loads the first `count` lanes; the others are zero, and no memory past `count` is read.
template <class T>
inline auto load_partial(const T* from, int64_t count) {
    T padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <class T>
inline void store_partial(T* to, const Float32x16& value, int64_t count) {
    T padded[LANES];
    store(padded, value);
    std::memcpy(to, padded, count * sizeof(T));
}

// The value after rounding to T: transformers rounds intermediate results to the model's dtype.
inline Float32x16 rounded(const Float32x16& value, const float*) { return value; }

inline Float32x16 rounded(const Float32x16& value, const BFloat16*) {
#if defined(__AVX512BF16__)
    BFloat16 lanes[LANES];
    store(lanes, value);
    return load(lanes);
#else
    return bits_as<float>(bfloat16_bits(value));
#endif
}

// Reduces to four lanes: combines the halves with `both`, repeatedly.
template <class V, class Both>
inline auto reduce_to_four(const V& value, const Both& both) {
    if constexpr (IS_PAIR<V>) {
        return reduce_to_four(both(value.low, value.high), both);
    } else if constexpr (sizeof(V) == sizeof(Float32x4)) {
        return value;
    } else {
        Vector<typename LaneTypeOf<V>::Type, LANES_OF<V> / 2> halves[2];
        std::memcpy(halves, &value, sizeof(halves));
        return reduce_to_four(both(halves[0], halves[1]), both);
    }
}

// Reduces to one value.
template <class V, class Both>
inline auto reduce(const V& value, const Both& both) {
    const auto four = reduce_to_four(value, both);
    const auto two = both(four, shuffle<2, 3, 0, 1>(four));
    return both(two, shuffle<1, 0, 3, 2>(two))[0];
}

// Reduces two vectors at once; the results are the first two of four lanes.
template <class V, class Both>
inline auto reduce(const V& first, const V& second, const Both& both) {
    const auto a = reduce_to_four(first, both), b = reduce_to_four(second, both);
    const auto two = both(shuffle<0, 4, 1, 5>(a, b), shuffle<2, 6, 3, 7>(a, b));
    return both(two, shuffle<2, 3, 0, 1>(two));
}

constexpr auto add_lanes = [](const auto& a, const auto& b) { return a + b; };
constexpr auto max_lanes = [](const auto& a, const auto& b) {
    return map_registers([](const auto& x, const auto& y) { return x > y ? x : y; }, a, b);
};

inline float reduce_add(const Float32x16& value) { return reduce(value, add_lanes); }
inline float reduce_max(const Float32x16& value) { return reduce(value, max_lanes); }

// The bits of |value|, which as integers are ordered like the magnitudes; NaN is above infinity.
inline Int32x16 magnitude_bits(const Float32x16& value) { return bits_as<int32_t>(value) & 0x7fffffff; }
constexpr int32_t INFINITE = 0x7f800000;  // the bits of infinity

constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

// The nearest integer, for magnitudes below 2^22.
inline Float32x16 round_to_int(const Float32x16& value) { return (value + ROUNDING) - ROUNDING; }

// e^x: x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts: Cody and Waite 1980), then the Taylor series of
// e^r to r^7, whose error is below float32's rounding. The result is 0 below -87 and infinity above 88; NaN stays NaN.
inline Float32x16 exponential(const Float32x16& x) {
    const Float32x16 clamped = select(x < -87.33f, broadcast(-87.33f), select(x > 88.72f, broadcast(88.72f), x));
    const Float32x16 n = round_to_int(clamped * 1.44269504088896341f);
    const Float32x16 r = (clamped - n * 0.693145751953125f) - n * 1.428606765330187e-6f;
    Float32x16 p = broadcast(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // 2^128 overflows float32, so 2^n is applied as two factors.
    const Int32x16 power = convert<int32_t>(n);
    const Int32x16 half = power >> 1;
    const Float32x16 first = bits_as<float>((half + 127) << 23);
    const Float32x16 second = bits_as<float>((power - half + 127) << 23);
    Float32x16 result = p * first * second;
    result = select(x < -87.33f, Float32x16{}, result);
    result = select(x > 88.72f, broadcast(__builtin_inff()), result);
    return select(x != x, x, result);
}

inline float exponential(float x) {
    float lanes[LANES];
    store(lanes, exponential(broadcast(x)));
    return lanes[0];
}

// e^x for x <= 0, as exact as needed for results that are rounded to T. 0 below -87; NaN stays NaN.
inline Float32x16 exponential_for(const Float32x16& x, const float*) { return exponential(x); }

// x log2(e) = n + r with |r| <= 1/2, and 2^r by its Taylor series to r^5: the relative error is 2.4e-6, a thousandth of
// the rounding to bfloat16. n is added to the exponent bits; it is read from the low bits of the sum that rounds it.
inline Float32x16 exponential_for(const Float32x16& x, const BFloat16*) {
    constexpr float LOG2_E = 1.44269504088896341f;
    const Float32x16 clamped = select(x < -87.0f, broadcast(-87.0f), x);
    const Float32x16 n = clamped * LOG2_E + ROUNDING;
    const Float32x16 r = clamped * LOG2_E - (n - ROUNDING);
    Float32x16 p = broadcast(1.33335581e-3f);
    p = p * r + 9.61812911e-3f;
    p = p * r + 5.55041087e-2f;
    p = p * r + 2.40226507e-1f;
    p = p * r + 6.93147181e-1f;
    p = p * r + 1.0f;
    const Float32x16 result = bits_as<float>(bits_as<int32_t>(p) + (bits_as<int32_t>(n) << 23));
    return select(x < -87.0f, Float32x16{}, select(x != x, x, result));
}

// Whether any lane is greater than `than`; NaN is not.
inline bool any_greater(const Float32x16& values, float than) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(values), _mm512_set1_ps(than), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    const auto found = values > than;
    return _mm256_movemask_epi8(reinterpret_cast<__m256i>(found.low | found.high)) != 0;
#else
    return reduce_max(values) > than;
#endif
}

}  // namespace srv::SRV_ISA
