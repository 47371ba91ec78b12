// Layers that carry a state from token to token: short convolutions, and the gated delta rule.
//
// A sequence's state after a token lies in the block of that token (state_group.py says which blocks
// have memory). A step reads it from the block of the last computed token, runs over its own tokens
// in their order, and writes it to its last token's block and to every block with memory that it
// fills on its way. So a token's result has the same bits however its sequence was cut into steps.
//
// A draft may be wrong, and a state cannot be taken back. So it is written without the drafts that a
// step ends with, and their inputs are kept. The next step runs over those that were right again,
// before its own tokens: as many operations as before, in the same order.

#pragma once

#include "noise.h"

namespace nanocore {

constexpr int kMaxTaps = 8;

// One layer's states, and where those of a step's sequences are.
struct SequenceStates {
    char* states;
    int64_t block_size;
    int64_t block_bytes;  // from a block to the next: other layers may lie between
    char* drafts;  // inputs of the drafts that each row's last step ended with; null: there are none
    int64_t row_bytes, draft_bytes;  // from a row's to the next one's, and from a draft's
    int64_t num_seqs;
    const int32_t* query_start;  // [num_seqs + 1]
    const int32_t* seq_lens;
    const int32_t* block_table;
    int64_t block_table_stride;
    const int64_t* table_rows;  // [num_seqs], or null: the sequences are the table's first rows
    const int32_t* num_right;   // [num_seqs]: drafts of a row's last step that were right
    const int32_t* num_drafts;  // [num_seqs]: how many drafts it ends with in this one

    int64_t row(int64_t seq) const { return table_rows ? table_rows[seq] : seq; }

    // Tokens of a sequence before the step's.
    int64_t first(int64_t seq) const {
        return seq_lens[seq] - (query_start[seq + 1] - query_start[seq]);
    }

    // Tokens that the state which it begins with lacks.
    int64_t behind(int64_t seq) const { return drafts ? num_right[seq] : 0; }

    // Tokens that the state has which it ends with.
    int64_t end(int64_t seq) const { return seq_lens[seq] - (drafts ? num_drafts[seq] : 0); }

    // The state after so many tokens, at least one; null if it has no memory.
    template <typename T>
    T* after(int64_t seq, int64_t num_tokens) const {
        const int32_t id =
            block_table[row(seq) * block_table_stride + (num_tokens - 1) / block_size];
        return id < 0 ? nullptr : reinterpret_cast<T*>(states + id * block_bytes);
    }

    // Where the state is to be written after so many tokens of a step; null: nowhere.
    template <typename T>
    T* written(int64_t seq, int64_t num_tokens) const {
        const int64_t last = end(seq);
        const bool is_place = num_tokens == last || num_tokens % block_size == 0;
        return num_tokens <= last && is_place ? after<T>(seq, num_tokens) : nullptr;
    }

    // Inputs of a draft.
    template <typename T>
    T* draft(int64_t seq, int64_t index) const {
        return reinterpret_cast<T*>(drafts + row(seq) * row_bytes + index * draft_bytes);
    }

    // Keep inputs of the step's drafts, when those of the last one have been read.
    template <typename T>
    void keep(Workspace& workspace, const T* x, int64_t stride, int64_t width,
              int64_t offset = 0) const {
        if (!drafts || !std::any_of(num_drafts, num_drafts + num_seqs, [](int n) { return n > 0; }))
            return;
        workspace.pool.loop(num_seqs, [&](int64_t seq, int) {
            const T* from = x + (query_start[seq + 1] - num_drafts[seq]) * stride;
            for (int64_t i = 0; i < num_drafts[seq]; ++i, from += stride)
                std::memcpy(draft<T>(seq, i) + offset, from, width * sizeof(T));
        });
    }
};

// What a convolution does with its inputs and results: LFM2's are products, DeltaNet's have silu.
enum class ConvKind : int { kProducts = 0, kSilu = 1 };

// c * conv(b * u), or silu(conv(x)), where conv is causal and has a filter of its own for each
// channel; the state is the last taps - 1 inputs of the filter, the oldest first.
template <typename T>
struct ShortConvCall {
    ConvKind kind;
    const T* x;  // [T, x_stride]: channels of b, of c, and of u; or the channels
    int64_t x_stride;
    int64_t channels;
    int64_t taps;
    const float* weight;  // [taps, channels]
    const float* bias;    // [channels], or null
    SequenceStates states;
    T* out;  // [T, channels]
    int64_t rows;  // with padding

