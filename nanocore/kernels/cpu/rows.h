// Kernels that work on one token's row at a time: embedding, norms, rotation, gates, best token.
//
// A row's results depend on that row alone, in a fixed order of additions.

#pragma once

#include "kv_cache.h"
#include "linear.h"
#include "packing.h"

namespace nanocore {

constexpr int64_t kItemValues = 16 << 10;  // of rows: what a thread claims at a time

// body(row) for all rows, several to an item.
template <typename Body>
inline void loop_rows(Pool& pool, int64_t rows, int64_t row_values, const Body& body) {
    const int64_t group = std::max<int64_t>(1, kItemValues / std::max<int64_t>(1, row_values));
    pool.loop((rows + group - 1) / group, [&](int64_t item, int) {
        const int64_t stop = std::min(rows, (item + 1) * group);
        for (int64_t row = item * group; row < stop; ++row) body(row);
    });
}

// a + b, rounded once.
template <typename T>
inline void add_values(const T* a, const T* b, int64_t count, T* out) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store_nearest(load(a + i) + load(b + i), out + i);
    for (; i < count; ++i) from_float(to_float(a[i]) + to_float(b[i]), out + i);
}

template <typename T>
struct AddCall {
    const T *a, *b;
    int64_t size;
    T* out;
    int64_t rows;

    void run(Workspace& workspace) const {
        loop_rows(workspace.pool, rows, size, [&](int64_t row) {
            add_values(a + row * size, b + row * size, size, out + row * size);
        });
    }
};

// The weight of a norm. In float32 beside activations of bfloat16 the product is rounded once;
// otherwise the normed value is rounded before it, too.
struct NormWeight {
    const void* data = nullptr;
    bool is_float = false;
    float eps = 0.0f;
};

// x * factor * weight.
template <typename T, typename W>
inline void scale_row(const T* x, F factor, const W* weight, int64_t size, T* out) {
    const auto product = [&](F value, F of) {
        const F normed = value * factor;
        return (std::is_same_v<W, T> ? rounded(normed, out) : normed) * of;
    };
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(product(load(x + i), load(weight + i)), out + i);
    if (const int rest = static_cast<int>(size - i))
        store_some(product(load_some(x + i, rest), load_some(weight + i, rest)), out + i, rest);
}

// x / rms(x) * weight.
template <typename T>
inline void rms_norm_row(const T* x, const NormWeight& weight, int64_t size, T* out) {
    F sums[4] = {};  // so many additions are under way at once
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes)
        for (int s = 0; s < 4; ++s) {
            const F value = load(x + i + s * kLanes);
            sums[s] = multiply_add(value, value, sums[s]);
        }
    for (; i < size; i += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, size - i));
        const F value = count == kLanes ? load(x + i) : load_some(x + i, count);
        sums[0] = multiply_add(value, value, sums[0]);
    }
    const float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    const F factor = broadcast(1.0f / std::sqrt(sum / size + weight.eps));
    if (weight.is_float) scale_row(x, factor, static_cast<const float*>(weight.data), size, out);
    else scale_row(x, factor, static_cast<const T*>(weight.data), size, out);
}

template <typename T>
struct NormCall {
    const T* x;
    int64_t x_stride;
    T* residual;  // x is added to it first, if there is one
    NormWeight weight;
    int64_t size;
    T* out;
    int64_t rows;

    void run(Workspace& workspace) const {
        loop_rows(workspace.pool, rows, size, [&](int64_t row) {
            const T* from = x + row * x_stride;
            if (residual) {
                T* sum = residual + row * size;
                int64_t i = 0;
                for (; i + kLanes <= size; i += kLanes) store(load(sum + i) + load(from + i), sum + i);
                for (; i < size; ++i) from_float(to_float(sum[i]) + to_float(from[i]), sum + i);
                from = sum;
            }
            rms_norm_row(from, weight, size, out + row * size);
        });
    }
};

// act(first half) * second half.
template <typename T>
struct GateCall {
    const T* x;
    int64_t size;
    Gate gate;
    T* out;
    int64_t rows;

    void run(Workspace& workspace) const {
        loop_rows(workspace.pool, rows, 4 * size, [&](int64_t row) {
            const T *first = x + row * 2 * size, *second = first + size;
            T* to = out + row * size;
            int64_t i = 0;
            for (; i + kLanes <= size; i += kLanes)
                store(gated(gate, load(first + i), load(second + i), to), to + i);
            if (const int rest = static_cast<int>(size - i))
                store_some(
                    gated(gate, load_some(first + i, rest), load_some(second + i, rest), to),
                    to + i, rest);
        });
    }
};

