// The product that all matrices go through: sixteen sums, each plus two weights times two inputs.
//
// Two inputs lie together because the processor's bfloat16 product multiplies and adds pairs (VDPBF16PS); float32
// keeps the same order, so that one loop serves both.
#pragma once

#include "vector.h"

namespace srv::SRV_ISA {

struct Pair {
    Floats even, odd;
};

// Two inputs' 8-bit integers of sixteen outputs, as bfloat16, which holds them exactly.
#if defined(__AVX512BF16__)
inline __m512bh widened(const int8_t* from) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + LANES)));
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}
#endif

// Weights of two inputs: lane = output.
inline Pair pair(const int8_t* from) {
    Halves both;
    std::memcpy(&both, from, sizeof(both));
    const Ints bits = __builtin_convertvector(both, Ints);
    return {__builtin_convertvector((bits << 24) >> 24, Floats), __builtin_convertvector((bits << 16) >> 24, Floats)};
}

inline Pair pair(const BFloat16* from) {
    Words bits;
    std::memcpy(&bits, from, sizeof(bits));
    return {reinterpret_cast<Floats>(bits << 16), reinterpret_cast<Floats>(bits & 0xffff0000u)};
}

inline Pair pair(const float* from) {
    const Floats low = load(from), high = load(from + LANES);
    return {__builtin_shuffle(low, high, Ints{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}),
            __builtin_shuffle(low, high, Ints{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31})};
}

#if defined(__AVX512BF16__)
inline Floats dot(Floats sum, const BFloat16* weight, const BFloat16* x) {
    int32_t both;
    std::memcpy(&both, x, sizeof(both));
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                     reinterpret_cast<__m512bh>(_mm512_loadu_si512(weight)),
                                                     reinterpret_cast<__m512bh>(_mm512_set1_epi32(both))));
}

inline Floats dot(Floats sum, const int8_t* weight, const BFloat16* x) {
    int32_t both;
    std::memcpy(&both, x, sizeof(both));
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), widened(weight),
                                                     reinterpret_cast<__m512bh>(_mm512_set1_epi32(both))));
}
#else
template <class W>
inline Floats dot(Floats sum, const W* weight, const BFloat16* x) {
    const Pair w = pair(weight);
    return sum + w.even * to_float(x[0]) + w.odd * to_float(x[1]);
}
#endif

template <class W>
inline Floats dot(Floats sum, const W* weight, const float* x) {
    const Pair w = pair(weight);
    return sum + w.even * x[0] + w.odd * x[1];
}

}  // namespace srv::SRV_ISA
