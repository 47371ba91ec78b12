"""What the fake engine serves: a model of numbers, its files, and the state of its requests.

A defect is a name that stands beside what it breaks; see fake_engine.py.
"""

from __future__ import annotations

import hashlib
import math
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.messages import (
    MAX_TIMEOUT_S,
    Event,
    Limits,
    ModelCard,
    ModelFile,
    Submit,
)
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.conformance.fake_grammar import (
    EOS_ID,
    TOKENIZER,
    VOCAB_SIZE,
    UncompilableError,
    may_follow,
    texts_of,
)
from tests.conformance.fake_sampling import LogprobColumns, changes_logits, choose, logits_of

MAX_MODEL_LEN, BLOCK_SIZE = 4096, 16
CHUNK_BYTES = 100
FILES = {"tokenizer.json": TOKENIZER, "chat_template.jinja": b""}
MAX_NUM_SEQS, MAX_QUEUED, MAX_NUM_CLIENTS, NUM_BLOCKS = 8, 40, 20, 300
PING_INTERVAL_MS = 20
HIDDEN_SIZE = 4
INSTANCE = "0123456789abcdef" * 2


@dataclass
class Request:
    """A sample that has not ended. index: among those of its SUBMIT. texts: what it may be."""

    request_id: str
    handle: int
    prompt: list[int]
    sampling: EngineSamplingParams
    seed: int
    index: int = 0
    output: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    texts: list[str] | None = None
    deadline_s: float = inf
    is_told: bool = False  # whether its first token was

    @property
    def num_tokens(self) -> int:
        """Of its output."""
        return len(self.output)

    @property
    def waits_for_prompt_logprobs(self) -> bool:
        """Whether some are to be told before its first token."""
        asks = self.sampling.prompt_logprobs is not None and self.index == 0
        return asks and self.num_prompt_logprobs < len(self.prompt) - 1


@dataclass
class Client:
    """One session. minor: the newest its client speaks. heard_s: when it last said something.

    requests: samples that have not ended, by handle.
    """

    routing_id: bytes
    session: str
    minor: int
    heard_s: float = field(default_factory=time.monotonic)
    num_messages: int = 0
    requests: dict[int, Request] = field(default_factory=dict)
    waiting: deque[list[bytes]] = field(default_factory=deque)

    def uses(self, request_id: str) -> bool:
        """Whether a sample of this request has not ended."""
        return any(request.request_id == request_id for request in self.requests.values())


def model_card(digests: dict[str, str], vocab_size: int = VOCAB_SIZE) -> ModelCard:
    """The model card, with digests that may be wrong."""
    return ModelCard(
        model="fake",
        architecture="Fake",
        dtype="float32",
        vocab_size=vocab_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[EOS_ID],
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        hidden_size=HIDDEN_SIZE,
        numerics_fingerprint="89abcdef" * 4,
        files=[
            ModelFile(name=name, num_bytes=len(content), sha256=digests[name])  # type: ignore[arg-type]
            for name, content in FILES.items()
        ],
    )


