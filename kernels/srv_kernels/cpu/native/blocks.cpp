// y = x W^T + b with a weight in a GGUF file's blocks, and x rounded to 8 bits, half a stretch of 16 inputs at a time.
//
// A packed weight is [outputs / 32][inputs / 32] stretches, read from its first byte to its last. A stretch holds the
// scales of 32 outputs, their least values if the type has them, and [8 fours][32 outputs][4 inputs] numbers; of 4 bits
// each, two fours lie in one, the second in the high halves. Four inputs lie together because the processor's byte
// product multiplies and adds fours (VPDPBUSD): numbers, which are not negative, times the signed steps of x.
//
//     for each 16 inputs   sum of number * step           whole, exact
//                          - constant * sum of steps      as the sum's beginning
//                          * scale of x
//     for each group       sum of these * scale           + least value * sum of (sum of steps * scale of x)
//
// (Of 32 inputs with one scale, the demo model's perplexity rises by 0.5 %, of 16 by half as much.)
//
// Groups are added in the order of the inputs, whatever the rows and threads: a row's result does not depend on the batch.
#include "blocks.h"

#include "kernels.h"
#include "pool.h"
#include "tiles.h"
#include "vector.h"

namespace srv::SRV_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 4;  // 8 totals, 8 products, 8 sums, 2 vectors of numbers and a few to spare of 32 registers
#else
constexpr int ROWS = 2;
#endif
constexpr int VECTORS = 2;
constexpr float MOST_FINITE = 3.4028234663852886e38f;
using Bytes = int8_t __attribute__((vector_size(16)));

// Sixteen sums, each plus four numbers times the same four signed steps.
inline Ints dot(Ints sum, Ints numbers, int32_t steps) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum),
                                                      reinterpret_cast<__m512i>(numbers), _mm512_set1_epi32(steps)));
#else
    for (int i = 0; i < 4; ++i) sum += ((numbers >> (8 * i)) & 255) * (steps << (24 - 8 * i) >> 24);
    return sum;
#endif
}

inline Floats load_halves(const uint8_t* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(halves)));
#else
    const Words words = __builtin_convertvector(halves, Words);
    Floats magnitude = reinterpret_cast<Floats>((words & 0x7fffu) << 13) * 0x1p112f;
    magnitude = magnitude < 65536.0f ? magnitude : all(__builtin_inff());
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(magnitude) | (words & 0x8000u) << 16);
#endif
}

inline Ints load_integers(const uint8_t* from) {
    Ints numbers;
    std::memcpy(&numbers, from, sizeof(numbers));
    return numbers;
}

// A row of x as steps of each half stretch's largest magnitude / 127, their scales, and what the sums of the steps are
// worth: with least values, in units of x and for each group; otherwise taken times -constant, where products begin.
// What is not finite has an infinite scale, so that none of the row's products is finite.
template <class T, int GROUP, bool LEAST>
void quantize_row(const BlockLinearArgs& a, int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    int8_t* steps_at = a.steps + row * a.inputs;
    const int64_t halves = a.inputs / LANES;
    float* scales_at = a.x_scales + row * halves;
    StepsSum* sums_at = a.x_sums + row * (LEAST ? a.inputs / GROUP : halves);
    for (int64_t stretch = 0; stretch < halves / 2; ++stretch) {
        Floats value[2], most[2];
        for (int h = 0; h < 2; ++h) {
            value[h] = load(x + stretch * STRETCH + h * LANES);
            most[h] = value[h] < 0 ? -value[h] : value[h];
            most[h] = most[h] == most[h] ? most[h] : all(__builtin_inff());
        }
        const Four scales = folded(most[0], most[1], larger) * (1.0f / 127.0f);
        const Four inverses = (scales < 0x1p-126f) | (scales > MOST_FINITE) ? Four{} : 1.0f / scales;
        for (int h = 0; h < 2; ++h) {
            const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
            Floats step = (value[h] * inverses[h] + magic) - magic;
            value[h] = step == step ? step : Floats{};
            const Bytes bytes = __builtin_convertvector(__builtin_convertvector(value[h], Ints), Bytes);
            std::memcpy(steps_at + stretch * STRETCH + h * LANES, &bytes, sizeof(bytes));
            scales_at[stretch * 2 + h] = scales[h];
        }
        const Four sums = folded(value[0], value[1], added);
        if constexpr (LEAST && GROUP == STRETCH) {
            sums_at[stretch].worth = scales[0] * sums[0] + scales[1] * sums[1];
        } else {
            for (int h = 0; h < 2; ++h) {
                StepsSum& to = sums_at[stretch * 2 + h];
                if constexpr (LEAST) {
                    to.worth = scales[h] * sums[h];
                } else {
                    to.begin = -a.constant * static_cast<int32_t>(sums[h]);
                }
            }
        }
    }
}

