// A mixture of experts: gated MLPs, of which each token takes a few, in the tiles of linear layers.
//
// Rows of a step are sorted by expert. Products with gates and values fill the inner rows, a tile of
// an expert and some of its rows to an item. Products with the down projections are items of output
// columns, each of which passes all experts in ascending order and adds what they say to its tokens:
// one chain of float32 for a token, rounded once, whatever else is in the step.

#pragma once

#include "linear.h"
#include "routing.h"

namespace nanocore {

constexpr int64_t kChunkBytes = 48 << 20;  // of rows that are between products at once
constexpr int64_t kSumBytes = 256 << 10;   // of a thread's sums; a quarter of a second-level cache

// One weight of each expert. Gates and values are [inner, hidden], downs [hidden, inner].
struct ExpertWeights {
    int64_t num_experts;
    const LinearWeight *gates, *values, *downs;
};

// What every token passes, too: sigmoid(gate) * out is added. Without data there is none.
template <typename T>
struct SharedExpert {
    const T* gate;
    int64_t gate_stride;
    const T* out;
    int64_t out_stride;
};

// Rows of T, packed for weights of some kind: of R rows, the first of R lines each.
struct PackedLines {
    const char* data;
    int64_t line_bytes;

    const char* of(const ExpertPanel& panel) const { return data + panel.first_line * line_bytes; }
};

// Lines of R rows, of which `line(r)` are those of one row each, as `pack<1>` leaves them.
template <int R, typename T, Kind kind, typename Line>
inline void join_lines(const FloatProducts<T, kind>& products, int rows, const Line& line, char* to) {
    constexpr int64_t size = kChunk * 4;
    const int64_t bytes = products.panel_bytes() / kMaxRows;
    if (rows < R) std::memset(to, 0, bytes * R);
    for (int r = 0; r < rows; ++r)
        for (int64_t at = 0; at < bytes; at += size)
            std::memcpy(to + at * R + r * size, line(r) + at, size);
}

template <int R, typename T, int kBits, bool kVnni, typename Line>
inline void join_lines(const IntegerProducts<T, kBits, kVnni>& products, int rows, const Line& line,
                       char* to) {
    const int64_t group = products.weight.format.group, bytes = RowGroup<1>::bytes(group);
    const int64_t num_groups = products.panel_bytes() / RowGroup<kMaxRows>::bytes(group);
    if (rows < R) std::memset(to, 0, num_groups * RowGroup<R>::bytes(group));
    for (int r = 0; r < rows; ++r)
        for (int64_t g = 0; g < num_groups; ++g) {
            const char* from = line(r) + g * bytes;
            char* start = to + g * RowGroup<R>::bytes(group);
            for (int i = 0; i < 3; ++i) std::memcpy(start + (i * R + r) * 4, from + i * 4, 4);
            std::memcpy(start + 12 * R + r * group, from + 12, group);
        }
}

// Whether rows packed for one of these serve the other, too.
inline bool take_equal_rows(const LinearWeight& a, const LinearWeight& b) {
    if ((a.kind == Kind::kIntegers) != (b.kind == Kind::kIntegers)) return false;
    return a.kind != Kind::kIntegers ||
           (a.format.group == b.format.group && a.format.zero() == b.format.zero());
}

// A panel times one tile: products[R][32]. is_wide: the tile is bfloat16 and the weight int8.
template <typename T>
inline void multiply_panel(const LinearWeight& weight, const char* lines, int rows, const void* tile,
                           bool is_wide, const Prefetch& ahead, float* products) {
    const auto multiply_with = [&](const auto& with) {
        with_rows(rows, [&](auto R) {
            with.template multiply<R.value>(lines, tile, ahead, products);
        });
    };
    if (is_wide) multiply_with(FloatProducts<T, Kind::kBFloat16>{weight});
    else with_products<T>(weight, multiply_with);
}

// Products of some pairs with one tile, scaled, times their weights, onto the sums of their tokens.
inline void add_products(const float* products, const ExpertPanel& panel, const RoutedRows& routed,
                         int num_chosen, const float* scale, float* sums, int64_t stride) {
    for (int r = 0; r < panel.rows; ++r) {
        const int32_t pair = routed.pairs[panel.first + r];
        const F weight = broadcast(routed.weights[pair]);
        float* to = sums + pair / num_chosen * stride;
        for (int first = 0; first < kTileColumns; first += kLanes) {
            F y = load(products + r * kTileColumns + first);
            if (scale) y *= load(scale + first);
            store(multiply_add(weight, y, load(to + first)), to + first);
        }
    }
}

template <typename T>
struct MoeCall {
    ExpertWeights experts;
    Routing<T> routing;
    SharedExpert<T> shared;
    Gate gate;
    const T* x;
    int64_t x_stride;
    T* out;
    const NextItems* after;
    int64_t rows;