    static constexpr int kVectors = 4;  // that run over the tokens together
    static constexpr int64_t kGroupChannels = kVectors * kLanes, kAhead = 12;

    void run(Workspace& workspace) const {
        const int64_t end = states.query_start[states.num_seqs];
        if (end < rows)
            std::memset(static_cast<void*>(out + end * channels), 0,
                        (rows - end) * channels * sizeof(T));
        // Of a few tokens an item takes more channels: it is longer than claiming it takes.
        const int64_t tokens = std::max<int64_t>(1, end / std::max<int64_t>(1, states.num_seqs));
        const int64_t groups = std::max<int64_t>(1, kItemValues / 4 / tokens / kGroupChannels);
        const int64_t own = groups * kGroupChannels;
        const int64_t items = (channels + own - 1) / own;
        workspace.pool.loop(states.num_seqs * items, [&](int64_t index, int) {
            const int64_t first = index % items * own;
            run_channels(index / items, first, std::min(channels, first + own));
        });
        states.keep(workspace, x, x_stride, kind == ConvKind::kSilu ? channels : 3 * channels);
    }

   private:
    void run_channels(int64_t seq, int64_t channel, int64_t stop) const {
        for (; stop - channel >= kGroupChannels; channel += kGroupChannels) {
            if (taps == 4) run_item<kVectors, 4>(seq, channel, kLanes);
            else run_item<kVectors>(seq, channel, kLanes);
        }
        for (; channel < stop; channel += kLanes)
            run_item<1>(seq, channel, std::min<int64_t>(kLanes, stop - channel));
    }

    static F get(const T* from, int count) {
        return count == kLanes ? load(from) : load_some(from, count);
    }
    static void put(F value, T* to, int count) {
        count == kLanes ? store(value, to) : store_some(value, to, count);
    }
    static F get_float(const float* from, int count) {
        return count == kLanes ? load(from) : load_some(from, count);
    }

    // The filter's input: `from` leads to the vector's channels of a token.
    F input(const T* from, int count) const {
        const F x = get(from, count);
        return kind == ConvKind::kSilu ? x : rounded(x * get(from + 2 * channels, count), out);
    }

    // Channels from one on; count: of the last vector. known_taps: their number, or 0.
    template <int vectors, int known_taps = 0>
    void run_item(int64_t seq, int64_t channel, int count) const {
        const int64_t taps = known_taps ? known_taps : this->taps;
        const int64_t start = states.query_start[seq], stop = states.query_start[seq + 1];
        if (start == stop) return;
        const int64_t behind = states.behind(seq), first = states.first(seq) - behind;
        F inputs[vectors][kMaxTaps] = {}, filter[vectors][kMaxTaps], shift[vectors] = {};
        const T* before = first ? states.template after<T>(seq, first) : nullptr;
        for (int v = 0; v < vectors; ++v) {
            const int64_t at = channel + v * kLanes;
            for (int64_t j = 0; j < taps; ++j)
                filter[v][j] = get_float(weight + j * channels + at, count);
            if (bias) shift[v] = get_float(bias + at, count);
            // Without a token before there are zeros, and no memory is read.
            for (int64_t j = 0; before && j < taps - 1; ++j)
                inputs[v][j] = get(before + j * channels + at, count);
        }
        for (int64_t i = 0; i < behind + stop - start; ++i) {
            const int64_t t = start + i - behind;
            const T* from = (i < behind ? states.template draft<T>(seq, i) : x + t * x_stride) + channel;
            for (int v = 0; v < vectors && t + kAhead < stop; ++v)  // a row is far from the next one
                prefetch_line(x + (t + kAhead) * x_stride + channel + v * kLanes);
            for (int v = 0; v < vectors; ++v, from += kLanes) {
                inputs[v][taps - 1] = input(from, count);
                if (i >= behind) put(result(inputs[v], filter[v], taps, shift[v], from, count),
                                     out + t * channels + channel + v * kLanes, count);
                for (int64_t j = 0; j < taps - 1; ++j) inputs[v][j] = inputs[v][j + 1];
            }
            if (T* to = states.template written<T>(seq, first + i + 1))
                for (int v = 0; v < vectors; ++v)
                    for (int64_t j = 0; j < taps - 1; ++j)
                        put(inputs[v][j], to + j * channels + channel + v * kLanes, count);
        }
    }

