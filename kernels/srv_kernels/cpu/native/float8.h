// 8-bit floats of KV pools. Reading is exact. Writing rounds to nearest, ties to even, and limits magnitudes to the
// largest finite number; NaN stays NaN.
//
//     type          bits after the sign          largest   infinity, NaN
//     Float8E4M3    exponent 4, fraction 3           448   NaN: 7f
//     Float8E5M2    exponent 5, fraction 2        57,344   7c; NaN: 7d to 7f
#pragma once

#include <bit>

#include "vector.h"

namespace srv::SRV_ISA {

struct Float8E4M3 {
    uint8_t bits;
    static constexpr int FRACTION = 3, BIAS = 7, SPECIAL = 0x7f;  // SPECIAL: the first code that is not finite
    static constexpr float LARGEST = 448;
};

struct Float8E5M2 {
    uint8_t bits;
    static constexpr int FRACTION = 2, BIAS = 15, SPECIAL = 0x7c;
    static constexpr float LARGEST = 57344;
};

template <class P>
constexpr bool IS_FLOAT8 = std::is_same_v<P, Float8E4M3> || std::is_same_v<P, Float8E5M2>;

#if defined(__AVX2__)
// Codes, widened to 16 bits, as half precision: e5m2 is its upper byte. The exponent of e4m3 has a bias that is smaller
// by 8, so that the result is 1/256 of the number. Conversions of half precision are as fast for subnormals.
template <class F, class V>
inline V half_bits(const V& codes) {
    if constexpr (std::is_same_v<F, Float8E5M2>) return codes << 8;
    const V magnitude = codes & 0x7f;
    const V infinite = reinterpret_cast<V>(magnitude == 0x7f) & 0x7c00;  // makes the code of NaN a half's NaN
    return (magnitude << 7) | ((codes & 0x80) << 8) | infinite;
}
#endif

template <class F>
    requires IS_FLOAT8<F>
inline Float32x16 load(const F* from) {
    return build<Float32x16>([=](auto& lanes, int lane) {
        using Lanes = std::remove_reference_t<decltype(lanes)>;
        constexpr int COUNT = LANES_OF<Lanes>;
#if defined(__AVX2__)
        constexpr float UNIT = std::is_same_v<F, Float8E5M2> ? 1 : 256;
        using Halves = Vector<uint16_t, COUNT>;
#if defined(__AVX512F__)
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + lane));
        const auto halves = half_bits<F>(reinterpret_cast<Halves>(_mm256_cvtepu8_epi16(codes)));
        lanes = reinterpret_cast<Lanes>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(halves)));
#else
        const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + lane));
        const auto halves = half_bits<F>(reinterpret_cast<Halves>(_mm_cvtepu8_epi16(codes)));
        lanes = reinterpret_cast<Lanes>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(halves)));
#endif
        if constexpr (UNIT != 1) lanes *= UNIT;
#else
        Vector<uint8_t, COUNT> codes;
        std::memcpy(&codes, from + lane, sizeof(codes));
        const auto words = __builtin_convertvector(codes, Vector<uint32_t, COUNT>);
        const auto magnitude = words & 0x7fu, fraction = magnitude << (23 - F::FRACTION);
        // float32 has the same fields with a larger bias; the factor is right for subnormals as well.
        constexpr float UNIT = std::bit_cast<float>(static_cast<uint32_t>(254 - F::BIAS) << 23);  // 2^(127 - BIAS)
        const auto finite = bits_as<uint32_t>(reinterpret_cast<Lanes>(fraction) * UNIT);
        const auto special = fraction | 0x7f800000u;
        const auto number = magnitude >= static_cast<uint32_t>(F::SPECIAL) ? special : finite;
        lanes = reinterpret_cast<Lanes>(number | (words & 0x80u) << 24);
#endif
    });
}

template <class F>
    requires IS_FLOAT8<F>
inline void store(F* to, const Float32x16& value) {
    constexpr int DROPPED = 23 - F::FRACTION;
    constexpr int32_t LIMIT = std::bit_cast<int32_t>(F::LARGEST), NORMAL = (128 - F::BIAS) << 23;
    // Subnormals are as far apart as the float32 numbers around MAGIC, so that adding it rounds to one.
    constexpr int32_t MAGIC = (151 - F::BIAS - F::FRACTION) << 23;
    const Int32x16 magnitude = magnitude_bits(value);
    const Int32x16 limited = select(magnitude > LIMIT, Int32x16{} + LIMIT, magnitude);
    const Int32x16 rounding = ((limited >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1);
    const Int32x16 normal = (limited - ((127 - F::BIAS) << 23) + rounding) >> DROPPED;
    const Int32x16 small = bits_as<int32_t>(bits_as<float>(limited) + std::bit_cast<float>(MAGIC)) - MAGIC;
    const Int32x16 finite = select(limited < NORMAL, small, normal);
    const Int32x16 code = select(magnitude > INFINITE, Int32x16{} + 0x7f, finite);
    store_bytes(to, code | (bits_as<int32_t>(value) >> 24 & 0x80));
}

}  // namespace srv::SRV_ISA