def right_digests() -> dict[str, str]:
    """sha256 of the files, by name."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


LIMITS = Limits(
    max_frame_bytes=2**24,
    max_num_seqs=MAX_NUM_SEQS,
    ping_interval_ms=PING_INTERVAL_MS,
    session_timeout_ms=30_000,
    max_file_chunk_bytes=CHUNK_BYTES,
    max_num_queued_reqs=MAX_QUEUED,
    max_num_clients=MAX_NUM_CLIENTS,
    max_logprobs=VOCAB_SIZE,
)


def _named_ids(sampling: EngineSamplingParams) -> dict[str, list[int]]:
    """Token ids of each parameter that has some."""
    return {
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids or [],
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "bad_words_token_ids": [token for word in sampling.bad_words_token_ids for token in word],
    }


class FakeModel:
    """Admits requests and makes their tokens: functions of prompt, seed and position."""

    def __init__(self, defects: set[str]) -> None:
        self._defects = defects
        self.cached: set[tuple[int, ...]] = set()

    def has(self, defect: str) -> bool:
        """Whether this model does that wrong."""
        return defect in self._defects

    def objection(self, client: Client, submit: Submit, num_queued: int) -> tuple[str, str]:
        """(code, message) of the ERROR for a request, empty if it is taken."""
        prompt, sampling = submit.prompt_token_ids, submit.sampling or EngineSamplingParams()
        if client.uses(submit.request_id) and not self.has("duplicate-accepted"):
            return "duplicate_request_id", "request_id is in use"
        if not 1 <= len(submit.request_id) <= 256 + self.has("long-ids"):
            return "invalid_request", "request_id must have 1 to 256 characters"
        if submit.cache_salt is not None and not 1 <= len(submit.cache_salt) <= 1024:
            return "invalid_request", "cache_salt must have 1 to 1024 characters"
        if submit.priority and not self.has("priority-ignored"):
            return "invalid_request", "priority must be 0"
        if not prompt or len(prompt) % 4:
            return "invalid_request", "prompt_token_ids"
        if len(submit.output_token_ids) % 4:
            return "invalid_request", "output_token_ids"
        size = VOCAB_SIZE + self.has("vocabulary-plus-one")
        named = {"prompt_token_ids": unpack_int32(prompt).tolist()} | _named_ids(sampling)
        for name, token_ids in named.items():
            if self.has("ids-unchecked") and name in ("logit_bias", "bad_words_token_ids"):
                continue
            for token in token_ids:
                if not 0 <= token < size:
                    return "invalid_request", f"{name}: {token} must be below {VOCAB_SIZE}"
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(sampling, name) or 0) > VOCAB_SIZE and not self.has("logprobs-endless"):
                return "invalid_request", f"{name} is above max_logprobs={VOCAB_SIZE}"
        if submit.timeout_s is not None and not 0 < submit.timeout_s <= MAX_TIMEOUT_S:
            return "invalid_request", "timeout_s is out of range"
        if (why := self._objection_to_outputs(submit, sampling)) is not None:
            return why
        has_one_more = sampling.max_tokens == 1 or self.has("length-plus-one")
        most = MAX_MODEL_LEN - len(prompt) // 4 + has_one_more
        if (sampling.max_tokens or 1) > most:
            return "context_length_exceeded", "too long"
        full = num_queued and num_queued + sampling.n > MAX_QUEUED + MAX_NUM_SEQS
        if full and not self.has("queue-endless"):
            return "overloaded", "try again"
        return "", ""

    def _objection_to_outputs(
        self, submit: Submit, sampling: EngineSamplingParams
    ) -> tuple[str, str] | None:
        outputs = unpack_int32(submit.output_token_ids).tolist()
        if not outputs or self.has("outputs-unchecked"):
            return None
        eos = [] if sampling.ignore_eos else [EOS_ID]
        ends = {*sampling.stop_token_ids, *eos} & {*outputs[sampling.min_tokens : -1]}
        most = sampling.max_tokens or len(outputs)
        too_large = any(not 0 <= token < VOCAB_SIZE for token in outputs)
        if sampling.n > 1 or sampling.pooling or too_large or ends or len(outputs) > most:
            return "invalid_request", "output_token_ids cannot be"
        if len(submit.prompt_token_ids) // 4 + len(outputs) > MAX_MODEL_LEN:
            return "context_length_exceeded", "output_token_ids are too many"
        return None

    def deadline_s(self, submit: Submit) -> float:
        """When a request that arrives now has to end."""
        timeout_s = inf if submit.timeout_s is None else submit.timeout_s
        timeout_s = 0.0 if self.has("timeout-at-once") and submit.timeout_s else timeout_s
        return time.monotonic() + (inf if self.has("timeout-ignored") else timeout_s)

    def bring(self, request: Request, submit: Submit) -> Event | None:
        """Put a request behind the outputs that it brings; its end, if they have ended it."""
        outputs = unpack_int32(submit.output_token_ids).tolist()
        if self.has("outputs-are-prompt"):
            request.prompt += outputs
            return None
        request.output += outputs
        if self.has("outputs-forgotten"):
            request.output.clear()
        request.seed += self.has("seed-of-its-own")
        if self.has("min-tokens-start-again"):
            later = request.sampling.min_tokens + len(outputs)
            request.sampling = msgspec.structs.replace(request.sampling, min_tokens=later)
        is_early = request.num_tokens <= request.sampling.min_tokens
        if (is_early and not self._repeats_itself(request)) or self.has("ended-goes-on"):
            return None
        end = self._end(request, outputs[-1])
        return Event(handle=request.handle, **end) if end else None

    def texts(self, sampling: EngineSamplingParams) -> list[str] | None:
        """What the output may be; None if nothing is wanted.

        Raises:
            UncompilableError: what is wanted is nothing.
        """
        if sampling.structured_outputs is None:
            return None
        try:
            texts = texts_of(self._misread(sampling.structured_outputs))
            misread = self.has("structured-misread") and sampling.structured_outputs.regex
            return [f"{text}a" for text in texts] if misread else texts
        except UncompilableError:
            if self.has("uncompilable-taken"):
                return None
            if self.has("place-untold"):
                raise UncompilableError("it cannot be compiled") from None
            raise

    def _misread(self, wanted: StructuredOutputs) -> StructuredOutputs:
        """As it is, unless a defect has it that prefixes mean nothing, or everything."""
        if wanted.free_prefixes and self.has("prefixes-ignored"):
            return msgspec.structs.replace(wanted, free_prefixes=[])
        if wanted.free_prefixes and self.has("prefixes-of-anything"):
            return msgspec.structs.replace(wanted, free_prefixes=["hi"])
        return wanted

    def next(self, request: Request, num_steps: int) -> tuple[int | None, Event]:
        """A request's next token, None if there is none, and what is to be said with it."""
        if request.sampling.pooling is not None:
            return self._embedding(request)
        sampling, first = request.sampling, not request.is_told
        request.is_told = True
        noise = 0 if sampling.greedy or sampling.top_k == 1 else request.seed % 1009
        if self.has("seed-ignored") or (self.has("not-greedy") and sampling.greedy):
            noise = num_steps
        token: int | None = self.best(request, noise)
        texts = None if self.has("structured-ignored") else request.texts
        if changes_logits(sampling) or texts is not None:
            logits = logits_of(self.best(request, noise), VOCAB_SIZE)
            if texts is not None:
                follow = may_follow(texts, request.output, self._defects)
                logits = [x if token in follow else -inf for token, x in enumerate(logits)]
            prompt, output = request.prompt, request.output
            token = choose(logits, sampling, prompt, output, EOS_ID, self._defects)
        if token is None:
            reason = "stop" if self.has("no-token-is-a-stop") else "error"
            why = {} if reason == "stop" else {"message": "no token is left"}
            return None, Event(handle=request.handle, finish_reason=reason, **why)  # type: ignore[arg-type]
        token = VOCAB_SIZE if self.has("token-beyond") else token
        request.output.append(token)
        fields: dict[str, Any] = {}
        if first or self.has("cached-again"):
            key = tuple(request.prompt)
            known = key in self.cached and not sampling.skip_reading_prefix_cache
            if sampling.prompt_logprobs is not None and not self.has("prompt-logprobs-cached"):
                known = False
            fields["num_cached_tokens"] = (len(key) // BLOCK_SIZE * BLOCK_SIZE) if known else 0
            self.cached.add(key)
            if self.has("cached-untold"):
                del fields["num_cached_tokens"]
        return token, Event(handle=request.handle, **fields, **self._end(request, token))

    def _embedding(self, request: Request) -> tuple[int | None, Event]:
        """No token, and the end: of a token's hidden state its prefix decides."""
        prompt, is_mean = request.prompt, request.sampling.pooling == "mean"
        ends = range(1, 1 + len(prompt)) if is_mean else [len(prompt)]
        if self.has("mean-of-the-ends"):
            ends = [1, len(prompt)] if is_mean else ends
        states = [(sum(prompt[:end]) % 7, end % 5, -1.0, 0.5 * prompt[end - 1]) for end in ends]
        numbers = [sum(column) / len(states) for column in zip(*states, strict=True)]
        if self.has("embedding-nan"):
            numbers[1] = math.nan
        if self.has("embedding-short"):
            numbers.pop()
        embedding = array("f", numbers).tobytes()
        event = Event(
            handle=request.handle,
            num_cached_tokens=0,
            finish_reason="length" if self.has("embedding-at-length") else "stop",
            embedding=None if self.has("embedding-lost") else embedding,
        )
        return (1 if self.has("embedding-and-token") else None), event

    def best(self, request: Request, noise: int = 0) -> int:
        """The most likely token of a request, by the model, and with noise."""
        return (7 * sum(request.prompt) + 3 * request.num_tokens + noise) % 49

    def add_logprobs(self, columns: LogprobColumns, request: Request) -> None:
        """Of a request's last token, before which it is asked."""
        num_asked = request.sampling.logprobs
        if num_asked is None and self.has("logprobs-to-all"):
            num_asked = 1
        if num_asked is None or self.has("logprobs-untold"):
            return
        token = request.output.pop()
        logits = logits_of(self.best(request), VOCAB_SIZE)
        if self.has("logprobs-of-biased"):
            for biased, bias in request.sampling.logit_bias:
                logits[biased] += bias
        request.output.append(token)
        columns.add(request.handle, token, logits, num_asked)

    def add_prompt_logprobs(self, columns: LogprobColumns, request: Request) -> None:
        """Of the next block of a request's prompt."""
        first = request.num_prompt_logprobs + (not self.has("prompt-logprobs-from-the-first"))
        num_asked = request.sampling.prompt_logprobs
        assert num_asked is not None
        for token in request.prompt[first : first + BLOCK_SIZE]:
            columns.add(request.handle, token, logits_of(token, VOCAB_SIZE), num_asked)
            request.num_prompt_logprobs += 1

    def _repeats_itself(self, request: Request) -> bool:
        wanted, output = request.sampling.repetition_detection, request.output
        is_early = request.num_tokens < request.sampling.min_tokens
        if wanted is None or (is_early and not self.has("repetition-early")):
            return False
        count = wanted.min_count - self.has("repetition-soon")
        return any(
            len(output) >= size * count and output[-size * count :] == output[-size:] * count
            for size in range(max(wanted.min_pattern_size, 1), wanted.max_pattern_size + 1)
        )

    def _end(self, request: Request, token: int) -> dict[str, Any]:
        """EOS, then stop ids, then repetition, then length."""
        sampling = request.sampling
        most = sampling.max_tokens or (MAX_MODEL_LEN - len(request.prompt))
        most += self.has("model-length-plus-one") and sampling.max_tokens is None
        eos = token == EOS_ID and not sampling.ignore_eos and not self.has("eos-ignored")
        if eos and not (self.has("stop-ids-first") and token in sampling.stop_token_ids):
            told = {"stop_reason": token} if self.has("eos-told") else {}
            return {"finish_reason": "stop"} | told
        if token in sampling.stop_token_ids and not self.has("stop-ignored"):
            told = {} if self.has("stop-reason-untold") else {"stop_reason": token}
            return {"finish_reason": "stop"} | told
        if self._repeats_itself(request):
            told = {"stop_reason": token} if self.has("repetition-misnamed") else {}
            return {"finish_reason": "stop", "stop_cause": "repetition"} | told
        if self.has("error-unexplained") and request.num_tokens == 2:
            return {"finish_reason": "error"}
        if request.num_tokens >= most + self.has("one-token-more"):
            told = {"stop_reason": 7} if self.has("length-with-stop-reason") else {}
            return {"finish_reason": "stop" if self.has("wrong-reason") else "length"} | told
        return {}
