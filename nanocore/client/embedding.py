"""Embeddings: what `AsyncEngineClient.embed` and `LLM.encode` ask for, and give."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import msgspec

from nanocore.client.outputs import RequestOutput
from nanocore.protocol.errors import InvalidRequestError, NanocoreError, ProtocolError
from nanocore.protocol.sampling import Pooling, SamplingParams


class EmbeddingOutput(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A prompt's embedding.

    embedding: float32, as many numbers as the model card's hidden_size. prompt_token_ids: a list,
    or the array that was given. num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    embedding: array[float]
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int

    @classmethod
    def of(cls, output: RequestOutput, normalize: bool, size: int | None) -> EmbeddingOutput:
        """Of a request's last output. normalize: to length 1, if it is not 0. size: the model's.

        Raises:
            NanocoreError: it has none, because it was aborted, or the engine ended it.
            ProtocolError: it has another size, or is not finite.
        """
        embedding = output.embedding
        if embedding is None:
            (ended,) = output.outputs
            error = NanocoreError(
                f"request {output.request_id!r} has no embedding: it ended with "
                f"{ended.finish_reason!r}{'' if ended.message is None else f': {ended.message}'}"
            )
            error.request_id = output.request_id
            raise error
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
    """What asks for an embedding and nothing else.

    Raises:
        InvalidRequestError: there is no such pooling.
    """
    params = SamplingParams(pooling=pooling, detokenize=False)
    if params.pooling is None:
        raise InvalidRequestError("pooling=None: an embedding needs 'last' or 'mean'")
    return params
