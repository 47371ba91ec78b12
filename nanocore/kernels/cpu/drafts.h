// Drafts of speculative decoding, found in texts: what followed the same tokens earlier.
//
// N-grams are looked up in the row's own tokens. Suffixes are looked up in automata: one for each
// row, and others over the finished outputs of a salt, which rows with another salt never see.

#pragma once

#include <new>

#include "suffix_automaton.h"

namespace nanocore {

// The scheduler's table of tokens, [rows, stride].
struct TokenTable {
    const int32_t* token_ids;
    int64_t stride;

    const int32_t* row(int64_t i) const { return token_ids + i * stride; }
};

// One call: rows that want drafts, and where these are written, [num_rows, max_drafts].
struct DraftRows {
    int64_t num_rows, max_drafts;
    const int64_t* rows;
    const int64_t* num_tokens;
    const int64_t* most;
    int64_t* counts;
    int32_t* token_ids;
    uint8_t* evidence;

    int64_t most_of(int64_t i) const { return std::clamp<int64_t>(most[i], 0, max_drafts); }
};

// 0 to 7 for 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64 and more.
inline int size_class(int64_t size) {
    return size <= 1 ? 0 : size > 64 ? 7 : 64 - __builtin_clzll(size - 1);
}

// --- n-grams ---

constexpr int64_t kMaxScan = 65536;  // tokens that are searched, back from the end
constexpr int64_t kScanBlock = 64;

struct NgramMatch {
    int64_t end;  // of an earlier occurrence of the last tokens
    int64_t length;
};

// How many tokens before `end` equal the last ones of the text, `most` at most.
inline int64_t common_length(const int32_t* text, int64_t size, int64_t end, int64_t most) {
    int64_t length = 0;
    most = std::min(most, end);
    while (length < most && text[end - 1 - length] == text[size - 1 - length]) ++length;
    return length;
}

// The longest n-gram of shortest to longest tokens at the end that occurs earlier, the latest such
// occurrence; or the latest with `room` tokens behind it, if there is one. Length 0: none occurs.
inline NgramMatch find_ngram(const int32_t* text, int64_t size, int64_t shortest, int64_t longest,
                             int64_t room) {
    NgramMatch best{0, 0};
    int64_t wanted = shortest;  // shorter ones do not help any more
    const int64_t start = std::max<int64_t>(0, size - 1 - kMaxScan);
    for (int64_t high = size - 1; high > start + wanted - 1; high -= kScanBlock) {
        const int64_t low = std::max(high - kScanBlock, start + wanted - 1);
        const int32_t last = text[size - 1], first = text[size - wanted];
        const int32_t* before = text + 1 - wanted;
        int32_t any = 0;
        for (int64_t i = low; i < high; ++i) any |= -((text[i] == last) & (before[i] == first));
        if (!any) continue;
        for (int64_t end = high; end > low; --end) {
            const int64_t length = common_length(text, size, end, longest);
            if (length < wanted) continue;
            const bool has_room = size - end >= room;
            if (length == best.length && !has_room) continue;
            best = {end, length};
            if (has_room && length == longest) return best;
            wanted = length + has_room;
        }
    }
    return best;
}

inline void propose_ngrams(const TokenTable& table, int64_t shortest, int64_t longest,
                           const DraftRows& call) {
    for (int64_t i = 0; i < call.num_rows; ++i) {
        const int32_t* text = table.row(call.rows[i]);
        const int64_t size = call.num_tokens[i], most = call.most_of(i);
        call.counts[i] = 0;
        if (!most || size <= shortest) continue;
        const NgramMatch match = find_ngram(text, size, shortest, std::min(longest, size - 1), most);
        if (!match.length) continue;
        const int length_class = size_class(common_length(text, size, match.end, 65));
        int32_t* drafts = call.token_ids + i * call.max_drafts;
        for (int64_t k = 0; k < most; ++k) {
            // What repeats itself goes on to do so.
            const int64_t from = match.end + k;
            drafts[k] = from < size ? text[from] : drafts[from - size];
            call.evidence[i * call.max_drafts + k] = length_class * 8 + size_class(k + 1);
        }
        call.counts[i] = most;
    }
}

// --- suffixes ---

struct SuffixSettings {
    int64_t max_depth;             // match length that counts for how many drafts there are
    int64_t max_cached;            // finished outputs that are shared, of all salts
    float max_factor;              // drafts per token of the match
    float min_probability;         // of a whole draft
    int64_t max_bytes;
};

// A draft in the making. sum: of the probabilities that its tokens are all right.
struct SuffixDraft {
    static constexpr int64_t kMax = 256;
    int64_t count = 0;
    float sum = 0;
    int32_t token_ids[kMax];
    uint8_t evidence[kMax];
};

// Class of a continuation that followed `times` of `total` occurrences.
inline int support_class(int64_t times, int64_t total) {
    if (times >= total) return total == 1 ? 0 : total == 2 ? 1 : total < 8 ? 2 : 3;
    return times * 8 >= total * 7 ? 4 : times * 4 >= total * 3 ? 5 : times * 2 >= total ? 6 : 7;
}

// Follows the best continuations of a state of whose longest run `length` tokens are matched.
// is_own: the automaton is of the text that is to be continued, which has no continuation yet.
inline void draft_suffix(const SuffixAutomaton& automaton, int32_t v, int64_t length, bool is_own,
                         int64_t most, const SuffixSettings& settings, SuffixDraft& draft) {
    draft.count = 0;
    draft.sum = 0;
    if (v <= SuffixAutomaton::kRoot) return;
    const float factor = settings.max_factor * std::min(length, settings.max_depth);
    most = std::min({most, static_cast<int64_t>(std::min(factor, 1e9f)), SuffixDraft::kMax});
    float probability = 1;
    while (draft.count < most) {
        const SuffixAutomaton::State* state = &automaton.state(v);
        if (state->best == SuffixAutomaton::kNone && is_own && state->link > SuffixAutomaton::kRoot) {
            // The text's end: its end once more, as it occurred earlier.
            state = &automaton.state(state->link);
            length = std::min<int64_t>(length, state->length);
        }
        if (state->best == SuffixAutomaton::kNone) break;
        const int64_t open = is_own && state->end == automaton.num_tokens();
        const int64_t total = std::max<int64_t>(1, state->count - open);
        const SuffixAutomaton::State& next = automaton.state(state->best);
        const int64_t times = std::min<int64_t>(next.count, total);
        probability *= static_cast<float>(times) / total;
        if (probability < settings.min_probability) break;
        draft.token_ids[draft.count] = next.token;
        draft.evidence[draft.count] = size_class(length) * 8 + support_class(times, total);
        draft.sum += probability;
        ++draft.count;
        ++length;
        v = state->best;
    }
}

class SuffixDrafts : public Memory {
   public:
    static constexpr int64_t kMaxRowTokens = 128 * 1024;  // longer rows have no automaton
    static constexpr int64_t kMaxFed = 4096;  // tokens of rows that catch up, in one call
    static constexpr int64_t kAlwaysFed = 64;  // tokens of a row that need not wait

