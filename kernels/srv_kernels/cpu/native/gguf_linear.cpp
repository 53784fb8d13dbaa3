// y = x W^T + b with GGUF-quantized weights. x is quantized at run time: to 8 bits with a scale per 16 inputs, or, on
// the int16 path (see `DotPath`), to 16 bits with a scale per row.
//
// A packed weight is [outputs / 32][inputs / 32] K blocks, read sequentially. A K block holds the scales of 32 outputs,
// their minimums if the type has them, and the quantized weights as [8 quads][32 outputs][4 inputs]. With 4 bits, a
// byte holds weights of two consecutive quads, the second in the high nibble; with 2 bits, those of four. With 3 bits,
// the lower two are followed by a byte with the third bit of the eight quads. Four inputs are interleaved for the
// processor's 4-byte dot product (VPDPBUSD, USDOT) of unsigned weights with signed inputs.
//
//     16 inputs       x_quant = x / (sub_scale * row_scale); sub_scale is an integer, always 1 on the int16 path
//     half K block    sum of (quant - zero_point) * x_quant, exact, times sub_scale
//     group           the above times its scale, plus its min * sum of (x_quant * sub_scale)
//     row             the above times row_scale
//
// One scale per 32 inputs raises the perplexity of the demo model by 0.5 %, one per 16 by half as much. The zero point
// is applied by means of the sum of x_quant. For many rows, a block of less than 8 bits is first unpacked to bytes in
// a thread-local buffer: unpacking it and widening its scales for every tile would take a sixth of the time.
//
// The inputs of the weight may be in another order than those of x. A row is then gathered before it is quantized.
//
// Types with a table have the indices of its entries packed. A byte shuffle replaces them when they are unpacked; with
// entries of two bytes, x is multiplied by both.
//
// Groups are added in the order of the inputs for any number of rows and threads, so that a row's result does not
// depend on its batch.
#include "gguf.h"

#include <vector>

#include "gemm_tiles.h"
#include "int_dot.h"
#include "kernels.h"
#include "thread_pool.h"

