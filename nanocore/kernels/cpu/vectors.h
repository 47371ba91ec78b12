// Vectors of float32 lanes, and the two storage types of activations, for one instruction set.
//
// Everything is compiled once for each instruction set (see build.py), so kLanes is a constant.
// GCC and Clang vector types give all arithmetic; intrinsics appear where these have no word for it.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace nanocore {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Whether products of bfloat16 are summed in pairs. NANOCORE_EMULATE_DOT does it in software, so
// that everything around the instruction can be tested on machines that lack it.
#if defined(__AVX512BF16__) || defined(NANOCORE_EMULATE_DOT)
constexpr bool kDot = true;
#else
constexpr bool kDot = false;
#endif

typedef float F __attribute__((vector_size(kLanes * 4)));
typedef int32_t I __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U __attribute__((vector_size(kLanes * 4)));
typedef uint16_t H __attribute__((vector_size(kLanes * 2)));
typedef int8_t B __attribute__((vector_size(kLanes)));

// The same, at any address.
typedef float FAny __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t UAny __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t HAny __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef int8_t BAny __attribute__((vector_size(kLanes), aligned(1), may_alias));

#define NANOCORE_INLINE inline __attribute__((always_inline))

struct BFloat16 {
    uint16_t bits;
};

NANOCORE_INLINE F broadcast(float x) { return x - F{}; }
NANOCORE_INLINE U broadcast(uint32_t x) { return x - U{}; }

NANOCORE_INLINE U lane_ids() {
    U ids;
    for (int i = 0; i < kLanes; ++i) ids[i] = i;
    return ids;
}

NANOCORE_INLINE F lane_numbers() {
    F numbers;
    for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(i);
    return numbers;
}

// a * b + c, rounded once where the instruction set has it. Never left to the compiler's
// contraction: results must not depend on which copy of an inlined loop computes them.
NANOCORE_INLINE F multiply_add(F a, F b, F c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

NANOCORE_INLINE F low_halves(U pairs) { return reinterpret_cast<F>(pairs << 16); }
NANOCORE_INLINE F high_halves(U pairs) { return reinterpret_cast<F>(pairs & 0xffff0000u); }

// c plus both products of each lane's pair of bfloat16.
NANOCORE_INLINE F dot_pairs(U a, U b, F c) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
    return multiply_add(low_halves(a), low_halves(b),
                        multiply_add(high_halves(a), high_halves(b), c));
#endif
}

// A bit for each lane whose comparison, all ones or all zeros, is true.
NANOCORE_INLINE uint32_t lane_bits(I is_true) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(is_true));
#elif defined(__AVX2__)
    return _mm256_movemask_ps(reinterpret_cast<__m256>(is_true));
#else
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= (static_cast<uint32_t>(is_true[i]) >> 31) << i;
    return bits;
#endif
}

NANOCORE_INLINE F maximum(F a, F b) { return a > b ? a : b; }

// The other half of the lanes of a pair, a quad and so on, in place of one's own.
template <int distance>
NANOCORE_INLINE F swap_lanes(F x) {
    I from;
    for (int i = 0; i < kLanes; ++i) from[i] = i ^ distance;
    return __builtin_shuffle(x, from);
}

// All lanes in one, two at a time; of integers, so in whatever order.
template <typename Combine>
NANOCORE_INLINE int32_t reduce_lanes(I x, const Combine& combine) {
    const auto swapped = [&](auto distance) {
        return reinterpret_cast<I>(swap_lanes<distance.value>(reinterpret_cast<F>(x)));
    };
    if constexpr (kLanes >= 16) x = combine(x, swapped(std::integral_constant<int, 8>{}));
    if constexpr (kLanes >= 8) x = combine(x, swapped(std::integral_constant<int, 4>{}));
    x = combine(x, swapped(std::integral_constant<int, 2>{}));
    x = combine(x, swapped(std::integral_constant<int, 1>{}));
    return x[0];
}

// In a fixed order, as all sums are.
NANOCORE_INLINE float sum_lanes(F x) {
    if constexpr (kLanes >= 16) x += swap_lanes<8>(x);
    if constexpr (kLanes >= 8) x += swap_lanes<4>(x);
    x += swap_lanes<2>(x);
    x += swap_lanes<1>(x);
    return x[0];
}

// A sum in double precision, of the lower and the upper lanes.
struct DoubleSum {
    typedef double D __attribute__((vector_size(kLanes * 4)));
    D low = {}, high = {};

    NANOCORE_INLINE void add(F x) {
#if defined(__AVX512F__)
        // (The forms without a mask make GCC 12 warn of its own headers.)
        low += _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, x, 0));
        high += _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, x, 1));
#elif defined(__AVX2__)
        low += _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        high += _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
#else
        low += D{x[0], x[1]};
        high += D{x[2], x[3]};
#endif
    }

    double total() const {
        double sum = 0.0;
        for (int i = 0; i < kLanes / 2; ++i) sum += low[i];
        for (int i = 0; i < kLanes / 2; ++i) sum += high[i];
        return sum;
    }
};

NANOCORE_INLINE float max_lanes(F x) {
    if constexpr (kLanes >= 16) x = maximum(x, swap_lanes<8>(x));
    if constexpr (kLanes >= 8) x = maximum(x, swap_lanes<4>(x));
    x = maximum(x, swap_lanes<2>(x));
    x = maximum(x, swap_lanes<1>(x));
    return x[0];
}

// GCC converts between lanes of unlike sizes piece by piece where it is not told the instruction.
NANOCORE_INLINE U widened(H x) {
#if defined(__AVX512F__)
    return reinterpret_cast<U>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(x)));
#elif defined(__AVX2__)
    return reinterpret_cast<U>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(x)));
#else
    return __builtin_convertvector(x, U);
