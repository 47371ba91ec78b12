// Linear layers: y = x W^T + b, with weights packed once for every number of rows.
//
// With few rows a layer takes as long as reading its weight (linear_weight.h). With many a block of
// them is kept in the second-level cache while tiles pass by. Of a gated layer the features of both
// halves are multiplied together, and only their product is stored.

#pragma once

#include <algorithm>

#include "gate.h"
#include "codebook.h"
#include "float_products.h"
#include "matrix_groups.h"
#include "matrix_products.h"
#include "workspace.h"

namespace nanocore {

constexpr int64_t kRowBlockBytes = 512 << 10;  // of packed rows; half of a second-level cache
constexpr int64_t kSharedRows = 192;           // that share a block of k
constexpr int64_t kPrefetchBytes = 8 << 10;    // how far ahead in a stream of weights
constexpr int64_t kInlineBytes = 64 << 10;     // of rows packed sooner than threads are told

// What is fetched while a tile is multiplied with one of some panels: with one panel, what is some
// way ahead, of the next tile when this one ends; with more, a share of the next tile.
inline Prefetch prefetch_beside(const LinearWeight& weight, const char* tile, const char* next,
                                int64_t panel, int64_t num_panels) {
    const int64_t bytes = weight.tile_bytes(), num_steps = weight.num_steps();
    if (num_panels == 1) {
        const int64_t step = bytes / num_steps, ahead = std::min(kPrefetchBytes, bytes) / step;
        return {tile + ahead * step, step, num_steps - ahead, next};
    }
    const int64_t share = bytes / num_panels;
    return {next + panel * share, share / num_steps};
}

// Where threads find the weight of the next linear layer of a program.
struct NextItems {
    const char* first = nullptr;
    int64_t item_bytes = 0;
};

// Products of some rows with one tile of `columns` features, scaled, with the bias, as results.
template <typename T, typename Out>
__attribute__((noinline)) void finish_tile(const float* products, int rows, const float* scale,
                                           const T* bias, int columns, Out* out,
                                           int64_t out_stride) {
    for (int first = 0; first < columns; first += kLanes) {
        const int count = std::min(columns - first, kLanes);
        const F factor = scale ? load(scale + first) : broadcast(1.0f);
        const F added = bias ? load_some(bias + first, count) : F{};
        for (int r = 0; r < rows; ++r) {
            F y = load(products + r * kTileColumns + first);
            if (scale) y *= factor;
            if (bias) y += added;
            Out* to = out + r * out_stride + first;
            if (count == kLanes) store(y, to);
            else store_some(y, to, count);
        }
    }
}

// Scales and biases of a tile's columns, or null.
template <typename T>
struct TileEnd {
    const float* scale;
    const T* bias;
};

// The same of two tiles, of which the first gates the second.
template <typename T>
__attribute__((noinline)) void finish_gated(const float* gates, const float* values, int rows,
                                            const TileEnd<T>& of_gates, const TileEnd<T>& of_values,
                                            int columns, Gate gate, T* out, int64_t out_stride) {
    for (int first = 0; first < columns; first += kLanes) {
        const int count = std::min(columns - first, kLanes);
        const auto finished = [&](const float* from, int r, const TileEnd<T>& of) {
            F y = load(from + r * kTileColumns + first);
            if (of.scale) y *= load(of.scale + first);
            if (of.bias) y += load_some(of.bias + first, count);
            return rounded(y, out);
        };
        for (int r = 0; r < rows; ++r) {
            T* to = out + r * out_stride + first;
            const F y = gated(gate, finished(gates, r, of_gates), finished(values, r, of_values), to);
            if (count == kLanes) store(y, to);
            else store_some(y, to, count);
        }
    }
}

// body(Products), by what the weight's tiles hold and how rows of T are multiplied with them.
template <typename T, typename Body>
inline void with_products(const LinearWeight& weight, const Body& body) {
    const auto with_groups = [&](auto groups) {
        body(GroupedProducts<T, decltype(groups)>{weight, groups});
    };
    if constexpr (kMayHaveAmx && sizeof(T) == 2)
        if (!weight.has_groups() && has_amx()) return body(MatrixProducts{weight});
    switch (weight.kind) {
        case Kind::kIntegers:
            return with_integers(weight.format.bits, [&](auto bits, auto vnni) {
                if constexpr (kMayHaveAmx)
                    if (has_amx()) return body(MatrixGroups<T, bits.value, vnni.value>{{weight, {}}});
                with_groups(IntegerGroups<bits.value, vnni.value>{});
            });
        case Kind::kCodebook:
            return weight.format.bits == 4
                       ? with_groups(CodebookGroups<T, 4>{Codebook(weight.codebook)})
                       : with_groups(CodebookGroups<T, 8>{Codebook(weight.codebook)});
        // Others are kept in the type of activations.
        default: body(FloatProducts<T, sizeof(T) == 2 ? Kind::kBFloat16 : Kind::kFloat32>{weight});
    }
}

// Whether many rows take a block of k after the other.
template <typename Products>
constexpr bool in_blocks = false;
template <typename T, Kind kind>
constexpr bool in_blocks<FloatProducts<T, kind>> = FloatProducts<T, kind>::kBlock > 0;

// With a gate the weight's first half gates the second, both of whole tiles, and out has half as
// many columns.
template <typename T, typename Out>
struct LinearCall {
    LinearWeight weight;
    const T* bias;
    Gate gate;
    const T* x;
    int64_t x_stride;
    Out* out;
    int64_t out_stride;
    int64_t group;  // tiles that a thread claims at once
    const NextItems* after;
    int64_t rows;

