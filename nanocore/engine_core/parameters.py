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

_MODEL: Final = "model"
_DEVICE: Final = "device and kernels"
_CACHE: Final = "KV cache"
_SCHEDULER: Final = "scheduler"
_ENGINE: Final = "engine"
_EVENTS: Final = "KV cache events"


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
        _MODEL,
        "folder in Hugging Face format, GGUF file, or id on the hub (default: the demo model)",
    )

    revision: _Name | None = parameter(None, _MODEL, "branch, tag or commit of the hub's model")

    load_format: LoadFormat = parameter("auto", _MODEL, "dummy: random weights, no files")

    hf_overrides: _Object = parameter(
        {}, _MODEL, "values that replace those of the model's config.json", metavar="JSON"
    )

    merge_lora: _Name | None = parameter(
        None,
        _MODEL,
        "folder of a LoRA adapter as PEFT writes it, merged into the weights as they are loaded",
        metavar="DIR",
    )

    dtype: Dtype = parameter(
        "auto",
        _MODEL,
        "of weights and activations; auto: the checkpoint's, or bfloat16 in place of a float16 "
        "that cannot be had; float16 is for CUDA",
    )

    max_model_len: _Length | Literal["auto"] | None = parameter(
        None,
        _MODEL,
        "tokens of prompt and output together (default: the model's own); auto: at most what fits "
        "the memory",
    )

    max_logprobs: _Logprobs = parameter(
        20,
        _MODEL,
        "log probabilities that a request may have of each token; -1: of the whole vocabulary",
    )

    seed: _Seed = parameter(0, _MODEL, "for requests that bring no seed, and of dummy weights")

    device: Device = parameter("auto", _DEVICE, "default: cuda where it is")

    attention_backend: AttentionBackend = parameter(
        "auto",
        _DEVICE,
        "of all kernels; auto: the fastest that is here",
        reader=_attention_backend,
    )

    quantization: Quantization | None = parameter(
        None,
        _DEVICE,
        "of weights that are stored as floats, as they are loaded; fp8, of activations too, is for "
        "CUDA (8.9 and above)",
    )

    activation_quantization: ActivationQuantization = parameter(
        "auto",
        _DEVICE,
        "none: what quantized weights are multiplied with stays as it is; auto: rounded to eight "
        "bits where that is faster",
    )

    batch_invariant: bool = parameter(
        False,
        _DEVICE,
        "the same logits, bit for bit, whatever else runs and however a request's tokens are "
        "computed",
    )

    enforce_eager: bool = parameter(False, _DEVICE, "call kernels one by one, capture no graphs")

    async_scheduling: bool | None = parameter(
        None, _DEVICE, "begin a step before the last one is done (default: on CUDA)"
    )

    tensor_parallel_size: _Ranks = parameter(
        1, _DEVICE, "ranks that share each layer", "-tp", "--tp"
    )

    pipeline_parallel_size: _Ranks = parameter(
        1, _DEVICE, "stages that share the layers", "-pp", "--pp"
    )

    step_timeout_s: _Seconds = parameter(300.0, _DEVICE, "a step that takes longer ends the engine")

    block_size: _BlockSize | None = parameter(
        None,
        _CACHE,
        f"tokens per KV block ({CPU_SIZES.block_size}; {CUDA_SIZES.block_size} on CUDA)",
    )

    kv_cache_dtype: KVCacheDtype = parameter("auto", _CACHE, "auto: as --dtype")

    gpu_memory_utilization: _Share = parameter(0.9, _CACHE, "share of each GPU's memory to use")

    kv_cache_memory_bytes: _Bytes | None = parameter(
        None, _CACHE, "of each rank, instead of a share"
    )

    num_gpu_blocks_override: _Blocks | None = parameter(
        None, _CACHE, "KV blocks, on any device, instead of sizing by memory"
    )

    enable_prefix_caching: bool = parameter(
        True, _CACHE, "compute a prefix that requests share once (default: yes)"
    )

    salt_prefix_cache_by_session: bool = parameter(
        False, _CACHE, "share cached prefixes only within a client's session"
    )

    max_num_seqs: _Rows | None = parameter(
        None, _SCHEDULER, f"requests running at once ({CPU_SIZES.max_num_seqs})"
    )

    max_num_batched_tokens: _StepTokens | None = parameter(
        None,
        _SCHEDULER,
        f"budget of a step ({CPU_SIZES.max_num_batched_tokens}; "
        f"{CUDA_SIZES.max_num_batched_tokens} on CUDA)",
    )

    max_num_queued_reqs: _Queued = parameter(
        4096, _SCHEDULER, "requests that may wait; more are refused"
    )

    max_num_queued_tokens: _Queued = parameter(
        4 * 2**20, _SCHEDULER, "tokens of their prompts; more are refused"
    )

    max_num_queued_bytes: _Queued = parameter(
        2**28, _SCHEDULER, "memory that they hold; more are refused"
    )

    scheduling_policy: SchedulingPolicy = parameter(
        "fcfs", _SCHEDULER, "who goes first: fcfs, who came first; priority, the lowest number"
    )

    priority_aging_s: _SecondsOrNone = parameter(
        60.0, _SCHEDULER, "with priority: seconds of waiting worth a level of it; 0: none"
    )

    long_prefill_token_threshold: _Limit = parameter(
        0, _SCHEDULER, "tokens that one prompt may compute in a step; 0: no limit"
    )

    max_num_partial_prefills: _Limit = parameter(
        0, _SCHEDULER, "prompts in chunks at once; 0: no limit"
    )

    watermark: _ShareLeft = parameter(
        0.0, _SCHEDULER, "share of KV blocks that admission leaves free while requests run"
    )

    target_itl_ms: _Milliseconds = parameter(
        math.inf, _SCHEDULER, "shrink prompt chunks so that steps with decodes stay under this"
    )

    listen: _Text = parameter(
        "", _ENGINE, f"ipc:// or tcp:// endpoint (default: {default_endpoint()})"
    )

    curve_dir: _Name | None = parameter(
        None, _ENGINE, "keys for tcp://, made by nanocore-keygen", metavar="DIR"
    )

    standby: bool = parameter(
        False, _ENGINE, "load, and serve when the engine that serves at the same --listen is gone"
    )

    max_num_clients: _Clients | None = parameter(
        None, _ENGINE, "sessions at once; more are refused (1024, or what descriptors allow)"
    )

    shutdown_timeout: _SecondsOrNone = parameter(
        30.0,
        _ENGINE,
        "seconds for requests to come to their end after SIGTERM, SIGINT or CONTROL drain; 0: none",
    )

    step_trace: _Name | None = parameter(
        None, _ENGINE, "append each step as a line of JSON", metavar="FILE"
    )

    disable_log_stats: bool = parameter(
        False, _ENGINE, "no line of throughput and load every 10 s of work"
    )

    log_format: LogFormat = parameter("text", _ENGINE, "json: each line of the log an object")

    kv_events_endpoint: _Text | None = parameter(
        None, _EVENTS, "ipc:// endpoint to publish them at"
    )

    kv_events_replay_endpoint: _Text | None = parameter(
        None, _EVENTS, "ipc:// endpoint for missed ones"
    )

    kv_events_topic: _Text = parameter("", _EVENTS, "first frame of each batch (default: empty)")
