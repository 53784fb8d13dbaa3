// Unpacks the block formats of GGUF files, 32 weights (a K block) at a time.
//
// Sources: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml's reference implementation,
// ggml-quants.c. Q4_0 to Q8_0 have blocks of 32 weights. K-quants have super-blocks of 256 weights with quantized
// scales; a byte holds bits of weights from several K blocks, and K block i is in half i / 4. NF4 and FP4 are the types
// of bitsandbytes, 64 weights with a scale in float32, whose nibbles are in the order of GGUF's (see `nf4_table`).
// Types of 1 to 3 bits are in gguf_codebooks.h.
#include "gguf.h"

#include <array>

#include "gguf_codebooks.h"

namespace srv {
namespace {

// Two weights per byte: the low nibbles hold the first 16, the high nibbles the others.
void nibbles(const uint8_t* from, KBlock& to) {
    for (int i = 0; i < 16; ++i) {
        to.quants[i] = from[i] & 15;
        to.quants[i + 16] = from[i] >> 4;
    }
}

// The fifth bit of each of 32 weights.
void add_fifth_bits(const uint8_t* from, KBlock& to) {
    uint32_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    for (int i = 0; i < 32; ++i) to.quants[i] |= (bits >> i & 1) << 4;
}

void read_q4_0(const uint8_t* block, KBlock& to) {
    to.scale[0] = half_at(block);
    nibbles(block + 2, to);
}

void read_q4_1(const uint8_t* block, KBlock& to) {
    to.scale[0] = half_at(block);
    to.min[0] = half_at(block + 2);
    nibbles(block + 4, to);
}

void read_q5_0(const uint8_t* block, KBlock& to) {
    to.scale[0] = half_at(block);
    nibbles(block + 6, to);
    add_fifth_bits(block + 2, to);
}

void read_q5_1(const uint8_t* block, KBlock& to) {
    to.scale[0] = half_at(block);
    to.min[0] = half_at(block + 2);
    nibbles(block + 8, to);
    add_fifth_bits(block + 4, to);
}

void read_q8_0(const uint8_t* block, KBlock& to) {
    to.scale[0] = half_at(block);
    for (int i = 0; i < 32; ++i) to.quants[i] = block[2 + i] ^ 128;  // signed to unsigned: adds 128
}

// A 6-bit scale and a 6-bit minimum for each of 8 K blocks, in 12 bytes.
void read_k_scale(const uint8_t* scales, int k_block, float scale, float min, KBlock& to) {
    int scale_quant, min_quant;
    if (k_block < 4) {
        scale_quant = scales[k_block] & 63;
        min_quant = scales[k_block + 4] & 63;
    } else {
        scale_quant = (scales[k_block + 4] & 15) | (scales[k_block - 4] >> 6 << 4);
        min_quant = (scales[k_block + 4] >> 4) | (scales[k_block] >> 6 << 4);
    }
    to.scale[0] = scale * static_cast<float>(scale_quant);
    to.min[0] = -min * static_cast<float>(min_quant);
}

void read_q4_k(const uint8_t* block, int k_block, KBlock& to) {
    read_k_scale(block + 4, k_block, half_at(block), half_at(block + 2), to);
    const uint8_t* quants = block + 16 + k_block / 2 * 32;
    for (int i = 0; i < 32; ++i) to.quants[i] = k_block % 2 ? quants[i] >> 4 : quants[i] & 15;
}

void read_q5_k(const uint8_t* block, int k_block, KBlock& to) {
    read_k_scale(block + 4, k_block, half_at(block), half_at(block + 2), to);
    const uint8_t *fifth = block + 16, *quants = block + 48 + k_block / 2 * 32;
    for (int i = 0; i < 32; ++i) {
        const int low = k_block % 2 ? quants[i] >> 4 : quants[i] & 15;
        to.quants[i] = static_cast<uint8_t>(low | (fifth[i] >> k_block & 1) << 4);
    }
}

void read_q6_k(const uint8_t* block, int k_block, KBlock& to) {
    const int half = k_block / 4, quarter = k_block % 4;
    const uint8_t* low = block + half * 64 + quarter % 2 * 32;
    const uint8_t* high = block + 128 + half * 32;
    for (int i = 0; i < 32; ++i) {
        const int four = quarter < 2 ? low[i] & 15 : low[i] >> 4;
        to.quants[i] = static_cast<uint8_t>(four | (high[i] >> (2 * quarter) & 3) << 4);
    }
    const float scale = half_at(block + 208);
    for (int g = 0; g < 2; ++g) to.scale[g] = scale * static_cast<int8_t>(block[192 + k_block * 2 + g]);
}

void read_q2_k(const uint8_t* block, int k_block, KBlock& to) {
    const uint8_t* quants = block + 16 + k_block / 4 * 32;
    for (int i = 0; i < 32; ++i) to.quants[i] = quants[i] >> (2 * (k_block % 4)) & 3;
    const float scale = half_at(block + 80), min = half_at(block + 82);
    for (int g = 0; g < 2; ++g) {
        const uint8_t both = block[k_block * 2 + g];
        to.scale[g] = scale * static_cast<float>(both & 15);
        to.min[g] = -min * static_cast<float>(both >> 4);
    }
}

// 16 scales of 6 bits: 8 bytes with the low nibbles of two scales each, then 4 bytes with the high bits of four each.
int q3_k_scale(const uint8_t* scales, int index) {
    const int low = index < 8 ? scales[index] & 15 : scales[index - 8] >> 4;
    const int high = scales[8 + index % 4] >> (2 * (index / 4)) & 3;
    return (low | high << 4) - 32;
}

void read_q3_k(const uint8_t* block, int k_block, KBlock& to) {
    const uint8_t* quants = block + 32 + k_block / 4 * 32;
    for (int i = 0; i < 32; ++i) {
        const int low = quants[i] >> (2 * (k_block % 4)) & 3;
        to.quants[i] = static_cast<uint8_t>(low | (block[i] >> k_block & 1) << 2);
    }
    const float scale = half_at(block + 108);
    for (int g = 0; g < 2; ++g) to.scale[g] = scale * static_cast<float>(q3_k_scale(block + 96, k_block * 2 + g));
}

void read_iq4_xs(const uint8_t* block, int k_block, KBlock& to) {
    uint16_t high;
    std::memcpy(&high, block + 2, sizeof(high));
    const int low = block[4 + k_block / 2] >> (4 * (k_block % 2)) & 15;
    const int scale = low | (high >> (2 * k_block) & 3) << 4;
    to.scale[0] = half_at(block) * static_cast<float>(scale - 32);
    nibbles(block + 8 + k_block * 16, to);
}

// The scale is a power of two, 2^(byte - 128), of integers that are twice the values of E2M1.
void read_mxfp4(const uint8_t* block, KBlock& to) {
    const uint32_t bits = block[0] < 2 ? 0x00200000u << block[0] : static_cast<uint32_t>(block[0] - 1) << 23;
    std::memcpy(&to.scale[0], &bits, sizeof(bits));
    nibbles(block + 1, to);
}

// Blocks of 64 weights: a float32, of which one unit of the table is 1 / `units`, and the nibbles of two K blocks.
void read_table4(const uint8_t* block, int k_block, float units, KBlock& to) {
    float scale;
    std::memcpy(&scale, block, sizeof(scale));
    to.scale[0] = scale / units;
    nibbles(block + 4 + k_block * 16, to);
}

constexpr QuantTable table(const std::array<int, 16>& values, int zero_point) {
    QuantTable found{};
    for (int i = 0; i < 16; ++i) {
        const int quant = values[i] + zero_point;
        for (int part = 0; part < 2; ++part) {
            found.bytes[part][i] = static_cast<uint8_t>(quant >> 8 * part & 255);
        }
    }
    return found;
}

// Quantiles of the normal distribution (Dettmers et al. 2023, arXiv:2305.14314), as bitsandbytes has them.
constexpr float NF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
constexpr float NF4_UNITS = 32767.0f, FP4_UNITS = 192.0f;

// Rounded to 16 bits: an error of at most 2^-16 of the scale.
constexpr QuantTable nf4_table() {
    std::array<int, 16> values{};
    for (int i = 0; i < 16; ++i) values[i] = static_cast<int>(NF4[i] * NF4_UNITS + (NF4[i] < 0 ? -0.5f : 0.5f));
    return table(values, packed_format_of(GgmlType::nf4).zero_point);
}

constexpr QuantTable IQ4_TABLE =
    table({-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, 128);
constexpr QuantTable MXFP4_TABLE = table({0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, 12);
constexpr QuantTable NF4_TABLE = nf4_table();
constexpr QuantTable FP4_TABLE =
    table({0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48}, 192);

// Magnitudes and signs, or a ternary value in eighths and the sign of an eighth.
constexpr QuantTable IQ1_TABLE = table({-7, 1, 9, 0, -9, -1, 7}, 9);
constexpr QuantTable IQ2_TABLE = table({8, 25, 43, 0, -8, -25, -43}, 43);
constexpr QuantTable IQ3_XXS_TABLE =
    table({4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62}, 62);
constexpr QuantTable IQ3_S_TABLE = table({1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}, 15);

struct BlockLayout {
    int64_t weights, bytes;
};

BlockLayout layout_of(GgmlType type) {
    switch (type) {
        case GgmlType::q4_0: return {32, 18};
        case GgmlType::q4_1: return {32, 20};
        case GgmlType::q5_0: return {32, 22};
        case GgmlType::q5_1: return {32, 24};
        case GgmlType::q8_0: return {32, 34};
        case GgmlType::q2_k: return {256, 84};
        case GgmlType::q3_k: return {256, 110};
        case GgmlType::q4_k: return {256, 144};
        case GgmlType::q5_k: return {256, 176};
        case GgmlType::q6_k: return {256, 210};
        case GgmlType::iq2_xxs: return {256, 66};
        case GgmlType::iq2_xs: return {256, 74};
        case GgmlType::iq2_s: return {256, 82};
        case GgmlType::iq3_xxs: return {256, 98};
        case GgmlType::iq3_s: return {256, 110};
        case GgmlType::iq1_s: return {256, 50};
        case GgmlType::iq1_m: return {256, 56};
        case GgmlType::tq1_0: return {256, 54};
        case GgmlType::tq2_0: return {256, 66};
        case GgmlType::iq4_nl: return {32, 18};
        case GgmlType::iq4_xs: return {256, 136};
        case GgmlType::mxfp4: return {32, 17};
        case GgmlType::nf4:
        case GgmlType::fp4: return {64, 36};
    }
    return {1, 0};
}

}  // namespace

const QuantTable* table_of(GgmlType type) {
    switch (type) {
        case GgmlType::iq4_nl:
        case GgmlType::iq4_xs: return &IQ4_TABLE;
        case GgmlType::mxfp4: return &MXFP4_TABLE;
        case GgmlType::iq1_s:
        case GgmlType::iq1_m: return &IQ1_TABLE;
        case GgmlType::iq2_xxs:
        case GgmlType::iq2_xs:
        case GgmlType::iq2_s: return &IQ2_TABLE;
        case GgmlType::iq3_xxs: return &IQ3_XXS_TABLE;
        case GgmlType::iq3_s: return &IQ3_S_TABLE;
        case GgmlType::nf4: return &NF4_TABLE;
        case GgmlType::fp4: return &FP4_TABLE;
        default: return nullptr;
    }
}

int64_t gguf_row_bytes(GgmlType type, int64_t inputs) {
    const BlockLayout layout = layout_of(type);
    return inputs % layout.weights == 0 ? inputs / layout.weights * layout.bytes : -1;
}

void read_k_block(GgmlType type, const uint8_t* row, int64_t index, KBlock& to) {
    const BlockLayout layout = layout_of(type);
    const int64_t k_blocks = layout.weights / K_BLOCK;
    const uint8_t* block = row + index / k_blocks * layout.bytes;
    const int within = static_cast<int>(index % k_blocks);
    switch (type) {
        case GgmlType::q4_0: return read_q4_0(block, to);
        case GgmlType::q4_1: return read_q4_1(block, to);
        case GgmlType::q5_0: return read_q5_0(block, to);
        case GgmlType::q5_1: return read_q5_1(block, to);
        case GgmlType::q8_0: return read_q8_0(block, to);
        case GgmlType::q2_k: return read_q2_k(block, within, to);
        case GgmlType::q3_k: return read_q3_k(block, within, to);
        case GgmlType::q4_k: return read_q4_k(block, within, to);
        case GgmlType::q5_k: return read_q5_k(block, within, to);
        case GgmlType::q6_k: return read_q6_k(block, within, to);
        case GgmlType::iq2_xxs: return read_iq2_xxs(block, within, to);
        case GgmlType::iq2_xs: return read_iq2_xs(block, within, to);
        case GgmlType::iq2_s: return read_iq2_s(block, within, to);
        case GgmlType::iq3_xxs: return read_iq3_xxs(block, within, to);
        case GgmlType::iq3_s: return read_iq3_s(block, within, to);
        case GgmlType::iq1_s: return read_iq1_s(block, within, to);
        case GgmlType::iq1_m: return read_iq1_m(block, within, to);
        case GgmlType::tq1_0: return read_tq1_0(block, within, to);
        case GgmlType::tq2_0: return read_tq2_0(block, within, to);
        case GgmlType::iq4_nl: return read_q4_0(block, to);
        case GgmlType::iq4_xs: return read_iq4_xs(block, within, to);
        case GgmlType::mxfp4: return read_mxfp4(block, to);
        case GgmlType::nf4: return read_table4(block, within, NF4_UNITS, to);
        case GgmlType::fp4: return read_table4(block, within, FP4_UNITS, to);
    }
}

}  // namespace srv
