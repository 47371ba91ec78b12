// Causal attention over the paged KV cache, for decodes and prefill chunks alike.
//
// One item is some query tokens of a sequence, with all query heads that share a KV head: these are
// the rows of two products with the keys and values of that head, 128 keys at a time, with an online
// softmax between them (FlashAttention-2: Dao 2023). Rows are in panels of as many as a product
// takes, and all panels of an item pass by the same keys before the next come. The 128 keys always
// begin at a multiple of 128, whatever the chunk, so a row's results do not depend on how its
// sequence was cut into steps. Blocks are read where they lie, but int8 is widened once an item.

#pragma once

#include "rows.h"
#include "softmax.h"

namespace nanocore {

constexpr int kKeys = 128;  // of one softmax update
constexpr int kUnits = kKeys / kBlockUnit;
constexpr int kQueryRows = 48;  // of one item, if its query heads allow
constexpr int kPanels = kQueryRows / kMaxRows;

// Some keys and their values, 16 in a unit, as products read them; `count` units are there.
struct KeyTile {
    int64_t key;
    int count;
    const char* keys[kUnits];
    const char* values[kUnits];
    int64_t key_stride;        // bytes between pairs of dimensions, or between dimensions
    const float* key_scale;    // of int8; else null
    const float* value_scale;  // of int8
};

template <typename T>
struct AttentionCall {
    const T* q;  // [T, q_stride], heads first
    int64_t q_stride;
    T* out;  // [T, num_heads * head_dim]
    int64_t num_heads;
    PagedKV<T> cache;
    float scale;  // above 0
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

    // Some rows of an item, and what they have seen so far.
    struct Panel {
        int count;  // of rows that are somebody's
        float *queries, *result, *sums;
        int64_t first_key, end;  // of keys that a row sees
        int64_t last_key[kMaxRows];
        float base[kMaxRows];  // the largest logit so far, times log2(e) if weights are powers of 2
        T* out[kMaxRows];
    };

    // Where a sequence's keys lie, a tile after the other.
    class Tiles {
       public:
        Tiles(const PagedKV<T>& cache, const int32_t* table, int64_t head, int64_t key, int64_t end,
              float* widened)
            : cache_(cache), table_(table + key / cache.block_size), head_(head),
              slot_(key % cache.block_size), key_(key), end_(end), widened_(widened) {}

        // The tile is not there (count 0) beyond the end.
        KeyTile next() {
            KeyTile tile{key_, 0, {}, {}, cache_.block_size * 4, nullptr, nullptr};
            for (; tile.count < kUnits && key_ < end_; ++tile.count, key_ += kBlockUnit) {
                const int i = tile.count;
                if (cache_.is_quantized()) {
                    tile.keys[i] = cache_.template block<char>(cache_.k, *table_, head_) + slot_;
                    tile.values[i] = cache_.template block<char>(cache_.v, *table_, head_) +
                                     slot_ * cache_.head_dim;
                    key_scales_[i] = cache_.scales(cache_.k_scale, *table_, head_) + slot_;
                    value_scales_[i] = cache_.scales(cache_.v_scale, *table_, head_) + slot_;
                } else {
                    const T* keys = cache_.template block<T>(cache_.k, *table_, head_);
                    const T* values = cache_.template block<T>(cache_.v, *table_, head_);
                    tile.keys[i] = reinterpret_cast<const char*>(keys + slot_ * PagedKV<T>::kPair);
                    tile.values[i] = reinterpret_cast<const char*>(values + slot_ * cache_.head_dim);
                }
                slot_ += kBlockUnit;
                if (slot_ == cache_.block_size) slot_ = 0, ++table_;
            }
            return tile;
        }

