// The library's interface: C functions on plain memory, called through ctypes.
//
// A program is a list of kernels with their operands, recorded once; running it takes the numbers
// and arrays of one step. So a step of the whole model is one call, without a look at Python in
// between. Operands are addresses of the caller's memory, which must live as long as the program.

#include <deque>
#include <functional>

#include "attention.h"
#include "collective.h"
#include "drafts.h"
#include "logit_edits.h"
#include "logprobs.h"
#include "moe.h"
#include "old_systems.h"
#include "packing.h"
#include "sampling.h"
#include "states.h"

#define NANOCORE_API extern "C" __attribute__((visibility("default")))

namespace nanocore {

// What differs between steps. Rows of the batch: see AttentionMetadata in kernels/attention.py.
struct Step {
    int64_t num_tokens;
    int64_t num_samples;
    int64_t num_seqs;
    const int64_t* token_ids_T;  // or null: they are in the table
    const int32_t* token_table;
    int64_t token_table_stride;
    const int64_t* rows_T;
    const int64_t* positions_T;
    const int64_t* slots_GT;
    int64_t group_slots;  // from one group of layers to the next; 0: all that is here is one's
    const int32_t* query_start_A;
    const int32_t* seq_lens_B;
    const int32_t* block_tables;
    int64_t group_block_ids;  // likewise
    int64_t block_table_stride;
    const int64_t* rows_B;  // or null: the sequences are the table's first rows
    const int64_t* sample_index_R;
    const int32_t* num_right_B;  // this and the next one: or null, there are no drafts
    const int32_t* num_drafts_B;
};

// How many rows a kernel works on: the step's tokens, its samples, or a number of its own.
constexpr int64_t kTokens = -1, kSamples = -2;

inline int64_t count_rows(int64_t rows, const Step& step) {
    return rows == kTokens ? step.num_tokens : rows == kSamples ? step.num_samples : rows;
}

struct Program {
    Workspace* workspace;
    std::vector<std::function<void(const Step&)>> kernels;
    NextItems first_items;
    std::deque<NextItems> next_items;  // after each linear layer; after the last, the first one's

    // For a layer with this weight, of which items have so many tiles, that is appended now.
    const NextItems* add_linear(const LinearWeight& weight, int64_t tiles) {
        const NextItems items{weight.tile(0), tiles * weight.tile_bytes()};
        (next_items.empty() ? first_items : next_items.back()) = items;
        next_items.push_back(first_items);
        return &next_items.back();
    }
};

enum class Dtype : int { kFloat32 = 0, kBFloat16 = 1 };

// body(a value of the type)
template <typename Body>
void with_type(int dtype, const Body& body) {
    if (static_cast<Dtype>(dtype) == Dtype::kFloat32) body(float{});
    else body(BFloat16{});
}

}  // namespace nanocore

using namespace nanocore;

// Raised whenever a signature below changes; the caller compares.
NANOCORE_API int nanocore_abi_version() { return 22; }

// Whether this machine has the instructions that this library was compiled to.
NANOCORE_API int nanocore_is_supported() {
#if defined(__x86_64__) && !defined(NANOCORE_EMULATE_DOT)
    __builtin_cpu_init();
#if defined(__AVX512BF16__)
    if (!__builtin_cpu_supports("avx512bf16")) return 0;
#endif
#if defined(__AVX512F__)
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 0;
#endif
#if defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return 0;
#endif
#endif
    return 1;
}

// Whether products of bfloat16 are the matrix unit's, which gives them other bits.
NANOCORE_API int nanocore_uses_amx() { return has_amx(); }

#if defined(NANOCORE_EMULATE_AMX)
NANOCORE_API void nanocore_emulate_amx(int does) { emulates_amx = does; }
#endif

NANOCORE_API void* nanocore_workspace_new(const int* cores, int num_cores) {
    return new Workspace(std::vector<int>(cores, cores + num_cores));
}

NANOCORE_API void nanocore_workspace_free(void* workspace) {
    delete static_cast<Workspace*>(workspace);
}

NANOCORE_API void* nanocore_program_new(void* workspace) {
    return new Program{static_cast<Workspace*>(workspace), {}, {}, {}};
}

NANOCORE_API void nanocore_program_free(void* program) { delete static_cast<Program*>(program); }

