// Products of float rows with weights of floats.

#pragma once

#include "linear_weight.h"

namespace nanocore {

// R packed rows times one tile: products[R][32].
template <typename T, Kind kind, int R>
__attribute__((noinline)) void multiply_tile(const float* packed_rows, const void* tile, int num_k,
                                             const Prefetch& ahead, float* products) {
    constexpr int C = std::min(kColumns<R>, kTileColumns / kLanes);
    for (int first = 0; first < kTileColumns / kLanes; first += C) {
        F acc[R][C] = {};
        multiply<T, kind, R, C>(
            PackedRows<R>{packed_rows}, [&](int k, int c) { return tile_address(tile, k, first + c); },
            num_k, acc, ahead);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                store(acc[r][c], products + r * kTileColumns + (first + c) * kLanes);
    }
}

// sums[R][32] plus R packed rows times `count` k of a tile, columns[count][32] of float32.
template <int R>
__attribute__((noinline)) void add_block(const float* packed_rows, const float* columns, int count,
                                            float* sums) {
    constexpr int C = std::min(kColumns<R>, kTileColumns / kLanes);
    for (int first = 0; first < kTileColumns; first += C * kLanes) {
        F acc[R][C];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) acc[r][c] = load(sums + r * kTileColumns + first + c * kLanes);
        const float *rows = packed_rows, *from = columns + first;
        for (int left = count; left > 0; left -= kChunk) {
            multiply<float, Kind::kFloat32, R, C>(
                StridedRows<kChunk>{rows},
                [&](int k, int c) -> const void* { return from + k * kTileColumns + c * kLanes; },
                std::min(left, kChunk), acc);
            rows += R * kChunk, from += kChunk * kTileColumns;
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) store(acc[r][c], sums + r * kTileColumns + first + c * kLanes);
    }
}

// Products are how rows of T are packed, so many to a panel at most, and multiplied with a weight's
// tiles: results are [rows][32]. They are copied for each use by a thread.

// Of a weight of floats.
template <typename T, Kind kind>
struct FloatProducts {
    static constexpr int kPanelRows = kMaxRows;
    // k that many rows are multiplied with before the next: of a tile they fill half of a first-level cache.
    static constexpr int kBlock = kPairedRows<T, kind> ? 0 : 128;

    const LinearWeight& weight;

    int64_t panel_bytes() const { return kMaxRows * num_units<T, kind>(weight.in_features) * 4; }

    void pack(const T* x, int64_t stride, int rows, char* to) const {
        with_rows(rows, [&](auto R) {
            if (rows < R) std::memset(to, 0, R * num_units<T, kind>(weight.in_features) * sizeof(float));
            pack_rows<T, kind>(x, stride, rows, weight.in_features, R, reinterpret_cast<float*>(to));
        });
    }

    void multiply(const char* packed, int rows, const void* tile, const Prefetch& ahead, float* products) const {
        with_rows(rows, [&](auto R) {
            multiply_tile<T, kind, R>(reinterpret_cast<const float*>(packed), tile,
                                      static_cast<int>(weight.padded_in()), ahead, products);
        });
    }

    // A block of a tile's columns, float32, and how many k it has; in `space` unless they are so in the tile.
    const float* block_of(const void* tile, int64_t k, int count, float* space) const {
        if constexpr (kind == Kind::kFloat32) return static_cast<const float*>(tile_address(tile, k, 0));
        const auto* pairs = static_cast<const uint32_t*>(tile_address(tile, k / 2, 0));
        for (int i = 0; i < count / 2 * kTileColumns; i += kLanes) {
            const U both = load(pairs + i);
            float* to = space + i / kTileColumns * 2 * kTileColumns + i % kTileColumns;
            store(low_halves(both), to);
            store(high_halves(both), to + kTileColumns);
        }
        return space;
    }

    void add(const char* packed, int rows, int64_t k, const float* columns, int count, float* sums) const {
        with_rows(rows, [&](auto R) {
            add_block<R>(reinterpret_cast<const float*>(packed) + R * k, columns, count, sums);
        });
    }
};

}  // namespace nanocore