        // Of int8 the tile that `next` gave last, widened; it is there until the next is.
        KeyTile widened(const KeyTile& tile) const {
            KeyTile wide = tile;
            const int64_t head_dim = cache_.head_dim, floats = widened_floats<T>(head_dim);
            float* scales = widened_ + 2 * kUnits * floats;
            for (int i = 0; i < tile.count; ++i) {
                float *keys = widened_ + i * floats, *values = keys + kUnits * floats;
                widen_keys<T>(reinterpret_cast<const int8_t*>(tile.keys[i]), cache_.block_size,
                              head_dim, tile.values[i], keys);
                widen_values<T>(reinterpret_cast<const int8_t*>(tile.values[i]), head_dim, values);
                wide.keys[i] = reinterpret_cast<const char*>(keys);
                wide.values[i] = reinterpret_cast<const char*>(values);
                for (int j = 0; j < kBlockUnit; j += kLanes) {
                    store(load(key_scales_[i] + j), scales + i * kBlockUnit + j);
                    store(load(value_scales_[i] + j), scales + kKeys + i * kBlockUnit + j);
                }
            }
            for (int i = tile.count * kBlockUnit; i < kKeys; ++i) scales[i] = scales[kKeys + i] = 0;
            wide.key_stride = kBlockUnit * 4;
            wide.key_scale = scales, wide.value_scale = scales + kKeys;
            return wide;
        }

        static int64_t num_floats(int64_t head_dim) {
            return 2 * kUnits * widened_floats<T>(head_dim) + 2 * kKeys;
        }

       private:
        const PagedKV<T>& cache_;
        const int32_t* table_;
        int64_t head_, slot_, key_, end_;
        float* widened_;
        const BFloat16 *key_scales_[kUnits], *value_scales_[kUnits];
    };

    int64_t row_floats() const {
        return num_units<T, kKind>(cache.head_dim) + cache.head_dim + kLanes;
    }

    // Tokens [start, stop) of sequence seq and the query heads of one KV head.
    void attend(int64_t seq, int64_t start, int64_t stop, int64_t kv_head, Scratch& scratch) const {
        const int64_t num_rows = (stop - start) * group();
        const int64_t wide = cache.is_quantized() ? Tiles::num_floats(cache.head_dim) : 0;
        const int64_t of_rows = kQueryRows * row_floats();
        float* memory = scratch.of((of_rows + 2 * kMaxRows * kKeys + wide) * sizeof(float));
        for (int64_t first = 0; first < num_rows; first += kQueryRows) {
            Panel panels[kPanels];
            int num_panels = 0;
            const int64_t stop_row = std::min<int64_t>(num_rows, first + kQueryRows);
            for (int64_t row = first; row < stop_row; row += kMaxRows) {
                Panel& panel = panels[num_panels];
                panel.count = static_cast<int>(std::min<int64_t>(kMaxRows, stop_row - row));
                float* of_panel = memory + num_panels++ * kMaxRows * row_floats();
                with_rows(panel.count,
                          [&](auto R) { begin<R>(panel, of_panel, seq, start, row, kv_head); });
            }
            float* scores = memory + of_rows;
            pass_keys(panels, num_panels, block_table + seq * block_table_stride, kv_head, scores,
                      scores + 2 * kMaxRows * kKeys);
            for (int p = 0; p < num_panels; ++p) finish(panels[p]);
        }
    }

    template <int R>
    void begin(Panel& panel, float* memory, int64_t seq, int64_t start, int64_t first,
               int64_t kv_head) const {
        const int64_t head_dim = cache.head_dim, heads = group();
        const int64_t past = seq_lens[seq] - query_start[seq + 1];
        panel.queries = memory;
        panel.result = memory + R * num_units<T, kKind>(head_dim);
        panel.sums = panel.result + R * head_dim;
        int64_t token = start + first / heads, head = first % heads;
        for (int r = 0; r < R; ++r) {
            const int64_t column = (kv_head * heads + head) * head_dim;
            panel.last_key[r] = past + token;
            panel.out[r] = out + token * num_heads * head_dim + column;
            pack_row<T, kKind, R>(q + token * q_stride + column, head_dim,
                                  panel.queries + r * kChunk);
            panel.base[r] = -std::numeric_limits<float>::infinity();
            if (r + 1 < panel.count && ++head == heads) head = 0, ++token;
        }
        std::memset(panel.result, 0, R * (head_dim + kLanes) * sizeof(float));
        panel.first_key = window ? std::max<int64_t>(0, panel.last_key[0] - window + 1) : 0;
        panel.end = panel.last_key[R - 1] + 1;  // rows are in the order of positions
    }

