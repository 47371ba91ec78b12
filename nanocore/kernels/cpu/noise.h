// Noise of tokens, and what a row of logits is read by.
//
// The noise is gumbel_noise.py's, a hash of (seed, position, token id), to the rounding of its
// logarithms.

#pragma once

#include "rows.h"

namespace nanocore {

NANOCORE_INLINE U mix32(U x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

inline uint64_t mix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Natural logarithm of positive normal numbers, to about one unit in the last place (Cephes).
NANOCORE_INLINE F logarithm(F x) {
    const U bits = reinterpret_cast<U>(x);
    F exponent = __builtin_convertvector(reinterpret_cast<I>(bits >> 23) - 126, F);
    F m = reinterpret_cast<F>((bits & 0x007fffffu) | 0x3f000000u);  // in [0.5, 1)
    const auto is_small = m < 0.707106781f;
    exponent = is_small ? exponent - 1.0f : exponent;
    m = is_small ? m + m - 1.0f : m - 1.0f;
    const F square = m * m;
    F p = broadcast(7.0376836292e-2f);
    p = multiply_add(p, m, broadcast(-1.1514610310e-1f));
    p = multiply_add(p, m, broadcast(1.1676998740e-1f));
    p = multiply_add(p, m, broadcast(-1.2420140846e-1f));
    p = multiply_add(p, m, broadcast(1.4249322787e-1f));
    p = multiply_add(p, m, broadcast(-1.6668057665e-1f));
    p = multiply_add(p, m, broadcast(2.0000714765e-1f));
    p = multiply_add(p, m, broadcast(-2.4999993993e-1f));
    p = multiply_add(p, m, broadcast(3.3333331174e-1f));
    F y = m * square * p;
    y = multiply_add(exponent, broadcast(-2.12194440e-4f), y);
    y = multiply_add(square, broadcast(-0.5f), y);
    return multiply_add(exponent, broadcast(0.693359375f), m + y);
}

// What a row's noise is a hash of, beside token ids.
struct NoiseKey {
    uint32_t low, high;

    NoiseKey(int64_t seed, int64_t position) {
        const uint64_t key = mix64(mix64(static_cast<uint64_t>(seed)) ^
                                   static_cast<uint64_t>(position));
        low = static_cast<uint32_t>(key);
        high = static_cast<uint32_t>(key >> 32);
    }
};

// Uniform in (0, 1): at least 2^-32, and at most 1 - 2^-24.
NANOCORE_INLINE F uniform_noise(U token_ids, NoiseKey key) {
    U bits = mix32(mix32(token_ids * 0x9e3779b9u ^ key.low) ^ key.high) >> 1;
    F uniform = (__builtin_convertvector(reinterpret_cast<I>(bits), F) + 0.5f) * 0x1p-31f;
    const F most = broadcast(1.0f - 0x1p-24f);
    return uniform > most ? most : uniform;
}

// Standard Gumbel noise, the greater the smaller `uniform` is: from -2.9 to 22.
NANOCORE_INLINE F gumbel_noise(F uniform) {
    // log(1 - u): what the difference loses is put back by the quotient.
    const F rest = 1.0f - uniform, lost = 1.0f - rest;
    const F log_rest = lost == 0.0f ? -uniform : logarithm(rest) * (uniform / lost);
    return -logarithm(-log_rest);
}

// A vector of a row's logits from number i on; minus infinity where it has no more.
NANOCORE_INLINE F logits_at(const float* row, int64_t i, int64_t size) {
    if (i + kLanes <= size) return load(row + i);
    const int count = static_cast<int>(size - i);
    const F value = load_some(row + i, count);
    const F none = broadcast(-std::numeric_limits<float>::infinity());
    return lane_ids() < static_cast<uint32_t>(count) ? value : none;
}

// Notes of values whether one was no number, for next to nothing beside a maximum: a sum of them is
// none then, and too small to overflow otherwise. (Also where one is infinite and one minus so.)
struct NumberCheck {
    F sum = {};

    NANOCORE_INLINE void add(F x) { sum = multiply_add(x, broadcast(0x1p-32f), sum); }
    bool holds() const { return !std::isnan(sum_lanes(sum)); }
};

// What a row without a token is told by: its best logit is not finite, or one is not a number.
constexpr int64_t kNoToken = -1;

}  // namespace nanocore
