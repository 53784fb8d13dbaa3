// Causal attention over a paged KV cache: online softmax over tiles of 64 keys (Milakov and Gimelshein 2018,
// arXiv:1805.02867; FlashAttention, arXiv:2205.14135). attention_tiles.h splits the batch into work items.
//
// With a `KeyPart`, the keys and values of one row are given in parts, and the state of its softmax is carried over.
#include <atomic>
#include <vector>

#include "kv_layout.h"
#include "kernels.h"
#include "attention_tiles.h"
#include "key_part.h"
#include "thread_pool.h"

namespace srv::SRV_ISA {
namespace {

constexpr int BLOCKS = KV_TILE / BLOCK_TOKENS;
constexpr float NEG_INF = -__builtin_inff();

// Register tiles: query rows and accumulators per row of QK^T, rows and output vectors of PV. The number of
// accumulators does not depend on the number of rows, so that a row's result does not either.
#if defined(__AVX512F__)
constexpr int QK_ROWS = 8, QK_CHAINS = 2, PV_ROWS = 4, PV_VECTORS = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int QK_ROWS = 6, QK_CHAINS = 1, PV_ROWS = 5, PV_VECTORS = 1;
#else
constexpr int QK_ROWS = 3, QK_CHAINS = 1, PV_ROWS = 3, PV_VECTORS = 1;
#endif

// Elements between queries in the workspace. A constant, so that the addresses of several rows need no registers of
// their own, and a little more than MAX_HEAD_DIM, so that the rows do not map to the same cache sets.
constexpr int64_t QUERY_STRIDE = MAX_HEAD_DIM + LANES;

// A thread's buffers for one tile. They are reused, because allocating them takes longer than the tile.
template <class P>
struct Workspace {
    std::vector<KVOperand<P>> query, weights;
    std::vector<P> masked;  // unused if the pool is int8
    std::vector<float> scores, out, row_max, row_sum;
    std::vector<float> query_scales, weight_scales;  // for int8 pools

    void fit(int64_t rows, int64_t value_dim) {
        grow(query, rows * QUERY_STRIDE);
        grow(weights, rows * KV_TILE);
        grow(scores, rows * KV_TILE);
        grow(out, rows * value_dim);
        grow(row_max, rows);
        grow(row_sum, rows * LANES);
        if constexpr (QUANTIZED<P>) {
            grow(query_scales, rows);
            grow(weight_scales, rows);
        } else {
            grow(masked, KV_TILE * value_dim);
        }
    }

    template <class V>
    static void grow(V& memory, int64_t size) {
        if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    }
};

// Not inlined: GCC would look up the thread-local address at every use, and spill accumulators for it.
template <class P>
[[gnu::noinline]] Workspace<P>& own_workspace() {
    thread_local Workspace<P> space;
    return space;
}

// The KV blocks of a tile of keys.
template <class P>
struct KVBlocks {
    const P *keys[BLOCKS], *values[BLOCKS];
    int count = 0;
};

// T: type of queries, keys and values. P: type of the pool.
template <class T, class P>
class Attention {
public:
    explicit Attention(const AttentionArgs& args, const KeyPart* part = nullptr)
        : a(args),
          part(part),
          tiles(args, part == nullptr ? ANY_KEYS : part->keys),
          group(args.heads / args.kv_heads),
          value_dim(part == nullptr ? args.dim : part->value_dim),
          out_stride(part == nullptr ? args.heads * args.dim : part->out_stride),
          score_scale(args.scale * args.key_scale) {
        first_split.resize(a.rows + 1);
        for (int64_t row = 0; row < a.rows; ++row) {
            const int64_t splits = tiles.kv_splits(row);
            first_split[row + 1] = first_split[row] + (splits > 1 ? splits * a.heads : 0);
        }
        partial.resize(first_split[a.rows] * (value_dim + 2));
    }