NANOCORE_API void nanocore_program_run(void* program, const Step* step) {
    const OnCore stay = static_cast<Program*>(program)->workspace->pool.stay();
    for (const auto& kernel : static_cast<Program*>(program)->kernels) kernel(*step);
}

// Bytes of a packed weight.
NANOCORE_API int64_t nanocore_packed_bytes(const LinearWeight* weight) {
    return weight->num_tiles() * weight->tile_bytes();
}

// Packs `from`, [out_features, in_features] of dtype, into the memory that `weight` names.
NANOCORE_API void nanocore_pack(void* workspace, int dtype, const void* from,
                                const LinearWeight* weight) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        pack_weight(static_cast<Workspace*>(workspace)->pool, static_cast<const T*>(from), *weight,
                    const_cast<void*>(weight->packed));
    });
}

// The same of integers as a checkpoint groups them.
NANOCORE_API void nanocore_pack_groups(void* workspace, const GroupedRows* rows,
                                       const LinearWeight* weight) {
    pack_groups(static_cast<Workspace*>(workspace)->pool, *rows, *weight,
                const_cast<void*>(weight->packed));
}

// Each of the following appends a kernel. dtype is that of activations, whose rows are contiguous
// unless a stride (in elements) is given.

template <typename Call, typename Prepare>
static void append(void* program, int64_t rows, Call call, Prepare prepare) {
    Program* to = static_cast<Program*>(program);
    to->kernels.push_back([=, workspace = to->workspace](const Step& step) mutable {
        call.rows = count_rows(rows, step);
        prepare(call, step);
        call.run(*workspace);
    });
}

static const auto kNothing = [](auto&, const Step&) {};

NANOCORE_API void nanocore_embedding(void* program, int64_t rows, int dtype,
                                     const LinearWeight* weight, int64_t first_token, float factor,
                                     void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        EmbeddingCall<T> call{{}, *weight, first_token, factor, static_cast<T*>(out), 0};
        append(program, rows, call, [](auto& c, const Step& step) {
            c.tokens = {step.token_ids_T, step.token_table, step.token_table_stride, step.rows_T,
                        step.positions_T};
        });
    });
}

NANOCORE_API void nanocore_rms_norm(void* program, int64_t rows, int dtype, const void* x,
                                    int64_t x_stride, void* residual, const NormWeight* weight,
                                    int64_t size, void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        NormCall<T> call{static_cast<const T*>(x), x_stride, static_cast<T*>(residual), *weight,
                         size, static_cast<T*>(out), 0};
        append(program, rows, call, kNothing);
    });
}

NANOCORE_API void nanocore_linear(void* program, int64_t rows, int dtype, const void* x,
                                  int64_t x_stride, const LinearWeight* weight, const void* bias,
                                  int gate, int out_dtype, void* out, int64_t out_stride) {
    Program* to = static_cast<Program*>(program);
    const int64_t group = weight->tiles_of_item(to->workspace->pool.num_threads());
    const NextItems* after = to->add_linear(*weight, group);
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const auto append_with = [&](auto* results) {
            LinearCall<T, std::remove_pointer_t<decltype(results)>> call{
                *weight, static_cast<const T*>(bias), static_cast<Gate>(gate),
                static_cast<const T*>(x), x_stride, results, out_stride, group, after, 0};
            append(program, rows, call, kNothing);
        };
        if (static_cast<Dtype>(out_dtype) == Dtype::kFloat32) append_with(static_cast<float*>(out));
        else append_with(static_cast<T*>(out));
    });
}

// How experts are chosen, and where the shared one is; see Routing and SharedExpert.
struct ExpertOperands {
    const void* logits;
    int64_t logits_stride, num_chosen;
    bool is_normalized, is_sigmoid;
    const float* bias;
    float epsilon, factor;
    const void* shared_gate;
    int64_t shared_gate_stride;
    const void* shared_out;
    int64_t shared_out_stride;
};

