// Causal attention over packed pages: what a row's queries see is worked through in stretches of 64 keys, with the
// softmax kept up as they come (Milakov and Gimelshein 2018, arXiv:1805.02867; FlashAttention, arXiv:2205.14135).
//
// How the work is cut: pieces.h.
#include <atomic>
#include <vector>

#include "kept.h"
#include "kernels.h"
#include "pieces.h"
#include "pool.h"

namespace srv::SRV_ISA {
namespace {

constexpr int BLOCKS = STRETCH_KEYS / BLOCK_TOKENS;
constexpr float NOTHING = -__builtin_inff();

// Rows whose scores are taken together, and the chains of sums of each; rows to which values are added together, and
// vectors of these: as many as the registers hold. Chains are the same for any number of rows, as a row's result is.
#if defined(__AVX512F__)
constexpr int SCORED = 8, CHAINS = 2, ADDED = 4, COLUMNS = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int SCORED = 6, CHAINS = 1, ADDED = 5, COLUMNS = 1;
#else
constexpr int SCORED = 3, CHAINS = 1, ADDED = 3, COLUMNS = 1;
#endif

// Elements from one query to the next, of any width: addresses of several rows then need no registers of their own. Somewhat
// more than the widest has, so that rows do not fall on the same sets of a cache.
constexpr int64_t QUERY_STRIDE = MOST_DIM + LANES;

// What one thread needs for a piece; kept from call to call, since fresh memory costs more than the work.
template <class P>
struct Workspace {
    std::vector<FactorOf<P>> query, weights;
    std::vector<P> cut;  // over pools of plain numbers alone
    std::vector<float> scores, out, top, total;
    std::vector<float> query_units, weight_units;  // over pools of bytes alone

    void fit(int64_t rows, int64_t dim) {
        grow(query, rows * QUERY_STRIDE);
        grow(weights, rows * STRETCH_KEYS);
        grow(scores, rows * STRETCH_KEYS);
        grow(out, rows * dim);
        grow(top, rows);
        grow(total, rows * LANES);
        if constexpr (SCALED<P>) {
            grow(query_units, rows);
            grow(weight_units, rows);
        } else {
            grow(cut, STRETCH_KEYS * dim);
        }
    }

    template <class V>
    static void grow(V& memory, int64_t size) {
        if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    }
};

// This thread's. Not inlined: GCC would ask for the thread's memory again wherever it is used, with sums in registers.
template <class P>
[[gnu::noinline]] Workspace<P>& own_workspace() {
    thread_local Workspace<P> space;
    return space;
}

// Where the keys and values of one stretch lie.
template <class P>
struct Blocks {
    const P *keys[BLOCKS], *values[BLOCKS];
    int count = 0;
};

// Of queries, keys and values of type T, over a pool of type P.
template <class T, class P>
class Attention {
public:
    explicit Attention(const AttentionArgs& args) : a(args), pieces(args), group(args.heads / args.kv_heads) {
        first_part.resize(a.rows + 1);
        for (int64_t row = 0; row < a.rows; ++row) {
            const int64_t found = pieces.parts(row);
            first_part[row + 1] = first_part[row] + (found > 1 ? found * a.heads : 0);
        }
        partial.resize(first_part[a.rows] * (a.dim + 2));
    }

    void run() {
        int64_t tokens = 0, work = 0;
        for (int64_t row = 0; row < a.rows; ++row) {
            tokens += a.query_lens[row];
            work += static_cast<int64_t>(a.query_lens[row]) * a.kv_lens[row];
        }
        const bool alone = work * a.heads * a.dim < 256 * 1024;
        parallel(alone || tokens * a.kv_heads * a.dim < 16 * 1024, [&](int share, int shares) {
            for (int64_t row = 0; row < a.rows; ++row) write(row, share, shares);
        });
        std::atomic<int64_t> next{0};
        const int64_t count = pieces.count(), taken = count < 8 * a.kv_heads ? 1 : a.kv_heads;  // all heads of a row
        parallel(alone, [&](int, int) {
            for (int64_t piece; (piece = next.fetch_add(taken, std::memory_order_relaxed)) < count;) {
                for (const int64_t end = at_most(piece + taken, count); piece < end; ++piece) attend(piece);
            }
        });
        for (int64_t row = 0; row < a.rows; ++row) {
            if (pieces.parts(row) > 1) merge(row);
        }
    }

private:
    const AttentionArgs& a;
    const Pieces pieces;
    const int64_t group;
    std::vector<int64_t> first_part;  // of each row
    std::vector<float> partial;       // of each part and head: its largest score, its sum, its weighted values

