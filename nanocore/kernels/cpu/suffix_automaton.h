// A suffix automaton of token ids that grows token by token, and the memory that it takes.
//
// It knows every run of tokens of its texts: how often each occurred, and what followed. States
// stand for runs that end at the same places; `link` leads to the next shorter runs, which end at
// more places. Appending a token costs constant time on average.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace nanocore {

// Allocations with a common limit. An allocation that fails returns null and changes nothing.
class Memory {
   public:
    explicit Memory(int64_t limit) : limit_(limit) {}
    virtual ~Memory() = default;

    int64_t used() const { return used_; }

    // Like realloc; what begins with this call is filled with zeros.
    void* resize(void* old, int64_t old_bytes, int64_t bytes) {
        while (used_ + bytes - old_bytes > limit_)
            if (!drop_oldest()) return nullptr;
        void* resized;
        while (!(resized = old ? std::realloc(old, bytes) : std::calloc(bytes, 1)))
            if (!drop_oldest()) return nullptr;
        used_ += bytes - old_bytes;
        return resized;
    }

    void release(void* old, int64_t bytes) {
        std::free(old);
        used_ -= old ? bytes : 0;
    }

   protected:
    // Gives back what is needed least; false: there is nothing.
    virtual bool drop_oldest() { return false; }

   private:
    int64_t limit_;
    int64_t used_ = 0;
};

class SuffixAutomaton {
   public:
    static constexpr int32_t kNone = -1, kRoot = 0;
    static constexpr int32_t kMaxCount = 127;  // counts stop here: so does the walk that counts

    struct State {
        int32_t length;  // of its longest run
        int32_t link;    // state of the longest run that ends at more places
        int32_t token;   // the last one of its runs
        int32_t count;   // occurrences
        int32_t best;    // target of the most frequent continuation; of equals, the latest
        int32_t first;   // target of one transition; the others are in the table
        int32_t edges;   // slot of the first of these
        int32_t end;     // how many tokens there were at the last occurrence that was counted
    };

    SuffixAutomaton(Memory& memory, int64_t id) : memory_(memory), id_(id) {}
    SuffixAutomaton(const SuffixAutomaton&) = delete;
    ~SuffixAutomaton() {
        memory_.release(states_, capacity_ * sizeof(State));
        memory_.release(table_, table_size() * sizeof(Edge));
    }

    int64_t id() const { return id_; }
    int32_t num_tokens() const { return num_tokens_; }
    int64_t num_bytes() const { return capacity_ * sizeof(State) + table_size() * sizeof(Edge); }
    const State& state(int32_t v) const { return states_[v]; }
    int32_t last() const { return last_; }

    // The next token begins another text.
    void restart() { last_ = kRoot; }

    // Makes room for so many tokens of usual text.
    bool reserve(int64_t num_tokens) {
        return reserve_states(num_tokens + num_tokens / 2) && reserve_edges(num_tokens);
    }

    // false: there is no memory, and the automaton is of no use any more.
    bool append(int32_t token) {
        if (!reserve_states(num_states_ + 2)) return false;
        ++num_tokens_;
        int32_t v = last_;
        int32_t* known = find(v, token);
        if (known) {
            last_ = exact(v, *known);
            if (last_ == kNone) return false;
        } else {
            const int32_t added = add_state(states_[v].length + 1, token);
            states_[added].count = 1;
            states_[added].end = num_tokens_;
            for (; v != kNone; v = states_[v].link) {
                if ((known = find(v, token))) break;
                if (!add_edge(v, added)) return false;
                set_best(v, added);
            }
            const int32_t link = known ? exact(v, *known) : kRoot;
            if (link == kNone) return false;
            states_[added].link = link;
            last_ = added;
        }
        count(v, token);
        return true;
    }

    // The state behind a transition; kNone: there is none.
    int32_t next(int32_t v, int32_t token) {
        const int32_t* target = num_states_ ? find(v, token) : nullptr;
        return target ? *target : kNone;
    }

   private:
    struct Edge {
        int32_t owner;  // number of the state that it leaves, plus 1; 0: the slot is free
        int32_t token;
        int32_t to;
        int32_t next;  // slot of another one of the same state
    };

    // Counts the runs that end with the new token, all known before; v: the first to be followed.
    void count(int32_t v, int32_t token) {
        for (int32_t previous = kNone; v != kNone; v = states_[v].link) {
            const int32_t u = *find(v, token);
            if (u != previous) {
                if (states_[u].count == kMaxCount) break;  // as are all shorter ones
                ++states_[u].count;
                states_[u].end = num_tokens_;
                previous = u;
            }
            set_best(v, u);
        }
    }