    void run(Workspace& workspace) const {
        const int64_t inner = experts.gates->out_features, hidden = experts.gates->in_features;
        const int64_t pair_bytes = 8 * (hidden + 2 * inner);  // at most, nearly
        const int64_t most = std::max<int64_t>(1, kChunkBytes / (pair_bytes * routing.num_chosen));
        const int64_t num_chunks = (rows + most - 1) / most;
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
            Chunk{*this, workspace, rows * chunk / num_chunks, rows * (chunk + 1) / num_chunks}.run();
    }

   private:
    struct Chunk;
};

// Some of a step's tokens on their way through all experts.
template <typename T>
struct MoeCall<T>::Chunk {
    const MoeCall& call;
    Workspace& workspace;
    const int64_t first_token, last_token;

    RoutedRows& routed = workspace.routed;
    const int64_t num_tokens = last_token - first_token;
    const int64_t num_chosen = call.routing.num_chosen;
    const int64_t hidden = call.experts.gates->in_features;
    const int64_t inner = call.experts.gates->out_features;

    void run() {
        route();
        const PackedLines gate_rows = pack_tokens(call.experts.gates, workspace.expert_rows[0]);
        const PackedLines value_rows =
            take_equal_rows(*call.experts.gates, *call.experts.values)
                ? gate_rows
                : pack_tokens(call.experts.values, workspace.expert_rows[1]);
        T* inner_rows = reinterpret_cast<T*>(
            workspace.inner.of(num_tokens * num_chosen * inner * static_cast<int64_t>(sizeof(T))));
        multiply_gated(gate_rows, value_rows, inner_rows);
        add_up(pack_inner(inner_rows));
    }

   private:
    // body(item, thread), at once where little is to be done.
    template <typename Body>
    void loop(int64_t count, int64_t item_bytes, const Body& body) {
        if (count * item_bytes > kInlineBytes) return workspace.pool.loop(count, body);
        for (int64_t item = 0; item < count; ++item) body(item, 0);
    }

    void route() {
        routed.resize(num_tokens * num_chosen);
        loop(num_tokens, call.routing.num_experts * 64, [&](int64_t token, int) {
            route_row(call.routing.logits + (first_token + token) * call.routing.stride, call.routing,
                      &routed.experts[token * num_chosen], &routed.weights[token * num_chosen]);
        });
        routed.sort(num_tokens * num_chosen, call.routing.num_experts);
    }

    int64_t line_bytes(const LinearWeight& weight) const {
        int64_t bytes = 0;
        with_products<T>(weight, [&](const auto& with) { bytes = with.panel_bytes() / kMaxRows; });
        return bytes;
    }

    // The expert of a panel's rows.
    int64_t expert_of(const ExpertPanel& panel) const {
        return routed.experts[routed.pairs[panel.first]];
    }

