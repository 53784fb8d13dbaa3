// y = x W^T + b with a weight in a GGUF file's blocks, and x rounded: to 8 bits, half a stretch of 16 inputs at a time,
// or by words (see `Way`) to 16 bits, a row at a time.
//
// A packed weight is [outputs / 32][inputs / 32] stretches, read from its first byte to its last. A stretch holds the
// scales of 32 outputs, their least values if the type has them, and [8 fours][32 outputs][4 inputs] numbers; of 4 bits
// each, two fours lie in one, the second in the high halves. Four inputs lie together because the processor's byte
// product multiplies and adds fours (VPDPBUSD, USDOT): numbers, which are not negative, times the signed steps of x.
//
//     steps of 16 inputs        x / (multiple * unit), where multiples are whole numbers and a row has one unit;
//                               by words x / unit: all multiples are 1
//     half a stretch            the sum of (number - constant) * step, exactly, times the multiple
//     a group                   these, times its scale, plus its least value * sum of step * multiple
//     a row                     these, times its unit
//
// (Of 32 inputs with one scale, the demo model's perplexity rises by 0.5 %, of 16 by half as much.) The constant is taken off
// with the sum of the steps. How numbers are multiplied and summed depends on what the processor has: see `Way`. For many rows
// a block of 4-bit numbers is first opened, in memory of the thread's: taking its bytes apart and widening its scales for
// every tile took a sixth of what there is to compute.
//
// Groups are added in the order of the inputs, whatever the rows and threads: a row's result does not depend on the batch.
#include "blocks.h"

#include <vector>

#include "bytes.h"
#include "kernels.h"
#include "pool.h"
#include "tiles.h"

