// How attention over a batch is cut into pieces of work.
//
// A piece is some queries of one row and all query heads of one key head, so that a key is read once for its group; a
// row of one query is also cut along its keys, in parts of PART keys, whose results are merged afterwards. Cuts depend on
// the row's own lengths alone: its result does not depend on the batch, nor on the threads.
//
// Rows of one query whose page tables begin alike, wherever they are in the batch, go through these keys together, which
// are then read once for as many as a piece holds (Hydragen, arXiv:2402.05099, splits attention at the same place). Each
// row's sums are taken in the order in which it would take them alone. Rows of windows, or of several queries, share none.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace srv::SRV_ISA {

constexpr int64_t KV_TILE = 64;  // keys that are worked through at once
constexpr int64_t SPLIT_KEYS = 1024;

// Rows of one piece, where a group is no larger: queries times heads of a group. Whole tiles of eight and of six, of groups of 3,
// 6, 12 and 24; of all others 32, so that more share a prefix.
constexpr int64_t max_tile_rows(int64_t group) { return 24 % group == 0 && 32 % group != 0 ? 24 : 32; }

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows at places [first, end) that begin with the same `shared` keys; a row by itself shares none.
struct PrefixRun {
    int64_t first, end, shared;
};

// Queries [first_query, end_query) of each row of a run, against the keys [first_key, end_key) as far as a row has them.
// Only runs of one row have more than one query a row.
struct AttentionTile {
    PrefixRun run;
    int64_t split, kv_head, first_query, end_query, first_key, end_key;

    bool shares_prefix() const { return run.end - run.first > 1; }
};

// The pieces of a call, numbered.
class AttentionTiles {
public:
    explicit AttentionTiles(const AttentionArgs& args) : a(args), group(args.heads / args.kv_heads) {
        for (int64_t row = 0; row < a.rows; ++row) rows.push_back({row, can_share_prefix(row) ? a.table[row * a.columns] : -1});
        std::sort(rows.begin(), rows.end());
        first_tile.push_back(0);
        for (int64_t place = 0, end; place < a.rows; place = end) {
            end = end_of_run(place);
            const int64_t count = ceiling(end - place, queries_of_tile());
            for (int64_t i = 0; i < count; ++i) {  // as large as one another, so that no thread waits long for another's
                const Range mine = part(end - place, static_cast<int>(i), static_cast<int>(count));
                runs.push_back(run_of(place + mine.begin, place + mine.end));
                first_tile.push_back(first_tile.back() + a.kv_heads * tiles_per_head(runs.back()));
            }
        }
    }

    int64_t count() const { return first_tile.back(); }

    AttentionTile at(int64_t number) const {
        int64_t index = 0;
        while (first_tile[index + 1] <= number) ++index;
        const PrefixRun& run = runs[index];
        const int64_t within = number - first_tile[index], cut = within / a.kv_heads, row = row_at(run.first);
        const int64_t prefix = a.kv_lens[row] - a.query_lens[row];
        AttentionTile tile{run, cut, within % a.kv_heads, 0, 1, 0, 0};
        if (a.query_lens[row] == 1) {
            const int64_t seen = first_seen(prefix), part = seen / SPLIT_KEYS + cut;
            tile.first_key = max_of(seen, part * SPLIT_KEYS);
            tile.end_key = (part + 1) * SPLIT_KEYS;
        } else {
            tile.first_query = cut * queries_of_tile();
            tile.end_query = min_of(a.query_lens[row], tile.first_query + queries_of_tile());
            tile.first_key = first_seen(prefix + tile.first_query);
            tile.end_key = prefix + tile.end_query;
        }
        return tile;
    }

    // Parts of the keys of a row of one query; 1 for other rows.
    int64_t kv_splits(int64_t row) const {
        if (a.query_lens[row] != 1) return 1;
        return ceiling(a.kv_lens[row], SPLIT_KEYS) - first_seen(a.kv_lens[row] - 1) / SPLIT_KEYS;
    }

    int64_t first_seen(int64_t position) const {
        return a.window == 0 ? 0 : max_of(0, position + 1 - a.window);
    }

