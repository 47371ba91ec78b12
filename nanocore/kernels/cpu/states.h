// Layers that carry a state from token to token: short convolutions.
//
// A sequence's state after a token lies in the block of that token (state_group.py says which blocks
// have memory). A step reads it from the block of the last computed token, runs over its own tokens
// in their order, and writes it to its last token's block and to every block with memory that it
// fills on its way. So a token's result has the same bits however its sequence was cut into steps.

#pragma once

#include "rows.h"

namespace nanocore {

constexpr int kMaxTaps = 8;

// One layer's states, and where those of a step's sequences are.
struct SequenceStates {
    char* states;
    int64_t block_size;
    int64_t block_bytes;  // from a block to the next: other layers may lie between
    int64_t num_seqs;
    const int32_t* query_start;  // [num_seqs + 1]
    const int32_t* seq_lens;
    const int32_t* block_table;
    int64_t block_table_stride;
    const int64_t* table_rows;  // [num_seqs], or null: the sequences are the table's first rows

    // Tokens of a sequence before the step's.
    int64_t first(int64_t seq) const {
        return seq_lens[seq] - (query_start[seq + 1] - query_start[seq]);
    }

    // The state after so many tokens, at least one; null if it has no memory.
    template <typename T>
    T* after(int64_t seq, int64_t num_tokens) const {
        const int64_t row = table_rows ? table_rows[seq] : seq;
        const int32_t id = block_table[row * block_table_stride + (num_tokens - 1) / block_size];
        return id < 0 ? nullptr : reinterpret_cast<T*>(states + id * block_bytes);
    }

    // Whether the state is to be written after so many tokens of a step that ends at `end`.
    bool is_written(int64_t num_tokens, int64_t end) const {
        return num_tokens == end || num_tokens % block_size == 0;
    }
};

// c * conv(b * u), where conv is causal and has a filter of its own for each channel; the state is
// the last taps - 1 inputs of the filter, the oldest first.
template <typename T>
struct ShortConvCall {
    const T* x;  // [T, x_stride]: channels of b, of c, and of u
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

    // Channels from one on; count: of the last vector.
    template <int vectors>
    void run_item(int64_t seq, int64_t channel, int count) const {
        const int64_t start = states.query_start[seq], stop = states.query_start[seq + 1];
        const int64_t first = states.first(seq), last = states.seq_lens[seq];
        if (start == stop) return;
        F inputs[vectors][kMaxTaps] = {}, filter[vectors][kMaxTaps], shift[vectors] = {};
        const T* before = first ? states.template after<T>(seq, first) : nullptr;
        for (int v = 0; v < vectors; ++v) {
            const int64_t at = channel + v * kLanes;
            for (int64_t j = 0; j < taps; ++j) filter[v][j] = get_float(weight + j * channels + at, count);
            if (bias) shift[v] = get_float(bias + at, count);
            // Without a token before there are zeros, and no memory is read.
            for (int64_t j = 0; before && j < taps - 1; ++j)
                inputs[v][j] = get(before + j * channels + at, count);
        }
        for (int64_t t = start; t < stop; ++t) {
            const T* from = x + t * x_stride + channel;
            for (int v = 0; v < vectors; ++v, from += kLanes) {
                const F product = get(from, count) * get(from + 2 * channels, count);
                inputs[v][taps - 1] = rounded(product, out);
                F sum = shift[v];
                for (int64_t j = 0; j < taps; ++j) sum = multiply_add(filter[v][j], inputs[v][j], sum);
                const F result = rounded(sum, out) * get(from + channels, count);
                put(result, out + t * channels + channel + v * kLanes, count);
                for (int64_t j = 0; j < taps - 1; ++j) inputs[v][j] = inputs[v][j + 1];
            }
            const int64_t num_tokens = first + t - start + 1;
            if (!states.is_written(num_tokens, last)) continue;
            if (T* to = states.template after<T>(seq, num_tokens))
                for (int v = 0; v < vectors; ++v)
                    for (int64_t j = 0; j < taps - 1; ++j)
                        put(inputs[v][j], to + j * channels + channel + v * kLanes, count);
        }
    }
};

}  // namespace nanocore
