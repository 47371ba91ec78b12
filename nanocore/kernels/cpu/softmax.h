// How scores become the weights of a softmax that are multiplied with values.
//
// Where products sum pairs of bfloat16 weights are rounded to 8 bits: 2^x of 13 is enough for them.

#pragma once

#include "multiply.h"

namespace nanocore {

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// 2^x for x up to 127, with a relative error of 1.1e-4 and of 0 at x = 0; 0 below -126 or so. NaN
// stays NaN. On [0, 1) it is a polynomial whose largest error is least, with its ends exact.
NANOCORE_INLINE F power_of_two(F x) {
#if defined(__AVX512F__)
    const F part = _mm512_maskz_reduce_ps(0xffff, x, 0x01);  // x - floor(x); 0 of -infinity
#else
    const F least = broadcast(-126.0f), magic = broadcast(12582912.0f);
    const F clamped = x < least ? least : x;
    const F shifted = (clamped - 0.5f) + magic;
    const F part = clamped - (shifted - magic);
#endif
    F p = multiply_add(part, broadcast(0.07826797f), broadcast(0.22630768f));
    p = multiply_add(p, part, broadcast(0.69542435f));
    p = multiply_add(p, part, broadcast(1.0f));
#if defined(__AVX512F__)
    return _mm512_maskz_scalef_ps(0xffff, p, x);  // p * 2^floor(x)
#else
    const F power =
        reinterpret_cast<F>(reinterpret_cast<U>(p) + (reinterpret_cast<U>(shifted) << 23));
    return x < least ? F{} : power;
#endif
}

// Two vectors as bfloat16, one after the other.
NANOCORE_INLINE void store_two(F first, F second, float* to) {
#if defined(__AVX512BF16__)
    *reinterpret_cast<UAny*>(to) = reinterpret_cast<U>(_mm512_cvtne2ps_pbh(second, first));
#else
    store(first, reinterpret_cast<BFloat16*>(to));
    store(second, reinterpret_cast<BFloat16*>(to) + kLanes);
#endif
}

// Weights of one row, in lines of its packed rows: those of `unit` times each score, relative to
// base; the sum of them is added to `sum`. value_scale: what stored weights are multiplied by.
template <bool paired, bool quantized, int R>
NANOCORE_INLINE F weigh(const float* scores, int count, float unit, float base,
                        const float* value_scale, F sum, float* to) {
    const F factor = broadcast(unit), from = broadcast(-base);
    const auto scaled = [&](F weight, int i) {
        // What no row sees may have a scale of anything.
        if constexpr (quantized) return weight == 0.0f ? weight : weight * load(value_scale + i);
        else return weight;
    };
    if constexpr (paired) {
#pragma GCC unroll 4
        for (int i = 0; i < count; i += 2 * kLanes) {
            const int j = i + kLanes;
            const F first = power_of_two(multiply_add(load(scores + i), factor, from));
            const F second = power_of_two(multiply_add(load(scores + j), factor, from));
            sum += first + second;
            constexpr int kValues = 2 * kChunk;
            store_two(scaled(first, i), scaled(second, j),
                      to + i / kValues * (R * kChunk) + i % kValues / 2);
        }
    } else {
        for (int i = 0; i < count; i += kLanes) {
            const F weight = exponential(multiply_add(load(scores + i), factor, from));
            sum += weight;
            store(scaled(weight, i), to + i / kChunk * (R * kChunk) + i % kChunk);
        }
    }
    return sum;
}

}  // namespace nanocore
