// Causal attention over the paged KV cache, for decodes and prefill chunks alike.
//
// One item is some query tokens of a sequence, with all query heads that share a KV head: these are
// the rows of two products with the keys and values of that head, 64 keys at a time, with an online
// softmax between them (FlashAttention-2: Dao 2023). The 64 keys always begin at a multiple of 64,
// whatever the chunk, so a row's results do not depend on how its sequence was cut into steps.
// Blocks are read where they lie.

#pragma once

#include "rows.h"

namespace nanocore {

constexpr int kKeys = 64;       // of one softmax update
constexpr int kBlockUnit = 16;  // so many keys lie in one block: its size is a multiple
constexpr int kLargestRows = (kMaxRows + kLanes - 1) / kLanes * kLanes;
constexpr int kQueryRows = 48;  // of one item, if its query heads allow

template <typename T>
struct AttentionCall {
    const T* q;  // [T, q_stride], heads first
    int64_t q_stride;
    T* out;  // [T, num_heads * head_dim]
    int64_t num_heads;
    PagedKV<T> cache;
    float scale;
    int64_t window;
    float softcap;
    int64_t num_seqs;
    const int64_t* query_start;  // [num_seqs + 1]
    const int32_t* seq_lens;
    const int32_t* block_table;
    int64_t block_table_stride;
    int64_t rows;  // with padding

    static constexpr Kind kKind = sizeof(T) == 2 ? Kind::kBFloat16 : Kind::kFloat32;
    static constexpr bool kPaired = kPairedRows<T, kKind>;
    static constexpr int kKeyVectors = kKeys / kLanes;

    void run(Workspace& workspace) const {
        const int64_t end = query_start[num_seqs];
        if (end < rows)
            std::memset(static_cast<void*>(out + end * num_heads * cache.head_dim), 0,
                        (rows - end) * num_heads * cache.head_dim * sizeof(T));
        const int64_t tokens = tokens_of_item();
        // Items of a sequence, counted by the sequences before it.
        std::vector<int64_t>& first_item = workspace.first_item;
        first_item.assign(1, 0);
        for (int64_t i = 0; i < num_seqs; ++i) {
            const int64_t count = query_start[i + 1] - query_start[i];
            first_item.push_back(first_item.back() + (count + tokens - 1) / tokens);
        }
        const int64_t num_items = first_item.back();
        workspace.pool.loop(num_items * cache.num_heads, [&](int64_t index, int thread) {
            // Long contexts first: the last ones of a chunk, so that threads end together.
            const int64_t item = num_items - 1 - index / cache.num_heads;
            const int64_t seq = std::upper_bound(first_item.begin(), first_item.end(), item) -
                                first_item.begin() - 1;
            const int64_t start = query_start[seq] + (item - first_item[seq]) * tokens;
            const int64_t stop = std::min(start + tokens, query_start[seq + 1]);
            attend(seq, start, stop, index % cache.num_heads, workspace.panel[thread]);
        });
    }

   private:
    int64_t group() const { return num_heads / cache.num_heads; }

    int64_t tokens_of_item() const { return std::max<int64_t>(1, kQueryRows / group()); }

    // Tokens [start, stop) of sequence seq and the query heads of one KV head.
    void attend(int64_t seq, int64_t start, int64_t stop, int64_t kv_head, Scratch& scratch) const {
        const int64_t num_rows = (stop - start) * group(), head_dim = cache.head_dim;
        const int64_t units = num_units<T, kKind>(head_dim);
        float* memory = scratch.of(kMaxRows * (units + head_dim + kKeys + 2) * sizeof(float));
        for (int64_t first = 0; first < num_rows; first += kMaxRows) {
            const int count = static_cast<int>(std::min<int64_t>(kMaxRows, num_rows - first));
            with_rows(count, [&](auto R) {
                Panel<R> work(*this, memory, seq, start, first, count, kv_head);
                work.run();
            });
        }
    }

    template <int R>
    struct Panel {
        const AttentionCall& call;
        const int64_t head_dim, group, units;
        float *queries, *result, *scores, *weights_sum, *largest;
        const int32_t* table;
        int64_t kv_head, count;
        int64_t last_key[R];  // of each row: its own position
        T* out[R];

