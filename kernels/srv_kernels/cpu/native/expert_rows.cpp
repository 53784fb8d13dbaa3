// Parts of a mixture of experts that work on rows: routing, the activation of gates, and the weighted sums.
//
// Routing, per token (E experts, K chosen):
//
//     scores    softmax or sigmoid of the logits; the logits themselves, if the softmax is that of the chosen ones
//     keys      scores + bias: what experts are chosen by, the lower id first among equals; NaN counts as -infinity
//     groups    only experts of the `top_groups` best groups are chosen. A group's key is its largest, or with a bias
//               the sum of its two largest
//     weights   the scores of the chosen ones, without the bias; divided by their sum, or SMALLEST_SUM if that is
//               larger, if `renormalize`; times `scale`
//
// Without a bias, the logits are the keys: softmax and sigmoid are monotonic.
#include <vector>

#include "kernels.h"
#include "thread_pool.h"
#include "vector.h"

namespace srv::SRV_ISA {
namespace {

constexpr int64_t SERIAL_BELOW = 16 * 1024;  // elements below which waking other threads does not pay
constexpr float SMALLEST_SUM = 1e-20f;

// Calls body(offset, count) for a row of `dim` elements, sixteen at a time; the last count may be smaller.
template <class Body>
inline void over_row(int64_t dim, Body&& body) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) body(i, static_cast<int64_t>(LANES));
    if (i < dim) body(i, dim - i);
}

inline Float32x16 load_lanes(const float* from, int64_t count) {
    return count == LANES ? load(from) : load_partial(from, count);
}

template <class T>
inline void store_lanes(T* to, const Float32x16& value, int64_t count) {
    count == LANES ? store(to, value) : store_partial(to, value, count);
}

// x * sigmoid(factor * x). e^-|x| cannot overflow: x / (1 + e^-x), or x e^x / (e^x + 1) if x is negative.
inline Float32x16 swish(const Float32x16& x, float factor) {
    const Float32x16 scaled = x * factor, e = exponential(select(scaled < 0.0f, scaled, -scaled));
    return x * select(scaled < 0.0f, e, broadcast(1.0f)) / (e + 1.0f);
}

template <Activation ACTIVATION>
inline Float32x16 activated(const Float32x16& gate, const Float32x16& up) {
    if constexpr (ACTIVATION == Activation::silu) return swish(gate, 1.0f) * up;
    if constexpr (ACTIVATION == Activation::gelu_tanh) {
        // (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). For large x the sigmoid is 0 or 1.
        const Float32x16 doubled = gate * (gate * gate * 0.044715f + 1.0f) * 1.5957691216057308f;
        const Float32x16 e = exponential(select(doubled < 0.0f, doubled, -doubled));
        return gate * (select(doubled < 0.0f, e, broadcast(1.0f)) / (e + 1.0f)) * up;
    }
    constexpr bool PLAIN = ACTIVATION == Activation::silu_clamped;
    constexpr float LIMIT = PLAIN ? 10.0f : 7.0f, ALPHA = PLAIN ? 1.0f : 1.702f;
    const Float32x16 g = select(gate > LIMIT, broadcast(LIMIT), gate);
    const Float32x16 below = select(up > LIMIT, broadcast(LIMIT), up);
    return swish(g, ALPHA) * (select(below < -LIMIT, broadcast(-LIMIT), below) + (PLAIN ? 0.0f : 1.0f));
}

inline Float32x16 squared_relu(const Float32x16& up) {
    const Float32x16 above = select(up < 0.0f, broadcast(0.0f), up);
    return above * above;
}

template <class T, Activation ACTIVATION>
void gate_impl(const GateArgs& a) {
    constexpr bool GATED = parts_of(ACTIVATION) == 2;
    parallel(a.rows * a.dim < SERIAL_BELOW, [&](int chunk, int chunks) {
        const Range mine = chunk_range(a.rows, chunk, chunks);
        for (int64_t row = mine.begin; row < mine.end; ++row) {
            const float* const first = a.gate_up + row * parts_of(ACTIVATION) * a.dim;
            T* out = static_cast<T*>(a.out) + row * a.dim;
            over_row(a.dim, [&](int64_t i, int64_t count) {
                const Float32x16 lanes = load_lanes(first + i, count);
                if constexpr (GATED) {
                    store_lanes(out + i, activated<ACTIVATION>(lanes, load_lanes(first + a.dim + i, count)), count);
                } else {
                    store_lanes(out + i, squared_relu(lanes), count);
                }
            });
        }
    });
}

template <class T>
void gate_of_type(const GateArgs& a) {
    switch (a.activation) {
        case Activation::silu: return gate_impl<T, Activation::silu>(a);
        case Activation::gelu_tanh: return gate_impl<T, Activation::gelu_tanh>(a);
        case Activation::swiglu_clamped: return gate_impl<T, Activation::swiglu_clamped>(a);
        case Activation::silu_clamped: return gate_impl<T, Activation::silu_clamped>(a);
        case Activation::relu2: return gate_impl<T, Activation::relu2>(a);
    }
}

template <class T>
void combine_impl(const CombineArgs& a) {
    parallel(a.tokens * a.top_k * a.dim < SERIAL_BELOW, [&](int chunk, int chunks) {
        const Range mine = chunk_range(a.tokens, chunk, chunks);
        for (int64_t token = mine.begin; token < mine.end; ++token) {
            const int32_t* rows = a.rows + token * a.top_k;
            const float* weights = a.weights + token * a.top_k;
            T* out = static_cast<T*>(a.out) + token * a.dim;
            over_row(a.dim, [&](int64_t i, int64_t count) {
                Float32x16 total{};
                for (int64_t k = 0; k < a.top_k; ++k) {
                    if (rows[k] >= 0) total += load_lanes(a.parts + rows[k] * a.dim + i, count) * weights[k];
                }
                store_lanes(out + i, total, count);
            });
        }
    });
}

