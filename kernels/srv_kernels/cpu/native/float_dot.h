// Multiply-accumulate for float32, bfloat16, int8 and FP8 weights: adds the products of two inputs to float32
// accumulators.
//
// Pairs of inputs are interleaved because the processor's bfloat16 dot product takes pairs (VDPBF16PS, BFDOT). int8
// and FP8 weights, which are converted to bfloat16, use the same layout, so that one loop serves all. float32 is not
// interleaved.
//
// FP8 weights become 1 / FP8_FACTOR of their values: with the sign, exponent and fraction at their places in a float16,
// whose exponent has 8 more bias. Conversions of float16 are exact and as fast for subnormals, and so is the result in
// bfloat16.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace srv::SRV_ISA {

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define SRV_BFLOAT16_PAIRS  // the processor has a bfloat16 dot product
#endif

// The type of inputs as they are multiplied. Without a bfloat16 dot product they are converted to float32 beforehand.
#if defined(SRV_BFLOAT16_PAIRS)
constexpr bool WIDENS_BFLOAT16 = false;
#else
constexpr bool WIDENS_BFLOAT16 = true;
#endif
template <class T>
using Operand = std::conditional_t<WIDENS_BFLOAT16, float, T>;

// The number of contiguous weights of an output: both of a pair, or one for float32.
template <class W>
constexpr int64_t INTERLEAVE_OF = std::is_same_v<W, float> ? 1 : INTERLEAVE;

// The weights of sixteen outputs for the first (INPUT 0) or the second input of a pair.
template <int INPUT>
inline Float32x16 load_weights(const BFloat16* from) {
    const Int32x16 both = load_dwords(from);
    return bits_as<float>(INPUT == 0 ? both << 16 : both & static_cast<int32_t>(0xffff0000));
}

template <int INPUT>
inline Float32x16 load_weights(const int8_t* from) {
    const Int32x16 both = load_widened<int16_t>(from);
    return convert<float>(INPUT == 0 ? (both << 24) >> 24 : both >> 8);
}

#if defined(__AVX2__)
// Sixteen FP8 weights of the first or the second input of a pair, as the float16 of their bits.
template <int INPUT>
inline __m256i fp8_halves(const Fp8* from) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i upper = INPUT == 0 ? _mm256_slli_epi16(both, 8) : both;
    return _mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
}
#endif

template <int INPUT>
inline Float32x16 load_weights(const Fp8* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Float32x16>(_mm512_cvtph_ps(fp8_halves<INPUT>(from)));
#elif defined(__AVX2__)
    using Lanes = decltype(Float32x16::low);
    const __m256i halves = fp8_halves<INPUT>(from);
    return {reinterpret_cast<Lanes>(_mm256_cvtph_ps(_mm256_castsi256_si128(halves))),
            reinterpret_cast<Lanes>(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)))};
#else
    const UInt32x16 both = load_widened<uint16_t>(from);
    const UInt32x16 magnitude = INPUT == 0 ? (both & 0x7fu) << 20 : (both & 0x7f00u) << 12;
    const UInt32x16 sign = INPUT == 0 ? (both & 0x80u) << 24 : (both & 0x8000u) << 16;
    return bits_as<float>(magnitude | sign) * 0x1p112f;
#endif
}

template <int INPUT>
inline Float32x16 load_weights(const float* from) {
    return load(from + INPUT * BLOCK_OUTPUTS);
}

#if defined(__AVX512BF16__)
using BFloat16Pairs = __m512bh;

inline BFloat16Pairs load_pairs(const BFloat16* from) {
    return reinterpret_cast<BFloat16Pairs>(_mm512_loadu_si512(from));
}

// int8 weights as bfloat16, which represents them exactly.
inline BFloat16Pairs load_pairs(const int8_t* from) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + LANES)));
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}

