"""Outputs: what a caller receives while its request runs.

Each output is a snapshot that shares the request's growing lists, so streaming n tokens costs O(n).
Text, token ids, logprobs and metrics are built on reading. Outputs are created for every token, so
they are structs: a frozen dataclass costs eight times as much.
"""

from __future__ import annotations

import builtins
import math
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar, overload

import msgspec

from nanocore.client.requests.progress import Progress
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.codec import UnpackedLogprobs
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
    (a str) that ended it, or "repetition"; None otherwise, also for EOS. message: cause of an
    "error", or of an "abort" by the engine. index: among the request's n samples.
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
            raise NanocoreError(
                f"request {output.request_id!r} has no embedding: it ended with "
                f"{ended.finish_reason!r}{'' if ended.message is None else f': {ended.message}'}"
            )
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


Entry = TypeVar("Entry")


class Logprob(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One candidate. logprob: natural logarithm of its probability. rank: 1 is the most likely."""

    logprob: float
    rank: int
    _token_id: int
    _tokenizer: Tokenizer | None

    @property
    def decoded_token(self) -> str | None:
        """The token's text, incomplete characters as U+FFFD; None without detokenization."""
        return None if self._tokenizer is None else self._tokenizer.token_text(self._token_id).text

    @property
    def bytes(self) -> builtins.bytes | None:
        """The token's bytes, which join to the text's bytes; None without detokenization."""
        return None if self._tokenizer is None else self._tokenizer.token_text(self._token_id).bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Logprob) and self._numbers == other._numbers

    def __hash__(self) -> int:
        return hash(self._numbers)

    @property
    def _numbers(self) -> tuple[float, int, int]:
        return self.logprob, self.rank, self._token_id

    def __repr__(self) -> str:
        return (
            f"Logprob(logprob={self.logprob!r}, rank={self.rank!r}, "
            f"decoded_token={self.decoded_token!r})"
        )


class LogprobTable:
    """Log probabilities of successive tokens, in growing columns. Callers get views of the first
    entries, so a snapshot's cost does not depend on the text's length.

    tokenizer: for their texts; None: no texts.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ranks = array("I")  # of each token
        self._starts = array("Q", [0])  # start of each token's candidates, and the end of the last
        self._sums = array("d", [0.0])  # cumulative sums of the tokens' logprobs
        self._token_ids = array("i")  # of the candidates, the token itself first
        self._logprobs = array("f")

    def __len__(self) -> int:
        return len(self._ranks)

    def append(self, message: UnpackedLogprobs, index: int, start: int) -> None:
        """Add a message's index-th token, whose candidates begin at start."""
        end = start + message.counts[index]
        self._ranks.append(message.ranks[index])
        self._token_ids += message.token_ids[start:end]
        self._logprobs += message.logprobs[start:end]
        self._starts.append(len(self._token_ids))
        self._sums.append(self._sums[-1] + message.logprobs[start])

    def sum(self, num_tokens: int) -> float:
        """Sum of the first num_tokens tokens' own log probabilities."""
        return self._sums[num_tokens]

    def candidates(self, index: int) -> dict[int, Logprob]:
        """Return a token's candidates: first itself, then the most likely ones in descending
        order."""
        start, end = self._starts[index], self._starts[index + 1]
        own_id, own_rank = self._token_ids[start], self._ranks[index]
        tokenizer = self._tokenizer
        found = {own_id: Logprob(self._logprobs[start], own_rank, own_id, tokenizer)}
        others = self._token_ids[start + 1 : end]
        logprobs = self._logprobs[start + 1 : end]
        for rank, (token_id, logprob) in enumerate(zip(others, logprobs, strict=True), 1):
            if token_id != own_id:
                found[token_id] = Logprob(logprob, rank, token_id, tokenizer)
        return found


class _View(Sequence[Entry], Generic[Entry]):
    """The first tokens of columns that may grow. Slices are lists."""

    def __init__(self, columns: LogprobTable, num_tokens: int) -> None:
        self._columns = columns
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return self._num_tokens

    def _entry(self, index: int) -> Entry:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Entry]:
        return map(self._entry, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        places = range(len(self))[index]
        return self._entry(places) if isinstance(places, int) else [*map(self._entry, places)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, type(self))) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr([*self])


class SampleLogprobs(_View[dict[int, Logprob]]):
    """Candidates of each output token."""

    def _entry(self, index: int) -> dict[int, Logprob]:
        return self._columns.candidates(index)

    @property
    def sum(self) -> float:
        """Log probability of the whole text."""
        return self._columns.sum(self._num_tokens)


class PromptLogprobs(_View[dict[int, Logprob] | None]):
    """Candidates of each prompt token; None for the first, which nothing precedes."""

    def __len__(self) -> int:
        return 1 + self._num_tokens

    def _entry(self, index: int) -> dict[int, Logprob] | None:
        return self._columns.candidates(index - 1) if index else None
