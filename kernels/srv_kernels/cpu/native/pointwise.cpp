// Norms, gates and rotary positions. They round where the published models round: a norm is rounded before it
// is multiplied by its weight, a gate before it opens.
#include "kernels.h"
#include "pool.h"
#include "vector.h"

namespace srv::SRV_ISA {
namespace {

constexpr int64_t ALONE = 16 * 1024;  // elements under which waking other threads costs more than it saves

// f(offset, load, store) over a row of `dim` elements, sixteen at a time; the last part may be shorter.
template <class Each>
inline void over_row(int64_t dim, Each&& each) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) each(i, static_cast<int64_t>(LANES));
    if (i < dim) each(i, dim - i);
}

template <class T>
inline Floats take(const T* from, int64_t count) {
    return count == LANES ? load(from) : load_some(from, count);
}

template <class T>
inline void give(T* to, Floats value, int64_t count) {
    count == LANES ? store(to, value) : store_some(to, value, count);
}

template <class T>
void norm_row(const NormArgs& a, int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* weight = static_cast<const T*>(a.weight);
    T* out = static_cast<T*>(a.out) + row * a.dim;
    Floats squares{};
    if (a.residual != nullptr) {
        const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
        T* total = static_cast<T*>(a.total) + row * a.dim;
        over_row(a.dim, [&](int64_t i, int64_t count) {
            give(total + i, take(residual + i, count) + take(x + i, count), count);
            const Floats value = take(total + i, count);
            squares += value * value;
        });
        x = total;
    } else {
        over_row(a.dim, [&](int64_t i, int64_t count) {
            const Floats value = take(x + i, count);
            squares += value * value;
        });
    }
    const float mean = sum(squares) / static_cast<float>(a.dim);
    const Floats factor = all(1.0f / __builtin_sqrtf(mean + a.eps));
    over_row(a.dim, [&](int64_t i, int64_t count) {
        give(out + i, rounded(take(x + i, count) * factor, x) * take(weight + i, count), count);
    });
}

template <class T>
void norm_of(const NormArgs& a) {
    parallel(a.rows * a.dim < ALONE, [&](int share, int shares) {
        const Range mine = part(a.rows, share, shares);
        for (int64_t row = mine.begin; row < mine.end; ++row) norm_row<T>(a, row);
    });
}

template <class T>
void gate_of(const GateArgs& a) {
    parallel(a.rows * a.dim < ALONE, [&](int share, int shares) {
        const Range mine = part(a.rows, share, shares);
        for (int64_t row = mine.begin; row < mine.end; ++row) {
            const T* gates = static_cast<const T*>(a.x) + row * a.x_stride;
            const T* values = gates + a.dim;
            T* out = static_cast<T*>(a.out) + row * a.dim;
            over_row(a.dim, [&](int64_t i, int64_t count) {
                const Floats gate = take(gates + i, count);
                // Of a magnitude, so that e^x is at most 1: gate / (1 + e^-gate), or gate e^gate / (e^gate + 1).
                const Floats e = exponential_for(choose(gate < 0.0f, gate, -gate), out);
                const Floats open = rounded(gate * choose(gate < 0.0f, e, all(1.0f)) / (e + 1.0f), out);
                give(out + i, open * take(values + i, count), count);
            });
        }
    });
}

template <class T>
void turn_heads(const T* from, T* to, int64_t heads, int64_t dim, int64_t turned, const float* cos, const float* sin) {
    const int64_t half = turned / 2;
    for (int64_t head = 0; head < heads; ++head, from += dim, to += dim) {
        over_row(half, [&](int64_t i, int64_t count) {
            const Floats first = take(from + i, count), second = take(from + half + i, count);
            const Floats c = take(cos + i, count), s = take(sin + i, count);
            give(to + i, first * c - second * s, count);
            give(to + half + i, second * c + first * s, count);
        });
        std::memcpy(to + turned, from + turned, (dim - turned) * sizeof(T));
    }
}

template <class T>
void rotary_of(const RotaryArgs& a) {
    parallel(a.tokens * (a.heads + a.kv_heads) * a.dim < ALONE, [&](int share, int shares) {
        const Range mine = part(a.tokens, share, shares);
        for (int64_t token = mine.begin; token < mine.end; ++token) {
            const float* cos = a.cos_sin + a.positions[token] * a.turned;
            const float* sin = cos + a.turned / 2;
            turn_heads(static_cast<const T*>(a.q) + token * a.q_stride,
                       static_cast<T*>(a.q_out) + token * a.heads * a.dim, a.heads, a.dim, a.turned, cos, sin);
            turn_heads(static_cast<const T*>(a.k) + token * a.k_stride,
                       static_cast<T*>(a.k_out) + token * a.kv_heads * a.dim, a.kv_heads, a.dim, a.turned, cos, sin);
        }
    });
}

}  // namespace

void norm(Type type, const NormArgs& args) {
    type == Type::float32 ? norm_of<float>(args) : norm_of<BFloat16>(args);
}

void gate(Type type, const GateArgs& args) {
    type == Type::float32 ? gate_of<float>(args) : gate_of<BFloat16>(args);
}

void rotary(Type type, const RotaryArgs& args) {
    type == Type::float32 ? rotary_of<float>(args) : rotary_of<BFloat16>(args);
}

}  // namespace srv::SRV_ISA
