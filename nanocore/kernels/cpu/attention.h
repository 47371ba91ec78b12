// Causal attention over the paged KV cache, for decodes and prefill chunks alike.
//
// One item is some query tokens of a sequence, with all query heads that share a KV head: these are
// the rows of two products with the keys and values of that head, 128 keys at a time, with an
// online softmax between them (FlashAttention-2: Dao 2023). Rows are in panels of as many as a
// product takes, and all panels of an item pass by the same keys before the next come. The 128 keys
// always begin at a multiple of 128, whatever the chunk, so a row's results do not depend on how
// its sequence was cut into steps. Blocks are read where they lie; int8 is widened once for all
// panels, and by products that have few rows as they read it, which gives the same bits.

#pragma once

#include "attention_panel.h"
#include "matrix_attention.h"
#include "rows.h"

namespace nanocore {

// kMatrix: products are the matrix unit's.
template <typename T, bool kMatrix = false>
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
    const int32_t* query_start;  // [num_seqs + 1]
    const int32_t* seq_lens;
    const int32_t* block_table;
    int64_t block_table_stride;
    const int64_t* table_rows;  // [num_seqs], or null: the sequences are the table's first rows
    int64_t rows;  // with padding

    static constexpr Kind kKind = sizeof(T) == 2 ? Kind::kBFloat16 : Kind::kFloat32;
    static constexpr bool kPaired = kPairedRows<T, kKind>;

    // Values of k that a product takes at a time, their units, and the values of a row's line.
    static constexpr int kStep = kKind == Kind::kFloat32 ? 1 : 2;
    static constexpr int kStepUnits = kPaired ? 1 : kStep;
    static constexpr int kLine = kPaired ? 2 * kChunk : kChunk;

    static constexpr int kPanelRows = kMatrix ? kMatrixRows : kMaxQueries;
    static constexpr int kPanels = kMatrix ? 2 : 4;
    static constexpr int kQueryRows = kPanels * kPanelRows;  // of one item, if its query heads allow

    // Whether products may read int8 themselves, and for how many rows they do so.
    static constexpr bool kDirect = sizeof(T) == 2 && !kMatrix;
    static constexpr int kDirectRows = 8;