    void run() {
        int64_t tokens = 0, work = 0;
        for (int64_t row = 0; row < a.rows; ++row) {
            tokens += a.query_lens[row];
            work += static_cast<int64_t>(a.query_lens[row]) * a.kv_lens[row];
        }
        const bool serial = work * a.heads * a.dim < 256 * 1024;
        parallel(serial || tokens * a.kv_heads * a.dim < 16 * 1024, [&](int chunk, int chunks) {
            for (int64_t row = 0; row < a.rows; ++row) write(row, chunk, chunks);
        });
        std::atomic<int64_t> next{0};
        const int64_t count = tiles.count(), batch = count < 8 * a.kv_heads ? 1 : a.kv_heads;  // all KV heads of a row
        parallel(serial, [&](int, int) {
            for (int64_t tile; (tile = next.fetch_add(batch, std::memory_order_relaxed)) < count;) {
                for (const int64_t end = min_of(tile + batch, count); tile < end; ++tile) attend(tile);
            }
        });
        for (int64_t row = 0; row < a.rows; ++row) {
            if (tiles.kv_splits(row) > 1) merge(row);
        }
    }

    // The tiles of a head one after the other, so that its keys and values stay in the cache.
    void run_part() {
        const int64_t count = tiles.count(), of_head = count / a.kv_heads;
        std::atomic<int64_t> next{0};
        parallel(count < 2, [&](int, int) {
            for (int64_t at; (at = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
                attend(at % of_head * a.kv_heads + at / of_head);
            }
        });
    }

private:
    const AttentionArgs& a;
    const KeyPart* const part;  // null: the keys of all rows are in the pool
    const AttentionTiles tiles;
    const int64_t group, value_dim, out_stride;
    const float score_scale;            // of products with stored keys
    std::vector<int64_t> first_split;   // per row
    std::vector<float> partial;         // per split and head: largest score, sum of weights, weighted values

    const P* key_block(int64_t row, int64_t kv_head, int64_t position) const {
        return block(a.keys, a.dim, row, kv_head, position);
    }
    const P* value_block(int64_t row, int64_t kv_head, int64_t position) const {
        return block(a.values, value_dim, row, kv_head, position);
    }
    const P* block(const void* pool, int64_t dim, int64_t row, int64_t kv_head, int64_t position) const {
        const int64_t page = a.table[row * a.columns + position / a.page_size];
        const int64_t in_page = position % a.page_size / BLOCK_TOKENS;
        const int64_t number = (page * a.kv_heads + kv_head) * (a.page_size / BLOCK_TOKENS) + in_page;
        return static_cast<const P*>(pool) + number * elements_of_block<P>(dim);
    }

    // Writes a chunk of the new keys and values of a row; chunks consist of whole blocks.
    void write(int64_t row, int chunk, int chunks) const {
        const int64_t prefix = a.kv_lens[row] - a.query_lens[row], first = prefix / BLOCK_TOKENS;
        const Range blocks = chunk_range(ceiling(a.kv_lens[row], BLOCK_TOKENS) - first, chunk, chunks);
        for (int64_t number = first + blocks.begin; number < first + blocks.end; ++number) {
            const int64_t begin = max_of(prefix, number * BLOCK_TOKENS);
            const int64_t end = min_of(a.kv_lens[row], (number + 1) * BLOCK_TOKENS);
            for (int64_t head = 0; head < a.kv_heads; ++head) write_block(row, head, begin, end);
        }
    }

    // Writes tokens [begin, end), all of one block, for one head.
    void write_block(int64_t row, int64_t head, int64_t begin, int64_t end) const {
        P* keys = const_cast<P*>(key_block(row, head, begin));
        P* values = const_cast<P*>(value_block(row, head, begin));
        const int64_t token = a.starts[row] + begin - (a.kv_lens[row] - a.query_lens[row]);
        const T* k = static_cast<const T*>(a.k) + token * a.k_stride + head * a.dim;
        const T* v = static_cast<const T*>(a.v) + token * a.v_stride + head * a.dim;
        P converted[MAX_HEAD_DIM];
        for (int64_t slot = begin % BLOCK_TOKENS; begin < end; ++begin, ++slot, k += a.k_stride, v += a.v_stride) {
            store_key(keys, slot, to_pool_type(converted, scale_of(keys, slot), a.key_scale, k, a.dim), a.dim);
            store_value(values, slot, to_pool_type(converted, scale_of(values, slot), a.value_scale, v, a.dim), a.dim);
        }
    }

    // The address of a token's scale; null unless the pool is int8.
    float* scale_of(P* block, int64_t slot) const {
        if constexpr (QUANTIZED<P>) {
            return scales_of(block, a.dim) + slot;
        } else {
            return nullptr;
        }
    }

    void attend(int64_t number) {
        Workspace<P>& space = own_workspace<P>();
        const AttentionTile tile = tiles.at(number);
        const int64_t rows = (tile.run.end - tile.run.first) * (tile.end_query - tile.first_query) * group;
        space.fit(rows, value_dim);
        std::memset(space.row_sum.data(), 0, rows * LANES * sizeof(float));
        for (int64_t r = 0; r < rows; ++r) {
            const float scale = store_query<P>(&space.query[r * QUERY_STRIDE], query(tile, r), a.dim);
            if constexpr (QUANTIZED<P>) space.query_scales[r] = scale;
            space.row_max[r] = sink(tile, r);
            if (space.row_max[r] > NEG_INF) space.row_sum[r * LANES] = 1;
        }
        std::memset(space.out.data(), 0, rows * value_dim * sizeof(float));
        if (part != nullptr && !part->first) load_state(space, tile, rows);
        int64_t last = 0;
        for (int64_t index = tile.run.first; index < tile.run.end; ++index) {
            last = max_of(last, tiles.end_of(tile, tiles.row_at(index)));
        }
        for (int64_t key = tile.first_key / KV_TILE * KV_TILE; key < last; key += KV_TILE) {
            if (!tile.shares_prefix() || key + KV_TILE <= tile.run.shared) {
                kv_tile(space, tile, {0, rows}, tiles.row_at(tile.run.first), key);
                continue;
            }
            for (int64_t index = tile.run.first; index < tile.run.end; ++index) {
                const int64_t begin = (index - tile.run.first) * group, row = tiles.row_at(index);
                if (key < tiles.end_of(tile, row)) kv_tile(space, tile, {begin, begin + group}, row, key);
            }
        }
        finish(space, tile, rows);
    }

    // Of row r of a tile, between the parts of its keys.
    float* state_of(const AttentionTile& tile, int64_t r) const {
        return part->state + (tile.kv_head * a.query_lens[0] + tiles.query_of(tile, r)) * (value_dim + 2);
    }

    void load_state(Workspace<P>& space, const AttentionTile& tile, int64_t rows) const {
        for (int64_t r = 0; r < rows; ++r) {
            const float* from = state_of(tile, r);
            space.row_max[r] = from[0];
            space.row_sum[r * LANES] = from[1];
            std::memcpy(&space.out[r * value_dim], from + 2, value_dim * sizeof(float));
        }
    }

    // Writes what is accumulated of row r: largest score, sum of weights, weighted values.
    void store_state(const Workspace<P>& space, int64_t r, float* to) const {
        to[0] = space.row_max[r];
        to[1] = reduce_add(load(&space.row_sum[r * LANES]));
        std::memcpy(to + 2, &space.out[r * value_dim], value_dim * sizeof(float));
    }

    // The score of the sink of row r, which counts in the first split alone; -inf where there is none.
    float sink(const AttentionTile& tile, int64_t r) const {
        const bool counts = a.sinks != nullptr && (tile.split == 0 || tiles.kv_splits(tiles.row_of(tile, r)) == 1);
        return counts ? a.sinks[tile.kv_head * group + r % group] : NEG_INF;
    }

    // The block of keys to prefetch while this block of values is read: of the next tile of keys, or of the next head's
    // first tile.
    const P* next_block(const AttentionTile& tile, int64_t row, int64_t at) const {
        const int64_t next = at + KV_TILE, first = tile.first_key / KV_TILE * KV_TILE + at % KV_TILE;
        if (next < tiles.end_of(tile, row)) return key_block(row, tile.kv_head, next);
        const bool more = part == nullptr && tile.kv_head + 1 < a.kv_heads && first < tiles.end_of(tile, row);
        return more ? key_block(row, tile.kv_head + 1, first) : nullptr;
    }

    // Processes rows `range` of a work item with 64 keys from position `key` on, at the addresses in the page table of
    // `row`.
    void kv_tile(Workspace<P>& space, const AttentionTile& tile, Range range, int64_t row, int64_t key) const {
        const int64_t last = tiles.end_of(tile, row);
        const int64_t end = min_of(key + KV_TILE, ceiling(last, BLOCK_TOKENS) * BLOCK_TOKENS);
        KVBlocks<P> blocks;
        for (int64_t at = key; at < end; at += BLOCK_TOKENS, ++blocks.count) {
            blocks.keys[blocks.count] = key_block(row, tile.kv_head, at);
            blocks.values[blocks.count] = value_block(row, tile.kv_head, at);
        }
        score_tile(space, range, blocks);
        update_softmax(space, tile, range, key, blocks);
        accumulate_values(space, tile, range, row, key, blocks);
    }

    const T* query(const AttentionTile& tile, int64_t r) const {
        const int64_t token = a.starts[tiles.row_of(tile, r)] + tiles.query_of(tile, r);
        return static_cast<const T*>(a.q) + token * a.q_stride + (tile.kv_head * group + r % group) * a.dim;
    }

    void score_tile(Workspace<P>& space, Range range, const KVBlocks<P>& blocks) const {
        for (int number = 0; number < blocks.count; ++number) {
            const P *keys = blocks.keys[number], *next = blocks.values[number];
            for (int64_t r = range.begin; r < range.end; next = nullptr) {
                const int64_t left = range.end - r;
                if (left >= QK_ROWS) {
                    score_rows<QK_ROWS>(space, r, keys, number, next), r += QK_ROWS;
                } else if (left >= 3) {
                    score_rows<3>(space, r, keys, number, next), r += 3;
                } else {
                    score_rows<1>(space, r, keys, number, next), r += 1;
                }
            }
        }
    }

    // Scores of COUNT rows from `first` on with block `number` of the tile. Several accumulators per row hide the
    // latency of additions if there are few rows. KV blocks are too far apart for the hardware prefetcher, so this
    // prefetches as much of `next` as it reads of `keys`, and the scales that follow.
    template <int COUNT>
    inline void score_rows(Workspace<P>& space, int64_t first, const P* keys, int number, const P* next) const {
        constexpr int64_t INTERLEAVE = KV_INTERLEAVE<P>;
        const KVOperand<P>* queries = &space.query[first * QUERY_STRIDE];
        KVAccumulator<P> sums[QK_CHAINS][COUNT][1];
#pragma GCC unroll 16
        for (int i = 0; i < QK_CHAINS * COUNT; ++i) sums[i / COUNT][i % COUNT][0] = KVAccumulator<P>{};
        const int64_t dim = a.dim;
        const P* at = keys;
        if constexpr (QUANTIZED<P>) prefetch_of(next, BLOCK_TOKENS * dim, BLOCK_TOKENS * sizeof(float));
        for (int64_t d = 0; d < dim; d += 2 * INTERLEAVE, at += 2 * INTERLEAVE * BLOCK_TOKENS) {
            prefetch_of(next, d * BLOCK_TOKENS, 2 * INTERLEAVE * BLOCK_TOKENS);
            add_kv_products(sums[0], at, queries + d, QUERY_STRIDE);
            add_kv_products(sums[1 % QK_CHAINS], at + INTERLEAVE * BLOCK_TOKENS, queries + d + INTERLEAVE,
                            QUERY_STRIDE);
        }
        float* scores = &space.scores[first * KV_TILE + number * BLOCK_TOKENS];
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; ++r) {
            for (int chain = 1; chain < QK_CHAINS; ++chain) sums[0][r][0] += sums[chain][r][0];
            if constexpr (QUANTIZED<P>) {
                const Float32x16 scored = convert<float>(sums[0][r][0]) * space.query_scales[first + r];
                store(scores + r * KV_TILE, scored * load(scales_of(keys, a.dim)));
            } else {
                store(scores + r * KV_TILE, sums[0][r][0]);
            }
        }
    }

