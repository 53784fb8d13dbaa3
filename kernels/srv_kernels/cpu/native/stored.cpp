// The block formats of GGUF files, read a stretch of 32 weights at a time.
//
// (Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and ggml's own reference quantisation.) Simple
// types have blocks of 32 weights. K types have superblocks of 256 with scales of scales: of stretch s the numbers lie in
// half s / 4, and beside each other in one byte lie those of several stretches.
#include "blocks.h"

namespace srv {
namespace {

float half_at(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, sizeof(half));
    return from_half(half);
}

// Two numbers a byte: the low halves first, then the high ones.
void nibbles(const uint8_t* from, Numbers& to) {
    for (int i = 0; i < 16; ++i) {
        to.value[i] = from[i] & 15;
        to.value[i + 16] = from[i] >> 4;
    }
}

// A fifth bit for each of 32 numbers.
void add_fifth(const uint8_t* from, Numbers& to) {
    uint32_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    for (int i = 0; i < 32; ++i) to.value[i] |= (bits >> i & 1) << 4;
}

void read_q4_0(const uint8_t* block, Numbers& to) {
    to.scale[0] = half_at(block);
    nibbles(block + 2, to);
}

void read_q4_1(const uint8_t* block, Numbers& to) {
    to.scale[0] = half_at(block);
    to.least[0] = half_at(block + 2);
    nibbles(block + 4, to);
}

void read_q5_0(const uint8_t* block, Numbers& to) {
    to.scale[0] = half_at(block);
    nibbles(block + 6, to);
    add_fifth(block + 2, to);
}

void read_q5_1(const uint8_t* block, Numbers& to) {
    to.scale[0] = half_at(block);
    to.least[0] = half_at(block + 2);
    nibbles(block + 8, to);
    add_fifth(block + 4, to);
}

void read_q8_0(const uint8_t* block, Numbers& to) {
    to.scale[0] = half_at(block);
    for (int i = 0; i < 32; ++i) to.value[i] = block[2 + i] ^ 128;  // two's complement, counted from -128
}

// Six bits of scale and six of least value for each of the 8 stretches, in 12 bytes.
void read_k_scale(const uint8_t* scales, int stretch, float scale, float least, Numbers& to) {
    int steps, least_steps;
    if (stretch < 4) {
        steps = scales[stretch] & 63;
        least_steps = scales[stretch + 4] & 63;
    } else {
        steps = (scales[stretch + 4] & 15) | (scales[stretch - 4] >> 6 << 4);
        least_steps = (scales[stretch + 4] >> 4) | (scales[stretch] >> 6 << 4);
    }
    to.scale[0] = scale * static_cast<float>(steps);
    to.least[0] = -least * static_cast<float>(least_steps);
}

void read_q4_k(const uint8_t* block, int stretch, Numbers& to) {
    read_k_scale(block + 4, stretch, half_at(block), half_at(block + 2), to);
    const uint8_t* numbers = block + 16 + stretch / 2 * 32;
    for (int i = 0; i < 32; ++i) to.value[i] = stretch % 2 ? numbers[i] >> 4 : numbers[i] & 15;
}

void read_q5_k(const uint8_t* block, int stretch, Numbers& to) {
    read_k_scale(block + 4, stretch, half_at(block), half_at(block + 2), to);
    const uint8_t *fifth = block + 16, *numbers = block + 48 + stretch / 2 * 32;
    for (int i = 0; i < 32; ++i) {
        const int low = stretch % 2 ? numbers[i] >> 4 : numbers[i] & 15;
        to.value[i] = static_cast<uint8_t>(low | (fifth[i] >> stretch & 1) << 4);
    }
}

void read_q6_k(const uint8_t* block, int stretch, Numbers& to) {
    const int half = stretch / 4, quarter = stretch % 4;
    const uint8_t* low = block + half * 64 + quarter % 2 * 32;
    const uint8_t* high = block + 128 + half * 32;
    for (int i = 0; i < 32; ++i) {
        const int four = quarter < 2 ? low[i] & 15 : low[i] >> 4;
        to.value[i] = static_cast<uint8_t>(four | (high[i] >> (2 * quarter) & 3) << 4);
    }
    const float scale = half_at(block + 208);
    for (int g = 0; g < 2; ++g) to.scale[g] = scale * static_cast<int8_t>(block[192 + stretch * 2 + g]);
}

void read_q2_k(const uint8_t* block, int stretch, Numbers& to) {
    const uint8_t* numbers = block + 16 + stretch / 4 * 32;
    for (int i = 0; i < 32; ++i) to.value[i] = numbers[i] >> (2 * (stretch % 4)) & 3;
    const float scale = half_at(block + 80), least = half_at(block + 82);
    for (int g = 0; g < 2; ++g) {
        const uint8_t both = block[stretch * 2 + g];
        to.scale[g] = scale * static_cast<float>(both & 15);
        to.least[g] = -least * static_cast<float>(both >> 4);
    }
}

// The 16 scales of six bits: 8 bytes of two low halves each, then 4 bytes of four pairs of high bits.
int q3_k_scale(const uint8_t* scales, int index) {
    const int low = index < 8 ? scales[index] & 15 : scales[index - 8] >> 4;
    const int high = scales[8 + index % 4] >> (2 * (index / 4)) & 3;
    return (low | high << 4) - 32;
}

void read_q3_k(const uint8_t* block, int stretch, Numbers& to) {
    const uint8_t* numbers = block + 32 + stretch / 4 * 32;
    for (int i = 0; i < 32; ++i) {
        const int low = numbers[i] >> (2 * (stretch % 4)) & 3;
        to.value[i] = static_cast<uint8_t>(low | (block[i] >> stretch & 1) << 2);
    }
    const float scale = half_at(block + 108);
    for (int g = 0; g < 2; ++g) to.scale[g] = scale * static_cast<float>(q3_k_scale(block + 96, stretch * 2 + g));
}

struct Size {
    int64_t weights, bytes;
};

Size block_of(Stored type) {
    switch (type) {
        case Stored::q4_0: return {32, 18};
        case Stored::q4_1: return {32, 20};
        case Stored::q5_0: return {32, 22};
        case Stored::q5_1: return {32, 24};
        case Stored::q8_0: return {32, 34};
        case Stored::q2_k: return {256, 84};
        case Stored::q3_k: return {256, 110};
        case Stored::q4_k: return {256, 144};
        case Stored::q5_k: return {256, 176};
        case Stored::q6_k: return {256, 210};
    }
    return {1, 0};
}

}  // namespace

int64_t stored_row_bytes(Stored type, int64_t inputs) {
    const Size size = block_of(type);
    return inputs % size.weights == 0 ? inputs / size.weights * size.bytes : -1;
}

void read_stretch(Stored type, const uint8_t* row, int64_t index, Numbers& to) {
    const Size size = block_of(type);
    const int64_t stretches = size.weights / STRETCH;
    const uint8_t* block = row + index / stretches * size.bytes;
    const int within = static_cast<int>(index % stretches);
    switch (type) {
        case Stored::q4_0: return read_q4_0(block, to);
        case Stored::q4_1: return read_q4_1(block, to);
        case Stored::q5_0: return read_q5_0(block, to);
        case Stored::q5_1: return read_q5_1(block, to);
        case Stored::q8_0: return read_q8_0(block, to);
        case Stored::q2_k: return read_q2_k(block, within, to);
        case Stored::q3_k: return read_q3_k(block, within, to);
        case Stored::q4_k: return read_q4_k(block, within, to);
        case Stored::q5_k: return read_q5_k(block, within, to);
        case Stored::q6_k: return read_q6_k(block, within, to);
    }
}

}  // namespace srv