    void run(Workspace& workspace) const {
        with_products<T>(weight, [&](const auto& products) { run_as(products, workspace); });
    }

   private:
    int num_parts() const { return gate == Gate::kNone ? 1 : 2; }
    // From a tile to the one that it gates; without a gate, how many tiles there are.
    int64_t part_tiles() const { return weight.num_tiles() / num_parts(); }

    template <typename Products>
    void run_as(const Products& products, Workspace& workspace) const {
        if (rows == 0) return;
        constexpr int64_t kPanelRows = Products::kPanelRows;
        const int64_t panel_bytes = products.panel_bytes();
        const int64_t num_panels = (rows + kPanelRows - 1) / kPanelRows;
        char* packed = reinterpret_cast<char*>(workspace.rows.of(num_panels * panel_bytes));
        const auto pack = [&](int64_t panel, int) {
            products.pack(x + panel * kPanelRows * x_stride, x_stride, panel_rows<Products>(panel),
                          packed + panel * panel_bytes);
        };
        if (num_panels * panel_bytes <= kInlineBytes)
            for (int64_t panel = 0; panel < num_panels; ++panel) pack(panel, 0);
        else workspace.pool.loop(num_panels, pack);

        int64_t block = std::max<int64_t>(1, kRowBlockBytes / panel_bytes);
        if constexpr (in_blocks<Products>) block = kSharedRows / kPanelRows;
        const int64_t num_blocks = (num_panels + block - 1) / block;
        const int64_t num_tiles = part_tiles(), num_groups = (num_tiles + group - 1) / group;
        workspace.pool.loop(num_blocks * num_groups, [&](int64_t item, int) {
            Products own = products;
            const int64_t index = item % num_groups, first = item / num_groups * num_panels / num_blocks;
            const int64_t last = (item / num_groups + 1) * num_panels / num_blocks;
            const int64_t tiles = index * group, stop = std::min(tiles + group, num_tiles);
            for (int64_t tile = tiles; tile < stop; ++tile) {
                // After the item, the other threads are expected to take one each first.
                const int64_t next =
                    tile + 1 < stop ? tile + 1 : (index + workspace.pool.num_threads()) * group;
                times_tile(own, packed, first, last, tile, next);
            }
        });
    }

