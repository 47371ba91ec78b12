// Sampling among the tokens that top_k, top_p and min_p leave, without a sort.
//
// In the order of logits, of equal ones the smaller id first, the tokens that stay are always the
// first ones, so each filter is a cut of that order (`Kept`). The cut of min_p is a bound on logits.
// That of top_k is searched for in histograms. For top_p a token is drawn first, with the noise of
// all: it is the answer if the weight of those before it is below the limit, which is likely as
// top_p; else the cut is searched for, too. Most noise is never computed: a logit's weight bounds
// how small its uniform number must be to win. Weights are float32, and their sums double.

#pragma once

#include "token_mask.h"

namespace nanocore {

// The tokens above a scaled logit, and of those equal to it the ones up to an index.
struct Kept {
    float least;
    int32_t last;
};

struct Drawn {
    float scaled;  // logit by temperature
    float noisy;   // with its noise
    int32_t index;
    double mass;   // of all that it was drawn among
};

class FilteredRow {
   public:
    FilteredRow(const RowLogits& logits, float temperature)
        : logits_(logits), heat_(broadcast(temperature)) {
        NumberCheck numbers;
        F maxima[kMaxima];
        for (F& most : maxima) most = broadcast(-kInfinity);
        logits_.each([&](int64_t i, F values) {
            numbers.add(values);
            F& most = maxima[static_cast<uint64_t>(i) / kLanes % kMaxima];
            most = maximum(most, values);
        });
        for (int j = 0; j < kMaxima; ++j) store(maxima[j] / heat_, maxima_ + j * kLanes);
        best_ = *std::max_element(maxima_, maxima_ + kNumMaxima);
        if (!numbers.holds()) best_ = std::numeric_limits<float>::quiet_NaN();
    }

    // The best logit by temperature; not a number if one is none.
    float best() const { return best_; }

    static Kept all() { return {-kInfinity, kAll}; }

    // The tokens not more than this below the best.
    Kept within(float max_gap) const {
        if (max_gap == kInfinity) return all();
        int64_t excluded = ordered(-kInfinity) - 1, passing = ordered(best_);
        while (passing - excluded > 1) {
            const int64_t middle = (passing + excluded) >> 1;
            (best_ - in_order(middle) <= max_gap ? passing : excluded) = middle;
        }
        return {in_order(passing), kAll};
    }

    // Those before a token that was drawn.
    static Kept before(const Drawn& drawn) { return {drawn.scaled, drawn.index - 1}; }

    double mass(Kept of) const {
        DoubleSum sum;
        each(of, [&](int64_t, F scaled, I is_kept, uint32_t) {
            sum.add(weights(scaled, is_kept));
        });
        return sum.total();
    }

    // The token with the greatest noisy logit; kHasMass: with the mass of them all.
    template <bool kHasMass>
    Drawn draw(Kept of, NoiseKey key) const {
        Drawn best{0.0f, -kInfinity, 0, 0.0};
        DoubleSum mass;
        const U ids = lane_ids() + static_cast<uint32_t>(logits_.first_token());
        // log(1 - u) is at least u, so only with u < weight * reach is a token above `best.noisy`.
        // At first: no noise is below -2.9. The slack is for rounding.
        F reach = broadcast(std::exp(3.0f) * kSlack);
        each(of, [&](int64_t i, F scaled, I is_kept, uint32_t) {
            const F weight = weights(scaled, is_kept);
            if constexpr (kHasMass) mass.add(weight);
            const F bound = weight * reach;
            if (!lane_bits(bound >= 0x1p-32f)) return;
            const F uniform = uniform_noise(ids + static_cast<uint32_t>(i), key);
            uint32_t bits = lane_bits(uniform < bound);
            if (!bits) return;
            const F noisy = scaled + gumbel_noise(uniform);
            for (; bits; bits &= bits - 1) {
                const int lane = __builtin_ctz(bits);
                if (noisy[lane] > best.noisy)
                    best = {scaled[lane], noisy[lane], static_cast<int32_t>(i + lane), 0.0};
            }
            reach = broadcast(std::exp(std::min(best_ - best.noisy, 3.0f)) * kSlack);
        });
        best.mass = mass.total();
        return best;
    }

