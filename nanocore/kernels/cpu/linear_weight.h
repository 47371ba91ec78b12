// A linear layer's weight as tiles of columns, which are packed once.
//
// Packed weights are tiles of 32 output features (padded with zeros), each [K][32] of float32,
// [K / 2][32][2] of bfloat16, or groups of integers (groups.h): a tile is one stream of memory.

#pragma once

#include <algorithm>

#include "groups.h"
#include "pool.h"

namespace nanocore {

constexpr int64_t kItemBytes = 384 << 10;      // of weights, at most, that a thread claims at once
constexpr int64_t kItemsPerThread = 8;         // at least, so that threads end together

struct LinearWeight {
    Kind kind;
    const void* packed;
    const float* scale;  // of each output feature; of groups of eight bits only
    int64_t in_features;
    int64_t out_features;
    GroupFormat format;  // of kIntegers and kCodebook
    const float* codebook;  // [16], of kCodebook
    const int32_t* permutation;  // which input each k is; null: its own

    bool has_groups() const { return kind == Kind::kIntegers || kind == Kind::kCodebook; }
    int64_t padded_in() const {
        return kind == Kind::kFloat32 ? in_features : (in_features + 1) / 2 * 2;
    }
    int64_t element_bytes() const {
        return kind == Kind::kFloat32 ? 4 : 2;
    }
    int64_t tile_bytes() const {
        if (has_groups()) return format.tile_bytes(in_features);
        return padded_in() * kTileColumns * element_bytes();
    }
    // Of a tile; each is a moment to fetch some memory ahead.
    int64_t num_steps() const {
        if (has_groups()) return format.num_groups(in_features) * format.group * format.bits / kLanes / 2;
        return std::max<int64_t>(1, padded_in() / 2);
    }
    const char* tile(int64_t index) const {
        return static_cast<const char*>(packed) + index * tile_bytes();
    }
    int64_t num_tiles() const { return (out_features + kTileColumns - 1) / kTileColumns; }
    // How many tiles a thread claims at a time.
    int64_t tiles_of_item(int num_threads) const {
        const int64_t share = num_tiles() / (kItemsPerThread * num_threads);
        return std::max<int64_t>(1, std::min(kItemBytes / tile_bytes(), share));
    }
};

// Scale with which the largest magnitude of some values is 127.
template <typename T>
inline float eight_bit_scale(const T* values, int64_t count) {
    float largest = 0.0f;
    for (int64_t k = 0; k < count; ++k) {
        const float value = std::fabs(to_float(values[k]));
        // No integer stands for such a weight: all that it touches shall show it.
        if (!std::isfinite(value)) return std::numeric_limits<float>::quiet_NaN();
        largest = std::max(largest, value);
    }
    return largest / 127.0f;
}

// body(memory of a tile, all zeros; its first feature; how many it has), for every tile in `to`.
template <typename Body>
inline void loop_tiles(Pool& pool, const LinearWeight& weight, void* to, const Body& body) {
    pool.loop(weight.num_tiles(), [&](int64_t tile, int) {
        char* start = static_cast<char*>(to) + tile * weight.tile_bytes();
        std::memset(start, 0, weight.tile_bytes());
        const int64_t first = tile * kTileColumns;
        body(start, first, std::min<int64_t>(kTileColumns, weight.out_features - first));
    });
}

// Packs rows of T, [out_features, in_features], into `to`.
template <typename T>
inline void pack_rows_of_weight(Pool& pool, const T* from, const LinearWeight& weight, void* to) {
    const int64_t num_k = weight.in_features;
    loop_tiles(pool, weight, to, [&](char* start, int64_t first, int64_t columns) {
        for (int64_t column = 0; column < columns; ++column) {
            const T* row = from + (first + column) * num_k;
            if (weight.kind == Kind::kFloat32) {
                for (int64_t k = 0; k < num_k; ++k)
                    reinterpret_cast<float*>(start)[k * kTileColumns + column] = to_float(row[k]);
            } else {
                for (int64_t k = 0; k < num_k; ++k)
                    from_float(to_float(row[k]),
                               reinterpret_cast<BFloat16*>(start) +
                                   (k / 2 * kTileColumns + column) * 2 + k % 2);
            }
        }
    });
}

// Where the columns of vector `vector` of a tile of floats begin, at a unit of k; see Kind.
NANOCORE_INLINE const void* tile_address(const void* tile, int64_t unit, int vector) {
    return static_cast<const float*>(tile) + unit * kTileColumns + vector * kLanes;
}

}  // namespace nanocore