namespace srv::SRV_ISA {
namespace {

// Rows and output vectors of a tile: the accumulators of a half, weights and inputs fill the registers; without AVX-512
// the accumulators of the row are kept in memory. A single row takes a whole block.
#if defined(__AVX512F__)
constexpr int ROWS = 4, VECTORS_OF_ROWS = 2;
#elif defined(__AVX2__)
constexpr int ROWS = 6, VECTORS_OF_ROWS = 1;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int ROWS = 4, VECTORS_OF_ROWS = 1;
#else
constexpr int ROWS = 2, VECTORS_OF_ROWS = 1;
#endif
constexpr int64_t UNPACK_FROM_ROWS = 32;  // rows from which unpacking a block once pays off
constexpr int64_t PREFETCH_AHEAD = 4096;  // distance in bytes

// How products are accumulated.
//     int32        4-byte dot products into int32 for half a K block, then float32
//     int16_sums   for weights up to 31 (2 and 4 bits, Q5_1, Q5_K): into int16 for half a K block; widened and
//                  multiplied by sub_scale, and summed in int32 over a group
//     int16        for larger weights: weights and inputs are int16, products are summed in int32 over a group
//     two_bytes    for weights of two bytes: as int32, with a sum for each byte
enum class DotPath { int32, int16_sums, int16, two_bytes };

constexpr DotPath dot_path_of(PackedShape shape) {
    if (shape.table_bytes == 2) return DotPath::two_bytes;
#if defined(SRV_INT8_PAIRS)
    if (shape.table_bytes == 0 && (shape.bits <= 4 || shape.has_min)) return DotPath::int16_sums;
#endif
#if defined(SRV_INT16_ACTIVATIONS)
    if (shape.table_bytes == 1 || shape.bits == 8) return DotPath::int16;
#endif
    return DotPath::int32;
}

// Whether sums are converted to float32, and the zero point compensated, per half K block.
constexpr bool ends_per_half(DotPath path) { return path == DotPath::int32 || path == DotPath::two_bytes; }

// Rows of a tile. On the int16 path, 16 rows take 5 % less time as four tiles of 4 than as 5, 5 and 6.
constexpr int tile_rows(DotPath path) { return path == DotPath::int16 ? 5 : ROWS; }

// The largest magnitude of a quantized input.
constexpr int64_t max_input_quant(DotPath path) { return path == DotPath::int16 ? INT16_MAX : 127; }

// The largest sub_scale. It fits 16 bits and, where a group is summed in int32, the sum cannot overflow (nor can the
// term of the zero point, since no zero point exceeds the largest weight).
constexpr int64_t max_sub_scale(PackedShape shape) {
    const DotPath path = dot_path_of(shape);
    if (ends_per_half(path)) return INT16_MAX;
    if (path == DotPath::int16) return 1;
    const int64_t quant = shape.bits <= 4 ? 15 : 31;
    const int64_t fits = INT32_MAX / (shape.group * quant * max_input_quant(path));
    return fits < INT16_MAX ? fits : INT16_MAX;
}
static_assert(K_BLOCK * 255 * max_input_quant(DotPath::int16) <= INT32_MAX);

// The number of dot products for the four weights of an output: one for all, one each for the even and odd ones, or one
// for each byte of all.
template <DotPath PATH>
constexpr int PARTS = PATH == DotPath::int16 || PATH == DotPath::two_bytes ? 2 : 1;

template <DotPath PATH>
inline void split(const Int32x16& quants, Int32x16 (&parts)[PARTS<PATH>]) {
    parts[0] = quants;
#if defined(SRV_INT16_ACTIVATIONS)
    if constexpr (PATH == DotPath::int16) {
        // Keeps the compiler from loading the weights again for each part.
        const Int32x16 loaded = map_registers([](const auto& q) { return opaque(q); }, quants);
        for (int p = 0; p < 2; ++p) {
            parts[p] = map_registers([p](const auto& q) { return unsigned_bytes_at(q, p); }, loaded);
        }
    }
#endif
}

// The accumulators of a group for sixteen outputs, in units of the row's scale. `offset` compensates the zero point:
// per half K block on the int32 path, otherwise per group.
template <DotPath PATH>
class GroupSum;

template <>
class GroupSum<DotPath::int32> {
public:
    void begin_half(int32_t offset) { half_ = Int32x16{} + offset; }
    void add(const Int32x16& quants, const Int32x16& x, int) { half_ = dot(half_, quants, x); }
    void end_half(const SubScale& sub_scale) { group_ += convert<float>(half_) * sub_scale.value; }
    Float32x16 end(int32_t) const { return group_; }

private:
    Int32x16 half_{};
    Float32x16 group_{};
};

template <>
class GroupSum<DotPath::two_bytes> {
public:
    void begin_half(int32_t offset) { halves_[0] = Int32x16{} + offset, halves_[1] = Int32x16{}; }
    void add(const Int32x16& quants, const Int32x16& x, int byte) { halves_[byte] = dot(halves_[byte], quants, x); }
    void end_half(const SubScale& sub_scale) {
        group_ += convert<float>(halves_[0] + (halves_[1] << 8)) * sub_scale.value;
    }
    Float32x16 end(int32_t) const { return group_; }

private:
    Int32x16 halves_[2]{};
    Float32x16 group_{};
};
static_assert(LANES * int64_t{65535} * 127 + LANES * int64_t{32768} * 127 <= INT32_MAX);

#if defined(SRV_INT8_PAIRS)
template <>
class GroupSum<DotPath::int16_sums> {
public:
    void begin_half(int32_t) { half_ = Int32x16{}; }
    void add(const Int32x16& quants, const Int32x16& x, int) { half_ = dot_int16_sums(half_, quants, x); }
    void end_half(const SubScale& sub_scale) { group_ = dot_pairs(group_, half_, Int32x16{} + sub_scale.int16_pair); }
    Float32x16 end(int32_t offset) const { return convert<float>(group_ + offset); }

private:
    Int32x16 half_{}, group_{};
};
#endif

#if defined(SRV_INT16_ACTIVATIONS)
template <>
class GroupSum<DotPath::int16> {
public:
    void begin_half(int32_t) {}
    void add(const Int32x16& quants, const Int32x16& x, int) { group_ = dot_pairs(group_, quants, x); }
    void end_half(const SubScale&) {}
    Float32x16 end(int32_t offset) const { return convert<float>(group_ + offset); }

private:
    Int32x16 group_{};
};
#endif

// How x is quantized for a format, and which sums of x it needs: values for the minimums, per group, or compensations
// of the zero point, per half K block or group. With groups of 16, a half K block is a group.
template <PackedShape SHAPE>
struct QuantScheme {
    static constexpr bool HAS_MIN = SHAPE.has_min;
    static constexpr DotPath PATH = dot_path_of(SHAPE);
    static constexpr bool PER_HALF = SHAPE.group == LANES || (ends_per_half(PATH) && !HAS_MIN);
    static constexpr float MAX_SUB_SCALE = max_sub_scale(SHAPE);
    static constexpr float ROW_LEVELS = MAX_SUB_SCALE * max_input_quant(PATH);  // row_scale: largest / ROW_LEVELS
    static constexpr int64_t sums(int64_t inputs) { return inputs / (PER_HALF ? LANES : K_BLOCK); }
};

// Stores the bits of the largest magnitude of each half K block; returns those of the row. >= INFINITE: not finite.
template <class T>
inline int32_t largest_magnitudes(const T* x, int64_t inputs, int32_t* to) {
    Int32x4 largest = {};
    for (int64_t i = 0; i < inputs; i += K_BLOCK, to += 2) {
        const Int32x4 two = reduce(magnitude_bits(load(x + i)), magnitude_bits(load(x + i + LANES)), max_lanes);
        std::memcpy(to, &two, 2 * sizeof(*to));
        largest = max_lanes(largest, two);
    }
    return largest[0] > largest[1] ? largest[0] : largest[1];
}

template <DotPath PATH>
inline void store_sub_scales(SubScale* to, const Int32x4& sub_scales) {
    for (int h = 0; h < 2; ++h) {
        if constexpr (ends_per_half(PATH)) {
            to[h].value = static_cast<float>(sub_scales[h]);
        } else {
            to[h].int16_pair = sub_scales[h] * 0x10001;
        }
    }
}

// Stores the sums of two halves, as values or compensations. Returns the address of the next sums.
template <class Scheme>
inline InputSum* store_input_sums(InputSum* to, const Float32x4& sums, const Int32x4& sub_scales, int32_t zero_point) {
    const Float32x4 values = sums * __builtin_convertvector(sub_scales, Float32x4);
    Int32x4 offsets = __builtin_convertvector(sums, Int32x4) * -zero_point;
    if constexpr (!ends_per_half(Scheme::PATH)) offsets *= sub_scales;
    const auto store_sum = [to](int index, float value, int32_t offset) {
        if constexpr (Scheme::HAS_MIN) {
            to[index].value = value;
        } else {
            to[index].offset = offset;
        }
    };
    if constexpr (Scheme::PER_HALF) {
        store_sum(0, values[0], offsets[0]), store_sum(1, values[1], offsets[1]);
        return to + 2;
    }
    store_sum(0, values[0] + values[1], offsets[0] + offsets[1]);
    return to + 1;
}

// The inputs of a row in the order of the weight's: those of x, or copies in memory of this thread, until its next
// call.
template <class T>
const T* inputs_of(const GgufLinearArgs& a, int64_t row) {
    const T* x = static_cast<const T*>(a.x) + x_row_of(a.grouping, row) * a.x_stride;
    if (a.columns == nullptr) return x;
    thread_local std::vector<T> ordered;
    if (static_cast<int64_t>(ordered.size()) < a.inputs) ordered.resize(a.inputs);
    T* const to = ordered.data();
    const int32_t* const columns = a.columns;
#pragma GCC unroll 16
    for (int64_t i = 0; i < a.inputs; ++i) to[i] = x[columns[i]];
    return to;
}

#if defined(SRV_INT16_ACTIVATIONS)
// Quantizes a row of x to 16 bits and sums it.
template <class T, class Scheme>
    requires(Scheme::PATH == DotPath::int16)
void quantize_row(const GgufLinearArgs& a, int64_t row) {
    const T* x = inputs_of<T>(a, row);
    int16_t* quantized_out = static_cast<int16_t*>(a.quantized) + row * a.inputs;
    InputSum* sums_out = a.x_sums + row * Scheme::sums(a.inputs);
    const QuantScale scale = quant_scale_of(x, a.inputs, Scheme::ROW_LEVELS);
    a.row_scales[row] = scale.value;
    for (int64_t i = 0; i < a.inputs;) {
        Int32x16 total{};
        for (const int64_t end = i + (Scheme::PER_HALF ? LANES : K_BLOCK); i < end; i += LANES) {
            const Int32x16 quantized = scale.quantize(load(x + i));
            store_int16(quantized_out + i, quantized);
            total += quantized;
        }
        (sums_out++)->offset = reduce(total, add_lanes) * -a.zero_point;
    }
}
#endif

// Quantizes a row of x to 8 bits; stores its sub-scales and sums. A sub-scale is the smallest integer that keeps 16
// inputs within 127.
template <class T, class Scheme>
void quantize_row(const GgufLinearArgs& a, int64_t row) {
    const T* x = inputs_of<T>(a, row);
    int8_t* quantized_out = static_cast<int8_t*>(a.quantized) + row * a.inputs;
    SubScale* sub_scales_out = a.sub_scales + row * (a.inputs / LANES);
    InputSum* sums_out = a.x_sums + row * Scheme::sums(a.inputs);
    const int32_t row_largest = largest_magnitudes(x, a.inputs, &sub_scales_out->int16_pair);  // overwritten below
    const QuantScale scale(row_largest, Scheme::ROW_LEVELS);
    a.row_scales[row] = scale.value;
    for (int64_t i = 0; i < a.inputs; i += K_BLOCK, sub_scales_out += 2) {
        const Int32x4 largest = {sub_scales_out[0].int16_pair, sub_scales_out[1].int16_pair};
        Float32x4 needed = bits_as<float>(largest) * (scale.inverse * (1.0f / 127.0f));
        needed = needed < Scheme::MAX_SUB_SCALE - 1.0f ? needed : Float32x4{} + (Scheme::MAX_SUB_SCALE - 1.0f);
        const Int32x4 sub_scales = __builtin_convertvector(needed, Int32x4) + 1;
        const Float32x4 divisors = __builtin_convertvector(sub_scales, Float32x4), inverses = scale.inverse / divisors;
        Float32x16 quantized[2];
        for (int h = 0; h < 2; ++h) {
            quantized[h] = quantize(load(x + i + h * LANES), inverses[h]);
            store_bytes(quantized_out + i + h * LANES, convert<int32_t>(quantized[h]));
        }
        store_sub_scales<Scheme::PATH>(sub_scales_out, sub_scales);
        sums_out = store_input_sums<Scheme>(sums_out, reduce(quantized[0], quantized[1], add_lanes), sub_scales,
                                            a.zero_point);
    }
}

// The layout of a block of outputs once it is unpacked for many rows: a byte per weight, and for each K block scales
// and minimums in float32.
constexpr PackedShape unpacked(PackedShape shape) {
    shape.bits = 8;
    shape.scales = ScaleType::float32, shape.scale_blocks = 1;
    return shape;
}

// The layout of a block of outputs as tiles read it.
template <PackedShape SHAPE>
struct Layout {
    using Scale = std::conditional_t<SHAPE.scales == ScaleType::float32, float,
                                     std::conditional_t<SHAPE.scales == ScaleType::bfloat16, BFloat16, Half>>;
    static constexpr int64_t SCALES = scale_bytes(SHAPE), SIZE = k_block_bytes(SHAPE);

