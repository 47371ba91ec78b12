// Log probabilities of each row's token and of its most likely ones: two passes over the logits.
//
// A token with its logit is one integer, greater for a greater logit and of equal ones for the
// smaller id, so that the order is total whatever the logits are (candidates.py has the same). The
// first ones are gathered behind a bound that rises as they come in: few tokens are looked at twice,
// and no row is sorted but for as many as are asked for. Sums are double.

#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "sampling.h"

namespace nanocore {

// The greatest `count` of the candidates that are added.
class FirstCandidates {
   public:
    FirstCandidates(int64_t count, int64_t size) : count_(count) {
        found_.reserve(std::min(size, 2 * count + kSlack) + kLanes);
    }

    // Those of the tokens from i on that may be among them. bits: of the lanes that are tokens.
    NANOCORE_INLINE void add(int64_t i, F logits, uint32_t bits) {
        // What is no number is neither below the bound nor above it: the integers decide.
        if (is_bounded_) bits &= ~lane_bits(logits < bound_);
        if (bits) add_lanes(i, logits, bits);
    }

    // All of them, the greatest first.
    const std::vector<int64_t>& sorted() {
        reduce();
        std::sort(found_.begin(), found_.end(), std::greater<>());
        return found_;
    }

    static int64_t candidate(float logit, int64_t token_id) {
        int32_t bits;
        logit += 0.0f;  // of -0.0 makes 0.0, which it equals
        std::memcpy(&bits, &logit, sizeof bits);
        const int64_t ordered = bits ^ ((bits >> 31) & kMaxId);
        return ordered * (int64_t{1} << 32) + (kMaxId - token_id);
    }

    static float logit_of(int64_t candidate) {
        const int32_t ordered = static_cast<int32_t>(candidate >> 32);
        const int32_t bits = ordered ^ ((ordered >> 31) & kMaxId);
        float logit;
        std::memcpy(&logit, &bits, sizeof logit);
        return logit;
    }

    static int32_t token_id_of(int64_t candidate) {
        return kMaxId - static_cast<int32_t>(candidate & kMaxId);
    }

   private:
    static constexpr int32_t kMaxId = 0x7fffffff;
    static constexpr int64_t kSlack = 64;

    __attribute__((noinline)) void add_lanes(int64_t i, F logits, uint32_t bits) {
        for (; bits; bits &= bits - 1) {
            const int lane = __builtin_ctz(bits);
            found_.push_back(candidate(logits[lane], i + lane));
        }
        if (static_cast<int64_t>(found_.size()) < 2 * count_ + kSlack) return;
        reduce();
        is_bounded_ = true;
        // Without any to be found nothing is above.
        bound_ = broadcast(count_ ? logit_of(*std::min_element(found_.begin(), found_.end()))
                                  : std::numeric_limits<float>::infinity());
    }

    void reduce() {
        if (static_cast<int64_t>(found_.size()) <= count_) return;
        std::nth_element(found_.begin(), found_.begin() + count_, found_.end(), std::greater<>());
        found_.resize(count_);
    }

    const int64_t count_;
    std::vector<int64_t> found_;
    bool is_bounded_ = false;
    F bound_ = {};
};

struct LogprobsCall {
    const float* logits;
    int64_t size;
    int64_t stride;
    const int64_t* index;  // of the rows of logits that are meant; null: of all
    const int64_t* token_ids;
    int64_t num_top;
    int32_t* ids;     // [rows, 1 + num_top]
    float* logprobs;  // likewise
    int32_t* rank;
    int64_t rows;

    void run(Workspace& workspace) const {
        workspace.pool.loop(rows, [&](int64_t row, int) { of_row(row); });
    }

   private:
    void of_row(int64_t row) const {
        const float* from = logits + (index ? index[row] : row) * stride;
        F most = broadcast(-std::numeric_limits<float>::infinity());
        for (int64_t i = 0; i < size; i += kLanes) most = maximum(most, logits_at(from, i, size));
        const float best = max_lanes(most);
        const int64_t token = std::max<int64_t>(0, token_ids[row]);
        const F own = broadcast(from[token]), highest = broadcast(best);
        FirstCandidates first(num_top, size);
        DoubleSum sum;
        I num_before = {};  // less than none: comparisons are minus one
        I here = reinterpret_cast<I>(lane_ids());
        for (int64_t i = 0; i < size; i += kLanes, here += kLanes) {
            const F logit = logits_at(from, i, size);
            sum.add(exponential(logit - highest));
            num_before += (logit > own) | ((logit == own) & (here < static_cast<int32_t>(token)));
            const int64_t rest = size - i;
            const uint32_t all = (1u << kLanes) - 1;
            first.add(i, logit, rest >= kLanes ? all : (1u << rest) - 1);
        }
        int32_t place = 1;
        for (int lane = 0; lane < kLanes; ++lane) place -= num_before[lane];
        rank[row] = place;
        const double log_sum = std::log(sum.total());
        int32_t* to_id = ids + row * (1 + num_top);
        float* to = logprobs + row * (1 + num_top);
        const auto put = [&](int32_t token_id, float logit) {
            *to_id++ = token_id;
            // The best one's distance is 0 and its logarithm alone is left, with all its digits.
            *to++ = static_cast<float>(static_cast<double>(logit) - best - log_sum);
        };
        put(static_cast<int32_t>(token), from[token]);
        for (const int64_t candidate : first.sorted())
            put(FirstCandidates::token_id_of(candidate), FirstCandidates::logit_of(candidate));
    }
};

}  // namespace nanocore
