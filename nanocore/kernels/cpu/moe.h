// A mixture of experts: gated MLPs, of which each token takes a few, in the tiles of linear layers.
//
// Rows of a step are sorted by expert. Products with gates and values fill the inner rows, some tiles
// of an expert and a block of its rows to an item. Products with the down projections are items of
// output columns, which pass all experts in ascending order and add what these say to its tokens: one
// chain of float32 for a token, rounded once, whatever else is in the step.

#pragma once

#include "linear.h"
#include "routing.h"

namespace nanocore {

constexpr int64_t kChunkBytes = 128 << 20;  // of rows on their way; each chunk reads all weights again
constexpr int64_t kSumBytes = 512 << 10;   // of a thread's sums; half of a second-level cache

// One weight of each expert. Gates and values are [inner, hidden], downs [hidden, inner].
struct ExpertWeights {
    int64_t num_experts;
    const LinearWeight *gates, *values, *downs;
};

// What every token passes, too: sigmoid(gate) * out is added. Without `out` there is none.
template <typename T>
struct SharedExpert {
    const T* gate;
    int64_t gate_stride;
    const T* out;
    int64_t out_stride;
};

// Experts' rows as one projection takes them.
struct ExpertRows {
    const char* data;
    int64_t line_bytes;  // 0: all experts take the same line

    const char* of(const ExpertPanel& panel) const { return data + panel.first_line * line_bytes; }
};

// Whether rows that are packed for one of these serve the other, too.
inline bool take_equal_rows(const LinearWeight& a, const LinearWeight& b) {
    if (a.kind != b.kind || a.permutation || b.permutation) return false;
    return !a.has_groups() || (a.format.bits == b.format.bits && a.format.group == b.format.group &&
                               a.format.zero() == b.format.zero());
}

template <typename T>
inline int64_t line_bytes_of(const LinearWeight& weight) {
    int64_t bytes = 0;
    with_products<T>(weight, [&](const auto& with) { bytes = with.panel_bytes() / with.kPanelRows; });
    return bytes;
}

// Products of some rows with one tile, scaled, times their weights, onto the sums of their tokens.
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

// One tile of an expert's weight, and what is fetched beside it.
struct ExpertTile {
    const LinearWeight& weight;
    int64_t index;
    const char* next;

    const float* scale() const {
        return weight.scale ? weight.scale + index * kTileColumns : nullptr;
    }

