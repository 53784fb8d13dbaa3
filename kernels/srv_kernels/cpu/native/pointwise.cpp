// RMS norm, SiLU-and-mul, rotary embedding, and sums over ranks. The first three round to the dtype where transformers
// does: the normalized value before it is multiplied by the weight, and silu(gate) before it is multiplied by up.
#include "kernels.h"
#include "thread_pool.h"
#include "vector.h"

namespace srv::SRV_ISA {
namespace {

constexpr int64_t SERIAL_BELOW = 16 * 1024;  // elements below which waking other threads does not pay

// Calls body(offset, count) for a row of `dim` elements, sixteen at a time; the last count may be smaller.
template <class Body>
inline void over_row(int64_t dim, Body&& body) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) body(i, static_cast<int64_t>(LANES));
    if (i < dim) body(i, dim - i);
}

template <class T>
inline Float32x16 load_lanes(const T* from, int64_t count) {
    return count == LANES ? load(from) : load_partial(from, count);
}

template <class T>
inline void store_lanes(T* to, Float32x16 value, int64_t count) {
    count == LANES ? store(to, value) : store_partial(to, value, count);
}

template <class T>
void rms_norm_row(const RmsNormArgs& a, int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* weight = static_cast<const T*>(a.weight);
    T* out = static_cast<T*>(a.out) + row * a.dim;
    Float32x16 squares{};
    if (a.residual != nullptr) {
        const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
        T* total = static_cast<T*>(a.total) + row * a.dim;
        over_row(a.dim, [&](int64_t i, int64_t count) {
            store_lanes(total + i, load_lanes(residual + i, count) + load_lanes(x + i, count), count);
            const Float32x16 value = load_lanes(total + i, count);
            squares += value * value;
        });
        x = total;
    } else {
        over_row(a.dim, [&](int64_t i, int64_t count) {
            const Float32x16 value = load_lanes(x + i, count);
            squares += value * value;
        });
    }
    const float mean = reduce_add(squares) / static_cast<float>(a.dim);
    const Float32x16 factor = broadcast(1.0f / __builtin_sqrtf(mean + a.eps));
    over_row(a.dim, [&](int64_t i, int64_t count) {
        store_lanes(out + i, rounded(load_lanes(x + i, count) * factor, x) * load_lanes(weight + i, count), count);
    });
}

template <class T>
void rms_norm_impl(const RmsNormArgs& a) {
    parallel(a.rows * a.dim < SERIAL_BELOW, [&](int chunk, int chunks) {
        const Range mine = chunk_range(a.rows, chunk, chunks);
        for (int64_t row = mine.begin; row < mine.end; ++row) rms_norm_row<T>(a, row);
    });
}

template <class T>
void silu_and_mul_impl(const SiluAndMulArgs& a) {
    parallel(a.rows * a.dim < SERIAL_BELOW, [&](int chunk, int chunks) {
        const Range mine = chunk_range(a.rows, chunk, chunks);
        for (int64_t row = mine.begin; row < mine.end; ++row) {
            const T* gates = static_cast<const T*>(a.x) + row * a.x_stride;
            const T* values = gates + a.dim;
            T* out = static_cast<T*>(a.out) + row * a.dim;
            over_row(a.dim, [&](int64_t i, int64_t count) {
                const Float32x16 gate = load_lanes(gates + i, count);
                // e^-|gate| cannot overflow: gate / (1 + e^-gate), or gate e^gate / (e^gate + 1) if gate is negative.
                const Float32x16 e = exponential_for(select(gate < 0.0f, gate, -gate), out);
                const Float32x16 silu = rounded(gate * select(gate < 0.0f, e, broadcast(1.0f)) / (e + 1.0f), out);
                store_lanes(out + i, silu * load_lanes(values + i, count), count);
            });
        }
    });
}

template <class T>
void rotate_heads(const T* from, T* to, int64_t heads, int64_t dim, int64_t rotary_dim, const float* cos,
                  const float* sin) {
    const int64_t half = rotary_dim / 2;
    for (int64_t head = 0; head < heads; ++head, from += dim, to += dim) {
        over_row(half, [&](int64_t i, int64_t count) {
            const Float32x16 first = load_lanes(from + i, count), second = load_lanes(from + half + i, count);
            const Float32x16 c = load_lanes(cos + i, count), s = load_lanes(sin + i, count);
            store_lanes(to + i, first * c - second * s, count);
            store_lanes(to + half + i, second * c + first * s, count);
        });
        std::memcpy(to + rotary_dim, from + rotary_dim, (dim - rotary_dim) * sizeof(T));
    }
}

template <class T>
void rotary_impl(const RotaryArgs& a) {
    parallel(a.tokens * (a.heads + a.kv_heads) * a.dim < SERIAL_BELOW, [&](int chunk, int chunks) {
        const Range mine = chunk_range(a.tokens, chunk, chunks);
        for (int64_t token = mine.begin; token < mine.end; ++token) {
            const float* cos = a.cos_sin + a.positions[token] * a.rotary_dim;
            const float* sin = cos + a.rotary_dim / 2;
            rotate_heads(static_cast<const T*>(a.q) + token * a.q_stride,
                         static_cast<T*>(a.q_out) + token * a.heads * a.dim, a.heads, a.dim, a.rotary_dim, cos, sin);
            rotate_heads(static_cast<const T*>(a.k) + token * a.k_stride,
                         static_cast<T*>(a.k_out) + token * a.kv_heads * a.dim, a.kv_heads, a.dim, a.rotary_dim, cos,
                         sin);
        }
    });
}

template <class T>
void sum_impl(const SumArgs& a) {
    const T* parts = static_cast<const T*>(a.parts);
    T* out = static_cast<T*>(a.out);
    over_row(a.elements, [&](int64_t i, int64_t count) {
        Float32x16 total = load_lanes(parts + i, count);
        for (int64_t member = 1; member < a.members; ++member) {
            total += load_lanes(parts + member * a.stride + i, count);
        }
        store_lanes(out + i, total, count);
    });
}

}  // namespace

void rms_norm(Type type, const RmsNormArgs& args) {
    type == Type::float32 ? rms_norm_impl<float>(args) : rms_norm_impl<BFloat16>(args);
}

void silu_and_mul(Type type, const SiluAndMulArgs& args) {
    type == Type::float32 ? silu_and_mul_impl<float>(args) : silu_and_mul_impl<BFloat16>(args);
}

void rotary(Type type, const RotaryArgs& args) {
    type == Type::float32 ? rotary_impl<float>(args) : rotary_impl<BFloat16>(args);
}

void sum(Type type, const SumArgs& args) {
    if (type == Type::float16) return sum_impl<Half>(args);
    type == Type::float32 ? sum_impl<float>(args) : sum_impl<BFloat16>(args);
}

}  // namespace srv::SRV_ISA