    // Turns the scores of a tile into softmax weights, and rescales earlier sums when a larger score appears. All
    // maxima are computed first, so that one row's exponentials do not wait for another's maximum.
    void update_softmax(Workspace<P>& space, const AttentionTile& tile, Range range, int64_t key,
                        const KVBlocks<P>& blocks) const {
        const int64_t count = blocks.count * BLOCK_TOKENS;
        for (int64_t r = range.begin; r < range.end; ++r) {
            const int64_t row = tiles.row_of(tile, r);
            const int64_t position = a.kv_lens[row] - a.query_lens[row] + tiles.query_of(tile, r);
            const int64_t visible = max_of(tiles.first_visible(position), tile.first_key);
            const auto first = static_cast<int32_t>(max_of(visible - key, 0));
            const auto last = static_cast<int32_t>(min_of(min_of(position + 1, tile.end_key) - key, KV_TILE));
            const Float32x16 maximum = scale_scores(&space.scores[r * KV_TILE], count, first, last, temperature(position));
            const float before = space.row_max[r];
            if (any_greater(maximum, before)) {
                rescale(space, r, before, reduce_max(maximum));
            } else if (before == NEG_INF && any_nan(&space.scores[r * KV_TILE], count)) {
                space.row_max[r] = __builtin_nanf("");  // makes all further weights of this row NaN
            }
        }
        for (int64_t r = range.begin; r < range.end; ++r) {
            const float top = space.row_max[r];
            if (top == NEG_INF) {  // no visible key yet
                std::memset(static_cast<void*>(&space.weights[r * KV_TILE]), 0, count * sizeof(KVOperand<P>));
                if constexpr (QUANTIZED<P>) space.weight_scales[r] = 0;
                continue;
            }
            Float32x16 total = load(&space.row_sum[r * LANES]);
            for (int64_t at = r * KV_TILE; at < r * KV_TILE + count; at += LANES) {
                const T* of_type = nullptr;
                const Float32x16 weight = exponential_for(load(&space.scores[at]) - top, of_type);
                if constexpr (QUANTIZED<P>) {
                    store(&space.scores[at], weight);
                } else {
                    store(&space.weights[at], weight);
                }
                total += weight;
            }
            store(&space.row_sum[r * LANES], total);
            if constexpr (QUANTIZED<P>) scale_weights(space, r, blocks);
        }
    }

