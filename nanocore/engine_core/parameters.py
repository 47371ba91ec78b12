"""The parameters of an engine, declared here alone: type and range, default, what each one does.

`nanocore-engine` has a flag for each (`engine_core/flags.py`), `AsyncEngineClient.launch` and `LLM`
pass their arguments on as flags, and `EngineConfig` holds the values to what is declared. The
scheduler's and the workers' configurations are filled from them by name. Names are those of
`vllm serve`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from nanocore.engine_core.flags import parameter
from nanocore.protocol.endpoint import default_endpoint
from nanocore.protocol.fields import MAX_EXACT_INT, MAX_INT32
from nanocore.system.logs import LogFormat
from nanocore.worker.rank_messages import (
    ActivationQuantization,
    KVCacheDtype,
    LoadFormat,
    Quantization,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Parameters that depend on the device: a GPU wants more work at a time."""

    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


CPU_SIZES: Final = Sizes()
CUDA_SIZES: Final = Sizes(block_size=64, max_num_batched_tokens=8192)
FLASH_BLOCK_SIZE: Final = 256
"""Block size that every release of flash-attn takes."""


Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackend = Literal["auto", "cpu", "triton", "flash", "torch"]
SchedulingPolicy = Literal["fcfs", "priority"]

MAX_NUM_ROWS: Final = 2**16
_Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z", description="without NUL")]
_Name = Annotated[str, Meta(pattern=r"\A[^\0]+\Z", description="without NUL and not empty")]
_Object = Annotated[dict[str, Any], Meta(description='such as {"rope_theta": 1000000.0}')]
_Sampling = Annotated[dict[str, Any], Meta(description='such as {"temperature": 0.7}')]
_Drafts = Annotated[dict[str, Any], Meta(description='such as {"method": "suffix"}')]
_Ranks = Annotated[int, Meta(ge=1, le=1024)]
_Rows = Annotated[int, Meta(ge=1, le=MAX_NUM_ROWS)]
_StepTokens = Annotated[int, Meta(ge=1, le=2**20)]
_Length = Annotated[int, Meta(ge=2, le=MAX_INT32)]
_Blocks = Annotated[int, Meta(ge=1, le=MAX_INT32)]
_BlockSize = Annotated[int, Meta(ge=1, le=1024)]
_Bytes = Annotated[int, Meta(ge=1, le=2**62)]
_Clients = Annotated[int, Meta(ge=1, le=2**20)]
_Queued = Annotated[int, Meta(ge=1, le=MAX_EXACT_INT)]
_Seed = Annotated[int, Meta(ge=0, le=MAX_EXACT_INT)]
_Limit = Annotated[int, Meta(ge=0, le=MAX_INT32, description="from 0 to 2147483647; 0: no limit")]
_Logprobs = Annotated[int, Meta(ge=-1, le=MAX_INT32, description="from 0, or -1: no limit")]
_Seconds = Annotated[float, Meta(ge=0.1, le=10**6)]
_Milliseconds = Annotated[float, Meta(ge=0.001)]
_SecondsOrNone = Annotated[float, Meta(ge=0, le=10**6)]
_Share = Annotated[float, Meta(gt=0, le=1)]
_ShareLeft = Annotated[float, Meta(ge=0, lt=1)]


