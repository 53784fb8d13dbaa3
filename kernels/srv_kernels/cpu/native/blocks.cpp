// y = x W^T + b with a weight in a GGUF file's blocks, and x rounded to 8 bits, half a stretch of 16 inputs at a time.
//
// A packed weight is [outputs / 32][inputs / 32] stretches, read from its first byte to its last. A stretch holds the
// scales of 32 outputs, their least values if the type has them, and [8 fours][32 outputs][4 inputs] numbers; of 4 bits
// each, two fours lie in one, the second in the high halves. Four inputs lie together because the processor's byte
// product multiplies and adds fours (VPDPBUSD, USDOT): numbers, which are not negative, times the signed steps of x.
//
//     for each 16 inputs   sum of number * step           whole, exact; or of (number - 128) * step
//                          - constant * sum of steps      less 128 of it then
//                          * multiple                     the scale of x, in units of its row
//     for each group       sum of these * scale           + least value * sum of (sum of steps * multiple)
//     for each row         sum of these * unit
//
// Multiples are whole numbers. Where sums of 16 bits are widened by multiplying pairs, that is by multiples, and a whole
// group is summed in integers; elsewhere half a stretch is. (Of 32 inputs with one scale, the demo model's perplexity rises
// by 0.5 %, of 16 by half as much.)
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
#elif defined(__AVX2__)
constexpr int ROWS = 6, VECTORS_OF_ROWS = 1;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
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

// The largest multiple of a row's unit that a scale of x may be, so that a group's products fit 32 bits. Sums that are
// whole numbers for half a stretch only have no need of a bound.
constexpr float most_multiple(int bits, int group, bool least) {
    const Way way = way_of(bits, least);
    const int number = way == Way::from_128 ? 128 : bits == 4 ? 15 : 31;
    const int fits = INT32_MAX / (group * number * 127);
    return way == Way::plain || fits > INT16_MAX ? INT16_MAX : static_cast<float>(fits);
}

// A group's products for one output each, as they grow: half a stretch after the other, each times its multiple.
template <Way WAY>
class Sums {
public:
    void begin_half([[maybe_unused]] int32_t from) {
        if constexpr (WAY == Way::plain) half_ = Ints{} + from;
        if constexpr (WAY == Way::by_shorts) half_ = Ints{};
    }

    void add(const Ints& numbers, const Ints& steps, [[maybe_unused]] const Multiple& multiple) {
        if constexpr (WAY == Way::plain) half_ = dot(half_, numbers, steps);
#if defined(SRV_BYTE_PAIRS)
        if constexpr (WAY == Way::by_shorts) half_ = dot_short(half_, numbers, steps);
#endif
#if defined(SRV_BYTE_SIGNS)
        if constexpr (WAY == Way::from_128) group_ = dot_from_128(group_, numbers, steps, Ints{} + multiple.pair);
#endif
    }

    void end_half([[maybe_unused]] const Multiple& multiple) {
        if constexpr (WAY == Way::plain) worth_ += to<float>(half_) * multiple.number;
#if defined(SRV_BYTE_PAIRS)
        if constexpr (WAY == Way::by_shorts) group_ = plus_pairs(group_, half_, Ints{} + multiple.pair);
#endif
    }

    // In units of the row.
    Floats end([[maybe_unused]] int32_t from) const {
        if constexpr (WAY == Way::plain) return worth_;
        return to<float>(group_ + from);
    }

private:
    Ints half_{}, group_{};
    Floats worth_{};
};

// Whether what is kept of the sums of steps belongs to halves of stretches, which may be groups, or to stretches.
constexpr bool sums_of_halves(int bits, int group, bool least) {
    return group == LANES || (way_of(bits, least) == Way::plain && !least);
}

