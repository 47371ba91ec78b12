// Weights on their way into tiles, and out of them for an embedding: grouped integers above all.
//
// What a checkpoint holds is given row by row, [out_features][...]; see GroupFormat for the tiles.

#pragma once

#include "linear_weight.h"

namespace nanocore {

// values: uint8 [O][K]. scales: [O][G] as the format has them. minima: uint8 [O][G]. super_scales,
// super_minima: float16 [O][super-blocks]. What the format has not may be null.
struct GroupedRows {
    const uint8_t* values;
    const void* scales;
    const void* minima;
    const uint16_t* super_scales;
    const uint16_t* super_minima;
};

// Where the parts of a tile's group are.
struct TileGroup {
    char *header, *scales, *minima, *values;

    TileGroup(const GroupFormat& format, char* tile, int64_t group) {
        const int64_t per = format.groups_of_header();
        header = tile + group / per * (format.header_bytes() + per * format.group_bytes());
        scales = header + format.header_bytes() + group % per * format.group_bytes();
        minima = scales + format.scale_bytes();
        values = minima + format.minima_bytes();
    }
};

// Of one column: the place of the four or eight k from k on.
NANOCORE_INLINE char* values_at(const GroupFormat& format, char* values, int64_t k, int64_t column) {
    return values + k * kTileColumns * format.bits / 8 + column * 4;
}

// One feature's values of one group; k from `count` on are zero points, whose weight is nothing.
inline void pack_values(const GroupFormat& format, const uint8_t* from, int64_t count, int64_t column, char* to) {
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
    const GroupFormat& format = weight.format;
    const int64_t num_k = weight.in_features, num_groups = format.num_groups(num_k);
    const int64_t scale_bytes = format.scale_bytes() / kTileColumns;
    const int64_t minima_bytes = format.minima_bytes() / kTileColumns;
    const int64_t per = format.groups_of_header(), num_headers = (num_groups + per - 1) / per;
    loop_tiles(pool, weight, to, [&](char* start, int64_t first, int64_t columns) {
        for (int64_t column = 0; column < columns; ++column) {  // those past the last have the scale 0
            const int64_t feature = first + column;
            for (int64_t group = 0; group < num_groups; ++group) {
                const TileGroup at(format, start, group);
                const int64_t index = feature * num_groups + group, k = group * format.group;
                if (scale_bytes)
                    std::memcpy(at.scales + column * scale_bytes,
                                static_cast<const char*>(rows.scales) + index * scale_bytes, scale_bytes);
                if (minima_bytes)
                    std::memcpy(at.minima + column * minima_bytes,
                                static_cast<const char*>(rows.minima) + index * minima_bytes, minima_bytes);
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

// The nearest float16, of ties the even one.
inline uint16_t float_to_float16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7e00u;   // NaN
    if (bits >= 0x477ff000u) return sign | 0x7c00u;  // what rounds to 65536 or more
    if (bits < 0x38800000u) {
        // Subnormal: adding 0.5 leaves multiples of 2^-24 in the lowest bits.
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, sizeof bits);
        return sign | static_cast<uint16_t>(bits - 0x3f000000u);
    }
    return sign | static_cast<uint16_t>((bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

// Groups of four bits of kLanes columns, x[k][column]: float16 scales and values q with x ~ scale (q - 8).
//
// Sixteen scales are tried, by which the largest magnitude becomes -5.6 to -8.6; that of the least
// squared error is kept, as a float16, and values are rounded with it. (Bettered by least squares they
// err less, and the demo model's answers are more often wrong.) Each column's numbers are added up in the
// order of k, so that all machines find the same.
inline void quantize_columns(const float* x, int64_t group, uint16_t* scales, uint8_t* values) {
    F extreme = {};
    I is_finite = ~I{};
    const auto at = [&](int64_t k) { return load(x + k * kTileColumns); };
    const auto magnitude = [](F value) { return value < 0.0f ? -value : value; };
    for (int64_t k = 0; k < group; ++k) {
        is_finite &= magnitude(at(k)) <= std::numeric_limits<float>::max();
        extreme = magnitude(at(k)) > magnitude(extreme) ? at(k) : extreme;
    }
    // The fourth bit of the range is for numbers of the sign of the largest.
    const auto number = [](F scaled) {
        scaled = scaled < -8.0f ? broadcast(-8.0f) : scaled;
        scaled = scaled > 7.0f ? broadcast(7.0f) : scaled;
        return (scaled + 12582912.0f) - 12582912.0f;  // to the nearest integer
    };
    F most = {}, scale = {};
    for (int candidate = 0; candidate < 16; ++candidate) {
        const F end = broadcast(-0.2f * static_cast<float>(28 + candidate)), inverse = end / extreme;
        F products = {}, squares = {};
        for (int64_t k = 0; k < group; ++k) {
            const F q = number(at(k) * inverse);
            products += at(k) * q;
            squares += q * q;
        }
        const F tried = extreme / end;
        const F gain = tried * (products + products - tried * squares);  // how much is not an error
        const I is_better = (gain > most) & is_finite;
        most = is_better ? gain : most;
        scale = is_better ? tried : scale;
    }
    scale = is_finite ? scale : broadcast(std::numeric_limits<float>::quiet_NaN());
    F inverse;
    for (int lane = 0; lane < kLanes; ++lane) {
        scales[lane] = float_to_float16(scale[lane]);
        const float kept = float16_to_float(scales[lane]);
        inverse[lane] = kept == 0.0f || kept != kept ? 0.0f : 1.0f / kept;
    }
    for (int64_t k = 0; k < group; ++k) {
        const F product = at(k) * inverse;
        const F q = number(product == product ? product : F{}) + 8.0f;
        for (int lane = 0; lane < kLanes; ++lane)
            values[lane * kMaxGroup + k] = static_cast<uint8_t>(q[lane]);
    }
}

// Packs rows of T, [out_features][in_features], as symmetric groups of four bits with float16 scales.
template <typename T>
inline void pack_four_bits(Pool& pool, const T* from, const LinearWeight& weight, void* to) {
    const GroupFormat& format = weight.format;
    const int64_t num_k = weight.in_features, group = format.group;
    loop_tiles(pool, weight, to, [&](char* start, int64_t first, int64_t columns) {
        for (int64_t index = 0; index < format.num_groups(num_k); ++index) {
            const int64_t k = index * group, count = std::min(group, num_k - k);
            alignas(64) float x[kMaxGroup * kTileColumns];
            if (columns < kTileColumns || count < group) std::memset(x, 0, sizeof x);
            for (int64_t column = 0; column < columns; ++column)
                for (int64_t i = 0; i < count; ++i)
                    x[i * kTileColumns + column] = to_float(from[(first + column) * num_k + k + i]);
            const TileGroup at(format, start, index);
            for (int64_t column = 0; column < kTileColumns; column += kLanes) {
                uint8_t values[kLanes * kMaxGroup];
                quantize_columns(x + column, group, reinterpret_cast<uint16_t*>(at.scales) + column, values);
                for (int64_t lane = 0; lane < kLanes; ++lane)
                    pack_values(format, values + lane * kMaxGroup, group, column + lane, at.values);
            }
        }
    });
}

// The same as eight bits with a scale for each output feature: the largest magnitude becomes 127.
// scale: [num_tiles * 32].
template <typename T>
inline void pack_eight_bits(Pool& pool, const T* from, const LinearWeight& weight, void* to, float* scale) {
    const GroupFormat& format = weight.format;
    const int64_t num_k = weight.in_features, num_groups = format.num_groups(num_k);
    loop_tiles(pool, weight, to, [&](char* start, int64_t first, int64_t columns) {
        for (int64_t column = 0; column < kTileColumns; ++column) {
            const int64_t feature = first + column;
            const bool is_there = column < columns;
            const T* row = from + (is_there ? feature * num_k : 0);
            const RowQuantization quantized(row, is_there ? num_k : 0);
            scale[feature] = quantized.scale;
            for (int64_t index = 0; index < num_groups; ++index) {
                const int64_t k = index * format.group, count = std::min(format.group, num_k - k);
                uint8_t values[kMaxGroup] = {};
                for (int64_t i = 0; is_there && i < count; ++i)
                    values[i] = static_cast<uint8_t>(128 + quantized.value(row[k + i]));
                pack_values(format, values, count, column, TileGroup(format, start, index).values);
            }
        }
    });
}

// Packs rows of T as the weight's kind and format say; scale: [num_tiles * 32], of eight bits.
template <typename T>
inline void pack_weight(Pool& pool, const T* from, const LinearWeight& weight, void* to, float* scale) {
    if (!weight.has_groups()) pack_rows_of_weight(pool, from, weight, to, scale);
    else if (weight.format.bits == 4) pack_four_bits(pool, from, weight, to);
    else pack_eight_bits(pool, from, weight, to, scale);
}

// One column's weights of a group; see groups.h.
inline void unpack_group(const LinearWeight& weight, int64_t feature, int64_t group, int64_t count, float* to) {
    const GroupFormat& format = weight.format;
    const int64_t column = feature % kTileColumns;
    const TileGroup at(format, const_cast<char*>(weight.tile(feature / kTileColumns)), group);
    const auto super = [&](int row) {
        return float16_to_float(reinterpret_cast<const uint16_t*>(at.header)[row * kTileColumns + column]);
    };
    float scale = weight.scale ? weight.scale[feature] : 1.0f, zero = static_cast<float>(format.zero()), minimum = 0.0f;
    switch (format.scales) {
        case Scales::kPerOutput: break;
        case Scales::kFloat32: scale = reinterpret_cast<const float*>(at.scales)[column]; break;
        case Scales::kFloat16: scale = float16_to_float(reinterpret_cast<const uint16_t*>(at.scales)[column]); break;
        case Scales::kBFloat16: scale = to_float(reinterpret_cast<const BFloat16*>(at.scales)[column]); break;
        case Scales::kTwoLevel: scale = reinterpret_cast<const int8_t*>(at.scales)[column] * super(0); break;
    }
    const auto byte = static_cast<float>(reinterpret_cast<const uint8_t*>(at.minima)[column]);
    switch (format.minima) {
        case Minima::kNone: break;
        case Minima::kZeros: zero = byte; break;
        case Minima::kTwoLevel: minimum = byte * super(1); break;
        case Minima::kFloat32: minimum = reinterpret_cast<const float*>(at.minima)[column]; break;
    }
    const bool is_listed = weight.codebook && format.bits == 4 && format.minima == Minima::kNone;
    for (int64_t k = 0; k < count; ++k) {
        const int64_t step = 32 / format.bits;
        uint32_t word;
        std::memcpy(&word, values_at(format, at.values, k / step * step, column), 4);
        const uint32_t q = format.bits == 8 ? word >> (k % 4 * 8) & 255u : word >> (k % 4 * 8 + k % 8 / 4 * 4) & 15u;
        to[k] = is_listed ? scale * weight.codebook[q] : scale * (static_cast<float>(q) - zero) - minimum;
    }
}

// One output feature's weights, unpacked; for the embedding, which a head may share.
template <typename T>
inline void unpack_feature(const LinearWeight& weight, int64_t feature, float factor, T* to) {
    if (weight.has_groups()) {
        for (int64_t k = 0; k < weight.in_features; k += weight.format.group) {
            const int64_t count = std::min(weight.format.group, weight.in_features - k);
            float values[kMaxGroup];
            unpack_group(weight, feature, k / weight.format.group, count, values);
            for (int64_t i = 0; i < count; ++i) {
                T* at = to + (weight.permutation ? weight.permutation[k + i] : k + i);
                from_float(values[i], at);
                if (factor != 1.0f) from_float(to_float(*at) * factor, at);
            }
        }
        return;
    }
    const int64_t tile = feature / kTileColumns, column = feature % kTileColumns;
    const char* start = weight.tile(tile);
    const float scale = weight.scale ? weight.scale[feature] : 1.0f;
    for (int64_t k = 0; k < weight.in_features; ++k) {
        float value;
        if (weight.kind == Kind::kFloat32)
            value = reinterpret_cast<const float*>(start)[k * kTileColumns + column];
        else if (weight.kind == Kind::kBFloat16)
            value = to_float(reinterpret_cast<const BFloat16*>(
                start)[(k / 2 * kTileColumns + column) * 2 + k % 2]);
        else
            value = scale * reinterpret_cast<const int8_t*>(start)[k * kTileColumns + column];
        from_float(value, to + k);
        if (factor != 1.0f) from_float(to_float(to[k]) * factor, to + k);
    }
}

}  // namespace nanocore
