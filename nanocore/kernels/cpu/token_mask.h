// A row of logits as samplers read it: with a mask, only where a token is allowed.
//
// A mask has a bit for each token of the vocabulary (logit_edits.py). The bits of 32 logits are looked
// at together: where there are none the logits are not even loaded, and where there are all of them
// they are read like those of a row without a mask.

#pragma once

#include <algorithm>

#include "noise.h"

namespace nanocore {

struct TokenMask {
    const uint32_t* words;  // [masks, num_words], the lowest bit first
    int64_t num_words;
    const int32_t* index;  // which mask a row has, -1 is none; null if no row has any

    const uint32_t* of_row(int64_t row) const {
        return index && index[row] >= 0 ? words + index[row] * num_words : nullptr;
    }
};

class RowLogits {
   public:
    // words: the row's mask, or null. first_token: the first logit's.
    RowLogits(const float* logits, int64_t size, const uint32_t* words, int64_t first_token)
        : logits_(logits), size_(size), words_(words), first_token_(first_token) {}

    int64_t first_token() const { return first_token_; }

    // body(i, a vector of logits from number i on) in rising order, i being multiples of kLanes.
    // Forbidden tokens are minus infinity; where 32 of them are side by side they are left out.
    template <typename Body>
    NANOCORE_INLINE void each(const Body& body) const {
        const U lane_bit = broadcast(uint32_t{1}) << lane_ids();
        const F none = broadcast(-std::numeric_limits<float>::infinity());
        // Without a mask there is one run of logits.
        const int64_t run = words_ ? kWordBits : size_;
        for (int64_t start = 0; start < size_; start += run) {
            const uint32_t allowed = words_ ? allowed_from(start) : kAll;
            if (!allowed) continue;
            const int64_t end = std::min(start + run, size_);
            const int64_t last_simple = allowed == kAll ? size_ - kLanes : -1;
            for (int64_t i = start; i < end; i += kLanes) {
                F logits;
                if (i <= last_simple) {
                    logits = load(logits_ + i);
                } else {
                    logits = logits_at(logits_, i, size_);
                    if (allowed != kAll) {
                        const U bits = broadcast(allowed >> (i - start));
                        logits = (bits & lane_bit) != 0 ? logits : none;
                    }
                }
                body(i, logits);
            }
        }
    }

   private:
    static constexpr int kWordBits = 32;
    static constexpr uint32_t kAll = 0xffffffffu;

    // A bit for each of 32 logits from number i on; whatever is behind the last one has any.
    uint32_t allowed_from(int64_t i) const {
        const int64_t token = first_token_ + i;
        const uint32_t* word = words_ + token / kWordBits;
        const int shift = static_cast<int>(token % kWordBits);
        const bool goes_on = shift > 0 && std::min(i + kWordBits, size_) - i > kWordBits - shift;
        const uint64_t next = goes_on ? word[1] : 0;
        return static_cast<uint32_t>((next << kWordBits | word[0]) >> shift);
    }

    const float* logits_;
    int64_t size_;
    const uint32_t* words_;
    int64_t first_token_;
};

}  // namespace nanocore