    // Multiplies the softmax weights, which replaced the scores, by the scales of the tokens' values, and quantizes
    // them to int16. Hidden tokens have a weight of zero even if their scale is NaN.
    void scale_weights(Workspace<P>& space, int64_t r, const KVBlocks<P>& blocks) const {
        Float32x16 weights[BLOCKS];
        Int32x16 maximum{};
        for (int number = 0; number < blocks.count; ++number) {
            const Float32x16 weight = load(&space.scores[r * KV_TILE + number * BLOCK_TOKENS]);
            const Float32x16 scaled = weight * load(scales_of(blocks.values[number], value_dim));
            weights[number] = select(weight == 0.0f, Float32x16{}, scaled);
            maximum = max_lanes(magnitude_bits(weights[number]), maximum);
        }
        const QuantScale scale(reduce(maximum, max_lanes), MAX_INT16);
        space.weight_scales[r] = scale.value;
        for (int number = 0; number < blocks.count; ++number) {
            store_int16(&space.weights[r * KV_TILE + number * BLOCK_TOKENS], scale.quantize(weights[number]));
        }
    }

    void rescale(Workspace<P>& space, int64_t r, float before, float top) const {
        const float factor = before == NEG_INF ? 0.0f : exponential(before - top);
        float* total = &space.row_sum[r * LANES];
        float* out = &space.out[r * value_dim];
        store(total, load(total) * factor);
        for (int64_t d = 0; d < value_dim; d += LANES) store(out + d, load(out + d) * factor);
        space.row_max[r] = top;
    }

