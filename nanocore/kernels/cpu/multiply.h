// The inner loop that linear layers and attention share: a few rows times a few vectors of columns.
//
// acc[r][c] += sum over k of a(r, k) * b(k, c), for one k after the other. So the bits of a result
// depend on its row and its column alone: not on which rows are computed with it, in how many
// pieces, or how many there are. This is what makes the backend batch-invariant.
//
// The k of bfloat16 come in pairs, side by side in 32 bits. With kDot the pairs of a are multiplied
// as they are; without it a is float32 and the pairs of b are taken apart.

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "vectors.h"

namespace nanocore {

// What the columns hold.
// kIntegers and kCodebook have groups of k (groups.h); rows are quantized to integers for the first.
enum class Kind : int { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kIntegers = 3, kCodebook = 4 };

constexpr int kTileColumns = 32;  // of a linear layer's weight

// Rows that a tile has at most: as many accumulators as there are registers for.
constexpr int kMaxRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;

// The same of attention, which has the halves of a pair of bfloat16 in registers, too.
constexpr int kMaxQueries = kLanes == 8 ? 4 : kMaxRows;

// Vectors of columns that a tile of R rows has: several chains of additions hide their latency.
template <int R>
constexpr int kColumns = R <= 2 ? 4 : 2;

// Whether rows of T are kept as pairs of bfloat16, to be multiplied by this kind of columns.
template <typename T, Kind kind>
constexpr bool kPairedRows = kDot && kind != Kind::kFloat32 && sizeof(T) == 2;

// Packed rows lie in chunks of 16 units: R rows of a chunk, then of the next. A unit is 32 bits, a
// pair of bfloat16 or a float32. So packing copies whole vectors, and a tile reads R lines at once.
constexpr int kChunk = 16;

// Units of K values, rounded up to whole chunks.
template <typename T, Kind kind>
NANOCORE_INLINE int64_t num_units(int64_t num_k) {
    const int64_t units = kPairedRows<T, kind> ? (num_k + 1) / 2 : num_k;
    return (units + kChunk - 1) / kChunk * kChunk;
}

// Rows as `pack_rows` leaves them.
template <int R>
struct PackedRows {
    const float* data;

    NANOCORE_INLINE const float* at(int r, int64_t unit) const {
        return data + unit / kChunk * (R * kChunk) + r * kChunk + unit % kChunk;
    }
};

// Rows of `stride` units, each contiguous.
template <int stride>
struct StridedRows {
    const float* data;

    NANOCORE_INLINE const float* at(int r, int64_t unit) const { return data + r * stride + unit; }
};

// To the first-level cache; any address may be given.
NANOCORE_INLINE void prefetch_line(const void* address) { __builtin_prefetch(address, 0, 3); }

// Memory to be fetched while a product is computed: some of it with every pair of k, and after
// some pairs elsewhere.
struct Prefetch {
    const char* from = nullptr;
    int64_t bytes_per_pair = 0;
    int64_t num_pairs = std::numeric_limits<int64_t>::max();
    const char* then = nullptr;

    NANOCORE_INLINE void at(int64_t pair) const {
        const char* start = pair < num_pairs ? from + pair * bytes_per_pair
                                             : then + (pair - num_pairs) * bytes_per_pair;
        prefetch_line(start);
        prefetch_line(start + bytes_per_pair / 2);
    }

    // What is for so many pairs.
    NANOCORE_INLINE void at(int64_t pair, int64_t count) const {
        const char* start = pair < num_pairs ? from + pair * bytes_per_pair
                                             : then + (pair - num_pairs) * bytes_per_pair;
        for (int64_t i = 0; i < count * bytes_per_pair; i += 64) prefetch_line(start + i);
    }
};

// The same, one after the other.
struct PrefetchCursor {
    const char* next;
    int64_t step, left;
    const char* then;

