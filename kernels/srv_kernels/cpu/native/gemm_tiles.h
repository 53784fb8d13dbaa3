// Tiles of a matrix product with a packed weight: one block of outputs by a few rows. Threads share the tiles.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "thread_pool.h"

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

// Runs all tiles of [rows, outputs], each at most ROWS rows high. The tiles of a block run one after the other, so that
// its weight is read from memory once. block_weight(block) returns the address of the block's packed weight; it runs on
// the same thread before the first tile.
template <int ROWS, class BlockWeight, class Tile>
void for_tiles(int64_t rows, int64_t inputs, int64_t outputs, const BlockWeight& block_weight, const Tile& tile) {
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    parallel(rows * outputs * inputs < SERIAL_BELOW, [&](int chunk, int chunks) {
        const Range mine = chunk_range(blocks(outputs) * tiles, chunk, chunks);
        decltype(block_weight(0)) weight = nullptr;
        for (int64_t item = mine.begin; item < mine.end; ++item) {
            const int64_t block = item / tiles, tile_in_block = item % tiles;
            if (item == mine.begin || tile_in_block == 0) weight = block_weight(block);
            const Range row_range = chunk_range(rows, static_cast<int>(tile_in_block), static_cast<int>(tiles));
            call_tile<ROWS>(row_range.end - row_range.begin, tile, weight, block, row_range.begin);
        }
    });
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
