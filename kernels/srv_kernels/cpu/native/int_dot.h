// The products of bytes that all whole numbers go through: sixteen sums, each plus four bytes times four others, or times
// four numbers of 16 bits. All of it is exact.
//
// Where a processor has no such product (VPDPBUSD, USDOT), that of pairs of 16 bits (PMADDWD) takes the bytes of even
// places and then those of odd ones. Where numbers are small, products of bytes (PMADDUBSW) can be summed in 16 bits
// first; where they are not, steps may as well have 16 bits.
#pragma once

#include <bit>
#include <utility>

#include "vector.h"

namespace srv::SRV_ISA {

constexpr float MIN_SCALE = 0x1p-120f;  // so that no unit's inverse is infinite

// The nearest whole numbers of units, of which each is 1 / inverse; of what is not a number, zero.
inline Float32x16 quantize(const Float32x16& x, const float inverse) {
    const Float32x16 count = round_to_int(x * inverse);
    return select(count == count, count, Float32x16{});
}

// What whole numbers of up to `most` are worth that stand for numbers of up to `largest` (its bits), and the inverse of
// that; NaN and zero where the largest is not finite, so that no product of these is finite.
struct QuantScale {
    float value, inverse;

    QuantScale(int32_t largest, float most) {
        const float needed = std::bit_cast<float>(largest) * (1.0f / most);
        value = needed > MIN_SCALE ? needed : MIN_SCALE;
        inverse = 1.0f / value;
        if (largest >= INFINITE) value = __builtin_nanf(""), inverse = 0;
    }

    Int32x16 quantize(const Float32x16& x) const { return convert<int32_t>(SRV_ISA::quantize(x, inverse)); }
};

// The unit of x [count].
template <class T>
inline QuantScale quant_scale_of(const T* x, int64_t count, float most) {
    Int32x16 largest_so_far{};
    for (int64_t i = 0; i < count; i += LANES) largest_so_far = max_lanes(magnitude_bits(load(x + i)), largest_so_far);
    return QuantScale(reduce(largest_so_far, max_lanes), most);
}

// Every lane: these four bytes.
inline Int32x16 broadcast_dword(const void* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof(four));
    return Int32x16{} + four;
}

#if defined(__x86_64__)
// The same vector, as a compiler must leave it: it would take sums apart to add in pairs, with more registers than there
// are.
template <class V>
inline V opaque(V value) {
    asm("" : "+v"(value));
    return value;
}

// Pairs of 16 bits, multiplied and added.
template <class V>
inline V pair_products(V a, V b) {
    if constexpr (sizeof(V) == 64) {
        return reinterpret_cast<V>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
    } else if constexpr (sizeof(V) == 32) {
        return reinterpret_cast<V>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
    } else {
        return reinterpret_cast<V>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
    }
}
#endif

// The unsigned bytes of even places (0) or of odd ones (1), as 16 bits each.
template <class V>
inline V unsigned_bytes_at(V weights, int places) {
    using Shorts = Vector<uint16_t, LANES_OF<V> * 2>;
    return places == 0 ? weights & 0x00ff00ff : reinterpret_cast<V>(reinterpret_cast<Shorts>(weights) >> 8);
}

// The signed ones.
template <class V>
inline V signed_bytes_at(V weights, int places) {
    const auto pairs = reinterpret_cast<Vector<int16_t, LANES_OF<V> * 2>>(weights);
    return reinterpret_cast<V>(places == 0 ? (pairs << 8) >> 8 : pairs >> 8);
}

// Sums of 32 bits plus the products of four bytes each: numbers from 0 to 255, steps from -128 to 127.
inline Int32x16 dot(const Int32x16& sum, const Int32x16& weights, const Int32x16& x) {
    return map_registers(
        []<class V>(const V& to, const V& n, const V& s) {
#if defined(__AVX512VNNI__)
            return reinterpret_cast<V>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(to), reinterpret_cast<__m512i>(n),
                                                           reinterpret_cast<__m512i>(s)));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
            return reinterpret_cast<V>(vusdotq_s32(reinterpret_cast<int32x4_t>(to), reinterpret_cast<uint8x16_t>(n),
                                                   reinterpret_cast<int8x16_t>(s)));
#elif defined(__x86_64__)
            const V even = pair_products(unsigned_bytes_at(n, 0), signed_bytes_at(s, 0));
            return opaque(opaque(to + even) + pair_products(unsigned_bytes_at(n, 1), signed_bytes_at(s, 1)));
#else
            V total = to;
            for (int i = 0; i < 4; ++i) total += ((n >> (8 * i)) & 255) * (s << (24 - 8 * i) >> 24);
            return total;
#endif
        },
        sum, weights, x);
}

