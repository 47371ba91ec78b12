// Products of eight-bit rows with grouped integer weights: exact sums, and one ordered chain of floats.
//
// Activations are quantized per row and group of k (quantize_group); weights have a scale, and perhaps
// a minimum, for each group and column: w = scale * q - minimum. A group's sum of products is an exact
// int32 in whatever order it is added; only the chain over groups is of floats, with k ascending:
//     total = fma(float(sum) * row_scale, column_scale, total)
//     total = fma(row_scale * sum of the row's values, -column_minimum, total)
// So a result has the same bits beside any other rows, in any chunking, and on every machine with
// fused multiply-adds.
//
// A tile of 32 columns is one stream of groups: scales, minima, values. Of four bits, 32 bits of a
// column hold eight k, the first four in the low halves of their bytes and the last four in the high
// ones; of eight bits, four k. Values are unsigned, as the instruction wants its first operand; of
// weights without minima half of the range is taken off again by the row: see RowGroup.

#pragma once

#include <algorithm>
#include <cstdlib>

#if defined(__AVX2__)
#include <cpuid.h>
#endif

#include "multiply.h"

namespace nanocore {

constexpr int64_t kSuperBlock = 256;  // of k, whose groups share a scale of their scales
constexpr int64_t kLeastRowGroup = 32;  // of k that share a row's scale

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
};

struct IntegerFormat {
    int bits;  // 4 or 8
    Scales scales;
    Minima minima;
    int64_t group;  // 16, 32, 64 or 128

    int64_t scale_bytes() const {
        constexpr int64_t bytes[] = {0, 4, 2, 2, 1};
        return bytes[static_cast<int>(scales)] * kTileColumns;
    }
    int64_t minima_bytes() const { return minima == Minima::kNone ? 0 : kTileColumns; }
    int64_t value_bytes() const { return group * kTileColumns * bits / 8; }
    int64_t group_bytes() const { return scale_bytes() + minima_bytes() + value_bytes(); }
    int64_t groups_of_header() const { return scales == Scales::kTwoLevel ? kSuperBlock / group : 1; }
    int64_t header_bytes() const {
        return scales == Scales::kTwoLevel ? 2 * kTileColumns * (minima == Minima::kNone ? 1 : 2) : 0;
    }
    int64_t num_groups(int64_t num_k) const { return (num_k + group - 1) / group; }
    int64_t tile_bytes(int64_t num_k) const {
        const int64_t groups = num_groups(num_k), per = groups_of_header();
        return groups * group_bytes() + (groups + per - 1) / per * header_bytes();
    }
    // What a row's sum of values is multiplied by to make unsigned weights signed.
    int zero() const { return minima != Minima::kNone ? 0 : bits == 4 ? 8 : 128; }
};

// R rows of one group as they are packed: R scales, R offsets (-zero times the sum of a row's values),
// R scaled sums, then R times `group` values.
template <int R>
struct RowGroup {
    const char* data;

    static int64_t bytes(int64_t group) { return R * (12 + group); }
    NANOCORE_INLINE float scale(int r) const { return reinterpret_cast<const float*>(data)[r]; }
    NANOCORE_INLINE int32_t offset(int r) const { return reinterpret_cast<const int32_t*>(data)[R + r]; }
    NANOCORE_INLINE float sum(int r) const { return reinterpret_cast<const float*>(data)[2 * R + r]; }
    NANOCORE_INLINE uint32_t four(int r, int64_t group, int64_t k) const {
        uint32_t values;
        std::memcpy(&values, data + 12 * R + r * group + k, 4);
        return values;
    }
};

// acc + four products of each lane's unsigned bytes w and signed bytes a.
// kBits: of w; two products of eight bits would not fit the 16 bits that the fallback has for them.
template <bool kVnni, int kBits>
NANOCORE_INLINE I dot_bytes(U w, U a, I acc) {
#if defined(__AVX512F__)
    if constexpr (kVnni) {
        // (GCC 12 spills accumulators around the intrinsic.)
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
        return acc;
    }
    const auto sums = [&](U x) {
        return reinterpret_cast<I>(_mm512_madd_epi16(
            _mm512_maddubs_epi16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(a)),
            _mm512_set1_epi16(1)));
    };