def _attention_backend(text: str) -> str:
    """Return our name of a backend, also for vLLM's spelling FLASH_ATTN and for flash-attn."""
    return text.lower().replace("-", "_").removesuffix("_attn")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParameters:
    """Parameters of an engine; None is a default that is found at start.

    The words of each are those of --help.
    """

    model: _Name | None = parameter(
        None,
        "folder in Hugging Face format, GGUF file, or id on the hub, of GGUF models also ID:Q4_K_M "
        "(default: the demo model)",
        "-m",
        "-hf",
        "--hf-repo",
        group="model",
    )
    revision: _Name | None = parameter(None, "branch, tag or commit of the hub's model")
    load_format: LoadFormat = parameter("auto", "dummy: random weights, no files")
    hf_overrides: _Object = parameter(
        {}, "values that replace those of the model's config.json", metavar="JSON"
    )
    override_generation_config: _Sampling = parameter(
        {},
        "sampling parameters that replace those of the model's generation_config.json as defaults "
        "of requests; null: vLLM's default",
        metavar="JSON",
    )
    merge_lora: _Name | None = parameter(
        None,
        "folder of a LoRA adapter as PEFT writes it, merged into the weights as they are loaded",
        metavar="DIR",
    )
    dtype: Dtype = parameter(
        "auto",
        "dtype of weights and activations; auto: the checkpoint's, or bfloat16 if its float16 "
        "cannot be used; float16 is for CUDA",
    )
    max_model_len: _Length | Literal["auto"] | None = parameter(
        None,
        "context length, prompt and output together (default: the model's own); auto: limited to "
        "what fits in memory",
    )
    max_logprobs: _Logprobs = parameter(
        20, "limit of log probabilities per token that a request may ask for; -1: no limit"
    )
    seed: _Seed = parameter(0, "seed for requests without one, and for dummy weights")

    device: Device = parameter("auto", "default: cuda if available", group="device and kernels")
    attention_backend: AttentionBackend = parameter(
        "auto", "backend of all kernels; auto: the fastest available", type=_attention_backend
    )
    quantization: Quantization | None = parameter(
        None,
        "quantize float weights as they are loaded: int8 as close to them as GGUF's Q8_0, int4 in "
        "half the memory and further from them (docs/models.md has figures); fp8 also quantizes "
        "activations and needs CUDA (compute capability 8.9 or above)",
    )
    activation_quantization: ActivationQuantization = parameter(
        "auto",
        "inputs of layers with quantized weights; auto: round them to eight bits where that is "
        "faster; none: keep them as they are",
    )
    batch_invariant: bool = parameter(
        False,
        "make a request's logits independent of other requests and of how its prompt is chunked, "
        "bit for bit",
    )
    enforce_eager: bool = parameter(False, "do not capture graphs; launch kernels one by one")
    async_scheduling: bool | None = parameter(
        None, "start a step before the last one is done (default: on CUDA)"
    )
    tensor_parallel_size: _Ranks = parameter(1, "ranks that share each layer", "-tp", "--tp")
    pipeline_parallel_size: _Ranks = parameter(1, "stages that share the layers", "-pp", "--pp")
    step_timeout_s: _Seconds = parameter(300.0, "stop the engine if a step takes longer")

    block_size: _BlockSize | None = parameter(
        None,
        f"tokens per KV block (default: {CPU_SIZES.block_size}; {CUDA_SIZES.block_size} on CUDA)",
        group="KV cache",
    )
    kv_cache_dtype: KVCacheDtype = parameter("auto", "dtype of the KV cache; auto: as --dtype")
    gpu_memory_utilization: _Share = parameter(0.9, "share of each GPU's memory to use")
    kv_cache_memory_bytes: _Bytes | None = parameter(
        None, "bytes of KV cache per rank, instead of a share"
    )
    num_gpu_blocks_override: _Blocks | None = parameter(
        None, "number of KV blocks, on any device, instead of sizing by memory"
    )
    enable_prefix_caching: bool = parameter(
        True, "compute shared prefixes only once (default: yes)"
    )
    salt_prefix_cache_by_session: bool = parameter(
        False, "share cached prefixes only within a client's session"
    )

    max_num_seqs: _Rows | None = parameter(
        None, f"limit of running requests (default: {CPU_SIZES.max_num_seqs})", group="scheduler"
    )
    max_num_batched_tokens: _StepTokens | None = parameter(
        None,
        f"token budget of a step (default: {CPU_SIZES.max_num_batched_tokens}; "
        f"{CUDA_SIZES.max_num_batched_tokens} on CUDA)",
    )
    max_num_queued_reqs: _Queued = parameter(4096, "limit of waiting requests; more are refused")
    max_num_queued_tokens: _Queued = parameter(
        4 * 2**20, "limit of waiting prompt tokens; more are refused"
    )
    max_num_queued_bytes: _Queued = parameter(
        2**28, "limit of waiting requests' memory in bytes; more are refused"
    )
    scheduling_policy: SchedulingPolicy = parameter(
        "fcfs", "fcfs: first come, first served; priority: lowest number first"
    )
    priority_aging_s: _SecondsOrNone = parameter(
        60.0, "with priority: seconds of waiting that raise a request one level; 0: never"
    )
    long_prefill_token_threshold: _Limit = parameter(
        0, "limit of tokens of one prompt in a step; 0: no limit"
    )
    watermark: _ShareLeft = parameter(
        0.0, "share of KV blocks that admission keeps free while requests run"
    )
    target_itl_ms: _Milliseconds = parameter(
        math.inf, "shrink prompt chunks so that steps with decodes take less than this"
    )

    speculative_config: _Drafts = parameter(
        {},
        "draft tokens, to be verified several a step: the same output, sooner; "
        '{"method": "suffix"}, "ngram", "mtp"; docs/speculation.md has all keys, which are vLLM\'s',
        "-sc",
        metavar="JSON",
    )

    listen: _Text = parameter(
        "", f"ipc:// or tcp:// endpoint (default: {default_endpoint()})", group="engine"
    )
    curve_dir: _Name | None = parameter(
        None, "keys for tcp://, made by nanocore-keygen", metavar="DIR"
    )
    standby: bool = parameter(
        False, "load the model, and take over when the engine at the same --listen is gone"
    )
    max_num_clients: _Clients | None = parameter(
        None, "limit of sessions; more are refused (default: 1024, or what descriptors allow)"
    )
    shutdown_timeout: _SecondsOrNone = parameter(
        30.0, "seconds for open requests to finish after SIGTERM, SIGINT or CONTROL drain; 0: none"
    )
    step_trace: _Name | None = parameter(
        None, "append a JSON Lines record for each step", metavar="FILE"
    )
    disable_log_stats: bool = parameter(False, "do not log throughput and load every 10 s")
    log_format: LogFormat = parameter("text", "json: one object per log line")

    kv_events_endpoint: _Text | None = parameter(
        None, "ipc:// endpoint where events are published", group="KV cache events"
    )
    kv_events_replay_endpoint: _Text | None = parameter(
        None, "ipc:// endpoint for replay of missed events"
    )
    kv_events_topic: _Text = parameter("", "first frame of each batch (default: empty)")
