"""The configuration of an engine, validated once; unknown names are errors.

`EngineConfig` is what the user asked for: the declared `EngineParameters`, held to their types and
ranges and to each other. `SchedulerConfig` is the part the scheduler needs and `WorkerConfig` the
workers', with every default resolved; both are filled by name.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from nanocore.engine_core.flags import check_fields, flag_name, require
from nanocore.engine_core.parameters import (
    CPU_SIZES,
    CUDA_SIZES,
    FLASH_BLOCK_SIZE,
    MAX_NUM_ROWS,
    EngineParameters,
    SchedulingPolicy,
    Sizes,
)
from nanocore.protocol.endpoint import (
    IpcAddress,
    TcpAddress,
    default_endpoint,
    ipc_address,
    listen_address,
)
from nanocore.protocol.errors import ConfigError
from nanocore.protocol.messages import Capability
from nanocore.worker.config.speculative_config import SpeculativeConfig, step_drafts
from nanocore.worker.rank_messages import MAX_PROMPT_LOGPROBS, WorkerConfig


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one step and of the running set.

    max_num_seqs: rows, the requests that can run at once. max_num_batched_tokens: a step's token
    budget. max_model_len: prompt and output tokens of one request, at most.
    policy: who goes first. priority_aging_s: seconds of waiting that are worth a level of priority;
    0 is no ageing. long_prefill_token_threshold: tokens one prompt may compute in one step;
    0 is no limit. watermark: share of the blocks that admission leaves free while requests are
    running.
    target_itl_ms: milliseconds that a step with decodes should stay under while prompts are
    computed beside them; infinity is no target. num_groups: groups of rows, one per pipeline
    stage; see `nanocore.worker.plan`. num_speculative_tokens: most drafts that a
    decoding row computes behind its token, of which the worker accepts some. adaptive_drafts: fewer
    where they would not pay.
    max_prompt_logprobs: log probabilities of prompt tokens in a step, if it tells those of several.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: SchedulingPolicy = "fcfs"
    priority_aging_s: float = 0.0
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    target_itl_ms: float = math.inf
    num_groups: int = 1
    num_speculative_tokens: int = 0
    adaptive_drafts: bool = True
    max_prompt_logprobs: int = MAX_PROMPT_LOGPROBS

    @property
    def max_samples(self) -> int:
        """Most tokens that a step samples."""
        return self.max_num_seqs + step_drafts(self.max_num_seqs, self.num_speculative_tokens)

    @property
    def max_chunk(self) -> int:
        """Limit of prompt tokens per request and step."""
        # A threshold beyond the budget is none: a prompt that fits it would wait for a step that
        # has room for all of it, and never come.
        threshold = self.long_prefill_token_threshold or self.max_num_batched_tokens
        return min(threshold, self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "--max-num-batched-tokens",
            self.max_num_batched_tokens,
            f"must be at least --max-num-seqs ({self.max_num_seqs}), so that every running request "
            "can take a token in every step; raise it or lower --max-num-seqs",
        )


Part = TypeVar("Part", SchedulerConfig, WorkerConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(EngineParameters):
    """Parameters of one engine, validated.

    Raises:
        ConfigError: a value that is not of its declared type or range, or that contradicts another.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        size, is_fp8 = self.block_size, self.quantization == "fp8"
        self._require(
            size is None or size & (size - 1) == 0, "block_size", "must be a power of two"
        )
        self._require(
            not (is_fp8 and self.batch_invariant),
            "quantization",
            "the product of fp8 depends on the batch; leave --batch-invariant out, or use int8",
        )
        self._require(
            not (is_fp8 and self.activation_quantization == "none"),
            "quantization",
            "is of activations, too; leave --activation-quantization none out, or use int8",
        )
        self._require(
            self.speculative is None or self.pipeline_parallel_size == 1,
            "pipeline_parallel_size",
            "drafts are not served with pipeline stages; leave --speculative-config out, or use "
            "--tensor-parallel-size",
        )
        self._check_listen()
        self._check_kv_events()
        length = self.max_model_len
        self.scheduler_config(length if isinstance(length, int) else 2)

    def _require(self, ok: bool, name: str, limit: str) -> None:
        require(ok, flag_name(name), getattr(self, name), limit)

    def for_device(self, device_type: str) -> EngineConfig:
        """Return the configuration with all sizes set. device_type: cpu or cuda."""
        return replace(self, **asdict(self._sizes_on(device_type)))

    @property
    def sizes(self) -> Sizes:
        """All sizes; those that were left open have the CPU's defaults."""
        return self._sizes_on("cpu")

    def _sizes_on(self, device_type: str) -> Sizes:
        """Fill in open sizes. Defaults adapt to flags: none makes a single flag an error."""
        default = {"cpu": CPU_SIZES, "cuda": CUDA_SIZES}[device_type]
        block_size = FLASH_BLOCK_SIZE if self.attention_backend == "flash" else default.block_size
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        return Sizes(
            block_size=self.block_size or block_size,
            max_num_seqs=num_seqs or min(default.max_num_seqs, num_tokens or MAX_NUM_ROWS),
            max_num_batched_tokens=num_tokens or max(default.max_num_batched_tokens, num_seqs or 0),
        )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """What proposes drafts; None: nothing does."""
        return SpeculativeConfig.of(self.speculative_config)

    @property
    def endpoint(self) -> str:
        return self.listen or default_endpoint()

    @property
    def address(self) -> IpcAddress | TcpAddress:
        """The parsed endpoint; its type tells the transport."""
        return listen_address(self.endpoint)

    @property
    def capabilities(self) -> list[Capability]:
        """Capabilities in WELCOME: what not every engine can do."""
        given: dict[Capability, bool] = {
            "prefix_caching": self.enable_prefix_caching,
            "priority": self.scheduling_policy == "priority",
            "embeddings": True,
        }
        return [name for name, has in given.items() if has]

    def _check_listen(self) -> None:
        try:
            is_tcp = isinstance(self.address, TcpAddress)
        except ConfigError as error:
            raise ConfigError(f"--listen: {error}") from None
        if is_tcp and self.curve_dir is None:
            raise ConfigError(
                f"--listen {self.listen}: anybody who reaches a TCP endpoint could use it; keys "
                "are needed, with --curve-dir DIR\nmake them with `nanocore-keygen DIR` and, for "
                "each client, `nanocore-keygen DIR --client NAME --out FOLDER`\nclients on this "
                "machine need neither: --listen ipc:///path/engine.sock"
            )
        self._require(
            is_tcp or self.curve_dir is None,
            "curve_dir",
            "keys are for --listen tcp://ADDRESS:PORT; an ipc endpoint is guarded by its "
            "directory's mode",
        )
        self._require(
            not (is_tcp and self.standby),
            "standby",
            f"it waits for the lock of an ipc endpoint, and {self.listen} has none",
        )

    def _check_kv_events(self) -> None:
        events = self.kv_events_endpoint
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            self._require(
                not getattr(self, name) or events is not None,
                name,
                "it needs --kv-events-endpoint: give both, or neither",
            )
        self._require(
            events is None or self.enable_prefix_caching,
            "kv_events_endpoint",
            "events tell which prefixes are cached; leave --no-enable-prefix-caching out",
        )
        used: dict[Path, str] = {}
        if isinstance(self.address, IpcAddress):
            used[self.address.lock_path] = "listen"
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            if (value := getattr(self, name)) is not None:
                try:
                    lock_path = ipc_address(value).lock_path
                except ConfigError as error:
                    raise ConfigError(f"{flag_name(name)}: {error}") from None
                other = used.setdefault(lock_path, name)
                self._require(
                    other == name,
                    name,
                    f"is {flag_name(other)}'s endpoint, or differs from it in the suffix only; "
                    "each needs a name of its own, as in ipc:///path/kv-events.sock",
                )

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        speculative = self.speculative
        return self._filled(
            SchedulerConfig,
            max_model_len=max_model_len,
            policy=self.scheduling_policy,
            num_groups=self.pipeline_parallel_size,
            num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
            adaptive_drafts=speculative is None or speculative.adaptive,
            max_prompt_logprobs=MAX_PROMPT_LOGPROBS,
        )

    def worker_config(self, folder: str, max_model_len: int) -> WorkerConfig:
        return self._filled(WorkerConfig, folder=folder, max_model_len=max_model_len)

    def _filled(self, kind: type[Part], **given: object) -> Part:
        """Fill a part's configuration by name: from what is given, the sizes, and this one."""
        values = asdict(self) | asdict(self.sizes) | given
        return kind(**{name: values[name] for name in kind.__struct_fields__})
