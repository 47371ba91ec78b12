"""Requests over the wire as they are, without the client: SUBMITs, and all that comes of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from nanocore.protocol.codec import client_decoder, encode
from nanocore.protocol.messages import (
    Accepted,
    Error,
    Event,
    Hello,
    Message,
    Output,
    Submit,
    TokenLogprobs,
    Welcome,
)
from nanocore.protocol.sockets.client_socket import ClientSocket


@dataclass
class Answer:
    """What came of a SUBMIT. refused: instead of all else; logprobs: of each token, as bytes."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    num_cached_tokens: int | None = None
    end: Event | None = None
    refused: Error | None = None

    @property
    def is_over(self) -> bool:
        return self.end is not None or self.refused is not None

    @property
    def why(self) -> tuple[str | None, int | None]:
        assert self.end is not None, self.refused
        return self.end.finish_reason, self.end.stop_reason


async def ask(endpoint: str, submits: list[Submit], *first: Message) -> list[Answer]:
    """What comes of all these together, sample by sample, over one session.

    first: said before them.
    """
    socket, decoder = ClientSocket(endpoint), client_decoder()
    try:
        await socket.send(encode(Hello(protocol=(1, 9))))
        answers = {one.request_id: [Answer() for _ in range(num_samples(one))] for one in submits}
        by_handle: dict[int, Answer] = {}
        assert isinstance(decoder.decode(await socket.receive()), Welcome)
        for message in (*first, *submits):
            await socket.send(encode(message))
        while not all(answer.is_over for own in answers.values() for answer in own):
            match decoder.decode(await socket.receive()):
                case Accepted(request_id=request_id, handle=handle):
                    by_handle |= dict(enumerate(answers[request_id], handle))
                case Error(request_id=str(request_id)) as error:
                    for answer in answers[request_id]:
                        answer.refused = error
                case Output() as output:
                    take(by_handle, output)
        return [answer for own in answers.values() for answer in own]
    finally:
        socket.close()


def num_samples(submit: Submit) -> int:
    return 1 if submit.sampling is None else submit.sampling.n


def take(by_handle: dict[int, Answer], output: Output) -> None:
    handles = np.frombuffer(output.handles, "<u4")
    counts = np.ones_like(handles)
    if output.counts is not None:
        counts = np.frombuffer(output.counts, "<u4")
    owners = np.repeat(handles, counts)
    tokens = np.frombuffer(output.tokens, "<i4")
    for handle, token in zip(owners.tolist(), tokens.tolist(), strict=True):
        answer = by_handle[handle]
        assert answer.end is None
        answer.tokens.append(token)
    for handle, entry in entries(output.logprobs):
        by_handle[handle].logprobs.append(entry)
    for handle, entry in entries(output.prompt_logprobs):
        by_handle[handle].prompt_logprobs.append(entry)
    for event in output.events:
        answer = by_handle[event.handle]
        if event.num_cached_tokens is not None:
            assert answer.num_cached_tokens is None
            answer.num_cached_tokens = event.num_cached_tokens
        if event.finish_reason is not None:
            assert answer.end is None
            answer.end = event


def entries(columns: TokenLogprobs | None) -> Iterator[tuple[int, tuple[int, bytes, bytes]]]:
    """(handle, (rank, candidates, their log probabilities)) of each token."""
    if columns is None:
        return
    handles, ranks = (np.frombuffer(one, "<u4") for one in (columns.handles, columns.ranks))
    ends = np.cumsum(np.frombuffer(columns.counts, "<u4")) * 4
    for i, end in enumerate(ends.tolist()):
        start = int(ends[i - 1]) if i else 0
        candidates = columns.token_ids[start:end], columns.logprobs[start:end]
        yield int(handles[i]), (int(ranks[i]), *candidates)
