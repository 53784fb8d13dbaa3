// y = x W^T + b with int8 weights and activations that are quantized to int8 at run time (W8A8).
//
// A packed weight is [outputs / 32][inputs / 4][32 outputs][4 inputs], zero-padded and read sequentially. Four inputs
// are interleaved for the processor's 4-byte dot product (VPDPBUSD, USDOT). One of its operands is unsigned, so 128 is
// added to the quantized x; `compensation` includes -128 * (sum of an output's weights), which corrects the result.
// Without such an instruction, AVX2 multiplies int16 pairs: x is stored as int16, and the even, then the odd weights of
// each four are widened.
//
// Integer sums are exact, so that a row's result depends neither on its batch nor on the threads.
#include <algorithm>
#include <bit>

#include "gemm_tiles.h"
#include "int_dot.h"
#include "kernels.h"
#include "thread_pool.h"

namespace srv::SRV_ISA {
namespace {

// Rows and output vectors of a tile: accumulators, weights and inputs fill the registers. A single row takes a whole
// block.
#if defined(__AVX512F__)
constexpr int ROWS = 12, VECTORS_OF_ROWS = 2;
#elif defined(__AVX2__)
constexpr int ROWS = 5, VECTORS_OF_ROWS = 1;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int ROWS = 4, VECTORS_OF_ROWS = 1;
#else
constexpr int ROWS = 2, VECTORS_OF_ROWS = 1;
#endif
constexpr int ZERO_POINT = 128;  // of the quantized x

// Either four inputs are multiplied at once, or the two even ones and then the two odd ones.
#if defined(SRV_INT16_ACTIVATIONS)
using QuantizedInput = int16_t;
constexpr int PARTS = 2;

inline void store_quantized(QuantizedInput* to, const Int32x16& quantized) { store_int16(to, quantized); }

inline Int32x16 part_of(const Int32x16& weights, int part) {
    return map_registers([part](const auto& w) { return signed_bytes_at(w, part); }, weights);
}

inline Int32x16 add_products(const Int32x16& sum, const Int32x16& quantized, const Int32x16& weights) {
    return dot_pairs(sum, quantized, weights);
}
#else
using QuantizedInput = uint8_t;
constexpr int PARTS = 1;

inline void store_quantized(QuantizedInput* to, const Int32x16& quantized) { store_bytes(to, quantized); }
inline Int32x16 part_of(const Int32x16& weights, int) { return weights; }
inline Int32x16 add_products(const Int32x16& sum, const Int32x16& x, const Int32x16& weights) {
    return dot(sum, x, weights);
}
#endif
static_assert(sizeof(QuantizedInput) <= MAX_QUANT_BYTES);

// NaN counts as infinity.
template <class T>
inline float largest_magnitude(const T* x, int64_t count) {
    Int32x16 largest = {};
    for (int64_t i = 0; i < count; i += LANES) {
        largest = max_lanes(largest, magnitude_bits(count - i < LANES ? load_partial(x + i, count - i) : load(x + i)));
    }
    return std::bit_cast<float>(std::min(reduce(largest, max_lanes), INFINITE));
}

// Quantizes a row of x: statically, with the given scale and offset, or dynamically, by the row's largest magnitude.
// The scale of a row that is not finite is infinity, so that none of its results is finite.
template <class T>
void quantize_row(const W8a8LinearArgs& a, int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const int64_t padded = padded_quads(a.inputs);  // the padding is multiplied by zeros
    QuantizedInput* quantized = static_cast<QuantizedInput*>(a.quantized) + row * padded;
    const float largest = largest_magnitude(x, a.inputs);
    const float scale = a.input_scale_inverse == 0 || largest == __builtin_inff() ? largest / 127.0f : 1.0f;
    a.row_scales[row] = scale;
    const float divisor = scale == 0 ? 1.0f : scale;
    for (int64_t i = 0; i < a.inputs; i += LANES) {
        const int64_t count = a.inputs - i < LANES ? a.inputs - i : LANES;
        const Float32x16 value = count == LANES ? load(x + i) : load_partial(x + i, count);
        Float32x16 rounded = round_to_int(a.input_scale_inverse == 0 ? value / divisor
                                                                     : value * a.input_scale_inverse + a.input_offset);
        rounded = select(rounded > 127.0f, broadcast(127.0f), rounded);
        rounded = select(rounded < -128.0f, broadcast(-128.0f), rounded);
        QuantizedInput buffer[LANES];
        store_quantized(buffer, convert<int32_t>(rounded) + ZERO_POINT);
        std::memcpy(quantized + i, buffer, std::min<int64_t>(padded - i, LANES) * sizeof(QuantizedInput));
    }
}

// Computes COUNT rows by VECTORS vectors of outputs, from output `first` of the block, whose weights start at `weight`.
template <class T, int COUNT, int VECTORS>
inline void tile(const W8a8LinearArgs& a, const int8_t* weight, int64_t block, int64_t first, int64_t row) {
    const int64_t stride = padded_quads(a.inputs);
    const QuantizedInput* quantized = static_cast<const QuantizedInput*>(a.quantized) + row * stride;
    Int32x16 sums[COUNT][VECTORS] = {};
    for (int64_t i = 0; i < stride; i += QUAD, weight += BLOCK_OUTPUTS * QUAD) {
        Int32x16 weights[VECTORS];
        for (int v = 0; v < VECTORS; ++v) weights[v] = load_dwords(weight + v * LANES * QUAD);
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; ++p) {
            Int32x16 part[VECTORS];
            for (int v = 0; v < VECTORS; ++v) part[v] = part_of(weights[v], p);
#pragma GCC unroll 16
            for (int r = 0; r < COUNT; ++r) {
                const Int32x16 input = broadcast_dword(quantized + r * stride + i + p * QUAD / PARTS);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_products(sums[r][v], input, part[v]);
            }
        }
    }
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = block * BLOCK_OUTPUTS + first + v * LANES;
        const int64_t lanes = a.outputs - column < LANES ? a.outputs - column : LANES;
        if (lanes <= 0) break;
        const Int32x16 compensation = load_partial(a.compensation + column, lanes);
        const Float32x16 scale = load_partial(a.scales + column, lanes);
        const Float32x16 bias =
            a.bias == nullptr ? Float32x16{} : load_partial(static_cast<const T*>(a.bias) + column, lanes);
        for (int r = 0; r < COUNT; ++r) {
            const Float32x16 sum = convert<float>(sums[r][v] + compensation);
            const Float32x16 value = sum * a.row_scales[row + r] * scale + bias;
            store_results<T>(a.out, (row + r) * a.outputs + column, value, lanes, a.float32_out != 0);
        }
    }
}

