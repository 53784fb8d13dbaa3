// Quantized weights of GGUF files, and the one format that all types are repacked to: unsigned integers of 4 or 8 bits,
// a scale per group of 16 or 32 inputs, and either a zero point of the type or a minimum per group:
//
//     weight = scale * (quant - zero_point)        or        weight = scale * quant + min
//
// The 4 bits of some types are indices of a table of 16 unsigned integers, of 1 or 2 bytes each, which are the quants.
// Their scales are float32, since powers of two (MXFP4) and scales of float32 (NF4) do not fit half precision.
#pragma once

#include <cstdint>
#include <cstring>

namespace srv {

constexpr int64_t K_BLOCK = 32;         // inputs per K block: the unit of the packed layout, together with 32 outputs
constexpr int64_t MAX_QUANT_BYTES = 2;  // bytes of a quantized input, at most

// The packed format of a type.
struct PackedFormat {
    int bits, group;
    bool has_min;
    int zero_point;
    int table_bytes = 0;  // of an entry of the table; 0: none
};

// The values of ggml_type; those from 1000 on are types of other checkpoints (see srv.models.formats.gguf_types).
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
    iq4_nl = 20,
    iq4_xs = 23,
    mxfp4 = 39,
    nf4 = 1000,
    fp4 = 1001,
};

constexpr PackedFormat packed_format_of(GgmlType type) {
    switch (type) {
        case GgmlType::q4_0: return {4, 32, false, 8};
        case GgmlType::q4_1: return {4, 32, true, 0};
        case GgmlType::q5_0: return {8, 32, false, 16};
        case GgmlType::q5_1: return {8, 32, true, 0};
        case GgmlType::q8_0: return {8, 32, false, 128};
        case GgmlType::q2_k: return {4, 16, true, 0};
        case GgmlType::q3_k: return {4, 16, false, 4};
        case GgmlType::q4_k: return {4, 32, true, 0};
        case GgmlType::q5_k: return {8, 32, true, 0};
        case GgmlType::q6_k: return {8, 16, false, 32};
        case GgmlType::iq4_nl:
        case GgmlType::iq4_xs: return {4, 32, false, 128, 1};
        case GgmlType::mxfp4: return {4, 32, false, 12, 1};
        case GgmlType::nf4: return {4, 32, false, 32768, 2};
        case GgmlType::fp4: return {4, 32, false, 192, 2};
    }
    return {};
}

// The table of a type, with the zero point added to its values: the low byte of each entry, then the high byte.
struct QuantTable {
    uint8_t bytes[2][16];

    constexpr int quant(int index) const { return bytes[0][index] | bytes[1][index] << 8; }
};
const QuantTable* table_of(GgmlType type);  // null: none

// Bytes of a K block of 32 outputs: scales and minimums, in half precision or float32, and the quantized weights.
constexpr int64_t scale_size(PackedFormat format) { return format.table_bytes != 0 ? 4 : 2; }
constexpr int64_t scale_bytes(PackedFormat format) { return K_BLOCK / format.group * 32 * scale_size(format); }
constexpr int64_t k_block_bytes(PackedFormat format) {
    return scale_bytes(format) * (format.has_min ? 2 : 1) + K_BLOCK * 32 * format.bits / 8;
}

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