#endif
}
NANOCORE_INLINE H low_words(U x) {
#if defined(__AVX512F__)
    return reinterpret_cast<H>(_mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(x)));
#else
    return __builtin_convertvector(x, H);
#endif
}

// Round to nearest even; NaN stays NaN.
NANOCORE_INLINE H to_nearest_bfloat16(F x) {
    U bits = reinterpret_cast<U>(x);
    U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return low_words(x == x ? rounded : broadcast(uint32_t{0x7fc0}));
}

// The same where the instruction is lacking; with it subnormals become 0.
NANOCORE_INLINE H to_bfloat16(F x) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<H>(_mm512_cvtneps_pbh(x));
#else
    return to_nearest_bfloat16(x);
#endif
}

NANOCORE_INLINE float to_float(float x) { return x; }
NANOCORE_INLINE float to_float(BFloat16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

NANOCORE_INLINE void from_float(float x, float* to) { *to = x; }
NANOCORE_INLINE void from_float(float x, BFloat16* to) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to->bits = x == x ? static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)
                      : uint16_t{0x7fc0};
}

// A vector of what is stored.
NANOCORE_INLINE F load(const float* from) { return *reinterpret_cast<const FAny*>(from); }
NANOCORE_INLINE F load(const BFloat16* from) {
    return reinterpret_cast<F>(widened(*reinterpret_cast<const HAny*>(from)) << 16);
}
NANOCORE_INLINE I load_integers(const int8_t* from) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return reinterpret_cast<I>(_mm512_maskz_cvtepi8_epi32(0xffff, bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return reinterpret_cast<I>(_mm256_cvtepi8_epi32(bytes));
#else
    return __builtin_convertvector(B(*reinterpret_cast<const BAny*>(from)), I);
#endif
}
// The lowest byte of each lane.
NANOCORE_INLINE void store_bytes(I x, int8_t* to) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(x));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#elif defined(__AVX2__)
    const __m256i first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                           0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i bytes = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(x), first);
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), both);
#else
    *reinterpret_cast<BAny*>(to) = __builtin_convertvector(x, B);
#endif
}
NANOCORE_INLINE F load(const int8_t* from) {
    return __builtin_convertvector(load_integers(from), F);
}
NANOCORE_INLINE U load(const uint32_t* from) { return *reinterpret_cast<const UAny*>(from); }

NANOCORE_INLINE void store(F x, float* to) { *reinterpret_cast<FAny*>(to) = x; }
NANOCORE_INLINE void store(F x, BFloat16* to) {
    *reinterpret_cast<HAny*>(to) = to_bfloat16(x);
}

// The same bits with every instruction set, and torch's.
NANOCORE_INLINE void store_nearest(F x, float* to) { store(x, to); }
NANOCORE_INLINE void store_nearest(F x, BFloat16* to) {
    *reinterpret_cast<HAny*>(to) = to_nearest_bfloat16(x);
}

// What x becomes when it is stored and loaded again.
NANOCORE_INLINE F rounded(F x, const float*) { return x; }
NANOCORE_INLINE F rounded(F x, const BFloat16*) {
    return reinterpret_cast<F>(widened(to_bfloat16(x)) << 16);
}

// The first `count` values; the other lanes are 0.
template <typename T>
__attribute__((noinline)) F load_some(const T* from, int count) {
    T lanes[kLanes] = {};
    std::memcpy(lanes, from, count * sizeof(T));
    return load(lanes);
}

template <typename T>
__attribute__((noinline)) void store_some(F x, T* to, int count) {
    T lanes[kLanes];
    store(x, lanes);
    std::memcpy(to, lanes, count * sizeof(T));
}

// exp(x) for x up to 88, to about one unit in the last place; 0 below -87.3, where it would be
// subnormal. NaN stays NaN.
NANOCORE_INLINE F exponential(F x) {
    const F least = broadcast(-87.33654f);
    const F clamped = x < least ? least : x;
    // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 * 2^23 leaves n in the lowest bits.
    const F magic = broadcast(12582912.0f);
    const F shifted = multiply_add(clamped, broadcast(1.44269504f), magic);
    const F n = shifted - magic;
    F r = multiply_add(n, broadcast(-0.693359375f), clamped);
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    F p = broadcast(1.9875691500e-4f);
    p = multiply_add(p, r, broadcast(1.3981999507e-3f));
    p = multiply_add(p, r, broadcast(8.3334519073e-3f));
    p = multiply_add(p, r, broadcast(4.1665795894e-2f));
    p = multiply_add(p, r, broadcast(1.6666665459e-1f));
    p = multiply_add(p, r, broadcast(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    // p * 2^n: its exponent is raised by n.
    const F power = reinterpret_cast<F>(reinterpret_cast<U>(p) + (reinterpret_cast<U>(shifted) << 23));
    return x < least ? F{} : power;
}

NANOCORE_INLINE F sigmoid(F x) {
    const F most = broadcast(88.0f);
    return 1.0f / (exponential(-x > most ? most : -x) + 1.0f);
}

NANOCORE_INLINE F tanh_of(F x) {
    // Of |x|, where the exponential cannot overflow.
    F magnitude = x < 0.0f ? -x : x;
    F e = exponential(magnitude * -2.0f);
    F t = (1.0f - e) / (1.0f + e);
    // For small x the difference above loses its digits; x - x^3/3 + 2x^5/15 has them.
    F square = x * x;
    F series = magnitude * multiply_add(square,
                                        multiply_add(square, broadcast(2.0f / 15.0f),
                                                     broadcast(-1.0f / 3.0f)),
                                        broadcast(1.0f));
    t = magnitude < 0.04f ? series : t;
    return x < 0.0f ? -t : t;
}

}  // namespace nanocore
