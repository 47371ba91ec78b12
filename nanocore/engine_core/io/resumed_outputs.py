"""Output tokens that a SUBMIT brings: what an earlier run of the request has produced.

The request is queued with them behind its prompt, which is what one that was preempted looks like,
so it goes on as that one does. Here is what admission asks of them, and whether they have ended
the request already: then it is accepted and ends at once, and the step loop never knows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nanocore.engine_core.requests.ends import end_by_stop
from nanocore.engine_core.requests.request import Request
from nanocore.protocol.errors import ContextLengthError, InvalidRequestError
from nanocore.protocol.messages import Event
from nanocore.protocol.sampling import EngineSamplingParams


def longest(max_model_len: int, max_tokens: int | None) -> int:
    """Prompt and output tokens of one request together, at most.

    A prompt alone may fill max_model_len: a single token that is sampled after it is delivered
    and never computed. So a text of that length can be scored, and embedded.
    """
    return max_model_len + (max_tokens == 1)


def check_outputs(
    outputs: np.ndarray,
    sampling: EngineSamplingParams,
    eos_token_ids: Sequence[int],
    num_prompt: int,
    max_model_len: int,
) -> None:
    """Hold outputs, if there are any, to what a run with these parameters may have produced.

    eos_token_ids: those that end this request.

    Raises:
        ContextLengthError: prompt and outputs are longer than the model allows.
        InvalidRequestError: the request has several samples or none, or would have ended before.
    """
    num_outputs, num_free = len(outputs), sampling.min_tokens
    if not num_outputs:
        return
    if sampling.pooling is not None:
        raise InvalidRequestError(
            f"output_token_ids with pooling={sampling.pooling!r}: an embedding has no output "
            "tokens; leave output_token_ids out"
        )
    if sampling.n != 1:
        raise InvalidRequestError(
            f"output_token_ids with n={sampling.n}: it is of one sample; resume each as a request "
            "of its own, with n=1 and, of sample i, seed + i"
        )
    if sampling.max_tokens is not None and num_outputs > sampling.max_tokens:
        raise InvalidRequestError(
            f"output_token_ids has {num_outputs} tokens, more than max_tokens="
            f"{sampling.max_tokens}, which counts what was produced already, too"
        )
    if num_prompt + num_outputs > longest(max_model_len, sampling.max_tokens):
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and output_token_ids {num_outputs}, together more "
            f"than max_model_len={max_model_len}: start the engine with a larger --max-model-len"
        )
    is_stop = np.isin(outputs[num_free:-1], [*eos_token_ids, *sampling.stop_token_ids])
    if is_stop.any():
        i = num_free + int(is_stop.argmax())
        raise InvalidRequestError(
            f"output_token_ids[{i}]={outputs[i]} is EOS or a stop id: the request ended there, "
            f"and {num_outputs - i - 1} tokens follow; leave them out"
        )


def end_by_outputs(request: Request) -> Event | None:
    """What the outputs that a request came with have ended it with, if they have."""
    assert request.token_ids is not None
    if not request.num_resumed_tokens:
        return None
    last = int(request.token_ids[-1])
    stop = end_by_stop(request, last, request.num_resumed_tokens)
    if stop is None and request.num_tokens == request.max_num_tokens:
        return Event(handle=request.handle, finish_reason="length")
    return stop