#elif defined(__AVX2__)
    if constexpr (kVnni) {
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(a));
        return acc;
    }
    const auto sums = [&](U x) {
        return reinterpret_cast<I>(_mm256_madd_epi16(
            _mm256_maddubs_epi16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(a)),
            _mm256_set1_epi16(1)));
    };
#else
    const auto sums = [&](U x) {
        I sum = {};
        for (int byte = 0; byte < 4; ++byte)
            sum += reinterpret_cast<I>((x >> (8 * byte)) & 255u) *
                   (reinterpret_cast<I>(a << (24 - 8 * byte)) >> 24);
        return sum;
    };
#endif
    if constexpr (kBits == 8)
        return acc + (sums((w >> 4) & 0x0f0f0f0fu) << 4) + sums(w & 0x0f0f0f0fu);
    else return acc + sums(w);
}

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

// Whether this machine multiplies bytes in one instruction, which no library was compiled to need.
// NANOCORE_CPU_VNNI=0 says no, for tests.
inline bool has_vnni() {
    const char* wanted = std::getenv("NANOCORE_CPU_VNNI");
    if (wanted && wanted[0] == '0') return false;
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512vnni");
#elif defined(__AVX2__)
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);  // AVX-VNNI
#else
    return false;
#endif
}

// body(bits, whether there is vpdpbusd), as constants.
template <typename Body>
inline void with_integers(int bits, const Body& body) {
    static const bool vnni = has_vnni();
    const auto with_bits = [&](auto number) {
        if (vnni) body(number, std::true_type{});
        else body(number, std::false_type{});
    };
    if (bits == 4) with_bits(std::integral_constant<int, 4>{});
    else with_bits(std::integral_constant<int, 8>{});
}

// Scale and minimum of kLanes columns of a group.
struct ColumnScales {
    F scale, minimum;
};

template <typename Header>
NANOCORE_INLINE ColumnScales column_scales(const IntegerFormat& format, const char* group,
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
    if (format.minima != Minima::kNone) {
        const auto* from = reinterpret_cast<const int8_t*>(group + format.scale_bytes()) + column;
        const F number = __builtin_convertvector(load_integers(from) & 255, F);
        minimum = number * (format.minima == Minima::kZeros
                                ? scale
                                : load_float16(reinterpret_cast<const uint16_t*>(header) +
                                               kTileColumns + column));
    }
    return {scale, minimum};
}

// Sums of products of one group and C vectors of columns, from the rows' offsets on.
template <int kBits, bool kVnni, int R, int C>
NANOCORE_INLINE void multiply_group(const RowGroup<R>& a, const char* values, int64_t group,
                                    const Prefetch& ahead, int64_t& line, I (&acc)[R][C]) {
    constexpr int kChains = R <= 2 ? 2 : 1;  // of additions, where few rows would wait for them
    I sums[kChains][R][C];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
            sums[0][r][c] = a.offset(r) - I{};
            if constexpr (kChains == 2) sums[1][r][c] = I{};
        }
    for (int64_t k = 0; k < group; k += 8) {
        ahead.at(line);
        U low[C], high[C];
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
            if constexpr (kBits == 4) {
                const U both = load(reinterpret_cast<const uint32_t*>(values) + c * kLanes);
                low[c] = both & 0x0f0f0f0fu;
                high[c] = (both >> 4) & 0x0f0f0f0fu;
            } else {
                low[c] = load(reinterpret_cast<const uint32_t*>(values) + c * kLanes);
                high[c] = load(reinterpret_cast<const uint32_t*>(values) + kTileColumns + c * kLanes);
            }
        }
        values += kTileColumns * kBits;
        ++line;
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const U first = broadcast(a.four(r, group, k)), second = broadcast(a.four(r, group, k + 4));
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) {
                sums[0][r][c] = dot_bytes<kVnni, kBits>(low[c], first, sums[0][r][c]);
                sums[kChains - 1][r][c] = dot_bytes<kVnni, kBits>(high[c], second, sums[kChains - 1][r][c]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
            acc[r][c] = sums[0][r][c];
            if constexpr (kChains == 2) acc[r][c] += sums[1][r][c];
        }
}