// A row of x as steps. 127 of them, or a little less, are the largest magnitude of half a stretch; their scale is a whole
// multiple of the row's unit. Kept of their sums is, with least values, what it is worth in units; otherwise what it takes
// off the products, -constant times. What is not finite has an infinite unit, so that none of the row's products is finite.
template <class T, int BITS, int GROUP, bool LEAST>
void quantize_row(const BlockLinearArgs& a, int64_t row) {
    constexpr bool PLAIN = way_of(BITS, LEAST) == Way::plain;
    constexpr float MOST = most_multiple(BITS, GROUP, LEAST);
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    int8_t* steps_at = a.steps + row * a.inputs;
    const int64_t halves = a.inputs / LANES;
    Multiple* multiples_at = a.multiples + row * halves;  // of the largest magnitudes at first
    Four most_of_row = {};
    for (int64_t half = 0; half < halves; half += 2) {
        Floats most[2];
        for (int h = 0; h < 2; ++h) {
            const Floats value = load(x + (half + h) * LANES);
            most[h] = choose(value < 0.0f, -value, value);
            most[h] = choose(most[h] == most[h], most[h], all(__builtin_inff()));
        }
        const Four magnitudes = folded(most[0], most[1], larger);
        most_of_row = larger(most_of_row, magnitudes);
        for (int h = 0; h < 2; ++h) multiples_at[half + h].number = magnitudes[h];
    }
    const float most = most_of_row[0] > most_of_row[1] ? most_of_row[0] : most_of_row[1];
    const bool finite = most <= MOST_FINITE;
    const float least_unit = most * (1.0f / (127.0f * MOST));
    const float unit = least_unit > 0x1p-120f ? least_unit : 0x1p-120f;
    const float inverse = finite ? 1.0f / unit : 0.0f;
    a.units[row] = finite ? unit : most;
    StepsSum* sums_at = a.x_sums + row * (sums_of_halves(BITS, GROUP, LEAST) ? halves : halves / 2);
    for (int64_t half = 0; half < halves; half += 2) {
        const Four magnitudes = {multiples_at[half].number, multiples_at[half + 1].number};
        const Four units = magnitudes * (inverse * (1.0f / 127.0f));
        const FourInts multiples = __builtin_convertvector(units < MOST - 1.0f ? units : Four{} + (MOST - 1.0f), FourInts) + 1;
        const Four numbers = __builtin_convertvector(multiples, Four), inverses = inverse / numbers;
        Floats steps[2];
        for (int h = 0; h < 2; ++h) {
            steps[h] = whole(load(x + (half + h) * LANES) * inverses[h]);
            steps[h] = choose(steps[h] == steps[h], steps[h], Floats{});
            store_bytes(steps_at + (half + h) * LANES, to<int32_t>(steps[h]));
            if constexpr (PLAIN) {
                multiples_at[half + h].number = numbers[h];
            } else {
                multiples_at[half + h].pair = multiples[h] * 0x10001;
            }
        }
        const Four sums = folded(steps[0], steps[1], added), worths = sums * numbers;
        const FourInts begins = __builtin_convertvector(sums, FourInts) * (PLAIN ? FourInts{} + 1 : multiples) * -a.constant;
        if constexpr (sums_of_halves(BITS, GROUP, LEAST)) {
            for (int h = 0; h < 2; ++h) {
                StepsSum& to = sums_at[half + h];
                LEAST ? void(to.worth = worths[h]) : void(to.begin = begins[h]);
            }
        } else {
            StepsSum& to = sums_at[half / 2];
            LEAST ? void(to.worth = worths[0] + worths[1]) : void(to.begin = begins[0] + begins[1]);
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
    constexpr bool BEGIN_HALVES = !LEAST && way_of(BITS, LEAST) == Way::plain, BEGIN_GROUPS = !LEAST && !BEGIN_HALVES;
    const int64_t halves = a.inputs / LANES, groups = halves / HALVES;
    const int64_t sums_of_row = sums_of_halves(BITS, GROUP, LEAST) ? halves : groups;
    const int8_t* steps = a.steps + row * a.inputs;
    const Multiple* multiples = a.multiples + row * halves;
    const StepsSum* x_sums = a.x_sums + row * sums_of_row;
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
        Sums<way_of(BITS, LEAST)> sums[COUNT][VECTORS];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; ++h) {
            const int64_t half = group * HALVES + h;
            for (int r = 0; r < COUNT; ++r) {
                for (int v = 0; v < VECTORS; ++v) {
                    sums[r][v].begin_half(BEGIN_HALVES ? x_sums[r * sums_of_row + half].begin : 0);
                }
            }
#pragma GCC unroll 4
            for (int four = 0; four < LANES / 4; ++four) {
                Ints numbers[VECTORS];
                numbers_of<BITS>(numbers_at, h * (LANES / 4) + four, numbers);
#pragma GCC unroll 8
                for (int r = 0; r < COUNT; ++r) {
                    const Ints step = four_bytes(steps + (r * halves + half) * LANES + four * 4);
                    const Multiple& multiple = multiples[r * halves + half];
                    for (int v = 0; v < VECTORS; ++v) sums[r][v].add(numbers[v], step, multiple);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; ++r) {
                for (int v = 0; v < VECTORS; ++v) sums[r][v].end_half(multiples[r * halves + half]);
            }
        }
        for (int v = 0; v < VECTORS; ++v) {
            const Floats scales = load_halves(scales_at + v * LANES * 2);
            Floats leasts{};
            if constexpr (LEAST) leasts = load_halves(scales_at + scale_bytes(form) + v * LANES * 2);
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; ++r) {
                const StepsSum& sum = x_sums[r * sums_of_row + group];
                totals[r][v] += sums[r][v].end(BEGIN_GROUPS ? sum.begin : 0) * scales;
                if constexpr (LEAST) totals[r][v] += leasts * sum.worth;
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
            const Floats value = totals[r][v] * a.units[row + r] + bias;
            lanes == LANES ? store(out, value) : store_some(out, value, lanes);
        }
    }
}

template <class T, int BITS, int GROUP, bool LEAST>
void multiply(const BlockLinearArgs& a) {
    for_rows(a.rows, a.inputs, [&](int64_t row) { quantize_row<T, BITS, GROUP, LEAST>(a, row); });
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
