// Which experts each token takes, and the rows that each expert then has.
//
// A token takes the experts of its greatest scores plus bias, of equal ones the smaller number first.
// Scores are float32. NaN counts as the greatest, so a token whose scores are not numbers has weights
// that are not numbers either. All of it depends on the token's row alone, and is the same in every
// instruction set with fused multiply-adds.

#pragma once

#include <vector>

#include "multiply.h"

namespace nanocore {

// Of logits [rows, num_experts].
template <typename T>
struct Routing {
    const T* logits;
    int64_t stride;
    int64_t num_experts;
    int64_t num_chosen;
    bool is_normalized;  // whether the chosen ones' weights are divided by their sum + epsilon
    bool is_sigmoid;     // and not the softmax
    const float* bias;   // of each expert; null: experts are chosen by their logits
    float epsilon, factor;
};

// The sum of exp(x - largest), in an order that has nothing to do with how wide vectors are.
template <typename T>
inline float sum_of_powers(const T* x, int64_t count, float largest) {
    constexpr int kSums = 16;
    float sums[kSums] = {}, powers[kLanes];
    for (int64_t i = 0; i < count; i += kLanes) {
        const int some = static_cast<int>(std::min<int64_t>(kLanes, count - i));
        store(exponential(load_some(x + i, some) - largest), powers);
        for (int lane = 0; lane < some; ++lane) sums[(i + lane) % kSums] += powers[lane];
    }
    float sum = 0.0f;
    for (const float part : sums) sum += part;
    return sum;
}

// One token's scores of experts.
template <typename T>
struct Scores {
    bool is_sigmoid;
    float largest = 0.0f, sum = 0.0f;  // of the softmax

    Scores(const T* logits, const Routing<T>& routing) : is_sigmoid(routing.is_sigmoid) {
        if (is_sigmoid) return;
        largest = to_float(logits[0]);
        for (int64_t i = 1; i < routing.num_experts; ++i)
            largest = std::max(largest, to_float(logits[i]));
        sum = sum_of_powers(logits, routing.num_experts, largest);
    }

    float of(T logit) const {
        const float x = to_float(logit);
        return is_sigmoid ? sigmoid(broadcast(x))[0] : exponential(broadcast(x - largest))[0] / sum;
    }
};

inline bool is_before(float a, float b) { return a > b || (a != a && b == b); }

// One token's experts, the first choice first, and their weights, rounded to T.
template <typename T>
inline void route_row(const T* logits, const Routing<T>& routing, int32_t* experts, float* weights) {
    const int64_t num_chosen = routing.num_chosen;
    const Scores<T> scores(logits, routing);
    int64_t num_found = 0;
    for (int64_t i = 0; i < routing.num_experts; ++i) {
        const T logit = logits[i];
        const float key = routing.bias ? scores.of(logit) + routing.bias[i] : to_float(logit);
        if (num_found == num_chosen && !is_before(key, weights[num_chosen - 1])) continue;
        int64_t place = num_found < num_chosen ? num_found++ : num_chosen - 1;
        for (; place > 0 && is_before(key, weights[place - 1]); --place) {
            experts[place] = experts[place - 1];
            weights[place] = weights[place - 1];
        }
        experts[place] = static_cast<int32_t>(i);
        weights[place] = key;
    }
    float total = 0.0f;
    for (int64_t c = 0; c < num_chosen; ++c) {
        weights[c] = scores.of(logits[experts[c]]);
        total += weights[c];
    }
    const float divisor = routing.is_normalized ? total + routing.epsilon : 1.0f;
    for (int64_t c = 0; c < num_chosen; ++c) {
        T stored;
        from_float(weights[c] / divisor * routing.factor, &stored);
        weights[c] = to_float(stored);
    }
}

// Some rows of an expert, which are multiplied together.
struct ExpertPanel {
    int64_t first;  // of `RoutedRows::pairs`
    int rows;
    int64_t first_line;  // where it is packed, as so many lines of a row each
};

// An expert that rows have chosen, and its panels.
struct ChosenExpert {
    int64_t expert, first_panel, last_panel;
};

// The rows of all experts. A pair is a token's choice: token * num_chosen + choice.
struct RoutedRows {
    std::vector<int32_t> experts;  // of each pair
    std::vector<float> weights;
    std::vector<int32_t> pairs;  // by expert, in ascending order
    std::vector<int64_t> ends;
    std::vector<ChosenExpert> chosen;  // in ascending order
    std::vector<ExpertPanel> panels;
    int64_t num_lines;

    void resize(int64_t num_pairs) {
        if (num_pairs <= static_cast<int64_t>(experts.size())) return;
        experts.resize(num_pairs);
        weights.resize(num_pairs);
        pairs.resize(num_pairs);
    }

    // Sorts the first pairs by their experts.
    void sort(int64_t num_pairs, int64_t num_experts) {
        ends.assign(num_experts + 1, 0);
        for (int64_t pair = 0; pair < num_pairs; ++pair) ++ends[experts[pair] + 1];
        for (int64_t expert = 0; expert < num_experts; ++expert) ends[expert + 1] += ends[expert];
        chosen.clear();
        panels.clear();
        num_lines = 0;
        for (int64_t expert = 0; expert < num_experts; ++expert) add_panels(expert);
        for (int64_t pair = 0; pair < num_pairs; ++pair)
            pairs[ends[experts[pair]]++] = static_cast<int32_t>(pair);
    }

    int64_t expert_of(const ExpertPanel& panel) const { return experts[pairs[panel.first]]; }

    // The chosen experts, with no more than so many panels each: one may be there several times.
    const std::vector<ChosenExpert>& blocks(int64_t most_panels) {
        const int64_t most = std::max<int64_t>(1, most_panels);
        blocks_.clear();
        for (const ChosenExpert& of : chosen)
            for (int64_t panel = of.first_panel; panel < of.last_panel; panel += most)
                blocks_.push_back({of.expert, panel, std::min(panel + most, of.last_panel)});
        return blocks_;
    }

   private:
    std::vector<ChosenExpert> blocks_;

    void add_panels(int64_t expert) {
        const int64_t first = ends[expert], stop = ends[expert + 1];
        if (first == stop) return;
        const int64_t first_panel = panels.size();
        for (int64_t row = first; row < stop; row += kMaxRows) {
            const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, stop - row));
            panels.push_back({row, rows, num_lines});
            with_rows(rows, [&](auto R) { num_lines += R.value; });
        }
        chosen.push_back({expert, first_panel, static_cast<int64_t>(panels.size())});
    }
};

}  // namespace nanocore