// R packed rows times one tile: products[R][32].
template <int kBits, bool kVnni, int R>
__attribute__((noinline)) void multiply_integer_tile(const char* rows, const char* tile,
                                                     const IntegerFormat& format, int64_t num_groups,
                                                     const Prefetch& ahead, float* products) {
    constexpr int C = 2;
    std::memset(products, 0, R * kTileColumns * sizeof(float));
    const char* header = nullptr;
    int64_t line = 0;
    for (int64_t group = 0; group < num_groups; ++group) {
        if (format.scales == Scales::kTwoLevel && group % format.groups_of_header() == 0) {
            header = tile;
            tile += format.header_bytes();
        }
        const RowGroup<R> a{rows};
        const char* values = tile + format.scale_bytes() + format.minima_bytes();
        for (int first = 0; first < kTileColumns; first += C * kLanes) {
            I acc[R][C];
            int64_t start = line;
            multiply_group<kBits, kVnni, R, C>(a, values + first * 4, format.group, ahead, start, acc);
            if (first + C * kLanes == kTileColumns) line = start;
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) {
                const ColumnScales of = column_scales(format, tile, header, first + c * kLanes);
                float* to = products + first + c * kLanes;
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const F sum = __builtin_convertvector(acc[r][c], F) * a.scale(r);
                    F total = load(to + r * kTileColumns);
                    total = multiply_add(sum, of.scale, total);
                    store(total, to + r * kTileColumns);
                }
                if (format.minima != Minima::kNone)
                    for (int r = 0; r < R; ++r) {
                        const F total = load(to + r * kTileColumns);
                        store(multiply_add(broadcast(-a.sum(r)), of.minimum, total), to + r * kTileColumns);
                    }
            }
        }
        tile += format.group_bytes();
        rows += RowGroup<R>::bytes(format.group);
    }
}

// One row's values of one group, at most 127 large, and its scale and sum; x may be shorter than the
// group. What is not finite makes the scale NaN, so that all that it touches shows it.
template <typename T>
inline float quantize_values(const T* x, int64_t count, int64_t size, int8_t* to) {
    float values[128] = {}, largest = 0.0f;
    bool is_finite = true;
    for (int64_t k = 0; k < count; ++k) {
        values[k] = to_float(x[k]);
        largest = std::max(largest, std::fabs(values[k]));
        is_finite &= std::isfinite(values[k]);
    }
    const bool is_zero = largest < 1e-30f || !is_finite;
    const float inverse = is_zero ? 0.0f : 127.0f / largest;
    for (int64_t k = 0; k < size; ++k) to[k] = is_finite ? static_cast<int8_t>(std::lrintf(values[k] * inverse)) : 0;
    return is_finite ? is_zero ? 0.0f : largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
}

// One row into its lines of R packed rows; see RowGroup.
template <typename T, int R>
inline void pack_integer_row(const T* x, const IntegerFormat& format, int64_t num_k, int r, char* to) {
    const int64_t group = format.group, shared = std::max(group, kLeastRowGroup);
    int8_t values[128];
    float scale = 0.0f;
    for (int64_t k = 0; k < num_k; k += group, to += RowGroup<R>::bytes(group)) {
        if (k % shared == 0) scale = quantize_values(x + k, std::min(shared, num_k - k), shared, values);
        const int8_t* from = values + k % shared;
        int32_t sum = 0;
        for (int64_t i = 0; i < group; ++i) sum += from[i];
        reinterpret_cast<float*>(to)[r] = scale;
        reinterpret_cast<int32_t*>(to)[R + r] = -format.zero() * sum;
        reinterpret_cast<float*>(to)[2 * R + r] = scale * static_cast<float>(sum);
        std::memcpy(to + 12 * R + r * group, from, group);
    }
}

}  // namespace nanocore