    // Of these tokens the first ones: each that has less than `target` before it, and the best.
    // Summed up are their weights or, without kOfWeights, their number.
    template <bool kOfWeights>
    Kept cut(Kept of, double target) const {
        float low = std::max(of.least, kLeast);
        if constexpr (kOfWeights) low = std::max(low, best_ + kLeastExponent);
        else if (target <= kNumMaxima) low = std::max(low, kth_maximum(static_cast<int>(target)));
        double above = 0.0;  // of the tokens above those that are gathered
        Gathered at = gather(of, low, best_, [](F) { return ~I{}; });
        while (at.count > kFew && at.least < at.most) {
            Histogram<kOfWeights> histogram(at.least, at.most);
            each_between(of, at.least, at.most, [&](int64_t, F scaled, I is_between, uint32_t bits) {
                histogram.add(scaled, weights(scaled, is_between), bits);
            });
            const int bucket = histogram.find(target, above);
            if (bucket < 0) return of;
            at = gather(of, at.least, at.most,
                        [&](F scaled) { return histogram.buckets(scaled) == bucket; });
        }
        float* few = at.few;
        const int64_t count = at.count;
        const int64_t num_few = std::min<int64_t>(count, kFew);
        std::sort(few, few + num_few, std::greater<>());
        for (int64_t i = 0; i < num_few;) {
            const float logit = few[i];
            int64_t end = i;
            while (end < num_few && few[end] == logit) ++end;
            if (count > kFew) end = count;  // they are all equal
            const double one = kOfWeights ? weight_of(logit) : 1.0;
            if (above + (end - i) * one >= target) {
                // Of equal logits those with less than the target before them.
                const double lacking = std::ceil((target - above) / one);
                return first_equal(of, logit, std::max<int64_t>(1, lacking), end - i);
            }
            above += (end - i) * one;
            i = end;
        }
        return of;
    }

   private:
    static constexpr float kInfinity = std::numeric_limits<float>::infinity();
    static constexpr float kLeast = std::numeric_limits<float>::lowest();
    static constexpr int32_t kAll = std::numeric_limits<int32_t>::max();
    static constexpr int kMaxima = 8, kNumMaxima = kMaxima * kLanes;
    static constexpr int kFew = 256;
    static constexpr float kLeastExponent = -88.0f;  // weights below are 0
    static constexpr float kSlack = 1.001f;

    // Weights, or numbers, of tokens by how far they are below the greatest.
    template <bool kOfWeights>
    struct Histogram {
        static constexpr int kBuckets = 1024;
        float lift, top, scale;
        std::conditional_t<kOfWeights, double, int32_t> sums[kBuckets] = {};

        Histogram(float low, float high) {
            const float width = high - low;
            lift = width > 1e30f ? 0x1p-64f : width < 1e-20f ? 0x1p100f : 1.0f;
            top = high * lift;
            scale = (kBuckets - 1) / (top - low * lift);
        }

        // The greater the logit, the smaller; the greatest one's is 0, and the least one's is not.
        NANOCORE_INLINE I buckets(F scaled) const {
            return __builtin_convertvector((top - scaled * lift) * scale, I);
        }

        NANOCORE_INLINE void add(F scaled, F weight, uint32_t bits) {
            const I at = buckets(scaled);
            const auto add_lane = [&](int lane) {
                if constexpr (kOfWeights) sums[at[lane]] += weight[lane];
                else ++sums[at[lane]];
            };
            if (bits == (1u << kLanes) - 1) {  // most vectors, and the compiler knows the lanes
                for (int lane = 0; lane < kLanes; ++lane) add_lane(lane);
                return;
            }
            for (; bits; bits &= bits - 1) add_lane(__builtin_ctz(bits));
        }

        // Where the sum reaches the target, or -1; what comes before it is added to `above`.
        int find(double target, double& above) const {
            for (int i = 0; i < kBuckets; ++i) {
                if (sums[i] > 0 && above + sums[i] >= target) return i;
                above += sums[i];
            }
            return -1;
        }
    };

    // body(i, scaled logits, which are kept, the same as bits) for vectors with a token that is.
    template <typename Body>
    NANOCORE_INLINE void each(Kept of, const Body& body) const {
        const F least = broadcast(of.least);
        // A logit below is not kept, with room for rounding: most vectors need no division. (Large
        // temperatures make small floats, which have few digits.) Minus infinity weighs nothing.
        const float about = of.least * heat_[0];
        const float room = std::abs(about) * 1e-6f + heat_[0] * 1e-44f + 1e-37f;
        const F floor = broadcast(std::isfinite(about) ? about - room : kLeast);
        logits_.each([&](int64_t i, F logits) {
            if (!lane_bits(logits >= floor)) return;
            const F scaled = logits / heat_;
            I is_kept = scaled >= least;
            if (of.last != kAll) {
                const I index = reinterpret_cast<I>(lane_ids()) + static_cast<int32_t>(i);
                is_kept &= (scaled > least) | (index <= of.last);
            }
            if (const uint32_t bits = lane_bits(is_kept)) body(i, scaled, is_kept, bits);
        });
    }

