// Products of eight-bit rows with grouped integer weights: exact sums, whatever their order.
//
// Activations are quantized per row and group of k (quantize_values); a group's sum of products is an
// int32 (below 2^24, so that float32 has it), and only the chain over groups is of floats; see
// groups.h. So a result has the same bits beside any other rows, in any chunking, and on every
// machine with fused multiply-adds.
//
// Weights are unsigned, as the instruction wants its first operand; of those without minima half of the
// range is taken off again by the row: see RowGroup.

#pragma once

#include <algorithm>
#include <cstdlib>

#if defined(__AVX2__)
#include <cpuid.h>
#endif

#include "groups.h"

namespace nanocore {

constexpr int64_t kLeastRowGroup = 32;  // of k that share a row's scale

// R rows of one group as they are packed: R scales, R offsets (-zero times the sum of a row's values),
// R scaled sums, negated, then four values of each row, and the next four: whatever the group, what
// a product reads is at constant distances.
template <int R>
struct RowGroup {
    const char* data;

    static int64_t bytes(int64_t group) { return R * (12 + group); }
    NANOCORE_INLINE float scale(int r) const { return reinterpret_cast<const float*>(data)[r]; }
    NANOCORE_INLINE int32_t offset(int r) const { return reinterpret_cast<const int32_t*>(data)[R + r]; }
    NANOCORE_INLINE float minus_sum(int r) const { return reinterpret_cast<const float*>(data)[2 * R + r]; }
    NANOCORE_INLINE uint32_t four(int r, int64_t k) const {
        uint32_t values;
        std::memcpy(&values, data + 12 * R + k * R + r * 4, 4);
        return values;
    }
};

// Whether weights of eight bits are taken as signed: two products of 128 and 127 fit the 16 bits that
// AVX2 has for them, those of 255 and 127 do not. AVX-512 has no instruction that moves a sign.
template <int kBits, bool kVnni>
constexpr bool kSigned = kBits == 8 && !kVnni && kLanes == 8;

// Four unsigned bytes of each lane, to be multiplied with several rows.
template <int kBits, bool kVnni>
struct Bytes {
    U values;
    U magnitudes;  // of signed ones

    NANOCORE_INLINE explicit Bytes(U unsigned_values) : values(unsigned_values) {
#if defined(__AVX2__) && !defined(__AVX512F__)
        if constexpr (!kSigned<kBits, kVnni>) return;
        values ^= 0x80808080u;  // 128 less
        magnitudes = reinterpret_cast<U>(_mm256_abs_epi8(reinterpret_cast<__m256i>(values)));
#endif
    }

    // sum + four products of each lane with the signed bytes of a row; signed values are 128 less.
    NANOCORE_INLINE I dot(U row, I sum) const {
#if defined(__AVX512F__)
        if constexpr (kVnni) {
            // (GCC 12 spills accumulators around the intrinsic.)
            asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(values), "v"(row));
            return sum;
        }
        const auto products = [&](U w) {
            return reinterpret_cast<I>(_mm512_madd_epi16(
                _mm512_maddubs_epi16(reinterpret_cast<__m512i>(w), reinterpret_cast<__m512i>(row)),
                _mm512_set1_epi16(1)));
        };
#elif defined(__AVX2__)
        if constexpr (kVnni) {
            asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(values), "x"(row));
            return sum;
        }
        const auto a = reinterpret_cast<__m256i>(row);
        const auto add = [&](U w, __m256i with) {
            const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(w), with);
            return sum + reinterpret_cast<I>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        };
        if constexpr (kSigned<kBits, kVnni>)
            return add(magnitudes, _mm256_sign_epi8(a, reinterpret_cast<__m256i>(values)));
        else return add(values, a);
#else
        const auto products = [&](U w) {
            I found = {};
            for (int byte = 0; byte < 4; ++byte)
                found += reinterpret_cast<I>((w >> (8 * byte)) & 255u) *
                         (reinterpret_cast<I>(row << (24 - 8 * byte)) >> 24);
            return found;
        };
#endif
#if defined(__AVX512F__) || !defined(__AVX2__)
        if constexpr (kBits == 8)
            return sum + (products((values >> 4) & 0x0f0f0f0fu) << 4) + products(values & 0x0f0f0f0fu);
        else return sum + products(values);
#endif
    }
};

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