    const P* block(const void* pool, int64_t row, int64_t kv_head, int64_t position) const {
        const int64_t page = a.table[row * a.columns + position / a.page_size];
        const int64_t in_page = position % a.page_size / BLOCK_TOKENS;
        const int64_t number = (page * a.kv_heads + kv_head) * (a.page_size / BLOCK_TOKENS) + in_page;
        return static_cast<const P*>(pool) + number * elements_of_block<P>(a.dim);
    }

    // One share of the new keys and values of a row, cut between blocks.
    void write(int64_t row, int share, int shares) const {
        const int64_t prefix = a.kv_lens[row] - a.query_lens[row], first = prefix / BLOCK_TOKENS;
        const Range blocks = part(ceiling(a.kv_lens[row], BLOCK_TOKENS) - first, share, shares);
        for (int64_t number = first + blocks.begin; number < first + blocks.end; ++number) {
            const int64_t begin = at_least(prefix, number * BLOCK_TOKENS);
            const int64_t end = at_most(a.kv_lens[row], (number + 1) * BLOCK_TOKENS);
            for (int64_t head = 0; head < a.kv_heads; ++head) write_block(row, head, begin, end);
        }
    }

    // Tokens [begin, end), of one block, of one head.
    void write_block(int64_t row, int64_t head, int64_t begin, int64_t end) const {
        P* keys = const_cast<P*>(block(a.keys, row, head, begin));
        P* values = const_cast<P*>(block(a.values, row, head, begin));
        const int64_t token = a.starts[row] + begin - (a.kv_lens[row] - a.query_lens[row]);
        const T* k = static_cast<const T*>(a.k) + token * a.k_stride + head * a.dim;
        const T* v = static_cast<const T*>(a.v) + token * a.v_stride + head * a.dim;
        P kept[MOST_DIM];
        for (int64_t place = begin % BLOCK_TOKENS; begin < end; ++begin, ++place, k += a.k_stride, v += a.v_stride) {
            put_key(keys, place, converted(kept, scale_of(keys, place), k, a.dim), a.dim);
            put_value(values, place, converted(kept, scale_of(values, place), v, a.dim), a.dim);
        }
    }

    // Where a token's scale is written; null where numbers have none.
    float* scale_of(P* block, int64_t place) const {
        if constexpr (SCALED<P>) {
            return scales_of(block, a.dim) + place;
        } else {
            return nullptr;
        }
    }

    void attend(int64_t number) {
        Workspace<P>& space = own_workspace<P>();
        const Piece piece = pieces.at(number);
        const int64_t rows = (piece.run.end - piece.run.first) * (piece.end_query - piece.first_query) * group;
        space.fit(rows, a.dim);
        for (int64_t r = 0; r < rows; ++r) {
            const float unit = keep_query<P>(&space.query[r * QUERY_STRIDE], query(piece, r), a.dim);
            if constexpr (SCALED<P>) space.query_units[r] = unit;
            space.top[r] = NOTHING;
        }
        std::memset(space.total.data(), 0, rows * LANES * sizeof(float));
        std::memset(space.out.data(), 0, rows * a.dim * sizeof(float));
        int64_t last = 0;
        for (int64_t place = piece.run.first; place < piece.run.end; ++place) {
            last = at_least(last, pieces.end_of(piece, pieces.row_at(place)));
        }
        for (int64_t key = piece.first_key / STRETCH_KEYS * STRETCH_KEYS; key < last; key += STRETCH_KEYS) {
            if (!piece.together() || key + STRETCH_KEYS <= piece.run.shared) {
                stretch(space, piece, {0, rows}, pieces.row_at(piece.run.first), key);
                continue;
            }
            for (int64_t place = piece.run.first; place < piece.run.end; ++place) {
                const int64_t begin = (place - piece.run.first) * group, row = pieces.row_at(place);
                if (key < pieces.end_of(piece, row)) stretch(space, piece, {begin, begin + group}, row, key);
            }
        }
        finish(space, piece, rows);
    }

