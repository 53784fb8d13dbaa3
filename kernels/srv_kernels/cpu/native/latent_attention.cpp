// Multi-head latent attention over a paged pool of compressed vectors, absorbed (DeepSeek-V2, arXiv:2405.04434). Rows
// with many queries are computed by latent_prefill.cpp.
//
// All heads attend to the same vectors, so a work item takes several heads of one or a few queries of a row: their
// queries are multiplied by the up-projection of keys, attend to the compressed vectors and the rotary keys with an
// online softmax over tiles of keys, and the weighted vectors are multiplied by the up-projection of values. The keys of
// a row with one query are divided among items; their results are merged at the end.
//
// A token's arithmetic depends on its row alone, not on other rows nor on the number of threads. Sums are float32.
#include <atomic>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "latent_prefill.h"
#include "thread_pool.h"
#include "vector.h"

namespace srv::SRV_ISA {
namespace {

constexpr float NEG_INF = -__builtin_inff();
constexpr int64_t TILE = 64;                                   // keys per step of the online softmax
constexpr int64_t DECODE_HEADS = 16, HEADS = 8, QUERIES = 4;  // of one work item
constexpr int64_t VECTORS = 2;                                 // columns of values per pass, in vectors: a cache line

// Queries [begin, end) of a row, heads [first_head, end_head), keys [first_key, end_key) as far as they are visible.
struct Item {
    int64_t row, begin, end, first_head, end_head, first_key, end_key, split, splits;
};

// A thread's buffers for one item; reused, because allocating them takes longer than a short row.
struct LatentSpace {
    std::vector<float> query, out, scores, top, total;

    void fit(int64_t rows, int64_t width, int64_t latent) {
        grow(query, rows * width);
        grow(out, rows * latent);
        grow(scores, rows * TILE);
        grow(top, rows);
        grow(total, rows);
    }

    static void grow(std::vector<float>& memory, int64_t size) {
        if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    }
};

LatentSpace& own_space() {
    thread_local LatentSpace space;
    return space;
}

template <class T>
class Latent {
public:
    explicit Latent(const LatentAttentionArgs& args)
        : a(args), width(args.latent_dim + args.rope_dim), per_head(args.key_dim + args.value_dim) {
        first_partial.resize(a.rows + 1);
        for (int64_t row = 0; row < a.rows; ++row) {
            const int64_t splits = add_items(row);
            first_partial[row + 1] = first_partial[row] + (splits > 1 ? splits * a.heads : 0);
        }
        partial.resize(first_partial[a.rows] * (a.latent_dim + 2));
    }

    void run(Type type) {
        int64_t tokens = 0, work = 0;
        for (int64_t row = 0; row < a.rows; ++row) {
            tokens += a.query_lens[row];
            if (is_materialised(a, row)) continue;
            work += static_cast<int64_t>(a.query_lens[row]) * (a.kv_lens[row] + per_head);
        }
        const bool serial = work * a.heads * width < 256 * 1024;
        parallel(tokens * width < 64 * 1024, [&](int chunk, int chunks) {
            for (int64_t row = 0; row < a.rows; ++row) {
                const Range mine = chunk_range(a.query_lens[row], chunk, chunks);
                for (int64_t query = mine.begin; query < mine.end; ++query) write(row, query);
            }
        });
        for (int64_t row = 0; row < a.rows; ++row) {
            if (is_materialised(a, row)) materialised_attention(type, a, row);
        }
        if (items.empty()) return;
        std::atomic<int64_t> next{0};
        const int64_t count = static_cast<int64_t>(items.size());
        parallel(serial, [&](int, int) {
            for (int64_t at; (at = next.fetch_add(1, std::memory_order_relaxed)) < count;) attend(items[at]);
        });
        if (partial.empty()) return;
        std::atomic<int64_t> merged{0};
        const int64_t heads = a.rows * a.heads;
        parallel(serial, [&](int, int) {
            for (int64_t at; (at = merged.fetch_add(1, std::memory_order_relaxed)) < heads;) {
                merge(at / a.heads, at % a.heads);
            }
        });
    }

private:
    const LatentAttentionArgs& a;
    const int64_t width, per_head;
    std::vector<Item> items;
    std::vector<int64_t> first_partial;  // per row, in results of one head and split
    std::vector<float> partial;          // of each: largest score, sum of weights, weighted vectors

