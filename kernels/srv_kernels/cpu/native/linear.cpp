// y = x W^T + b with packed weights.
//
// A packed weight consists of blocks of 32 outputs and all inputs. A block is read sequentially; its layout is [inputs
// / 2][32 outputs][2 inputs], zero-padded. Pairs of inputs are interleaved for the processor's bfloat16 dot product
// (VDPBF16PS, BFDOT). float32 has no such instruction; its layout is [inputs / 2][2 inputs][32 outputs].
//
//     for each block                       blocks are distributed over the threads
//         for each tile of ROWS rows       accumulators [ROWS][vectors] stay in registers
//             for each pair of inputs      load vectors of weights, broadcast one input pair per row
//
// int8 weights have the layout of bfloat16. They are converted, exactly, to the inputs' type in registers; the scale of
// an output is applied to its sum at the end. Without a bfloat16 dot product, inputs are first converted to float32.
//
// Sums are accumulated in the order of the inputs for any number of rows and threads, so that a row's result does not
// depend on its batch.
#include "float_dot.h"
#include "gemm_tiles.h"
#include "kernels.h"
#include "thread_pool.h"

namespace srv::SRV_ISA {
namespace {

// Rows and output vectors of a tile: accumulators, weights and inputs fill the registers. A single row takes a whole
// block.
#if defined(__AVX512F__)
constexpr int ROWS = 12, VECTORS_OF_ROWS = 2;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int ROWS = 5, VECTORS_OF_ROWS = 1;
#else
constexpr int ROWS = 2, VECTORS_OF_ROWS = 1;
#endif

[[maybe_unused]] void widen(const BFloat16* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; ++i) to[i] = to_float(from[i]);
}

// Computes COUNT rows by VECTORS vectors of outputs, from output `first` of the block, whose weights start at `weight`.
// Operand<T> is the type of the inputs after that conversion: T, or float.
template <class T, class W, int COUNT, int VECTORS>
inline void tile(const LinearArgs& a, const W* weight, int64_t block, int64_t first, int64_t row) {
    const auto* x = static_cast<const Operand<T>*>(a.x) + row * a.x_stride;
    Float32x16 sums[COUNT][VECTORS];
#pragma GCC unroll 32
    for (int i = 0; i < COUNT * VECTORS; ++i) sums[i / VECTORS][i % VECTORS] = Float32x16{};
    const int64_t pairs = a.inputs / INTERLEAVE;
    for (int64_t i = 0; i < pairs; ++i, weight += BLOCK_OUTPUTS * INTERLEAVE) {
        add_products(sums, weight, x + i * INTERLEAVE, a.x_stride);
    }
    if (a.inputs % INTERLEAVE != 0) {
        Operand<T> last[COUNT * INTERLEAVE] = {};
        for (int r = 0; r < COUNT; ++r) last[r * INTERLEAVE] = x[r * a.x_stride + a.inputs - 1];
        add_products(sums, weight, last, INTERLEAVE);
    }
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = block * BLOCK_OUTPUTS + first + v * LANES;
        const int64_t lanes = a.outputs - column < LANES ? a.outputs - column : LANES;
        if (lanes <= 0) break;
        const Float32x16 scale = a.scales == nullptr ? broadcast(1.0f) : load_partial(a.scales + column, lanes);
        const Float32x16 bias =
            a.bias == nullptr ? Float32x16{} : load_partial(static_cast<const T*>(a.bias) + column, lanes);
        for (int r = 0; r < COUNT; ++r) {
            T* out = static_cast<T*>(a.out) + (row + r) * a.out_stride + column;
            const Float32x16 value = sums[r][v] * scale + bias;
            lanes == LANES ? store(out, value) : store_partial(out, value, lanes);
        }
    }
}

template <class T, class W>
void linear_impl(const LinearArgs& given) {
    LinearArgs a = given;
    if constexpr (!std::is_same_v<T, Operand<T>>) {
        for_rows(a.rows, a.inputs, [&](int64_t row) {
            widen(static_cast<const T*>(given.x) + row * given.x_stride, given.x_float32 + row * a.inputs, a.inputs);
        });
        a.x = a.x_float32;
        a.x_stride = a.inputs;
    }
    const int64_t block_size = BLOCK_OUTPUTS * padded_inputs(a.inputs);
    const W* packed = static_cast<const W*>(a.weight);
    const auto block_weight = [&](int64_t block) { return packed + block * block_size; };
    const auto compute_tile = [&]<int COUNT>(const W* weight, int64_t block, int64_t row) {
        constexpr int VECTORS = COUNT == 1 ? BLOCK_OUTPUTS / LANES : VECTORS_OF_ROWS;
        for (int64_t first = 0; first < BLOCK_OUTPUTS; first += VECTORS * LANES) {
            tile<T, W, COUNT, VECTORS>(a, weight + first * INTERLEAVE_OF<W>, block, first, row);
        }
    };
    for_tiles<ROWS>(a.rows, a.inputs, a.outputs, block_weight, compute_tile);
}

template <class T>
void pack_impl(const PackArgs& a) {
    const int64_t pairs = padded_inputs(a.inputs) / INTERLEAVE;
    parallel(false, [&](int chunk, int chunks) {
        const Range mine = chunk_range(blocks(a.outputs), chunk, chunks);
        for (int64_t block = mine.begin; block < mine.end; ++block) {
            T* to = static_cast<T*>(a.packed) + block * BLOCK_OUTPUTS * pairs * INTERLEAVE;
            for (int64_t output = 0; output < BLOCK_OUTPUTS; ++output) {
                const int64_t row = block * BLOCK_OUTPUTS + output;
                const T* from = static_cast<const T*>(a.weight) + row * a.stride;
                for (int64_t i = 0; i < pairs * INTERLEAVE; ++i) {
                    const int64_t interleave = INTERLEAVE_OF<T>, group = i / interleave * BLOCK_OUTPUTS + output;
                    to[group * interleave + i % interleave] = row < a.outputs && i < a.inputs ? from[i] : T{};
                }
            }
        }
    });
}

}  // namespace

void linear(Type type, const LinearArgs& args) {
    const bool integers = args.scales != nullptr;
    if (type == Type::float32) {
        integers ? linear_impl<float, int8_t>(args) : linear_impl<float, float>(args);
    } else {
        integers ? linear_impl<BFloat16, int8_t>(args) : linear_impl<BFloat16, BFloat16>(args);
    }
}

void pack(Type type, const PackArgs& args) {
    switch (type) {
        case Type::float32: return pack_impl<float>(args);
        case Type::bfloat16: return pack_impl<BFloat16>(args);
        case Type::int8: return pack_impl<int8_t>(args);
        case Type::float16: return;  // weights are never float16
    }
}

}  // namespace srv::SRV_ISA