    static Float32x16 scales(const uint8_t* at) { return load(reinterpret_cast<const Scale*>(at)); }
};

// The entries of a table in registers: the bytes `part` of all.
inline Int32x16 table_part(const QuantTable* table, int part) {
    return build<Int32x16>([=](auto& lanes, int) {
        for (size_t at = 0; at < sizeof(lanes); at += 16) {
            std::memcpy(reinterpret_cast<uint8_t*>(&lanes) + at, table->bytes[part], 16);
        }
    });
}

struct alignas(64) CacheLine {
    uint8_t bytes[64];
};

// Loads the weights of quad `quad` of half `half` of a K block for COUNT vectors of outputs, the first at `from`.
template <int BITS, int COUNT>
inline void load_quants(const uint8_t* from, int half, int quad, Int32x16 (&quants)[COUNT]) {
    constexpr int64_t STRIDE = BLOCK_OUTPUTS * 4;  // bytes of a dword per output
    constexpr int QUADS = BITS == 3 ? 4 : 8 / BITS;  // in a dword
    const uint8_t* dwords = from + (half * (LANES / 4 / QUADS) + quad / QUADS) * STRIDE;
    for (int v = 0; v < COUNT; ++v) {
        quants[v] = load_dwords(dwords + v * LANES * 4);
        if constexpr (BITS == 4) quants[v] = (quad % 2 ? quants[v] >> 4 : quants[v]) & 0x0f0f0f0f;
        if constexpr (BITS < 4) quants[v] = (quants[v] >> 2 * quad) & 0x03030303;
        if constexpr (BITS == 3) {
            const Int32x16 thirds = load_dwords(from + HIGH_BITS_AT + v * LANES * 4) >> 4 * half;
            quants[v] = quants[v] | ((quad < 2 ? thirds << (2 - quad) : thirds >> (quad - 2)) & 0x04040404);
        }
    }
}

// Unpacks a block of weights of less than 8 bits to memory of this thread, valid until the thread unpacks another
// block. Indices of entries of two bytes stay indices.
template <PackedShape SHAPE>
const uint8_t* unpacked_block(const uint8_t* packed, int64_t inputs, const QuantTable* table) {
    constexpr PackedShape TO_SHAPE = unpacked(SHAPE);
    using From = Layout<SHAPE>;
    using To = Layout<TO_SHAPE>;
    static_assert(To::SIZE % sizeof(CacheLine) == 0);
    thread_local std::vector<CacheLine> memory;
    const int64_t k_blocks = inputs / K_BLOCK;
    const int64_t cache_lines = k_blocks * To::SIZE / static_cast<int64_t>(sizeof(CacheLine));
    if (static_cast<int64_t>(memory.size()) < cache_lines) memory.resize(cache_lines);
    auto* const begin = reinterpret_cast<uint8_t*>(memory.data());
    uint8_t* to = begin;
    Int32x16 entries{};
    if constexpr (SHAPE.table_bytes == 1) entries = table_part(table, 0);
    constexpr int64_t QUANTS_AT = quants_at(TO_SHAPE, 0);
    for (int64_t s = 0; s < k_blocks; ++s, to += To::SIZE) {
        prefetch(packed + s * From::SIZE, From::SIZE, PREFETCH_AHEAD);
        const uint8_t* scales = packed + scales_at(SHAPE, s);
        for (int64_t at = 0; at < QUANTS_AT; at += LANES * 4) {
            store(reinterpret_cast<float*>(to + at), From::scales(scales + at / 4 * scale_size(SHAPE)));
        }
#pragma GCC unroll 8
        for (int quad = 0; quad < K_BLOCK / 4; ++quad) {
            Int32x16 quants[BLOCK_OUTPUTS / LANES];
            load_quants<SHAPE.bits>(packed + quants_at(SHAPE, s), quad / 4, quad % 4, quants);
            for (int v = 0; v < BLOCK_OUTPUTS / LANES; ++v) {
                if constexpr (SHAPE.table_bytes == 1) quants[v] = byte_lookup(entries, quants[v]);
                auto* at = to + QUANTS_AT + (quad * BLOCK_OUTPUTS + v * LANES) * 4;
                store(reinterpret_cast<int32_t*>(at), quants[v]);
            }
        }
    }
    return begin;
}

// Computes COUNT rows by VECTORS vectors of outputs, from output `first` of the block at `weight`. The rows are
// interleaved quad by quad, so that their dependency chains overlap. `prefetches`: the block is not in the caches yet.
template <class T, PackedShape SHAPE, bool UNPACKED, int COUNT, int VECTORS>
inline void tile(const GgufLinearArgs& a, const uint8_t* weight, int64_t block, int64_t first, int64_t row,
                 bool prefetches) {
    constexpr PackedShape STORED = UNPACKED ? unpacked(SHAPE) : SHAPE;
    using Weight = Layout<STORED>;
    constexpr int GROUP = SHAPE.group, TABLE = SHAPE.table_bytes;
    constexpr bool HAS_MIN = SHAPE.has_min;
    constexpr int64_t SCALE = scale_size(STORED);
    constexpr int GROUPS = K_BLOCK / GROUP, HALVES = GROUP / LANES;
    static_assert(LANES == 16, "half a k_block is one vector");
    using Scheme = QuantScheme<SHAPE>;
    constexpr DotPath PATH = Scheme::PATH;
    constexpr bool INT32_PATH = ends_per_half(PATH);
    constexpr int QUANT_BYTES = PATH == DotPath::int16 ? 2 : 1;  // bytes per quantized input
    Int32x16 entries[2]{};
    if constexpr (TABLE != 0) {
        const QuantTable* table = table_of(a.ggml_type);
        for (int p = 0; p < TABLE; ++p) entries[p] = table_part(table, p);
    }
    const int64_t halves = a.inputs / LANES, groups = halves / HALVES;
    const int8_t* quantized = static_cast<const int8_t*>(a.quantized) + row * a.inputs * QUANT_BYTES;
    const SubScale* sub_scales = a.sub_scales + row * halves;
    const int64_t x_sums_stride = Scheme::sums(a.inputs);
    const InputSum* x_sums = a.x_sums + row * x_sums_stride;
    Float32x16 totals[COUNT][VECTORS] = {};
    for (int64_t group = 0; group < groups; ++group) {
        const int g = static_cast<int>(group % GROUPS);
        const int64_t k_block = group / GROUPS;
        const uint8_t* group_scales = weight + scales_at(STORED, k_block) + (g * BLOCK_OUTPUTS + first) * SCALE;
        const uint8_t* k_block_quants = weight + quants_at(STORED, k_block) + first * 4;
        if (!UNPACKED && prefetches) {
            constexpr int64_t BYTES = Weight::SIZE / GROUPS;
            prefetch(weight + group * BYTES, BYTES, PREFETCH_AHEAD);
        }
        GroupSum<PATH> sums[COUNT][VECTORS];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; ++h) {
            const int64_t half = group * HALVES + h;
            for (int r = 0; r < COUNT; ++r) {
                const int32_t offset = INT32_PATH && !HAS_MIN ? x_sums[r * x_sums_stride + half].offset : 0;
                for (int v = 0; v < VECTORS; ++v) sums[r][v].begin_half(offset);
            }
#pragma GCC unroll 4
            for (int quad = 0; quad < LANES / 4; ++quad) {
                Int32x16 quants[VECTORS];
                load_quants<STORED.bits>(k_block_quants, g * HALVES + h, quad, quants);
                Int32x16 parts[VECTORS][PARTS<PATH>];
                for (int v = 0; v < VECTORS; ++v) {
                    if constexpr (TABLE == 2) {
                        for (int p = 0; p < 2; ++p) parts[v][p] = byte_lookup(entries[p], quants[v]);
                    } else {
                        if constexpr (TABLE == 1 && !UNPACKED) quants[v] = byte_lookup(entries[0], quants[v]);
                        split<PATH>(quants[v], parts[v]);
                    }
                }
#pragma GCC unroll 2
                for (int p = 0; p < PARTS<PATH>; ++p) {
#pragma GCC unroll 8
                    for (int r = 0; r < COUNT; ++r) {
                        const int64_t at = ((r * halves + half) * LANES + quad * 4) * QUANT_BYTES;
                        const Int32x16 input = broadcast_dword(quantized + at + p * 4 * (QUANT_BYTES - 1));
                        for (int v = 0; v < VECTORS; ++v) sums[r][v].add(parts[v][p], input, p);
                    }
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; ++r) {
                for (int v = 0; v < VECTORS; ++v) sums[r][v].end_half(sub_scales[r * halves + half]);
            }
        }
        for (int v = 0; v < VECTORS; ++v) {
            const Float32x16 scales = Weight::scales(group_scales + v * LANES * SCALE);
            Float32x16 mins{};
            if constexpr (HAS_MIN) mins = Weight::scales(group_scales + Weight::SCALES + v * LANES * SCALE);
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; ++r) {
                const int32_t offset = INT32_PATH || HAS_MIN ? 0 : x_sums[r * x_sums_stride + group].offset;
                totals[r][v] += sums[r][v].end(offset) * scales;
                if constexpr (HAS_MIN) totals[r][v] += mins * x_sums[r * x_sums_stride + group].value;
            }
        }
    }
    const float unit = packed_format_of(a.ggml_type).unit;
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = block * BLOCK_OUTPUTS + first + v * LANES;
        const int64_t lanes = a.outputs - column < LANES ? a.outputs - column : LANES;
        if (lanes <= 0) break;
        const Float32x16 bias =
            a.bias == nullptr ? Float32x16{} : load_partial(static_cast<const T*>(a.bias) + column, lanes);
        for (int r = 0; r < COUNT; ++r) {
            const Float32x16 value = totals[r][v] * (a.row_scales[row + r] * unit) + bias;
            store_results<T>(a.out, (row + r) * a.out_stride + column, value, lanes, a.float32_out != 0);
        }
    }
}