NANOCORE_API void nanocore_moe(void* program, int64_t rows, int dtype, const void* x,
                               int64_t x_stride, const ExpertWeights* experts,
                               const ExpertOperands* operands, int gate, void* out) {
    Program* to = static_cast<Program*>(program);
    // What comes before knows no better than that the first expert may be chosen.
    const NextItems* after = to->add_linear(*experts->gates, 1);
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const auto at = [](const void* memory) { return static_cast<const T*>(memory); };
        MoeCall<T> call{
            *experts,
            {at(operands->logits), operands->logits_stride, experts->num_experts,
             operands->num_chosen, operands->is_normalized, operands->is_sigmoid, operands->bias,
             operands->epsilon, operands->factor},
            {at(operands->shared_gate), operands->shared_gate_stride, at(operands->shared_out),
             operands->shared_out_stride},
            static_cast<Gate>(gate), at(x), x_stride, static_cast<T*>(out), after, 0};
        append(program, rows, call, kNothing);
    });
}

NANOCORE_API void nanocore_gate(void* program, int64_t rows, int dtype, const void* x,
                                int64_t size, int gate, void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        GateCall<T> call{static_cast<const T*>(x), size, static_cast<Gate>(gate),
                         static_cast<T*>(out), 0};
        append(program, rows, call, kNothing);
    });
}

NANOCORE_API void nanocore_add(void* program, int64_t rows, int dtype, const void* a, const void* b,
                               int64_t size, void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        AddCall<T> call{static_cast<const T*>(a), static_cast<const T*>(b), size,
                        static_cast<T*>(out), 0};
        append(program, rows, call, kNothing);
    });
}

NANOCORE_API void nanocore_all_reduce(void* program, int64_t rows, int dtype,
                                      const RankGroup* group, void* x, int64_t size,
                                      const void* bias) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        AllReduceCall<T> call{*group, static_cast<T*>(x), size, static_cast<const T*>(bias), 0};
        append(program, rows, call, kNothing);
    });
}

struct CacheLayout {
    void *k, *v, *k_scale, *v_scale;  // scales: of int8, else null
    int64_t num_heads, head_dim, block_size, block_bytes;
    int64_t group;  // of layers that keep the same tokens

    template <typename T>
    PagedKV<T> of() const {
        return {k,         v,        static_cast<BFloat16*>(k_scale), static_cast<BFloat16*>(v_scale),
                num_heads, head_dim, block_size,                      block_bytes};
    }
};

NANOCORE_API void nanocore_rope(void* program, int64_t rows, int dtype, void* qkv,
                                int64_t num_heads, const CacheLayout* cache,
                                const NormWeight* q_norm, const NormWeight* k_norm, const void* cos,
                                const void* sin, int64_t rotary_half) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        RopeCall<T> call{static_cast<T*>(qkv), num_heads, cache->of<T>(), *q_norm, *k_norm,
                         static_cast<const T*>(cos), static_cast<const T*>(sin), rotary_half,
                         nullptr, nullptr, 0};
        append(program, rows, call, [group = cache->group](auto& c, const Step& step) {
            c.positions = step.positions_T;
            c.slots = step.slots_GT + group * step.group_slots;
        });
    });
}

NANOCORE_API void nanocore_attention(void* program, int64_t rows, int dtype, const void* q,
                                     int64_t q_stride, int64_t num_heads, const CacheLayout* cache,
                                     float scale, int64_t window, float softcap, void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const auto append_with = [&](auto is_matrix) {
            AttentionCall<T, is_matrix> call{static_cast<const T*>(q), q_stride, static_cast<T*>(out),
                                             num_heads, cache->of<T>(), scale, window, softcap, 0,
                                             nullptr, nullptr, nullptr, 0, nullptr, 0};
            append(program, rows, call, [group = cache->group](auto& c, const Step& step) {
                c.num_seqs = step.num_seqs;
                c.query_start = step.query_start_A;
                c.seq_lens = step.seq_lens_B;
                c.block_table = step.block_tables + group * step.group_block_ids;
                c.block_table_stride = step.block_table_stride;
                c.table_rows = step.rows_B;
            });
        };
        if constexpr (kMayHaveAmx && sizeof(T) == 2)
            if (has_amx() && MatrixAttention::takes(cache->head_dim)) return append_with(std::true_type{});
        append_with(std::false_type{});
    });
}

struct StateLayout {
    void* states;
    int64_t block_size, block_bytes, group;
    void* drafts;
    int64_t row_bytes, draft_bytes;