    NANOCORE_INLINE F result(const F* inputs, const F* filter, int64_t taps, F sum, const T* from,
                             int count) const {
        for (int64_t j = 0; j < taps; ++j) sum = multiply_add(filter[j], inputs[j], sum);
        sum = rounded(sum, out);
        return kind == ConvKind::kSilu ? activate(Gate::kSilu, sum)
                                       : sum * get(from + channels, count);
    }
};

// log(1 + e^x).
NANOCORE_INLINE F softplus(F x) {
    const F power = exponential(x > 20.0f ? broadcast(20.0f) : x), sum = 1.0f + power;
    const F lost = sum - 1.0f;  // what the sum has lost of a small power is put back by the quotient
    const F log_sum = lost == 0.0f ? power : logarithm(sum) * (power / lost);
    return x > 20.0f ? x : log_sum;
}

// Gated DeltaNet (Yang et al. 2024): for each token, with q and k of length 1,
//     S = decay * S;  S += k (beta (v - S^T k))^T;  out = S^T q / sqrt(key_dim).
// Tokens follow one another, so bits do not depend on how they were cut into steps, and fewer
// operations are done than by chunks. An item is a value head, or some columns of one where there
// are many threads. It reads a few tokens at a time. Then these run over some columns of S, which
// stay in the first cache meanwhile, and over the next columns. The update of a token and the
// products of the next one with S are one pass.
template <typename T>
struct DeltaRuleCall {
    const T* qkv;  // [T, qkv_stride]: heads of q, of k, and of v
    int64_t qkv_stride;
    const T* b;  // [T, gate_stride]: b of each value head, and then a
    int64_t gate_stride;
    int64_t key_heads, value_heads, key_dim, value_dim;
    bool is_tiled;          // value head h has key head h % key_heads, and not h / (their ratio)
    const float* decay;     // [value_heads]: -exp(A_log)
    const float* time_bias; // [value_heads]
    SequenceStates states;  // [value_heads][value_dim / 32][key_dim][32] float32
    T* out;  // [T, value_heads * value_dim]
    int64_t rows;

    static constexpr int kColumns = 32, kItemBlocks = 4;
    static constexpr int kVectors = 4;  // of columns at a time: their sums fill the registers
    static constexpr int kMaxKeyDim = 256, kTokens = 16;

    void run(Workspace& workspace) const {
        const int64_t end = states.query_start[states.num_seqs], width = value_heads * value_dim;
        if (end < rows)
            std::memset(static_cast<void*>(out + end * width), 0, (rows - end) * width * sizeof(T));
        const int64_t blocks = value_dim / kColumns;
        const bool are_many = states.num_seqs * value_heads >= 4 * workspace.pool.num_threads();
        const int64_t own = are_many ? std::min<int64_t>(kItemBlocks, blocks) : 1;
        const int64_t parts = (blocks + own - 1) / own, items = value_heads * parts;
        workspace.pool.loop(states.num_seqs * items, [&](int64_t index, int) {
            const int64_t item = index % items, block = item % parts * own;
            run_item(index / items, item / parts, block, std::min(own, blocks - block));
        });
        states.keep(workspace, qkv, qkv_stride, channels());
        states.keep(workspace, b, gate_stride, 2 * value_heads, channels());
    }