template <class T, PackedShape SHAPE, bool UNPACKED, class BlockWeight>
void multiply_tiles(const GgufLinearArgs& a, const RowGroup& group, Range items, const BlockWeight& block_weight) {
    constexpr int HIGHEST = tile_rows(dot_path_of(SHAPE));
    const auto compute_tile = [&]<int COUNT>(const auto* weight, int64_t block, int64_t row) {
        constexpr int VECTORS = COUNT == 1 ? BLOCK_OUTPUTS / LANES : VECTORS_OF_ROWS;
        for (int64_t first = 0; first < BLOCK_OUTPUTS; first += VECTORS * LANES) {
            const bool prefetches = row == group.begin && first == 0;  // the first tile reads the block from memory
            tile<T, SHAPE, UNPACKED, COUNT, VECTORS>(a, weight, block, first, row, prefetches);
        }
    };
    run_tiles<HIGHEST>(items, group.begin, group.rows, block_weight, compute_tile);
}

// Runs the tiles [begin, end) of the rows of a group.
template <class T, PackedShape SHAPE>
void multiply_rows(const GgufLinearArgs& a, const RowGroup& group, Range items) {
    const int64_t block_size = a.inputs / K_BLOCK * Layout<SHAPE>::SIZE;
    const uint8_t* weight = a.weight + group.weight * blocks(a.outputs) * block_size;
    const auto packed = [&](int64_t block) { return weight + block * block_size; };
    if constexpr (SHAPE.bits != 8) {
        if (group.rows >= UNPACK_FROM_ROWS) {
            const QuantTable* table = table_of(a.ggml_type);
            const auto unpack = [&](int64_t block) {
                return unpacked_block<SHAPE>(packed(block), a.inputs, table);
            };
            return multiply_tiles<T, SHAPE, true>(a, group, items, unpack);
        }
    }
    multiply_tiles<T, SHAPE, false>(a, group, items, packed);
}