template <class T>
void w8a8_linear_impl(const W8a8LinearArgs& a) {
    for_rows(a.rows, a.inputs, [&](int64_t row) { quantize_row<T>(a, row); });
    const int64_t block_size = BLOCK_OUTPUTS * padded_quads(a.inputs);
    const auto block_weight = [&](int64_t block) { return a.weight + block * block_size; };
    const auto compute_tile = [&]<int COUNT>(const auto* weight, int64_t block, int64_t row) {
        constexpr int VECTORS = COUNT == 1 ? BLOCK_OUTPUTS / LANES : VECTORS_OF_ROWS;
        for (int64_t first = 0; first < BLOCK_OUTPUTS; first += VECTORS * LANES) {
            tile<T, COUNT, VECTORS>(a, weight + first * QUAD, block, first, row);
        }
    };
    for_tiles<ROWS>(a.rows, a.inputs, a.outputs, block_weight, compute_tile);
}

}  // namespace

void w8a8_linear(Type type, const W8a8LinearArgs& args) {
    type == Type::float32 ? w8a8_linear_impl<float>(args) : w8a8_linear_impl<BFloat16>(args);
}

void pack_w8a8(const PackW8a8Args& a) {
    const int64_t padded = padded_quads(a.inputs);
    parallel(false, [&](int chunk, int chunks) {
        const Range mine = chunk_range(blocks(a.outputs), chunk, chunks);
        for (int64_t block = mine.begin; block < mine.end; ++block) {
            int8_t* to = a.packed + block * BLOCK_OUTPUTS * padded;
            for (int64_t output = 0; output < BLOCK_OUTPUTS; ++output) {
                const int64_t row = block * BLOCK_OUTPUTS + output;
                const int8_t* from = a.weight + row * a.stride;
                for (int64_t i = 0; i < padded; ++i) {
                    to[(i / QUAD * BLOCK_OUTPUTS + output) * QUAD + i % QUAD] =
                        row < a.outputs && i < a.inputs ? from[i] : int8_t{};
                }
            }
        }
    });
}

}  // namespace srv::SRV_ISA
