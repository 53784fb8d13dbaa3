// Quantized weights of GGUF files, and the one format that all types are repacked to: unsigned integers of 2, 3, 4 or
// 8 bits, a scale per group of 16 or 32 inputs, and either a zero point of the type or a minimum per group:
//
//     weight = unit * scale * (quant - zero_point)        or        weight = scale * quant + min
//
// The 3 or 4 bits of some types are indices of a table of 8 or 16 unsigned integers, of 1 or 2 bytes each, which are
// the quants. Scales are in half precision, where those of the type fit it. Powers of two (MXFP4) fit bfloat16, and
// those of other types are float32. NF4 and FP4 have one for two K blocks.
#pragma once

#include <cstdint>
#include <cstring>

namespace srv {

constexpr int64_t K_BLOCK = 32;         // inputs per K block: the unit of the packed layout, together with 32 outputs
constexpr int64_t MAX_QUANT_BYTES = 2;  // bytes of a quantized input, at most

enum class ScaleType { half, bfloat16, float32 };

// What kernels are compiled for.
struct PackedShape {
    int bits = 0, group = K_BLOCK;
    bool has_min = false;
    int table_bytes = 0;  // of an entry of the table; 0: none
    ScaleType scales = ScaleType::half;  // and minimums
    int scale_blocks = 1;  // consecutive K blocks with the same scales

    constexpr bool operator==(const PackedShape&) const = default;
};
constexpr PackedShape Q4_SHAPE{4, 32}, Q4_MIN_SHAPE{4, 32, true}, Q8_SHAPE{8, 32}, Q8_MIN_SHAPE{8, 32, true};
constexpr PackedShape Q2_K_SHAPE{4, 16, true}, Q3_K_SHAPE{4, 16}, Q6_K_SHAPE{8, 16};
constexpr PackedShape TABLE4_SHAPE{4, 32, false, 1}, TABLE4_FLOAT_SHAPE{4, 32, false, 1, ScaleType::float32};
constexpr PackedShape TABLE4_POWER_SHAPE{4, 32, false, 1, ScaleType::bfloat16};
constexpr PackedShape WIDE_TABLE4_SHAPE{4, 32, false, 2, ScaleType::float32, 2};
constexpr PackedShape TERNARY_SHAPE{2, 32}, TABLE3_SHAPE{3, 32, false, 1}, TABLE3_K_SHAPE{3, 16, false, 1};

// The packed format of a type. unit: a power of two, by which packed scales are multiplied, so that they are not
// subnormal numbers.
struct PackedFormat {
    PackedShape shape;
    int zero_point = 0;
    float unit = 1;
};

// The values of ggml_type; those from 1000 on are types of other checkpoints (see srv.models.checkpoints.gguf_types).
enum class GgmlType : int32_t {
    q4_0 = 2,
    q4_1 = 3,
    q5_0 = 6,
    q5_1 = 7,
    q8_0 = 8,
    q2_k = 10,
    q3_k = 11,
    q4_k = 12,
    q5_k = 13,
    q6_k = 14,
    iq2_xxs = 16,
    iq2_xs = 17,
    iq3_xxs = 18,
    iq1_s = 19,
    iq4_nl = 20,
    iq3_s = 21,
    iq2_s = 22,
    iq4_xs = 23,
    iq1_m = 29,
    tq1_0 = 34,
    tq2_0 = 35,
    mxfp4 = 39,
    nf4 = 1000,
    fp4 = 1001,
};

constexpr PackedFormat packed_format_of(GgmlType type) {
    switch (type) {
        case GgmlType::q4_0: return {Q4_SHAPE, 8};
        case GgmlType::q4_1: return {Q4_MIN_SHAPE};
        case GgmlType::q5_0: return {Q8_SHAPE, 16};
        case GgmlType::q5_1: return {Q8_MIN_SHAPE};
        case GgmlType::q8_0: return {Q8_SHAPE, 128};
        case GgmlType::q2_k: return {Q2_K_SHAPE};
        case GgmlType::q3_k: return {Q3_K_SHAPE, 4};
        case GgmlType::q4_k: return {Q4_MIN_SHAPE};
        case GgmlType::q5_k: return {Q8_MIN_SHAPE};
        case GgmlType::q6_k: return {Q6_K_SHAPE, 32};
        case GgmlType::iq4_nl: return {TABLE4_SHAPE, 128};
        case GgmlType::iq4_xs: return {TABLE4_FLOAT_SHAPE, 128};
        case GgmlType::mxfp4: return {TABLE4_POWER_SHAPE, 12};
        case GgmlType::nf4: return {WIDE_TABLE4_SHAPE, 32768};
        case GgmlType::fp4: return {WIDE_TABLE4_SHAPE, 192};
        case GgmlType::tq1_0:
        case GgmlType::tq2_0: return {TERNARY_SHAPE, 1};
        case GgmlType::iq1_s: return {TABLE3_SHAPE, 9, 0.125f};
        case GgmlType::iq1_m: return {TABLE3_K_SHAPE, 9, 0.125f};
        case GgmlType::iq2_xxs: return {TABLE3_SHAPE, 43, 0.125f};
        case GgmlType::iq2_xs:
        case GgmlType::iq2_s: return {TABLE3_K_SHAPE, 43, 0.125f};
        case GgmlType::iq3_xxs: return {TABLE4_SHAPE, 62, 0.25f};
        case GgmlType::iq3_s: return {TABLE4_SHAPE, 15};
    }
    return {};
}

// The table of a type, with the zero point added to its values: the low byte of each entry, then the high byte.
struct QuantTable {
    uint8_t bytes[2][16];

