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
// int8 and FP8 weights have the layout of bfloat16. They are converted, exactly, to the inputs' type in registers; the
// scale of an output is applied to its sum at the end, or after each block of inputs that has a scale of its own. Without
// a bfloat16 dot product, inputs are first converted to float32. For many rows of bfloat16, a block of FP8 weights is
// converted once, to a thread-local buffer: to convert it again for each tile would take a fifth of the time.
//
// Many rows of x whose addresses differ by multiples of half a way of the L1 cache would replace each other there, and
// are copied to where they do not (`rows_alias`).
//
// Sums are accumulated in the order of the inputs for any number of rows and threads, so that a row's result does not
// depend on its batch.
#include <vector>

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
[[maybe_unused]] constexpr int64_t UNPACK_FROM_ROWS = 4 * ROWS;  // rows from which converting a block once pays off
[[maybe_unused]] constexpr int64_t UNPACKED_BYTES = 512 << 10;   // at most: tiles read the block from the L2 cache

[[maybe_unused]] void widen(const BFloat16* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; ++i) to[i] = to_float(from[i]);
}

// sums += the products of the inputs [begin, end) with weights that start at `weight`; returns those of the next input.
template <int COUNT, int VECTORS, class W, class X>
inline const W* add_inputs(Float32x16 (&sums)[COUNT][VECTORS], const W* weight, const X* x, int64_t stride,
                           int64_t begin, int64_t end) {
    const int64_t paired = begin + (end - begin) / INTERLEAVE * INTERLEAVE;
    for (int64_t i = begin; i < paired; i += INTERLEAVE, weight += BLOCK_OUTPUTS * INTERLEAVE) {
        add_products(sums, weight, x + i, stride);
    }
    if (paired < end) {
        X last[COUNT * INTERLEAVE] = {};
        for (int r = 0; r < COUNT; ++r) last[r * INTERLEAVE] = x[r * stride + paired];
        add_products(sums, weight, last, INTERLEAVE);
    }
    return weight;
}

// sums += the products of all inputs with FP8 weights, each block of inputs times its scale. W: Fp8, or what it was
// converted to.
template <int COUNT, int VECTORS, class W, class X>
inline void add_scaled_inputs(Float32x16 (&sums)[COUNT][VECTORS], const LinearArgs& a, const W* weight, const X* x,
                              int64_t block, int64_t first) {
    const int64_t columns = scale_columns(a);
    const float* scales = a.scales + block * columns * (a.block_scales ? 1 : BLOCK_OUTPUTS);
    for (int64_t column = 0; column < columns; ++column) {
        const int64_t begin = column * a.scale_inputs;
        const int64_t end = a.inputs - begin < a.scale_inputs ? a.inputs : begin + a.scale_inputs;
        Float32x16 parts[COUNT][VECTORS];
#pragma GCC unroll 32
        for (int i = 0; i < COUNT * VECTORS; ++i) parts[i / VECTORS][i % VECTORS] = Float32x16{};
        weight = add_inputs(parts, weight, x, a.x_stride, begin, end);
        for (int v = 0; v < VECTORS; ++v) {
            const Float32x16 scale = a.block_scales ? broadcast(scales[column])
                                                    : load(scales + column * BLOCK_OUTPUTS + first + v * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < COUNT; ++r) sums[r][v] += parts[r][v] * scale;
        }
    }
}

// Computes COUNT rows by VECTORS vectors of outputs, from output `first` of the block, whose weights start at `weight`.
// Operand<T> is the type of the inputs after that conversion: T, or float. SCALED: blocks of inputs have scales.
template <class T, class W, bool SCALED, int COUNT, int VECTORS>
inline void tile(const LinearArgs& a, const W* weight, int64_t block, int64_t first, int64_t row) {
    const auto* x = static_cast<const Operand<T>*>(a.x) + row * a.x_stride;
    Float32x16 sums[COUNT][VECTORS];
#pragma GCC unroll 32
    for (int i = 0; i < COUNT * VECTORS; ++i) sums[i / VECTORS][i % VECTORS] = Float32x16{};
    if constexpr (SCALED) {
        add_scaled_inputs(sums, a, weight, x, block, first);
    } else {
        add_inputs(sums, weight, x, a.x_stride, 0, a.inputs);
    }
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = block * BLOCK_OUTPUTS + first + v * LANES;
        const int64_t lanes = a.outputs - column < LANES ? a.outputs - column : LANES;
        if (lanes <= 0) break;
        const Float32x16 scale =
            SCALED || a.scales == nullptr ? broadcast(1.0f) : load_partial(a.scales + column, lanes);
        const Float32x16 bias =
            a.bias == nullptr ? Float32x16{} : load_partial(static_cast<const T*>(a.bias) + column, lanes);
        for (int r = 0; r < COUNT; ++r) {
            const Float32x16 value = sums[r][v] * scale + bias;
            store_results<T>(a.out, (row + r) * a.out_stride + column, value, lanes, a.float32_out);
        }
    }
}

