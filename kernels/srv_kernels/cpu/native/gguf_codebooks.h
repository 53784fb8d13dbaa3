// Unpacks GGUF's types of 1 to 3 bits, a K block at a time; for gguf_dequant.cpp. All have super-blocks of 256 weights.
//
// IQ1, IQ2 and IQ3 store indices of vectors of 4 or 8 weights, of which iq_grids.h has the magnitudes, and signs: of
// each weight, or of 7 of 8, the eighth being their parity. TQ1_0 and TQ2_0 are ternary.
#pragma once

#include <bit>

#include "gguf.h"
#include "iq_grids.h"

namespace srv {
namespace {

float half_at(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, sizeof(half));
    return from_half(half);
}

uint16_t word_at(const uint8_t* at) {
    uint16_t word;
    std::memcpy(&word, at, sizeof(word));
    return word;
}

uint32_t dword_at(const uint8_t* at) {
    uint32_t dword;
    std::memcpy(&dword, at, sizeof(dword));
    return dword;
}

// The scale of K block or group `index`, which is odd, from 4 bits.
float odd_scale(float scale, const uint8_t* nibbles, int index) {
    return scale * static_cast<float>(2 * (nibbles[index / 2] >> (4 * (index % 2)) & 15) + 1);
}

// Eight signs of which seven are stored; their number is even.
uint8_t eight_signs(uint32_t seven) {
    seven &= 127;
    return static_cast<uint8_t>(seven | (std::popcount(seven) & 1) << 7);
}

// Eight weights of IQ2: indices of three magnitudes, and signs.
void put_eight(uint16_t grid, uint8_t signs, uint8_t* to) {
    for (int i = 0; i < 8; ++i) to[i] = static_cast<uint8_t>((grid >> 2 * i & 3) | (signs >> i & 1) << 2);
}

// Four weights of IQ3: indices of eight magnitudes, and signs in the lower four bits.
void put_four(uint16_t grid, int signs, uint8_t* to) {
    for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>((grid >> 3 * i & 7) | (signs >> i & 1) << 3);
}

void read_iq2_xxs(const uint8_t* block, int k_block, KBlock& to) {
    const uint8_t* indices = block + 2 + k_block * 8;
    const uint32_t signs = dword_at(indices + 4);
    to.scale[0] = half_at(block) * static_cast<float>(2 * (signs >> 28) + 1);
    for (int i = 0; i < 4; ++i) put_eight(IQ2_XXS_GRID[indices[i]], eight_signs(signs >> 7 * i), to.quants + 8 * i);
}

void read_iq2_xs(const uint8_t* block, int k_block, KBlock& to) {
    for (int g = 0; g < 2; ++g) to.scale[g] = odd_scale(half_at(block), block + 66, 2 * k_block + g);
    for (int i = 0; i < 4; ++i) {
        const uint16_t both = word_at(block + 2 + k_block * 8 + 2 * i);
        put_eight(IQ2_XS_GRID[both & 511], eight_signs(both >> 9), to.quants + 8 * i);
    }
}

void read_iq2_s(const uint8_t* block, int k_block, KBlock& to) {
    for (int g = 0; g < 2; ++g) to.scale[g] = odd_scale(half_at(block), block + 74, 2 * k_block + g);
    for (int i = 0; i < 4; ++i) {
        const int at = 4 * k_block + i, high = block[66 + k_block] >> 2 * i & 3;
        put_eight(IQ2_S_GRID[block[2 + at] | high << 8], block[34 + at], to.quants + 8 * i);
    }
}

void read_iq3_xxs(const uint8_t* block, int k_block, KBlock& to) {
    const uint32_t signs = dword_at(block + 66 + 4 * k_block);
    to.scale[0] = half_at(block) * static_cast<float>(2 * (signs >> 28) + 1);
    for (int i = 0; i < 8; ++i) {
        const int four = eight_signs(signs >> 7 * (i / 2)) >> 4 * (i % 2);
        put_four(IQ3_XXS_GRID[block[2 + 8 * k_block + i]], four, to.quants + 4 * i);
    }
}

void read_iq3_s(const uint8_t* block, int k_block, KBlock& to) {
    to.scale[0] = odd_scale(half_at(block), block + 106, k_block);
    for (int i = 0; i < 8; ++i) {
        const int high = block[66 + k_block] >> i & 1, four = block[74 + 4 * k_block + i / 2] >> 4 * (i % 2);
        put_four(IQ3_S_GRID[block[2 + 8 * k_block + i] | high << 8], four, to.quants + 4 * i);
    }
}

// Eight weights of IQ1: -1, 0 or 1, to all of which an eighth is added or, if `negative`, subtracted.
void put_ternary(uint16_t grid, bool negative, uint8_t* to) { put_eight(grid, negative ? 255 : 0, to); }

void read_iq1_s(const uint8_t* block, int k_block, KBlock& to) {
    const uint16_t high = word_at(block + 34 + 2 * k_block);
    to.scale[0] = half_at(block) * static_cast<float>(2 * (high >> 12 & 7) + 1);
    for (int i = 0; i < 4; ++i) {
        const int index = block[2 + 4 * k_block + i] | (high >> 3 * i & 7) << 8;
        put_ternary(IQ1_GRID[index], high >> 15 != 0, to.quants + 8 * i);
    }
}

// The scale of a block is in the highest four bits of four words, of which each has four scales of 3 bits.
void read_iq1_m(const uint8_t* block, int k_block, KBlock& to) {
    const uint8_t* words = block + 48;
    int half = 0;
    for (int i = 0; i < 4; ++i) half |= word_at(words + 2 * i) >> 12 << 4 * i;
    for (int g = 0; g < 2; ++g) {
        const int scale = word_at(words + k_block / 2 * 2) >> (6 * (k_block % 2) + 3 * g) & 7;
        to.scale[g] = from_half(static_cast<uint16_t>(half)) * static_cast<float>(2 * scale + 1);
    }
    for (int i = 0; i < 4; ++i) {
        const int at = 4 * k_block + i, high = block[32 + at / 2] >> 4 * (at % 2);
        put_ternary(IQ1_GRID[block[at] | (high & 7) << 8], (high & 8) != 0, to.quants + 8 * i);
    }
}

// Digit `digit` of a byte with five digits of base 3, stored as a fraction of 256.
uint8_t ternary_digit(uint8_t byte, int digit) {
    constexpr int POWERS[] = {1, 3, 9, 27, 81};
    return static_cast<uint8_t>(static_cast<uint8_t>(byte * POWERS[digit]) * 3 >> 8);
}

// The digits of 32 bytes are the first 160 weights, digit by digit; those of 16 bytes, the next 80; four of 4 bytes, 16.
void read_tq1_0(const uint8_t* block, int k_block, KBlock& to) {
    to.scale[0] = half_at(block + 52);
    for (int i = 0; i < 32; ++i) {
        const int at = 32 * k_block + i, second = at - 160, third = at - 240;
        if (third >= 0) {
            to.quants[i] = ternary_digit(block[48 + third % 4], third / 4);
        } else if (second >= 0) {
            to.quants[i] = ternary_digit(block[32 + second % 16], second / 16);
        } else {
            to.quants[i] = ternary_digit(block[at % 32], at / 32);
        }
    }
}

void read_tq2_0(const uint8_t* block, int k_block, KBlock& to) {
    to.scale[0] = half_at(block + 64);
    for (int i = 0; i < 32; ++i) to.quants[i] = block[k_block / 4 * 32 + i] >> (2 * (k_block % 4)) & 3;
}

}  // namespace
}  // namespace srv