// The exponent of a bfloat16 has 112 more bias than that of 1 / FP8_FACTOR of an FP8 weight. Subnormals, which are
// multiples of 2^-17 then, are looked up: the dot product would read those of bfloat16 as zeros.
inline BFloat16Pairs load_pairs(const Fp8* from) {
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i magnitudes = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitudes, 4), _mm512_set1_epi16(112 << 7));
    const __m512i subnormal = _mm512_broadcast_i32x4(
        _mm_setr_epi16(0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860));
    const __mmask32 small = _mm512_cmplt_epu16_mask(magnitudes, _mm512_set1_epi16(8));
    const __m512i unsigned_bits = _mm512_mask_permutexvar_epi16(normal, small, magnitudes, subnormal);
    const __m512i signs = _mm512_and_si512(words, _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
    return reinterpret_cast<BFloat16Pairs>(_mm512_or_si512(unsigned_bits, signs));
}

inline Float32x16 dot(const Float32x16& sum, const BFloat16Pairs& weights, int32_t both) {
    return reinterpret_cast<Float32x16>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), weights,
                                                     reinterpret_cast<__m512bh>(_mm512_set1_epi32(both))));
}
#elif defined(SRV_BFLOAT16_PAIRS)
using BFloat16Pairs = Int32x16;

inline BFloat16Pairs load_pairs(const BFloat16* from) { return load_dwords(from); }

// int8 and FP8 weights as bfloat16, which represents them exactly.
template <class W>
    requires(sizeof(W) == 1)
inline BFloat16Pairs load_pairs(const W* from) {
    const Int32x16 first = bits_as<int32_t>(load_weights<0>(from)), second = bits_as<int32_t>(load_weights<1>(from));
    return bits_as<int32_t>(bits_as<uint32_t>(first) >> 16) | (second & static_cast<int32_t>(0xffff0000));
}

inline Float32x16 dot(const Float32x16& sum, const BFloat16Pairs& weights, int32_t both) {
    return map_registers(
        [both]<class F, class V>(const F& to, const V& w) {
            return reinterpret_cast<F>(vbfdotq_f32(reinterpret_cast<float32x4_t>(to), reinterpret_cast<bfloat16x8_t>(w),
                                                   reinterpret_cast<bfloat16x8_t>(V{} + both)));
        },
        sum, weights);
}
#endif

template <int INPUT, int COUNT, int VECTORS, class W>
inline void add_products_at(Float32x16 (&sums)[COUNT][VECTORS], const W* weights, const float* x, int64_t stride) {
    Float32x16 weight[VECTORS];
    for (int v = 0; v < VECTORS; ++v) weight[v] = load_weights<INPUT>(weights + v * LANES * INTERLEAVE_OF<W>);
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
        const Float32x16 input = broadcast(x[r * stride + INPUT]);
        for (int v = 0; v < VECTORS; ++v) sums[r][v] += weight[v] * input;
    }
}

// sums[r] += weights of two inputs * the two inputs of row r, for COUNT rows that are `stride` apart and VECTORS *
// LANES outputs. Without a pairwise dot product the inputs are processed one by one, so that the weights of only one
// occupy registers.
template <int COUNT, int VECTORS, class W>
inline void add_products(Float32x16 (&sums)[COUNT][VECTORS], const W* weights, const float* x, int64_t stride) {
    add_products_at<0>(sums, weights, x, stride);
    add_products_at<1>(sums, weights, x, stride);
}

#if defined(SRV_BFLOAT16_PAIRS)
template <int COUNT, int VECTORS, class W>
inline void add_products(Float32x16 (&sums)[COUNT][VECTORS], const W* weights, const BFloat16* x, int64_t stride) {
    BFloat16Pairs pairs[VECTORS];
    for (int v = 0; v < VECTORS; ++v) pairs[v] = load_pairs(weights + v * LANES * 2);
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
        int32_t both;
        std::memcpy(&both, x + r * stride, sizeof(both));
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot(sums[r][v], pairs[v], both);
    }
}
#endif

}  // namespace srv::SRV_ISA
