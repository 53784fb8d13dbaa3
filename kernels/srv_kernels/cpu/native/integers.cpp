// y = x W^T + b with W of 8-bit integers and x rounded to 8 bits on the way in.
//
// A packed weight is [outputs / 32][inputs / 4][32 outputs][4 inputs], read from its first byte to its last, zero where
// the matrix has ended: four inputs lie together because the processor's byte product multiplies and adds fours
// (VPDPBUSD). That product takes unsigned bytes on one side, so the steps of x are kept with 128 added, and what this
// adds to a sum (128 times the sum of the weights) is taken off with `correction`.
//
// Sums of integers are exact, so that a row's result depends neither on the batch nor on the threads.
#include "kernels.h"
#include "pool.h"
#include "tiles.h"
#include "vector.h"

namespace srv::SRV_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 12;  // 24 accumulators, 2 weights, and a few to spare of 32 registers
#else
constexpr int ROWS = 2;   // a vector of 16 lanes is two registers here or more, of 16
#endif
constexpr int VECTORS = BLOCK_OUTPUTS / LANES;
constexpr float MOST_FINITE = 3.4028234663852886e38f;
constexpr int ZERO = 128;             // the byte that stands for a step of 0

using Bytes = uint8_t __attribute__((vector_size(16)));

// Sixteen sums, each plus four weights times the same four steps.
inline Ints dot(Ints sum, const int8_t* weight, int32_t steps) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), _mm512_set1_epi32(steps),
                                                      _mm512_loadu_si512(weight)));
#else
    Ints four;
    std::memcpy(&four, weight, sizeof(four));
    for (int i = 0; i < 4; ++i) sum += ((four << (24 - 8 * i)) >> 24) * ((steps >> (8 * i)) & 255);
    return sum;
#endif
}

inline Ints load_integers(const int32_t* from, int64_t count) {
    Ints value = {};
    std::memcpy(&value, from, count * sizeof(int32_t));
    return value;
}

// Rounds to the nearest whole number, ties to even, of less than 2^22.
inline Floats whole(Floats value) {
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23
    return (value + magic) - magic;
}

// NaN counts as infinity.
template <class T>
inline float largest_magnitude(const T* x, int64_t count) {
    Floats most = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats value = count - i < LANES ? load_some(x + i, count - i) : load(x + i);
        const Floats magnitude = value < 0 ? -value : value;
        most = magnitude <= most ? most : magnitude;
        most = magnitude != magnitude ? all(__builtin_inff()) : most;
    }
    return largest(most);
}

// One row of x as bytes, and its scale. Static: steps of a given size about a given zero. The scale of a row that is
// not finite is infinity, so that none of its products is finite either.
template <class T>
void quantize_row(const ByteLinearArgs& a, int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    uint8_t* steps = a.steps + row * padded_fours(a.inputs);
    const float most = largest_magnitude(x, a.inputs);
    const float scale = a.per_input == 0 || most > MOST_FINITE ? most / 127.0f : 1.0f;
    a.row_scales[row] = scale;
    const float divisor = scale == 0 ? 1.0f : scale;
    for (int64_t i = 0; i < a.inputs; i += LANES) {
        const int64_t count = a.inputs - i < LANES ? a.inputs - i : LANES;
        const Floats value = count == LANES ? load(x + i) : load_some(x + i, count);
        Floats step = whole(a.per_input == 0 ? value / divisor : value * a.per_input + a.offset);
        step = step > 127.0f ? all(127.0f) : step;
        step = step < -128.0f ? all(-128.0f) : step;
        const Bytes bytes = __builtin_convertvector(__builtin_convertvector(step, Ints) + ZERO, Bytes);
        std::memcpy(steps + i, &bytes, count);
    }
    for (int64_t i = a.inputs; i < padded_fours(a.inputs); ++i) steps[i] = ZERO;
}

template <class T, int COUNT>
inline void tile(const ByteLinearArgs& a, const int8_t* weight, int64_t block, int64_t row) {
    const int64_t stride = padded_fours(a.inputs);
    const uint8_t* steps = a.steps + row * stride;
    Ints sums[COUNT][VECTORS] = {};
    for (int64_t i = 0; i < stride; i += FOUR, weight += BLOCK_OUTPUTS * FOUR) {
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; ++r) {
            int32_t four;
            std::memcpy(&four, steps + r * stride + i, sizeof(four));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot(sums[r][v], weight + v * LANES * FOUR, four);
        }
    }
    const int64_t first = block * BLOCK_OUTPUTS;
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = first + v * LANES;
        const int64_t lanes = a.outputs - column < LANES ? a.outputs - column : LANES;
        if (lanes <= 0) break;
        const Ints correction = load_integers(a.correction + column, lanes);
        const Floats scale = load_some(a.scales + column, lanes);
        const Floats bias = a.bias == nullptr ? Floats{} : load_some(static_cast<const T*>(a.bias) + column, lanes);
        for (int r = 0; r < COUNT; ++r) {
            T* out = static_cast<T*>(a.out) + (row + r) * a.outputs + column;
            const Floats sum = __builtin_convertvector(sums[r][v] + correction, Floats);
            const Floats value = sum * a.row_scales[row + r] * scale + bias;
            lanes == LANES ? store(out, value) : store_some(out, value, lanes);
        }
    }
}

template <class T>
void byte_linear_of(const ByteLinearArgs& a) {
    for_rows(a.rows, a.inputs, [&](int64_t row) { quantize_row<T>(a, row); });
    const int64_t block_size = BLOCK_OUTPUTS * padded_fours(a.inputs);
    for_tiles<ROWS>(a.rows, a.inputs, a.outputs, [&]<int COUNT>(int64_t block, int64_t row) {
        tile<T, COUNT>(a, a.weight + block * block_size, block, row);
    });
}

}  // namespace

void byte_linear(Type type, const ByteLinearArgs& args) {
    type == Type::float32 ? byte_linear_of<float>(args) : byte_linear_of<BFloat16>(args);
}

void pack_bytes(const PackBytesArgs& a) {
    const int64_t padded = padded_fours(a.inputs);
    parallel(false, [&](int share, int shares) {
        const Range mine = part(blocks(a.outputs), share, shares);
        for (int64_t block = mine.begin; block < mine.end; ++block) {
            int8_t* to = a.packed + block * BLOCK_OUTPUTS * padded;
            for (int64_t output = 0; output < BLOCK_OUTPUTS; ++output) {
                const int64_t row = block * BLOCK_OUTPUTS + output;
                const int8_t* from = a.weight + row * a.stride;
                for (int64_t i = 0; i < padded; ++i) {
                    to[(i / FOUR * BLOCK_OUTPUTS + output) * FOUR + i % FOUR] =
                        row < a.outputs && i < a.inputs ? from[i] : int8_t{};
                }
            }
        }
    });
}

}  // namespace srv::SRV_ISA
