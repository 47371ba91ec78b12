// Some rows of attention, and the online softmax over the tiles of keys that they pass by.

#pragma once

#include "key_tiles.h"
#include "softmax.h"

namespace nanocore {

// The rows of one product, and what they have seen so far.
template <typename T, int kRows>
struct AttentionPanel {
    int count;  // of rows that are somebody's
    float *queries, *result, *sums;
    int64_t first_key, end;  // of keys that a row sees
    int64_t last_key[kRows];
    float base[kRows];  // near the largest logit so far; times log2(e) if weights are 2^x
    T* out[kRows];
};

// What becomes of a score; see `AttentionSpec` in kernels/attention.py.
struct ScoreScale {
    float scale, softcap;
    int64_t window;
};

// Units to fetch while scores are computed.
struct UnitsAhead {
    const char* const* units;
    int count;
};

// What weights become by a new base: 0 if there were none.
template <bool paired>
inline float shrinking(float difference) {
    if (difference == -std::numeric_limits<float>::infinity()) return 0.0f;
    return exponential(broadcast(difference * (paired ? kLn2 : 1.0f)))[0];
}

// Leaves scores (lower, upper] of a row.
inline void hide(float* row, int count, int64_t lower, int64_t upper) {
    for (int i = 0; i < count; i += kLanes) {
        const F index = lane_numbers() + static_cast<float>(i);
        const auto hidden =
            (index > static_cast<float>(upper)) | (index <= static_cast<float>(lower));
        const F nothing = broadcast(-std::numeric_limits<float>::infinity());
        store(hidden ? nothing : load(row + i), row + i);
    }
}

// Scores become weights relative to each row's base. factor: what a row's results so far are to be
// multiplied by.
template <int R, bool quantized, bool paired, typename Panel>
__attribute__((noinline)) void update_softmax(Panel& panel, const KeyTile& tile, const ScoreScale& scaled,
                                              int num_keys, float* scores, float* weights, float* factor) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const auto [scale, softcap, window] = scaled;
    constexpr float kBaseLag = paired ? 8.0f : 5.5f;  // weights are up to 2^8
    constexpr int kTogether = paired ? 2 * kLanes : kLanes;  // weights that are stored at once
    const float unit = (softcap ? 1.0f : scale) * (paired ? kLog2E : 1.0f);
    const int count = (num_keys + kTogether - 1) / kTogether * kTogether;
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
        factor[r] = 1.0f;
        // As in FlashAttention-4 the base follows when it is far behind: then hardly ever.
        if (lane_bits(most * unit > panel.base[r] + kBaseLag)) {
            const float now = max_lanes(most) * unit;
            factor[r] = shrinking<paired>(panel.base[r] - now);
            panel.base[r] = now;
        }
        // With no key yet in the window there is nothing to be relative to.
        const float base = panel.base[r] == -infinity ? 0.0f : panel.base[r];
        const F sum = load(panel.sums + r * kLanes) * factor[r];
        store(weigh<paired, quantized, R>(row, count, unit, base, tile.value_scale, sum,
                                          weights + r * kChunk),
              panel.sums + r * kLanes);
    }
}

}  // namespace nanocore