    // By what the scores of a query are multiplied.
    float temperature(int64_t position) const {
        if (a.temperature_from == 0 || position <= a.temperature_from) return 1;
        return __builtin_logf(static_cast<float>(position)) / __builtin_logf(static_cast<float>(a.temperature_from));
    }

    // Scales, soft-caps and masks scores in place; returns the maximum per lane.
    Float32x16 scale_scores(float* scores, int64_t count, int32_t first, int32_t last, float temperature) const {
        const bool plain = first == 0 && last == KV_TILE && a.soft_cap == 0;
        const float scale = a.soft_cap == 0 ? score_scale * temperature : score_scale;
        Float32x16 maximum = broadcast(NEG_INF);
        for (int64_t i = 0; i < count; i += LANES) {
            Float32x16 value = load(scores + i) * scale;
            if (!plain) {
                const Int32x16 at = iota() + static_cast<int32_t>(i);
                value = select((at >= first) & (at < last), apply_soft_cap(value, temperature), broadcast(NEG_INF));
            }
            store(scores + i, value);
            maximum = max_lanes(value, maximum);
        }
        return maximum;
    }

    // For scores that are all -inf or NaN.
    static bool any_nan(const float* scores, int64_t count) {
        Float32x16 all_added{};
        for (int64_t i = 0; i < count; i += LANES) all_added += load(scores + i);
        const float total = reduce_add(all_added);
        return total != total;
    }

