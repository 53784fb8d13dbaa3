// How a pool keeps the keys and the values of BLOCK_TOKENS tokens of one head, in each of its types.
//
// Of keys, TOGETHER columns of a token lie beside one another, then those of the next token; of values, TOGETHER tokens of
// a column, then those of the next column: one product serves queries times keys and weights times values.
//
//     type       together  multiplied by
//     float32    1         float32
//     float16    1         float32, as it is widened
//     bfloat16   2         bfloat16 where the processor has a product of pairs, else float32
//     int8       4         whole numbers of 16 bits, in units of a query's largest magnitude / 32,767, or of that of the
//                          weights of 64 values; sums are exact
//
// Bytes times a scale stand for a token's key, or value, of the head: 1/127 of its largest magnitude. The scales lie behind
// the bytes of a block, as float32 [BLOCK_TOKENS]. That of a key or value that is not finite is NaN.
#pragma once

#include "int_dot.h"
#include "kernels.h"
#include "float_dot.h"

namespace srv::SRV_ISA {

template <class P>
constexpr bool QUANTIZED = std::is_same_v<P, int8_t>;

template <class P>
constexpr int64_t KV_INTERLEAVE = QUANTIZED<P> ? 4 : std::is_same_v<P, BFloat16> ? 2 : 1;

// What keys and values of type P are multiplied by, and the sums of such products.
template <class P>
using KVOperand = std::conditional_t<QUANTIZED<P>, int16_t, std::conditional_t<std::is_same_v<P, BFloat16>, Operand<P>, float>>;
template <class P>
using KVAccumulator = std::conditional_t<QUANTIZED<P>, Int32x16, Float32x16>;

constexpr float MAX_INT8 = 127, MAX_INT16 = 32767;
static_assert(MAX_HEAD_DIM * static_cast<int64_t>(MAX_INT8 * MAX_INT16) <= INT32_MAX);

template <class P>
inline int64_t elements_of_block(int64_t dim) {
    return BLOCK_TOKENS * (dim + (QUANTIZED<P> ? static_cast<int64_t>(sizeof(float)) : 0));
}

// The tokens' scales, of a block that begins at `block`.
inline float* scales_of(int8_t* block, int64_t dim) { return reinterpret_cast<float*>(block + BLOCK_TOKENS * dim); }
inline const float* scales_of(const int8_t* block, int64_t dim) {
    return reinterpret_cast<const float*>(block + BLOCK_TOKENS * dim);
}

// A query as keys are multiplied by it; returns what one of its whole numbers is worth, 1 where there are none.
template <class P, class T>
inline float store_query(KVOperand<P>* to_query, const T* x, int64_t dim) {
    if constexpr (QUANTIZED<P>) {
        const QuantScale scale = quant_scale_of(x, dim, MAX_INT16);
        for (int64_t d = 0; d < dim; d += LANES) store_int16(to_query + d, scale.quantize(load(x + d)));
        return scale.value;
    } else {
        for (int64_t d = 0; d < dim; d += LANES) store(to_query + d, load(x + d));
        return 1;
    }
}

// One token's key or value in a pool's type, its columns beside one another: x itself, or what is made of it in `memory`;
// of bytes, its scale too.
template <class P, class T>
inline const P* to_pool_type(P* memory, float* scale, const T* x, int64_t dim) {
    if constexpr (std::is_same_v<P, T>) {
        return x;
    } else if constexpr (QUANTIZED<P>) {
        const QuantScale quant_scale = quant_scale_of(x, dim, MAX_INT8);
        for (int64_t d = 0; d < dim; d += LANES) store_bytes(memory + d, quant_scale.quantize(load(x + d)));
        *scale = quant_scale.value;
    } else {
        for (int64_t d = 0; d < dim; d += LANES) store(memory + d, load(x + d));
    }
    return memory;
}

// The key of the token at a place of its block.
template <class P>
inline void store_key(P* block, int64_t place, const P* row, int64_t dim) {
    constexpr int64_t INTERLEAVE = KV_INTERLEAVE<P>;
    P* at = block + place * INTERLEAVE;
    for (int64_t d = 0; d < dim; d += INTERLEAVE, at += BLOCK_TOKENS * INTERLEAVE) {
        std::memcpy(at, row + d, INTERLEAVE * sizeof(P));
    }
}

template <class P>
inline void store_value(P* block, int64_t place, const P* row, int64_t dim) {
    constexpr int64_t INTERLEAVE = KV_INTERLEAVE<P>;
    P* at = block + place / INTERLEAVE * dim * INTERLEAVE + place % INTERLEAVE;
    for (int64_t d = 0; d < dim; ++d) at[d * INTERLEAVE] = row[d];
}

// To the sums of COUNT rows: VECTORS * LANES times TOGETHER numbers of a block, times the rows' own TOGETHER, which lie
// `stride` apart.
template <int COUNT, int VECTORS>
inline void add_kv_products(Float32x16 (&sums)[COUNT][VECTORS], const BFloat16* kv, const Operand<BFloat16>* x, int64_t stride) {
    add_products(sums, kv, x, stride);
}

template <int COUNT, int VECTORS, class P>
    requires(KV_INTERLEAVE<P> == 1)
inline void add_kv_products(Float32x16 (&sums)[COUNT][VECTORS], const P* kv, const float* x, int64_t stride) {
    Float32x16 weight[VECTORS];
    for (int v = 0; v < VECTORS; ++v) weight[v] = load(kv + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
        const Float32x16 input = broadcast(x[r * stride]);
        for (int v = 0; v < VECTORS; ++v) sums[r][v] += weight[v] * input;
    }
}

template <int PLACE, int COUNT, int VECTORS>
inline void add_pairs(Int32x16 (&sums)[COUNT][VECTORS], const Int32x16 (&bytes)[VECTORS], const int16_t* x, int64_t stride) {
    Int32x16 pairs[VECTORS];
    for (int v = 0; v < VECTORS; ++v) pairs[v] = map_registers([](const auto& b) { return signed_bytes_at(b, PLACE); }, bytes[v]);
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
        const Int32x16 input = broadcast_dword(x + r * stride + PLACE * 2);
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot_pairs(sums[r][v], pairs[v], input);
    }
}

template <int COUNT, int VECTORS>
inline void add_kv_products(Int32x16 (&sums)[COUNT][VECTORS], const int8_t* kv, const int16_t* x, int64_t stride) {
    Int32x16 bytes[VECTORS];
    for (int v = 0; v < VECTORS; ++v) bytes[v] = load_dwords(kv + v * LANES * 4);
    add_pairs<0>(sums, bytes, x, stride);
    add_pairs<1>(sums, bytes, x, stride);
}

}  // namespace srv::SRV_ISA