        Panel(const AttentionCall& call, float* memory, int64_t seq, int64_t start, int64_t first,
              int count, int64_t kv_head)
            : call(call),
              head_dim(call.cache.head_dim),
              group(call.group()),
              units(num_units<T, kKind>(head_dim)),
              queries(memory),
              result(queries + R * units),
              scores(result + R * head_dim),
              weights_sum(scores + R * kKeys),
              largest(weights_sum + R),
              table(call.block_table + seq * call.block_table_stride),
              kv_head(kv_head),
              count(count) {
            const int64_t past = call.seq_lens[seq] - (call.query_start[seq + 1] - call.query_start[seq]);
            for (int r = 0; r < R; ++r) {
                const int64_t row = first + std::min<int64_t>(r, count - 1);
                const int64_t token = start + row / group, head = kv_head * group + row % group;
                last_key[r] = past + token - call.query_start[seq];
                out[r] = call.out + (token * call.num_heads + head) * head_dim;
                pack_row<T, kKind, R>(call.q + token * call.q_stride + head * head_dim, head_dim,
                                      queries + r * kChunk);
                weights_sum[r] = 0.0f;
                largest[r] = -std::numeric_limits<float>::infinity();
            }
            std::fill(result, result + R * head_dim, 0.0f);
        }

        void run() {
            const int64_t first_key =
                call.window ? std::max<int64_t>(0, last_key[0] - call.window + 1) : 0;
            const int64_t end = last_key[R - 1] + 1;  // rows are in the order of positions
            for (int64_t key = first_key / kKeys * kKeys; key < end; key += kKeys) {
                const int num_keys = static_cast<int>(std::min<int64_t>(kKeys, end - key));
                score(key, num_keys);
                update_softmax(key);
                add_values(key, num_keys, end);
            }
            for (int r = 0; r < count; ++r) {
                const F inverse = broadcast(1.0f / weights_sum[r]);
                for (int64_t d = 0; d < head_dim; d += kLanes)
                    store(load(result + r * head_dim + d) * inverse, out[r] + d);
            }
        }

        const float* keys_at(int64_t position) const {
            return reinterpret_cast<const float*>(
                       call.cache.block(call.cache.k, table[position / call.cache.block_size], kv_head)) +
                   position % call.cache.block_size;
        }

        const float* values_at(int64_t position) const {
            const int64_t block_size = call.cache.block_size;
            const T* block = call.cache.block(call.cache.v, table[position / block_size], kv_head);
            return reinterpret_cast<const float*>(block + position % block_size * head_dim);
        }

        // The values of some vectors of keys, a line of each with every pair of dimensions.
        template <int C>
        struct ValuesAhead {
            const char* from[C];

            NANOCORE_INLINE void at(int64_t pair) const {
                for (int c = 0; c < C; ++c) prefetch_line(from[c] + pair * 4 * kLanes);
            }
        };

        // scores[r][i] = q_r . k_(key + i), of whole vectors; those past num_keys mean nothing.
        __attribute__((noinline)) void score(int64_t key, int num_keys) {
            constexpr int C = std::min(kColumns<R>, kKeyVectors);
            for (int first = 0; first < num_keys; first += C * kLanes) {
                const float* columns[C];
                ValuesAhead<C> ahead;
                for (int c = 0; c < C; ++c) {
                    // Beyond the last key the table has no block: the last vector is repeated.
                    const int64_t at = std::min(first + c * kLanes, (num_keys - 1) / kLanes * kLanes);
                    columns[c] = keys_at(key + at);
                    ahead.from[c] = reinterpret_cast<const char*>(values_at(key + at));
                }
                F acc[R][C] = {};
                multiply<T, kKind, R, C>(
                    PackedRows<R>{queries},
                    [&](int64_t k, int c) -> const void* {
                        return columns[c] + k * call.cache.block_size;
                    },
                    static_cast<int>(head_dim), acc, ahead);
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c)
                        store(acc[r][c], scores + r * kKeys + first + c * kLanes);
            }
        }