    // What is read after this block of values: a block of keys, of the next stretch, or else of the next head's first.
    const P* after(const Piece& piece, int64_t row, int64_t at) const {
        const int64_t next = at + STRETCH_KEYS, first = piece.first_key / STRETCH_KEYS * STRETCH_KEYS + at % STRETCH_KEYS;
        if (next < pieces.end_of(piece, row)) return block(a.keys, row, piece.kv_head, next);
        const bool more = piece.kv_head + 1 < a.kv_heads && first < pieces.end_of(piece, row);
        return more ? block(a.keys, row, piece.kv_head + 1, first) : nullptr;
    }

    // The rows [of.begin, of.end) of a piece against 64 keys, which lie where `row` has them.
    void stretch(Workspace<P>& space, const Piece& piece, Range of, int64_t row, int64_t key) const {
        const int64_t last = pieces.end_of(piece, row);
        const int64_t end = at_most(key + STRETCH_KEYS, ceiling(last, BLOCK_TOKENS) * BLOCK_TOKENS);
        Blocks<P> blocks;
        for (int64_t at = key; at < end; at += BLOCK_TOKENS, ++blocks.count) {
            blocks.keys[blocks.count] = block(a.keys, row, piece.kv_head, at);
            blocks.values[blocks.count] = block(a.values, row, piece.kv_head, at);
        }
        score(space, of, blocks);
        weigh(space, piece, of, key, blocks);
        add_values(space, piece, of, row, key, blocks);
    }

    const T* query(const Piece& piece, int64_t r) const {
        const int64_t token = a.starts[pieces.row_of(piece, r)] + pieces.query_of(piece, r);
        return static_cast<const T*>(a.q) + token * a.q_stride + (piece.kv_head * group + r % group) * a.dim;
    }

    void score(Workspace<P>& space, Range of, const Blocks<P>& blocks) const {
        for (int number = 0; number < blocks.count; ++number) {
            const P *keys = blocks.keys[number], *next = blocks.values[number];
            for (int64_t r = of.begin; r < of.end; next = nullptr) {
                const int64_t left = of.end - r;
                if (left >= SCORED) {
                    score_rows<SCORED>(space, r, keys, number, next), r += SCORED;
                } else if (left >= 3) {
                    score_rows<3>(space, r, keys, number, next), r += 3;
                } else {
                    score_rows<1>(space, r, keys, number, next), r += 1;
                }
            }
        }
    }

    // COUNT rows from `first` on, against the keys of a stretch's block of this number. More chains than one, so that few
    // rows do not wait for their own additions. Blocks of a pool lie too far apart for the processor to guess where it
    // will read next: it is asked for as much of `next` as is read of `keys`, and for the scales behind it.
    template <int COUNT>
    inline void score_rows(Workspace<P>& space, int64_t first, const P* keys, int number, const P* next) const {
        constexpr int64_t TOGETHER = TOGETHER_IN<P>;
        const FactorOf<P>* queries = &space.query[first * QUERY_STRIDE];
        SumsOf<P> sums[CHAINS][COUNT][1];
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS * COUNT; ++i) sums[i / COUNT][i % COUNT][0] = SumsOf<P>{};
        const int64_t dim = a.dim;
        const P* at = keys;
        if constexpr (SCALED<P>) prefetch_of(next, BLOCK_TOKENS * dim, BLOCK_TOKENS * sizeof(float));
        for (int64_t d = 0; d < dim; d += 2 * TOGETHER, at += 2 * TOGETHER * BLOCK_TOKENS) {
            prefetch_of(next, d * BLOCK_TOKENS, 2 * TOGETHER * BLOCK_TOKENS);
            add_kept(sums[0], at, queries + d, QUERY_STRIDE);
            add_kept(sums[1 % CHAINS], at + TOGETHER * BLOCK_TOKENS, queries + d + TOGETHER, QUERY_STRIDE);
        }
        float* scores = &space.scores[first * STRETCH_KEYS + number * BLOCK_TOKENS];
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; ++r) {
            for (int chain = 1; chain < CHAINS; ++chain) sums[0][r][0] += sums[chain][r][0];
            if constexpr (SCALED<P>) {
                const Floats scored = to<float>(sums[0][r][0]) * space.query_units[first + r];
                store(scores + r * STRETCH_KEYS, scored * load(scales_of(keys, a.dim)));
            } else {
                store(scores + r * STRETCH_KEYS, sums[0][r][0]);
            }
        }
    }

