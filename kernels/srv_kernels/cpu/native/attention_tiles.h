// Splits the attention of a batch into work items (tiles).
//
// A tile has some queries of one row and all query heads of one KV head, so that a key is read once per group (GQA).
// Rows with one query are also split along their keys, `split_keys` at a time, and merged afterwards (split-KV, as in
// Flash-Decoding). Splits depend on the lengths of the row alone: its result depends neither on the batch nor on the
// threads. Rows with several queries are not split, so that the last bits of a token's result may depend on how many
// tokens of its row a step has, unless `split_keys` exceeds every length.
//
// Rows with one query whose page tables start with the same pages share a tile for this prefix, wherever they are in
// the batch, so that its keys are read once for all of them (Hydragen, arXiv:2402.05099, separates the prefix
// likewise). Each row accumulates in the same order as it would alone. Rows with a window, chunks or several queries do
// not share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace srv::SRV_ISA {

constexpr int64_t KV_TILE = 64;  // keys per step of the online softmax
constexpr int64_t ANY_KEYS = INT64_MAX;

// Rows (queries times heads of a group) of a tile, unless a group alone has more. 24 for groups of 3, 6, 12 and 24, a
// multiple of the register tiles of 8 and of 6 rows; otherwise 32, so that more rows share a prefix.
constexpr int64_t max_tile_rows(int64_t group) { return 24 % group == 0 && 32 % group != 0 ? 24 : 32; }

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows [first, end), in sorted order, that have their first `shared` keys in common; `shared` is 0 for a single row.
struct PrefixRun {
    int64_t first, end, shared;
};

// Queries [first_query, end_query) of each row of a run with the keys [first_key, end_key), as far as the row has them.
// Only runs of a single row have more than one query per row.
struct AttentionTile {
    PrefixRun run;
    int64_t split, kv_head, first_query, end_query, first_key, end_key;

    bool shares_prefix() const { return run.end - run.first > 1; }
};

// The numbered tiles of a call.
class AttentionTiles {
public:
    // most_keys: that the tiles of rows with several queries end at.
    AttentionTiles(const AttentionArgs& args, int64_t most_keys)
        : a(args), group(args.heads / args.kv_heads), most_keys(most_keys) {
        for (int64_t row = 0; row < a.rows; ++row) {
            rows.push_back({row, can_share_prefix(row) ? a.table[row * a.columns] : -1});
        }
        std::sort(rows.begin(), rows.end());
        first_tile.push_back(0);
        for (int64_t index = 0, end; index < a.rows; index = end) {
            end = end_of_run(index);
            const int64_t count = ceiling(end - index, queries_of_tile());
            for (int64_t i = 0; i < count; ++i) {  // of equal size, to balance the threads
                const Range mine = chunk_range(end - index, static_cast<int>(i), static_cast<int>(count));
                runs.push_back(run_of(index + mine.begin, index + mine.end));
                first_tile.push_back(first_tile.back() + a.kv_heads * tiles_per_head(runs.back()));
            }
        }
    }

    int64_t count() const { return first_tile.back(); }

    AttentionTile at(int64_t number) const {
        int64_t index = 0;
        while (first_tile[index + 1] <= number) ++index;
        const PrefixRun& run = runs[index];
        const int64_t in_run = number - first_tile[index], split = in_run / a.kv_heads, row = row_at(run.first);
        const int64_t prefix = a.kv_lens[row] - a.query_lens[row];
        AttentionTile tile{run, split, in_run % a.kv_heads, 0, 1, 0, 0};
        if (a.query_lens[row] == 1) {
            const int64_t visible = first_visible(prefix), key_split = visible / a.split_keys + split;
            tile.first_key = max_of(visible, key_split * a.split_keys);
            tile.end_key = (key_split + 1) * a.split_keys;
        } else {
            tile.first_query = split * queries_of_tile();
            tile.end_query = min_of(a.query_lens[row], tile.first_query + queries_of_tile());
            tile.first_key = first_visible(prefix + tile.first_query);
            tile.end_key = min_of(prefix + tile.end_query, most_keys);
        }
        return tile;
    }

    // Splits along the keys of a row with one query; 1 for other rows.
    int64_t kv_splits(int64_t row) const {
        if (a.query_lens[row] != 1) return 1;
        return ceiling(a.kv_lens[row], a.split_keys) - first_visible(a.kv_lens[row] - 1) / a.split_keys;
    }

