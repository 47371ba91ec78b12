// Weights on their way into tiles, and out of them for an embedding: grouped integers above all.
//
// What a checkpoint holds is given row by row, [out_features][...]; see GroupFormat for the tiles.

#pragma once

#include "linear_weight.h"

namespace nanocore {

constexpr int kRanges = 10;  // that are tried for a group of four bits, each this much wider
constexpr float kLeastRange = 13.5f, kRangeStep = 0.25f;
constexpr float kMaxSuperScale = 120.0f, kMaxSuperMinimum = 240.0f;  // below 127 and 255: float16 may round down

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

// To the nearest integer from 0 to 15.
NANOCORE_INLINE F four_bits_of(F scaled) {
    scaled = scaled > 0.0f ? scaled : F{};
    scaled = scaled < 15.0f ? scaled : broadcast(15.0f);
    return (scaled + 12582912.0f) - 12582912.0f;
}

// Scale and minimum of kLanes columns of a group, x[k][column] ~ scale q - minimum; both at least 0.
//
// Some ranges are tried for q, wider and narrower than that of x; for each, scale and minimum are those
// of the least squared error, and the best are kept. Sums go over k in order, without fused
// multiply-adds: kernels/group_quantization.py finds the same to the bit. (The search is that of
// llama.cpp's Q4_K, which weights squares.)
inline ColumnScales fit_columns(const float* x, int64_t group) {
    F low = {}, high = broadcast(std::numeric_limits<float>::lowest()), sum = {};
    const auto at = [&](int64_t k) { return load(x + k * kTileColumns); };
    for (int64_t k = 0; k < group; ++k) {
        low = at(k) < low ? at(k) : low;
        high = at(k) > high ? at(k) : high;
        sum += at(k);
    }
    const F range = high - low, count = broadcast(static_cast<float>(group));
    F most = {}, scale = {}, minimum = F{} - low;
    for (int candidate = 0; candidate < kRanges; ++candidate) {
        const F inverse = broadcast(kLeastRange + kRangeStep * static_cast<float>(candidate)) / range;
        F numbers = {}, squares = {}, products = {};
        for (int64_t k = 0; k < group; ++k) {
            const F q = four_bits_of((at(k) - low) * inverse);
            numbers += q;
            squares += q * q;
            products += at(k) * q;
        }
        const F divisor = count * squares - numbers * numbers;
        F slope = (count * products - sum * numbers) / divisor;
        F offset = (squares * sum - numbers * products) / divisor;
        slope = offset > 0.0f ? products / squares : slope;
        offset = offset > 0.0f ? F{} : offset;
        // How much of the squares is not an error.
        const F linear = slope * products + offset * sum;
        const F gain = linear + linear - slope * (slope * squares + (offset + offset) * numbers) -
                       offset * offset * count;
        const I is_better = (gain > most) & (slope > 0.0f);
        most = is_better ? gain : most;
        scale = is_better ? slope : scale;
        minimum = is_better ? F{} - offset : minimum;
    }
    return {scale, minimum};
}

// Scale of numbers up to `most` for numbers that are up to `largest`, as a float16.
inline uint16_t super_scale(float largest, float most) { return float_to_float16(largest / most); }

// The number that stands for `value`.
inline int super_number(float value, float super, int most) {
    if (!(super > 0.0f)) return 0;
    return static_cast<int>(std::min(std::lrintf(value / super), static_cast<long>(most)));
}

// Packs kTileColumns columns of a super-block, x[k][column], whose first group is `first`. What is not
// finite makes the super-block's scale NaN.
inline void pack_super_block(const GroupFormat& format, const float* x, int64_t first, int64_t num_groups,
                             char* tile) {
    float scales[kSuperBlock / 16][kTileColumns], minima[kSuperBlock / 16][kTileColumns];
    for (int64_t g = 0; g < num_groups; ++g)
        for (int64_t column = 0; column < kTileColumns; column += kLanes) {
            const ColumnScales of = fit_columns(x + g * format.group * kTileColumns + column, format.group);
            store(of.scale, scales[g] + column);
            store(of.minimum, minima[g] + column);
        }
    for (int64_t column = 0; column < kTileColumns; ++column) {
        float scale = 0.0f, minimum = 0.0f;
        bool is_finite = true;
        for (int64_t g = 0; g < num_groups; ++g) {
            scale = std::max(scale, scales[g][column]);
            minimum = std::max(minimum, minima[g][column]);
        }
        for (int64_t k = 0; k < num_groups * format.group; ++k) is_finite &= std::isfinite(x[k * kTileColumns + column]);
        if (!is_finite) scale = std::numeric_limits<float>::quiet_NaN();
        auto* supers = reinterpret_cast<uint16_t*>(TileGroup(format, tile, first).header) + column;
        supers[0] = super_scale(scale, kMaxSuperScale);
        supers[kTileColumns] = super_scale(minimum, kMaxSuperMinimum);
        const float of_scales = float16_to_float(supers[0]), of_minima = float16_to_float(supers[kTileColumns]);
        for (int64_t g = 0; g < num_groups; ++g) {
            const TileGroup at(format, tile, first + g);
            const int number = super_number(scales[g][column], of_scales, 127);
            const int of_minimum = super_number(minima[g][column], of_minima, 255);
            at.scales[column] = static_cast<char>(number);
            at.minima[column] = static_cast<char>(of_minimum);
            const float kept = static_cast<float>(number) * of_scales;
            const float inverse = kept > 0.0f ? 1.0f / kept : 0.0f;
            const float taken = static_cast<float>(of_minimum) * of_minima;
            uint8_t values[kMaxGroup];
            for (int64_t k = 0; k < format.group; ++k) {
                const float scaled = (x[(g * format.group + k) * kTileColumns + column] + taken) * inverse;
                const float q = std::min(scaled > 0.0f ? scaled : 0.0f, 15.0f);
                values[k] = static_cast<uint8_t>(std::lrintf(q));
            }
            pack_values(format, values, format.group, column, at.values);
        }
    }
}

// Packs rows of T, [out_features][in_features], as groups of four bits with scales and minima of two levels.
template <typename T>
inline void pack_four_bits(Pool& pool, const T* from, const LinearWeight& weight, void* to) {
    const GroupFormat& format = weight.format;
    const int64_t num_k = weight.in_features, num_groups = format.num_groups(num_k), per = format.groups_of_header();
    loop_tiles(pool, weight, to, [&](char* start, int64_t first, int64_t columns) {
        alignas(64) float x[kSuperBlock * kTileColumns];
        for (int64_t group = 0; group < num_groups; group += per) {
            const int64_t k = group * format.group, count = std::min(kSuperBlock, num_k - k);
            if (columns < kTileColumns || count < kSuperBlock) std::memset(x, 0, sizeof x);
            for (int64_t column = 0; column < columns; ++column)
                for (int64_t i = 0; i < count; ++i)
                    x[i * kTileColumns + column] = to_float(from[(first + column) * num_k + k + i]);
            pack_super_block(format, x, group, std::min(per, num_groups - group), start);
        }
    });
}

// The same as eight bits with a float16 scale for each group: the largest magnitude becomes 127.
template <typename T>
inline void pack_eight_bits(Pool& pool, const T* from, const LinearWeight& weight, void* to) {
    const GroupFormat& format = weight.format;
    const int64_t num_k = weight.in_features, num_groups = format.num_groups(num_k);
    loop_tiles(pool, weight, to, [&](char* start, int64_t first, int64_t columns) {
        for (int64_t column = 0; column < columns; ++column) {  // those past the last have the scale 0
            const T* row = from + (first + column) * num_k;
            for (int64_t index = 0; index < num_groups; ++index) {
                const int64_t k = index * format.group, count = std::min(format.group, num_k - k);
                const TileGroup at(format, start, index);
                const uint16_t scale = float_to_float16(eight_bit_scale(row + k, count));
                const float kept = float16_to_float(scale);
                const float inverse = kept == 0.0f || kept != kept ? 0.0f : 1.0f / kept;
                uint8_t values[kMaxGroup] = {};
                for (int64_t i = 0; i < count; ++i) {
                    // A scale that was rounded down would need a few more numbers than there are.
                    const float scaled = std::min(std::max(to_float(row[k + i]) * inverse, -127.0f), 127.0f);
                    values[i] = static_cast<uint8_t>(128 + (inverse == 0.0f ? 0 : std::lrintf(scaled)));
                }
                reinterpret_cast<uint16_t*>(at.scales)[column] = scale;
                pack_values(format, values, count, column, at.values);
            }
        }
    });
}

// Packs rows of T as the weight's kind and format say.
template <typename T>
inline void pack_weight(Pool& pool, const T* from, const LinearWeight& weight, void* to) {
    if (!weight.has_groups()) pack_rows_of_weight(pool, from, weight, to);
    else if (weight.format.bits == 4) pack_four_bits(pool, from, weight, to);
    else pack_eight_bits(pool, from, weight, to);
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
    for (int64_t k = 0; k < weight.in_features; ++k) {
        const float value =
            weight.kind == Kind::kFloat32
                ? reinterpret_cast<const float*>(start)[k * kTileColumns + column]
                : to_float(reinterpret_cast<const BFloat16*>(start)[(k / 2 * kTileColumns + column) * 2 + k % 2]);
        from_float(value, to + k);
        if (factor != 1.0f) from_float(to_float(to[k]) * factor, to + k);
    }
}

}  // namespace nanocore