    // Scores of a stretch to weights, rescaling what was summed before when a larger score appears: first for all rows,
    // then their weights, so that one row's exponentials do not wait for another's largest score.
    void weigh(Workspace<P>& space, const Piece& piece, Range of, int64_t key, const Blocks<P>& blocks) const {
        const int64_t count = blocks.count * BLOCK_TOKENS;
        for (int64_t r = of.begin; r < of.end; ++r) {
            const int64_t row = pieces.row_of(piece, r);
            const int64_t position = a.kv_lens[row] - a.query_lens[row] + pieces.query_of(piece, r);
            const int64_t seen = at_least(pieces.first_seen(position), piece.first_key);
            const auto first = static_cast<int32_t>(at_least(seen - key, 0));
            const auto last = static_cast<int32_t>(at_most(at_most(position + 1, piece.end_key) - key, STRETCH_KEYS));
            const Floats most = scaled(&space.scores[r * STRETCH_KEYS], count, first, last);
            const float before = space.top[r];
            if (any_larger(most, before)) {
                rescale(space, r, before, largest(most));
            } else if (before == NOTHING && any_nan(&space.scores[r * STRETCH_KEYS], count)) {
                space.top[r] = __builtin_nanf("");  // as every weight of this row is from now on
            }
        }
        for (int64_t r = of.begin; r < of.end; ++r) {
            const float top = space.top[r];
            if (top == NOTHING) {  // nothing seen yet
                std::memset(static_cast<void*>(&space.weights[r * STRETCH_KEYS]), 0, count * sizeof(FactorOf<P>));
                if constexpr (SCALED<P>) space.weight_units[r] = 0;
                continue;
            }
            Floats total = load(&space.total[r * LANES]);
            for (int64_t at = r * STRETCH_KEYS; at < r * STRETCH_KEYS + count; at += LANES) {
                const Floats weight = exponential_for(load(&space.scores[at]) - top, static_cast<const T*>(nullptr));
                if constexpr (SCALED<P>) {
                    store(&space.scores[at], weight);
                } else {
                    store(&space.weights[at], weight);
                }
                total += weight;
            }
            store(&space.total[r * LANES], total);
            if constexpr (SCALED<P>) scale_weights(space, r, blocks);
        }
    }

    // Weights, which lie where scores did, times the scales of their tokens' values, as values of bytes are multiplied by
    // them. What is not seen has a weight of zero, whatever its scale.
    void scale_weights(Workspace<P>& space, int64_t r, const Blocks<P>& blocks) const {
        Floats weights[BLOCKS];
        Ints most{};
        for (int number = 0; number < blocks.count; ++number) {
            const Floats weight = load(&space.scores[r * STRETCH_KEYS + number * BLOCK_TOKENS]);
            const Floats scaled = weight * load(scales_of(blocks.values[number], a.dim));
            weights[number] = choose(weight == 0.0f, Floats{}, scaled);
            most = larger(magnitudes(weights[number]), most);
        }
        const Unit unit(folded(most, larger), MOST_UNITS);
        space.weight_units[r] = unit.worth;
        for (int number = 0; number < blocks.count; ++number) {
            store_words(&space.weights[r * STRETCH_KEYS + number * BLOCK_TOKENS], unit.count(weights[number]));
        }
    }

    void rescale(Workspace<P>& space, int64_t r, float before, float top) const {
        const float factor = before == NOTHING ? 0.0f : exponential(before - top);
        float* total = &space.total[r * LANES];
        float* out = &space.out[r * a.dim];
        store(total, load(total) * factor);
        for (int64_t d = 0; d < a.dim; d += LANES) store(out + d, load(out + d) * factor);
        space.top[r] = top;
    }