    static float max_float(float a, float b) { return a > b ? a : b; }

    // Times the temperature, which is in the scores already where no soft cap is.
    Float32x16 apply_soft_cap(Float32x16 score, float temperature) const {
        if (a.soft_cap == 0) return score;
        const Float32x16 grown = exponential(score * (2.0f / a.soft_cap));
        const float cap = a.soft_cap * temperature;
        return cap - 2.0f * cap / (grown + 1.0f);
    }

    void accumulate_values(Workspace<P>& space, const AttentionTile& tile, Range range, int64_t row, int64_t key,
                    const KVBlocks<P>& blocks) const {
        const int64_t last = tiles.end_of(tile, row);
        const P *values[BLOCKS], *next[BLOCKS];
        for (int number = 0; number < blocks.count; ++number) {
            const int64_t at = key + number * BLOCK_TOKENS;
            values[number] = blocks.values[number];
            next[number] = next_block(tile, row, at);
            if constexpr (!QUANTIZED<P>) {
                if (at >= tile.first_key && at + BLOCK_TOKENS <= last) continue;
                P* copy = &space.masked[number * BLOCK_TOKENS * value_dim];
                values[number] = masked_copy(copy, values[number], tile.first_key - at, last - at);
            }
        }
        for (int64_t r = range.begin; r < range.end;) {
            const int64_t left = range.end - r;
            if (left >= PV_ROWS) {
                add_rows<PV_ROWS>(space, r, values, next, blocks.count), r += PV_ROWS;
            } else if (left >= 3) {
                add_rows<3>(space, r, values, next, blocks.count), r += 3;
            } else {
                add_rows<1>(space, r, values, next, blocks.count), r += 1;
            }
            for (const P*& block : next) block = nullptr;
        }
    }

    // Prefetches [from, from + count) of a block, unless it is null.
    static void prefetch_of(const P* block, int64_t from, int64_t count) {
        if (block != nullptr) prefetch(block + from, count * static_cast<int64_t>(sizeof(P)));
    }

    template <int COUNT>
    inline void add_rows(Workspace<P>& space, int64_t first, const P* const* values, const P* const* next,
                         int count) const {
        int64_t d = 0;
        for (; d + PV_VECTORS * LANES <= value_dim; d += PV_VECTORS * LANES) {
            add_columns<COUNT, PV_VECTORS>(space, first, values, next, count, d);
        }
        for (; d < value_dim; d += LANES) add_columns<COUNT, 1>(space, first, values, next, count, d);
    }

    // Not inlined: otherwise GCC 12 spills the accumulators of bfloat16, and attention takes up to 10 % longer.
    template <int COUNT, int VECTORS>
    [[gnu::noinline]] void add_columns(Workspace<P>& space, int64_t first, const P* const* values,
                                       const P* const* next, int count, int64_t d) const {
        constexpr int64_t INTERLEAVE = KV_INTERLEAVE<P>;
        const KVOperand<P>* weights = &space.weights[first * KV_TILE];
        float* out = &space.out[first * value_dim + d];
        KVAccumulator<P> sums[COUNT][VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                if constexpr (QUANTIZED<P>) {
                    sums[r][v] = Int32x16{};
                } else {
                    sums[r][v] = load(out + r * value_dim + v * LANES);
                }
            }
        }
        for (int number = 0; number < count; ++number) {
            for (int64_t i = 0; i < BLOCK_TOKENS / INTERLEAVE; ++i) {
                const P* of_tokens = values[number] + (i * value_dim + d) * INTERLEAVE;
                prefetch_of(next[number], (i * value_dim + d) * INTERLEAVE, INTERLEAVE * VECTORS * LANES);
                add_kv_products(sums, of_tokens, weights + number * BLOCK_TOKENS + i * INTERLEAVE, KV_TILE);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                float* to_columns = out + r * value_dim + v * LANES;
                if constexpr (QUANTIZED<P>) {
                    store(to_columns, load(to_columns) + convert<float>(sums[r][v]) * space.weight_scales[first + r]);
                } else {
                    store(to_columns, sums[r][v]);
                }
            }
        }
    }

