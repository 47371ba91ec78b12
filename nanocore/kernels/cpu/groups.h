// Weights of small numbers with a scale for each group of k and column, and the chain over groups.
//
// A column's weight is w = scale * (q - half of the range), or scale * q - minimum, or
// scale * codebook[q]. A product is summed up within a group, and groups are added up with k ascending:
//     total = fma(sum of the group, column_scale, total)
//     total = fma(sum of the row's values, -column_minimum, total)
// A tile of 32 columns is one stream of groups: scales, minima, values. Of four bits, 32 bits of a
// column hold eight k, the first four in the low halves of their bytes and the last four in the high
// ones; of eight bits, four k.

#pragma once

#include <algorithm>

#include "multiply.h"

namespace nanocore {

constexpr int64_t kMaxGroup = 128;    // of k
constexpr int64_t kSuperBlock = 256;  // of k, whose groups share a scale of their scales

enum class Scales : int {
    kPerOutput = 0,  // none in the tile: the result is scaled
    kFloat32 = 1,
    kFloat16 = 2,
    kBFloat16 = 3,
    kTwoLevel = 4,  // int8 times one float16 for each super-block (K-quants of llama.cpp)
};

enum class Minima : int {
    kNone = 0,  // q - 8 or q - 128
    kZeros = 1,  // uint8; times the scale
    kTwoLevel = 2,  // uint8 times one float16 for each super-block
    kFloat32 = 3,
};

struct GroupFormat {
    int bits;  // 4 or 8
    Scales scales;
    Minima minima;
    int64_t group;  // 16, 32, 64 or 128

    int64_t scale_bytes() const {
        constexpr int64_t bytes[] = {0, 4, 2, 2, 1};
        return bytes[static_cast<int>(scales)] * kTileColumns;
    }
    int64_t minima_bytes() const {
        constexpr int64_t bytes[] = {0, 1, 1, 4};
        return bytes[static_cast<int>(minima)] * kTileColumns;
    }
    int64_t value_bytes() const { return group * kTileColumns * bits / 8; }
    int64_t group_bytes() const { return scale_bytes() + minima_bytes() + value_bytes(); }
    int64_t groups_of_header() const { return scales == Scales::kTwoLevel ? kSuperBlock / group : 1; }
    int64_t header_bytes() const {
        if (scales != Scales::kTwoLevel) return 0;
        return 2 * kTileColumns * (minima == Minima::kTwoLevel ? 2 : 1);
    }
    int64_t num_groups(int64_t num_k) const { return (num_k + group - 1) / group; }
    int64_t tile_bytes(int64_t num_k) const {
        const int64_t groups = num_groups(num_k), per = groups_of_header();
        return groups * group_bytes() + (groups + per - 1) / per * header_bytes();
    }
    // What a row's sum of values is multiplied by to make unsigned weights signed.
    int zero() const { return minima != Minima::kNone ? 0 : bits == 4 ? 8 : 128; }
};

NANOCORE_INLINE float float16_to_float(uint16_t bits) {
    // Of exponents, the difference of both formats' is made up by a product, which is exact.
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
    float value;
    std::memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    if ((bits & 0x7c00u) == 0x7c00u) value = bits & 0x3ffu ? std::numeric_limits<float>::quiet_NaN()
                                                         : std::numeric_limits<float>::infinity();
    return bits & 0x8000u ? -value : value;
}

NANOCORE_INLINE F load_float16(const uint16_t* from) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    F values;
    for (int i = 0; i < kLanes; ++i) values[i] = float16_to_float(from[i]);
    return values;
#endif
}

// Scale and minimum of kLanes columns of a group.
struct ColumnScales {
    F scale, minimum;
};

template <typename Header>
NANOCORE_INLINE ColumnScales column_scales(const GroupFormat& format, const char* group,
                                           const Header* header, int64_t column) {
    F scale = broadcast(1.0f), minimum = {};
    switch (format.scales) {
        case Scales::kPerOutput: break;
        case Scales::kFloat32: scale = load(reinterpret_cast<const float*>(group) + column); break;
        case Scales::kFloat16: scale = load_float16(reinterpret_cast<const uint16_t*>(group) + column); break;
        case Scales::kBFloat16: scale = load(reinterpret_cast<const BFloat16*>(group) + column); break;
        case Scales::kTwoLevel:
            scale = load(reinterpret_cast<const int8_t*>(group) + column) *
                    load_float16(reinterpret_cast<const uint16_t*>(header) + column);
            break;
    }
    if (format.minima == Minima::kFloat32)
        minimum = load(reinterpret_cast<const float*>(group + format.scale_bytes()) + column);
    else if (format.minima != Minima::kNone) {
        const auto* from = reinterpret_cast<const int8_t*>(group + format.scale_bytes()) + column;
        const F number = __builtin_convertvector(load_integers(from) & 255, F);
        minimum = number * (format.minima == Minima::kZeros
                                ? scale
                                : load_float16(reinterpret_cast<const uint16_t*>(header) +
                                               kTileColumns + column));
    }
    return {scale, minimum};
}

// A row of activations in the order of a weight's k; permutation: which of them each k is, or null.
template <typename T>
struct Inputs {
    const T* row;
    const int32_t* permutation;

    // `count` of them from k on, then zeros, in the memory of a group if they are not there as one piece.
    NANOCORE_INLINE const T* some(int64_t k, int64_t count, int64_t size, T* group) const {
        if (!permutation && count == size) return row + k;
        for (int64_t i = 0; i < size; ++i)
            group[i] = i < count ? row[permutation ? permutation[k + i] : k + i] : T{};
        return group;
    }
};

// R packed rows times one tile: products[R][32].
//
// Of a group, Products has `bytes<R>(group)` of packed rows, `minus_sum<R>(rows, r)` of a row's values, and
// `multiply<R, C>`, which sums up products with C vectors of columns and goes on with the lines to be
// fetched ahead.
template <int R, typename Products>
__attribute__((noinline)) void multiply_groups(const Products& with, const char* rows, const char* tile,
                                               const GroupFormat& format, int64_t num_groups,
                                               const Prefetch& ahead, float* products) {
    constexpr int C = 2, kParts = kTileColumns / kLanes / C;
    const int64_t value_offset = format.scale_bytes() + format.minima_bytes();
    const int64_t group_bytes = format.group_bytes();
    PrefetchCursor next(ahead);
    F totals[kParts][C][R] = {};
    const char* header = nullptr;
    for (int64_t group = 0; group < num_groups; ++group) {
        if (format.scales == Scales::kTwoLevel && group % format.groups_of_header() == 0) {
            header = tile;
            tile += format.header_bytes();
        }
#pragma GCC unroll 1
        for (int part = 0; part < kParts; ++part) {
            const int first = part * C * kLanes;
            F sums[R][C];
            with.template multiply<R, C>(rows, tile + value_offset + first * 4, format.group, next, sums);
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) {
                const ColumnScales of = column_scales(format, tile, header, first + c * kLanes);
                F(&total)[R] = totals[part][c];
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) total[r] = multiply_add(sums[r][c], of.scale, total[r]);
                if (format.minima == Minima::kNone) continue;
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r)
                    total[r] = multiply_add(broadcast(Products::template minus_sum<R>(rows, r)), of.minimum, total[r]);
            }
        }
        tile += group_bytes;
        rows += Products::template bytes<R>(format.group);
    }
    for (int part = 0; part < kParts; ++part)
        for (int c = 0; c < C; ++c)
            for (int r = 0; r < R; ++r)
                store(totals[part][c][r], products + r * kTileColumns + (part * C + c) * kLanes);
}

}  // namespace nanocore
