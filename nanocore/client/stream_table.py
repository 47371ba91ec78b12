"""Which stream a message is for: by request id until the engine has given it a handle.

Belongs to the connection. No sockets and no event loop: messages in, tokens in streams out. What
the session cannot go on with is offered to its rescue, and fails if that does not take it.
"""

from __future__ import annotations

from nanocore.client.part import Part, Rescue
from nanocore.client.sample import Sample
from nanocore.client.stream import RequestStream
from nanocore.protocol.codec import unpack_logprobs, unpack_output
from nanocore.protocol.errors import EngineDeadError, NanocoreError
from nanocore.protocol.messages import Accepted, Event, Output


class StreamTable:
    """The requests that have not ended. rescue: None takes nothing."""

    def __init__(self, rescue: Rescue | None = None) -> None:
        self._rescue: Rescue = rescue or (lambda _part, _error: False)
        self._parts: dict[str, Part] = {}  # by the id on the wire
        self._by_handle: dict[int, Sample] = {}
        self._with_logprobs: dict[int, Sample] = {}  # those whose requests ask for some
        self._aliases: dict[str, set[str]] = {}  # by request id: others under which it runs

    def __contains__(self, request_id: str) -> bool:
        """Whether this id is in use on the wire."""
        return request_id in self._parts

    def __len__(self) -> int:
        """Parts of requests that have not ended."""
        return len(self._parts)

    def add(self, stream: RequestStream, part: Part | None = None) -> None:
        """A request is about to be submitted, or this part; its id must not be in use."""
        if part is None:
            part = Part(stream.request_id, stream, [*stream.samples])
        self._parts[part.request_id] = part
        for sample in part.samples:
            sample.request_id, sample.handle = part.request_id, None
        if part.request_id != stream.request_id:
            self._aliases.setdefault(stream.request_id, set()).add(part.request_id)

    def remove(self, part: Part) -> None:
        """Free a part's id, unless another has it by now."""
        if self.holds(part):
            del self._parts[part.request_id]
            name = part.stream.request_id
            if part.request_id != name:
                self._aliases[name].discard(part.request_id)
                if not self._aliases[name]:
                    del self._aliases[name]

    def holds(self, part: Part) -> bool:
        """Whether this part is here."""
        return self._parts.get(part.request_id) is part

    def wire_ids(self, request_id: str) -> list[str]:
        """Under which a request runs, which has this id or is unknown."""
        return [request_id, *self._aliases.get(request_id, ())]

    def has(self, sample: Sample) -> bool:
        """Whether the sample runs in this session."""
        part = self._parts.get(sample.request_id)
        return part is not None and sample in part.samples

    def leave(self, stream: RequestStream, sample: Sample | None = None) -> None:
        """Nobody reads a request, or this sample of it, any more; an id can be used again at once.

        An id without a handle stays in use until the engine has answered: until then a second
        request of that id could be mistaken for the first.
        """
        for each in stream.samples if sample is None else [sample]:
            part = self._parts.get(each.request_id)
            if part is not None and part.is_accepted and each in part.samples:
                self._forget(each, part)

    def accept(self, accepted: Accepted) -> None:
        """The engine has given a request its handles, from this one on, one for each sample."""
        part = self._parts.get(accepted.request_id)
        if part is None:
            return
        part.is_accepted = True
        if part.stream.seed is None:
            part.stream.seed = accepted.seed
            part.stream.not_held = accepted.not_held
        for handle, sample in enumerate(part.samples, accepted.handle):
            sample.handle = handle
            self._by_handle[handle] = sample
            if sample.logprobs is not None or sample.prompt_logprobs is not None:
                self._with_logprobs[handle] = sample
        part.stream.progress.wake()

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
            if sample is not None:
                self._deliver_event(sample, event)

    def _deliver_event(self, sample: Sample, event: Event) -> None:
        if event.finish_reason is None:
            sample.push_event(event)
            return
        part = self._parts[sample.request_id]
        if event.finish_reason == "abort" and event.message is not None and not sample.ended:
            # Nobody here has asked for it: the engine stops.
            lost = Part(part.request_id, part.stream, [sample], event)
            if self._rescue(lost, EngineDeadError(f"the engine is stopping: {event.message}")):
                self._forget(sample, part)
                return
        sample.push_event(event)
        self._forget(sample, part)

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
        """The engine has answered a request by an ERROR: free its id."""
        part = self._parts.get(request_id)
        if part is not None:
            self.remove(part)
            for sample in part.samples:
                self._forget_handle(sample)
            if not self._rescue(part, error):
                part.fail(error)

    def offer(self, part: Part, error: NanocoreError) -> bool:
        """Have a part rescued that was not added; whether it is."""
        return self._rescue(part, error)

    def hand_over(self, error: NanocoreError) -> None:
        """The session is over: what is not rescued stays, and waits for `fail`."""
        parts, self._parts, self._aliases = self._parts, {}, {}
        for part in parts.values():
            if not self._rescue(part, error):
                self._parts[part.request_id] = part

    def fail(self, error: NanocoreError) -> None:
        """The session is over: fail what is left that is not rescued."""
        self.hand_over(error)
        parts, self._parts = self._parts, {}
        self._by_handle, self._with_logprobs = {}, {}
        for part in parts.values():
            part.fail(error)

    def _forget(self, sample: Sample, part: Part) -> None:
        """A sample has ended, or is left; with the last one its part's id is free."""
        self._forget_handle(sample)
        part.samples.remove(sample)
        if not part.samples:
            self.remove(part)

    def _forget_handle(self, sample: Sample) -> None:
        if sample.handle is not None:
            self._by_handle.pop(sample.handle, None)
            self._with_logprobs.pop(sample.handle, None)