    // A copy with zeros for hidden tokens: their memory need not be finite, and zero times infinity is NaN.
    const P* masked_copy(P* copy, const P* values, int64_t first, int64_t end) const {
        constexpr int64_t INTERLEAVE = KV_INTERLEAVE<P>;
        for (int64_t token = 0; token < BLOCK_TOKENS; token += INTERLEAVE) {
            const int64_t begin = token * value_dim;
            if (token >= first && token + INTERLEAVE <= end) {
                std::memcpy(copy + begin, values + begin, INTERLEAVE * value_dim * sizeof(P));
                continue;
            }
            for (int64_t i = 0; i < value_dim * INTERLEAVE; ++i) {
                const int64_t index = token + i % INTERLEAVE;
                copy[begin + i] = index >= first && index < end ? values[begin + i] : P{};
            }
        }
        return copy;
    }

    void finish(Workspace<P>& space, const AttentionTile& tile, int64_t rows) {
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t row = tiles.row_of(tile, r), splits = tiles.kv_splits(row);
            const int64_t head = tile.kv_head * group + r % group;
            const float* sums = &space.out[r * value_dim];
            if (part != nullptr && !part->last) {
                store_state(space, r, state_of(tile, r));
                continue;
            }
            if (splits > 1) {
                if (tile.split >= splits) continue;  // another row of the run has more splits
                store_state(space, r, &partial[(first_split[row] + head * splits + tile.split) * (value_dim + 2)]);
                continue;
            }
            if (tile.shares_prefix() && tile.split > 0) continue;
            T* out = static_cast<T*>(a.out) + (a.starts[row] + tiles.query_of(tile, r)) * out_stride + head * value_dim;
            const float factor = a.value_scale / reduce_add(load(&space.row_sum[r * LANES]));
            for (int64_t d = 0; d < value_dim; d += LANES) store(out + d, load(sums + d) * factor);
        }
    }

    void merge(int64_t row) const {
        const int64_t splits = tiles.kv_splits(row);
        float sums[MAX_HEAD_DIM];
        for (int64_t head = 0; head < a.heads; ++head) {
            const float* from = &partial[(first_split[row] + head * splits) * (value_dim + 2)];
            float top = NEG_INF, total = 0;
            for (int64_t i = 0; i < splits; ++i) top = max_float(top, from[i * (value_dim + 2)]);
            std::memset(sums, 0, value_dim * sizeof(float));
            for (int64_t i = 0; i < splits; ++i, from += value_dim + 2) {
                const float factor = exponential(from[0] - top);
                total += from[1] * factor;
                for (int64_t d = 0; d < value_dim; d += LANES) {
                    store(sums + d, load(sums + d) + load(from + 2 + d) * factor);
                }
            }
            T* out = static_cast<T*>(a.out) + (static_cast<int64_t>(a.starts[row]) * a.heads + head) * value_dim;
            for (int64_t d = 0; d < value_dim; d += LANES) store(out + d, load(sums + d) * (a.value_scale / total));
        }
    }
};

}  // namespace

int64_t attention_blocks(const AttentionArgs& args) { return AttentionTiles(args, ANY_KEYS).blocks_read(); }

void attention(Type type, const AttentionArgs& args) {
    const bool widest = type == Type::float32;
    switch (args.pool_type) {
        case Type::float32: return Attention<float, float>(args).run();
        case Type::bfloat16: return Attention<BFloat16, BFloat16>(args).run();
        case Type::float16: return widest ? Attention<float, Half>(args).run() : Attention<BFloat16, Half>(args).run();
        case Type::int8: return widest ? Attention<float, int8_t>(args).run() : Attention<BFloat16, int8_t>(args).run();
        case Type::float8_e4m3:
            return widest ? Attention<float, Float8E4M3>(args).run() : Attention<BFloat16, Float8E4M3>(args).run();
        case Type::float8_e5m2:
            return widest ? Attention<float, Float8E5M2>(args).run() : Attention<BFloat16, Float8E5M2>(args).run();
    }
}

void attend_to_part(Type type, const AttentionArgs& args, const KeyPart& part) {
    if (type == Type::float32) return Attention<float, float>(args, &part).run_part();
    Attention<BFloat16, BFloat16>(args, &part).run_part();
}

}  // namespace srv::SRV_ISA
