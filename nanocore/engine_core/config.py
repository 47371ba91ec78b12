"""What an engine is started with, validated once; unknown names are errors.

`EngineConfig` is what the user asked for. `SchedulerConfig` is the part the scheduler needs, with
every default resolved. Names are those of `vllm serve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nanocore.protocol.endpoint import default_endpoint, socket_path
from nanocore.protocol.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16"]
AttentionBackend = Literal["auto", "torch"]

DEFAULT_BLOCK_SIZE = 16


def _require(ok: bool, flag: str, value: object, limit: str) -> None:
    if not ok:
        raise ConfigError(f"{flag} {value}: {limit}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the running set.

    max_num_seqs: rows, the requests that can run at once. max_num_batched_tokens: a step's token
    budget. max_model_len: prompt and output tokens of one request, at most.
    long_prefill_token_threshold: tokens one prompt may compute in one step; 0 is no limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0

    def __post_init__(self) -> None:
        _require(self.max_num_seqs >= 1, "--max-num-seqs", self.max_num_seqs, "at least 1")
        _require(self.max_model_len >= 2, "--max-model-len", self.max_model_len, "at least 2")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "--max-num-batched-tokens",
            self.max_num_batched_tokens,
            f"must be at least --max-num-seqs ({self.max_num_seqs}), so that every running request "
            "can take a token in every step; raise it or lower --max-num-seqs",
        )
        _require(
            self.long_prefill_token_threshold >= 0,
            "--long-prefill-token-threshold",
            self.long_prefill_token_threshold,
            "at least 0; 0 is no limit",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All that `nanocore-engine` accepts; None means a default found at start.

    model: folder in Hugging Face format; None is the bundled demo model.
    max_model_len: None takes the model's own. num_gpu_blocks_override: KV blocks, instead of
    sizing by memory. kv_cache_memory_bytes: memory for KV, instead of a share of what is free.
    step_trace: file to which each step is appended as a line of JSON.
    """

    model: str | None = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    attention_backend: AttentionBackend = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    block_size: int = DEFAULT_BLOCK_SIZE
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    listen: str = ""
    step_trace: str | None = None

    def __post_init__(self) -> None:
        for flag, value, choices in (
            ("--device", self.device, get_args(Device)),
            ("--dtype", self.dtype, get_args(Dtype)),
            ("--attention-backend", self.attention_backend, get_args(AttentionBackend)),
        ):
            _require(value in choices, flag, value, f"choose one of {', '.join(choices)}")
        _require(
            1 <= self.block_size <= 1024 and self.block_size & (self.block_size - 1) == 0,
            "--block-size",
            self.block_size,
            "a power of two up to 1024",
        )
        for flag, optional in (
            ("--num-gpu-blocks-override", self.num_gpu_blocks_override),
            ("--kv-cache-memory-bytes", self.kv_cache_memory_bytes),
        ):
            _require(optional is None or optional >= 1, flag, optional, "at least 1")
        _require(0 <= self.seed < 2**53, "--seed", self.seed, "in [0, 2**53)")
        socket_path(self.endpoint)
        self.scheduler_config(self.max_model_len or 2)

    @property
    def endpoint(self) -> str:
        """Where the engine listens."""
        return self.listen or default_endpoint()

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's part, once the model's length is known."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
        )