    SuffixDrafts(const TokenTable& table, int64_t num_rows, const SuffixSettings& settings)
        : Memory(settings.max_bytes), table_(table), settings_(settings) {
        rows_ = static_cast<Row*>(resize(nullptr, 0, num_rows * sizeof(Row)));
        num_rows_ = rows_ ? num_rows : 0;
    }

    ~SuffixDrafts() override {
        for (int64_t i = 0; i < num_rows_; ++i) remove(rows_[i].own);
        release(rows_, num_rows_ * sizeof(Row));
    }

    void begin(int64_t i, int64_t salt) {
        if (i >= num_rows_) return;
        remove(rows_[i].own);
        rows_[i] = {};
        rows_[i].salt = salt;
    }

    void end(int64_t i, int64_t num_prompt, int64_t num_tokens, bool has_finished) {
        if (i >= num_rows_) return;
        remove(rows_[i].own);
        rows_[i] = {};
        (void)num_prompt, (void)num_tokens, (void)has_finished;
    }

    void propose(const DraftRows& call) {
        int64_t budget = kMaxFed;
        for (int64_t i = 0; i < call.num_rows; ++i) {
            call.counts[i] = 0;
            if (call.rows[i] >= num_rows_) continue;
            Row& row = rows_[call.rows[i]];
            const int64_t most = call.most_of(i);
            if (!feed(row, table_.row(call.rows[i]), call.num_tokens[i], budget) || !most) continue;
            draft_.count = 0;
            if (row.own) {
                const int32_t v = row.own->state(row.own->last()).link;
                if (v > SuffixAutomaton::kRoot)
                    draft_suffix(*row.own, v, row.own->state(v).length, true, most, settings_, draft_);
            }
            call.counts[i] = draft_.count;
            const int64_t at = i * call.max_drafts;
            std::copy_n(draft_.token_ids, draft_.count, call.token_ids + at);
            std::copy_n(draft_.evidence, draft_.count, call.evidence + at);
        }
    }

   private:
    struct Row {
        SuffixAutomaton* own;
        bool has_none;  // it is too long, or there is no memory
        int64_t salt;
    };

    SuffixAutomaton* add() {
        void* place = resize(nullptr, 0, sizeof(SuffixAutomaton));
        return place ? new (place) SuffixAutomaton(*this, ++last_id_) : nullptr;
    }

    void remove(SuffixAutomaton*& automaton) {
        if (!automaton) return;
        automaton->~SuffixAutomaton();
        release(automaton, sizeof(SuffixAutomaton));
        automaton = nullptr;
    }

    // Lets the row's automaton catch up; false: it has not yet.
    bool feed(Row& row, const int32_t* text, int64_t size, int64_t& budget) {
        if (row.has_none) return true;
        bool is_fed = size <= kMaxRowTokens;
        if (is_fed && !row.own) is_fed = (row.own = add()) && row.own->reserve(size + 256);
        int64_t num_fed = row.own ? row.own->num_tokens() : 0;
        int64_t end = size;
        if (is_fed && size - num_fed > kAlwaysFed) {
            end = num_fed + std::min(size - num_fed, budget);
            budget -= end - num_fed;
        }
        for (; is_fed && num_fed < end; ++num_fed) is_fed = row.own->append(text[num_fed]);
        if (!is_fed) {
            remove(row.own);
            row.has_none = true;
            return true;
        }
        return end == size;
    }

    TokenTable table_;
    SuffixSettings settings_;
    Row* rows_ = nullptr;
    int64_t num_rows_ = 0;
    int64_t last_id_ = 0;
    SuffixDraft draft_;
};

}  // namespace nanocore
