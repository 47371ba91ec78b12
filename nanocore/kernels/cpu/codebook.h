// Products of float rows with grouped weights of four or eight bits, whose numbers are looked up.
//
// The same tiles as integers.h, for activations that stay as they are: four bits stand for one of sixteen
// values in a table (a bfloat16 each), eight for a number itself. Of eight k the rows are packed in
// the order in which a word of four bits gives pairs: see kOrder.

#pragma once

#include "groups.h"

namespace nanocore {

// The k of eight that come one after the other: bytes of a word apart by two are pairs.
constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// Sixteen values as products take them.
struct Codebook {
#if defined(__AVX512BF16__)
    __m512i pairs;  // bfloat16, twice, so that the fifth bit of an index does not matter
#endif
    alignas(64) float values[16];

    explicit Codebook(const float* from) {
        std::memcpy(values, from, sizeof values);
#if defined(__AVX512BF16__)
        BFloat16 twice[32];
        for (int i = 0; i < 32; ++i) from_float(from[i % 16], twice + i);
        std::memcpy(&pairs, twice, sizeof pairs);
#endif
    }

    // The values of the lowest four bits of each lane.
    NANOCORE_INLINE F look_up(U index) const {
#if defined(__AVX512F__)
        return _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(index), load(values));
#elif defined(__AVX2__)
        const __m256i at = reinterpret_cast<__m256i>(index);
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(load(values), at),
                                _mm256_permutevar8x32_ps(load(values + 8), at),
                                reinterpret_cast<__m256>(index << 28));
#else
        F found;
        for (int i = 0; i < kLanes; ++i) found[i] = values[index[i] & 15u];
        return found;
#endif
    }

    // Of the lowest four bits of each half of a lane, as a pair of bfloat16.
    NANOCORE_INLINE U look_up_pairs(U index) const {
#if defined(__AVX512BF16__)
        return reinterpret_cast<U>(_mm512_permutexvar_epi16(reinterpret_cast<__m512i>(index), pairs));
#else
        return (reinterpret_cast<U>(look_up(index)) >> 16) | reinterpret_cast<U>(look_up(index >> 16));
#endif
    }
};

// Rows of T, in float32 or in pairs of bfloat16. A group of R rows is R sums of values, then R times
// the values in kOrder.
template <typename T, int kBits>
struct CodebookGroups {
    static constexpr bool kPaired = kPairedRows<T, Kind::kBFloat16>;
    Codebook codebook;

    template <int R>
    static int64_t bytes(int64_t group) { return R * 4 * (1 + units(group)); }
    static int64_t units(int64_t group) { return kPaired ? group / 2 : group; }

    template <int R>
    static float minus_sum(const char* rows, int r) { return reinterpret_cast<const float*>(rows)[r]; }

    template <int R, int C>
    NANOCORE_INLINE void multiply(const char* rows, const char* values, int64_t group,
                                  PrefetchCursor& ahead, F (&acc)[R][C]) const {
        const float* a = reinterpret_cast<const float*>(rows) + R;
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) acc[r][c] = F{};
        for (int64_t k = 0; k < group; k += 8) {
#pragma GCC unroll 2
            for (int i = 0; i < kBits / 4; ++i) ahead.advance();
            const float* at = a + (kPaired ? k / 2 : k) * R;
#pragma GCC unroll 8
            for (int i = 0; i < 8; i += 2) {
                U pairs[C];
                F low[C], high[C];
#pragma GCC unroll 2
                for (int c = 0; c < C; ++c) {
                    // The halves of each lane begin with the numbers of kOrder[i] and kOrder[i + 1].
                    const U index = word(values, kOrder[i], c);
                    if constexpr (kBits == 4 && kPaired) pairs[c] = codebook.look_up_pairs(index);
                    else {
                        low[c] = number(index);
                        high[c] = number(index >> 16);
                        if constexpr (kPaired)  // eight bits are exact in bfloat16
                            pairs[c] = (reinterpret_cast<U>(low[c]) >> 16) | reinterpret_cast<U>(high[c]);
                    }
                }
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    if constexpr (kPaired) {
                        const U row = broadcast(reinterpret_cast<const uint32_t*>(at)[i / 2 * R + r]);
#pragma GCC unroll 2
                        for (int c = 0; c < C; ++c) acc[r][c] = dot_pairs(row, pairs[c], acc[r][c]);
                    } else {
                        const F first = broadcast(at[i * R + r]), second = broadcast(at[(i + 1) * R + r]);
#pragma GCC unroll 2
                        for (int c = 0; c < C; ++c)
                            acc[r][c] = multiply_add(second, high[c], multiply_add(first, low[c], acc[r][c]));
                    }
                }
            }
            values += kTileColumns * kBits;
        }
    }

    // One row into its lines of R packed rows.
    template <int R>
    static void pack(const Inputs<T>& x, const GroupFormat& format, int64_t num_k, int r, char* to) {
        const int64_t group = format.group;
        for (int64_t start = 0; start < num_k; start += group, to += bytes<R>(group)) {
            T inputs[kMaxGroup];
            const T* values = x.some(start, std::min(group, num_k - start), group, inputs);
            float sum = 0.0f;
            for (int64_t k = 0; k < group; ++k) sum += to_float(values[k]);
            reinterpret_cast<float*>(to)[r] = -sum;
            float* row = reinterpret_cast<float*>(to) + R + r;
            for (int64_t k = 0; k < group; ++k) {
                const T value = values[k / 8 * 8 + kOrder[k % 8]];
                if constexpr (kPaired) reinterpret_cast<T*>(row + k / 2 * R)[k % 2] = value;
                else row[k * R] = to_float(value);
            }
        }
    }

   private:
    // The word of a column that has k of eight, k in its lowest bits.
    NANOCORE_INLINE U word(const char* values, int k, int c) const {
        if constexpr (kBits == 4)
            return load(reinterpret_cast<const uint32_t*>(values) + c * kLanes) >> (k % 4 * 8 + k / 4 * 4);
        else
            return load(reinterpret_cast<const uint32_t*>(values) + k / 4 * kTileColumns + c * kLanes) >>
                   (k % 4 * 8);
    }

    NANOCORE_INLINE F number(U index) const {
        if constexpr (kBits == 4) return codebook.look_up(index);
        else return __builtin_convertvector(reinterpret_cast<I>(index & 255u), F) - codebook.values[0];
    }
};

}  // namespace nanocore