    // Adds the work items of an absorbed row, and returns into how many its keys are divided.
    int64_t add_items(int64_t row) {
        const int64_t queries = a.query_lens[row], keys = a.kv_lens[row];
        if (is_materialised(a, row)) return 0;
        if (queries == 1) {
            const int64_t splits = (keys + a.split_keys - 1) / a.split_keys;
            for (int64_t split = 0; split < splits; ++split) {
                const int64_t first = split * a.split_keys, end = first + a.split_keys < keys ? first + a.split_keys : keys;
                for (int64_t head = 0; head < a.heads; head += DECODE_HEADS) {
                    items.push_back({row, 0, 1, head, least(head + DECODE_HEADS, a.heads), first, end, split, splits});
                }
            }
            return splits;
        }
        for (int64_t head = 0; head < a.heads; head += HEADS) {
            for (int64_t query = 0; query < queries; query += QUERIES) {
                const int64_t end = least(query + QUERIES, queries);
                items.push_back({row, query, end, head, least(head + HEADS, a.heads), 0, keys - queries + end, 0, 1});
            }
        }
        return 1;
    }

    static int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

    int64_t slot(int64_t row, int64_t position) const {
        const int64_t page = a.table[row * a.columns + position / a.page_size];
        return page * a.page_size + position % a.page_size;
    }

    const T* latent_at(int64_t slot) const { return static_cast<const T*>(a.latents) + slot * a.latent_dim; }
    const T* rope_at(int64_t slot) const { return static_cast<const T*>(a.ropes) + slot * a.rope_dim; }
    const T* up_of(int64_t head) const { return static_cast<const T*>(a.up) + head * per_head * a.latent_dim; }

    void write(int64_t row, int64_t query) const {
        const int64_t token = a.starts[row] + query, to = slot(row, a.kv_lens[row] - a.query_lens[row] + query);
        std::memcpy(const_cast<T*>(latent_at(to)), static_cast<const T*>(a.latent) + token * a.latent_stride,
                    a.latent_dim * sizeof(T));
        std::memcpy(const_cast<T*>(rope_at(to)), static_cast<const T*>(a.rope) + token * a.rope_stride,
                    a.rope_dim * sizeof(T));
    }

    void attend(const Item& item) {
        LatentSpace& space = own_space();
        const int64_t heads = item.end_head - item.first_head, rows = (item.end - item.begin) * heads;
        space.fit(rows, width, a.latent_dim);
        for (int64_t head = item.first_head; head < item.end_head; ++head) absorb(space, item, head);
        for (int64_t r = 0; r < rows; ++r) space.top[r] = NEG_INF, space.total[r] = 0;
        std::memset(space.out.data(), 0, rows * a.latent_dim * sizeof(float));
        int64_t slots[TILE];
        for (int64_t key = item.first_key; key < item.end_key; key += TILE) {
            const int64_t count = least(TILE, item.end_key - key);
            for (int64_t i = 0; i < count; ++i) slots[i] = slot(item.row, key + i);
            for (int64_t query = item.begin; query < item.end; ++query) {
                const int64_t position = a.kv_lens[item.row] - a.query_lens[item.row] + query;
                const int64_t visible = least(count, position + 1 - key);
                if (visible > 0) tile(space, (query - item.begin) * heads, heads, slots, visible);
            }
        }
        finish(space, item);
    }