    void pass_keys(Panel* panels, int num_panels, const int32_t* table, int64_t kv_head,
                   float* scores, float* widened) const {
        const int64_t start = panels[0].first_key / kKeys * kKeys, end = panels[num_panels - 1].end;
        Tiles tiles(cache, table, kv_head, start, end, widened);
        KeyTile tile = tiles.next();
        while (tile.count) {
            KeyTile as_read = tile;
            if (cache.is_quantized()) as_read = tiles.widened(tile);
            const KeyTile next = tiles.next();
            for (int p = 0; p < num_panels; ++p) {
                Panel& panel = panels[p];
                if (tile.key >= panel.end || tile.key + kKeys <= panel.first_key) continue;
                // Fetched ahead: by one panel what it will need itself, by several the next tile.
                const KeyTile& ahead = num_panels == 1 || !next.count ? as_read : next;
                const char* const* from = (num_panels == 1) == (p == 0) ? ahead.values : ahead.keys;
                const int count = p < 2 ? ahead.count : 0;
                with_rows(panel.count, [&](auto R) {
                    step<R>(panel, as_read, {from, count}, num_panels == 1 ? &next : nullptr,
                            scores);
                });
            }
            tile = next;
        }
    }

    void finish(const Panel& panel) const {
        const int64_t head_dim = cache.head_dim;
        for (int r = 0; r < panel.count; ++r) {
            const F inverse = broadcast(1.0f / sum_lanes(load(panel.sums + r * kLanes)));
            for (int64_t d = 0; d < head_dim; d += kLanes)
                store(load(panel.result + r * head_dim + d) * inverse, panel.out[r] + d);
        }
    }

    // Units to fetch while scores are computed.
    struct UnitsAhead {
        const char* const* units;
        int count;
    };

    // A line of each of some units with every pair of dimensions.
    template <int C>
    struct LinesAhead {
        const char* from[C];

        NANOCORE_INLINE void at(int64_t pair) const {
            for (int c = 0; c < C; ++c) prefetch_line(from[c] + pair * 64);
        }
    };

    template <int R>
    void step(Panel& panel, const KeyTile& tile, const UnitsAhead& ahead, const KeyTile* next,
              float* scores) const {
        constexpr int C = std::min(kColumns<R>, kKeys / kLanes), V = R <= 2 ? 4 : 2;
        const int num_keys = static_cast<int>(std::min<int64_t>(kKeys, panel.end - tile.key));
        float* weights = scores + kMaxRows * kKeys;
        alignas(64) float factor[(R + kLanes - 1) / kLanes * kLanes] = {};
        for (int first = 0; first < num_keys; first += C * kLanes) {
            if (ahead.count) score<R, C, LinesAhead<C>>(panel, tile, num_keys, first, ahead, scores);
            else score<R, C, NoPrefetch>(panel, tile, num_keys, first, ahead, scores);
        }
        if (tile.key_scale) update_softmax<R, true>(panel, tile, num_keys, scores, weights, factor);
        else update_softmax<R, false>(panel, tile, num_keys, scores, weights, factor);
        // The first lines of the next keys: from there on the hardware sees the stream.
        if (next)
            for (int i = 0; i < next->count; ++i)
                for (int u = 0; u < 8; ++u) prefetch_line(next->keys[i] + u * tile.key_stride);
        int64_t d = 0;
        for (; d + V * kLanes <= cache.head_dim; d += V * kLanes)
            add_values<R, V>(panel, tile, num_keys, weights, factor, d);
        for (; d < cache.head_dim; d += kLanes)
            add_values<R, 1>(panel, tile, num_keys, weights, factor, d);
    }

    // scores[r][i] = q_r . k_(key + i), of whole vectors; those past num_keys mean nothing.
    template <int R, int C, typename Ahead>
    __attribute__((noinline)) void score(const Panel& panel, const KeyTile& tile, int num_keys,
                                         int first, const UnitsAhead& units, float* scores) const {
        if constexpr (R > 2 && C > 1)
            if (num_keys - first <= kLanes)
                return score<R, 1, NoPrefetch>(panel, tile, num_keys, first, units, scores);
        const char* columns[C];
        Ahead ahead;
        for (int c = 0; c < C; ++c) {
            // Beyond the last key there is no block: the last vector is repeated.
            const int at = std::min(first + c * kLanes, (num_keys - 1) / kLanes * kLanes);
            columns[c] = tile.keys[at / kBlockUnit] + at % kBlockUnit * 4;
            const int unit = (first + c * kLanes) / kBlockUnit;
            if constexpr (std::is_same_v<Ahead, LinesAhead<C>>) ahead.from[c] = unit < units.count ? units.units[unit] : columns[c];
        }
        F acc[R][C] = {};
        multiply<T, kKind, R, C>(
            PackedRows<R>{panel.queries},
            [&](int64_t k, int c) -> const void* { return columns[c] + k * tile.key_stride; },
            static_cast<int>(cache.head_dim), acc, ahead);
        if (tile.key_scale)
            for (int c = 0; c < C; ++c) {
                const F of_keys = load(tile.key_scale + first + c * kLanes);
                for (int r = 0; r < R; ++r) acc[r][c] *= of_keys;
            }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) store(acc[r][c], scores + r * kKeys + first + c * kLanes);
    }