    constexpr int quant(int index) const { return bytes[0][index] | bytes[1][index] << 8; }
};
const QuantTable* table_of(GgmlType type);  // null: none

// Bytes of K blocks of 32 outputs: of a scale, of the scales and minimums, of the quantized weights, and of all for one
// K block.
constexpr int64_t scale_size(PackedShape shape) { return shape.scales == ScaleType::float32 ? 4 : 2; }
constexpr int64_t scale_bytes(PackedShape shape) { return K_BLOCK / shape.group * 32 * scale_size(shape); }
constexpr int64_t quant_bytes(PackedShape shape) { return K_BLOCK * 32 * shape.bits / 8; }
constexpr int64_t k_block_bytes(PackedShape shape) {
    return scale_bytes(shape) * (shape.has_min ? 2 : 1) / shape.scale_blocks + quant_bytes(shape);
}

// Where the scales and the quantized weights of K block `index` are. Minimums follow the scales.
constexpr int64_t scales_at(PackedShape shape, int64_t index) {
    return index / shape.scale_blocks * shape.scale_blocks * k_block_bytes(shape);
}
constexpr int64_t quants_at(PackedShape shape, int64_t index) {
    const int64_t before = index % shape.scale_blocks * quant_bytes(shape);
    return scales_at(shape, index) + scale_bytes(shape) * (shape.has_min ? 2 : 1) + before;
}
constexpr int64_t HIGH_BITS_AT = K_BLOCK * 32 * 2 / 8;  // the third bits of weights follow the other two

inline float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t rest = static_cast<uint32_t>(half & 0x7fffu) << 13;
    const bool finite = (half & 0x7c00u) != 0x7c00u;
    const uint32_t bits = sign | rest | (finite ? 0u : 0x7f800000u);
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return finite ? value * 0x1p112f : value;  // corrects the exponent bias, for subnormals as well
}

// Rounds to nearest, ties to even; overflow becomes infinity.
inline uint16_t to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    if (value != value) return 0x7e00u;
    float magnitude = value < 0 ? -value : value;
    if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x1p-14f) {  // subnormal: multiples of 2^-24
        const float quants = magnitude * 0x1p24f;
        return static_cast<uint16_t>(sign | static_cast<uint16_t>((quants + 8388608.0f) - 8388608.0f));
    }
    std::memcpy(&bits, &magnitude, sizeof(bits));
    bits += 0xfffu + (bits >> 13 & 1u);
    return static_cast<uint16_t>(sign | ((bits - (112u << 23)) >> 13));
}

// 32 quantized weights of one output, with the scale and minimum of each group: two groups of 16, or one of 32.
struct KBlock {
    uint8_t quants[K_BLOCK];
    float scale[2], min[2];
};

// Unpacks K block `index` of a row in the file's format.
void read_k_block(GgmlType type, const uint8_t* row, int64_t index, KBlock& to);

// Bytes of a row of `inputs` weights in the file; -1 if it is not a whole number of blocks.
int64_t gguf_row_bytes(GgmlType type, int64_t inputs);

}  // namespace srv