    // Bytes from a column to the next; rows of columns that a product takes at a time, for int8
    // has no pairs, and which of these has k.
    template <Kind kind>
    static constexpr int kUnitBytes = kind == Kind::kInt8 ? 1 : 4;
    template <Kind kind>
    static constexpr int kRows = kind == Kind::kInt8 ? 2 : 1;
    template <Kind kind>
    static constexpr int64_t row_of(int64_t k) {
        return kind == Kind::kInt8 ? k : 0;
    }

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
            const int64_t stop = std::min<int64_t>(start + tokens, query_start[seq + 1]);
            attend(seq, start, stop, index % cache.num_heads, workspace.panel[thread]);
        });
    }

   private:
    int64_t group() const { return num_heads / cache.num_heads; }

    template <typename Body>
    static void with_panel_rows(int rows, const Body& body) {
        if constexpr (!kMatrix) with_rows<kMaxQueries>(rows, body);
        else if (rows <= 4) body(std::integral_constant<int, 4>{});
        else if (rows <= kTileRows) body(std::integral_constant<int, kTileRows>{});
        else body(std::integral_constant<int, kMatrixRows>{});
    }

    int64_t tokens_of_item() const { return std::max<int64_t>(1, kQueryRows / group()); }

    typedef AttentionPanel<T, kPanelRows> Panel;

    int64_t row_floats() const {
        return num_units<T, kKind>(cache.head_dim) + cache.head_dim + kLanes;
    }

    // Tokens [start, stop) of sequence seq and the query heads of one KV head.
    void attend(int64_t seq, int64_t start, int64_t stop, int64_t kv_head, Scratch& scratch) const {
        const int64_t num_rows = (stop - start) * group();
        const int64_t row_bytes = group() * cache.head_dim * sizeof(T);
        for (int64_t token = start; token < stop; ++token) {
            const T* row = q + token * q_stride;
            const char* from = reinterpret_cast<const char*>(row) + kv_head * row_bytes;
            for (int64_t i = 0; i < row_bytes; i += 64) prefetch_line(from + i);
        }
        const int64_t wide = cache.is_quantized() ? KeyTiles<T>::num_floats(cache.head_dim) : 0;
        const int64_t of_rows = kQueryRows * row_floats();
        float* memory = scratch.of((of_rows + 2 * kPanelRows * kKeys + wide) * sizeof(float));
        for (int64_t first = 0; first < num_rows; first += kQueryRows) {
            Panel panels[kPanels];
            int num_panels = 0;
            const int64_t stop_row = std::min<int64_t>(num_rows, first + kQueryRows);
            for (int64_t row = first; row < stop_row; row += kPanelRows) {
                Panel& panel = panels[num_panels];
                panel.count = static_cast<int>(std::min<int64_t>(kPanelRows, stop_row - row));
                float* of_panel = memory + num_panels++ * kPanelRows * row_floats();
                with_panel_rows(panel.count, [&](auto R) {
                    begin<R>(panel, of_panel, seq, start, row, kv_head);
                });
            }
            float* scores = memory + of_rows;
            const int64_t table_row = table_rows ? table_rows[seq] : seq;
            pass_keys(panels, num_panels, block_table + table_row * block_table_stride, kv_head,
                      scores, scores + 2 * kPanelRows * kKeys);
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
            pack_rows<T, kKind>(q + token * q_stride + column, 0, 1, head_dim, R,
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
        const int64_t first = panels[0].first_key, end = panels[num_panels - 1].end;
        KeyTiles<T> tiles(cache, table, kv_head, first, end, widened);
        KeyTile tile = tiles.next();
        std::conditional_t<kMatrix, MatrixAttention, TileUnit> matrix;  // used by the first alone
        while (tile.count) {
            // With few rows the products widen int8 as they read it.
            const bool is_direct = kDirect && num_panels == 1 && panels[0].count <= kDirectRows;
            KeyTile as_read = tile;
            if (cache.is_quantized())
                as_read = is_direct ? tiles.scaled(tile) : tiles.widened(tile);
            const KeyTile next = tiles.next();
            for (int p = 0; p < num_panels; ++p) {
                Panel& panel = panels[p];
                if (tile.key >= panel.end || tile.key + kKeys <= panel.first_key) continue;
                // Fetched ahead: by one panel what it will need itself, by several the next tile.
                const KeyTile& ahead = num_panels == 1 || !next.count ? as_read : next;
                const char* const* from = (num_panels == 1) == (p == 0) ? ahead.values : ahead.keys;
                const int count = p < 2 ? ahead.count : 0;
                with_panel_rows(panel.count, [&](auto R) {
                    const KeyTile* then = num_panels == 1 ? &next : nullptr;
                    if constexpr (kMatrix)
                        step_of_matrix<R>(panel, as_read, {from, count}, then, scores, matrix);
                    else step<R>(panel, as_read, {from, count}, then, scores);
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

    // Some bytes of each of some units with every pair of dimensions.
    template <int C>
    struct LinesAhead {
        const char* from[C];
        int64_t bytes;

        NANOCORE_INLINE void at(int64_t pair) const {
            for (int c = 0; c < C; ++c) prefetch_line(from[c] + pair * bytes);
        }
    };

    template <int R>
    void step(Panel& panel, const KeyTile& tile, const UnitsAhead& ahead, const KeyTile* next,
              float* scores) const {
        if constexpr (kDirect && R <= kDirectRows)
            if (tile.is_int8) return step_of<R, Kind::kInt8>(panel, tile, ahead, next, scores);
        step_of<R, kKind>(panel, tile, ahead, next, scores);
    }

    template <int R, Kind kind>
    void step_of(Panel& panel, const KeyTile& tile, const UnitsAhead& ahead, const KeyTile* next,
                 float* scores) const {
        constexpr int C = std::min(kColumns<R>, kKeys / kLanes), V = R <= 2 ? 4 : 2;
        step_with<R>(
            panel, tile, next, scores,
            [&](int num_keys) {
                for (int first = 0; first < num_keys; first += C * kLanes)
                    if (ahead.count)
                        score<R, kind, C, LinesAhead<C>>(panel, tile, num_keys, first, ahead, scores);
                    else score<R, kind, C, NoPrefetch>(panel, tile, num_keys, first, ahead, scores);
            },
            [&](int num_keys, const float* weights, const float* factor) {
                int64_t d = 0;
                for (; d + V * kLanes <= cache.head_dim; d += V * kLanes)
                    add_values<R, kind, V>(panel, tile, num_keys, weights, factor, d);
                for (; d < cache.head_dim; d += kLanes)
                    add_values<R, kind, 1>(panel, tile, num_keys, weights, factor, d);
            });
    }

    // The two products, and what is between them. get_scores(num_keys), of as many keys as there are;
    // add_values(num_keys, weights, factor), of what rows' results so far are to be multiplied by.
    template <int R, typename Score, typename Add>
    void step_with(Panel& panel, const KeyTile& tile, const KeyTile* next, float* scores,
                   const Score& get_scores, const Add& add_values) const {
        const int num_keys = static_cast<int>(std::min<int64_t>(kKeys, panel.end - tile.key));
        float* weights = scores + kPanelRows * kKeys;
        float factor[R];
        get_scores(num_keys);
        const ScoreScale scaled{scale, softcap, window};
        if (tile.key_scale) update_softmax<R, true, kPaired>(panel, tile, scaled, num_keys, scores, weights, factor);
        else update_softmax<R, false, kPaired>(panel, tile, scaled, num_keys, scores, weights, factor);
        // The first lines of the next keys: from there on the hardware sees the stream.
        const int64_t line_stride = std::max<int64_t>(64, tile.key_stride);
        if (next)
            for (int i = 0; i < next->count; ++i)
                for (int u = 0; u < 8; ++u) prefetch_line(next->keys[i] + u * line_stride);
        add_values(num_keys, weights, factor);
    }

    template <int R>
    void step_of_matrix(Panel& panel, const KeyTile& tile, const UnitsAhead& ahead, const KeyTile* next,
                        float* scores, MatrixAttention& matrix) const {
        matrix.configure(R);
        step_with<R>(
            panel, tile, next, scores,
            [&](int num_keys) {
                matrix.template score<R>(panel.queries, cache.head_dim, tile, num_keys, ahead, scores);
            },
            [&](int num_keys, const float* weights, const float* factor) {
                matrix.template add_values<R>(weights, factor, cache.head_dim, tile, num_keys, panel.result);
            });
    }

    // scores[r][i] = q_r . k_(key + i), of whole vectors; those past num_keys mean nothing.
    template <int R, Kind kind, int C, typename Ahead>
    __attribute__((noinline)) void score(const Panel& panel, const KeyTile& tile, int num_keys,
                                         int first, const UnitsAhead& units, float* scores) const {
        if constexpr (R > 2 && C > 1)
            if (num_keys - first <= kLanes)
                return score<R, kind, 1, NoPrefetch>(panel, tile, num_keys, first, units, scores);
        const char* columns[C];
        Ahead ahead;
        for (int c = 0; c < C; ++c) {
            // Beyond the last key there is no block: the last vector is repeated.
            const int at = std::min(first + c * kLanes, (num_keys - 1) / kLanes * kLanes);
            columns[c] = tile.keys[at / kBlockUnit] + at % kBlockUnit * kUnitBytes<kind>;
            const int unit = (first + c * kLanes) / kBlockUnit;
            if constexpr (std::is_same_v<Ahead, LinesAhead<C>>) {
                ahead.from[c] = unit < units.count ? units.units[unit] : columns[c];
                ahead.bytes = cache.is_quantized() ? 32 : 64;
            }
        }
        F acc[R][C] = {};
        const float* rows = panel.queries;
        int64_t offset = 0, line = 0;
        for (int left = static_cast<int>(cache.head_dim); left > 0; left -= kLine) {
            const float* row = rows;
            for (int i = std::min(left, kLine); i > 0; i -= kStep, row += kStepUnits) {
                ahead.at(line++);
                multiply<T, kind, R, C>(
                    StridedRows<kChunk>{row},
                    [&](int64_t k, int c) -> const void* {
                        return columns[c] + offset + row_of<kind>(k) * tile.key_stride;
                    },
                    kStep, acc);
                offset += kRows<kind> * tile.key_stride;
            }
            rows += R * kChunk;
        }
        if (tile.key_scale)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                const F of_keys = load(tile.key_scale + first + c * kLanes);
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) acc[r][c] *= of_keys;
            }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) store(acc[r][c], scores + r * kKeys + first + c * kLanes);
    }

    // result[r] += weights of r times these dimensions of the values.
    template <int R, Kind kind, int C>
    __attribute__((noinline)) void add_values(const Panel& panel, const KeyTile& tile, int num_keys,
                                              const float* weights, const float* factor,
                                              int64_t d) const {
        const int64_t head_dim = cache.head_dim;
        float* result = panel.result + d;
        F acc[R][C];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c)
                acc[r][c] = load(result + r * head_dim + c * kLanes) * factor[r];
        for (int first = 0; first < num_keys; first += kBlockUnit) {
            const char* column = tile.values[first / kBlockUnit] + d * kUnitBytes<kind>;
            const float* rows = weights + first / kLine * (R * kChunk) +
                                first % kLine * kChunk / kLine;
            for (int i = std::min(kBlockUnit, num_keys - first); i > 0; i -= kStep) {
                multiply<T, kind, R, C>(
                    StridedRows<kChunk>{rows},
                    [&](int64_t k, int c) -> const void* {
                        const int64_t unit = row_of<kind>(k) * head_dim + c * kLanes;
                        return column + unit * kUnitBytes<kind>;
                    },
                    kStep, acc);
                rows += kStepUnits, column += kRows<kind> * head_dim * kUnitBytes<kind>;
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c)
                store(acc[r][c], result + r * head_dim + c * kLanes);
    }
};

}  // namespace nanocore