// Sums of 32 bits plus the products of two numbers of 16 bits each.
inline Int32x16 dot_pairs(const Int32x16& sum, const Int32x16& pairs, const Int32x16& others) {
    return map_registers(
        []<class V>(const V& to, const V& a, const V& b) {
#if defined(__AVX512VNNI__)
            return reinterpret_cast<V>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(to), reinterpret_cast<__m512i>(a),
                                                           reinterpret_cast<__m512i>(b)));
#elif defined(__x86_64__)
            return opaque(to + pair_products(a, b));
#elif defined(__aarch64__)
            const auto x = reinterpret_cast<int16x8_t>(a), y = reinterpret_cast<int16x8_t>(b);
            const auto products = vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
            return to + reinterpret_cast<V>(products);
#else
            return to + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
        },
        sum, pairs, others);
}

// The lanes as 16 bits each. Of every four those of even places lie before those of odd ones, as `bytes_at` gives what
// they are multiplied by.
inline void store_int16(int16_t* to, const Int32x16& value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    constexpr int EVEN_FIRST = 0b11'01'10'00;  // of four the first, third, second, fourth
    const __m256i low = reinterpret_cast<__m256i>(value.low), high = reinterpret_cast<__m256i>(value.high);
    // Packing takes four from the one and four from the other in turn.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), EVEN_FIRST);
    const __m256i fours = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, EVEN_FIRST), EVEN_FIRST);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), fours);
#else
    for_each_register(value, [=](const auto& lanes, int lane) {
        const auto ordered = [&]<int... AT>(std::integer_sequence<int, AT...>) {
            return shuffle<(AT & ~3) + ((AT & 1) << 1) + ((AT & 2) >> 1)...>(lanes);
        }(std::make_integer_sequence<int, LANES_OF<decltype(lanes)>>());
        const auto words = __builtin_convertvector(ordered, Vector<int16_t, LANES_OF<decltype(lanes)>>);
        std::memcpy(to + lane, &words, sizeof(words));
    });
#endif
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#define SRV_INT8_PAIRS
// Unsigned bytes times signed ones, added in pairs of which the sum must fit 16 bits (PMADDUBSW).
template <class V>
inline V byte_pair_products(V weights, V x) {
    if constexpr (sizeof(V) == 64) {
        return reinterpret_cast<V>(
            _mm512_maddubs_epi16(reinterpret_cast<__m512i>(weights), reinterpret_cast<__m512i>(x)));
    } else {
        return reinterpret_cast<V>(
            _mm256_maddubs_epi16(reinterpret_cast<__m256i>(weights), reinterpret_cast<__m256i>(x)));
    }
}

// Sums of 16 bits, two a lane, plus the products of two bytes each. Of numbers up to 31 and steps from -127 to 127, four
// such additions fit.
static_assert(4 * 2 * 31 * 127 < 1 << 15);
inline Int32x16 dot_short(const Int32x16& sum, const Int32x16& weights, const Int32x16& x) {
    return map_registers(
        []<class V>(const V& to, const V& n, const V& s) {
            using Shorts = Vector<int16_t, LANES_OF<V> * 2>;
            const auto products = reinterpret_cast<Shorts>(byte_pair_products(n, s));
            return opaque(reinterpret_cast<V>(reinterpret_cast<Shorts>(to) + products));
        },
        sum, weights, x);
}
#endif

#if defined(SRV_INT8_PAIRS) && !defined(__AVX512F__)
#define SRV_INT16_ACTIVATIONS
#endif

}  // namespace srv::SRV_ISA
