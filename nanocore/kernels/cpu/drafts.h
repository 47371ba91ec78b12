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
constexpr int64_t kScanBlock = 128;

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

    void clear() { count = 0, sum = 0; }
};

// Class of a continuation that followed `times` of `total` occurrences. What was seen once is likely
// if a shorter run says the same.
inline int support_class(int64_t times, int64_t total, bool is_confirmed) {
    if (times >= total) return total == 1 ? is_confirmed : total == 2 ? 2 : total < 8 ? 3 : 4;
    return times * 4 >= total * 3 ? 5 : times * 2 >= total ? 6 : 7;
}

// Follows the best continuations of a state of whose longest run `length` tokens are matched.
// is_own: the automaton is of the text that is to be continued, which has no continuation yet.
inline void draft_suffix(const SuffixAutomaton& automaton, int32_t v, int64_t length, bool is_own,
                         int64_t most, const SuffixSettings& settings, SuffixDraft& draft) {
    draft.clear();
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
        const SuffixAutomaton::State& shorter = automaton.state(state->link);
        const bool is_confirmed = total == 1 && state->link != SuffixAutomaton::kRoot &&
                                  automaton.state(shorter.best).token == next.token;
        draft.evidence[draft.count] =
            size_class(length) * 8 + support_class(times, total, is_confirmed);
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
    static constexpr int64_t kMaxShared = 1024;  // tokens of outputs that are added in one call
    static constexpr int64_t kMaxOutput = 64 * 1024;  // tokens of an output; others are left out
    static constexpr int kMaxSalts = 256;

    SuffixDrafts(const TokenTable& table, int64_t num_rows, const SuffixSettings& settings)
        : Memory(settings.max_bytes), table_(table), settings_(settings) {
        rows_ = static_cast<Row*>(resize(nullptr, 0, num_rows * sizeof(Row)));
        num_rows_ = rows_ ? num_rows : 0;
    }

    ~SuffixDrafts() override {
        for (int64_t i = 0; i < num_rows_; ++i) remove(rows_[i].own);
        for (Group& group : groups_) clear(group);
        while (first_output_) pop_output();
        release(rows_, num_rows_ * sizeof(Row));
    }

    // salt: above 0.
    void begin(int64_t i, int64_t salt) {
        if (i >= num_rows_) return;
        remove(rows_[i].own);
        rows_[i] = {};
        rows_[i].salt = salt;
        rows_[i].num_groups_seen = -1;
        if (Group* group = find_group(salt)) group->last_used = ++clock_;
    }

    void end(int64_t i, int64_t num_prompt, int64_t num_tokens, bool has_finished) {
        if (i >= num_rows_) return;
        remove(rows_[i].own);
        if (has_finished && settings_.max_cached > 0 && num_tokens > num_prompt)
            push_output(rows_[i].salt, table_.row(i) + num_prompt, num_tokens - num_prompt);
        rows_[i] = {};
    }

    void propose(const DraftRows& call) {
        add_outputs();
        int64_t budget = kMaxFed;
        for (int64_t i = 0; i < call.num_rows; ++i) {
            call.counts[i] = 0;
            if (call.rows[i] >= num_rows_) continue;
            Row& row = rows_[call.rows[i]];
            const int32_t* text = table_.row(call.rows[i]);
            const int64_t size = call.num_tokens[i], most = call.most_of(i);
            if (!feed(row, text, size, budget) || !most) continue;
            const SuffixDraft& draft = best_draft(row, text, size, most);
            call.counts[i] = draft.count;
            std::copy_n(draft.token_ids, draft.count, call.token_ids + i * call.max_drafts);
            std::copy_n(draft.evidence, draft.count, call.evidence + i * call.max_drafts);
        }
    }

   private:
    // Outputs of a salt. The young ones become the old ones, which are dropped then.
    struct Generation {
        SuffixAutomaton* automaton;
        int64_t num_outputs;
    };

    struct Group {
        int64_t salt;  // 0: free
        int64_t last_used;
        Generation young, old;
    };

    // The longest run at a row's end that an automaton of outputs knows.
    struct Cursor {
        int64_t automaton;  // number of it; 0: none
        int64_t position;   // tokens of the row that were read
        int32_t state;
        int32_t length;
    };

    struct Row {
        SuffixAutomaton* own;
        bool has_none;  // it is too long, or there is no memory
        int64_t salt;
        Group* group;
        int64_t num_groups_seen;  // when the group was looked for
        Cursor young, old;
    };

    // A finished output that is not in an automaton yet; its tokens follow in memory.
    struct Output {
        Output* next;
        int64_t salt;
        int64_t size;
        int64_t num_added;
        int64_t automaton;  // number of the one that its first tokens are in

        int32_t* token_ids() { return reinterpret_cast<int32_t*>(this + 1); }
        int64_t num_bytes() const { return sizeof(Output) + size * sizeof(int32_t); }
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

    // The draft with most accepted tokens to be expected; of equals, the row's own.
    const SuffixDraft& best_draft(Row& row, const int32_t* text, int64_t size, int64_t most) {
        SuffixDraft *best = &drafts_[0], *other = &drafts_[1];
        best->clear();
        if (row.own) {
            const int32_t v = row.own->state(row.own->last()).link;
            if (v > SuffixAutomaton::kRoot)
                draft_suffix(*row.own, v, row.own->state(v).length, true, most, settings_, *best);
        }
        const Group* group = group_of(row);
        if (!group) return *best;
        const auto compare = [&](SuffixAutomaton* automaton, Cursor& cursor) {
            if (!automaton) return;
            follow(*automaton, text, size, cursor);
            draft_suffix(*automaton, cursor.state, cursor.length, false, most, settings_, *other);
            if (other->sum > best->sum) std::swap(best, other);
        };
        compare(group->young.automaton, row.young);
        compare(group->old.automaton, row.old);
        return *best;
    }

    // Moves a cursor to the end of the text. One that is far behind begins near the end.
    void follow(SuffixAutomaton& automaton, const int32_t* text, int64_t size, Cursor& cursor) {
        if (cursor.automaton != automaton.id() || size - cursor.position > kAlwaysFed)
            cursor = {automaton.id(), std::max<int64_t>(0, size - settings_.max_depth), 0, 0};
        for (; cursor.position < size; ++cursor.position) {
            shorten(automaton, cursor);
            const int32_t token = text[cursor.position];
            int32_t to;
            while ((to = automaton.next(cursor.state, token)) == SuffixAutomaton::kNone) {
                if (cursor.state == SuffixAutomaton::kRoot) break;
                cursor.state = automaton.state(cursor.state).link;
                cursor.length = automaton.state(cursor.state).length;
            }
            cursor.length = to == SuffixAutomaton::kNone ? 0 : cursor.length + 1;
            cursor.state = std::max(to, SuffixAutomaton::kRoot);
        }
        shorten(automaton, cursor);
    }

    // Its run may have got a state of its own since.
    void shorten(const SuffixAutomaton& automaton, Cursor& cursor) {
        while (cursor.state != SuffixAutomaton::kRoot) {
            const int32_t link = automaton.state(cursor.state).link;
            if (cursor.length > automaton.state(link).length) break;
            cursor.state = link;
        }
    }

    void push_output(int64_t salt, const int32_t* token_ids, int64_t size) {
        Output head{nullptr, salt, std::min(size, kMaxOutput), 0, 0};
        Output* output = static_cast<Output*>(resize(nullptr, 0, head.num_bytes()));
        if (!output) return;
        *output = head;
        std::copy_n(token_ids, head.size, output->token_ids());
        (first_output_ ? last_output_->next : first_output_) = output;
        last_output_ = output;
    }

    void pop_output() {
        Output* output = first_output_;
        first_output_ = output->next;
        release(output, output->num_bytes());
    }

    // Adds a part of the finished outputs that wait.
    void add_outputs() {
        for (int64_t budget = kMaxShared; budget > 0 && first_output_;) {
            Output& output = *first_output_;
            Group* group = find_group(output.salt);
            if (!output.num_added) group = start_output(output);
            growing_ = group ? group->young.automaton : nullptr;
            bool is_added = growing_ && growing_->id() == output.automaton;
            for (; is_added && budget > 0 && output.num_added < output.size; --budget)
                is_added = growing_->append(output.token_ids()[output.num_added++]);
            if (growing_ && growing_->id() == output.automaton && !is_added) drop(group->young);
            growing_ = nullptr;
            if (!is_added || output.num_added == output.size) pop_output();
        }
    }

    Group* start_output(Output& output) {
        Group* group = find_group(output.salt);
        if (!group) {
            group = std::min_element(groups_, groups_ + kMaxSalts, [](const Group& a, const Group& b) {
                return a.last_used < b.last_used;
            });
            clear(*group);
            group->salt = output.salt;
            ++num_groups_;
        }
        group->last_used = ++clock_;
        Generation& young = group->young;
        if (young.automaton && (young.num_outputs >= std::max<int64_t>(1, settings_.max_cached / 2) ||
                                young.automaton->num_bytes() > settings_.max_bytes / 8)) {
            drop(group->old);
            std::swap(group->old, young);
        }
        if (!young.automaton) young = {add(), 0};
        if (!(growing_ = young.automaton)) return nullptr;
        growing_->restart();
        output.automaton = growing_->id();
        ++young.num_outputs;
        if (++num_outputs_ > settings_.max_cached) drop_oldest();
        return group;
    }

    Group* find_group(int64_t salt) {
        for (Group& group : groups_)
            if (group.salt == salt && salt) return &group;
        return nullptr;
    }

    const Group* group_of(Row& row) {
        if (row.num_groups_seen != num_groups_) {
            row.group = find_group(row.salt);
            row.num_groups_seen = num_groups_;
        }
        return row.group;
    }

    void drop(Generation& generation) {
        num_outputs_ -= generation.num_outputs;
        remove(generation.automaton);
        generation = {};
    }

    void clear(Group& group) {
        drop(group.young);
        drop(group.old);
        group = {};
    }

    // Drops a generation of the salt that was not used for longest, but not the one that grows.
    bool drop_oldest() override {
        const auto droppable = [&](Group& group) -> Generation* {
            if (group.old.automaton) return &group.old;
            const bool is_free = group.young.automaton && group.young.automaton != growing_;
            return is_free ? &group.young : nullptr;
        };
        Group* oldest = nullptr;
        for (Group& group : groups_)
            if (droppable(group) && (!oldest || group.last_used < oldest->last_used)) oldest = &group;
        if (!oldest) return false;
        drop(*droppable(*oldest));
        return true;
    }

    TokenTable table_;
    SuffixSettings settings_;
    Row* rows_ = nullptr;
    int64_t num_rows_ = 0;
    int64_t last_id_ = 0;
    SuffixDraft drafts_[2];
    Group groups_[kMaxSalts] = {};
    int64_t num_groups_ = 0;  // made so far
    int64_t num_outputs_ = 0;
    int64_t clock_ = 0;
    SuffixAutomaton* growing_ = nullptr;
    Output *first_output_ = nullptr, *last_output_ = nullptr;
};

}  // namespace nanocore
