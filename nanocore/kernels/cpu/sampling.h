// The best token of each row of logits, with Gumbel noise where the row samples.
//
// Of equal values the smaller token id wins, as everywhere. A row without a finite best value, or
// with one that is no number, has no token.

#pragma once

#include "filtered_sampling.h"

namespace nanocore {

struct BestTokenCall {
    const float* logits;
    int64_t size;
    int64_t stride;
    int64_t first_token;
    TokenMask mask;
    const float* temperature;  // of each row, or null; a row of 0 takes its logits as they are
    const int64_t* seed;
    const int64_t* position;
    float* value;
    int64_t* index;
    int32_t* token_table;  // or null
    int64_t table_stride;
    const int64_t *table_rows, *table_positions;
    int64_t rows;

    void run(Workspace& workspace) const {
        workspace.pool.loop(rows, [&](int64_t row, int) {
            choose(row);
            if (token_table)
                token_table[table_rows[row] * table_stride + table_positions[row]] =
                    static_cast<int32_t>(index[row]);
        });
    }

   private:
    void choose(int64_t row) const {
        const RowLogits from(logits + row * stride, size, mask.of_row(row), first_token);
        if (!temperature || temperature[row] == 0.0f) return best(row, from);
        const FilteredRow tokens(from, temperature[row]);
        value[row] = tokens.best();
        index[row] = kNoToken;
        if (!std::isfinite(tokens.best())) return;
        const NoiseKey key(seed[row], position[row]);
        const Drawn drawn = tokens.draw<false>(tokens.all(), key);
        value[row] = drawn.noisy;
        index[row] = drawn.index;
    }

    // The greatest logit, and the first place where it is if it is finite.
    void best(int64_t row, const RowLogits& from) const {
        F most = broadcast(-std::numeric_limits<float>::infinity());
        I place = {};
        const I lanes = reinterpret_cast<I>(lane_ids());
        NumberCheck numbers;
        from.each([&](int64_t i, F candidate) {
            numbers.add(candidate);
            const auto is_more = candidate > most;
            most = is_more ? candidate : most;
            place = is_more ? lanes + static_cast<int32_t>(i) : place;
        });
        int64_t found = place[0];
        float largest = most[0];
        for (int lane = 1; lane < kLanes; ++lane)
            if (most[lane] > largest || (most[lane] == largest && place[lane] < found)) {
                largest = most[lane];
                found = place[lane];
            }
        if (!numbers.holds()) largest = std::numeric_limits<float>::quiet_NaN();
        value[row] = largest;
        index[row] = std::isfinite(largest) ? found : kNoToken;
    }
};

}  // namespace nanocore
