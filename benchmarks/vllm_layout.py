"""The messages of vLLM 0.32 that correspond to our SUBMIT and OUTPUT, laid out with msgspec.

A reproduction, for machines without vLLM: the same fields in the same order, array-like, defaults
left out, as `EngineCoreRequest`, `SamplingParams`, `EngineCoreOutput` and `EngineCoreOutputs` are
declared there (compared with the 0.32.0 wheel). Fields of types that a plain request does not use
(tensors, multi-modal inputs, LoRA) are None here. Values are those of `vllm_parts.py`. Where vLLM
itself is installed, overhead_vllm.py measures the real thing.
"""

from __future__ import annotations

import enum
import random
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec


class OutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    detokenize: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE
    output_text_buffer_length: int = 0
    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    bad_words: list[str] | None = None


class Request(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: None
    sampling_params: SamplingParams | None
    pooling_params: None
    arrival_time: float
    lora_request: None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: None = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1


class RequestTokens(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    request_id: str
    new_token_ids: list[int]
    new_logprobs: None = None
    new_prompt_logprobs_tensors: None = None
    pooling_output: None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class StepOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    engine_index: int = 0
    outputs: list[RequestTokens] = []
    scheduler_stats: None = None
    timestamp: float = 0.0
    utility_output: None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


def submit_both_ways(token_ids: list[int]) -> Callable[[], Any]:
    """A call that encodes and decodes one request with these prompt tokens."""
    params = SamplingParams(
        temperature=0.7, top_p=0.95, max_tokens=60_000, ignore_eos=True,
        output_kind=OutputKind.DELTA, _eos_token_id=151_645, _all_stop_token_ids={151_645},
    )  # fmt: skip
    name = _request_name(random.Random(0))
    request = Request(
        request_id=f"{name}-{1:08x}", external_req_id=name, prompt_token_ids=token_ids,
        sampling_params=params, arrival_time=time.time(), mm_features=None, pooling_params=None,
        lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Request)
    assert decoder.decode(encoder.encode(request)).prompt_token_ids == token_ids
    return lambda: decoder.decode(encoder.encode(request))


def outputs_both_ways(num_requests: int) -> Callable[[], Any]:
    """A call that encodes and decodes the outputs of a step, a token for each request."""
    drawn = random.Random(0)
    outputs = StepOutputs(
        outputs=[
            RequestTokens(f"{_request_name(drawn)}-{i:08x}", [drawn.randrange(151_936)])
            for i in range(num_requests)
        ],
        timestamp=time.monotonic(),
        weight_version="default",
    )
    encoder, buffer = msgspec.msgpack.Encoder(), bytearray()
    decoder = msgspec.msgpack.Decoder(StepOutputs)

    def both_ways() -> Any:
        encoder.encode_into(outputs, buffer)
        return decoder.decode(buffer)

    assert len(both_ways().outputs) == num_requests
    return both_ways


def _request_name(drawn: random.Random) -> str:
    """As long as one of vLLM's server."""
    return f"cmpl-{uuid.UUID(int=drawn.getrandbits(128)).hex}-0"
