// Multiply-accumulate for float32, bfloat16 and int8 weights: adds the products of two inputs to float32 accumulators.
//
// Pairs of inputs are interleaved because the processor's bfloat16 dot product takes pairs (VDPBF16PS, BFDOT). int8
// weights, which are converted to bfloat16, use the same layout, so that one loop serves both. float32 is not
// interleaved.
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

inline Float32x16 dot(const Float32x16& sum, const BFloat16Pairs& weights, int32_t both) {
    return reinterpret_cast<Float32x16>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), weights,
                                                     reinterpret_cast<__m512bh>(_mm512_set1_epi32(both))));
}
#elif defined(SRV_BFLOAT16_PAIRS)
using BFloat16Pairs = Int32x16;

inline BFloat16Pairs load_pairs(const BFloat16* from) { return load_dwords(from); }

// int8 weights as bfloat16, which represents them exactly.
inline BFloat16Pairs load_pairs(const int8_t* from) {
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