template <class T, PackedShape SHAPE>
void multiply(const GgufLinearArgs& a) {
    for_rows(a.rows, a.inputs, [&](int64_t row) {
        quantize_row<T, QuantScheme<SHAPE>>(a, row);
    });
    const OneGroup all(a.rows);
    const Grouping& grouping = a.grouping == nullptr ? all.grouping : *a.grouping;
    constexpr int HIGHEST = tile_rows(dot_path_of(SHAPE));
    for_groups<HIGHEST>(grouping, a.rows, a.inputs, a.outputs, [&](const RowGroup& group, Range items) {
        GgufLinearArgs mine = a;
        if (a.bias != nullptr) mine.bias = static_cast<const T*>(a.bias) + group.weight * a.outputs;
        multiply_rows<T, SHAPE>(mine, group, items);
    });
}

// Calls `run` with the shape of a type, as a constant.
template <PackedShape... SHAPES, class Run>
void with_shape(PackedShape shape, const Run& run) {
    ((shape == SHAPES ? run.template operator()<SHAPES>() : void()), ...);
}

// Of all types.
template <class Run>
void of_shape(PackedShape shape, const Run& run) {
    with_shape<Q4_SHAPE, Q4_MIN_SHAPE, Q8_SHAPE, Q8_MIN_SHAPE, Q2_K_SHAPE, Q3_K_SHAPE, Q6_K_SHAPE, TABLE4_SHAPE,
               TABLE4_FLOAT_SHAPE, TABLE4_POWER_SHAPE, WIDE_TABLE4_SHAPE, TERNARY_SHAPE, TABLE3_SHAPE, TABLE3_K_SHAPE>(
        shape, run);
}