    // The same for those not below `low` and not above `high`.
    template <typename Body>
    NANOCORE_INLINE void each_between(Kept of, float low, float high, const Body& body) const {
        each(low > of.least ? Kept{low, kAll} : of, [&](int64_t i, F scaled, I is_kept, uint32_t) {
            const I is_between = is_kept & (scaled <= high);
            if (const uint32_t bits = lane_bits(is_between)) body(i, scaled, is_between, bits);
        });
    }

    // Logits: their number, the least and the greatest, and the first few.
    struct Gathered {
        int64_t count = 0;
        float least, most;
        float few[kFew];
    };

    template <typename IsIn>
    Gathered gather(Kept of, float low, float high, const IsIn& is_in) const {
        Gathered found;
        F least = broadcast(kInfinity), most = broadcast(-kInfinity);
        each_between(of, low, high, [&](int64_t, F scaled, I is_between, uint32_t) {
            const I is_found = is_between & is_in(scaled);
            least = is_found && scaled < least ? scaled : least;
            most = is_found && scaled > most ? scaled : most;
            uint32_t bits = lane_bits(is_found);
            const int64_t before = found.count;
            found.count += __builtin_popcount(bits);
            if (before < kFew)
                for (int64_t i = before; bits && i < kFew; bits &= bits - 1)
                    found.few[i++] = scaled[__builtin_ctz(bits)];
        });
        found.least = -max_lanes(-least);
        found.most = max_lanes(most);
        return found;
    }

    NANOCORE_INLINE F weights(F scaled, I is_kept) const {
        return is_kept ? exponential(scaled - best_) : F{};
    }

    float weight_of(float scaled) const { return exponential(broadcast(scaled - best_))[0]; }

    // The k-th of maxima of as many parts of the row: so many tokens reach it.
    float kth_maximum(int k) const {
        float sorted[kNumMaxima];
        std::copy(maxima_, maxima_ + kNumMaxima, sorted);
        std::nth_element(sorted, sorted + k - 1, sorted + kNumMaxima, std::greater<>());
        return sorted[k - 1];
    }

    // What of the kept tokens comes before, and `num` of the `num_equal` that have this logit.
    Kept first_equal(Kept of, float logit, int64_t num, int64_t num_equal) const {
        if (num >= num_equal) return {logit, logit > of.least ? kAll : of.last};
        int32_t last = 0;
        each_between(of, logit, logit, [&](int64_t i, F, I, uint32_t bits) {
            for (; bits; bits &= bits - 1)
                if (--num == 0) last = static_cast<int32_t>(i + __builtin_ctz(bits));
        });
        return {logit, last};
    }

    // Integers in the order of floats.
    static int64_t ordered(float x) {
        int32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        return bits ^ ((bits >> 31) & 0x7fffffff);
    }
    static float in_order(int64_t x) {
        const int32_t key = static_cast<int32_t>(x), bits = key ^ ((key >> 31) & 0x7fffffff);
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    RowLogits logits_;
    F heat_;
    float best_;
    float maxima_[kNumMaxima];  // by temperature, each of another part of the row
};

struct BestFilteredTokenCall {
    const float* logits;
    int64_t size;
    int64_t stride;
    TokenMask mask;
    const float* temperature;
    const int64_t* seed;
    const int64_t* position;
    const int32_t* top_k;
    const float* top_p;
    const float* max_gap;  // between scaled logits, as min_p has it
    float* value;
    int64_t* index;
    int64_t rows;

    void run(Workspace& workspace) const {
        workspace.pool.loop(rows, [&](int64_t row, int) {
            const RowLogits from(logits + row * stride, size, mask.of_row(row), 0);
            const FilteredRow tokens(from, temperature[row]);
            value[row] = tokens.best();
            index[row] = kNoToken;
            if (!std::isfinite(tokens.best())) return;
            Kept kept = tokens.within(max_gap[row]);
            const NoiseKey key(seed[row], position[row]);
            if (top_k[row] < size) kept = tokens.cut<false>(kept, std::max(top_k[row], 1));
            const Drawn drawn = draw(tokens, kept, key, top_p[row]);
            value[row] = drawn.noisy;
            index[row] = drawn.index;
        });
    }

   private:
    static Drawn draw(const FilteredRow& tokens, Kept kept, NoiseKey key, float top_p) {
        if (!(top_p < 1.0f)) return tokens.draw<false>(kept, key);
        const Drawn drawn = tokens.draw<true>(kept, key);
        const double limit = static_cast<double>(top_p) * drawn.mass;
        if (tokens.mass(tokens.before(drawn)) < limit) return drawn;
        return tokens.draw<false>(tokens.cut<true>(kept, limit), key);
    }
};

}  // namespace nanocore
