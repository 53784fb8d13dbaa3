// y = x W^T + b with W of 8-bit integers and x rounded to 8 bits on the way in.
//
// A packed weight is [outputs / 32][inputs / 4][32 outputs][4 inputs], read from its first byte to its last, zero where
// the matrix has ended: four inputs lie together because the processor's byte product multiplies and adds fours
// (VPDPBUSD, USDOT). That product takes unsigned bytes on one side, so the steps of x are kept with 128 added, and what this
// adds to a sum (128 times the sum of the weights) is taken off with `correction`. Where there is no such product, AVX2
// multiplies pairs of 16 bits: steps are kept so, and of four weights those of even places and those of odd ones widened.
//
// Sums of integers are exact, so that a row's result depends neither on the batch nor on the threads.
#include <algorithm>
#include <bit>

#include "bytes.h"
#include "kernels.h"
#include "pool.h"
#include "tiles.h"

namespace srv::SRV_ISA {
namespace {

// Rows of a tile, and vectors of its outputs: sums, weights and inputs fill the registers. One row takes a whole block.
#if defined(__AVX512F__)
constexpr int ROWS = 12, VECTORS_OF_ROWS = 2;
#elif defined(__AVX2__)
constexpr int ROWS = 5, VECTORS_OF_ROWS = 1;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int ROWS = 4, VECTORS_OF_ROWS = 1;
#else
constexpr int ROWS = 2, VECTORS_OF_ROWS = 1;
#endif
constexpr int ZERO = 128;  // what stands for a step of 0

// Four steps are multiplied at once, or the two of even places and then those of odd ones.
#if defined(SRV_WORD_STEPS)
using Step = int16_t;
constexpr int PARTS = 2;

inline void store_steps(Step* to, const Ints& steps) { store_words(to, steps); }

inline Ints part_of(const Ints& weights, int part) {
    return each([part](const auto& w) { return signed_bytes_at(w, part); }, weights);
}

inline Ints add_products(const Ints& sum, const Ints& steps, const Ints& weights) {
    return dot_pairs(sum, steps, weights);
}
#else
using Step = uint8_t;
constexpr int PARTS = 1;

inline void store_steps(Step* to, const Ints& steps) { store_bytes(to, steps); }
inline Ints part_of(const Ints& weights, int) { return weights; }
inline Ints add_products(const Ints& sum, const Ints& steps, const Ints& weights) { return dot(sum, steps, weights); }
#endif
static_assert(sizeof(Step) <= STEP_BYTES);

// NaN counts as infinity.
template <class T>
inline float largest_magnitude(const T* x, int64_t count) {
    Ints most = {};
    for (int64_t i = 0; i < count; i += LANES) {
        most = larger(most, magnitudes(count - i < LANES ? load_some(x + i, count - i) : load(x + i)));
    }
    return std::bit_cast<float>(std::min(folded(most, larger), INFINITE));
}

// One row of x as bytes, and its scale. Static: steps of a given size about a given zero. The scale of a row that is
// not finite is infinity, so that none of its products is finite either.
template <class T>
void quantize_row(const ByteLinearArgs& a, int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const int64_t padded = padded_fours(a.inputs);  // what is past the inputs is multiplied by zeros
    Step* steps = static_cast<Step*>(a.steps) + row * padded;
    const float most = largest_magnitude(x, a.inputs);
    const float scale = a.per_input == 0 || most == __builtin_inff() ? most / 127.0f : 1.0f;
    a.row_scales[row] = scale;
    const float divisor = scale == 0 ? 1.0f : scale;
    for (int64_t i = 0; i < a.inputs; i += LANES) {
        const int64_t count = a.inputs - i < LANES ? a.inputs - i : LANES;
        const Floats value = count == LANES ? load(x + i) : load_some(x + i, count);
        Floats step = whole(a.per_input == 0 ? value / divisor : value * a.per_input + a.offset);
        step = choose(step > 127.0f, all(127.0f), step);
        step = choose(step < -128.0f, all(-128.0f), step);
        Step kept[LANES];
        store_steps(kept, to<int32_t>(step) + ZERO);
        std::memcpy(steps + i, kept, std::min<int64_t>(padded - i, LANES) * sizeof(Step));
    }
}

// Of COUNT rows, the outputs of VECTORS vectors from `first` of a block on, whose weights begin at `weight`.
template <class T, int COUNT, int VECTORS>
inline void tile(const ByteLinearArgs& a, const int8_t* weight, int64_t block, int64_t first, int64_t row) {
    const int64_t stride = padded_fours(a.inputs);
    const Step* steps = static_cast<const Step*>(a.steps) + row * stride;
    Ints sums[COUNT][VECTORS] = {};
    for (int64_t i = 0; i < stride; i += FOUR, weight += BLOCK_OUTPUTS * FOUR) {
        Ints weights[VECTORS];
        for (int v = 0; v < VECTORS; ++v) weights[v] = load_fours(weight + v * LANES * FOUR);
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; ++p) {
            Ints part[VECTORS];
            for (int v = 0; v < VECTORS; ++v) part[v] = part_of(weights[v], p);
#pragma GCC unroll 16
            for (int r = 0; r < COUNT; ++r) {
                const Ints taken = four_bytes(steps + r * stride + i + p * FOUR / PARTS);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_products(sums[r][v], taken, part[v]);
            }
        }
    }
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = block * BLOCK_OUTPUTS + first + v * LANES;
        const int64_t lanes = a.outputs - column < LANES ? a.outputs - column : LANES;
        if (lanes <= 0) break;
        const Ints correction = load_some(a.correction + column, lanes);
        const Floats scale = load_some(a.scales + column, lanes);
        const Floats bias = a.bias == nullptr ? Floats{} : load_some(static_cast<const T*>(a.bias) + column, lanes);
        for (int r = 0; r < COUNT; ++r) {
            T* out = static_cast<T*>(a.out) + (row + r) * a.outputs + column;
            const Floats sum = to<float>(sums[r][v] + correction);
            const Floats value = sum * a.row_scales[row + r] * scale + bias;
            lanes == LANES ? store(out, value) : store_some(out, value, lanes);
        }
    }
}

