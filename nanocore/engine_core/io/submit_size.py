"""What a request holds in memory while it waits: an estimate, for the limit of the queue.

Python's objects are larger than the frames that they come from, and a few bytes of a frame may
become many; so what can be long is counted as it is held: columns, keys of blocks, lists of
numbers, and the texts of structured outputs.
"""

from __future__ import annotations

from typing import Final

import msgspec

from nanocore.protocol.messages import Submit
from nanocore.protocol.sampling import EngineSamplingParams

_SAMPLE_BYTES: Final = 2048  # a Request, what it points to, and its place in the queue
_KEY_BYTES: Final = 72  # of a full block
_NUMBER_BYTES: Final = 40  # an int, and its place in a list
_TOKEN_BYTES: Final = 4


def held_bytes(submit: Submit, sampling: EngineSamplingParams, block_size: int) -> int:
    """Bytes of one that waits, all its samples together. block_size: tokens to a key."""
    columns = len(submit.prompt_token_ids) + len(submit.output_token_ids)
    keys = columns // (_TOKEN_BYTES * block_size) * _KEY_BYTES
    numbers = len(sampling.stop_token_ids) + 2 * len(sampling.logit_bias)
    numbers += len(sampling.allowed_token_ids or ())
    numbers += sum(1 + len(word) for word in sampling.bad_words_token_ids)
    held = columns + _NUMBER_BYTES * numbers
    if sampling.structured_outputs is not None:
        held += len(msgspec.msgpack.encode(sampling.structured_outputs))
    return held + sampling.n * (_SAMPLE_BYTES + keys)