    // The queries of a head, scaled, in the space of compressed vectors; then their rotated parts.
    void absorb(LatentSpace& space, const Item& item, int64_t head) const {
        const int64_t heads = item.end_head - item.first_head, queries = item.end - item.begin;
        const T* up = up_of(head);
        const T* from[QUERIES];
        float* to[QUERIES];
        for (int64_t i = 0; i < queries; ++i) {
            const int64_t token = a.starts[item.row] + item.begin + i;
            from[i] = static_cast<const T*>(a.q) + token * a.q_stride + head * (a.key_dim + a.rope_dim);
            to[i] = &space.query[(i * heads + head - item.first_head) * width];
            for (int64_t d = 0; d < a.rope_dim; d += LANES) {
                store(to[i] + a.latent_dim + d, load(from[i] + a.key_dim + d) * a.scale);
            }
        }
        for (int64_t d = 0; d < a.latent_dim; d += LANES) {
            Float32x16 sums[QUERIES] = {};
            for (int64_t n = 0; n < a.key_dim; ++n) {
                const Float32x16 weight = load(up + n * a.latent_dim + d);
                for (int64_t i = 0; i < queries; ++i) sums[i] += to_float(from[i][n]) * weight;
            }
            for (int64_t i = 0; i < queries; ++i) store(to[i] + d, sums[i] * a.scale);
        }
    }

    // Adds the first `count` keys of a tile to the results of `rows` heads of one query, from `first` on.
    void tile(LatentSpace& space, int64_t first, int64_t rows, const int64_t* slots, int64_t count) const {
        int64_t r = 0;
        for (; r + 8 <= rows; r += 8) scores<8>(space, first + r, slots, count);
        for (; r + 2 <= rows; r += 2) scores<2>(space, first + r, slots, count);
        if (r < rows) scores<1>(space, first + r, slots, count);
        for (r = first; r < first + rows; ++r) weigh(space, r, count);
        for (r = 0; r + 8 <= rows; r += 8) add_values<8>(space, first + r, slots, count);
        for (; r + 2 <= rows; r += 2) add_values<2>(space, first + r, slots, count);
        if (r < rows) add_values<1>(space, first + r, slots, count);
    }

    template <int COUNT>
    void scores(LatentSpace& space, int64_t first, const int64_t* slots, int64_t count) const {
        const float* queries = &space.query[first * width];
        for (int64_t key = 0; key < count; ++key) {
            Float32x16 sums[COUNT] = {};
            add_products<COUNT>(sums, latent_at(slots[key]), queries, a.latent_dim);
            add_products<COUNT>(sums, rope_at(slots[key]), queries + a.latent_dim, a.rope_dim);
            for (int i = 0; i < COUNT; ++i) space.scores[(first + i) * TILE + key] = reduce_add(sums[i]);
        }
    }

    template <int COUNT>
    inline void add_products(Float32x16* sums, const T* key, const float* queries, int64_t dim) const {
        for (int64_t d = 0; d < dim; d += LANES) {
            const Float32x16 value = load(key + d);
#pragma GCC unroll 8
            for (int i = 0; i < COUNT; ++i) sums[i] += load(queries + i * width + d) * value;
        }
    }

    // Turns the scores of a row's tile into softmax weights, and rescales earlier sums when a larger score appears.
    void weigh(LatentSpace& space, int64_t r, int64_t count) const {
        float* scores = &space.scores[r * TILE];
        const int64_t padded = (count + LANES - 1) / LANES * LANES;
        for (int64_t i = count; i < padded; ++i) scores[i] = NEG_INF;
        Float32x16 maximum = broadcast(NEG_INF);
        for (int64_t i = 0; i < padded; i += LANES) maximum = max_lanes(load(scores + i), maximum);
        const float top = reduce_max(maximum), before = space.top[r];
        if (top > before) {
            const float factor = before == NEG_INF ? 0.0f : exponential(before - top);
            float* out = &space.out[r * a.latent_dim];
            for (int64_t d = 0; d < a.latent_dim; d += LANES) store(out + d, load(out + d) * factor);
            space.total[r] *= factor;
            space.top[r] = top;
        }
        Float32x16 total{};
        for (int64_t i = 0; i < padded; i += LANES) {
            const Float32x16 weight = exponential(load(scores + i) - space.top[r]);
            store(scores + i, weight);
            total += weight;
        }
        space.total[r] += reduce_add(total);
    }

    template <int COUNT>
    void add_values(LatentSpace& space, int64_t first, const int64_t* slots, int64_t count) const {
        int64_t d = 0;
        for (; d + VECTORS * LANES <= a.latent_dim; d += VECTORS * LANES) {
            add_columns<COUNT, VECTORS>(space, first, slots, count, d);
        }
        for (; d < a.latent_dim; d += LANES) add_columns<COUNT, 1>(space, first, slots, count, d);
    }