// The largest keys so far, descending, with their indices; of equal keys the first.
struct Largest {
    float* keys;
    int64_t* ids;
    int64_t most, count = 0;

    void add(float key, int64_t id) {
        if (count == most && !(key > keys[most - 1])) return;
        int64_t at = count < most ? count++ : most - 1;
        for (; at > 0 && key > keys[at - 1]; --at) keys[at] = keys[at - 1], ids[at] = ids[at - 1];
        keys[at] = key, ids[at] = id;
    }
};

// Arrays for one token.
struct Routing {
    std::vector<float> scores, keys, largest, group_keys, group_largest;
    std::vector<int64_t> group_ids;
    std::vector<uint8_t> group_chosen;
};

inline float sigmoid(float x) {
    const float e = exponential(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : 1.0f) / (e + 1.0f);
}

// to[i] = e^(from[i] - the largest) / the sum of these.
void softmax(const float* from, int64_t count, float* to) {
    float largest = from[0];
    for (int64_t i = 1; i < count; ++i) largest = from[i] > largest ? from[i] : largest;
    Float32x16 totals{};
    over_row(count, [&](int64_t i, int64_t lanes) {
        const Float32x16 value = exponential(load_lanes(from + i, lanes) - largest);
        store_lanes(to + i, value, lanes);
        // Lanes past the end are 0 - largest there: they are not part of the sum.
        totals += lanes == LANES ? value : load_partial(to + i, lanes);
    });
    const float total = reduce_add(totals);
    over_row(count, [&](int64_t i, int64_t lanes) { store_lanes(to + i, load_lanes(to + i, lanes) / total, lanes); });
}

// Marks the best groups in `group_chosen`.
void choose_groups(const RouteArgs& a, Routing& of) {
    const int64_t size = a.experts / a.groups;
    const bool two = a.bias != nullptr && size > 1;
    of.group_largest.resize(a.top_groups), of.group_ids.resize(a.top_groups);
    Largest best{of.group_largest.data(), of.group_ids.data(), a.top_groups};
    for (int64_t group = 0; group < a.groups; ++group) {
        float keys[2];
        int64_t ids[2];
        Largest largest{keys, ids, two ? 2 : 1};
        for (int64_t i = group * size; i < (group + 1) * size; ++i) largest.add(of.keys[i], i);
        best.add(two ? keys[0] + keys[1] : keys[0], group);
    }
    of.group_chosen.assign(a.groups, 0);
    for (int64_t i = 0; i < best.count; ++i) of.group_chosen[of.group_ids[i]] = 1;
}

void route_token(const RouteArgs& a, int64_t token, Routing& of) {
    const float* logits = a.logits + token * a.stride;
    int64_t* ids = a.ids + token * a.top_k;
    float* weights = a.weights + token * a.top_k;
    const bool of_chosen = a.scoring == Scoring::softmax_of_top_k;
    if (a.scoring == Scoring::softmax) softmax(logits, a.experts, of.scores.data());
    for (int64_t i = 0; i < a.experts; ++i) {
        if (a.scoring == Scoring::sigmoid) of.scores[i] = sigmoid(logits[i]);
        if (of_chosen) of.scores[i] = logits[i];
        const float key = a.bias == nullptr ? logits[i] : of.scores[i] + a.bias[i];
        of.keys[i] = key == key ? key : -__builtin_inff();
    }
    if (a.groups > 1) choose_groups(a, of);
    Largest best{of.largest.data(), ids, a.top_k};
    const int64_t size = a.experts / a.groups;
    for (int64_t group = 0; group < a.groups; ++group) {
        if (a.groups > 1 && of.group_chosen[group] == 0) continue;
        for (int64_t i = group * size; i < (group + 1) * size; ++i) best.add(of.keys[i], i);
    }
    for (int64_t k = 0; k < a.top_k; ++k) weights[k] = of.scores[ids[k]];
    if (of_chosen) softmax(weights, a.top_k, weights);
    float total = 1.0f;
    if (a.renormalize != 0) {
        total = 0;
        for (int64_t k = 0; k < a.top_k; ++k) total += weights[k];
        total = total < SMALLEST_SUM ? SMALLEST_SUM : total;
    }
    for (int64_t k = 0; k < a.top_k; ++k) weights[k] = weights[k] / total * a.scale;
}

}  // namespace

void route(const RouteArgs& a) {
    parallel(a.tokens * a.experts < SERIAL_BELOW, [&](int chunk, int chunks) {
        const Range mine = chunk_range(a.tokens, chunk, chunks);
        thread_local Routing of;
        of.scores.resize(a.experts), of.keys.resize(a.experts), of.largest.resize(a.top_k);
        for (int64_t token = mine.begin; token < mine.end; ++token) route_token(a, token, of);
    });
}

void gate(Type type, const GateArgs& args) {
    type == Type::float32 ? gate_of_type<float>(args) : gate_of_type<BFloat16>(args);
}

void combine(Type type, const CombineArgs& args) {
    type == Type::float32 ? combine_impl<float>(args) : combine_impl<BFloat16>(args);
}

}  // namespace srv::SRV_ISA