namespace srv::SRV_ISA {
namespace {

// Rows of a tile, and vectors of its outputs: what grows from four to four fills the registers, with numbers and steps; unless
// there are 32 of 64 bytes, what grows from group to group waits in memory. One row takes a whole block.
#if defined(__AVX512F__)
constexpr int ROWS = 4, VECTORS_OF_ROWS = 2;
#elif defined(__AVX2__)
constexpr int ROWS = 6, VECTORS_OF_ROWS = 1;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int ROWS = 4, VECTORS_OF_ROWS = 1;
#else
constexpr int ROWS = 2, VECTORS_OF_ROWS = 1;
#endif
constexpr int64_t OPENED_FROM = 32;  // rows from which opening a block of 4 bits costs less than it saves
constexpr int64_t AHEAD = 4096;  // bytes from what is multiplied to what is read from memory meanwhile

// How a form's products are summed.
//     plain       four by four in 32 bits, for half a stretch; then as floats
//     by_shorts   of numbers up to 31, which those of 8 bits with least values are too (Q5_1, Q5_K): in 16 bits for half a
//                 stretch; as these are widened they are multiplied by the multiple, and a group is summed in 32 bits
//     by_words    of other numbers: they and the steps are multiplied as 16 bits, and a group is summed in 32
enum class Way { plain, by_shorts, by_words };

constexpr Way way_of([[maybe_unused]] int bits, [[maybe_unused]] bool least) {
#if defined(SRV_BYTE_PAIRS)
    if (bits == 4 || least) return Way::by_shorts;
#endif
#if defined(SRV_WORD_STEPS)
    if (bits == 8) return Way::by_words;
#endif
    return Way::plain;
}

// Rows of a way's tile. By words 16 of them take 5 % less time four by four than as 5, 5 and 6.
constexpr int tile_rows(Way way) { return way == Way::by_words ? 5 : ROWS; }

// The largest step.
constexpr int64_t most_step(Way way) { return way == Way::by_words ? INT16_MAX : 127; }

// The largest multiple of a row's unit: it fits 16 bits and, where a group is summed in 32 bits, so do its products.
// (What is added for the constant is no more than these, since no constant is more than the largest number.)
constexpr int64_t most_multiple(int bits, int group, bool least) {
    const Way way = way_of(bits, least);
    if (way == Way::plain) return INT16_MAX;
    if (way == Way::by_words) return 1;
    const int64_t number = bits == 4 ? 15 : 31, fits = INT32_MAX / (group * number * most_step(way));
    return fits < INT16_MAX ? fits : INT16_MAX;
}
static_assert(STRETCH * 255 * most_step(Way::by_words) <= INT32_MAX);

// What products take of an output's four numbers: all at once, or those of even places and then those of odd ones.
template <Way WAY>
constexpr int PARTS = WAY == Way::by_words ? 2 : 1;

template <Way WAY>
inline void split(const Ints& numbers, Ints (&parts)[PARTS<WAY>]) {
    parts[0] = numbers;
#if defined(SRV_WORD_STEPS)
    if constexpr (WAY == Way::by_words) {
        const Ints once = each([](const auto& n) { return held(n); }, numbers);  // not loaded for each part
        for (int p = 0; p < 2; ++p) parts[p] = each([p](const auto& n) { return bytes_at(n, p); }, once);
    }
#endif
}

// A group's products for one output each, as they grow, in units of the row. `offset` is what the constant takes off: plainly
// from each half of a stretch, otherwise from the group.
template <Way WAY>
class Sums;

template <>
class Sums<Way::plain> {
public:
    void begin_half(int32_t offset) { half_ = Ints{} + offset; }
    void add(const Ints& numbers, const Ints& steps, const Multiple&) { half_ = dot(half_, numbers, steps); }
    void end_half(const Multiple& multiple) { group_ += to<float>(half_) * multiple.number; }
    Floats end(int32_t) const { return group_; }

private:
    Ints half_{};
    Floats group_{};
};

#if defined(SRV_BYTE_PAIRS)
template <>
class Sums<Way::by_shorts> {
public:
    void begin_half(int32_t) { half_ = Ints{}; }
    void add(const Ints& numbers, const Ints& steps, const Multiple&) { half_ = dot_short(half_, numbers, steps); }
    void end_half(const Multiple& multiple) { group_ = dot_pairs(group_, half_, Ints{} + multiple.pair); }
    Floats end(int32_t offset) const { return to<float>(group_ + offset); }

private:
    Ints half_{}, group_{};
};
#endif

#if defined(SRV_WORD_STEPS)
template <>
class Sums<Way::by_words> {
public:
    void begin_half(int32_t) {}
    void add(const Ints& numbers, const Ints& steps, const Multiple&) { group_ = dot_pairs(group_, numbers, steps); }
    void end_half(const Multiple&) {}
    Floats end(int32_t offset) const { return to<float>(group_ + offset); }

private:
    Ints group_{};
};
#endif

// A product's way, and which sums of steps it needs: with least values what they are worth, of groups; otherwise offsets, of
// what they are taken from. A half that is a group counts as one.
template <int BITS, int GROUP, bool LEAST_VALUES>
struct Plan {
    static constexpr bool LEAST = LEAST_VALUES;
    static constexpr Way WAY = way_of(BITS, LEAST);
    static constexpr bool OF_HALVES = GROUP == LANES || (WAY == Way::plain && !LEAST);
    static constexpr float MOST = most_multiple(BITS, GROUP, LEAST);
    static constexpr float UNITS = MOST * most_step(WAY);  // of a row, in its largest magnitude
    static constexpr int64_t sums(int64_t inputs) { return inputs / (OF_HALVES ? LANES : STRETCH); }
};

// The bits of the largest magnitude of each half stretch, and of them all. What is not finite is not below INFINITE.
template <class T>
inline int32_t largest_magnitudes(const T* x, int64_t inputs, int32_t* to) {
    FourInts most = {};
    for (int64_t i = 0; i < inputs; i += STRETCH, to += 2) {
        const FourInts two = folded(magnitudes(load(x + i)), magnitudes(load(x + i + LANES)), larger);
        std::memcpy(to, &two, 2 * sizeof(*to));
        most = larger(most, two);
    }
    return most[0] > most[1] ? most[0] : most[1];
}

template <Way WAY>
inline void keep_multiples(Multiple* to, const FourInts& multiples) {
    for (int h = 0; h < 2; ++h) {
        if constexpr (WAY == Way::plain) {
            to[h].number = static_cast<float>(multiples[h]);
        } else {
            to[h].pair = multiples[h] * 0x10001;
        }
    }
}

// What the sums of two halves' steps are worth, or take off. Returns where the next go.
template <class Planned>
inline StepsSum* keep_sums(StepsSum* to, const Four& sums, const FourInts& multiples, int32_t constant) {
    const Four worths = sums * __builtin_convertvector(multiples, Four);
    FourInts offsets = __builtin_convertvector(sums, FourInts) * -constant;
    if constexpr (Planned::WAY != Way::plain) offsets *= multiples;
    const auto keep = [to](int place, float worth, int32_t offset) {
        if constexpr (Planned::LEAST) {
            to[place].worth = worth;
        } else {
            to[place].offset = offset;
        }
    };
    if constexpr (Planned::OF_HALVES) {
        keep(0, worths[0], offsets[0]), keep(1, worths[1], offsets[1]);
        return to + 2;
    }
    keep(0, worths[0] + worths[1], offsets[0] + offsets[1]);
    return to + 1;
}

#if defined(SRV_WORD_STEPS)
// A row of x as steps of 16 bits, and their sums.
template <class T, class Planned>
    requires(Planned::WAY == Way::by_words)
void quantize_row(const BlockLinearArgs& a, int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    int16_t* steps_at = static_cast<int16_t*>(a.steps) + row * a.inputs;
    StepsSum* sums_at = a.x_sums + row * Planned::sums(a.inputs);
    const Unit unit = unit_of(x, a.inputs, Planned::UNITS);
    a.units[row] = unit.worth;
    for (int64_t i = 0; i < a.inputs;) {
        Ints total{};
        for (const int64_t end = i + (Planned::OF_HALVES ? LANES : STRETCH); i < end; i += LANES) {
            const Ints steps = unit.count(load(x + i));
            store_words(steps_at + i, steps);
            total += steps;
        }
        (sums_at++)->offset = folded(total, added) * -a.constant;
    }
}
#endif

// A row of x as steps, of which at most 127 are a magnitude; their multiples; and the sums of the steps. A multiple is
// the least that is enough for the largest of 16 inputs.
template <class T, class Planned>
void quantize_row(const BlockLinearArgs& a, int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    int8_t* steps_at = static_cast<int8_t*>(a.steps) + row * a.inputs;
    Multiple* multiples_at = a.multiples + row * (a.inputs / LANES);
    StepsSum* sums_at = a.x_sums + row * Planned::sums(a.inputs);
    const int32_t most = largest_magnitudes(x, a.inputs, &multiples_at->pair);  // where the multiples will be
    const Unit unit(most, Planned::UNITS);
    a.units[row] = unit.worth;
    for (int64_t i = 0; i < a.inputs; i += STRETCH, multiples_at += 2) {
        const FourInts largest = {multiples_at[0].pair, multiples_at[1].pair};
        Four units = bits_as<float>(largest) * (unit.inverse * (1.0f / 127.0f));
        units = units < Planned::MOST - 1.0f ? units : Four{} + (Planned::MOST - 1.0f);
        const FourInts multiples = __builtin_convertvector(units, FourInts) + 1;
        const Four numbers = __builtin_convertvector(multiples, Four), inverses = unit.inverse / numbers;
        Floats steps[2];
        for (int h = 0; h < 2; ++h) {
            steps[h] = count_of(load(x + i + h * LANES), inverses[h]);
            store_bytes(steps_at + i + h * LANES, to<int32_t>(steps[h]));
        }
        keep_multiples<Planned::WAY>(multiples_at, multiples);
        sums_at = keep_sums<Planned>(sums_at, folded(steps[0], steps[1], added), multiples, a.constant);
    }
}

// How a block of outputs lies as tiles read it: as it is packed, or opened for many rows, which is to say that its numbers
// have a byte each, and its scales and least values are float32.
template <int BITS, int GROUP, bool LEAST, bool OPENED>
struct Layout {
    using Scale = std::conditional_t<OPENED, float, Half>;
    static constexpr int NUMBER_BITS = OPENED ? 8 : BITS;
    static constexpr int64_t SCALES = STRETCH / GROUP * BLOCK_OUTPUTS * static_cast<int64_t>(sizeof(Scale));  // bytes
    static constexpr int64_t NUMBERS_AT = SCALES * (LEAST ? 2 : 1);
    static constexpr int64_t SIZE = NUMBERS_AT + STRETCH * BLOCK_OUTPUTS * NUMBER_BITS / 8;  // bytes of a stretch

