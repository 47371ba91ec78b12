// The inner loop that linear layers and attention share: a few rows times a few vectors of columns.
//
// acc[r][c] += sum over k of a(r, k) * b(k, c), for one k after the other. So the bits of a result
// depend on its row and its column alone: not on which rows are computed with it, in how many
// pieces, or how many there are. This is what makes the backend batch-invariant.
//
// The k of bfloat16 come in pairs, side by side in 32 bits. With kDot the pairs of a are multiplied
// as they are; without it a is float32 and the pairs of b are taken apart.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace nanocore {

// What the columns hold.
enum class Kind : int { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

// Rows that a tile has at most: as many accumulators as there are registers for.
constexpr int kMaxRows = kLanes == 16 ? 12 : 4;

// Vectors of columns that a tile of R rows has: several chains of additions hide their latency.
template <int R>
constexpr int kColumns = R <= 2 ? 4 : 2;

// Whether rows of T are kept as pairs of bfloat16, to be multiplied by this kind of columns.
template <typename T, Kind kind>
constexpr bool kPairedRows = kDot && kind != Kind::kFloat32 && sizeof(T) == 2;

// Units that K values take in rows: 32 bits each, a pair or a float32. All but float32 columns have
// an even number of k.
template <typename T, Kind kind>
NANOCORE_INLINE int64_t num_units(int64_t num_k) {
    if (kind == Kind::kFloat32) return num_k;
    return kPairedRows<T, kind> ? (num_k + 1) / 2 : (num_k + 1) / 2 * 2;
}

// To the second-level cache; any address may be given.
NANOCORE_INLINE void prefetch_line(const void* address) { __builtin_prefetch(address, 0, 2); }

// Memory to be fetched while a product is computed: some of it with every pair of k.
struct Prefetch {
    const char* from = nullptr;
    int64_t bytes_per_pair = 0;

    NANOCORE_INLINE void at(int64_t pair) const {
        prefetch_line(from + pair * bytes_per_pair);
        prefetch_line(from + pair * bytes_per_pair + bytes_per_pair / 2);
    }
};

struct NoPrefetch {
    NANOCORE_INLINE void at(int64_t) const {}
};

// a: units; a(r, u) is a[r * row_step + u * unit_step]. b(k, c): the address of column vector c at
// k, for bfloat16 at the pair k / 2. num_k: of bfloat16 rounded up to pairs.
template <typename T, Kind kind, int R, int C, int row_step, int unit_step, typename Address,
          typename Ahead = NoPrefetch>
NANOCORE_INLINE void multiply(const float* a, const Address& b, int num_k, F (&acc)[R][C],
                              const Ahead& ahead = {}) {
    constexpr bool paired = kPairedRows<T, kind>;
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(a);
    if constexpr (kind == Kind::kFloat32) {
        for (int k = 0; k < num_k; ++k) {
            ahead.at(k / 2);
            F column[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) column[c] = load(static_cast<const float*>(b(k, c)));
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                F row = broadcast(a[r * row_step + k * unit_step]);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) acc[r][c] = multiply_add(row, column[c], acc[r][c]);
            }
        }
    } else {
        for (int k = 0; k < num_k; k += 2) {
            ahead.at(k / 2);
            U column[C];
            F low[C], high[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                if constexpr (kind == Kind::kInt8) {
                    low[c] = load(static_cast<const int8_t*>(b(k, c)));
                    high[c] = load(static_cast<const int8_t*>(b(k + 1, c)));
                    // Eight bits are exact in bfloat16.
                    if constexpr (paired)
                        column[c] = (reinterpret_cast<U>(low[c]) >> 16) |
                                    reinterpret_cast<U>(high[c]);
                } else {
                    column[c] = load(static_cast<const uint32_t*>(b(k / 2, c)));
                    low[c] = low_halves(column[c]);
                    high[c] = high_halves(column[c]);
                }
            }
            if constexpr (paired) {
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    U row = broadcast(pairs[r * row_step + k / 2 * unit_step]);
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c) acc[r][c] = dot_pairs(row, column[c], acc[r][c]);
                }
            } else {
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    F row = broadcast(a[r * row_step + k * unit_step]);
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c) acc[r][c] = multiply_add(row, low[c], acc[r][c]);
                }
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    F row = broadcast(a[r * row_step + (k + 1) * unit_step]);
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c) acc[r][c] = multiply_add(row, high[c], acc[r][c]);
                }
            }
        }
    }
}

// body(std::integral_constant<int, R>), with the least R that tiles are compiled for and that is
// not below `rows`.
template <typename Body>
NANOCORE_INLINE void with_rows(int rows, const Body& body) {
    if (rows == 1) return body(std::integral_constant<int, 1>{});
    if (rows == 2) return body(std::integral_constant<int, 2>{});
    if constexpr (kMaxRows == 4) return body(std::integral_constant<int, 4>{});
    else {
        if (rows <= 4) return body(std::integral_constant<int, 4>{});
        if (rows <= 8) return body(std::integral_constant<int, 8>{});
        return body(std::integral_constant<int, 12>{});
    }
}

// Rows of T as units [num_units][R]; rows from `rows` on, and k from num_k on, are 0.
template <typename T, Kind kind, int R>
inline void pack_rows(const T* x, int64_t stride, int rows, int64_t num_k, float* to) {
    constexpr bool paired = kPairedRows<T, kind>;
    constexpr int64_t per_unit = paired ? 2 : 1, block = 64;
    const int64_t units = num_units<T, kind>(num_k), whole = num_k / per_unit;
    uint32_t* pairs = reinterpret_cast<uint32_t*>(to);
    // In blocks, so that what is written stays in the first-level cache from row to row.
    for (int64_t start = 0; start < units; start += block) {
        const int64_t stop = start + block < units ? start + block : units;
        for (int r = 0; r < R; ++r) {
            const T* row = x + r * stride;
            const int64_t full = r >= rows ? start : stop < whole ? stop : whole;
            int64_t u = start;
            if constexpr (paired) {
                for (; u < full; ++u) std::memcpy(&pairs[u * R + r], row + 2 * u, 4);
                for (; u < stop; ++u)
                    pairs[u * R + r] = r < rows && 2 * u < num_k ? row[2 * u].bits : 0u;
            } else {
                for (; u < full; ++u) to[u * R + r] = to_float(row[u]);
                for (; u < stop; ++u) to[u * R + r] = 0.0f;
            }
        }
    }
}

}  // namespace nanocore
