"""A request as the engine sees it: tokens, limits and block keys; no text.

Built and validated on the io thread (hashing a long prompt takes a while), then owned by the
scheduler. While a request runs, its tokens and counts are the `RunningSet`'s and not here; they
come back when it is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.grammars.matcher import Grammar, Matcher
from nanocore.engine_core.scheduling.life import Life
from nanocore.kv_cache import BlockKey, KeyChain
from nanocore.protocol.fields import MAX_EXACT_INT
from nanocore.protocol.sampling import EngineSamplingParams

TOKEN_DTYPE = np.dtype("<i4")
"""Token ids, rows and block ids in columns, on the wire and in memory."""


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request, or one of several samples of its prompt.

    handle: its name inside the engine, unique in an engine's life and growing. request_id: the
    client's name for it, used in the step trace; of the i-th sample with "#i". client: number of
    the session that gets its output. token_ids: int32 [num_tokens], prompt and outputs, while it
    waits; None once it has a row. num_resumed_tokens: the last of those that it came with, outputs
    of an earlier run. max_num_tokens: prompt and output together, at most.
    num_bytes: that it holds while it waits, with all its samples, about.
    eos_token_ids: empty if EOS is ignored. key_chain: block keys of the full blocks of its tokens
    known.
    priority: lower values go first, where the policy heeds them. arrival: the step before which it
    came, so requests that came together are equals; arrival_s: when that was, for ageing.
    num_cached_tokens: prompt tokens found in the prefix cache when first admitted, else None.
    num_prompt_logprobs: log probabilities of prompt tokens that were delivered. row: where it runs,
    or -1.
    received_s: when its SUBMIT was taken from the socket. compiled_s: when its structured output
    was known, if it had to wait for that. life: what has happened to it since.
    sample: which one it is, from 0. held_back: those that wait until all of this one's prompt is
    planned, because they find it in the prefix cache then; leader: whom this one waits for so.
    matcher: of a structured output; it has seen the output tokens that were delivered. not_held:
    what its grammar leaves out.
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
    arrival_s: float = 0.0
    received_s: float = 0.0
    compiled_s: float | None = None
    num_resumed_tokens: int = 0
    num_bytes: int = 0
    num_prompt_tokens: int = field(init=False)
    life: Life = field(init=False, default_factory=Life)
    num_cached_tokens: int | None = None
    num_prompt_logprobs: int = 0
    row: int = -1
    sample: int = 0
    held_back: Sequence[Request] = ()
    leader: Request | None = None
    matcher: Matcher | None = None
    not_held: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens - self.num_resumed_tokens

    @property
    def client_request_id(self) -> str:
        """The client's name for the request that it is a sample of."""
        return self.request_id.removesuffix(f"#{self.sample}") if self.sample else self.request_id

    @property
    def num_submitted_tokens(self) -> int:
        """Tokens that it came with."""
        return self.num_prompt_tokens + self.num_resumed_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens known of a request that waits; of one that runs, the running set knows."""
        assert self.token_ids is not None, f"{self} runs: its tokens are the running set's"
        return len(self.token_ids)

    def prefix_keys(self, block_size: int) -> Sequence[BlockKey]:
        """Keys of its first blocks, which it may share."""
        if self.sampling.skip_reading_prefix_cache or self.sampling.pooling == "mean":
            return ()
        num_tokens = self.num_tokens - 1  # the last one must be computed to have logits
        if self.num_prompt_logprobs < self.num_asked_prompt_logprobs:
            # Those that are still to be told take the logits of the tokens before them.
            num_tokens = min(num_tokens, self.num_prompt_logprobs)
        return self.key_chain.keys[: num_tokens // block_size]

    @property
    def num_logprobs_a_prompt_token(self) -> int:
        """Its own and the most likely ones; 0 if the prompt's are not asked for."""
        asked = self.sampling.prompt_logprobs
        return 0 if asked is None else 1 + asked

    @property
    def num_asked_prompt_logprobs(self) -> int:
        """All that it is to get: of each prompt token but the first, if it asks for them."""
        return 0 if self.sampling.prompt_logprobs is None else self.num_prompt_tokens - 1

    @property
    def stop_token_ids(self) -> list[int]:
        """EOS and stop ids, each once."""
        return sorted({*self.eos_token_ids, *self.sampling.stop_token_ids})

    @property
    def samples(self) -> tuple[Request, ...]:
        """This one and those that it holds back."""
        return self, *self.held_back

    def hold_back_samples(self, num_more: int) -> None:
        """Make so many more samples of the prompt, each with the next handle and seed."""
        sampling = self.sampling
        if sampling.prompt_logprobs is not None:  # the prompt's are told once
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self.held_back = [
            replace(
                self,
                handle=self.handle + i,
                request_id=f"{self.request_id}#{i}",
                sampling=sampling,
                seed=(self.seed + i) % (MAX_EXACT_INT + 1),
                key_chain=self.key_chain.copy(),
                sample=i,
                leader=self,
            )
            for i in range(1, num_more + 1)
        ]

    @property
    def awaits_grammar(self) -> bool:
        """Whether its output is to be structured and nothing says how yet: see `follow`."""
        return self.matcher is None and self.sampling.structured_outputs is not None

    def follow(self, grammar: Grammar) -> None:
        """Let each sample's output be what the grammar says."""
        self.not_held = grammar.not_held
        for sample in self.samples:
            sample.matcher = grammar.matcher()

    def give_tokens(self) -> NDArray[np.int32]:
        """Hand over the tokens, because the request gets a row."""
        token_ids, self.token_ids = self.token_ids, None
        assert token_ids is not None, f"{self} has a row already"
        return token_ids

    def __repr__(self) -> str:
        where = f"row={self.row}" if self.token_ids is None else f"num_tokens={self.num_tokens}"
        return f"Request({self.request_id!r}, {where})"
