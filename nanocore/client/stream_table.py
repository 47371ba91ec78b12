"""Which stream a message is for: by request id until the engine has given it a handle.

Belongs to the connection. No sockets and no event loop: messages in, tokens in streams out.
"""

from __future__ import annotations

from nanocore.client.stream import RequestStream
from nanocore.protocol.codec import unpack_output
from nanocore.protocol.errors import NanocoreError
from nanocore.protocol.messages import Accepted, Output


class StreamTable:
    """The streams of the requests that have not ended."""

    def __init__(self) -> None:
        self._by_id: dict[str, RequestStream] = {}
        self._by_handle: dict[int, RequestStream] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether this id is in use."""
        return request_id in self._by_id

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._by_id)

    def add(self, stream: RequestStream) -> None:
        """A request is about to be submitted; its id must not be in use."""
        self._by_id[stream.request_id] = stream

    def remove(self, stream: RequestStream) -> None:
        """Free a request's id, unless another request has it by now."""
        if self._by_id.get(stream.request_id) is stream:
            del self._by_id[stream.request_id]

    def leave(self, stream: RequestStream) -> None:
        """Nobody reads a request any more; its id can be used again at once.

        An id without a handle stays in use until the engine has answered: until then a second
        request of that id could be mistaken for the first.
        """
        if stream.handle is not None:
            self._by_handle.pop(stream.handle, None)
            self.remove(stream)

    def accept(self, accepted: Accepted) -> None:
        """The engine has given a request its handle."""
        stream = self._by_id.get(accepted.request_id)
        if stream is not None:
            stream.handle = accepted.handle
            self._by_handle[accepted.handle] = stream

    def deliver(self, output: Output) -> None:
        """Hand out tokens, and then events. Handles of nobody are ignored.

        Raises:
            ProtocolError: the columns do not fit together.
        """
        handles, counts, token_ids = unpack_output(output)
        streams = map(self._by_handle.get, handles)
        if counts is None:
            for stream, token_id in zip(streams, token_ids, strict=True):
                if stream is not None:
                    stream.push_token(token_id)
        else:
            start = 0
            for stream, count in zip(streams, counts, strict=True):
                if stream is not None:
                    stream.push_tokens(token_ids[start : start + count])
                start += count
        for event in output.events:
            stream = self._by_handle.get(event.handle)
            if stream is None:
                continue
            stream.push_event(event)
            if event.finish_reason is not None:
                del self._by_handle[event.handle]
                self.remove(stream)

    def refuse(self, request_id: str, error: NanocoreError) -> None:
        """Fail the request that the engine has answered by an ERROR, and free its id."""
        stream = self._by_id.pop(request_id, None)
        if stream is not None:
            stream.fail(error)

    def fail(self, error: NanocoreError) -> None:
        """Fail every request, because the session is over."""
        for stream in self._by_id.values():
            stream.fail(error)
        self._by_id, self._by_handle = {}, {}
