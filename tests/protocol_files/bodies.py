"""Whole bodies of every message, from which the vectors are varied.

What they presume of an engine: token ids below 4 are valid in every model, prompts of up to 8
tokens with 16 more fit, and sampling parameters have the ranges of PROTOCOL.md.
"""

from __future__ import annotations

from tests.protocol_files.lines import (
    ABORT,
    ACCEPTED,
    BYE,
    CONTROL,
    DRAINING,
    ERROR,
    HELLO,
    OUTPUT,
    PING,
    PONG,
    REFUSED,
    REPLY,
    SUBMIT,
    WELCOME,
    Body,
    column,
    floats,
    handles,
)

MAX_INT = 2**53 - 1
SAMPLING: Body = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "max_tokens": 16,
    "stop_token_ids": [0, 3], "ignore_eos": True, "skip_reading_prefix_cache": True, "n": 2,
    "min_tokens": 1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25,
    "allowed_token_ids": [0, 1, 2, 3], "logprobs": 2, "prompt_logprobs": 1,
    "logit_bias": [[1, 2.5], [2, -0.5]], "bad_words_token_ids": [[3], [1, 2, 1]],
}  # fmt: skip
PROMPT = column(1, 2, 3)
MODEL: Body = {
    "model": "/models/tiny", "architecture": "Qwen3ForCausalLM", "dtype": "bfloat16",
    "vocab_size": 384, "max_model_len": 1024, "eos_token_ids": [383, 0], "block_size": 16,
    "num_blocks": 64,
}  # fmt: skip
FILES: list[Body] = [
    {"name": "tokenizer.json", "num_bytes": 70_000, "sha256": "0123456789abcdef" * 4},
    {"name": "special_tokens_map.json", "num_bytes": 99, "sha256": "00ff" * 16},
    {"name": "chat_template.jinja", "num_bytes": 0, "sha256": "f" * 64},
]
LIMITS: Body = {
    "max_frame_bytes": 2**24, "max_num_seqs": 8, "ping_interval_ms": 1000,
    "session_timeout_ms": 30_000,
}  # fmt: skip
STATS: Body = {
    "num_requests_running": 1, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.5,
    "num_blocks": 64, "num_free_blocks": 32, "prefix_cache_queries": 3, "prefix_cache_hits": 4,
    "num_preemptions": 5, "num_aborts": 6, "prompt_tokens": 7, "generation_tokens": 8,
    "num_steps": MAX_INT, "paused": False,
}  # fmt: skip
CACHE_GROUPS = [
    {"name": "full", "num_blocks": 60, "num_free_blocks": 31},
    {"name": "window(128)", "num_blocks": 4, "num_free_blocks": 1, "prefix_cache_lost_tokens": 48},
]
MORE_STATS: Body = {
    "prefix_cache_hit_rate": 0.25, "num_clients": 2, "num_protocol_errors": 1,
    "groups": CACHE_GROUPS, "spec_decode_num_drafts": 5, "spec_decode_num_draft_tokens": 12,
    "spec_decode_num_accepted_tokens": 7, "spec_decode_num_accepted_tokens_per_pos": [4, 2, 1],
}  # fmt: skip
METRICS = [
    {
        "name": "num_steps", "type": "counter", "help": "Steps.",
        "samples": [{"value": 7.0, "labels": [["a", "b"]]}],
    },
    {
        "name": "seconds", "type": "histogram", "help": "", "bounds": [0.5, 1.0],
        "samples": [{"value": 2.25, "counts": [3, 0, MAX_INT]}],
    },
]  # fmt: skip
STEPS: Body = {
    "now_s": 1234.75,
    "stats": STATS | MORE_STATS,
    "steps": {
        "number": [16, 17], "ended_s": [1234.5, 1234.625], "duration_s": [0.25, 0.125],
        "num_decode_tokens": [0, 2], "num_prefill_tokens": [128, 0], "num_running": [2, 1],
        "num_waiting": [1, 1], "num_used_blocks": [10, 9], "num_preempted": [1, 0],
    },
    "requests": [
        {
            "handle": 7, "request_id": "a", "num_prompt_tokens": 128, "num_cached_tokens": 16,
            "num_output_tokens": 2, "finish_reason": "stop",
            "way": [["queued", 1234.0], ["prefill", 1234.25], ["decode", 1234.5],
                    ["ended", 1234.625]],
        },
        {
            "handle": 2**32 - 1, "num_prompt_tokens": 1, "num_cached_tokens": 0,
            "num_output_tokens": 0, "way": [["queued", 1234.5]],
        },
    ],
}  # fmt: skip
LOGPROBS: Body = {
    "handles": handles(8, 8), "ranks": handles(1, 3), "counts": handles(3, 3),
    "token_ids": column(43, 43, 9, 44, 9, 43), "logprobs": floats(-0.5, -0.5, -1.5, -4.5, -0.5, -3),
}  # fmt: skip
PROMPT_LOGPROBS: Body = {
    "handles": handles(7), "ranks": handles(2), "counts": handles(1), "token_ids": column(2),
    "logprobs": floats(-0.75),
}  # fmt: skip