   private:
    // Some tokens of a head that follow one another. Those without results have no `out`.
    struct Tokens {
        int64_t count;
        alignas(64) float k[kTokens * kMaxKeyDim], q[kTokens * kMaxKeyDim];
        alignas(64) float decay[kTokens], beta[kTokens];
        const T* v[kTokens];
        T* out[kTokens];
    };

    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }

    // The step's tokens from `first` on; they are behind `behind` drafts of the last step's.
    void read(int64_t seq, int64_t head, int64_t first, int64_t behind, Tokens& tokens) const {
        const int64_t key_head = is_tiled ? head % key_heads : head / (value_heads / key_heads);
        const float root = std::sqrt(static_cast<float>(key_dim));
        float a_of[kTokens] = {}, b_of[kTokens] = {};
        for (int64_t i = 0; i < tokens.count; ++i) {
            const int64_t index = first + i - behind, t = states.query_start[seq] + index;
            const T* kept = index < 0 ? states.template draft<T>(seq, first + i) : nullptr;
            const T* from = kept ? kept : qkv + t * qkv_stride;
            const T* gates = kept ? kept + channels() : b + t * gate_stride;
            unit(from + key_head * key_dim, root, tokens.q + i * key_dim);
            unit(from + (key_heads + key_head) * key_dim, 1.0f, tokens.k + i * key_dim);
            a_of[i] = to_float(gates[value_heads + head]) + time_bias[head];
            b_of[i] = to_float(gates[head]);
            tokens.v[i] = from + 2 * key_heads * key_dim + head * value_dim;
            tokens.out[i] = kept ? nullptr : out + (t * value_heads + head) * value_dim;
            if (t + kTokens < states.query_start[seq + 1]) {  // they are far from one another
                const T* later = qkv + (t + kTokens) * qkv_stride;
                prefetch(later + key_head * key_dim, key_dim);
                prefetch(later + (key_heads + key_head) * key_dim, key_dim);
                prefetch(later + 2 * key_heads * key_dim + head * value_dim, value_dim);
            }
        }
        for (int64_t i = 0; i < tokens.count; i += kLanes) {
            store(exponential(decay[head] * softplus(load(a_of + i))), tokens.decay + i);
            store(rounded(sigmoid(load(b_of + i)), out), tokens.beta + i);
        }
    }