    // The end of what a row has of a piece's keys.
    int64_t end_of(const AttentionTile& tile, int64_t row) const { return min_of(tile.end_key, a.kv_lens[row]); }

    // The batch's row that lies at a place of runs.
    int64_t row_at(int64_t place) const { return rows[place].row; }

    // The batch's row, and the query within it, of row r of a piece; its head is r % group of the group.
    int64_t row_of(const AttentionTile& tile, int64_t r) const {
        return row_at(tile.run.first + (tile.shares_prefix() ? r / group : 0));
    }
    int64_t query_of(const AttentionTile& tile, int64_t r) const {
        return tile.shares_prefix() ? 0 : tile.first_query + r / group;
    }

    // Blocks of BLOCK_TOKENS keys that all pieces read, as often as they read them; and as many of values.
    int64_t blocks_read() const {
        int64_t total = 0;
        for (int64_t number = 0; number < count(); ++number) {
            const AttentionTile tile = at(number);
            const int64_t first = tile.first_key / KV_TILE, end = min_of(tile.run.shared, tile.end_key);
            const int64_t alone = tile.shares_prefix() ? max_of(first, end / KV_TILE) : first;
            total += (alone - first) * (KV_TILE / BLOCK_TOKENS);
            for (int64_t place = tile.run.first; place < tile.run.end; ++place) {
                const int64_t blocks = ceiling(end_of(tile, row_at(place)), BLOCK_TOKENS);
                total += max_of(0, blocks - alone * (KV_TILE / BLOCK_TOKENS));
            }
        }
        return total;
    }

private:
    // A row, and the page that it begins with, where it may go with others.
    struct SortedRow {
        int64_t row;
        int32_t page;

        bool operator<(const SortedRow& other) const { return page != other.page ? page < other.page : row < other.row; }
    };

    const AttentionArgs& a;
    const int64_t group;
    std::vector<SortedRow> rows;  // in the order of places
    std::vector<PrefixRun> runs;
    std::vector<int64_t> first_tile;  // of each run

    int64_t queries_of_tile() const { return max_of(1, max_tile_rows(group) / group); }

    // Pieces of a run and one key head: along the keys where rows have one query, else along the queries.
    int64_t tiles_per_head(const PrefixRun& run) const {
        const int64_t queries = a.query_lens[row_at(run.first)];
        if (queries != 1) return ceiling(queries, queries_of_tile());
        int64_t most = 1;
        for (int64_t place = run.first; place < run.end; ++place) most = max_of(most, kv_splits(row_at(place)));
        return most;
    }

    bool can_share_prefix(int64_t row) const { return a.query_lens[row] == 1 && a.window == 0; }

    // Keys that two rows have in the same pages, in whole blocks, of those before either's newest.
    int64_t shared_keys(int64_t one, int64_t other) const {
        const int64_t most = (min_of(a.kv_lens[one], a.kv_lens[other]) - 1) / a.page_size;
        const int32_t* pages = a.table + one * a.columns;
        const int32_t* others = a.table + other * a.columns;
        int64_t same = 0;
        while (same < most && pages[same] == others[same]) ++same;
        return same * a.page_size;
    }

    // The end of the places from `first` on whose rows begin alike, in a stretch of keys or more.
    int64_t end_of_run(int64_t first) const {
        int64_t end = first + 1, least = 0;
        if (!can_share_prefix(row_at(first))) return end;
        for (; end < a.rows && rows[end].page == rows[first].page; ++end) {
            const int64_t shared = shared_keys(row_at(first), row_at(end));
            if (shared < KV_TILE || shared < least / 2) break;
            least = least == 0 ? shared : min_of(least, shared);
        }
        return end;
    }

    PrefixRun run_of(int64_t first, int64_t end) const {
        PrefixRun run{first, end, 0};
        for (int64_t place = first + 1; place < end; ++place) {
            const int64_t shared = shared_keys(row_at(first), row_at(place));
            run.shared = run.shared == 0 ? shared : min_of(run.shared, shared);
        }
        return run;
    }
};

}  // namespace srv::SRV_ISA