template <class T>
void multiply_impl(const GgufLinearArgs& a) {
    of_shape(packed_format_of(a.ggml_type).shape, [&]<PackedShape SHAPE>() { multiply<T, SHAPE>(a); });
}

// A packed scale or minimum.
inline float read_scale(ScaleType type, const uint8_t* from) {
    if (type == ScaleType::float32) {
        float value;
        std::memcpy(&value, from, sizeof(value));
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return type == ScaleType::half ? from_half(bits) : to_float(BFloat16{bits});
}

inline void store_scale(ScaleType type, uint8_t* to, float value) {
    if (type == ScaleType::float32) {
        std::memcpy(to, &value, sizeof(value));
        return;
    }
    const uint16_t bits = type == ScaleType::half ? to_half(value) : to_bfloat16(value).bits;
    std::memcpy(to, &bits, sizeof(bits));
}

// Where weight `i` of an output is in the quantized weights of a K block: the byte and shift of its field, and of the
// third bit. See `load_quants`.
struct QuantPlace {
    int64_t at, third_at;
    int shift, third_shift;

    QuantPlace(int bits, int64_t output, int64_t i) {
        const int64_t quad = i / 4, per_dword = bits == 3 ? 4 : 8 / bits, byte = output * 4 + i % 4;
        at = quad / per_dword * BLOCK_OUTPUTS * 4 + byte;
        shift = static_cast<int>(quad % per_dword) * (bits == 3 ? 2 : bits);
        third_at = HIGH_BITS_AT + byte;
        third_shift = static_cast<int>(quad);
    }
};

inline int read_quant(int bits, const uint8_t* quants, int64_t output, int64_t i) {
    const QuantPlace place(bits, output, i);
    const int field = quants[place.at] >> place.shift;
    if (bits == 3) return (field & 3) | (quants[place.third_at] >> place.third_shift & 1) << 2;
    return field & ((1 << bits) - 1);
}

// Adds a weight to memory that is 0.
inline void add_quant(int bits, uint8_t* quants, int64_t output, int64_t i, int quant) {
    const QuantPlace place(bits, output, i);
    quants[place.at] |= static_cast<uint8_t>((bits == 3 ? quant & 3 : quant) << place.shift);
    if (bits == 3) quants[place.third_at] |= static_cast<uint8_t>(quant >> 2 << place.third_shift);
}

// Dequantizes a row of a packed weight to type T.
template <class T, PackedShape SHAPE>
void dequantize_row(const GgufRowsArgs& a, int64_t row, T* to) {
    const PackedFormat format = packed_format_of(a.ggml_type);
    const QuantTable* table = table_of(a.ggml_type);
    const int64_t output = row % BLOCK_OUTPUTS, k_blocks = a.inputs / K_BLOCK;
    const uint8_t* packed = a.weight + row / BLOCK_OUTPUTS * k_blocks * k_block_bytes(SHAPE);
    for (int64_t s = 0; s < k_blocks; ++s) {
        const uint8_t *scales = packed + scales_at(SHAPE, s), *quants = packed + quants_at(SHAPE, s);
        for (int64_t first = 0; first < K_BLOCK; first += SHAPE.group) {
            const int64_t at = (first / SHAPE.group * BLOCK_OUTPUTS + output) * scale_size(SHAPE);
            const float scale = read_scale(SHAPE.scales, scales + at) * format.unit;
            const float min = SHAPE.has_min ? read_scale(SHAPE.scales, scales + scale_bytes(SHAPE) + at) : 0;
            for (int64_t i = first; i < first + SHAPE.group; ++i) {
                const int field = read_quant(SHAPE.bits, quants, output, i);
                const int quant = table == nullptr ? field : table->quant(field);
                store_scalar(to + s * K_BLOCK + i, scale * static_cast<float>(quant - format.zero_point) + min);
            }
        }
    }
}

template <class T>
void rows_impl(const GgufRowsArgs& a) {
    of_shape(packed_format_of(a.ggml_type).shape, [&]<PackedShape SHAPE>() {
        for_rows(a.rows, a.inputs, [&](int64_t i) {
            dequantize_row<T, SHAPE>(a, a.indices[i], static_cast<T*>(a.out) + i * a.inputs);
        });
    });
}

}  // namespace