    // Scores become weights relative to each row's largest score so far. factor: what a row's
    // results so far are to be multiplied by.
    template <int R, bool quantized>
    __attribute__((noinline)) void update_softmax(Panel& panel, const KeyTile& tile, int num_keys,
                                                  float* scores, float* weights,
                                                  float* factor) const {
        constexpr float infinity = std::numeric_limits<float>::infinity();
        constexpr int kStep = kPaired ? 2 * kLanes : kLanes;
        const float unit = (softcap ? 1.0f : scale) * (kPaired ? kLog2E : 1.0f);
        const int count = (num_keys + kStep - 1) / kStep * kStep;
        float base[R];
        for (int r = 0; r < R; ++r) {
            float* row = scores + r * kKeys;
            const int64_t upper = panel.last_key[r] - tile.key;
            const int64_t lower = window ? upper - window : -1;
            if (softcap)
                for (int i = 0; i < count; i += kLanes)
                    store(tanh_of(load(row + i) * scale / softcap) * softcap, row + i);
            if (upper < count - 1 || lower >= 0) hide(row, count, lower, upper);
            F most = broadcast(-infinity);
#pragma GCC unroll 4
            for (int i = 0; i < count; i += kLanes) most = maximum(load(row + i), most);
            const float now = std::max(panel.base[r], max_lanes(most) * unit);
            // With no key yet in the window there is nothing to be relative to.
            base[r] = now == -infinity ? 0.0f : now;
            factor[r] = (panel.base[r] - base[r]) * (kPaired ? kLn2 : 1.0f);
            panel.base[r] = now;
        }
        for (int r = 0; r < R; r += kLanes) store(exponential(load(factor + r)), factor + r);
        for (int r = 0; r < R; ++r) {
            const F sum = load(panel.sums + r * kLanes) * factor[r];
            store(weigh<kPaired, quantized, R>(scores + r * kKeys, count, unit, base[r],
                                               tile.value_scale, sum, weights + r * kChunk),
                  panel.sums + r * kLanes);
        }
    }

    // Leaves scores (lower, upper] of a row.
    static void hide(float* row, int count, int64_t lower, int64_t upper) {
        for (int i = 0; i < count; i += kLanes) {
            const F index = lane_numbers() + static_cast<float>(i);
            const auto hidden = (index > static_cast<float>(upper)) |
                                (index <= static_cast<float>(lower));
            const F nothing = broadcast(-std::numeric_limits<float>::infinity());
            store(hidden ? nothing : load(row + i), row + i);
        }
    }

    // result[r] += weights of r times these dimensions of the values.
    template <int R, int C>
    __attribute__((noinline)) void add_values(const Panel& panel, const KeyTile& tile, int num_keys,
                                              const float* weights, const float* factor,
                                              int64_t d) const {
        const int64_t head_dim = cache.head_dim;
        constexpr int kLine = kPaired ? 2 * kChunk : kChunk;  // values of a row's line
        float* result = panel.result + d;
        F acc[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                acc[r][c] = load(result + r * head_dim + c * kLanes) * factor[r];
        for (int first = 0; first < num_keys; first += kBlockUnit) {
            const char* columns = tile.values[first / kBlockUnit] + d * 4;
            const float* rows = weights + first / kLine * (R * kChunk) +
                                first % kLine * kChunk / kLine;
            multiply<T, kKind, R, C>(
                StridedRows<kChunk>{rows},
                [&](int64_t k, int c) -> const void* {
                    return columns + (k * head_dim + c * kLanes) * 4;
                },
                std::min(kBlockUnit, num_keys - first), acc);
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                store(acc[r][c], result + r * head_dim + c * kLanes);
    }
};

}  // namespace nanocore
