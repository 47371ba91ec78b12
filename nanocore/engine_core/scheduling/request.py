"""A request as the engine sees it: tokens, limits and block keys; no text.

Built and validated on the io thread (hashing a long prompt takes a while), then owned by the
scheduler. While a request runs, its tokens and counts are the `RunningSet`'s and not here; they
come back when it is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nanocore.kv_cache import KeyChain
from nanocore.protocol.sampling import EngineSamplingParams

TOKEN_DTYPE = np.dtype("<i4")
"""Token ids, rows and block ids in columns, on the wire and in memory."""


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request.

    handle: its name inside the engine, unique in an engine's life and growing. request_id: the
    client's name for it, used in the step trace. client: number of the session that gets its
    output. token_ids: int32 [num_tokens], prompt and outputs, while it waits; None once it has a
    row. max_num_tokens: prompt and output together, at most. eos_token_ids: empty if EOS is
    ignored. key_chain: block keys of the full blocks of its tokens known.
    priority: lower values go first, where the policy heeds them. arrival: the step before which it
    came, so requests that came together are equals. num_cached_tokens: prompt tokens found in the
    prefix cache when first admitted, else None. row: where it runs, or -1.
    """

    handle: int
    request_id: str
    client: int
    token_ids: NDArray[np.int32] | None
    max_num_tokens: int
    sampling: EngineSamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    key_chain: KeyChain
    priority: int = 0
    arrival: int = 0
    num_prompt_tokens: int = field(init=False)
    num_cached_tokens: int | None = None
    row: int = -1

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens known of a request that waits; of one that runs, the running set knows."""
        assert self.token_ids is not None, f"{self} runs: its tokens are the running set's"
        return len(self.token_ids)

    def give_tokens(self) -> NDArray[np.int32]:
        """Hand over the tokens, because the request gets a row."""
        token_ids, self.token_ids = self.token_ids, None
        assert token_ids is not None, f"{self} has a row already"
        return token_ids

    def __repr__(self) -> str:
        where = f"row={self.row}" if self.token_ids is None else f"num_tokens={self.num_tokens}"
        return f"Request({self.request_id!r}, {where})"
