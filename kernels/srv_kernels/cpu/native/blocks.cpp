// y = x W^T + b with a weight in a GGUF file's blocks, and x rounded to 8 bits, half a stretch of 16 inputs at a time.
//
// A packed weight is [outputs / 32][inputs / 32] stretches, read from its first byte to its last. A stretch holds the
// scales of 32 outputs, their least values if the type has them, and [8 fours][32 outputs][4 inputs] numbers; of 4 bits
// each, two fours lie in one, the second in the high halves. Four inputs lie together because the processor's byte
// product multiplies and adds fours (VPDPBUSD, USDOT): numbers, which are not negative, times the signed steps of x.
//
//     for each 16 inputs   sum of number * step           whole, exact; or of (number - 128) * step
//                          - constant * sum of steps      as the sum's beginning; less 128 of it then
//                          * scale of x
//     for each group       sum of these * scale           + least value * sum of (sum of steps * scale of x)
//
// (Of 32 inputs with one scale, the demo model's perplexity rises by 0.5 %, of 16 by half as much.)
//
// Groups are added in the order of the inputs, whatever the rows and threads: a row's result does not depend on the batch.
#include "blocks.h"

#include "bytes.h"
#include "kernels.h"
#include "pool.h"
#include "tiles.h"

namespace srv::SRV_ISA {
namespace {

// Rows of a tile, and vectors of its outputs: the sums of half a stretch, numbers and steps fill the registers; unless there
// are 32 of 64 bytes, totals and products wait in memory. One row takes a whole block.
#if defined(__AVX512F__)
constexpr int ROWS = 4, VECTORS_OF_ROWS = 2;
#elif defined(__AVX2__) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int ROWS = 4, VECTORS_OF_ROWS = 1;
#else
constexpr int ROWS = 2, VECTORS_OF_ROWS = 1;
#endif
constexpr int64_t AHEAD = 4096;  // bytes from what is multiplied to what is read from memory meanwhile
constexpr float MOST_FINITE = 3.4028234663852886e38f;

// How a form's products are summed: as they are; of numbers up to 31, which those of 8 bits with least values are too
// (Q5_1, Q5_K), first in 16 bits; of others, counted from 128.
enum class Way { plain, by_shorts, from_128 };

constexpr Way way_of([[maybe_unused]] int bits, [[maybe_unused]] bool least) {
#if defined(SRV_BYTE_PAIRS)
    if (bits == 4 || least) return Way::by_shorts;
#endif
#if defined(SRV_BYTE_SIGNS)
    if (bits == 8) return Way::from_128;
#endif
    return Way::plain;
}

// Sums of half a stretch: where they begin, and how four more numbers of each output are added.
template <Way WAY>
class Sums {
public:
    void begin(int32_t from) {
        begin_ = from;
        if constexpr (WAY != Way::by_shorts) sums_ = Ints{} + from;
    }

    void add(const Ints& numbers, const Ints& steps) {
        if constexpr (WAY == Way::plain) sums_ = dot(sums_, numbers, steps);
#if defined(SRV_BYTE_PAIRS)
        if constexpr (WAY == Way::by_shorts) sums_ = dot_short(sums_, numbers, steps);
#endif
#if defined(SRV_BYTE_SIGNS)
        if constexpr (WAY == Way::from_128) sums_ = dot_from_128(sums_, numbers, steps);
#endif
    }

    Ints end() const {
#if defined(SRV_BYTE_PAIRS)
        if constexpr (WAY == Way::by_shorts) return joined(sums_) + begin_;
#endif
        return sums_;
    }

private:
    Ints sums_{};
    int32_t begin_ = 0;
};

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
            most[h] = choose(value[h] < 0.0f, -value[h], value[h]);
            most[h] = choose(most[h] == most[h], most[h], all(__builtin_inff()));
        }
        const Four scales = folded(most[0], most[1], larger) * (1.0f / 127.0f);
        const Four inverses = (scales < 0x1p-126f) | (scales > MOST_FINITE) ? Four{} : 1.0f / scales;
        for (int h = 0; h < 2; ++h) {
            const Floats step = whole(value[h] * inverses[h]);
            value[h] = choose(step == step, step, Floats{});
            store_bytes(steps_at + stretch * STRETCH + h * LANES, to<int32_t>(value[h]));
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

// The four numbers of each output of COUNT vectors that lie at place `four` of a group.
template <int BITS, int COUNT>
inline void numbers_of(const uint8_t* group, int four, Ints (&numbers)[COUNT]) {
    constexpr int PLACE = BLOCK_OUTPUTS * 4;  // bytes of one place
    for (int v = 0; v < COUNT; ++v) {
        if constexpr (BITS == 8) {
            numbers[v] = load_fours(group + four * PLACE + v * 64);
        } else {
            const Ints both = load_fours(group + four / 2 * PLACE + v * 64);
            numbers[v] = (four % 2 ? both >> 4 : both) & 0x0f0f0f0f;
        }
    }
}

// Of COUNT rows, the outputs of VECTORS vectors from `first` of a block on. All rows' sums go on side by side, four after
// four: each waits for its own last addition, but not for the others'.
template <class T, int BITS, int GROUP, bool LEAST, int COUNT, int VECTORS>
inline void tile(const BlockLinearArgs& a, const uint8_t* packed, int64_t block, int64_t first, int64_t row) {
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
        const uint8_t* stretch = packed + group / GROUPS * stretch_bytes(form);
        const uint8_t* scales_at = stretch + g * BLOCK_OUTPUTS * 2 + first * 2;
        const uint8_t* numbers_at = stretch + scale_bytes(form) * (LEAST ? 2 : 1) + g * GROUP * 4 * BITS + first * 4;
        if (row == 0 && first == 0) {  // where a block is read from memory, unless a share began within it
            constexpr int64_t BYTES = stretch_bytes(form) / GROUPS;
            prefetch(stretch + g * BYTES, BYTES, AHEAD);
        }
        Floats products[COUNT][VECTORS] = {};
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; ++h) {
            const int64_t half = group * HALVES + h;
            Sums<way_of(BITS, LEAST)> sums[COUNT][VECTORS];
            for (int r = 0; r < COUNT; ++r) {
                for (int v = 0; v < VECTORS; ++v) sums[r][v].begin(LEAST ? 0 : x_sums[r * halves + half].begin);
            }
#pragma GCC unroll 4
            for (int four = 0; four < LANES / 4; ++four) {
                Ints numbers[VECTORS];
                numbers_of<BITS>(numbers_at, h * (LANES / 4) + four, numbers);
#pragma GCC unroll 4
                for (int r = 0; r < COUNT; ++r) {
                    const Ints step = four_bytes(steps + (r * halves + half) * LANES + four * 4);
                    for (int v = 0; v < VECTORS; ++v) sums[r][v].add(numbers[v], step);
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < COUNT; ++r) {
                for (int v = 0; v < VECTORS; ++v) {
                    products[r][v] += to<float>(sums[r][v].end()) * x_scales[r * halves + half];
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
        const int64_t column = block * BLOCK_OUTPUTS + first + v * LANES;
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
        constexpr int VECTORS = COUNT == 1 ? BLOCK_OUTPUTS / LANES : VECTORS_OF_ROWS;
        for (int64_t first = 0; first < BLOCK_OUTPUTS; first += VECTORS * LANES) {
            tile<T, BITS, GROUP, LEAST, COUNT, VECTORS>(a, a.weight + block * block_size, block, first, row);
        }
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
    const Form form = form_of(args.stored);
    args.constant = form.constant - (way_of(form.bits, form.least) == Way::from_128 ? 128 : 0);
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