        // Scores become weights relative to each row's largest score so far.
        __attribute__((noinline)) void update_softmax(int64_t key) {
            constexpr float infinity = std::numeric_limits<float>::infinity();
            alignas(64) float base[kLargestRows], factor[kLargestRows] = {};
            for (int r = 0; r < R; ++r) {
                float* row = scores + r * kKeys;
                const int64_t upper = last_key[r] - key;
                const int64_t lower = call.window ? upper - call.window : -1;
                const bool is_whole = upper >= kKeys - 1 && lower < 0;
                F logits[kKeyVectors], most = broadcast(-infinity);
#pragma GCC unroll 16
                for (int i = 0; i < kKeyVectors; ++i)
                    logits[i] = load(row + i * kLanes) * call.scale;
                if (call.softcap)
                    for (F& logit : logits) logit = tanh_of(logit / call.softcap) * call.softcap;
                if (!is_whole)
                    for (int i = 0; i < kKeyVectors; ++i) {
                        const F index = lane_numbers() + static_cast<float>(i * kLanes);
                        const auto hidden = (index > static_cast<float>(upper)) |
                                            (index <= static_cast<float>(lower));
                        logits[i] = hidden ? broadcast(-infinity) : logits[i];
                    }
#pragma GCC unroll 16
                for (int i = 0; i < kKeyVectors; ++i) {
                    store(logits[i], row + i * kLanes);
                    most = maximum(logits[i], most);
                }
                const float now = std::max(largest[r], max_lanes(most));
                // With no key yet in the window there is nothing to be relative to.
                base[r] = now == -infinity ? 0.0f : now;
                factor[r] = largest[r] - base[r];
                largest[r] = now;
            }
            for (int r = 0; r < R; r += kLanes) store(exponential(load(factor + r)), factor + r);
            for (int r = 0; r < R; ++r) {
                float* row = scores + r * kKeys;
                F weights[kKeyVectors], sum = {};
#pragma GCC unroll 16
                for (int i = 0; i < kKeyVectors; ++i)
                    weights[i] = exponential(load(row + i * kLanes) - base[r]);
#pragma GCC unroll 16
                for (int i = 0; i < kKeyVectors; ++i) {
                    sum += weights[i];
                    if constexpr (kPaired)
                        store(weights[i], reinterpret_cast<BFloat16*>(row) + i * kLanes);
                    else store(weights[i], row + i * kLanes);
                }
                weights_sum[r] = weights_sum[r] * factor[r] + sum_lanes(sum);
                if (factor[r] == 1.0f) continue;
                for (int64_t d = 0; d < head_dim; d += kLanes)
                    store(load(result + r * head_dim + d) * factor[r], result + r * head_dim + d);
            }
        }

        // result[r] += weights of r times the values of these keys.
        void add_values(int64_t key, int num_keys, int64_t end) {
            const float* values[kKeys / kBlockUnit];
            for (int i = 0; i * kBlockUnit < num_keys; ++i) {
                const int64_t position = key + i * kBlockUnit;
                values[i] = values_at(position);
                // The first lines of the next keys: from there on the hardware sees the stream.
                if (position + kKeys < end)
                    for (int u = 0; u < 8; ++u)
                        prefetch_line(keys_at(position + kKeys) + u * call.cache.block_size);
            }
            int64_t d = 0;
            constexpr int C = R <= 2 ? 4 : 2;
            for (; d + C * kLanes <= head_dim; d += C * kLanes)
                add_value_columns<C>(values, num_keys, d);
            for (; d < head_dim; d += kLanes) add_value_columns<1>(values, num_keys, d);
        }

        template <int C>
        __attribute__((noinline)) void add_value_columns(const float* const* values, int num_keys,
                                                         int64_t d) {
            F acc[R][C];
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    acc[r][c] = load(result + r * head_dim + d + c * kLanes);
            for (int first = 0; first < num_keys; first += kBlockUnit) {
                const float* columns = values[first / kBlockUnit] + d;
                multiply<T, kKind, R, C>(
                    StridedRows<kKeys>{kPaired ? scores + first / 2 : scores + first},
                    [&](int64_t k, int c) -> const void* {
                        return columns + k * head_dim + c * kLanes;
                    },
                    std::min(kBlockUnit, num_keys - first), acc);
            }
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    store(acc[r][c], result + r * head_dim + d + c * kLanes);
        }
    };
};

}  // namespace nanocore
