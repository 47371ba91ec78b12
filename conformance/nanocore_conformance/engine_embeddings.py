"""Rules for engines: embeddings, held against each other.

What a model says of a text is not known here. But the hidden state of a token depends on those
before it alone: so it is the embedding of its prefix, and a mean is that over all prefixes.
"""

from __future__ import annotations

import math

from nanocore.protocol.codec import pack_int32
from nanocore.protocol.messages import Op
from nanocore_conformance.checked_streams import Stream
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import Body, Peer
from nanocore_conformance.report import SkippedError, require

CAPABILITY = "embeddings"
PROMPT = [1, 2, 3, 1, 0]
NEAR = 0.1
"""Share of the largest number by which a mean may differ: hidden states may be bfloat16."""
BESIDE: tuple[Body, ...] = (
    {"max_tokens": 2}, {"n": 2}, {"temperature": 0.5}, {"seed": 1}, {"logprobs": 0},
    {"prompt_logprobs": 0}, {"stop_token_ids": [1]}, {"ignore_eos": True},
    {"logit_bias": [[0, 1.0]]}, {"structured_outputs": {"json_object": True}},
)  # fmt: skip
"""What says how to sample, where nothing is to be sampled."""


def asking(prompt: list[int], **sampling: object) -> Body:
    """A SUBMIT with these parameters alone."""
    return {"request_id": "a", "prompt_token_ids": pack_int32(prompt), "sampling": sampling}


def embedding(peer: Peer, prompt: list[int], **sampling: object) -> list[float]:
    """Return the embedding of a prompt, checked by itself."""
    peer.send(Op.SUBMIT, asking(prompt, **sampling))
    stream: Stream = peer.accepted("a")
    peer.finish(stream)
    size = peer.welcome.model.hidden_size
    found = stream.embedding
    require(found is not None, "an embedding with the end 'stop'", stream)
    assert found is not None
    require(len(found) == size, f"an embedding of hidden_size={size} numbers", len(found))
    require(all(map(math.isfinite, found)), "an embedding of finite numbers", found)
    return found


@ENGINE_RULES.add("Embeddings")
def embeddings_are_of_the_prompts_tokens(engine: EngineUnderTest) -> None:
    """hidden_size finite numbers and no token; the mean is that over the prompt's prefixes.

    Nothing may be beside pooling that says how to sample; without the capability it is refused.
    """
    peer = engine.session()
    if peer.welcome.protocol < (1, 7):
        raise SkippedError(f"the engine speaks {peer.welcome.protocol}, and this is of 1.7")
    if CAPABILITY not in peer.welcome.capabilities:
        peer.send(Op.SUBMIT, asking(PROMPT, pooling="last"))
        peer.refused("invalid_request", "a", naming="pooling")
        return
    prefixes = [PROMPT[: i + 1] for i in range(len(PROMPT))]
    lasts = [embedding(peer, prefix, pooling="last") for prefix in prefixes]
    mean = embedding(peer, PROMPT, pooling="mean", max_tokens=1)
    expected = [math.fsum(column) / len(lasts) for column in zip(*lasts, strict=True)]
    limit = NEAR * max(map(abs, [*expected, *mean]))
    is_near = all(abs(one - other) <= limit for one, other in zip(mean, expected, strict=True))
    require(is_near, f"a mean of about {expected}", mean)
    for more in BESIDE:
        peer.send(Op.SUBMIT, asking(PROMPT, pooling="mean", **more))
        peer.refused("invalid_request", "a", naming=next(iter(more)))
    peer.still_streams()
