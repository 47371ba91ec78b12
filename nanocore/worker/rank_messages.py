"""What passes through the pipe between an engine and one of its worker processes.

A rank is started with a `RankStart` and loads its weights. On request it profiles and allocates its
KV cache, and replies to each when it is done; then it runs plans, and samples by masks, which go to
the ranks of the last stage alone. Its first rank sends each step's output; every rank can send a
`RankFailure`, at any time. The same structs configure the worker inside an engine of one rank,
without a pipe.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from nanocore.protocol.errors import (
    CacheMemoryError,
    ConfigError,
    ModelFileError,
    StartError,
    WorkerError,
)
from nanocore.system.logs import LogFormat
from nanocore.worker.config.speculative_config import SpeculativeConfig, step_drafts
from nanocore.worker.cost.model_cost import MachineSpeed, ModelCost
from nanocore.worker.memory.kv_groups import KVGroup, LayerGroup
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks

LoadFormat = Literal["auto", "safetensors", "dummy"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
Quantization = Literal["int4", "int8", "fp8"]
ActivationQuantization = Literal["auto", "none"]

_FAILURES = (ConfigError, ModelFileError, CacheMemoryError, WorkerError)
FAILURES: dict[int, type[StartError]] = {kind.exit_code: kind for kind in _FAILURES}
"""The error that the engine raises for a rank's, by the exit code that it asks for."""

MAX_PROMPT_LOGPROBS = 1 << 21
"""Limit of a step's prompt log probabilities, if it has those of more than one token. Workers
measure at their start what memory this many take; as messages they take some hundred megabytes."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration that all ranks share: `EngineParameters` of the same names, none left open.

    folder: the model's. max_model_len: tokens of one request, at most; memory may allow fewer in
    the end.
    """

    folder: str
    load_format: LoadFormat
    hf_overrides: dict[str, Any]
    merge_lora: str | None
    device: str
    dtype: str
    attention_backend: str
    quantization: Quantization | None
    activation_quantization: ActivationQuantization
    kv_cache_dtype: KVCacheDtype
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    seed: int
    enforce_eager: bool
    batch_invariant: bool
    async_scheduling: bool | None
    speculative_config: dict[str, Any]
    log_format: LogFormat

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return SpeculativeConfig.of(self.speculative_config)

    @property
    def max_drafts(self) -> int:
        """Drafts of a row in a step, at most."""
        speculative = self.speculative
        return 0 if speculative is None else speculative.num_speculative_tokens

    @property
    def max_samples(self) -> int:
        """Tokens that a step samples, at most."""
        return self.max_num_seqs + step_drafts(self.max_num_seqs, self.max_drafts)


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, tag="info"):
    """A rank that has loaded its part of the model.

    kernels, kernel_variant: the backend's name, and what of it decides bits.
    weight_bytes: memory they take. kv_groups: its layers by what they keep.
    available_kv_bytes: memory that its KV cache may take. memory_bytes: that it could take at the
    very most. numerics: a digest of what decides the bits of its results; None if their batch does.
    activation_bytes, table_bytes: about, of the largest step, and of rows and positions. cost: of
    its part of the model. speed: of its device, if that is its alone and was measured.
    """

    device: str
    dtype: str
    kernels: str
    kernel_variant: str = ""
    weight_bytes: int
    kv_groups: list[LayerGroup]
    available_kv_bytes: int
    memory_bytes: int
    numerics: str | None = None
    activation_bytes: int = 0
    table_bytes: int = 0
    cost: ModelCost | None = None
    speed: MachineSpeed | None = None


class Profile(msgspec.Struct, frozen=True, tag="profile"):
    """Find out how much memory is left; the rank replies with its `WorkerInfo`."""


class AllocateCache(msgspec.Struct, frozen=True, kw_only=True, tag="allocate"):
    """Make the KV cache and the persistent batch, and capture steps, or compile for them; the rank
    replies with `Done`, and is ready for plans.
    """

    num_slabs: int
    max_model_len: int
    groups: list[KVGroup]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Loading or allocating is done."""


class RankFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """A rank cannot go on, and exits.

    exit_code: the engine's. message: one line. traceback: as Python prints it.
    """

    exit_code: int
    message: str
    traceback: str = ""


class RankStart(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to a rank.

    rank: its number; stage times tensor_parallel_size plus its number in the stage.
    cores: CPU cores for its threads, see `kernel_cores`.
    board_fd: shared memory of the `StatusBoard`. reduce_fd: shared memory of the stage's ranks.
    receive_fd, send_fd: shared memory for hidden states from the stage before and to the next one;
    -1 where there is none. These three serve on a CPU.
    rendezvous: file where ranks on CUDA devices meet.
    """

    config: WorkerConfig
    rank: int
    cores: list[int]
    board_fd: int
    reduce_fd: int
    receive_fd: int
    send_fd: int
    rendezvous: str


ToRank = RankStart | Profile | AllocateCache | SchedulerOutput | TokenMasks
FromRank = Done | WorkerInfo | ModelRunnerOutput | RankFailure
