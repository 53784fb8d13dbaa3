// The layout of a KV block, the keys or values of BLOCK_TOKENS tokens of one head, for each pool type.
//
// Keys: [dim / n][BLOCK_TOKENS][n columns]. Values: [BLOCK_TOKENS / n][dim][n tokens]. Interleaving n elements along
// the reduced axis lets one dot product serve both QK^T and PV.
//
//     pool type   n   multiplied as
//     float32     1   float32
//     float16     1   float32, widened as it is loaded
//     float8      1   likewise
//     bfloat16    2   bfloat16 if the processor has its dot product, otherwise float32
//     int8        4   int16; queries, and the softmax weights of 64 tokens, are quantized to +-32,767; sums are exact
//
// int8 has a scale per token and head, 1/127 of the largest magnitude, stored after the block's bytes as float32
// [BLOCK_TOKENS]. The scale of a key or value that is not finite is NaN.
//
// float8 has a scale for all keys and one for all values: blocks hold vectors divided by it.
#pragma once

#include "float8.h"
#include "float_dot.h"
#include "int_dot.h"
#include "kernels.h"

namespace srv::SRV_ISA {

template <class P>
constexpr bool QUANTIZED = std::is_same_v<P, int8_t>;

template <class P>
constexpr int64_t KV_INTERLEAVE = QUANTIZED<P> ? 4 : std::is_same_v<P, BFloat16> ? 2 : 1;

// The type that keys and values of type P are multiplied by, and the accumulator of the products.
template <class P>
using KVOperand =
    std::conditional_t<QUANTIZED<P>, int16_t, std::conditional_t<std::is_same_v<P, BFloat16>, Operand<P>, float>>;
template <class P>
using KVAccumulator = std::conditional_t<QUANTIZED<P>, Int32x16, Float32x16>;

constexpr float MAX_INT8 = 127, MAX_INT16 = 32767;
static_assert(MAX_HEAD_DIM * static_cast<int64_t>(MAX_INT8 * MAX_INT16) <= INT32_MAX);

template <class P>
inline int64_t elements_of_block(int64_t dim) {
    return BLOCK_TOKENS * (dim + (QUANTIZED<P> ? static_cast<int64_t>(sizeof(float)) : 0));
}

// The scales of a block's tokens.
inline float* scales_of(int8_t* block, int64_t dim) { return reinterpret_cast<float*>(block + BLOCK_TOKENS * dim); }
inline const float* scales_of(const int8_t* block, int64_t dim) {
    return reinterpret_cast<const float*>(block + BLOCK_TOKENS * dim);
}

// Converts a query to the type that keys are multiplied by; returns its scale, 1 unless it is quantized.
template <class P, class T>
inline float store_query(KVOperand<P>* out, const T* x, int64_t dim) {
    if constexpr (QUANTIZED<P>) {
        const QuantScale scale = quant_scale_of(x, dim, MAX_INT16);
        for (int64_t d = 0; d < dim; d += LANES) store_int16(out + d, scale.quantize(load(x + d)));
        return scale.value;
    } else {
        for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(x + d));
        return 1;
    }
}

// Converts a token's key or value to the pool's type: returns x itself, or `memory` with the result. For int8, stores
// the token's scale. all_scale: that of float8.
template <class P, class T>
inline const P* to_pool_type(P* memory, float* scale, float all_scale, const T* x, int64_t dim) {
    if constexpr (std::is_same_v<P, T>) {
        return x;
    } else if constexpr (QUANTIZED<P>) {
        const QuantScale quant_scale = quant_scale_of(x, dim, MAX_INT8);
        for (int64_t d = 0; d < dim; d += LANES) store_bytes(memory + d, quant_scale.quantize(load(x + d)));
        *scale = quant_scale.value;
    } else if constexpr (IS_FLOAT8<P>) {
        for (int64_t d = 0; d < dim; d += LANES) store(memory + d, load(x + d) / all_scale);
    } else {
        for (int64_t d = 0; d < dim; d += LANES) store(memory + d, load(x + d));
    }
    return memory;
}

// Stores the key of a token, given by its index in the block.
template <class P>
inline void store_key(P* block, int64_t token, const P* row, int64_t dim) {
    constexpr int64_t INTERLEAVE = KV_INTERLEAVE<P>;
    P* at = block + token * INTERLEAVE;
    for (int64_t d = 0; d < dim; d += INTERLEAVE, at += BLOCK_TOKENS * INTERLEAVE) {
        std::memcpy(at, row + d, INTERLEAVE * sizeof(P));
    }
}

template <class P>
inline void store_value(P* block, int64_t token, const P* row, int64_t dim) {
    constexpr int64_t INTERLEAVE = KV_INTERLEAVE<P>;
    P* at = block + token / INTERLEAVE * dim * INTERLEAVE + token % INTERLEAVE;
    for (int64_t d = 0; d < dim; ++d) at[d * INTERLEAVE] = row[d];
}

// sums[r] += VECTORS * LANES interleaved groups of a block * the group of row r, for COUNT rows that are `stride`
// apart.
template <int COUNT, int VECTORS>
inline void add_kv_products(Float32x16 (&sums)[COUNT][VECTORS], const BFloat16* kv, const Operand<BFloat16>* x,
                            int64_t stride) {
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

template <int PAIR, int COUNT, int VECTORS>
inline void add_pairs(Int32x16 (&sums)[COUNT][VECTORS], const Int32x16 (&bytes)[VECTORS], const int16_t* x,
                      int64_t stride) {
    Int32x16 pairs[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
        pairs[v] = map_registers([](const auto& b) { return signed_bytes_at(b, PAIR); }, bytes[v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
        const Int32x16 input = broadcast_dword(x + r * stride + PAIR * 2);
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