    static void prefetch(const T* from, int64_t count) {
        for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, 2);
    }

    // x / |x| / divisor.
    void unit(const T* x, float divisor, float* to) const {
        F sums = {};
        for (int64_t i = 0; i < key_dim; i += kLanes) {
            const F value = load(x + i);
            sums = multiply_add(value, value, sums);
        }
        const F factor = broadcast(1.0f / std::sqrt(sum_lanes(sums) + 1e-6f) / divisor);
        for (int64_t i = 0; i < key_dim; i += kLanes) store(load(x + i) * factor, to + i);
    }

    void run_item(int64_t seq, int64_t head, int64_t block, int64_t num_blocks) const {
        const int64_t start = states.query_start[seq], stop = states.query_start[seq + 1];
        if (start == stop) return;
        const int64_t behind = states.behind(seq), first = states.first(seq) - behind;
        const int64_t count = behind + stop - start, size = key_dim * kColumns;
        const int64_t place = (head * (value_dim / kColumns) + block) * size;
        alignas(64) float memory[kItemBlocks * kMaxKeyDim * kColumns];
        const float* from = memory;
        if (first)
            from = states.template after<float>(seq, first) + place;
        else
            std::memset(memory, 0, num_blocks * size * sizeof(float));
        Tokens tokens;
        for (int64_t n = 0; n < count; n += tokens.count) {
            float* kept = nullptr;  // tokens are read up to one whose state is kept
            for (tokens.count = 0; !kept && tokens.count < kTokens && n + tokens.count < count;)
                kept = states.template written<float>(seq, first + n + ++tokens.count);
            read(seq, head, n, behind, tokens);
            float* to = kept ? kept + place : memory;
            const int64_t own = block * kColumns, columns = num_blocks * kColumns;
            int64_t column = 0;
            for (; column + kVectors * kLanes <= columns; column += kVectors * kLanes)
                run_columns<kVectors>(tokens, own, column, from, memory, to);
            if constexpr (kVectors * kLanes > kColumns)
                if (column < columns)
                    run_columns<kColumns / kLanes>(tokens, own, column, from, memory, to);
            from = to;
        }
    }

    // S lies at `from` before the tokens, in memory between them, and at `to` after them.
    template <int vectors>
    void run_columns(const Tokens& tokens, int64_t first, int64_t column, const float* from,
                     float* memory, float* to) const {
        const int64_t keys = key_dim;
        const int64_t place = column / kColumns * keys * kColumns + column % kColumns;
        F dots[vectors] = {};  // S^T k of the token that comes
        from += place;
        for (int64_t i = 0; i < keys; ++i)
            for (int v = 0; v < vectors; ++v)
                dots[v] =
                    multiply_add(broadcast(tokens.k[i]), load(from + at(keys, i, v)), dots[v]);
        for (int64_t n = 0; n < tokens.count; ++n) {
            const bool is_last = n + 1 == tokens.count;
            float* own = place + (is_last ? to : memory);
            F change[vectors], sums[vectors] = {};
            const F factor = broadcast(tokens.decay[n]), beta = broadcast(tokens.beta[n]);
            for (int v = 0; v < vectors; ++v) {
                const F value = load(tokens.v[n] + first + column + v * kLanes);
                change[v] = beta * (value - factor * dots[v]);
                dots[v] = F{};
            }
            const float *q = tokens.q + n * keys, *k = tokens.k + n * keys;
            if (is_last) update<vectors, false>(q, k, keys, factor, change, from, own, sums, dots);
            else update<vectors, true>(q, k, keys, factor, change, from, own, sums, dots);
            from = own;
            if (T* to_out = tokens.out[n])
                for (int v = 0; v < vectors; ++v)
                    store(sums[v], to_out + first + column + v * kLanes);
        }
    }

    // A key's vector of columns: blocks follow one another.
    static NANOCORE_INLINE int64_t at(int64_t keys, int64_t key, int vector) {
        const int column = vector * kLanes;
        return column / kColumns * keys * kColumns + key * kColumns + column % kColumns;
    }

    // A token's S, its products with q, and those with the next token's k, if there is one.
    template <int vectors, bool has_next>
    static NANOCORE_INLINE void update(const float* q, const float* k, int64_t keys, F factor,
                                       const F* change, const float* from, float* to, F* sums,
                                       F* dots) {
        for (int64_t i = 0; i < keys; ++i) {
            const F q_of = broadcast(q[i]), k_of = broadcast(k[i]);
            const F k_next = has_next ? broadcast(k[keys + i]) : F{};
            // All loads come before the stores, which may be 4 KiB from them: they would wait.
            F s[vectors];
            for (int v = 0; v < vectors; ++v) s[v] = factor * load(from + at(keys, i, v));
            for (int v = 0; v < vectors; ++v) {
                s[v] = multiply_add(k_of, change[v], s[v]);
                store(s[v], to + at(keys, i, v));
                sums[v] = multiply_add(q_of, s[v], sums[v]);
                if (has_next) dots[v] = multiply_add(k_next, s[v], dots[v]);
            }
        }
    }
};

