"""Outputs: what a caller receives while its request runs.

Each output is a snapshot that shares the request's growing lists, so streaming n tokens costs O(n).
Text, token ids, logprobs and metrics are built on reading. Outputs are created for every token, so
they are structs: a frozen dataclass costs eight times as much.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence

import msgspec

from nanocore.client.requests.logprob_views import PromptLogprobs, SampleLogprobs
from nanocore.client.requests.progress import Progress
from nanocore.protocol.errors import InvalidRequestError, NanocoreError, ProtocolError
from nanocore.protocol.messages import FinishReason
from nanocore.protocol.sampling import Pooling, SamplingParams


class Resume(msgspec.Struct, gc=False):
    """A change of engine. Times are seconds of the client's monotonic clock.

    num_output_tokens: received before, of all samples. is_exact: there were none, or both engines
    promise the same bits (`ModelCard.numerics_fingerprint`), so the output is the same as without
    the change. engine_instance: the new engine. lost_s: when the loss was noticed; reached_s: when
    an engine was connected again; next_s: when the next token or the end arrived, None until then.
    """

    num_output_tokens: int
    is_exact: bool
    engine_instance: str
    lost_s: float
    reached_s: float
    next_s: float | None = None

    @property
    def gap_s(self) -> float | None:
        """Seconds from the loss to the next token."""
        return None if self.next_s is None else self.next_s - self.lost_s


class RequestMetrics(msgspec.Struct, frozen=True, gc=False):
    """Times of one request, in seconds, by the client's monotonic clock.

    time_to_first_token_s: since submission; None before the first token. e2e_latency_s: until the
    request's end, or until now. num_output_tokens: of all samples, as of the output.
    output_tokens_per_s: average since submission. time_per_output_token_s: average after the first
    token, of the longest sample; None before it has two tokens.
    """

    time_to_first_token_s: float | None
    e2e_latency_s: float
    num_output_tokens: int
    time_per_output_token_s: float | None
    output_tokens_per_s: float


class CompletionOutput(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One generated sample of a request, as of one moment.

    delta: new text of this output. finish_reason: None while it runs, then "stop", "length",
    "abort", "timeout" or "error". stop_reason: the id of stop_token_ids (an int) or the stop string
    (a str) that ended it; None otherwise, also for EOS. message: cause of an "error", or of an
    "abort" by the engine. index: among the request's n samples.
    logprobs: a dict of candidates for each of token_ids, if requested.
    """

    _parts: list[str]
    _num_parts: int
    _token_ids: list[int]
    num_tokens: int
    delta: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: str | None = None
    index: int = 0
    logprobs: SampleLogprobs | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts[: self._num_parts])

    @property
    def token_ids(self) -> list[int]:
        """The token ids so far, special tokens included."""
        return self._token_ids[: self.num_tokens]

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the sampled tokens' log probabilities, if logprobs were requested."""
        return None if self.logprobs is None else self.logprobs.sum

    def __repr__(self) -> str:
        message = f", message={self.message!r}" if self.message is not None else ""
        return (
            f"CompletionOutput(text={self.text!r}, num_tokens={self.num_tokens}, "
            f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r}{message})"
        )


class RequestOutput(msgspec.Struct, frozen=True, gc=False, eq=False):
    """State of one request at one moment.

    prompt: its text, if it was given as text. prompt_token_ids: a list, or the given array.
    outputs: n completions, in the order of their indices. finished: all of them have finished.
    num_cached_tokens: prompt tokens found in the prefix cache, for the first sample; None until the
    first token.
    prompt_logprobs: a dict of candidates for each prompt token, None for the first one, if
    requested; complete with the first output token.
    embedding: float32, set at the end of a request with `pooling`.
    resumes: changes of engine.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None
    _progress: Progress
    prompt_logprobs: PromptLogprobs | None = None
    embedding: array[float] | None = None
    resumes: Sequence[Resume] = ()

    @property
    def metrics(self) -> RequestMetrics:
        """The request's times, as of when this is read."""
        progress = self._progress
        start_s, first_s = progress.start_s, progress.first_token_s
        now_s = progress.end_s or time.monotonic()
        counts = [output.num_tokens for output in self.outputs]
        num_tokens, most = sum(counts), max(counts)
        return RequestMetrics(
            None if first_s is None else first_s - start_s,
            now_s - start_s,
            num_tokens,
            None if first_s is None or most < 2 else (now_s - first_s) / (most - 1),
            num_tokens / (now_s - start_s) if num_tokens else 0.0,
        )

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, outputs={self.outputs!r}, "
            f"finished={self.finished!r})"
        )


class EmbeddingOutput(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A prompt's embedding.

    embedding: hidden_size float32 numbers. prompt_token_ids: a list, or the given array.
    num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    embedding: array[float]
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int

    @classmethod
    def of(cls, output: RequestOutput, normalize: bool, size: int | None) -> EmbeddingOutput:
        """Read a request's last output. normalize: to length 1, if it is not 0. size: hidden_size.

        Raises:
            NanocoreError: it has no embedding, because it was aborted or the engine ended it.
            ProtocolError: the embedding has another size, or is not finite.
        """
        embedding = output.embedding
        if embedding is None:
            (ended,) = output.outputs
            error = NanocoreError(
                f"request {output.request_id!r} has no embedding: it ended with "
                f"{ended.finish_reason!r}{'' if ended.message is None else f': {ended.message}'}"
            )
            error.request_id = output.request_id
            raise error
        if len(embedding) != (size or len(embedding)) or not all(map(math.isfinite, embedding)):
            raise ProtocolError(
                f"OUTPUT: an embedding of {len(embedding)} numbers: it must have hidden_size "
                f"({size}), all finite"
            )
        if normalize and (length := math.hypot(*embedding)):
            embedding = array("f", [number / length for number in embedding])
        return cls(
            output.request_id, embedding, output.prompt_token_ids, output.num_cached_tokens or 0
        )


def embedding_params(pooling: Pooling) -> SamplingParams:
    """Return the parameters of a request for an embedding; raises InvalidRequestError."""
    params = SamplingParams(pooling=pooling, detokenize=False)
    if params.pooling is None:
        raise InvalidRequestError("pooling=None: an embedding needs 'last' or 'mean'")
    return params