template <class T>
void byte_linear_of(const ByteLinearArgs& a) {
    for_rows(a.rows, a.inputs, [&](int64_t row) { quantize_row<T>(a, row); });
    const int64_t block_size = BLOCK_OUTPUTS * padded_fours(a.inputs);
    const auto where = [&](int64_t block) { return a.weight + block * block_size; };
    for_tiles<ROWS>(a.rows, a.inputs, a.outputs, where, [&]<int COUNT>(const auto* weight, int64_t block, int64_t row) {
        constexpr int VECTORS = COUNT == 1 ? BLOCK_OUTPUTS / LANES : VECTORS_OF_ROWS;
        for (int64_t first = 0; first < BLOCK_OUTPUTS; first += VECTORS * LANES) {
            tile<T, COUNT, VECTORS>(a, weight + first * FOUR, block, first, row);
        }
    });
}

}  // namespace

void byte_linear(Type type, const ByteLinearArgs& args) {
    type == Type::float32 ? byte_linear_of<float>(args) : byte_linear_of<BFloat16>(args);
}

void pack_bytes(const PackBytesArgs& a) {
    const int64_t padded = padded_fours(a.inputs);
    parallel(false, [&](int share, int shares) {
        const Range mine = part(blocks(a.outputs), share, shares);
        for (int64_t block = mine.begin; block < mine.end; ++block) {
            int8_t* to = a.packed + block * BLOCK_OUTPUTS * padded;
            for (int64_t output = 0; output < BLOCK_OUTPUTS; ++output) {
                const int64_t row = block * BLOCK_OUTPUTS + output;
                const int8_t* from = a.weight + row * a.stride;
                for (int64_t i = 0; i < padded; ++i) {
                    to[(i / FOUR * BLOCK_OUTPUTS + output) * FOUR + i % FOUR] =
                        row < a.outputs && i < a.inputs ? from[i] : int8_t{};
                }
            }
        }
    });
}

}  // namespace srv::SRV_ISA
