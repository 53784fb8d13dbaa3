// Tiles of a matrix product with a packed weight: one block of outputs by a few rows. Threads share the tiles.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "thread_pool.h"
#include "vector.h"

namespace srv::SRV_ISA {

constexpr int64_t SERIAL_BELOW = 64 * 1024;  // multiplications below which waking other threads does not pay

// Calls tile.operator()<COUNT>(weight, block, row) with COUNT = `count`, the number of rows from `row` on.
template <int COUNT, class Weight, class Tile>
inline void call_tile(int64_t count, const Tile& tile, const Weight* weight, int64_t block, int64_t row) {
    if (count == COUNT) {
        tile.template operator()<COUNT>(weight, block, row);
    } else if constexpr (COUNT > 1) {
        call_tile<COUNT - 1>(count, tile, weight, block, row);
    }
}

// Runs the tiles of [rows, outputs] numbered [begin, end), each at most ROWS rows high, of consecutive rows with the same
// weight. The tiles of a block run one after the other, so that its weight is read from memory once.
// block_weight(block) returns the address of the block's packed weight; it runs before the first tile. The first row is
// `first_row`.
template <int ROWS, class BlockWeight, class Tile>
void run_tiles(Range items, int64_t first_row, int64_t rows, const BlockWeight& block_weight, const Tile& tile) {
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    decltype(block_weight(0)) weight = nullptr;
    for (int64_t item = items.begin; item < items.end; ++item) {
        const int64_t block = item / tiles, tile_in_block = item % tiles;
        if (item == items.begin || tile_in_block == 0) weight = block_weight(block);
        const Range mine = chunk_range(rows, static_cast<int>(tile_in_block), static_cast<int>(tiles));
        call_tile<ROWS>(mine.end - mine.begin, tile, weight, block, first_row + mine.begin);
    }
}

// Runs all tiles of [rows, outputs], which have the same weight.
template <int ROWS, class BlockWeight, class Tile>
void for_tiles(int64_t rows, int64_t inputs, int64_t outputs, const BlockWeight& block_weight, const Tile& tile) {
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    parallel(rows * outputs * inputs < SERIAL_BELOW, [&](int chunk, int chunks) {
        run_tiles<ROWS>(chunk_range(blocks(outputs) * tiles, chunk, chunks), 0, rows, block_weight, tile);
    });
}

// Runs all tiles of [rows, outputs], group by group. The threads share the tiles of all groups, so that they are busy
// even if groups have a row each. run(group, items): runs the tiles [begin, end) of a group, with `run_tiles`.
template <int ROWS, class Run>
void for_groups(const Grouping& grouping, int64_t rows, int64_t inputs, int64_t outputs, const Run& run) {
    const auto tiles_of = [&](const RowGroup& group) { return blocks(outputs) * ((group.rows + ROWS - 1) / ROWS); };
    int64_t tiles = 0;
    for (int64_t g = 0; g < grouping.count; ++g) tiles += tiles_of(grouping.groups[g]);
    parallel(rows * outputs * inputs < SERIAL_BELOW, [&](int chunk, int chunks) {
        const Range mine = chunk_range(tiles, chunk, chunks);
        int64_t begin = 0;
        for (int64_t g = 0; g < grouping.count && begin < mine.end; ++g) {
            const RowGroup& group = grouping.groups[g];
            const int64_t end = begin + tiles_of(group);
            const Range items{mine.begin > begin ? mine.begin - begin : 0, (mine.end < end ? mine.end : end) - begin};
            if (items.begin < items.end) run(group, items);
            begin = end;
        }
    });
}

// The groups of a product without a grouping: one.
struct OneGroup {
    RowGroup group;
    Grouping grouping;

    explicit OneGroup(int64_t rows) : group{0, 0, rows}, grouping{&group, rows == 0 ? 0 : 1, nullptr} {}
    OneGroup(const OneGroup&) = delete;
};

// The row of x that is multiplied as `row`.
inline int64_t x_row_of(const Grouping* grouping, int64_t row) {
    return grouping == nullptr || grouping->x_rows == nullptr ? row : grouping->x_rows[row];
}

// The part of an array of `size` elements per weight; null if there is none.
inline const float* part_of(const float* array, int64_t weight, int64_t size) {
    return array == nullptr ? nullptr : array + weight * size;
}

// Writes `lanes` results from element `at` of a matrix on: as T, or as the float32 sums that they are.
template <class T>
inline void store_results(void* out, int64_t at, const Float32x16& value, int64_t lanes, bool float32_out) {
    const auto write = [&](auto* to) { lanes == LANES ? store(to, value) : store_partial(to, value, lanes); };
    if (std::is_same_v<T, float> || float32_out) {
        write(static_cast<float*>(out) + at);
    } else {
        write(static_cast<T*>(out) + at);
    }
}

// work(row) for every row.
template <class Work>
void for_rows(int64_t rows, int64_t inputs, const Work& work) {
    parallel(rows * inputs < SERIAL_BELOW, [&](int chunk, int chunks) {
        const Range mine = chunk_range(rows, chunk, chunks);
        for (int64_t row = mine.begin; row < mine.end; ++row) work(row);
    });
}

}  // namespace srv::SRV_ISA