// sigmoid(gate) * x.
template <typename T>
struct SigmoidGateCall {
    const T* x;
    const T* gate;
    int64_t gate_stride, size;
    T* out;
    int64_t rows;

    void run(Workspace& workspace) const {
        loop_rows(workspace.pool, rows, 4 * size, [&](int64_t row) {
            const T *from = x + row * size, *by = gate + row * gate_stride;
            T* to = out + row * size;
            int64_t i = 0;
            for (; i + kLanes <= size; i += kLanes)
                store(rounded(sigmoid(load(by + i)), to) * load(from + i), to + i);
            if (const int rest = static_cast<int>(size - i))
                store_some(rounded(sigmoid(load_some(by + i, rest)), to) * load_some(from + i, rest),
                           to + i, rest);
        });
    }
};

// silu(gate) times the norm of each head of x.
template <typename T>
struct GatedNormCall {
    const T* x;  // [T, heads * head_dim]
    const T* gate;
    int64_t gate_stride;
    NormWeight weight;
    int64_t heads, head_dim;
    T* out;
    int64_t rows;

    void run(Workspace& workspace) const {
        const int64_t size = heads * head_dim;
        loop_rows(workspace.pool, rows, size, [&](int64_t row) {
            for (int64_t head = 0; head < heads; ++head) {
                T* to = out + row * size + head * head_dim;
                const T* by = gate + row * gate_stride + head * head_dim;
                rms_norm_row(x + row * size + head * head_dim, weight, head_dim, to);
                for (int64_t i = 0; i < head_dim; i += kLanes)
                    store(load(to + i) * activate(Gate::kSilu, load(by + i)), to + i);
            }
        });
    }
};

// Each token's x beside the hidden state of the token before, of which a sequence's first one is
// kept (see KeepLastCall); where that is zero there is none, and the row is zero.
template <typename T>
struct JoinPreviousCall {
    const T *x, *hidden;  // [T, size]
    int64_t size;
    SequenceStates kept;  // as inputs of drafts
    T* out;               // [T, 2 size]
    int64_t rows;

    void run(Workspace& workspace) const {
        loop_rows(workspace.pool, rows, 2 * size, [&](int64_t row) {
            if (row) join(row, hidden + (row - 1) * size);
        });
        workspace.pool.loop(kept.num_seqs, [&](int64_t seq, int) {
            const int64_t row = kept.query_start[seq];
            if (row == kept.query_start[seq + 1]) return;
            const char* previous = kept.draft<char>(seq, kept.num_right[seq]);
            const int64_t num_bytes = size * sizeof(T);
            if (std::any_of(previous, previous + num_bytes, [](char byte) { return byte; }))
                join(row, reinterpret_cast<const T*>(previous));
            else
                std::memset(static_cast<void*>(out + 2 * row * size), 0, 2 * num_bytes);
        });
    }

    void join(int64_t row, const T* previous) const {
        T* to = out + 2 * row * size;
        std::memcpy(static_cast<void*>(to), x + row * size, size * sizeof(T));
        std::memcpy(static_cast<void*>(to + size), previous, size * sizeof(T));
    }
};

// Keeps of each row the hidden states of its last token that is no draft, and of its drafts.
template <typename T>
struct KeepLastCall {
    const T* hidden;  // [T, size]
    int64_t size;
    SequenceStates kept;
    int64_t rows;

    void run(Workspace& workspace) const {
        workspace.pool.loop(kept.num_seqs, [&](int64_t seq, int) {
            const int64_t end = kept.query_start[seq + 1], num_kept = kept.num_drafts[seq] + 1;
            if (end == kept.query_start[seq]) return;
            for (int64_t i = 0; i < num_kept; ++i)
                std::memcpy(static_cast<void*>(kept.draft<T>(seq, i)),
                            hidden + (end - num_kept + i) * size, size * sizeof(T));
        });
    }
};

}  // namespace nanocore
