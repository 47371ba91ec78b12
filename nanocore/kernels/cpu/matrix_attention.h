// The two products of attention in the matrix unit, for a panel of rows of bfloat16; see amx.h.
//
// Of a unit of 16 keys a product with Q takes 32 dimensions at a time; one with V takes its 8 pairs of
// keys, as they lie in the cache: there are tiles for operands of both kinds.

#pragma once

#include "amx.h"
#include "attention_panel.h"

namespace nanocore {

// One thread's, for heads of whole chunks of 32 dimensions.
class MatrixAttention {
   public:
    static bool takes(int64_t head_dim) { return head_dim % kDims == 0 && head_dim <= kMostDims; }

    // Sums are in tiles 0 to 3, rows and columns of 32 k in 4 and 5, of 16 k in 6 and 7.
    // rows: up to 16, or 32.
    void configure(int rows) {
        if (rows == rows_) return;
        const int line = kTileLine, half = line / 2, some = std::min(rows, kTileRows);
        unit_.configure({{some, line}, {some, line}, {some, line}, {some, line},
                         {some, line}, {kChunk, line}, {some, half}, {kChunk / 2, line}});
        rows_ = rows;
    }

    // scores[r][i] = q_r . k_i, of whole units of keys; those past num_keys mean nothing.
    template <int R>
    void score(const float* queries, int64_t head_dim, const KeyTile& tile, int num_keys,
               const UnitsAhead& ahead, float* scores) {
        const int num_units = (num_keys + kBlockUnit - 1) / kBlockUnit;
        for (int u = 0; u < num_units; u += 2) {
            // Beyond the last key there is no block: the last unit is repeated.
            const char *first = tile.keys[u], *second = tile.keys[std::min(u + 1, num_units - 1)];
            clear_sums<(R > kTileRows)>(unit_);
            for (int64_t dim = 0; dim < head_dim; dim += kDims) {
                fetch(ahead, u, dim, tile.key_scale != nullptr);
                fetch(ahead, u + 1, dim, tile.key_scale != nullptr);
                const float* rows = queries + dim / kDims * (R * kChunk);
                const int64_t offset = dim / 2 * tile.key_stride;
                unit_.load<4>(rows, kTileLine);
                unit_.load<5>(first + offset, tile.key_stride);
                unit_.add_products<0, 4, 5>();
                unit_.load<5>(second + offset, tile.key_stride);
                unit_.add_products<1, 4, 5>();
                if constexpr (R > kTileRows) {
                    unit_.load<4>(rows + kTileRows * kChunk, kTileLine);
                    unit_.add_products<3, 4, 5>();
                    unit_.load<5>(first + offset, tile.key_stride);
                    unit_.add_products<2, 4, 5>();
                }
            }
            float* to = scores + u * kBlockUnit;
            store_sums<(R > kTileRows)>(unit_, to, kKeys * 4);
            if (tile.key_scale) scale_columns<R>(tile.key_scale + u * kBlockUnit, to);
        }
    }

    // results[r] = factor[r] * results[r] + weights of r times the values, [rows][head_dim].
    template <int R>
    void add_values(const float* weights, const float* factor, int64_t head_dim, const KeyTile& tile,
                    int num_keys, float* results) {
        for (int r = 0; r < R; ++r)
            if (factor[r] != 1.0f)
                for (int64_t d = 0; d < head_dim; d += kLanes)
                    store(load(results + r * head_dim + d) * factor[r], results + r * head_dim + d);
        const char* units[kUnits];
        const int num_units = (num_keys + kBlockUnit - 1) / kBlockUnit;
        std::copy(tile.values, tile.values + num_units, units);
        const int64_t pair_bytes = head_dim * 4;
        alignas(64) char last[kBlockUnit / 2 * kMostDims * 4];
        if (num_keys % kBlockUnit) {
            // What lies beyond the last key might be infinite, and is multiplied by 0.
            const int64_t there = (num_keys % kBlockUnit + 1) / 2 * pair_bytes;
            std::memcpy(last, units[num_units - 1], there);
            std::memset(last + there, 0, kBlockUnit / 2 * pair_bytes - there);
            units[num_units - 1] = last;
        }
        for (int64_t dim = 0; dim < head_dim; dim += kDims) {
            load_sums<(R > kTileRows)>(unit_, results + dim, head_dim * 4);
            for (int u = 0; u < num_units; ++u) {
                const char* columns = units[u] + dim * 4;
                const float* rows = weights + u / 2 * (R * kChunk) + u % 2 * (kChunk / 2);
                unit_.load<6>(rows, kTileLine);
                unit_.load<7>(columns, pair_bytes);
                unit_.add_products<0, 6, 7>();
                unit_.load<7>(columns + kTileLine, pair_bytes);
                unit_.add_products<1, 6, 7>();
                if constexpr (R > kTileRows) {
                    unit_.load<6>(rows + kTileRows * kChunk, kTileLine);
                    unit_.add_products<3, 6, 7>();
                    unit_.load<7>(columns, pair_bytes);
                    unit_.add_products<2, 6, 7>();
                }
            }
            store_sums<(R > kTileRows)>(unit_, results + dim, head_dim * 4);
        }
    }

   private:
    static constexpr int kDims = 2 * kChunk;  // that a product takes at a time, or two of sums
    static constexpr int64_t kMostDims = 512;

    // A chunk's share of a unit: 16 pairs of dimensions, or as many numbers of int8.
    static NANOCORE_INLINE void fetch(const UnitsAhead& ahead, int unit, int64_t dim, bool is_int8) {
        if (unit >= ahead.count) return;
        const int64_t bytes = kDims * kBlockUnit * (is_int8 ? 1 : 2);
        const char* from = ahead.units[unit] + dim / kDims * bytes;
        for (int64_t i = 0; i < bytes; i += 64) prefetch_line(from + i);
    }

    template <int R>
    static void scale_columns(const float* scale, float* scores) {
        for (int c = 0; c < 2 * kBlockUnit; c += kLanes)
            for (int r = 0; r < R; ++r)
                store(load(scores + r * kKeys + c) * load(scale + c), scores + r * kKeys + c);
    }

    TileUnit unit_;
    int rows_ = 0;
};

}  // namespace nanocore
