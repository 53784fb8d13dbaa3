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
    const Ints bits = fill<Ints>([=](auto& lanes, int lane) {
        Vector<int16_t, LANES_OF<decltype(lanes)>> both;
        std::memcpy(&both, from + lane * 2, sizeof(both));
        lanes = __builtin_convertvector(both, std::remove_reference_t<decltype(lanes)>);
    });
    return {to<float>((bits << 24) >> 24), to<float>(bits >> 8)};
}

inline Pair pair(const BFloat16* from) {
    const Ints bits = load_fours(from);
    return {bits_as<float>(bits << 16), bits_as<float>(bits & static_cast<int32_t>(0xffff0000))};
}

// Every other lane of two vectors, from lane `FIRST` on.
template <int FIRST, class V>
inline V alternate(const V& low, const V& high) {
    if constexpr (IS_TWO<V>) {
        return {alternate<FIRST>(low.low, low.high), alternate<FIRST>(high.low, high.high)};
    } else {
        Vector<int32_t, LANES_OF<V>> lanes;
        for (int i = 0; i < LANES_OF<V>; ++i) lanes[i] = 2 * i + FIRST;
        return __builtin_shuffle(low, high, lanes);
    }
}

inline Pair pair(const float* from) {
    const Floats low = load(from), high = load(from + LANES);
    return {alternate<0>(low, high), alternate<1>(low, high)};
}

// Two inputs in every lane.
inline Pair both(const float* from) { return {all(from[0]), all(from[1])}; }
inline Pair both(const BFloat16* from) {
    int32_t two;
    std::memcpy(&two, from, sizeof(two));
    const Ints bits = held(Ints{} + two);
    return {bits_as<float>(bits << 16), bits_as<float>(bits & static_cast<int32_t>(0xffff0000))};
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
#endif

template <class W, class X>
inline Floats dot(const Floats& sum, const W* weight, const X* x) {
    const Pair w = pair(weight), two = both(x);
    return sum + w.even * two.even + w.odd * two.odd;
}

}  // namespace srv::SRV_ISA