// The four numbers of each of 32 outputs that lie at place `four` of a group.
template <int BITS>
inline void numbers_of(const uint8_t* group, int four, Ints (&numbers)[VECTORS]) {
    for (int v = 0; v < VECTORS; ++v) {
        if constexpr (BITS == 8) {
            numbers[v] = load_integers(group + (four * VECTORS + v) * 64);
        } else {
            const Ints both = load_integers(group + (four / 2 * VECTORS + v) * 64);
            numbers[v] = (four % 2 ? both >> 4 : both) & 0x0f0f0f0f;
        }
    }
}

// All rows' sums go on side by side, four after four: each waits for its own last addition, but not for the others'.
template <class T, int BITS, int GROUP, bool LEAST, int COUNT>
inline void tile(const BlockLinearArgs& a, const uint8_t* packed, int64_t block, int64_t row) {
    constexpr Form form = {BITS, GROUP, LEAST, 0};
    constexpr int GROUPS = STRETCH / GROUP, HALVES = GROUP / LANES;
    static_assert(LANES == 16, "half a stretch is one vector");
    const int64_t halves = a.inputs / LANES, groups = halves / HALVES;
    const int8_t* steps = a.steps + row * a.inputs;
    const float* x_scales = a.x_scales + row * halves;
    const StepsSum* x_sums = a.x_sums + row * (LEAST ? groups : halves);
    Floats totals[COUNT][VECTORS] = {};
    for (int64_t group = 0; group < groups; ++group) {
        const int g = static_cast<int>(group % GROUPS);
        const uint8_t* scales_at = packed + group / GROUPS * stretch_bytes(form) + g * 32 * 2;
        const uint8_t* numbers_at = scales_at - g * 32 * 2 + scale_bytes(form) * (LEAST ? 2 : 1) + g * GROUP * 4 * BITS;
        Floats products[COUNT][VECTORS] = {};
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; ++h) {
            const int64_t half = group * HALVES + h;
            Ints whole[COUNT][VECTORS];
            for (int r = 0; r < COUNT; ++r) {
                const int32_t begin = LEAST ? 0 : x_sums[r * halves + half].begin;
                for (int v = 0; v < VECTORS; ++v) whole[r][v] = Ints{} + begin;
            }
#pragma GCC unroll 4
            for (int four = 0; four < LANES / 4; ++four) {
                Ints numbers[VECTORS];
                numbers_of<BITS>(numbers_at, h * (LANES / 4) + four, numbers);
#pragma GCC unroll 4
                for (int r = 0; r < COUNT; ++r) {
                    int32_t step;
                    std::memcpy(&step, steps + (r * halves + half) * LANES + four * 4, sizeof(step));
                    for (int v = 0; v < VECTORS; ++v) whole[r][v] = dot(whole[r][v], numbers[v], step);
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < COUNT; ++r) {
                for (int v = 0; v < VECTORS; ++v) {
                    products[r][v] += __builtin_convertvector(whole[r][v], Floats) * x_scales[r * halves + half];
                }
            }
        }
        for (int v = 0; v < VECTORS; ++v) {
            const Floats scales = load_halves(scales_at + v * LANES * 2);
            for (int r = 0; r < COUNT; ++r) totals[r][v] += products[r][v] * scales;
            if constexpr (LEAST) {
                const Floats leasts = load_halves(scales_at + scale_bytes(form) + v * LANES * 2);
                for (int r = 0; r < COUNT; ++r) totals[r][v] += leasts * x_sums[r * groups + group].worth;
            }
        }
    }
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = block * BLOCK_OUTPUTS + v * LANES;
        const int64_t lanes = a.outputs - column < LANES ? a.outputs - column : LANES;
        if (lanes <= 0) break;
        const Floats bias = a.bias == nullptr ? Floats{} : load_some(static_cast<const T*>(a.bias) + column, lanes);
        for (int r = 0; r < COUNT; ++r) {
            T* out = static_cast<T*>(a.out) + (row + r) * a.out_stride + column;
            const Floats value = totals[r][v] + bias;
            lanes == LANES ? store(out, value) : store_some(out, value, lanes);
        }
    }
}

template <class T, int BITS, int GROUP, bool LEAST>
void multiply(const BlockLinearArgs& a) {
    for_rows(a.rows, a.inputs, [&](int64_t row) { quantize_row<T, GROUP, LEAST>(a, row); });
    const int64_t block_size = a.inputs / STRETCH * stretch_bytes({BITS, GROUP, LEAST, 0});
    for_tiles<ROWS>(a.rows, a.inputs, a.outputs, [&]<int COUNT>(int64_t block, int64_t row) {
        tile<T, BITS, GROUP, LEAST, COUNT>(a, a.weight + block * block_size, block, row);
    });
}

