// Edits of rows of logits, in place, before a token is chosen; see `edit_logits` in sampling.py.
//
// A row's tokens are walked, and its logits only where all are forbidden but a few. Counts of tokens
// are in memory of the thread's own, as wide as a row, and zero before and after each. The same
// operations on float32 as in torch_sampling.py, in the same order, so results are the same bits.

#pragma once

#include "rows.h"

namespace nanocore {

// A list of tokens that rows name, row behind row: row r's from starts[r] to starts[r + 1].
struct TokenList {
    const int32_t* starts;
    const int32_t* ids;
};

struct EditLogitsCall {
    float* logits;
    int64_t size;
    int64_t stride;
    const int32_t* token_table;
    int64_t table_stride;
    const int64_t* table_rows;
    const int64_t* num_prompt_tokens;
    const int64_t* num_tokens;
    const int32_t* min_tokens;
    const float* repetition_penalty;
    const float* frequency_penalty;
    const float* presence_penalty;
    TokenList allowed;
    TokenList biased;
    const float* biases;
    TokenList stops;
    const int32_t* sequence_starts;  // of each row, in the next
    TokenList bad;                   // sequences of tokens
    int64_t rows;

    void run(Workspace& workspace) const {
        for (std::vector<int32_t>& counts : workspace.token_counts)
            if (static_cast<int64_t>(counts.size()) < size) counts.resize(size);
        workspace.pool.loop(rows, [&](int64_t row, int thread) {
            float* to = logits + row * stride;
            allow(row, to);
            add(row, to);
            penalise(row, to, workspace.token_counts[thread].data());
        });
    }

   private:
    static constexpr float kForbidden = -std::numeric_limits<float>::infinity();

    const int32_t* tokens(int64_t row) const { return token_table + table_rows[row] * table_stride; }

    void allow(int64_t row, float* to) const {
        const int32_t begin = allowed.starts[row], end = allowed.starts[row + 1];
        if (begin == end) return;
        std::vector<float> kept(end - begin);
        for (int32_t i = begin; i < end; ++i) kept[i - begin] = to[allowed.ids[i]];
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) store(load(to + i) + kForbidden, to + i);
        for (; i < size; ++i) to[i] += kForbidden;
        for (int32_t i = begin; i < end; ++i) to[allowed.ids[i]] = kept[i - begin];
    }

    void add(int64_t row, float* to) const {
        for (int32_t i = biased.starts[row]; i < biased.starts[row + 1]; ++i)
            to[biased.ids[i]] += biases[i];
        if (num_tokens[row] - num_prompt_tokens[row] < min_tokens[row])
            for (int32_t i = stops.starts[row]; i < stops.starts[row + 1]; ++i)
                to[stops.ids[i]] += kForbidden;
        for (int32_t i = sequence_starts[row]; i < sequence_starts[row + 1]; ++i) {
            const int32_t begin = bad.starts[i], last = bad.starts[i + 1] - 1;
            if (ends_with(row, bad.ids + begin, last - begin)) to[bad.ids[last]] += kForbidden;
        }
    }

    // Whether the row's output ends with these tokens.
    bool ends_with(int64_t row, const int32_t* ids, int64_t count) const {
        const int64_t start = num_tokens[row] - count;
        return count == 0 || (start >= num_prompt_tokens[row] &&
                              std::equal(ids, ids + count, tokens(row) + start));
    }

    void penalise(int64_t row, float* to, int32_t* counts) const {
        const float repetition = repetition_penalty[row], frequency = frequency_penalty[row],
                    presence = presence_penalty[row];
        const bool has_prompt = repetition != 1.0f;
        if (!has_prompt && frequency == 0.0f && presence == 0.0f) return;
        const int32_t* ids = tokens(row);
        const int64_t num_prompt = num_prompt_tokens[row], end = num_tokens[row];
        const int64_t begin = has_prompt ? 0 : num_prompt;
        for (int64_t i = num_prompt; i < end; ++i)
            if (ids[i] >= 0) ++counts[ids[i]];
        for (int64_t i = begin; i < end; ++i) {
            if (ids[i] < 0 || counts[ids[i]] < 0) continue;
            int32_t& count = counts[ids[i]];
            float& logit = to[ids[i]];
            logit = logit > 0.0f ? logit / repetition : logit * repetition;
            if (count > 0) {
                logit -= frequency * static_cast<float>(count);
                logit -= presence;
            }
            count = kDone;
        }
        for (int64_t i = begin; i < end; ++i)
            if (ids[i] >= 0) counts[ids[i]] = 0;
    }

    static constexpr int32_t kDone = -1;
};

}  // namespace nanocore