    SequenceStates of(const Step& step) const {
        return {static_cast<char*>(states), block_size, block_bytes, static_cast<char*>(drafts),
                row_bytes, draft_bytes, step.num_seqs, step.query_start_A, step.seq_lens_B,
                step.block_tables + group * step.group_block_ids, step.block_table_stride,
                step.rows_B, step.num_right_B, step.num_drafts_B};
    }
};

NANOCORE_API void nanocore_short_conv(void* program, int64_t rows, int dtype, int kind,
                                      const void* x, int64_t x_stride, int64_t channels,
                                      int64_t taps, const float* weight, const float* bias,
                                      const StateLayout* states, void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        ShortConvCall<T> call{static_cast<ConvKind>(kind), static_cast<const T*>(x), x_stride,
                              channels, taps, weight, bias, {}, static_cast<T*>(out), 0};
        append(program, rows, call, [layout = *states](auto& c, const Step& step) {
            c.states = layout.of(step);
        });
    });
}

// Heads of a delta rule; see DeltaRule.
struct DeltaHeads {
    int64_t key_heads, value_heads, key_dim, value_dim;
    bool is_tiled;
    const float *decay, *time_bias;
};

NANOCORE_API void nanocore_delta_rule(void* program, int64_t rows, int dtype, const void* qkv,
                                      int64_t qkv_stride, const void* gates, int64_t gate_stride,
                                      const DeltaHeads* heads, const StateLayout* states,
                                      void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        DeltaRuleCall<T> call{static_cast<const T*>(qkv), qkv_stride,
                              static_cast<const T*>(gates), gate_stride, heads->key_heads, heads->value_heads, heads->key_dim,
                              heads->value_dim, heads->is_tiled, heads->decay, heads->time_bias, {},
                              static_cast<T*>(out), 0};
        append(program, rows, call, [layout = *states](auto& c, const Step& step) {
            c.states = layout.of(step);
        });
    });
}

NANOCORE_API void nanocore_sigmoid_gate(void* program, int64_t rows, int dtype, const void* x,
                                        const void* gate, int64_t gate_stride, int64_t size,
                                        void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        SigmoidGateCall<T> call{static_cast<const T*>(x), static_cast<const T*>(gate), gate_stride,
                                size, static_cast<T*>(out), 0};
        append(program, rows, call, kNothing);
    });
}

NANOCORE_API void nanocore_gated_norm(void* program, int64_t rows, int dtype, const void* x,
                                      const void* gate, int64_t gate_stride,
                                      const NormWeight* weight, int64_t heads, int64_t head_dim,
                                      void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        GatedNormCall<T> call{static_cast<const T*>(x), static_cast<const T*>(gate), gate_stride,
                              *weight, heads, head_dim, static_cast<T*>(out), 0};
        append(program, rows, call, kNothing);
    });
}

NANOCORE_API void nanocore_join_previous(void* program, int64_t rows, int dtype, const void* x,
                                         const void* hidden, int64_t size, const StateLayout* kept,
                                         void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        JoinPreviousCall<T> call{static_cast<const T*>(x), static_cast<const T*>(hidden), size, {},
                                 static_cast<T*>(out), 0};
        append(program, rows, call, [layout = *kept](auto& c, const Step& step) {
            c.kept = layout.of(step);
        });
    });
}

NANOCORE_API void nanocore_keep_last(void* program, int64_t rows, int dtype, const void* hidden,
                                     int64_t size, const StateLayout* kept) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        KeepLastCall<T> call{static_cast<const T*>(hidden), size, {}, 0};
        append(program, rows, call, [layout = *kept](auto& c, const Step& step) {
            c.kept = layout.of(step);
        });
    });
}

NANOCORE_API void nanocore_select(void* program, int64_t rows, int dtype, const void* x,
                                  int64_t size, void* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        SelectCall<T> call{static_cast<const T*>(x), size, nullptr, static_cast<T*>(out), 0};
        append(program, rows, call, [](auto& c, const Step& step) { c.index = step.sample_index_R; });
    });
}

NANOCORE_API void nanocore_softcap(void* program, int64_t rows, float* x, int64_t size, float cap) {
    append(program, rows, SoftcapCall{x, size, cap, 0}, kNothing);
}

