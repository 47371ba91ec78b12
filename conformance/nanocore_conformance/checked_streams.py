"""What an engine said of each request of a session, held against the rules for all of them.

Every OUTPUT that any check receives comes through here: columns that fit, handles that were
accepted and have not ended, ids of the vocabulary, one end, cached tokens told with the first, and
log probabilities of the tokens whose requests ask for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nanocore.protocol.codec import unpack_float32, unpack_int32, unpack_output
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.messages import Accepted, Event, Output, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore_conformance.checked_logprobs import TokenEntry, check_entry, entries_by_handle
from nanocore_conformance.report import BrokenError, require

NUM_SEEDS = 2**53


@dataclass
class Stream:
    """One sample of an accepted request, which has but one unless it asks for more.

    samples: all of its request, this one among them.
    """

    request_id: str
    handle: int
    seed: int
    prompt: list[int]
    sampling: EngineSamplingParams
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    stop_cause: str | None = None
    logprobs: list[TokenEntry] = field(default_factory=list)
    prompt_logprobs: list[TokenEntry] = field(default_factory=list)
    embedding: list[float] | None = None
    samples: list[Stream] = field(default_factory=list, repr=False)


class CheckedStreams:
    """The samples of one session by handle, those that have ended included."""

    def __init__(self, vocab_size: int, max_model_len: int) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self.by_handle: dict[int, Stream] = {}

    def accept(self, accepted: Accepted, submit: Submit | None) -> list[Stream]:
        """A new request's samples. submit: what was accepted, if it could be read."""
        prompt = [] if submit is None else unpack_int32(submit.prompt_token_ids).tolist()
        sampling = (submit and submit.sampling) or EngineSamplingParams()
        samples = [
            Stream(
                accepted.request_id,
                accepted.handle + i,
                (accepted.seed + i) % NUM_SEEDS,
                prompt,
                sampling,
            )
            for i in range(sampling.n)
        ]
        for stream in samples:
            stream.samples = samples
            self.by_handle[stream.handle] = stream
        return samples

    def take(self, output: Output) -> None:
        """Add what an OUTPUT says.

        Raises:
            BrokenError: it breaks a rule.
        """
        try:
            handles, counts, token_ids = unpack_output(output)
        except ProtocolError as error:
            raise BrokenError("columns that fit together", error) from None
        require(len(set(handles)) == len(handles), "each handle at most once", list(handles))
        self._take_prompt_logprobs(output)
        # A first token's event says so of the first message with tokens, and of no later one.
        fresh = {handle for handle in handles if not self._open(handle, "tokens").token_ids}
        start, taken = 0, {}
        for i, handle in enumerate(handles):
            end = start + (1 if counts is None else counts[i])
            taken[handle] = token_ids[start:end].tolist()
            self._take_tokens(self.by_handle[handle], taken[handle])
            start = end
        self._take_logprobs(output, taken)
        for event in output.events:
            self._take_event(event, fresh)

    def _take_tokens(self, stream: Stream, tokens: list[int]) -> None:
        require(bool(tokens), f"a token for handle {stream.handle}, which is listed", "none")
        require(stream.sampling.pooling is None, "no token of a request with pooling", tokens)
        valid = all(0 <= token < self._vocab_size for token in tokens)
        require(valid, f"token ids below vocab_size={self._vocab_size}", tokens)
        is_first = stream is stream.samples[0]
        if stream.sampling.prompt_logprobs is not None and is_first and not stream.token_ids:
            expected = f"prompt_logprobs of {len(stream.prompt) - 1} tokens before the first token"
            got = f"those of {len(stream.prompt_logprobs)}"
            require(len(stream.prompt_logprobs) == len(stream.prompt) - 1, expected, got)
        stream.token_ids += tokens
        most = f"at most max_model_len={self._max_model_len} tokens of a request"
        require(len(stream.token_ids) <= self._max_model_len, most, len(stream.token_ids))

    def _take_logprobs(self, output: Output, taken: Mapping[int, list[int]]) -> None:
        found = entries_by_handle(output.logprobs)
        for handle, tokens in taken.items():
            stream = self.by_handle[handle]
            num_asked = stream.sampling.logprobs
            entries = found.pop(handle, [])
            if num_asked is None:
                require(
                    not entries, f"no logprobs of handle {handle}, which asked for none", output
                )
                continue
            expected = f"logprobs of the {len(tokens)} tokens of handle {handle}"
            require(len(entries) == len(tokens), expected, f"those of {len(entries)}")
            for entry, token in zip(entries, tokens, strict=True):
                check_entry(entry, token, num_asked, self._vocab_size)
            stream.logprobs += entries
        require(not found, "logprobs of this message's tokens alone", f"those of {list(found)}")
        asked = any(stream.sampling.logprobs is not None for stream in self.by_handle.values())
        expected = "no field logprobs where no request asks for it"
        require(asked or output.logprobs is None, expected, output.logprobs)

    def _take_prompt_logprobs(self, output: Output) -> None:
        for handle, entries in entries_by_handle(output.prompt_logprobs).items():
            stream = self._open(handle, "prompt_logprobs")
            num_asked = stream.sampling.prompt_logprobs
            where = "prompt_logprobs of the first sample of requests that ask for them"
            is_first = stream is stream.samples[0]
            if num_asked is None or not is_first:
                raise BrokenError(where, f"those of handle {handle}")
            require(not stream.token_ids, "prompt_logprobs before the first token", "some after it")
            done = 1 + len(stream.prompt_logprobs)
            tokens = stream.prompt[done : done + len(entries)]
            expected = f"prompt_logprobs of at most {len(stream.prompt) - 1} tokens"
            require(len(tokens) == len(entries), expected, done - 1 + len(entries))
            for entry, token in zip(entries, tokens, strict=True):
                check_entry(entry, token, num_asked, self._vocab_size)
            stream.prompt_logprobs += entries
        asked = any(s.sampling.prompt_logprobs is not None for s in self.by_handle.values())
        expected = "no field prompt_logprobs where no request asks for it"
        require(asked or output.prompt_logprobs is None, expected, output.prompt_logprobs)

    def _take_event(self, event: Event, fresh: set[int]) -> None:
        stream = self._open(event.handle, "an event")
        if event.num_cached_tokens is not None:
            where = f"num_cached_tokens of handle {event.handle} with its first token only"
            is_pooled = stream.sampling.pooling is not None
            require(event.handle in fresh or is_pooled, where, event)
            require(event.num_cached_tokens >= 0, "num_cached_tokens of at least 0", event)
            require(stream.num_cached_tokens is None, "num_cached_tokens once", event)
            stream.num_cached_tokens = event.num_cached_tokens
        reason = event.finish_reason
        if event.stop_reason is not None:
            require(reason == "stop", "stop_reason with finish_reason 'stop' only", event)
        if event.stop_cause is not None:
            is_asked = stream.sampling.repetition_detection is not None
            expected = "stop_cause with the 'stop' of requests with repetition_detection only"
            is_only = reason == "stop" and event.stop_reason is None
            require(is_asked and is_only, expected, event)
        if reason == "error":
            require(bool(event.message), "a message that says why, with 'error'", event)
        if event.message is not None:
            explained = ("error", "abort", "timeout")
            require(reason in explained, f"a message with {explained} only", event)
        has_embedding = stream.sampling.pooling is not None and reason == "stop"
        expected = "an embedding with the 'stop' of requests with pooling, and with nothing else"
        require((event.embedding is not None) == has_embedding, expected, event)
        if event.embedding is not None:
            require(len(event.embedding) % 4 == 0, "an embedding of float32", event)
            stream.embedding = unpack_float32(event.embedding).tolist()
        stream.finish_reason, stream.stop_reason = reason, event.stop_reason
        stream.stop_cause = event.stop_cause

    def _open(self, handle: int, what: str) -> Stream:
        stream = self.by_handle.get(handle)
        if stream is None:
            expected = "OUTPUT only for requests of this session, and after their ACCEPTED"
            raise BrokenError(expected, f"{what} for handle {handle}, which was not accepted")
        if stream.finish_reason is not None:
            expected = "nothing of a request after its end"
            got = f"{what} for handle {handle}, which ended with {stream.finish_reason!r}"
            raise BrokenError(expected, got)
        return stream