    // A panel times the tile: to[R][32].
    template <typename T>
    void multiply(const char* lines, int rows, int64_t panel, int64_t num_panels, float* to) const {
        const char* columns = weight.tile(index);
        const Prefetch ahead = prefetch_beside(weight, columns, next, panel, num_panels);
        with_products<T>(weight, [&](auto with) { with.multiply(lines, rows, columns, ahead, to); });
    }
};

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
        const int64_t pair_bytes = line_bytes_of<T>(*experts.gates) + inner() * sizeof(T) +
                                   line_bytes_of<T>(*experts.downs);
        const int64_t most = std::max<int64_t>(1, kChunkBytes / (pair_bytes * routing.num_chosen));
        const int64_t num_chunks = (rows + most - 1) / most;
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            const int64_t first = rows * chunk / num_chunks;
            run_tokens(workspace, first, rows * (chunk + 1) / num_chunks - first);
        }
    }

   private:
    int64_t hidden() const { return experts.gates->in_features; }
    int64_t inner() const { return experts.gates->out_features; }

    void run_tokens(Workspace& workspace, int64_t first, int64_t num_tokens) const {
        route(workspace, first, num_tokens);
        const T* from = x + first * x_stride;
        const ExpertRows gates = pack_tokens(workspace, from, num_tokens, experts.gates,
                                              workspace.expert_rows[0]);
        const ExpertRows values =
            take_equal_rows(experts.gates[0], experts.values[0])
                ? gates
                : pack_tokens(workspace, from, num_tokens, experts.values, workspace.expert_rows[1]);
        const int64_t inner_bytes = num_tokens * routing.num_chosen * inner() * sizeof(T);
        T* inner_rows = reinterpret_cast<T*>(workspace.inner.of(inner_bytes));
        multiply_gated(workspace, gates, values, num_tokens, inner_rows);
        add_up(workspace, pack_inner(workspace, inner_rows), first, num_tokens);
    }

    // body(item, thread), at once where little is to be done.
    template <typename Body>
    static void loop(Workspace& workspace, int64_t count, int64_t item_bytes, const Body& body) {
        if (count * item_bytes > kInlineBytes) return workspace.pool.loop(count, body);
        for (int64_t item = 0; item < count; ++item) body(item, 0);
    }

    void route(Workspace& workspace, int64_t first, int64_t num_tokens) const {
        RoutedRows& routed = workspace.routed;
        const int64_t num_chosen = routing.num_chosen;
        routed.resize(num_tokens * num_chosen);
        loop(workspace, num_tokens, routing.num_experts * 16, [&](int64_t token, int) {
            route_row(routing.logits + (first + token) * routing.stride, routing,
                      &routed.experts[token * num_chosen], &routed.weights[token * num_chosen]);
        });
        routed.sort(num_tokens * num_chosen, routing.num_experts);
    }

    // Tokens' rows, for each of their experts.
    ExpertRows pack_tokens(Workspace& workspace, const T* from, int64_t num_tokens,
                            const LinearWeight* weights, Scratch& scratch) const {
        const RoutedRows& routed = workspace.routed;
        const int64_t bytes = line_bytes_of<T>(*weights), width = hidden();
        char* lines = reinterpret_cast<char*>(scratch.of(routed.num_lines * bytes));
        if (num_tokens == 1 && !weights->permutation) {
            with_products<T>(*weights, [&](const auto& with) { with.pack(from, 0, 1, lines); });
            return {lines, 0};
        }
        loop(workspace, routed.panels.size(), bytes * kMaxRows, [&](int64_t index, int thread) {
            const ExpertPanel& panel = routed.panels[index];
            T* rows = reinterpret_cast<T*>(workspace.panel[thread].of(kMaxRows * width * sizeof(T)));
            for (int r = 0; r < panel.rows; ++r) {
                const int64_t token = routed.pairs[panel.first + r] / routing.num_chosen;
                std::memcpy(rows + r * width, from + token * x_stride, width * sizeof(T));
            }
            pack_panel(weights[routed.expert_of(panel)], rows, width, panel,
                       lines + panel.first_line * bytes);
        });
        return {lines, bytes};
    }

    // Rows of inner values, which are by expert already.
    ExpertRows pack_inner(Workspace& workspace, const T* inner_rows) const {
        const RoutedRows& routed = workspace.routed;
        const int64_t bytes = line_bytes_of<T>(*experts.downs);
        char* lines = reinterpret_cast<char*>(workspace.inner_rows.of(routed.num_lines * bytes));
        loop(workspace, routed.panels.size(), bytes * kMaxRows, [&](int64_t index, int) {
            const ExpertPanel& panel = routed.panels[index];
            pack_panel(experts.downs[routed.expert_of(panel)], inner_rows + panel.first * inner(),
                       inner(), panel, lines + panel.first_line * bytes);
        });
        return {lines, bytes};
    }

    static void pack_panel(const LinearWeight& weight, const T* from, int64_t stride,
                           const ExpertPanel& panel, char* to) {
        with_products<T>(weight, [&](const auto& with) {
            with.pack(from, stride, panel.rows, to);
        });
    }

    // How many tiles of the down projections make an item.
    int64_t down_group(const Workspace& workspace, int64_t num_tokens) const {
        const int64_t fitting = kSumBytes / (num_tokens * kTileColumns * 4);
        const int64_t share =
            experts.downs->num_tiles() / (kItemsPerThread * workspace.pool.num_threads());
        return std::max<int64_t>(1, std::min(fitting, share));
    }

    void multiply_gated(Workspace& workspace, const ExpertRows& gates, const ExpertRows& values,
                        int64_t num_tokens, T* to) const {
        const RoutedRows& routed = workspace.routed;
        const std::vector<ChosenExpert>& blocks =
            workspace.routed.blocks(kRowBlockBytes / (line_bytes_of<T>(*experts.gates) * kMaxRows));
        const int64_t num_tiles = experts.gates->num_tiles(), num_blocks = blocks.size();
        const int num_threads = workspace.pool.num_threads();
        const int64_t group = std::max<int64_t>(
            1, std::min(kItemBytes / (2 * experts.gates->tile_bytes()),
                        num_blocks * num_tiles / (kItemsPerThread * num_threads)));
        const int64_t per_block = (num_tiles + group - 1) / group, count = num_blocks * per_block;
        const int64_t then = down_group(workspace, num_tokens);
        // The first tile of an item; past the last of the down projections.
        const auto start_of = [&](const LinearWeight* weights, int64_t item) {
            if (item < count)
                return weights[blocks[item / per_block].expert].tile(item % per_block * group);
            return experts.downs[blocks[0].expert].tile((item - count) * then);
        };
        workspace.pool.loop(count, [&](int64_t item, int) {
            const ChosenExpert& block = blocks[item / per_block];
            const int64_t first = item % per_block * group, stop = std::min(first + group, num_tiles);
            const int64_t num_panels = block.last_panel - block.first_panel;
            for (int64_t index = first; index < stop; ++index) {
                const auto tile = [&](const LinearWeight* weights) {
                    const LinearWeight& weight = weights[block.expert];
                    return ExpertTile{weight, index,
                                      index + 1 < stop ? weight.tile(index + 1)
                                                       : start_of(weights, item + num_threads)};
                };
                const ExpertTile of_gates = tile(experts.gates), of_values = tile(experts.values);
                const int64_t column = index * kTileColumns;
                const int width = static_cast<int>(std::min<int64_t>(kTileColumns, inner() - column));
                alignas(64) float products[2][kMaxRows * kTileColumns];
                for (int64_t p = 0; p < num_panels; ++p) {
                    const ExpertPanel& panel = routed.panels[block.first_panel + p];
                    of_gates.template multiply<T>(gates.of(panel), panel.rows, p, num_panels, products[0]);
                    of_values.template multiply<T>(values.of(panel), panel.rows, p, num_panels, products[1]);
                    finish_gated<T>(products[0], products[1], panel.rows, {of_gates.scale(), nullptr},
                                    {of_values.scale(), nullptr}, width, gate,
                                    to + panel.first * inner() + column, inner());
                }
            }
        });
    }

    void add_up(Workspace& workspace, const ExpertRows& rows_of, int64_t first_token,
                int64_t num_tokens) const {
        const RoutedRows& routed = workspace.routed;
        const std::vector<ChosenExpert>& blocks =
            workspace.routed.blocks(kRowBlockBytes / (rows_of.line_bytes * kMaxRows));
        const int64_t num_blocks = blocks.size(), num_tiles = experts.downs->num_tiles();
        const int64_t group = down_group(workspace, num_tokens), count = (num_tiles + group - 1) / group;
        workspace.pool.loop(count, [&](int64_t item, int thread) {
            const int64_t first = item * group, stop = std::min(first + group, num_tiles);
            const int64_t width = (stop - first) * kTileColumns, next = item + workspace.pool.num_threads();
            float* sums = workspace.panel[thread].of(num_tokens * width * 4);
            std::memset(sums, 0, num_tokens * width * 4);
            for (int64_t b = 0; b < num_blocks; ++b) {
                const ChosenExpert& block = blocks[b];
                const LinearWeight& weight = experts.downs[block.expert];
                const int64_t num_panels = block.last_panel - block.first_panel;
                for (int64_t index = first; index < stop; ++index) {
                    const char* then =
                        index + 1 < stop     ? weight.tile(index + 1)
                        : b + 1 < num_blocks ? experts.downs[blocks[b + 1].expert].tile(first)
                        : next < count ? experts.downs[blocks[0].expert].tile(next * group)
                                       : after->first + (next - count) * after->item_bytes;
                    const ExpertTile tile{weight, index, then};
                    alignas(64) float products[kMaxRows * kTileColumns];
                    for (int64_t p = 0; p < num_panels; ++p) {
                        const ExpertPanel& panel = routed.panels[block.first_panel + p];
                        tile.template multiply<T>(rows_of.of(panel), panel.rows, p, num_panels, products);
                        add_products(products, panel, routed, static_cast<int>(routing.num_chosen),
                                     tile.scale(), sums + (index - first) * kTileColumns, width);
                    }
                }
            }
            finish(sums, width, first_token, num_tokens, first * kTileColumns);
        });
    }

    // Sums of some columns, from `column` on, with what the shared expert says, as results.
    void finish(const float* sums, int64_t width, int64_t first_token, int64_t num_tokens,
                int64_t column) const {
        const int64_t size = hidden(), last = std::min(width, size - column);
        for (int64_t token = 0; token < num_tokens; ++token, sums += width) {
            const int64_t row = first_token + token;
            T* to = out + row * size + column;
            F openness = {};
            if (shared.out) {
                openness = sigmoid(broadcast(to_float(shared.gate[row * shared.gate_stride])));
            }
            for (int64_t i = 0; i < last; i += kLanes) {
                const int some = static_cast<int>(std::min<int64_t>(kLanes, last - i));
                F y = load(sums + i);
                if (shared.out) {
                    const T* from = shared.out + row * shared.out_stride + column + i;
                    y = multiply_add(openness, some == kLanes ? load(from) : load_some(from, some), y);
                }
                if (some == kLanes) store(y, to + i);
                else store_some(y, to + i, some);
            }
        }
    }
};

}  // namespace nanocore