    int64_t first_visible(int64_t position) const {
        const int64_t of_chunk = a.chunk == 0 ? 0 : position / a.chunk * a.chunk;
        return a.window == 0 ? of_chunk : max_of(of_chunk, position + 1 - a.window);
    }

    // The end of a tile's keys within a row.
    int64_t end_of(const AttentionTile& tile, int64_t row) const { return min_of(tile.end_key, a.kv_lens[row]); }

    // The batch's row at an index of the sorted order.
    int64_t row_at(int64_t index) const { return rows[index].row; }

    // The batch's row, and the query within it, of row r of a tile; the head within the group is r % group.
    int64_t row_of(const AttentionTile& tile, int64_t r) const {
        return row_at(tile.run.first + (tile.shares_prefix() ? r / group : 0));
    }
    int64_t query_of(const AttentionTile& tile, int64_t r) const {
        return tile.shares_prefix() ? 0 : tile.first_query + r / group;
    }

    // Key blocks that all tiles read, repeated reads included; as many value blocks are read.
    int64_t blocks_read() const {
        int64_t total = 0;
        for (int64_t number = 0; number < count(); ++number) {
            const AttentionTile tile = at(number);
            const int64_t first = tile.first_key / KV_TILE, end = min_of(tile.run.shared, tile.end_key);
            const int64_t first_unshared = tile.shares_prefix() ? max_of(first, end / KV_TILE) : first;
            total += (first_unshared - first) * (KV_TILE / BLOCK_TOKENS);
            for (int64_t index = tile.run.first; index < tile.run.end; ++index) {
                const int64_t blocks = ceiling(end_of(tile, row_at(index)), BLOCK_TOKENS);
                total += max_of(0, blocks - first_unshared * (KV_TILE / BLOCK_TOKENS));
            }
        }
        return total;
    }

private:
    // A row and, if it may share a prefix, its first page.
    struct SortedRow {
        int64_t row;
        int32_t page;

        bool operator<(const SortedRow& other) const {
            return page != other.page ? page < other.page : row < other.row;
        }
    };

    const AttentionArgs& a;
    const int64_t group, most_keys;
    std::vector<SortedRow> rows;  // sorted by first page
    std::vector<PrefixRun> runs;
    std::vector<int64_t> first_tile;  // per run

    int64_t queries_of_tile() const { return max_of(1, max_tile_rows(group) / group); }

    // Tiles of a run per KV head: along the keys for rows with one query, otherwise along the queries.
    int64_t tiles_per_head(const PrefixRun& run) const {
        const int64_t queries = a.query_lens[row_at(run.first)];
        if (queries != 1) return ceiling(queries, queries_of_tile());
        int64_t limit = 1;
        for (int64_t index = run.first; index < run.end; ++index) limit = max_of(limit, kv_splits(row_at(index)));
        return limit;
    }

    bool can_share_prefix(int64_t row) const { return a.query_lens[row] == 1 && a.window == 0 && a.chunk == 0; }

    // Keys in the pages that two rows have in common; their last pages, which may be written to, do not count.
    int64_t shared_keys(int64_t one, int64_t other) const {
        const int64_t limit = (min_of(a.kv_lens[one], a.kv_lens[other]) - 1) / a.page_size;
        const int32_t* pages = a.table + one * a.columns;
        const int32_t* others = a.table + other * a.columns;
        int64_t same = 0;
        while (same < limit && pages[same] == others[same]) ++same;
        return same * a.page_size;
    }

    // The end of the sorted rows from `first` on that share a prefix of at least KV_TILE keys.
    int64_t end_of_run(int64_t first) const {
        int64_t end = first + 1, shortest = 0;
        if (!can_share_prefix(row_at(first))) return end;
        for (; end < a.rows && rows[end].page == rows[first].page; ++end) {
            const int64_t shared = shared_keys(row_at(first), row_at(end));
            if (shared < KV_TILE || shared < shortest / 2) break;
            shortest = shortest == 0 ? shared : min_of(shortest, shared);
        }
        return end;
    }

    PrefixRun run_of(int64_t first, int64_t end) const {
        PrefixRun run{first, end, 0};
        for (int64_t index = first + 1; index < end; ++index) {
            const int64_t shared = shared_keys(row_at(first), row_at(index));
            run.shared = run.shared == 0 ? shared : min_of(run.shared, shared);
        }
        return run;
    }
};

}  // namespace srv::SRV_ISA