    // Tokens' rows for each of their experts: packed once, and copied.
    PackedLines pack_tokens(const LinearWeight* weights, Scratch& scratch) {
        const int64_t bytes = line_bytes(*weights);
        char* to = reinterpret_cast<char*>(scratch.of((num_tokens + routed.num_lines) * bytes));
        char* lines = to + num_tokens * bytes;
        with_products<T>(*weights, [&](const auto& with) {
            loop(num_tokens, bytes, [&](int64_t token, int) {
                with.template pack<1>(call.x + (first_token + token) * call.x_stride, 0, 1,
                                      to + token * bytes);
            });
            loop(routed.panels.size(), bytes * kMaxRows, [&](int64_t index, int) {
                const ExpertPanel& panel = routed.panels[index];
                with_rows(panel.rows, [&](auto R) {
                    join_lines<R>(with, panel.rows, [&](int r) {
                        return to + routed.pairs[panel.first + r] / num_chosen * bytes;
                    }, lines + panel.first_line * bytes);
                });
            });
        });
        return {lines, bytes};
    }

    // Rows of `inner` values, which are sorted already.
    PackedLines pack_inner(const T* inner_rows) {
        const LinearWeight* weights = call.experts.downs;
        const int64_t bytes = line_bytes(*weights);
        char* lines = reinterpret_cast<char*>(workspace.inner_rows.of(routed.num_lines * bytes));
        with_products<T>(*weights, [&](const auto& with) {
            loop(routed.panels.size(), bytes * kMaxRows, [&](int64_t index, int) {
                const ExpertPanel& panel = routed.panels[index];
                with_rows(panel.rows, [&](auto R) {
                    with.template pack<R>(inner_rows + panel.first * inner, inner, panel.rows,
                                          lines + panel.first_line * bytes);
                });
            });
        });
        return {lines, bytes};
    }

    // Experts' panels by as many as stay in a second-level cache.
    void make_blocks(const PackedLines& lines) {
        const int64_t most = std::max<int64_t>(1, kRowBlockBytes / (lines.line_bytes * kMaxRows));
        blocks.clear();
        for (const ChosenExpert& of : routed.chosen)
            for (int64_t panel = of.first_panel; panel < of.last_panel; panel += most)
                blocks.push_back({of.expert, panel, std::min(panel + most, of.last_panel)});
    }

    // How many of an expert's output tiles make an item of the down projections.
    int64_t down_group() const {
        const int64_t fitting = kSumBytes / (num_tokens * kTileColumns * 4);
        const int64_t share = call.experts.downs->num_tiles() / (kItemsPerThread * num_threads);
        return std::max<int64_t>(1, std::min(fitting, share));
    }

    void multiply_gated(const PackedLines& gate_rows, const PackedLines& value_rows, T* to) {
        make_blocks(gate_rows);
        const LinearWeight& any = *call.experts.gates;
        const int64_t num_tiles = any.num_tiles(), num_blocks = blocks.size();
        const int64_t share = num_blocks * num_tiles / (kItemsPerThread * num_threads);
        const int64_t group =
            std::max<int64_t>(1, std::min(kItemBytes / (2 * any.tile_bytes()), share));
        const int64_t per_block = (num_tiles + group - 1) / group, count = num_blocks * per_block;
        // Where the gates' or values' first tile of an item is; past the last, the down projections'.
        const auto start_of = [&](const LinearWeight* weights, int64_t item) {
            if (item < count)
                return weights[blocks[item / per_block].expert].tile(item % per_block * group);
            return call.experts.downs[blocks[0].expert].tile((item - count) * down_group());
        };
        workspace.pool.loop(count, [&](int64_t item, int thread) {
            const ChosenExpert& block = blocks[item / per_block];
            const int64_t first = item % per_block * group, stop = std::min(first + group, num_tiles);
            const LinearWeight* weights[] = {call.experts.gates + block.expert,
                                             call.experts.values + block.expert};
            for (int64_t tile = first; tile < stop; ++tile) {
                const bool is_last = tile + 1 == stop;
                const Columns columns[] = {
                    {*weights[0], tile,
                     is_last ? start_of(call.experts.gates, item + num_threads) : nullptr, 0},
                    {*weights[1], tile,
                     is_last ? start_of(call.experts.values, item + num_threads) : nullptr, 0}};
                gated_tile(columns, block, gate_rows, value_rows, to, workspace.panel[thread]);
            }
        });
    }
};

}  // namespace nanocore
