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

#include "bytes.h"
#include "kernels.h"
#include "product.h"

namespace srv::SRV_ISA {

template <class P>
constexpr bool SCALED = std::is_same_v<P, int8_t>;

template <class P>
constexpr int64_t TOGETHER_IN = SCALED<P> ? 4 : std::is_same_v<P, BFloat16> ? 2 : 1;

// What keys and values of type P are multiplied by, and the sums of such products.
template <class P>
using FactorOf = std::conditional_t<SCALED<P>, int16_t, std::conditional_t<std::is_same_v<P, BFloat16>, Factor<P>, float>>;
template <class P>
using SumsOf = std::conditional_t<SCALED<P>, Ints, Floats>;

constexpr float MOST_STEPS = 127, MOST_UNITS = 32767;
static_assert(MOST_DIM * static_cast<int64_t>(MOST_STEPS * MOST_UNITS) <= INT32_MAX);

template <class P>
inline int64_t elements_of_block(int64_t dim) {
    return BLOCK_TOKENS * (dim + (SCALED<P> ? static_cast<int64_t>(sizeof(float)) : 0));
}

// The tokens' scales, of a block that begins at `block`.
inline float* scales_of(int8_t* block, int64_t dim) { return reinterpret_cast<float*>(block + BLOCK_TOKENS * dim); }
inline const float* scales_of(const int8_t* block, int64_t dim) {
    return reinterpret_cast<const float*>(block + BLOCK_TOKENS * dim);
}

// A query as keys are multiplied by it; returns what one of its whole numbers is worth, 1 where there are none.
template <class P, class T>
inline float keep_query(FactorOf<P>* to_query, const T* x, int64_t dim) {
    if constexpr (SCALED<P>) {
        const Unit unit = unit_of(x, dim, MOST_UNITS);
        for (int64_t d = 0; d < dim; d += LANES) store_words(to_query + d, unit.count(load(x + d)));
        return unit.worth;
    } else {
        for (int64_t d = 0; d < dim; d += LANES) store(to_query + d, load(x + d));
        return 1;
    }
}

// One token's key or value in a pool's type, its columns beside one another: x itself, or what is made of it in `memory`;
// of bytes, its scale too.
template <class P, class T>
inline const P* converted(P* memory, float* scale, const T* x, int64_t dim) {
    if constexpr (std::is_same_v<P, T>) {
        return x;
    } else if constexpr (SCALED<P>) {
        const Unit unit = unit_of(x, dim, MOST_STEPS);
        for (int64_t d = 0; d < dim; d += LANES) store_bytes(memory + d, unit.count(load(x + d)));
        *scale = unit.worth;
    } else {
        for (int64_t d = 0; d < dim; d += LANES) store(memory + d, load(x + d));
    }
    return memory;
}

// The key of the token at a place of its block.
template <class P>
inline void put_key(P* block, int64_t place, const P* row, int64_t dim) {
    constexpr int64_t TOGETHER = TOGETHER_IN<P>;
    P* at = block + place * TOGETHER;
    for (int64_t d = 0; d < dim; d += TOGETHER, at += BLOCK_TOKENS * TOGETHER) {
        std::memcpy(at, row + d, TOGETHER * sizeof(P));
    }
}

template <class P>
inline void put_value(P* block, int64_t place, const P* row, int64_t dim) {
    constexpr int64_t TOGETHER = TOGETHER_IN<P>;
    P* at = block + place / TOGETHER * dim * TOGETHER + place % TOGETHER;
    for (int64_t d = 0; d < dim; ++d) at[d * TOGETHER] = row[d];
}

// To the sums of COUNT rows: VECTORS * LANES times TOGETHER numbers of a block, times the rows' own TOGETHER, which lie
// `stride` apart.
template <int COUNT, int VECTORS>
inline void add_kept(Floats (&sums)[COUNT][VECTORS], const BFloat16* kept, const Factor<BFloat16>* x, int64_t stride) {
    add_products(sums, kept, x, stride);
}

template <int COUNT, int VECTORS, class P>
    requires(TOGETHER_IN<P> == 1)
inline void add_kept(Floats (&sums)[COUNT][VECTORS], const P* kept, const float* x, int64_t stride) {
    Floats weight[VECTORS];
    for (int v = 0; v < VECTORS; ++v) weight[v] = load(kept + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
        const Floats input = all(x[r * stride]);
        for (int v = 0; v < VECTORS; ++v) sums[r][v] += weight[v] * input;
    }
}

template <int PLACE, int COUNT, int VECTORS>
inline void add_pairs(Ints (&sums)[COUNT][VECTORS], const Ints (&bytes)[VECTORS], const int16_t* x, int64_t stride) {
    Ints pairs[VECTORS];
    for (int v = 0; v < VECTORS; ++v) pairs[v] = each([](const auto& b) { return signed_bytes_at(b, PLACE); }, bytes[v]);
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; ++r) {
        const Ints input = four_bytes(x + r * stride + PLACE * 2);
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot_pairs(sums[r][v], pairs[v], input);
    }
}

template <int COUNT, int VECTORS>
inline void add_kept(Ints (&sums)[COUNT][VECTORS], const int8_t* kept, const int16_t* x, int64_t stride) {
    Ints bytes[VECTORS];
    for (int v = 0; v < VECTORS; ++v) bytes[v] = load_fours(kept + v * LANES * 4);
    add_pairs<0>(sums, bytes, x, stride);
    add_pairs<1>(sums, bytes, x, stride);
}

}  // namespace srv::SRV_ISA