// mask: null if no row has one. token_table: null if tokens are not to be written there.
NANOCORE_API void nanocore_best_token(void* program, int64_t rows, const float* logits,
                                      int64_t size, int64_t stride, int64_t first_token,
                                      const TokenMask* mask, const float* temperature,
                                      const int64_t* seed, const int64_t* position, float* value,
                                      int64_t* index, int32_t* token_table, int64_t table_stride,
                                      const int64_t* table_rows, const int64_t* table_positions) {
    append(program, rows,
           BestTokenCall{logits, size, stride, first_token, mask ? *mask : TokenMask{}, temperature,
                         seed, position, value, index, token_table, table_stride, table_rows,
                         table_positions, 0},
           kNothing);
}

NANOCORE_API void nanocore_best_filtered_token(void* program, int64_t rows, const float* logits,
                                               int64_t size, int64_t stride, const TokenMask* mask,
                                               const float* temperature, const int64_t* seed,
                                               const int64_t* position, const int32_t* top_k,
                                               const float* top_p, const float* max_gap,
                                               float* value, int64_t* index) {
    append(program, rows,
           BestFilteredTokenCall{logits, size, stride, mask ? *mask : TokenMask{}, temperature,
                                 seed, position, top_k, top_p, max_gap, value, index, 0},
           kNothing);
}

// The struct's rows are not read.
NANOCORE_API void nanocore_edit_logits(void* program, int64_t rows, const EditLogitsCall* call) {
    append(program, rows, *call, kNothing);
}

NANOCORE_API void nanocore_logprobs(void* program, int64_t rows, const float* logits, int64_t size,
                                    int64_t stride, const int64_t* index,
                                    const int64_t* token_ids, int64_t num_top, int32_t* ids,
                                    float* logprobs, int32_t* rank) {
    append(program, rows,
           LogprobsCall{logits, size, stride, index, token_ids, num_top, ids, logprobs, rank, 0},
           kNothing);
}

// --- drafts: calls of the engine, which belong to no program ---

NANOCORE_API void nanocore_ngram_propose(const int32_t* table, int64_t stride, int64_t shortest,
                                         int64_t longest, int64_t max_drafts, const int64_t* rows,
                                         const int64_t* num_tokens, const int64_t* most,
                                         int64_t* counts, int32_t* token_ids, uint8_t* evidence,
                                         int64_t num_rows) {
    propose_ngrams({table, stride}, shortest, longest,
                   {num_rows, max_drafts, rows, num_tokens, most, counts, token_ids, evidence});
}

// Null: no memory.
NANOCORE_API void* nanocore_suffix_new(const int32_t* table, int64_t stride, int64_t num_rows,
                                       int64_t max_depth, int64_t max_cached, float max_factor,
                                       float min_probability, int64_t max_bytes) {
    const SuffixSettings settings{max_depth, max_cached, max_factor, min_probability, max_bytes};
    return new (std::nothrow) SuffixDrafts({table, stride}, num_rows, settings);
}

NANOCORE_API void nanocore_suffix_free(void* drafts) { delete static_cast<SuffixDrafts*>(drafts); }

NANOCORE_API void nanocore_suffix_begin(void* drafts, int64_t row, int64_t salt) {
    static_cast<SuffixDrafts*>(drafts)->begin(row, salt);
}

NANOCORE_API void nanocore_suffix_end(void* drafts, int64_t row, int64_t num_prompt,
                                      int64_t num_tokens, int has_finished) {
    static_cast<SuffixDrafts*>(drafts)->end(row, num_prompt, num_tokens, has_finished);
}

NANOCORE_API void nanocore_suffix_propose(void* drafts, int64_t max_drafts, const int64_t* rows,
                                          const int64_t* num_tokens, const int64_t* most,
                                          int64_t* counts, int32_t* token_ids, uint8_t* evidence,
                                          int64_t num_rows) {
    static_cast<SuffixDrafts*>(drafts)->propose(
        {num_rows, max_drafts, rows, num_tokens, most, counts, token_ids, evidence});
}

NANOCORE_API int64_t nanocore_suffix_bytes(void* drafts) {
    return static_cast<SuffixDrafts*>(drafts)->used() + sizeof(SuffixDrafts);
}