    template <int COUNT, int WIDTH>
    inline void add_columns(LatentSpace& space, int64_t first, const int64_t* slots, int64_t count, int64_t d) const {
        float* out = &space.out[first * a.latent_dim + d];
        const float* weights = &space.scores[first * TILE];
        Float32x16 sums[COUNT][WIDTH];
        for (int i = 0; i < COUNT; ++i) {
            for (int v = 0; v < WIDTH; ++v) sums[i][v] = load(out + i * a.latent_dim + v * LANES);
        }
        for (int64_t key = 0; key < count; ++key) {
            const T* from = latent_at(slots[key]) + d;
            Float32x16 values[WIDTH];
            for (int v = 0; v < WIDTH; ++v) values[v] = load(from + v * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < COUNT; ++i) {
                const float weight = weights[i * TILE + key];
                for (int v = 0; v < WIDTH; ++v) sums[i][v] += weight * values[v];
            }
        }
        for (int i = 0; i < COUNT; ++i) {
            for (int v = 0; v < WIDTH; ++v) store(out + i * a.latent_dim + v * LANES, sums[i][v]);
        }
    }

    void finish(LatentSpace& space, const Item& item) {
        const int64_t heads = item.end_head - item.first_head;
        for (int64_t query = item.begin; query < item.end; ++query) {
            for (int64_t head = item.first_head; head < item.end_head; ++head) {
                const int64_t r = (query - item.begin) * heads + head - item.first_head;
                float* sums = &space.out[r * a.latent_dim];
                if (item.splits == 1) {
                    expand(sums, space.total[r], a.starts[item.row] + query, head);
                    continue;
                }
                const int64_t number = first_partial[item.row] + head * item.splits + item.split;
                float* to = &partial[number * (a.latent_dim + 2)];
                to[0] = space.top[r];
                to[1] = space.total[r];
                std::memcpy(to + 2, sums, a.latent_dim * sizeof(float));
            }
        }
    }

    // A head's result from its weighted compressed vectors, of which `sums` is overwritten.
    void expand(float* sums, float total, int64_t token, int64_t head) const {
        const float factor = 1.0f / total;
        for (int64_t d = 0; d < a.latent_dim; d += LANES) store(sums + d, load(sums + d) * factor);
        const T* up = up_of(head) + a.key_dim * a.latent_dim;
        T* out = static_cast<T*>(a.out) + (token * a.heads + head) * a.value_dim;
        for (int64_t v = 0; v < a.value_dim; ++v, up += a.latent_dim) {
            Float32x16 sum{};
            for (int64_t d = 0; d < a.latent_dim; d += LANES) sum += load(sums + d) * load(up + d);
            store_scalar(out + v, reduce_add(sum));
        }
    }

    void merge(int64_t row, int64_t head) const {
        const int64_t splits = (first_partial[row + 1] - first_partial[row]) / a.heads;
        if (splits == 0) return;
        LatentSpace& space = own_space();
        space.fit(1, width, a.latent_dim);
        float* sums = space.out.data();
        const float* from = &partial[(first_partial[row] + head * splits) * (a.latent_dim + 2)];
        float top = NEG_INF, total = 0;
        for (int64_t i = 0; i < splits; ++i) {
            const float each = from[i * (a.latent_dim + 2)];
            top = each > top ? each : top;
        }
        std::memset(sums, 0, a.latent_dim * sizeof(float));
        for (int64_t i = 0; i < splits; ++i, from += a.latent_dim + 2) {
            const float factor = exponential(from[0] - top);
            total += from[1] * factor;
            for (int64_t d = 0; d < a.latent_dim; d += LANES) {
                store(sums + d, load(sums + d) + load(from + 2 + d) * factor);
            }
        }
        expand(sums, total, a.starts[row], head);
    }
};

}  // namespace

void latent_attention(Type type, const LatentAttentionArgs& args) {
    if (type == Type::float32) return Latent<float>(args).run(type);
    Latent<BFloat16>(args).run(type);
}

}  // namespace srv::SRV_ISA