    template <typename Products>
    int panel_rows(int64_t panel) const {
        return static_cast<int>(std::min<int64_t>(Products::kPanelRows, rows - panel * Products::kPanelRows));
    }

    // Past the last item it is in the next layer's weight, so that its first tiles are there soon.
    const char* tile_or_after(int64_t tile, int part) const {
        if (tile < part_tiles()) return weight.tile(part * part_tiles() + tile);
        return after->first + (tile - part_tiles()) / group * after->item_bytes;
    }

    Prefetch prefetch(int64_t tile, int64_t next, int part, int64_t panel, int64_t num_panels) const {
        return prefetch_beside(weight, tile_or_after(tile, part), tile_or_after(next, part), panel,
                               num_panels);
    }

    template <typename Products>
    void times_tile(Products& with, const char* packed, int64_t first, int64_t last, int64_t tile,
                    int64_t next) const {
        const void* columns[2];
        for (int part = 0; part < num_parts(); ++part) columns[part] = tile_or_after(tile, part);
        constexpr int kPanelRows = Products::kPanelRows;
        const int64_t column = tile * kTileColumns, panel_bytes = with.panel_bytes();
        if constexpr (in_blocks<Products>)
            if (last - first > 1) return times_blocks(with, packed, first, last, columns, column);
        alignas(64) float products[2][kPanelRows * kTileColumns];
        for (int64_t panel = first; panel < last; ++panel) {
            const int count = panel_rows<Products>(panel);
            for (int part = 0; part < num_parts(); ++part)
                with.multiply(packed + panel * panel_bytes, count, columns[part],
                              prefetch(tile, next, part, panel - first, last - first), products[part]);
            finish(products[0], products[1], count, column, out + panel * kPanelRows * out_stride + column);
        }
    }

    // The same, a block of k after the other.
    template <typename Products>
    void times_blocks(const Products& with, const char* packed, int64_t first, int64_t last,
                      const void* const* columns, int64_t column) const {
        constexpr int kPanelRows = Products::kPanelRows, kSums = kPanelRows * kTileColumns;
        alignas(64) float block[Products::kBlock * kTileColumns];
        alignas(64) float sums[2][kSharedRows * kTileColumns];
        for (int part = 0; part < num_parts(); ++part) {
            std::memset(sums[part], 0, (last - first) * kSums * sizeof(float));
            for (int64_t k = 0; k < weight.padded_in(); k += Products::kBlock) {
                const int count = std::min<int64_t>(Products::kBlock, weight.padded_in() - k);
                const float* some = with.block_of(columns[part], k, count, block);
                for (int64_t panel = first; panel < last; ++panel)
                    with.add(packed + panel * with.panel_bytes(), panel_rows<Products>(panel), k, some, count,
                             sums[part] + (panel - first) * kSums);
            }
        }
        for (int64_t panel = first; panel < last; ++panel)
            finish(sums[0] + (panel - first) * kSums, sums[1] + (panel - first) * kSums,
                   panel_rows<Products>(panel), column, out + panel * kPanelRows * out_stride + column);
    }

    void finish(const float* products, const float* values, int count, int64_t column, Out* to) const {
        const float* scale = weight.scale ? weight.scale + column : nullptr;
        const T* added = bias ? bias + column : nullptr;
        const int64_t width = std::min<int64_t>(kTileColumns, weight.out_features - column);
        if constexpr (std::is_same_v<T, Out>)
            if (gate != Gate::kNone) {
                const int64_t half = weight.out_features / 2;
                const TileEnd<T> of_values{scale ? scale + half : nullptr, bias ? added + half : nullptr};
                return finish_gated(products, values, count, {scale, added}, of_values,
                                    kTileColumns, gate, to, out_stride);
            }
        finish_tile(products, count, scale, added, static_cast<int>(width), to, out_stride);
    }
};

}  // namespace nanocore