    // Scores times the scale, in place, and nothing where a query does not see; returns the largest of each lane.
    Floats scaled(float* scores, int64_t count, int32_t first, int32_t last) const {
        const bool plain = first == 0 && last == STRETCH_KEYS && a.soft_cap == 0;
        Floats most = all(NOTHING);
        for (int64_t i = 0; i < count; i += LANES) {
            Floats value = load(scores + i) * a.scale;
            if (!plain) {
                const Ints at = counting() + static_cast<int32_t>(i);
                value = choose((at >= first) & (at < last), capped(value), all(NOTHING));
            }
            store(scores + i, value);
            most = larger(value, most);
        }
        return most;
    }

    // Among scores that are -inf or NaN.
    static bool any_nan(const float* scores, int64_t count) {
        Floats all_added{};
        for (int64_t i = 0; i < count; i += LANES) all_added += load(scores + i);
        const float total = sum(all_added);
        return total != total;
    }

    static float larger_of(float a, float b) { return a > b ? a : b; }

    Floats capped(Floats score) const {
        if (a.soft_cap == 0) return score;
        const Floats grown = exponential(score * (2.0f / a.soft_cap));
        return a.soft_cap - 2.0f * a.soft_cap / (grown + 1.0f);
    }

    void add_values(Workspace<P>& space, const Piece& piece, Range of, int64_t row, int64_t key,
                    const Blocks<P>& blocks) const {
        const int64_t last = pieces.end_of(piece, row);
        const P *values[BLOCKS], *next[BLOCKS];
        for (int number = 0; number < blocks.count; ++number) {
            const int64_t at = key + number * BLOCK_TOKENS;
            values[number] = blocks.values[number];
            next[number] = after(piece, row, at);
            if constexpr (!SCALED<P>) {
                if (at >= piece.first_key && at + BLOCK_TOKENS <= last) continue;
                P* copy = &space.cut[number * BLOCK_TOKENS * a.dim];
                values[number] = only_seen(copy, values[number], piece.first_key - at, last - at);
            }
        }
        for (int64_t r = of.begin; r < of.end;) {
            const int64_t left = of.end - r;
            if (left >= ADDED) {
                add_rows<ADDED>(space, r, values, next, blocks.count), r += ADDED;
            } else if (left >= 3) {
                add_rows<3>(space, r, values, next, blocks.count), r += 3;
            } else {
                add_rows<1>(space, r, values, next, blocks.count), r += 1;
            }
            for (const P*& asked : next) asked = nullptr;
        }
    }

    // Starts to read [from, from + count) of a block, if there is one.
    static void prefetch_of(const P* block, int64_t from, int64_t count) {
        if (block != nullptr) prefetch(block + from, count * static_cast<int64_t>(sizeof(P)));
    }

    template <int COUNT>
    inline void add_rows(Workspace<P>& space, int64_t first, const P* const* values, const P* const* next,
                         int count) const {
        int64_t d = 0;
        for (; d + COLUMNS * LANES <= a.dim; d += COLUMNS * LANES) {
            add_columns<COUNT, COLUMNS>(space, first, values, next, count, d);
        }
        for (; d < a.dim; d += LANES) add_columns<COUNT, 1>(space, first, values, next, count, d);
    }