FULL_CLIENT: dict[int, Body] = {
    HELLO: {"protocol": [1, 12], "client": "vectors/1"},
    SUBMIT: {
        "request_id": "a", "prompt_token_ids": PROMPT, "sampling": SAMPLING, "cache_salt": "pepper",
        "timeout_s": 60.5,
    },
    ABORT: {"request_ids": ["a", "b"], "handles": handles(7, 2**32 - 1)},
    PING: {"nonce": 7},
    PONG: {"nonce": 7, "num_steps": 1, "step_age_ms": 2},
    CONTROL: {"call_id": 1, "operation": "read_file", "file": "tokenizer.json", "offset": 65_536},
    BYE: {"reason": "done"},
}  # fmt: skip
FULL_ENGINE: dict[int, Body] = {
    WELCOME: {
        "protocol": [1, 12],
        "session": "4f1d2c3b5a697887",
        "engine_instance": "0123456789abcdef0123456789abcdef",
        "model": MODEL
        | {
            "default_sampling": {"temperature": 0.6, "top_k": 20}, "files": FILES,
            "hidden_size": 64, "numerics_fingerprint": "fedcba9876543210fedcba9876543210",
        },
        "limits": LIMITS
        | {
            "max_request_id_chars": 256, "max_cache_salt_chars": 1024, "max_num_queued_reqs": 512,
            "max_num_queued_tokens": 1_000_000, "max_file_chunk_bytes": 65_536,
            "max_num_clients": 64, "max_logprobs": 20, "max_num_queued_bytes": 2**28,
        },
        "capabilities": ["prefix_caching", "priority", "structured_outputs", "embeddings"],
        "role": "user",
    },
    REFUSED: {"message": "8 clients are served", "supported": [[1, 12]], "retry_after_s": 1.5},
    ACCEPTED: {"request_id": "a", "handle": 7, "seed": MAX_INT, "not_held": ["/properties/a/not"]},
    OUTPUT: {
        "handles": handles(7, 8),
        "tokens": column(42, 43, 44),
        "counts": handles(1, 2),
        "events": [
            {"handle": 7, "num_cached_tokens": 16},
            {"handle": 8, "finish_reason": "stop", "stop_reason": 44},
            {"handle": 9, "finish_reason": "error", "message": "the step failed",
             "code": "invalid_request"},
            {"handle": 10, "finish_reason": "stop", "stop_cause": "repetition"},
        ],
        "logprobs": LOGPROBS,
        "prompt_logprobs": PROMPT_LOGPROBS,
    },
    ERROR: {
        "code": "overloaded", "message": "512 requests wait", "request_id": "a",
        "retry_after_s": 2.5,
    },
    PING: {"nonce": 7},
    PONG: {"nonce": 7, "num_steps": 123, "step_age_ms": 45},
    REPLY: {"call_id": 1, "ok": False, "message": "a request holds blocks"},
    DRAINING: {"deadline_ms": 30_000},
    BYE: {"reason": "SIGTERM"},
}  # fmt: skip
