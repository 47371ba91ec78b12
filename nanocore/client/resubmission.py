"""A request as it is sent again: what is left of it, for an engine that knows nothing of it.

The engine counts the tokens so far as output, so limits, penalties, stop rules and grammars go on,
and noise is a function of seed and position. Samples that have tokens have different ones: each
becomes a request of its own, with the seed that it had.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from nanocore.client.part import Part
from nanocore.client.sample import Sample
from nanocore.client.stream import RequestStream
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.fields import MAX_EXACT_INT
from nanocore.protocol.messages import ModelCard, Submit

SHORTEST_TIMEOUT_S = 1e-3
"""Of a request whose time is over: the engine ends it."""


def resubmissions(
    stream: RequestStream, samples: Sequence[Sample], is_used: Callable[[str], bool]
) -> list[tuple[Part, Submit]]:
    """The messages that bring these samples, which have not ended, to an engine.

    is_used: whether an id cannot be had.
    """
    message = stream.message
    assert message is not None, "it was sent"
    if stream.deadline_s is not None:
        left_s = max(SHORTEST_TIMEOUT_S, stream.deadline_s - time.monotonic())
        message = replace(message, timeout_s=left_s)
    sampling = message.sampling
    assert sampling is not None, "this client always sends them"
    if stream.seed is not None and sampling.pooling is None:  # an embedding has none
        sampling = replace(sampling, seed=stream.seed)
    if len(samples) == len(stream.samples) and not stream.num_arrived:
        for sample in samples:
            sample.begin_again()
        request_id = _free_id(stream.request_id, is_used)
        message = replace(message, request_id=request_id, sampling=sampling)
        return [(Part(request_id, stream, [*samples]), message)]
    assert sampling.seed is not None, "who has tokens was accepted"
    made = []
    for sample in samples:
        is_single = len(stream.samples) == 1
        name = stream.request_id if is_single else f"{stream.request_id}#{sample.index}"
        request_id = _free_id(name, is_used)
        own = replace(sampling, n=1, seed=(sampling.seed + sample.index) % (MAX_EXACT_INT + 1))
        sample.begin_again()
        if sample.prompt_logprobs is None or sample.arrived_token_ids:  # they come before tokens
            own = replace(own, prompt_logprobs=None)
        token_ids = pack_int32(sample.arrived_token_ids)
        submit = replace(message, request_id=request_id, sampling=own, output_token_ids=token_ids)
        made.append((Part(request_id, stream, [sample]), submit))
    return made


def why_another_model(old: ModelCard, new: ModelCard) -> str | None:
    """What keeps an engine from going on with another one's requests; None: nothing does."""
    for name in ("architecture", "vocab_size", "eos_token_ids", "hidden_size"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            return f"{name} is {now}, and was {before}"
    if files_digest(old) != files_digest(new):
        return "its tokenizer's files are others"
    return None


def files_digest(card: ModelCard) -> frozenset[tuple[str, str]]:
    """What a tokenizer is made of."""
    return frozenset((file.name, file.sha256) for file in card.files)


def _free_id(name: str, is_used: Callable[[str], bool]) -> str:
    return name if len(name) <= 256 and not is_used(name) else uuid.uuid4().hex