void gguf_linear(Type type, const GgufLinearArgs& given) {
    GgufLinearArgs args = given;
    args.zero_point = packed_format_of(args.ggml_type).zero_point;
    type == Type::float32 ? multiply_impl<float>(args) : multiply_impl<BFloat16>(args);
}

void gguf_rows(Type type, const GgufRowsArgs& args) {
    type == Type::float32 ? rows_impl<float>(args) : rows_impl<BFloat16>(args);
}

void pack_gguf(const PackGgufArgs& a) {
    const PackedShape shape = packed_format_of(a.ggml_type).shape;
    const int64_t k_blocks = a.inputs / K_BLOCK, size = k_block_bytes(shape), groups = K_BLOCK / shape.group;
    parallel(false, [&](int chunk, int chunks) {
        const Range mine = chunk_range(blocks(a.outputs), chunk, chunks);
        for (int64_t block = mine.begin; block < mine.end; ++block) {
            uint8_t* to = a.packed + block * k_blocks * size;
            std::memset(to, 0, k_blocks * size);
            for (int64_t output = 0; output < BLOCK_OUTPUTS && block * BLOCK_OUTPUTS + output < a.outputs; ++output) {
                const uint8_t* row = a.rows + (block * BLOCK_OUTPUTS + output) * a.stride;
                for (int64_t s = 0; s < k_blocks; ++s) {
                    KBlock k_block = {};
                    read_k_block(a.ggml_type, row, s, k_block);
                    uint8_t *const scales = to + scales_at(shape, s), *const quants = to + quants_at(shape, s);
                    for (int64_t g = 0; g < groups; ++g) {
                        uint8_t* const at = scales + (g * BLOCK_OUTPUTS + output) * scale_size(shape);
                        store_scale(shape.scales, at, k_block.scale[g]);
                        if (shape.has_min) store_scale(shape.scales, at + scale_bytes(shape), k_block.min[g]);
                    }
                    for (int64_t i = 0; i < K_BLOCK; ++i) add_quant(shape.bits, quants, output, i, k_block.quants[i]);
                }
            }
        }
    });
}

}  // namespace srv::SRV_ISA
