"""What an engine is started with, validated once; unknown names are errors.

`EngineConfig` is what the user asked for. `SchedulerConfig` is the part the scheduler needs, with
every default resolved. Names are those of `vllm serve`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from nanocore.engine_core.field_check import check_fields, require
from nanocore.protocol.endpoint import (
    IpcAddress,
    TcpAddress,
    default_endpoint,
    ipc_address,
    listen_address,
)
from nanocore.protocol.errors import ConfigError
from nanocore.protocol.messages import Capability
from nanocore.worker.messages import KVCacheDtype, LoadFormat, Quantization, WorkerConfig

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackend = Literal["auto", "cpu", "triton", "flash", "torch"]
SchedulingPolicy = Literal["fcfs", "priority"]

_MAX_NUM_ROWS: Final = 2**16
_MAX_INT32: Final = 2**31 - 1
_MAX_EXACT: Final = 2**53 - 1
_Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z", description="without NUL")]
_Name = Annotated[str, Meta(pattern=r"\A[^\0]+\Z", description="without NUL and not empty")]
_Ranks = Annotated[int, Meta(ge=1, le=1024)]
_Rows = Annotated[int, Meta(ge=1, le=_MAX_NUM_ROWS)]
_StepTokens = Annotated[int, Meta(ge=1, le=2**20)]
_Length = Annotated[int, Meta(ge=2, le=_MAX_INT32)]
_Blocks = Annotated[int, Meta(ge=1, le=_MAX_INT32)]
_Bytes = Annotated[int, Meta(ge=1, le=2**62)]
_Clients = Annotated[int, Meta(ge=1, le=2**20)]
_Queued = Annotated[int, Meta(ge=1, le=_MAX_EXACT)]
_Limit = Annotated[int, Meta(ge=0, le=_MAX_INT32, description="from 0 to 2147483647; 0: no limit")]

FLASH_BLOCK_SIZE: Final = 256
"""What any flash-attn takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What suits one kind of device and not another: a GPU wants more work at a time."""

    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


_DEFAULT_SIZES: Final = {
    "cpu": Sizes(),
    "cuda": Sizes(block_size=64, max_num_batched_tokens=8192),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the running set.

    max_num_seqs: rows, the requests that can run at once. max_num_batched_tokens: a step's token
    budget. max_model_len: prompt and output tokens of one request, at most.
    policy: who goes first. long_prefill_token_threshold: tokens one prompt may compute in one step;
    0 is no limit. max_num_partial_prefills: prompts that may be in chunks at once; 0 is no limit.
    watermark: share of the blocks that admission leaves free while requests are running.
    target_itl_ms: milliseconds that a step with decodes should stay under while prompts are
    computed beside them; infinity is no target. num_groups: groups of rows, one per pipeline
    stage; see `nanocore.worker.plan`. num_speculative_tokens: drafts that a decoding row computes
    after its token, of which the worker accepts some; no worker drafts yet, so no flag sets it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    watermark: float = 0.0
    target_itl_ms: float = math.inf
    num_groups: int = 1
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        most, drafts = f"--max-num-seqs ({self.max_num_seqs})", self.num_speculative_tokens
        require(
            self.max_num_batched_tokens >= self.max_num_seqs * (1 + drafts),
            "--max-num-batched-tokens",
            self.max_num_batched_tokens,
            f"must be at least {f'{1 + drafts} times ' if drafts else ''}{most}, so that every "
            f"running request can take {f'{1 + drafts} tokens' if drafts else 'a token'} in every "
            "step; raise it or lower --max-num-seqs",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All that `nanocore-engine` accepts; None means a default found at start.

    model: folder in Hugging Face format, or id on the Hugging Face hub; None is the bundled demo
    model. revision: of the hub's model. load_format: "dummy" is random weights.
    dtype: of weights and activations; "auto" is the checkpoint's, or bfloat16 in place of a float16
    that cannot be had.
    attention_backend: of all kernels; "auto" takes the fastest that is here. quantization: of
    weights as they are loaded, and fp8 of activations too; None keeps them in dtype.
    batch_invariant: a request's logits are the same bits whatever else runs, and however its tokens
    are computed. enforce_eager: call kernels one by one, capture no graphs. async_scheduling: begin
    a step before the last one is done; None does where the device works beside the host.
    tensor_parallel_size, pipeline_parallel_size: ranks that share each layer, and stages that
    share the layers. step_timeout_s: how long a step may take before it ends the engine.
    max_model_len: None takes the model's own, "auto" at most what fits the memory.
    max_num_seqs, max_num_batched_tokens, block_size: None takes what suits the device, see `Sizes`.
    num_gpu_blocks_override: KV blocks, instead of sizing by memory. gpu_memory_utilization: share
    of each GPU's memory to use. kv_cache_memory_bytes: memory for each rank's KV, instead of that.
    kv_cache_dtype: "auto" is the model's dtype.
    scheduling_policy, long_prefill_token_threshold, max_num_partial_prefills, watermark,
    target_itl_ms: see `SchedulerConfig`. max_num_queued_reqs, max_num_queued_tokens: see
    `QueueLimit`. salt_prefix_cache_by_session: share cached prefixes only within a session.
    step_trace: file to which each step is appended as a line of JSON.
    curve_dir: folder of the engine's keys and its clients', for a tcp:// `listen` alone.
    max_num_clients: sessions at once; see `ClientLimit`.
    check: only check that all this can work, without reading weights.
    kv_events_endpoint: ipc endpoint for subscribers to KV cache events; None publishes none.
    kv_events_replay_endpoint: where they ask for those they missed. kv_events_topic: first frame.
    """

    model: _Name | None = None
    revision: _Name | None = None
    load_format: LoadFormat = "auto"
    device: Device = "auto"
    dtype: Dtype = "auto"
    attention_backend: AttentionBackend = "auto"
    quantization: Quantization | None = None
    batch_invariant: bool = False
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    tensor_parallel_size: _Ranks = 1
    pipeline_parallel_size: _Ranks = 1
    step_timeout_s: Annotated[float, Meta(ge=0.1, le=10**6)] = 300.0
    max_model_len: _Length | Literal["auto"] | None = None
    max_num_seqs: _Rows | None = None
    max_num_batched_tokens: _StepTokens | None = None
    max_num_queued_reqs: _Queued = 4096
    max_num_queued_tokens: _Queued = 4 * 2**20
    scheduling_policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: _Limit = 0
    max_num_partial_prefills: _Limit = 0
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    target_itl_ms: Annotated[float, Meta(ge=0.001)] = math.inf
    block_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    num_gpu_blocks_override: _Blocks | None = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    kv_cache_memory_bytes: _Bytes | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    enable_prefix_caching: bool = True
    salt_prefix_cache_by_session: bool = False
    seed: Annotated[int, Meta(ge=0, le=_MAX_EXACT)] = 0
    listen: _Text = ""
    curve_dir: _Name | None = None
    max_num_clients: _Clients | None = None
    step_trace: _Name | None = None
    check: bool = False
    kv_events_endpoint: _Text | None = None
    kv_events_replay_endpoint: _Text | None = None
    kv_events_topic: _Text = ""

    def __post_init__(self) -> None:
        check_fields(self)
        size = self.block_size
        require(
            size is None or size & (size - 1) == 0, "--block-size", size, "must be a power of two"
        )
        require(
            not (self.quantization == "fp8" and self.batch_invariant),
            "--quantization",
            self.quantization,
            "the product of fp8 depends on the batch; leave --batch-invariant out, or use int8",
        )
        self._check_listen()
        self._check_kv_events()
        length = self.max_model_len
        self.scheduler_config(length if isinstance(length, int) else 2)

    def for_device(self, device_type: str) -> EngineConfig:
        """With the sizes that were left open, as they suit this kind of device."""
        return replace(self, **asdict(self._sizes_on(device_type)))

    @property
    def sizes(self) -> Sizes:
        """Those given, or else a CPU's."""
        return self._sizes_on("cpu")

    def _sizes_on(self, device_type: str) -> Sizes:
        """Defaults give way to what is given: no default makes a single flag an error."""
        default = _DEFAULT_SIZES[device_type]
        block_size = FLASH_BLOCK_SIZE if self.attention_backend == "flash" else default.block_size
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        return Sizes(
            block_size=self.block_size or block_size,
            max_num_seqs=num_seqs or min(default.max_num_seqs, num_tokens or _MAX_NUM_ROWS),
            max_num_batched_tokens=num_tokens or max(default.max_num_batched_tokens, num_seqs or 0),
        )

    @property
    def endpoint(self) -> str:
        """Where the engine listens."""
        return self.listen or default_endpoint()

    @property
    def address(self) -> IpcAddress | TcpAddress:
        """What the endpoint names."""
        return listen_address(self.endpoint)

    @property
    def capabilities(self) -> list[Capability]:
        """What this engine does and others may not."""
        given: dict[Capability, bool] = {
            "prefix_caching": self.enable_prefix_caching,
            "priority": self.scheduling_policy == "priority",
        }
        return [name for name, has in given.items() if has]

    def _check_listen(self) -> None:
        try:
            is_tcp = isinstance(self.address, TcpAddress)
        except ConfigError as error:
            raise ConfigError(f"--listen: {error}") from None
        if is_tcp and self.curve_dir is None:
            raise ConfigError(
                f"--listen {self.listen}: whoever reaches a TCP endpoint could use it; "
                "keys are needed, with --curve-dir DIR\n"
                "make them with `nanocore-keygen DIR` and, for each client, "
                "`nanocore-keygen DIR --client NAME --out FOLDER`\n"
                "clients on this machine need neither: --listen ipc:///path/engine.sock"
            )
        require(
            is_tcp or self.curve_dir is None,
            "--curve-dir",
            self.curve_dir,
            "keys are for --listen tcp://ADDRESS:PORT; an ipc endpoint is guarded by its "
            "directory's mode",
        )

    def _check_kv_events(self) -> None:
        events, replay = self.kv_events_endpoint, self.kv_events_replay_endpoint
        for flag, value in (
            ("--kv-events-replay-endpoint", replay),
            ("--kv-events-topic", self.kv_events_topic or None),
        ):
            require(
                value is None or events is not None,
                flag,
                value,
                "there are no events without --kv-events-endpoint; give both, or neither",
            )
        require(
            events is None or self.enable_prefix_caching,
            "--kv-events-endpoint",
            events,
            "events tell which prefixes are cached; leave --no-enable-prefix-caching out",
        )
        used: dict[Path, str] = {}
        if isinstance(self.address, IpcAddress):
            used[self.address.lock_path] = "--listen"
        for flag, value in (
            ("--kv-events-endpoint", events),
            ("--kv-events-replay-endpoint", replay),
        ):
            if value is not None:
                try:
                    lock_path = ipc_address(value).lock_path
                except ConfigError as error:
                    raise ConfigError(f"{flag}: {error}") from None
                other = used.setdefault(lock_path, flag)
                require(
                    other == flag,
                    flag,
                    value,
                    f"is {other}'s endpoint, or differs from it in the suffix only; each needs a "
                    "name of its own, as in ipc:///path/kv-events.sock",
                )

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's part, once the model's length is known."""
        return SchedulerConfig(
            max_num_seqs=self.sizes.max_num_seqs,
            max_num_batched_tokens=self.sizes.max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=self.scheduling_policy,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_num_partial_prefills=self.max_num_partial_prefills,
            watermark=self.watermark,
            target_itl_ms=self.target_itl_ms,
            num_groups=self.pipeline_parallel_size,
        )

    def worker_config(self, folder: str, max_model_len: int) -> WorkerConfig:
        """The workers' part, once the model's folder and length are known."""
        return WorkerConfig(
            folder=folder,
            load_format=self.load_format,
            device=self.device,
            dtype=self.dtype,
            attention_backend=self.attention_backend,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=self.sizes.block_size,
            max_model_len=max_model_len,
            max_num_seqs=self.sizes.max_num_seqs,
            max_num_batched_tokens=self.sizes.max_num_batched_tokens,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            seed=self.seed,
            enforce_eager=self.enforce_eager,
            batch_invariant=self.batch_invariant,
            async_scheduling=self.async_scheduling,
        )
