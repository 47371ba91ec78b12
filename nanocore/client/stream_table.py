"""Which stream a message is for: by request id until the engine has given it a handle.

Belongs to the connection. No sockets and no event loop: messages in, tokens in streams out.
"""

from __future__ import annotations

from nanocore.client.sample import Sample
from nanocore.client.stream import RequestStream
from nanocore.protocol.codec import unpack_logprobs, unpack_output
from nanocore.protocol.errors import NanocoreError
from nanocore.protocol.messages import Accepted, Output


class StreamTable:
    """The streams of the requests that have not ended."""

    def __init__(self) -> None:
        self._by_id: dict[str, RequestStream] = {}
        self._by_handle: dict[int, Sample] = {}
        self._with_logprobs: dict[int, Sample] = {}  # those whose requests ask for some

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

    def leave(self, stream: RequestStream, sample: Sample | None = None) -> None:
        """Nobody reads a request, or this sample of it, any more; an id can be used again at once.

        An id without a handle stays in use until the engine has answered: until then a second
        request of that id could be mistaken for the first.
        """
        if sample is not None:
            self._forget(sample)
        elif stream.samples[0].handle is not None:
            for each in stream.samples:
                self._forget(each)
            self.remove(stream)

    def accept(self, accepted: Accepted) -> None:
        """The engine has given a request its handles, from this one on, one for each sample."""
        stream = self._by_id.get(accepted.request_id)
        if stream is None:
            return
        stream.seed = accepted.seed
        for handle, sample in enumerate(stream.samples, accepted.handle):
            sample.handle = handle
            self._by_handle[handle] = sample
            if sample.logprobs is not None or sample.prompt_logprobs is not None:
                self._with_logprobs[handle] = sample
        stream.progress.wake()

    def deliver(self, output: Output) -> None:
        """Hand out tokens, then log probabilities, then events. Handles of nobody are ignored.

        Raises:
            ProtocolError: the columns do not fit together, or not to what was asked for.
        """
        handles, counts, token_ids = unpack_output(output)
        samples = map(self._by_handle.get, handles)
        if counts is None:
            for sample, token_id in zip(samples, token_ids, strict=True):
                if sample is not None:
                    sample.push_token(token_id)
        else:
            start = 0
            for sample, count in zip(samples, counts, strict=True):
                if sample is not None:
                    sample.push_tokens(token_ids[start : start + count])
                start += count
        if output.logprobs is not None or output.prompt_logprobs is not None or self._with_logprobs:
            self._deliver_logprobs(output)
        for event in output.events:
            sample = self._by_handle.get(event.handle)
            if sample is None:
                continue
            sample.push_event(event)
            if event.finish_reason is not None:
                self._forget(sample)
                stream = self._by_id.get(sample.request_id)
                if stream is not None and not stream.is_running:
                    self.remove(stream)

    def _deliver_logprobs(self, output: Output) -> None:
        columns = (output.logprobs, Sample.push_logprobs)
        of_prompts = (output.prompt_logprobs, Sample.push_prompt_logprobs)
        for message, push in (columns, of_prompts):
            if message is None:
                continue
            unpacked, start = unpack_logprobs(message), 0
            for index, (handle, count) in enumerate(
                zip(unpacked.handles, unpacked.counts, strict=True)
            ):
                sample = self._with_logprobs.get(handle)
                if sample is not None:
                    push(sample, unpacked, index, start)
                start += count
        for sample in self._with_logprobs.values():
            sample.check_logprobs()

    def refuse(self, request_id: str, error: NanocoreError) -> None:
        """Fail the request that the engine has answered by an ERROR, and free its id."""
        stream = self._by_id.pop(request_id, None)
        if stream is not None:
            for sample in stream.samples:
                self._forget(sample)
            stream.fail(error)

    def fail(self, error: NanocoreError) -> None:
        """Fail every request, because the session is over."""
        for stream in self._by_id.values():
            stream.fail(error)
        self._by_id, self._by_handle, self._with_logprobs = {}, {}, {}

    def _forget(self, sample: Sample) -> None:
        if sample.handle is not None:
            self._by_handle.pop(sample.handle, None)
            self._with_logprobs.pop(sample.handle, None)
