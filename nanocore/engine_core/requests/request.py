"""A request inside the engine: tokens, limits, block keys and times; no text.

Built and validated on the io thread, because hashing a long prompt takes a while, then owned by the
scheduler. While a request runs, its tokens and counts live in the `RunningSet`; they come back here
when it is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.grammars.token_matcher import CompiledGrammar, TokenMatcher
from nanocore.engine_core.requests.readiness import NOTHING, SIBLING, Prerequisite
from nanocore.kv_cache import BlockKey, KeyChain
from nanocore.protocol.fields import MAX_EXACT_INT
from nanocore.protocol.sampling import EngineSamplingParams

TOKEN_DTYPE = np.dtype("<i4")
"""Token ids, rows and block ids in columns, on the wire and in memory."""


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request, or one of several samples of its prompt (n > 1).

    Args:
        handle: its number inside the engine; unique in an engine's life, and growing.
        request_id: the client's id; with "#i" appended for sample i > 0.
        client: number of the session that gets its output.
        token_ids: int32 [num_tokens], prompt and outputs, while it waits; None while it runs.
        max_num_tokens: limit of prompt and output tokens together.
        eos_token_ids: empty if EOS is ignored.
        key_chain: block keys of the full blocks of its known tokens.
        priority: lower values go first, under the priority policy.
        arrival: number of the step before which it arrived; requests of one step are equals.
        arrival_s: when that was, for ageing.
        received_s: when its SUBMIT was read from the socket.
        compiled_s: when its grammar was compiled, if it had to wait for that.
        num_resumed_tokens: how many of its last submitted tokens are outputs of an earlier run.
        num_bytes: approximate memory it holds while it waits, with all its samples.
        last_token_s: when its last token came before it left its row; 0: none has.
        last_num_tokens: prompt and output tokens that it left its row with.
        was_queued: whether it has ever been in line, or behind a sibling that was; then it is
            logged.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission, else None.
        num_prompt_logprobs: logprobs of prompt tokens delivered so far.
        row: its row, or -1.
        sample: which of the samples it is, from 0.
        waits_for: what must come before it can be in line; see `readiness`.
        waiting_siblings: samples that wait until all of this one's prompt is planned, because then
            they find it in the prefix cache. awaited_sibling: the sample that this one waits for.
        matcher: follows a structured output; it has seen the output tokens delivered so far.
        not_held: pointers to the parts of a lenient schema that the grammar leaves out.
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
    last_token_s: float = field(init=False, default=0.0)
    last_num_tokens: int = field(init=False, default=0)
    was_queued: bool = field(init=False, default=False)
    num_cached_tokens: int | None = None
    num_prompt_logprobs: int = 0
    row: int = -1
    sample: int = 0
    waits_for: frozenset[Prerequisite] = NOTHING
    waiting_siblings: Sequence[Request] = ()
    awaited_sibling: Request | None = None
    matcher: TokenMatcher | None = None
    not_held: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens - self.num_resumed_tokens

    @property
    def client_request_id(self) -> str:
        """The client's id of the request that this is a sample of."""
        return self.request_id.removesuffix(f"#{self.sample}") if self.sample else self.request_id

    @property
    def num_submitted_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_resumed_tokens

    @property
    def resumed_tokens(self) -> list[int]:
        """Output tokens of an earlier run, of a request that was not admitted yet."""
        assert self.token_ids is not None
        return self.token_ids[self.num_prompt_tokens :].tolist()  # type: ignore[no-any-return]

    @property
    def num_tokens(self) -> int:
        """Known tokens of a waiting request; while it runs, the row table has them."""
        assert self.token_ids is not None, f"{self} runs: its tokens are in the row table"
        return len(self.token_ids)

    @property
    def was_admitted(self) -> bool:
        """Whether it has had a row, now or before a preemption."""
        return self.num_cached_tokens is not None

    def prefix_keys(self, block_size: int) -> Sequence[BlockKey]:
        """Return the keys of the leading blocks that it may share with other requests."""
        if self.sampling.skip_reading_prefix_cache or self.sampling.pooling == "mean":
            return ()
        num_tokens = self.num_tokens - 1  # the last one must be computed: its logits are needed
        if self.num_prompt_logprobs < self.num_requested_prompt_logprobs:
            # A prompt logprob needs the logits of the token before it, so those are computed, too.
            num_tokens = min(num_tokens, self.num_prompt_logprobs)
        return self.key_chain.keys[: num_tokens // block_size]

    @property
    def num_logprobs_per_prompt_token(self) -> int:
        """The token's own logprob and the top ones; 0 if none are requested."""
        requested = self.sampling.prompt_logprobs
        return 0 if requested is None else 1 + requested

    @property
    def num_requested_prompt_logprobs(self) -> int:
        """Prompt tokens that get logprobs: all but the first, if they are requested."""
        return 0 if self.sampling.prompt_logprobs is None else self.num_prompt_tokens - 1

    @property
    def stop_token_ids(self) -> list[int]:
        """EOS and stop ids, each once."""
        return sorted({*self.eos_token_ids, *self.sampling.stop_token_ids})

    @property
    def samples(self) -> tuple[Request, ...]:
        """This request and the siblings that wait behind it."""
        return self, *self.waiting_siblings

    def add_siblings(self, num_more: int) -> None:
        """Make num_more further samples of the prompt, with the next handles and seeds."""
        sampling = self.sampling
        if sampling.prompt_logprobs is not None:  # only the first sample reports the prompt's
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self.waiting_siblings = [
            replace(
                self,
                handle=self.handle + i,
                request_id=f"{self.request_id}#{i}",
                sampling=sampling,
                seed=(self.seed + i) % (MAX_EXACT_INT + 1),
                key_chain=self.key_chain.copy(),
                sample=i,
                waits_for=self.waits_for | {SIBLING},
                awaited_sibling=self,
            )
            for i in range(1, num_more + 1)
        ]

    def release_siblings(self) -> Sequence[Request]:
        """Let go of the samples that wait for this one's prompt; return them."""
        siblings, self.waiting_siblings = self.waiting_siblings, ()
        for sibling in siblings:
            sibling.awaited_sibling = None
        return siblings

    def leave_siblings(self) -> Request | None:
        """Leave the other samples; return the one that is to compute the prompt instead, if any."""
        if (awaited := self.awaited_sibling) is not None:
            awaited.waiting_siblings = [one for one in awaited.waiting_siblings if one is not self]
        if not self.waiting_siblings:
            return None
        siblings = self.release_siblings()
        # One that is ready, if there is one: the others would wait longer behind one that is not.
        first = next((one for one in siblings if not one.waits_outside), siblings[0])
        first.waiting_siblings = [one for one in siblings if one is not first]
        for sibling in first.waiting_siblings:
            sibling.awaited_sibling = first
        return first

    def wait_for(self, what: Prerequisite) -> None:
        """Let each sample wait for this. To be called before the scheduler gets the request."""
        for sample in self.samples:
            sample.waits_for |= {what}

    @property
    def waits_outside(self) -> bool:
        """Whether it, or the sibling it waits for, waits for what the step loop cannot give."""
        awaited = self.awaited_sibling
        is_behind = awaited is not None and awaited.waits_outside
        return is_behind or any(one.is_outside for one in self.waits_for)

    def follow(self, grammar: CompiledGrammar, compiled_s: float | None = None) -> None:
        """Constrain the output of each sample by the grammar. compiled_s: if it waited for that."""
        self.not_held = grammar.not_held
        for sample in self.samples:
            sample.matcher = grammar.matcher()
            sample.compiled_s = compiled_s

    def give_tokens(self) -> NDArray[np.int32]:
        """Hand the tokens over to the row table, because the request gets a row."""
        token_ids, self.token_ids = self.token_ids, None
        assert token_ids is not None, f"{self} has a row already"
        return token_ids

    def __repr__(self) -> str:
        where = f"row={self.row}" if self.token_ids is None else f"num_tokens={self.num_tokens}"
        return f"Request({self.request_id!r}, {where})"