// One row's values of one group, at most 127 large, and its scale. What is not finite makes the scale
// NaN, so that all that it touches shows it.
template <typename T>
inline float quantize_values(const T* x, int64_t size, int8_t* to) {
    I largest = {};
    for (int64_t k = 0; k < size; k += kLanes) {
        const I magnitude = reinterpret_cast<I>(load(x + k)) & 0x7fffffff;  // as integers they have the same order
        largest = magnitude > largest ? magnitude : largest;
    }
    const int32_t bits = reduce_lanes(largest, [](I a, I b) { return a > b ? a : b; });
    float most;
    std::memcpy(&most, &bits, sizeof most);
    if (!std::isfinite(most)) {
        std::memset(to, 0, size);
        return std::numeric_limits<float>::quiet_NaN();
    }
    const float inverse = most < 1e-30f ? 0.0f : 127.0f / most;
    for (int64_t k = 0; k < size; k += kLanes) {
        // Added to 1.5 * 2^23 a number is rounded to nearest even, and is what the lowest bits hold.
        store_bytes(reinterpret_cast<I>(load(x + k) * inverse + 12582912.0f), to + k);
    }
    return most < 1e-30f ? 0.0f : most / 127.0f;
}

NANOCORE_INLINE int32_t sum_bytes(const int8_t* from, int64_t count) {
    I sum = {};
    for (int64_t i = 0; i < count; i += kLanes) sum += load_integers(from + i);
    return reduce_lanes(sum, [](I a, I b) { return a + b; });
}

template <int kBits, bool kVnni>
struct IntegerGroups {
    template <int R>
    static int64_t bytes(int64_t group) { return RowGroup<R>::bytes(group); }

    template <int R>
    static float minus_sum(const char* rows, int r) { return RowGroup<R>{rows}.minus_sum(r); }

    // acc: the sums as floats, times the rows' scales.
    template <int R, int C>
    NANOCORE_INLINE void multiply(const char* rows, const char* values, int64_t group,
                                  PrefetchCursor& ahead, F (&acc)[R][C]) const {
        const RowGroup<R> a{rows};
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
#pragma GCC unroll 2
            for (int i = 0; i < kBits / 4; ++i) ahead.advance();
            const auto bytes = [&](int half, int c) {
                const auto* from = reinterpret_cast<const uint32_t*>(values) + c * kLanes;
                if constexpr (kBits == 8) return Bytes<kBits, kVnni>(load(from + half * kTileColumns));
                else return Bytes<kBits, kVnni>((load(from) >> (4 * half)) & 0x0f0f0f0fu);
            };
            const Bytes<kBits, kVnni> columns[2][C] = {{bytes(0, 0), bytes(0, 1)}, {bytes(1, 0), bytes(1, 1)}};
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const U four[] = {broadcast(a.four(r, k)), broadcast(a.four(r, k + 4))};
#pragma GCC unroll 2
                for (int c = 0; c < C; ++c)
#pragma GCC unroll 2
                    for (int half = 0; half < 2; ++half) {
                        I& sum = sums[half * (kChains - 1)][r][c];
                        sum = columns[half][c].dot(four[half], sum);
                    }
            }
            values += kTileColumns * kBits;
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) {
                I sum = sums[0][r][c];
                if constexpr (kChains == 2) sum += sums[1][r][c];
                acc[r][c] = __builtin_convertvector(sum, F) * a.scale(r);
            }
    }

    // body(values), of each group of a row in turn. header: of the first group, which has room for scales,
    // offsets and scaled sums of so many rows; group_bytes: from one to the next; see RowGroup.
    template <typename T, typename Body>
    static void loop_groups(const Inputs<T>& x, const GroupFormat& format, int64_t num_k, char* header,
                            int rows, int r, int64_t group_bytes, const Body& body) {
        const int64_t group = format.group, shared = std::max(group, kLeastRowGroup);
        int8_t values[kMaxGroup];
        T inputs[kMaxGroup];
        float scale = 0.0f;
        for (int64_t k = 0; k < num_k; k += group, header += group_bytes) {
            if (k % shared == 0)
                scale = quantize_values(x.some(k, std::min(shared, num_k - k), shared, inputs), shared, values);
            const int8_t* from = values + k % shared;
            const int32_t sum = sum_bytes(from, group);
            reinterpret_cast<float*>(header)[r] = scale;
            const int zero = format.zero() - (kSigned<kBits, kVnni> ? 128 : 0);
            reinterpret_cast<int32_t*>(header)[rows + r] = -zero * sum;
            reinterpret_cast<float*>(header)[2 * rows + r] = -scale * static_cast<float>(sum);
            body(from, header);
        }
    }

    // One row into its lines of R packed rows.
    template <int R, typename T>
    static void pack(const Inputs<T>& x, const GroupFormat& format, int64_t num_k, int r, char* to) {
        const int64_t group = format.group;
        loop_groups(x, format, num_k, to, R, r, RowGroup<R>::bytes(group), [&](const int8_t* from, char* header) {
            for (int64_t i = 0; i < group; i += 4) std::memcpy(header + 12 * R + i * R + 4 * r, from + i, 4);
        });
    }
};

}  // namespace nanocore
