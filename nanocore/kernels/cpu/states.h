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

    static constexpr int kVectors = 4;  // an item's
    static constexpr int64_t kItemChannels = kVectors * kLanes;

    void run(Workspace& workspace) const {
        const int64_t end = states.query_start[states.num_seqs];
        if (end < rows)
            std::memset(static_cast<void*>(out + end * channels), 0,
                        (rows - end) * channels * sizeof(T));
        const int64_t items = (channels + kItemChannels - 1) / kItemChannels;
        workspace.pool.loop(states.num_seqs * items, [&](int64_t index, int) {
            const int64_t channel = index % items * kItemChannels;
            if (channels - channel >= kItemChannels)
                run_item<kVectors>(index / items, channel, kLanes);
            else
                for (int64_t at = channel; at < channels; at += kLanes)
                    run_item<1>(index / items, at, std::min<int64_t>(kLanes, channels - at));
        });
        states.keep(workspace, x, x_stride, kind == ConvKind::kSilu ? channels : 3 * channels);
    }

   private:
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

    // Channels from one on; count: of the last vector.
    template <int vectors>
    void run_item(int64_t seq, int64_t channel, int count) const {
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
            for (int v = 0; v < vectors; ++v, from += kLanes) {
                inputs[v][taps - 1] = input(from, count);
                if (i >= behind) put(result(inputs[v], filter[v], shift[v], from, count),
                                     out + t * channels + channel + v * kLanes, count);
                for (int64_t j = 0; j < taps - 1; ++j) inputs[v][j] = inputs[v][j + 1];
            }
            if (T* to = states.template written<T>(seq, first + i + 1))
                for (int v = 0; v < vectors; ++v)
                    for (int64_t j = 0; j < taps - 1; ++j)
                        put(inputs[v][j], to + j * channels + channel + v * kLanes, count);
        }
    }

    F result(const F* inputs, const F* filter, F sum, const T* from, int count) const {
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
// An item is a value head's 32 columns of S, which stay in the first cache while it runs over its
// sequence's tokens, one after the other: bits do not depend on how these were cut into steps, and
// fewer operations are done than by chunks. The update of a token and the
// products of the next one with S are one pass over it.
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

    static constexpr int kColumns = 32, kVectors = kColumns / kLanes;
    static constexpr int kMaxKeyDim = 256;

    void run(Workspace& workspace) const {
        const int64_t end = states.query_start[states.num_seqs], width = value_heads * value_dim;
        if (end < rows)
            std::memset(static_cast<void*>(out + end * width), 0, (rows - end) * width * sizeof(T));
        const int64_t blocks = value_dim / kColumns, items = value_heads * blocks;
        workspace.pool.loop(states.num_seqs * items, [&](int64_t index, int) {
            const int64_t item = index % items;
            run_item(index / items, item / blocks, item % blocks);
        });
        states.keep(workspace, qkv, qkv_stride, channels());
        states.keep(workspace, b, gate_stride, 2 * value_heads, channels());
    }

   private:
    struct Token {
        alignas(64) float q[kMaxKeyDim], k[kMaxKeyDim];
        float decay, beta;
    };

    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }

    // A token's heads of q, of k and of v, and its gates.
    struct Inputs {
        const T *qkv, *gates;
    };

    // The step's tokens are behind `behind` drafts of the last step's.
    Inputs inputs(int64_t seq, int64_t behind, int64_t index) const {
        if (index < behind) {
            const T* kept = states.template draft<T>(seq, index);
            return {kept, kept + channels()};
        }
        const int64_t t = states.query_start[seq] + index - behind;
        return {qkv + t * qkv_stride, b + t * gate_stride};
    }

    void read(const Inputs& from, int64_t head, int64_t key_head, Token& token) const {
        const T* q = from.qkv + key_head * key_dim;
        unit(q, std::sqrt(static_cast<float>(key_dim)), token.q);
        unit(q + key_heads * key_dim, 1.0f, token.k);
        const F one = broadcast(to_float(from.gates[value_heads + head]) + time_bias[head]);
        token.decay = exponential(decay[head] * softplus(one))[0];
        token.beta = rounded(sigmoid(broadcast(to_float(from.gates[head]))), out)[0];
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

    void run_item(int64_t seq, int64_t head, int64_t block) const {
        const int64_t start = states.query_start[seq], stop = states.query_start[seq + 1];
        if (start == stop) return;
        const int64_t behind = states.behind(seq), first = states.first(seq) - behind;
        const int64_t count = behind + stop - start, end = states.end(seq);
        const int64_t size = key_dim * kColumns;
        const int64_t place = (head * (value_dim / kColumns) + block) * size;
        const int64_t key_head = is_tiled ? head % key_heads : head / (value_heads / key_heads);
        alignas(64) float memory[kMaxKeyDim * kColumns];
        const float* from = memory;
        if (first)
            from = states.template after<float>(seq, first) + place;
        else
            std::memset(memory, 0, size * sizeof(float));
        Token tokens[2];
        read(inputs(seq, behind, 0), head, key_head, tokens[0]);
        F dots[kVectors] = {};  // S^T k of the token that comes
        for (int64_t i = 0; i < key_dim; ++i)
            for (int v = 0; v < kVectors; ++v)
                dots[v] = multiply_add(broadcast(tokens[0].k[i]),
                                       load(from + i * kColumns + v * kLanes), dots[v]);
        for (int64_t n = 0; n < count; ++n) {
            const Token& own = tokens[n % 2];
            Token& next = tokens[(n + 1) % 2];
            if (n + 1 < count)
                read(inputs(seq, behind, n + 1), head, key_head, next);
            else
                std::memset(next.k, 0, key_dim * sizeof(float));
            float* kept = states.template written<float>(seq, first + n + 1);
            if (kept) kept += place;
            // The last one need not be copied there. Drafts behind it change a copy.
            float* to = first + n + 1 == end ? kept : memory;
            const T* v_row = inputs(seq, behind, n).qkv + 2 * key_heads * key_dim +
                             head * value_dim + block * kColumns;
            F change[kVectors], sums[kVectors] = {};
            const F decay_of = broadcast(own.decay), beta = broadcast(own.beta);
            for (int v = 0; v < kVectors; ++v) {
                change[v] = beta * (load(v_row + v * kLanes) - decay_of * dots[v]);
                dots[v] = F{};
            }
            for (int64_t i = 0; i < key_dim; ++i) {
                const F q = broadcast(own.q[i]), k = broadcast(own.k[i]),
                        k_next = broadcast(next.k[i]);
                for (int v = 0; v < kVectors; ++v) {
                    const int64_t at = i * kColumns + v * kLanes;
                    const F s = multiply_add(k, change[v], decay_of * load(from + at));
                    store(s, to + at);
                    sums[v] = multiply_add(q, s, sums[v]);
                    dots[v] = multiply_add(k_next, s, dots[v]);
                }
            }
            from = to;
            if (kept && kept != to) std::memcpy(kept, to, size * sizeof(float));
            if (n < behind) continue;
            T* to_out = out + ((start + n - behind) * value_heads + head) * value_dim + block * kColumns;
            for (int v = 0; v < kVectors; ++v) store(sums[v], to_out + v * kLanes);
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
