// One layer's paged K and V: how they lie in a block, and int8 ones with their scales.
//
// Of each block and KV head K is [D / 2][S][2] and V is [S / 2][D][2] in bfloat16, [D][S] and
// [S][D] in float32 and int8: as `multiply` reads columns, which are keys in one product and
// dimensions in the other. Eight bits are exact in bfloat16 and float32, so int8 is widened to what
// the activations are, and scales are applied to sums and weights in float32. A token is stored as
// the numbers that kv_quantization.py defines; scales are [K][S].

#pragma once

#include "multiply.h"

namespace nanocore {

constexpr int kBlockUnit = 16;  // so many keys lie in one block: its size is a multiple

template <typename T>
struct PagedKV {
    void *k, *v;
    BFloat16 *k_scale, *v_scale;  // of int8; null where values have the type of activations
    int64_t num_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t block_bytes;  // from a block to the next: other layers may lie between

    static constexpr int kPair = sizeof(T) == 2 ? 2 : 1;

    bool is_quantized() const { return k_scale != nullptr; }

    // Where a head's values begin in a block; base: k or v.
    template <typename Value>
    Value* block(void* base, int64_t block_id, int64_t head) const {
        return reinterpret_cast<Value*>(static_cast<char*>(base) + block_id * block_bytes) +
               head * block_size * head_dim;
    }

    BFloat16* scales(BFloat16* base, int64_t block_id, int64_t head) const {
        char* start = reinterpret_cast<char*>(base) + block_id * block_bytes;
        return reinterpret_cast<BFloat16*>(start) + head * block_size;
    }

    // Of values in pairs, what shares a slot's pair. Both are written by whoever has the even one:
    // next is the value of the odd one if that comes in the same step. If not it is null, and zeros
    // are written: they are multiplied by 0, and what an earlier request left might be infinite.
    // is_stored: of an odd one, its value came with the one before it.
    struct PairMate {
        const T* next;
        bool is_stored;
    };

    // All heads' K and V of a token, one head after the other; mate: of the first head.
    void put(const T* key, const T* value, int64_t slot, PairMate mate) const {
        const int64_t block_id = slot / block_size, s = slot % block_size;
        for (int64_t head = 0; head < num_heads; ++head, key += head_dim, value += head_dim) {
            if (is_quantized()) {
                put_integers(key, value, block_id, s, head);
                continue;
            }
            put_key(key, block<T>(k, block_id, head), s);
            if (kPair == 1 || !mate.is_stored)
                put_value(value, mate.next, block<T>(v, block_id, head), s);
            if (mate.next) mate.next += head_dim;
        }
    }

   private:
    void put_key(const T* key, T* to, int64_t s) const {
        to += s * kPair;
        for (int64_t d = 0; d < head_dim; d += kPair)
            std::memcpy(to + d * block_size, key + d, kPair * sizeof(T));
    }

    void put_value(const T* value, const T* next, T* to, int64_t s) const {
        if constexpr (kPair == 1) {
            std::memcpy(to + s * head_dim, value, head_dim * sizeof(T));
        } else {
            float* pairs = reinterpret_cast<float*>(to + s / 2 * 2 * head_dim);
            for (int64_t d = 0; d < head_dim; d += kLanes, pairs += kLanes) {
                const U own = reinterpret_cast<U>(load(value + d));  // the upper halves
                U first = own >> 16, second = {};
                if (s % 2) {
                    first = *reinterpret_cast<const UAny*>(pairs) & 0xffffu;
                    second = own;
                } else if (next) {
                    second = reinterpret_cast<U>(load(next + d));
                }
                *reinterpret_cast<UAny*>(pairs) = first | second;
            }
        }
    }

    void put_integers(const T* key, const T* value, int64_t block_id, int64_t s,
                      int64_t head) const {
        int8_t* to_k = block<int8_t>(k, block_id, head) + s;
        int8_t* to_v = block<int8_t>(v, block_id, head) + s * head_dim;
        const float key_scale = scale_of(key, scales(k_scale, block_id, head) + s);
        const float value_scale = scale_of(value, scales(v_scale, block_id, head) + s);
        for (int64_t d = 0; d < head_dim; d += kLanes) {
            const B keys = quantized(load(key + d), key_scale);
            for (int i = 0; i < kLanes; ++i) to_k[(d + i) * block_size] = keys[i];
            const B values = quantized(load(value + d), value_scale);
            std::memcpy(to_v + d, &values, sizeof values);
        }
    }

    // The largest magnitude becomes 127. Of what is not finite the scale is NaN.
    float scale_of(const T* x, BFloat16* scale) const {
        F largest = {}, nothing = {};
        for (int64_t d = 0; d < head_dim; d += kLanes) {
            const F value = load(x + d);
            largest = maximum(value < 0.0f ? -value : value, largest);
            nothing += value * 0.0f;  // NaN of infinities, too
        }
        const float least = std::numeric_limits<float>::min();  // zeros need a scale, too
        from_float(max_lanes(largest) / 127.0f, scale);
        if (to_float(*scale) < least) from_float(least, scale);
        const float sum = sum_lanes(nothing);
        if (!(sum == 0.0f)) from_float(sum, scale);
        return to_float(*scale);
    }

    // To the nearest even; 0 if the scale is NaN.
    static NANOCORE_INLINE B quantized(F x, float scale) {
        const F magic = broadcast(12582912.0f), value = ((x / scale) + magic) - magic;
        return __builtin_convertvector(
            __builtin_convertvector(value == value ? value : F{}, I), B);
    }
};

// A row of int8, or for bfloat16 a pair of rows, in the type of activations: columns of `multiply`.
template <typename T>
NANOCORE_INLINE void widen_rows(const int8_t* rows, int64_t stride, int count, float* to) {
    for (int i = 0; i < count; i += kLanes) {
        const F first = load(rows + i);
        if constexpr (sizeof(T) == 2) {
            const F second = load(rows + stride + i);
            const U pairs = (reinterpret_cast<U>(first) >> 16) | reinterpret_cast<U>(second);
            *reinterpret_cast<UAny*>(to + i) = pairs;
        } else {
            store(first, to + i);
        }
    }
}

// So many floats of memory 16 widened keys, or values, take.
template <typename T>
constexpr int64_t widened_floats(int64_t head_dim) {
    return kBlockUnit * head_dim / PagedKV<T>::kPair;
}

// 16 keys, from `keys` on in their block, to [D][16] or pairs of it; ahead: memory to fetch.
template <typename T>
inline void widen_keys(const int8_t* keys, int64_t block_size, int64_t head_dim, const char* ahead,
                       float* to) {
    constexpr int kPair = PagedKV<T>::kPair;
    for (int64_t d = 0; d < head_dim; d += kPair, to += kBlockUnit) {
        if (d % 4 == 0) prefetch_line(ahead + d * kBlockUnit);
        widen_rows<T>(keys + d * block_size, block_size, kBlockUnit, to);
    }
}

// The values of 16 keys to [16][D] or pairs of it.
template <typename T>
inline void widen_values(const int8_t* values, int64_t head_dim, float* to) {
    constexpr int kPair = PagedKV<T>::kPair;
    for (int s = 0; s < kBlockUnit; s += kPair, to += head_dim)
        widen_rows<T>(values + s * head_dim, head_dim, static_cast<int>(head_dim), to);
}

}  // namespace nanocore