// Copies rows of x, widened if the kernels multiply float32, to where they are read from, if that is another place.
template <class T>
void prepare_rows(const LinearArgs& given, LinearArgs& a) {
    constexpr bool WIDENS = !std::is_same_v<T, Operand<T>>;
    constexpr int64_t SIZE = sizeof(Operand<T>);
    if (a.x_operands == nullptr) return;
    const int64_t to_stride = a.inputs + (rows_alias(a.rows, a.inputs * SIZE) ? APART / SIZE : 0);
    for_rows(a.rows, a.inputs, [&](int64_t row) {
        const T* from = static_cast<const T*>(given.x) + x_row_of(a.grouping, row) * given.x_stride;
        auto* to = static_cast<Operand<T>*>(a.x_operands) + row * to_stride;
        if constexpr (WIDENS) {
            widen(from, to, a.inputs);
        } else {
            std::memcpy(to, from, a.inputs * sizeof(T));
        }
    });
    a.x = a.x_operands;
    a.x_stride = to_stride;
}

struct alignas(64) CacheLine {
    uint8_t bytes[64];
};

// Converts a block of weights to bfloat16, in memory of this thread, valid until the thread converts another block.
template <class W>
const BFloat16* unpacked_block(const W* packed, int64_t elements) {
    thread_local std::vector<CacheLine> memory;
    const size_t lines = elements * sizeof(BFloat16) / sizeof(CacheLine);
    if (memory.size() < lines) memory.resize(lines);
    auto* const begin = reinterpret_cast<BFloat16*>(memory.data());
    for (int64_t at = 0; at < elements; at += LANES * INTERLEAVE) {
        const auto pairs = load_pairs(packed + at);
        std::memcpy(begin + at, &pairs, sizeof(pairs));
    }
    return begin;
}

// Runs tiles; block_weight(block): the address of its weights of type W.
template <class T, class W, bool SCALED, class BlockWeight>
void multiply_tiles(const LinearArgs& a, int64_t first_row, int64_t rows, Range items,
                    const BlockWeight& block_weight) {
    const auto compute_tile = [&]<int COUNT>(const W* weight, int64_t block, int64_t row) {
        constexpr int VECTORS = COUNT == 1 ? BLOCK_OUTPUTS / LANES : VECTORS_OF_ROWS;
        for (int64_t first = 0; first < BLOCK_OUTPUTS; first += VECTORS * LANES) {
            tile<T, W, SCALED, COUNT, VECTORS>(a, weight + first * INTERLEAVE_OF<W>, block, first, row);
        }
    };
    run_tiles<ROWS>(items, first_row, rows, block_weight, compute_tile);
}

// Runs the tiles [begin, end) of the rows that share the weight of `a`.
template <class T, class W>
void multiply_rows(const LinearArgs& a, int64_t first_row, int64_t rows, Range items) {
    constexpr bool SCALED = std::is_same_v<W, Fp8>;
    const int64_t block_size = BLOCK_OUTPUTS * padded_inputs(a.inputs);
    const W* weight = static_cast<const W*>(a.weight);
    const auto packed = [&](int64_t block) { return weight + block * block_size; };
    if constexpr (SCALED && std::is_same_v<Operand<T>, BFloat16>) {
        if (rows >= UNPACK_FROM_ROWS && block_size * static_cast<int64_t>(sizeof(BFloat16)) <= UNPACKED_BYTES) {
            const auto unpack = [&](int64_t block) { return unpacked_block(packed(block), block_size); };
            return multiply_tiles<T, BFloat16, SCALED>(a, first_row, rows, items, unpack);
        }
    }
    multiply_tiles<T, W, SCALED>(a, first_row, rows, items, packed);
}

template <class T, class W>
void linear_impl(const LinearArgs& given) {
    LinearArgs a = given;
    prepare_rows<T>(given, a);
    const OneGroup all(a.rows);
    const Grouping& grouping = a.grouping == nullptr ? all.grouping : *a.grouping;
    for_groups<ROWS>(grouping, a.rows, a.inputs, a.outputs, [&](const RowGroup& group, Range items) {
        LinearArgs mine = a;
        mine.weight = static_cast<const W*>(a.weight) + group.weight * packed_elements(a.outputs, a.inputs);
        mine.scales = part_of(a.scales, group.weight, std::is_same_v<W, Fp8> ? scale_count(a) : a.outputs);
        if (a.bias != nullptr) mine.bias = static_cast<const T*>(a.bias) + group.weight * a.outputs;
        multiply_rows<T, W>(mine, group.begin, group.rows, items);
    });
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
    const bool fp8 = args.scale_inputs != 0, integers = args.scales != nullptr;
    if (fp8) {
        type == Type::float32 ? linear_impl<float, Fp8>(args) : linear_impl<BFloat16, Fp8>(args);
    } else if (type == Type::float32) {
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
        case Type::float16:
        case Type::float8_e4m3:
        case Type::float8_e5m2: return;  // weights are of no such type
    }
}

}  // namespace srv::SRV_ISA