    static_assert(OPENED || SIZE == stretch_bytes({BITS, GROUP, LEAST, 0}));

    static Floats scales(const uint8_t* at) { return load(reinterpret_cast<const Scale*>(at)); }
};

struct alignas(64) Line {
    uint8_t bytes[64];
};

// A packed block of numbers of 4 bits, opened, in memory of this thread that is good until it opens another.
template <int GROUP, bool LEAST>
const uint8_t* opened(const uint8_t* packed, int64_t inputs) {
    using From = Layout<4, GROUP, LEAST, false>;
    using To = Layout<4, GROUP, LEAST, true>;
    static_assert(To::SIZE % sizeof(Line) == 0);
    thread_local std::vector<Line> memory;
    const int64_t stretches = inputs / STRETCH, lines = stretches * To::SIZE / static_cast<int64_t>(sizeof(Line));
    if (static_cast<int64_t>(memory.size()) < lines) memory.resize(lines);
    auto* const begin = reinterpret_cast<uint8_t*>(memory.data());
    uint8_t* to = begin;
    for (int64_t s = 0; s < stretches; ++s, packed += From::SIZE, to += To::SIZE) {
        prefetch(packed, From::SIZE, AHEAD);
        for (int64_t at = 0; at < To::NUMBERS_AT; at += LANES * 4) {
            store(reinterpret_cast<float*>(to + at), From::scales(packed + at / 2));
        }
        for (int64_t at = 0; at < STRETCH * BLOCK_OUTPUTS / 2; at += LANES * 4) {
            constexpr int64_t PLACE = BLOCK_OUTPUTS * 4;
            const Ints both = load_fours(packed + From::NUMBERS_AT + at);
            auto* four = reinterpret_cast<int32_t*>(to + To::NUMBERS_AT + at + at / PLACE * PLACE);
            store(four, both & 0x0f0f0f0f);
            store(four + BLOCK_OUTPUTS, (both >> 4) & 0x0f0f0f0f);
        }
    }
    return begin;
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

// Of COUNT rows, the outputs of VECTORS vectors from `first` of a block on, which lies at `weight`. All rows' sums go on
// side by side, four after four: each waits for its own last addition, but not for the others'.
template <class T, int BITS, int GROUP, bool LEAST, bool OPENED, int COUNT, int VECTORS>
inline void tile(const BlockLinearArgs& a, const uint8_t* weight, int64_t block, int64_t first, int64_t row) {
    using Weight = Layout<BITS, GROUP, LEAST, OPENED>;
    constexpr int SCALE = sizeof(typename Weight::Scale), NUMBER_BITS = Weight::NUMBER_BITS;
    constexpr int GROUPS = STRETCH / GROUP, HALVES = GROUP / LANES;
    static_assert(LANES == 16, "half a stretch is one vector");
    using Planned = Plan<BITS, GROUP, LEAST>;
    constexpr Way WAY = Planned::WAY;
    constexpr bool PLAIN = WAY == Way::plain;
    constexpr int STEP = PARTS<WAY>;  // bytes: a product takes four, all steps of four inputs or half of them
    const int64_t halves = a.inputs / LANES, groups = halves / HALVES;
    const int8_t* steps = static_cast<const int8_t*>(a.steps) + row * a.inputs * STEP;
    const Multiple* multiples = a.multiples + row * halves;
    const int64_t x_sums_stride = Planned::sums(a.inputs);
    const StepsSum* x_sums = a.x_sums + row * x_sums_stride;
    Floats totals[COUNT][VECTORS] = {};
    for (int64_t group = 0; group < groups; ++group) {
        const int g = static_cast<int>(group % GROUPS);
        const uint8_t* stretch = weight + group / GROUPS * Weight::SIZE;
        const uint8_t* scales_at = stretch + (g * BLOCK_OUTPUTS + first) * SCALE;
        const uint8_t* numbers_at = stretch + Weight::NUMBERS_AT + g * GROUP * 4 * NUMBER_BITS + first * 4;
        if (!OPENED && row == 0 && first == 0) {  // where a block is read from memory, unless a share began within it
            constexpr int64_t BYTES = Weight::SIZE / GROUPS;
            prefetch(stretch + g * BYTES, BYTES, AHEAD);
        }
        Sums<WAY> sums[COUNT][VECTORS];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; ++h) {
            const int64_t half = group * HALVES + h;
            for (int r = 0; r < COUNT; ++r) {
                const int32_t offset = PLAIN && !LEAST ? x_sums[r * x_sums_stride + half].offset : 0;
                for (int v = 0; v < VECTORS; ++v) sums[r][v].begin_half(offset);
            }
#pragma GCC unroll 4
            for (int four = 0; four < LANES / 4; ++four) {
                Ints numbers[VECTORS];
                numbers_of<NUMBER_BITS>(numbers_at, h * (LANES / 4) + four, numbers);
                Ints parts[VECTORS][PARTS<WAY>];
                for (int v = 0; v < VECTORS; ++v) split<WAY>(numbers[v], parts[v]);
#pragma GCC unroll 2
                for (int p = 0; p < PARTS<WAY>; ++p) {
#pragma GCC unroll 8
                    for (int r = 0; r < COUNT; ++r) {
                        const Multiple& multiple = multiples[r * halves + half];
                        const int64_t at = (r * halves + half) * LANES + four * 4;
                        const Ints step = four_bytes(steps + at * STEP + p * 4);
                        for (int v = 0; v < VECTORS; ++v) sums[r][v].add(parts[v][p], step, multiple);
                    }
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; ++r) {
                for (int v = 0; v < VECTORS; ++v) sums[r][v].end_half(multiples[r * halves + half]);
            }
        }
        for (int v = 0; v < VECTORS; ++v) {
            const Floats scales = Weight::scales(scales_at + v * LANES * SCALE);
            Floats leasts{};
            if constexpr (LEAST) leasts = Weight::scales(scales_at + Weight::SCALES + v * LANES * SCALE);
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; ++r) {
                const int32_t offset = PLAIN || LEAST ? 0 : x_sums[r * x_sums_stride + group].offset;
                totals[r][v] += sums[r][v].end(offset) * scales;
                if constexpr (LEAST) totals[r][v] += leasts * x_sums[r * x_sums_stride + group].worth;
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

template <class T, int BITS, int GROUP, bool LEAST, bool OPENED, class Where>
void multiply_tiles(const BlockLinearArgs& a, const Where& where) {
    constexpr int HIGHEST = tile_rows(way_of(BITS, LEAST));
    for_tiles<HIGHEST>(a.rows, a.inputs, a.outputs, where, [&]<int COUNT>(const uint8_t* weight, int64_t block, int64_t row) {
        constexpr int VECTORS = COUNT == 1 ? BLOCK_OUTPUTS / LANES : VECTORS_OF_ROWS;
        for (int64_t first = 0; first < BLOCK_OUTPUTS; first += VECTORS * LANES) {
            tile<T, BITS, GROUP, LEAST, OPENED, COUNT, VECTORS>(a, weight, block, first, row);
        }
    });
}

template <class T, int BITS, int GROUP, bool LEAST>
void multiply(const BlockLinearArgs& a) {
    for_rows(a.rows, a.inputs, [&](int64_t row) { quantize_row<T, Plan<BITS, GROUP, LEAST>>(a, row); });
    const int64_t block_size = a.inputs / STRETCH * Layout<BITS, GROUP, LEAST, false>::SIZE;
    const auto packed = [&](int64_t block) { return a.weight + block * block_size; };
    if constexpr (BITS == 4) {
        if (a.rows >= OPENED_FROM) {
            const auto open = [&](int64_t block) { return opened<GROUP, LEAST>(packed(block), a.inputs); };
            return multiply_tiles<T, BITS, GROUP, LEAST, true>(a, open);
        }
    }
    multiply_tiles<T, BITS, GROUP, LEAST, false>(a, packed);
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
