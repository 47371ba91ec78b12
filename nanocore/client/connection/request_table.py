"""Open requests of a session: by request id until the engine assigns handles, then by handle.

It has no sockets and no event loop: it takes messages and feeds streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from nanocore.client.requests.request_stream import RequestStream
from nanocore.client.requests.sample import Sample
from nanocore.protocol.codec import unpack_logprobs, unpack_output
from nanocore.protocol.errors import EngineDeadError, NanocoreError
from nanocore.protocol.messages import Accepted, Event, Output


class OpenRequest:
    """Samples that were submitted under one id: at first all of a request.

    Args:
        samples: running ones; None is all of the stream's. After a resubmission each sample may be
            a separate request.
        request_id: id on the wire; None is the stream's.
        abort: event by which a stopping engine ended the sample.
    """

    __slots__ = ("abort", "is_accepted", "request_id", "samples", "stream")

    def __init__(
        self,
        stream: RequestStream,
        samples: Sequence[Sample] | None = None,
        request_id: str | None = None,
        abort: Event | None = None,
    ) -> None:
        self.stream = stream
        self.samples = [*(stream.samples if samples is None else samples)]
        self.request_id = stream.request_id if request_id is None else request_id
        self.abort = abort
        self.is_accepted = False

    def end(self, event: Event) -> None:
        for sample in self.samples:
            sample.push_event(event)

    def fail(self, error: NanocoreError) -> None:
        """End with the engine's event, or with an error that ends the whole stream."""
        if self.abort is not None:
            self.end(self.abort)
        else:
            self.stream.fail(error)


TakeOver: TypeAlias = Callable[[OpenRequest, NanocoreError], bool]
"""Takes a request that its session cannot continue, and the cause; returns whether it continues."""


class RequestTable:
    """Requests that have not ended. take_over: None lets them fail with the session."""

    def __init__(self, take_over: TakeOver | None = None) -> None:
        self.take_over: TakeOver = take_over or (lambda _request, _error: False)
        self._requests: dict[str, OpenRequest] = {}  # by the id on the wire
        self._by_handle: dict[int, Sample] = {}
        self._with_logprobs: dict[int, Sample] = {}  # of requests that requested them

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: OpenRequest) -> None:
        """Add a request that is about to be submitted; its id must not be in use."""
        for sample in request.samples:
            sample.request_id = request.request_id
            sample.handle = None
        self._requests[request.request_id] = request

    def remove(self, request: OpenRequest) -> None:
        """Free the request's id, unless another request uses it by now."""
        if self.holds(request):
            del self._requests[request.request_id]

    def holds(self, request: OpenRequest) -> bool:
        return self._requests.get(request.request_id) is request

    def wire_ids(self, request_id: str) -> list[str]:
        """Ids under which a caller's request may run in this session."""
        open_ids = [
            wire_id
            for wire_id, request in self._requests.items()
            if request.stream.request_id == request_id and wire_id != request_id
        ]
        return [request_id, *open_ids]

    def has(self, sample: Sample) -> bool:
        """Whether the sample runs in this session."""
        request = self._requests.get(sample.request_id)
        return request is not None and sample in request.samples

    def leave(self, stream: RequestStream, sample: Sample | None = None) -> None:
        """Forget a stream, or one sample of it, that has no reader any more.

        An id without a handle stays in use until the engine has replied and ended the request: a
        second request with that id could be mistaken for the first.
        """
        for each in stream.samples if sample is None else [sample]:
            request = self._requests.get(each.request_id)
            if request is not None and request.is_accepted and each in request.samples:
                self._forget(each, request)

    def accept(self, accepted: Accepted) -> None:
        """Note the handles of a request: consecutive, one for each sample."""
        request = self._requests.get(accepted.request_id)
        if request is None:
            return
        request.is_accepted = True
        stream = request.stream
        if stream.seed is None:
            stream.seed = accepted.seed
            stream.not_held = accepted.not_held
        for handle, sample in enumerate(request.samples, accepted.handle):
            sample.handle = handle
            self._by_handle[handle] = sample
            if sample.logprobs is not None or sample.prompt_logprobs is not None:
                self._with_logprobs[handle] = sample
        stream.progress.wake()

    def deliver(self, output: Output) -> None:
        """Distribute tokens, then log probabilities, then events. Unknown handles are ignored.

        Raises:
            ProtocolError: the columns do not match each other, or what was requested.
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
        # Events come last: one may end its sample, which must have its tokens by then.
        for event in output.events:
            sample = self._by_handle.get(event.handle)
            if sample is not None:
                self._deliver_event(sample, event)

    def _deliver_event(self, sample: Sample, event: Event) -> None:
        if event.finish_reason is None:
            sample.push_event(event)
            return
        request = self._requests[sample.request_id]
        if event.finish_reason == "abort" and event.message is not None and not sample.ended:
            # An abort with a message was not requested by this client: the engine is stopping.
            lost = OpenRequest(request.stream, [sample], request.request_id, event)
            if self.take_over(lost, EngineDeadError(f"the engine is stopping: {event.message}")):
                self._forget(sample, request)
                return
        sample.push_event(event)
        self._forget(sample, request)

    def _deliver_logprobs(self, output: Output) -> None:
        for message, push in (
            (output.logprobs, Sample.push_logprobs),
            (output.prompt_logprobs, Sample.push_prompt_logprobs),
        ):
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
        """Free the id of a refused request, and fail the request unless it is taken over."""
        request = self._requests.get(request_id)
        if request is not None:
            self.remove(request)
            for sample in request.samples:
                self._forget_handle(sample)
            if not self.take_over(request, error):
                request.fail(error)

    def hand_over(self, error: NanocoreError) -> None:
        """Offer all requests of a session that has ended; the others stay until `fail`."""
        for request in list(self._requests.values()):
            self.remove(request)
            if not self.take_over(request, error):
                self._requests[request.request_id] = request

    def fail(self, error: NanocoreError) -> None:
        """Fail requests that do not continue elsewhere."""
        self.hand_over(error)
        requests, self._requests = self._requests, {}
        self._by_handle.clear()
        self._with_logprobs.clear()
        for request in requests.values():
            request.fail(error)

    def _forget(self, sample: Sample, request: OpenRequest) -> None:
        self._forget_handle(sample)
        request.samples.remove(sample)
        if not request.samples:
            self.remove(request)

    def _forget_handle(self, sample: Sample) -> None:
        if sample.handle is not None:
            self._by_handle.pop(sample.handle, None)
            self._with_logprobs.pop(sample.handle, None)