// Token ids of a step: a column of them, or places in the table of all rows' tokens.
struct TokenIds {
    const int64_t* column;  // or null
    const int32_t* table;
    int64_t table_stride;
    const int64_t* rows;
    const int64_t* positions;

    int64_t operator[](int64_t i) const {
        return column ? column[i] : table[rows[i] * table_stride + positions[i]];
    }
};

template <typename T>
struct EmbeddingCall {
    TokenIds tokens;
    LinearWeight weight;
    int64_t first_token;
    float factor;
    T* out;
    int64_t rows;

    void run(Workspace& workspace) const {
        loop_rows(workspace.pool, rows, 8 * weight.in_features, [&](int64_t row) {
            const int64_t feature = tokens[row] - first_token;
            T* to = out + row * weight.in_features;
            if (feature >= 0 && feature < weight.out_features)
                unpack_feature(weight, feature, factor, to);
            else std::memset(to, 0, weight.in_features * sizeof(T));  // another rank's token
        });
    }
};

// Norms of Q and K where the model has them, their rotation, and K and V to the cache. qkv: rows of
// all query heads, all KV heads' K, then V; Q is changed in place.
template <typename T>
struct RopeCall {
    T* qkv;
    int64_t num_heads;
    PagedKV<T> cache;
    NormWeight q_norm, k_norm;
    const T *cos, *sin;  // [positions, rotary_half]
    int64_t rotary_half;
    const int64_t* positions;
    const int64_t* slots;
    int64_t rows;

    void run(Workspace& workspace) const {
        const int64_t head_dim = cache.head_dim, kv_heads = cache.num_heads;
        const int64_t stride = (num_heads + 2 * kv_heads) * head_dim;
        loop_rows(workspace.pool, rows, 2 * stride, [&](int64_t row) {
            T* q = qkv + row * stride;
            T *k = q + num_heads * head_dim, *v = k + kv_heads * head_dim;
            for (int64_t head = 0; head < num_heads; ++head)
                turn(q + head * head_dim, q_norm, positions[row]);
            for (int64_t head = 0; head < kv_heads; ++head)
                turn(k + head * head_dim, k_norm, positions[row]);
            const int64_t slot = slots[row];
            if (slot < 0) return;
            const bool is_odd = slot % 2, has_next = !is_odd && row + 1 < rows;
            const T* next = has_next && slots[row + 1] == slot + 1 ? v + stride : nullptr;
            const bool is_stored = is_odd && row > 0 && slots[row - 1] == slot - 1;
            cache.put(k, v, slot, {next, is_stored});
        });
    }

   private:
    void turn(T* x, const NormWeight& norm, int64_t position) const {
        if (norm.data) rms_norm_row(x, norm, cache.head_dim, x);
        const T *cosines = cos + position * rotary_half, *sines = sin + position * rotary_half;
        T *first = x, *second = x + rotary_half;
        int64_t i = 0;
        for (; i + kLanes <= rotary_half; i += kLanes) {
            F a = load(first + i), b = load(second + i);
            F c = load(cosines + i), s = load(sines + i);
            store(a * c - b * s, first + i);
            store(b * c + a * s, second + i);
        }
        for (; i < rotary_half; ++i) {
            const float a = to_float(first[i]), b = to_float(second[i]);
            const float c = to_float(cosines[i]), s = to_float(sines[i]);
            from_float(a * c - b * s, first + i);
            from_float(b * c + a * s, second + i);
        }
    }
};

// out[row] = x[index[row]].
template <typename T>
struct SelectCall {
    const T* x;
    int64_t size;
    const int64_t* index;
    T* out;
    int64_t rows;

    void run(Workspace&) const {
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(out + row * size, x + index[row] * size, size * sizeof(T));
    }
};

// cap * tanh(x / cap), in place.
struct SoftcapCall {
    float* x;
    int64_t size;
    float cap;
    int64_t rows;

    void run(Workspace& workspace) const {
        loop_rows(workspace.pool, rows, size, [&](int64_t row) {
            float* values = x + row * size;
            int64_t i = 0;
            for (; i + kLanes <= size; i += kLanes)
                store(tanh_of(load(values + i) / cap) * cap, values + i);
            if (const int rest = static_cast<int>(size - i))
                store_some(tanh_of(load_some(values + i, rest) / cap) * cap, values + i, rest);
        });
    }
};

}  // namespace nanocore