template <class T>
void multiply_of(const BlockLinearArgs& a) {
    const Form form = form_of(a.stored);
    if (form.bits == 4 && form.group == 32) return form.least ? multiply<T, 4, 32, true>(a) : multiply<T, 4, 32, false>(a);
    if (form.bits == 8 && form.group == 32) return form.least ? multiply<T, 8, 32, true>(a) : multiply<T, 8, 32, false>(a);
    if (form.bits == 4) return form.least ? multiply<T, 4, 16, true>(a) : multiply<T, 4, 16, false>(a);
    return multiply<T, 8, 16, false>(a);
}

// One row of a packed weight as numbers of type T.
template <class T>
void unpack_row(const BlockRowsArgs& a, int64_t row, T* to) {
    const Form form = form_of(a.stored);
    const int64_t output = row % BLOCK_OUTPUTS, stretches = a.inputs / STRETCH;
    const uint8_t* packed = a.weight + row / BLOCK_OUTPUTS * stretches * stretch_bytes(form);
    for (int64_t s = 0; s < stretches; ++s, packed += stretch_bytes(form)) {
        const uint8_t* numbers = packed + scale_bytes(form) * (form.least ? 2 : 1);
        for (int64_t i = 0; i < STRETCH; ++i) {
            uint16_t halves[2] = {};
            const int64_t at = (i / form.group * BLOCK_OUTPUTS + output) * 2;
            std::memcpy(halves, packed + at, 2);
            if (form.least) std::memcpy(halves + 1, packed + scale_bytes(form) + at, 2);
            const int64_t four = i / 4, lies = form.bits == 8 ? four : four / 2;
            const uint8_t byte = numbers[(lies * BLOCK_OUTPUTS + output) * 4 + i % 4];
            const int number = form.bits == 8 ? byte : (four % 2 ? byte >> 4 : byte & 15);
            put(to + s * STRETCH + i,
                from_half(halves[0]) * static_cast<float>(number - form.constant) + from_half(halves[1]));
        }
    }
}

template <class T>
void rows_of(const BlockRowsArgs& a) {
    for_rows(a.rows, a.inputs, [&](int64_t i) { unpack_row(a, a.indices[i], static_cast<T*>(a.out) + i * a.inputs); });
}

}  // namespace

void block_linear(Type type, const BlockLinearArgs& given) {
    BlockLinearArgs args = given;
    args.constant = form_of(args.stored).constant;
    type == Type::float32 ? multiply_of<float>(args) : multiply_of<BFloat16>(args);
}

void block_rows(Type type, const BlockRowsArgs& args) {
    type == Type::float32 ? rows_of<float>(args) : rows_of<BFloat16>(args);
}

void pack_blocks(const PackBlocksArgs& a) {
    const Form form = form_of(a.stored);
    const int64_t stretches = a.inputs / STRETCH, size = stretch_bytes(form), groups = STRETCH / form.group;
    parallel(false, [&](int share, int shares) {
        const Range mine = part(blocks(a.outputs), share, shares);
        for (int64_t block = mine.begin; block < mine.end; ++block) {
            uint8_t* to = a.packed + block * stretches * size;
            std::memset(to, 0, stretches * size);
            for (int64_t output = 0; output < BLOCK_OUTPUTS && block * BLOCK_OUTPUTS + output < a.outputs; ++output) {
                const uint8_t* row = a.rows + (block * BLOCK_OUTPUTS + output) * a.stride;
                for (int64_t s = 0; s < stretches; ++s) {
                    Numbers numbers = {};
                    read_stretch(a.stored, row, s, numbers);
                    uint8_t* at = to + s * size;
                    for (int64_t g = 0; g < groups; ++g) {
                        const uint16_t scale = to_half(numbers.scale[g]), least = to_half(numbers.least[g]);
                        std::memcpy(at + (g * BLOCK_OUTPUTS + output) * 2, &scale, 2);
                        if (form.least) {
                            std::memcpy(at + scale_bytes(form) + (g * BLOCK_OUTPUTS + output) * 2, &least, 2);
                        }
                    }
                    at += scale_bytes(form) * (form.least ? 2 : 1);
                    for (int64_t i = 0; i < STRETCH; ++i) {
                        const int64_t four = i / 4, lies = form.bits == 8 ? four : four / 2;
                        const int shift = form.bits == 4 && four % 2 ? 4 : 0;
                        at[(lies * BLOCK_OUTPUTS + output) * 4 + i % 4] |=
                            static_cast<uint8_t>(numbers.value[i] << shift);
                    }
                }
            }
        }
    });
}

}  // namespace srv::SRV_ISA
