"""What `nanocore bench serve` is to measure, and what to do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nanocore.bench.arrivals import Traffic
from nanocore.bench.dataset_options import DatasetOptions

NANOCORE, OPENAI, OPENAI_CHAT, VLLM = "nanocore", "openai", "openai-chat", "vllm"
BACKENDS: Final = (NANOCORE, OPENAI, OPENAI_CHAT, VLLM)
PATHS: Final = {
    OPENAI: "/v1/completions",
    VLLM: "/v1/completions",
    OPENAI_CHAT: "/v1/chat/completions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where requests go.

    engine_endpoint: of our wire; None is the user's default one. base_url, path: of HTTP.
    model: as HTTP requests name it, None for the server's first one; model_id: as results do.
    tokenizer: a folder, or a tokenizer.json.
    """

    backend: str
    engine_endpoint: str | None = None
    curve_dir: str | None = None
    base_url: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    model: str | None = None
    model_id: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every request asks for. sampling: by the names of `SamplingParams`, where given."""

    ignore_eos: bool = False
    logprobs: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    request_id_prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What becomes of the figures. Percentiles are of these metrics; goodput_ms may be {}."""

    label: str | None = None
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: Mapping[str, float] = field(default_factory=dict)
    save_result: bool = False
    save_detailed: bool = False
    append_result: bool = False
    result_dir: str | None = None
    result_filename: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    html: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """self_timed: requests arrive when their trace says."""

    destination: Destination
    dataset: DatasetOptions
    traffic: Traffic
    asked: Asked
    report: Report
    self_timed: bool = False
    max_concurrency: int | None = None
    num_warmups: int = 0
    ready_timeout_s: float = 0.0
    has_progress_bar: bool = True
