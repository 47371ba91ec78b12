// Products of linear layers in the matrix unit, for rows of bfloat16; see amx.h.

#pragma once

#include "amx.h"
#include "linear_weight.h"

namespace nanocore {

// As `FloatProducts`: panels of up to 32 rows, whose lines are as many as there are rows.
struct MatrixProducts {
    static constexpr int kPanelRows = kMatrixRows;
    static constexpr int64_t kChunkValues = 2 * kChunk;  // of k, that one instruction takes

    const LinearWeight& weight;
    TileUnit unit = {};
    int configured_rows = 0;

    int64_t panel_bytes() const { return kPanelRows * num_chunks() * kTileLine; }

    void pack(const BFloat16* x, int64_t stride, int rows, char* to) const {
        pack_rows<BFloat16, Kind::kBFloat16>(x, stride, rows, weight.in_features, rows,
                                             reinterpret_cast<float*>(to));
    }

    void multiply(const char* packed, int rows, const void* tile, const Prefetch& ahead, float* products) {
        if (rows != configured_rows) configure_products(unit, configured_rows = rows, kTileLine);
        if (rows > kTileRows) multiply_tile<true>(packed, rows, tile, ahead, products);
        else multiply_tile<false>(packed, rows, tile, ahead, products);
    }

   private:
    int64_t num_chunks() const {
        return num_units<BFloat16, Kind::kBFloat16>(weight.in_features) / kChunk;
    }

    template <bool kBoth>
    void multiply_tile(const char* packed, int rows, const void* tile, const Prefetch& ahead,
                       float* products) {
        constexpr int64_t kApart = kTileColumns * 4;  // of pairs of k, and of rows of sums
        const int64_t num_k = weight.padded_in(), count = num_chunks();
        alignas(64) uint32_t chunk[kChunk * kTileColumns];
        clear_sums<kBoth>(unit);
        for (int64_t i = 0; i < count; ++i, packed += rows * kTileLine) {
            ahead.at(i * kChunk, kChunk);
            const char* columns = columns_of(tile, i, num_k - i * kChunkValues, chunk);
            unit.template load<6>(columns, kApart);
            unit.template load<4>(packed, kTileLine);
            unit.template add_products<0, 4, 6>();
            unit.template load<7>(columns + kTileLine, kApart);
            unit.template add_products<1, 4, 7>();
            if constexpr (kBoth) {
                unit.template load<5>(packed + kTileRows * kTileLine, kTileLine);
                unit.template add_products<2, 5, 6>();
                unit.template add_products<3, 5, 7>();
            }
        }
        store_sums<kBoth>(unit, products, kApart);
    }

    // Chunk i of a tile, from which on there are `left` k; in `space` if it is not whole.
    static NANOCORE_INLINE const char* columns_of(const void* tile, int64_t i, int64_t left, uint32_t* space) {
        const void* from = tile_address(tile, i * kChunk, 0);
        if (left >= kChunkValues) return static_cast<const char*>(from);
        std::memset(space, 0, kChunkValues * kTileColumns * 2);
        std::memcpy(space, from, left * kTileColumns * 2);
        return reinterpret_cast<const char*>(space);
    }
};

}  // namespace nanocore