    explicit PrefetchCursor(const Prefetch& ahead)
        : next(ahead.num_pairs > 0 ? ahead.from : ahead.then),
          step(ahead.bytes_per_pair),
          left(ahead.num_pairs),
          then(ahead.then) {}

    NANOCORE_INLINE void advance() {
        prefetch_line(next);
        prefetch_line(next + step / 2);
        prefetch_line(next + step - 1);  // with scales it is a little more than two lines
        next = --left == 0 ? then : next + step;
    }
};

struct NoPrefetch {
    NANOCORE_INLINE void at(int64_t) const {}
};

// a: see PackedRows. b(k, c): the address of column vector c at k, for bfloat16 at the pair k / 2.
// num_k: rounded up to pairs where columns are of bfloat16 or int8.
template <typename T, Kind kind, int R, int C, typename Rows, typename Address,
          typename Ahead = NoPrefetch>
NANOCORE_INLINE void multiply(const Rows& a, const Address& b, int num_k, F (&acc)[R][C],
                              const Ahead& ahead = {}) {
    constexpr bool paired = kPairedRows<T, kind>;
    if constexpr (kind == Kind::kFloat32) {
        for (int k = 0; k < num_k; ++k) {
            ahead.at(k / 2);
            F column[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) column[c] = load(static_cast<const float*>(b(k, c)));
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                F row = broadcast(*a.at(r, k));
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
                    U row = broadcast(*reinterpret_cast<const uint32_t*>(a.at(r, k / 2)));
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c) acc[r][c] = dot_pairs(row, column[c], acc[r][c]);
                }
            } else {
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    F row = broadcast(*a.at(r, k));
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c) acc[r][c] = multiply_add(row, low[c], acc[r][c]);
                }
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    F row = broadcast(a.at(r, k)[1]);
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c) acc[r][c] = multiply_add(row, high[c], acc[r][c]);
                }
            }
        }
    }
}

// body(std::integral_constant<int, R>), with the least R that tiles are compiled for and that is
// not below `rows`; these are `most` at most.
template <int most = kMaxRows, typename Body>
NANOCORE_INLINE void with_rows(int rows, const Body& body) {
    if (rows == 1) return body(std::integral_constant<int, 1>{});
    if (rows == 2) return body(std::integral_constant<int, 2>{});
    if constexpr (most > 4) {
        if (rows > 8) return body(std::integral_constant<int, most>{});
        if (rows > 4) return body(std::integral_constant<int, std::min(most, 8)>{});
    }
    return body(std::integral_constant<int, 4>{});
}

template <typename T, Kind kind>
constexpr int64_t kChunkValues = kPairedRows<T, kind> ? 2 * kChunk : kChunk;

// A chunk of a row of T; from `count` values on it is 0.
template <typename T, Kind kind>
NANOCORE_INLINE void pack_chunk(const T* from, int64_t count, float* to) {
    T last[kChunkValues<T, kind>];
    if (count < kChunkValues<T, kind>) {
        std::memset(last, 0, sizeof last);
        std::memcpy(last, from, count * sizeof(T));
        from = last;
    }
    if constexpr (kPairedRows<T, kind>) std::memcpy(to, from, kChunk * sizeof(float));
    else
        for (int i = 0; i < kChunk; i += kLanes) store(load(from + i), to + i);
}

// `rows` rows of T, `stride` apart, to a panel of so many lines, of which `to` is the first. num_k is
// that of `num_units`.
template <typename T, Kind kind>
NANOCORE_INLINE void pack_rows(const T* x, int64_t stride, int rows, int64_t num_k, int lines, float* to) {
    // Chunk by chunk: rows are fetched side by side, and those of the next panel, too.
    for (int64_t k = 0; k < num_k; k += kChunkValues<T, kind>, to += lines * kChunk)
        for (int r = 0; r < rows; ++r) {
            const T* from = x + r * stride + k;
            prefetch_line(from + lines * stride);
            pack_chunk<T, kind>(from, num_k - k, to + r * kChunk);
        }
}

}  // namespace nanocore