    void set_best(int32_t v, int32_t u) {
        int32_t& best = states_[v].best;
        if (best == kNone || states_[u].count >= states_[best].count) best = u;
    }

    // The state of v's longest run and one token more, which q has among others; kNone: no memory.
    int32_t exact(int32_t v, int32_t q) {
        if (states_[q].length == states_[v].length + 1) return q;
        int64_t num_edges = 0;
        for (int32_t slot = states_[q].edges; slot != kNone; slot = table_[slot].next) ++num_edges;
        if (!reserve_edges(num_edges_ + num_edges)) return kNone;
        const int32_t clone = num_states_++;
        State& state = states_[clone] = states_[q];
        state.length = states_[v].length + 1;
        state.edges = kNone;
        for (int32_t slot = states_[q].edges; slot != kNone; slot = table_[slot].next)
            insert(clone, table_[slot].to);
        states_[q].link = clone;
        for (; v != kNone; v = states_[v].link) {
            int32_t* target = find(v, state.token);
            if (!target || *target != q) break;
            *target = clone;
            if (states_[v].best == q) states_[v].best = clone;
        }
        return clone;
    }

    int32_t add_state(int32_t length, int32_t token) {
        states_[num_states_] = {length, kNone, token, 0, kNone, kNone, kNone, 0};
        return num_states_++;
    }

    bool reserve_states(int64_t wanted) {
        if (wanted <= capacity_) return true;
        const int64_t capacity = std::max(wanted, capacity_ + capacity_ / 2 + 64);
        void* grown = memory_.resize(states_, capacity_ * sizeof(State), capacity * sizeof(State));
        if (!grown) return false;
        states_ = static_cast<State*>(grown);
        capacity_ = capacity;
        if (!num_states_) add_state(0, kNone);
        return true;
    }

    bool add_edge(int32_t from, int32_t to) {
        if (states_[from].first == kNone) {
            states_[from].first = to;
            return true;
        }
        if (!reserve_edges(num_edges_ + 1)) return false;
        insert(from, to);
        return true;
    }

    void insert(int32_t from, int32_t to) {
        const int32_t token = states_[to].token;
        int64_t slot = hash(from, token);
        while (table_[slot].owner) slot = (slot + 1) & mask_;
        table_[slot] = {from + 1, token, to, states_[from].edges};
        states_[from].edges = static_cast<int32_t>(slot);
        ++num_edges_;
    }

    // At most two thirds of the table are used.
    bool reserve_edges(int64_t wanted) {
        if (table_ && wanted + wanted / 2 <= mask_) return true;
        int64_t size = std::max<int64_t>(64, table_size());
        while (wanted + wanted / 2 >= size) size *= 2;
        void* larger = memory_.resize(nullptr, 0, size * sizeof(Edge));
        if (!larger) return false;
        Edge* old = table_;
        const int64_t old_size = table_size();
        table_ = static_cast<Edge*>(larger);
        mask_ = size - 1;
        shift_ = 64 - __builtin_ctzll(size);
        num_edges_ = 0;
        for (int64_t i = 0; i < old_size; ++i)
            if (old[i].owner) states_[old[i].owner - 1].edges = kNone;
        for (int64_t i = 0; i < old_size; ++i)
            if (old[i].owner) insert(old[i].owner - 1, old[i].to);
        memory_.release(old, old_size * sizeof(Edge));
        return true;
    }

    int64_t table_size() const { return table_ ? mask_ + 1 : 0; }

    int64_t hash(int32_t from, int32_t token) const {
        const uint64_t key = static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(token);
        return static_cast<int64_t>(key * 0x9e3779b97f4a7c15u >> shift_);
    }

    // Where the target of a transition is stored; null: there is none.
    int32_t* find(int32_t v, int32_t token) {
        State& state = states_[v];
        if (state.first == kNone) return nullptr;
        if (states_[state.first].token == token) return &state.first;
        if (state.edges == kNone) return nullptr;
        for (int64_t slot = hash(v, token); table_[slot].owner; slot = (slot + 1) & mask_)
            if (table_[slot].owner == v + 1 && table_[slot].token == token) return &table_[slot].to;
        return nullptr;
    }

    Memory& memory_;
    int64_t id_;
    State* states_ = nullptr;
    int64_t capacity_ = 0;
    int32_t num_states_ = 0;
    Edge* table_ = nullptr;
    int64_t mask_ = 0, num_edges_ = 0;
    int shift_ = 0;
    int32_t last_ = kRoot;
    int32_t num_tokens_ = 0;
};

}  // namespace nanocore
