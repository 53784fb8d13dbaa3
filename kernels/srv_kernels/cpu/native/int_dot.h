// Symmetric quantization to integers, and integer dot products: sixteen int32 accumulators, each plus the products of
// four bytes with four bytes or int16s. All of it is exact.
//
// Without a 4-byte dot product (VPDPBUSD, USDOT), the even bytes and then the odd ones are widened and multiplied as
// int16 pairs (PMADDWD). Products of small values (PMADDUBSW) can be summed in 16 bits first; for larger weights,
// activations are quantized to 16 bits, at no extra cost.
#pragma once

#include <bit>
#include <utility>

#include "vector.h"

namespace srv::SRV_ISA {

constexpr float MIN_SCALE = 0x1p-120f;  // so that no scale's inverse is infinite

// The nearest integer to x * inverse; 0 for NaN.
inline Float32x16 quantize(const Float32x16& x, const float inverse) {
    const Float32x16 nearest = round_to_int(x * inverse);
    return select(nearest == nearest, nearest, Float32x16{});
}

// The scale that maps magnitudes up to `largest` (given by its bits) to integers up to `limit`, and its inverse. If
// `largest` is not finite, they are NaN and 0, so that no product with the scale is finite.
struct QuantScale {
    float value, inverse;

    QuantScale(int32_t largest, float limit) {
        const float needed = std::bit_cast<float>(largest) * (1.0f / limit);
        value = needed > MIN_SCALE ? needed : MIN_SCALE;
        inverse = 1.0f / value;
        if (largest >= INFINITE) value = __builtin_nanf(""), inverse = 0;
    }

    Int32x16 quantize(const Float32x16& x) const { return convert<int32_t>(SRV_ISA::quantize(x, inverse)); }
};

// The scale of x [count].
template <class T>
inline QuantScale quant_scale_of(const T* x, int64_t count, float limit) {
    Int32x16 maximum{};
    for (int64_t i = 0; i < count; i += LANES) maximum = max_lanes(magnitude_bits(load(x + i)), maximum);
    return QuantScale(reduce(maximum, max_lanes), limit);
}

// The same four bytes in every lane.
inline Int32x16 broadcast_dword(const void* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof(four));
    return Int32x16{} + four;
}

#if defined(__x86_64__)
// Hides a value from the optimizer, which would reassociate sums and need more registers than there are.
template <class V>
inline V opaque(V value) {
    asm("" : "+v"(value));
    return value;
}

// PMADDWD: multiplies int16 pairs and adds the two products.
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

// The even (0) or odd (1) bytes, zero-extended to 16 bits.
template <class V>
inline V unsigned_bytes_at(V weights, int odd) {
    using Shorts = Vector<uint16_t, LANES_OF<V> * 2>;
    return odd == 0 ? weights & 0x00ff00ff : reinterpret_cast<V>(reinterpret_cast<Shorts>(weights) >> 8);
}

// Likewise, sign-extended.
template <class V>
inline V signed_bytes_at(V weights, int odd) {
    const auto pairs = reinterpret_cast<Vector<int16_t, LANES_OF<V> * 2>>(weights);
    return reinterpret_cast<V>(odd == 0 ? (pairs << 8) >> 8 : pairs >> 8);
}

// The bytes of a table of 16, repeated in every 16 bytes of `table`, at the indices in the bytes of `at`, each below 16.
inline Int32x16 byte_lookup(const Int32x16& table, const Int32x16& at) {
    return map_registers(
        []<class V>(const V& entries, const V& indices) {
#if defined(__AVX512BW__)
            return reinterpret_cast<V>(
                _mm512_shuffle_epi8(reinterpret_cast<__m512i>(entries), reinterpret_cast<__m512i>(indices)));
#elif defined(__AVX2__)
            return reinterpret_cast<V>(
                _mm256_shuffle_epi8(reinterpret_cast<__m256i>(entries), reinterpret_cast<__m256i>(indices)));
#elif defined(__aarch64__)
            return reinterpret_cast<V>(
                vqtbl1q_u8(reinterpret_cast<uint8x16_t>(entries), reinterpret_cast<uint8x16_t>(indices)));
#else
            uint8_t from[sizeof(V)], which[sizeof(V)], found[sizeof(V)];
            std::memcpy(from, &entries, sizeof(V));
            std::memcpy(which, &indices, sizeof(V));
            for (size_t i = 0; i < sizeof(V); ++i) found[i] = from[which[i]];
            V to;
            std::memcpy(&to, found, sizeof(V));
            return to;
#endif
        },
        table, at);
}

// int32 sums plus the products of four bytes each; unsigned weights, signed x.
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

// int32 sums plus the products of two int16 each.
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

// Stores the lanes as int16. In every group of four the even ones precede the odd ones, the order in which
// `unsigned_bytes_at` and `signed_bytes_at` split the other operand.
inline void store_int16(int16_t* to, const Int32x16& value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    constexpr int EVEN_FIRST = 0b11'01'10'00;  // first, third, second, fourth of four
    const __m256i low = reinterpret_cast<__m256i>(value.low), high = reinterpret_cast<__m256i>(value.high);
    // The pack instruction interleaves the two sources by groups of four.
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
// PMADDUBSW: unsigned times signed bytes, added in pairs; the sums must fit 16 bits.
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

// int16 sums, two per lane, plus the products of two bytes each. For weights up to 31 and x from -127 to 127, four such
// additions fit 16 bits.
static_assert(4 * 2 * 31 * 127 < 1 << 15);
inline Int32x16 dot_int16_sums(const Int32x16& sum, const Int32x16& weights, const Int32x16& x) {
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
