// Grouped integer weights on their way into tiles, and out of them for an embedding.
//
// What a checkpoint holds is given row by row, [out_features][...]; see IntegerFormat for the tiles.

#pragma once

#include "linear.h"

namespace nanocore {

// values: uint8 [O][K]. scales: [O][G] as the format has them. minima: uint8 [O][G]. super_scales,
// super_minima: float16 [O][super-blocks]. What the format has not may be null.
struct GroupedRows {
    const uint8_t* values;
    const void* scales;
    const uint8_t* minima;
    const uint16_t* super_scales;
    const uint16_t* super_minima;
};

// Where the parts of a tile's group are.
struct TileGroup {
    char *header, *scales, *minima, *values;

    TileGroup(const IntegerFormat& format, char* tile, int64_t group) {
        const int64_t per = format.groups_of_header();
        header = tile + group / per * (format.header_bytes() + per * format.group_bytes());
        scales = header + format.header_bytes() + group % per * format.group_bytes();
        minima = scales + format.scale_bytes();
        values = minima + format.minima_bytes();
    }
};

// Of one column: the place of the four or eight k from k on.
NANOCORE_INLINE char* values_at(const IntegerFormat& format, char* values, int64_t k, int64_t column) {
    return values + k * kTileColumns * format.bits / 8 + column * 4;
}

// One feature's values of one group; k from `count` on are zero points, whose weight is nothing.
inline void pack_values(const IntegerFormat& format, const uint8_t* from, int64_t count, int64_t column, char* to) {
    uint8_t whole[128];
    if (count < format.group) {
        std::memset(whole, format.zero(), sizeof whole);
        std::memcpy(whole, from, count);
        from = whole;
    }
    const int64_t step = format.bits == 4 ? 8 : 4;
    for (int64_t k = 0; k < format.group; k += step) {
        uint32_t first, second = 0;
        std::memcpy(&first, from + k, 4);
        if (format.bits == 4) std::memcpy(&second, from + k + 4, 4);
        first |= second << 4;
        std::memcpy(values_at(format, to, k, column), &first, 4);
    }
}

inline void pack_groups(Pool& pool, const GroupedRows& rows, const LinearWeight& weight, void* to) {
    const IntegerFormat& format = weight.format;
    const int64_t num_k = weight.in_features, num_groups = format.num_groups(num_k);
    const int64_t scale_bytes = format.scale_bytes() / kTileColumns;
    const int64_t per = format.groups_of_header(), num_headers = (num_groups + per - 1) / per;
    pool.loop(weight.num_tiles(), [&](int64_t tile, int) {
        char* start = static_cast<char*>(to) + tile * weight.tile_bytes();
        std::memset(start, 0, weight.tile_bytes());  // features past the last have the scale 0
        const int64_t columns = std::min<int64_t>(kTileColumns, weight.out_features - tile * kTileColumns);
        for (int64_t column = 0; column < columns; ++column) {
            const int64_t feature = tile * kTileColumns + column;
            for (int64_t group = 0; group < num_groups; ++group) {
                const TileGroup at(format, start, group);
                const int64_t index = feature * num_groups + group, k = group * format.group;
                if (scale_bytes)
                    std::memcpy(at.scales + column * scale_bytes,
                                static_cast<const char*>(rows.scales) + index * scale_bytes, scale_bytes);
                if (format.minima != Minima::kNone)
                    std::memcpy(at.minima + column, rows.minima + index, 1);
                if (format.scales == Scales::kTwoLevel && group % per == 0) {
                    const int64_t header = feature * num_headers + group / per;
                    auto* supers = reinterpret_cast<uint16_t*>(at.header) + column;
                    supers[0] = rows.super_scales[header];
                    if (format.minima == Minima::kTwoLevel) supers[kTileColumns] = rows.super_minima[header];
                }
                pack_values(format, rows.values + feature * num_k + k, std::min(format.group, num_k - k),
                            column, at.values);
            }
        }
    });
}

}  // namespace nanocore
