"""What an engine said of each request of a session, held against the rules for all of them.

Every OUTPUT that any check receives comes through here: columns that fit, handles that were
accepted and have not ended, ids of the vocabulary, one end, cached tokens told with the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanocore.conformance.report import BrokenError, require
from nanocore.protocol.codec import unpack_output
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.messages import Accepted, Event, Output


@dataclass
class Stream:
    """One accepted request."""

    request_id: str
    handle: int
    seed: int
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


class CheckedStreams:
    """The requests of one session by handle, those that have ended included."""

    def __init__(self, vocab_size: int, max_model_len: int) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self.by_handle: dict[int, Stream] = {}

    def accept(self, accepted: Accepted) -> None:
        """A new request."""
        stream = Stream(accepted.request_id, accepted.handle, accepted.seed)
        self.by_handle[accepted.handle] = stream

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
        # A first token's event says so of the first message with tokens, and of no later one.
        fresh = {handle for handle in handles if not self._open(handle, "tokens").token_ids}
        start = 0
        for i, handle in enumerate(handles):
            end = start + (1 if counts is None else counts[i])
            tokens = list(token_ids[start:end])
            require(bool(tokens), f"a token for handle {handle}, which is listed", "none")
            valid = all(0 <= token < self._vocab_size for token in tokens)
            require(valid, f"token ids below vocab_size={self._vocab_size}", tokens)
            stream = self.by_handle[handle]
            stream.token_ids += tokens
            most = f"at most max_model_len={self._max_model_len} tokens of a request"
            require(len(stream.token_ids) <= self._max_model_len, most, len(stream.token_ids))
            start = end
        for event in output.events:
            self._take_event(event, fresh)

    def _take_event(self, event: Event, fresh: set[int]) -> None:
        stream = self._open(event.handle, "an event")
        if event.num_cached_tokens is not None:
            where = f"num_cached_tokens of handle {event.handle} with its first token only"
            require(event.handle in fresh, where, event)
            require(event.num_cached_tokens >= 0, "num_cached_tokens of at least 0", event)
            require(stream.num_cached_tokens is None, "num_cached_tokens once", event)
            stream.num_cached_tokens = event.num_cached_tokens
        reason = event.finish_reason
        if event.stop_reason is not None:
            require(reason == "stop", "stop_reason with finish_reason 'stop' only", event)
        if reason == "error":
            require(bool(event.message), "a message that says why, with 'error'", event)
        if event.message is not None:
            require(reason in ("error", "abort"), "a message with 'error' or 'abort' only", event)
        stream.finish_reason, stream.stop_reason = reason, event.stop_reason

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