    // Not inlined: among the rest of a stretch GCC 12 keeps sums of bfloat16 in memory, and attention takes up to a tenth
    // longer.
    template <int COUNT, int VECTORS>
    [[gnu::noinline]] void add_columns(Workspace<P>& space, int64_t first, const P* const* values,
                                       const P* const* next, int count, int64_t d) const {
        constexpr int64_t TOGETHER = TOGETHER_IN<P>;
        const FactorOf<P>* weights = &space.weights[first * STRETCH_KEYS];
        float* out = &space.out[first * a.dim + d];
        SumsOf<P> sums[COUNT][VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                if constexpr (SCALED<P>) {
                    sums[r][v] = Ints{};
                } else {
                    sums[r][v] = load(out + r * a.dim + v * LANES);
                }
            }
        }
        for (int number = 0; number < count; ++number) {
            for (int64_t i = 0; i < BLOCK_TOKENS / TOGETHER; ++i) {
                const P* of_tokens = values[number] + (i * a.dim + d) * TOGETHER;
                prefetch_of(next[number], (i * a.dim + d) * TOGETHER, TOGETHER * VECTORS * LANES);
                add_kept(sums, of_tokens, weights + number * BLOCK_TOKENS + i * TOGETHER, STRETCH_KEYS);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                float* to_columns = out + r * a.dim + v * LANES;
                if constexpr (SCALED<P>) {
                    store(to_columns, load(to_columns) + to<float>(sums[r][v]) * space.weight_units[first + r]);
                } else {
                    store(to_columns, sums[r][v]);
                }
            }
        }
    }

    // A copy with zeros for tokens that the piece does not see: what lies there need not be finite, and
    // zero times infinity is not zero.
    const P* only_seen(P* copy, const P* values, int64_t first, int64_t end) const {
        constexpr int64_t TOGETHER = TOGETHER_IN<P>;
        for (int64_t token = 0; token < BLOCK_TOKENS; token += TOGETHER) {
            const int64_t begin = token * a.dim;
            if (token >= first && token + TOGETHER <= end) {
                std::memcpy(copy + begin, values + begin, TOGETHER * a.dim * sizeof(P));
                continue;
            }
            for (int64_t i = 0; i < a.dim * TOGETHER; ++i) {
                const int64_t place = token + i % TOGETHER;
                copy[begin + i] = place >= first && place < end ? values[begin + i] : P{};
            }
        }
        return copy;
    }

    void finish(Workspace<P>& space, const Piece& piece, int64_t rows) {
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t row = pieces.row_of(piece, r), found = pieces.parts(row);
            const int64_t head = piece.kv_head * group + r % group;
            const float* sums = &space.out[r * a.dim];
            if (found > 1) {
                if (piece.part >= found) continue;  // another row of the run is longer
                float* to = &partial[(first_part[row] + head * found + piece.part) * (a.dim + 2)];
                to[0] = space.top[r];
                to[1] = sum(load(&space.total[r * LANES]));
                std::memcpy(to + 2, sums, a.dim * sizeof(float));
                continue;
            }
            if (piece.together() && piece.part > 0) continue;
            T* out = static_cast<T*>(a.out) + ((a.starts[row] + pieces.query_of(piece, r)) * a.heads + head) * a.dim;
            const float factor = 1.0f / sum(load(&space.total[r * LANES]));
            for (int64_t d = 0; d < a.dim; d += LANES) store(out + d, load(sums + d) * factor);
        }
    }

    void merge(int64_t row) const {
        const int64_t found = pieces.parts(row);
        float sums[MOST_DIM];
        for (int64_t head = 0; head < a.heads; ++head) {
            const float* from = &partial[(first_part[row] + head * found) * (a.dim + 2)];
            float top = NOTHING, total = 0;
            for (int64_t i = 0; i < found; ++i) top = larger_of(top, from[i * (a.dim + 2)]);
            std::memset(sums, 0, a.dim * sizeof(float));
            for (int64_t i = 0; i < found; ++i, from += a.dim + 2) {
                const float factor = exponential(from[0] - top);
                total += from[1] * factor;
                for (int64_t d = 0; d < a.dim; d += LANES) store(sums + d, load(sums + d) + load(from + 2 + d) * factor);
            }
            T* out = static_cast<T*>(a.out) + (static_cast<int64_t>(a.starts[row]) * a.heads + head) * a.dim;
            for (int64_t d = 0; d < a.dim; d += LANES) store(out + d, load(sums + d) * (1.0f / total));
        }
    }
};

}  // namespace

int64_t attention_blocks(const AttentionArgs& args) { return Pieces(args).blocks_read(); }

void attention(Type type, const AttentionArgs& args) {
    const bool widest = type == Type::float32;
    switch (args.pool) {
        case Type::float32: return Attention<float, float>(args).run();
        case Type::bfloat16: return Attention<BFloat16, BFloat16>(args).run();
        case Type::float16: return widest ? Attention<float, Half>(args).run() : Attention<BFloat16, Half>(args).run();
        case Type::int8: return widest ? Attention<float, int8_t>(args).run() : Attention<BFloat16, int8_t>(args).run();
    }
}

}  // namespace srv::SRV_ISA
