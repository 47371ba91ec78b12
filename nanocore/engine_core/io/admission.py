"""Admission: from a SUBMIT to a Request, or to a typed error that says what would have worked.

Runs on the io thread, so that bad requests never reach the step loop and hashing a long prompt does
not delay a step. Clients in other languages skip the SDK's checks; every check is made here.
"""

from __future__ import annotations

import random
from typing import Final

import numpy as np
from msgspec.structs import replace

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.queue_limit import QueueLimit
from nanocore.engine_core.io.resumed_outputs import check_outputs, longest
from nanocore.engine_core.io.sampling_check import SamplingCheck
from nanocore.engine_core.io.submit_size import held_bytes
from nanocore.engine_core.requests.request import TOKEN_DTYPE, Request
from nanocore.engine_core.structured.matcher import Grammar, GrammarSource
from nanocore.kv_cache import KeyChain
from nanocore.protocol.errors import ContextLengthError, EngineOverloadedError, InvalidRequestError
from nanocore.protocol.fields import MAX_EXACT_INT
from nanocore.protocol.limits import check_limits
from nanocore.protocol.messages import ModelCard, Submit
from nanocore.protocol.sampling import EngineSamplingParams

MAX_HANDLE: Final = 2**32 - 1


class Admission:
    """Builds requests for one engine.

    Args:
        model: limits that requests must fit.
        config: seed (of the generator that draws seeds for requests that bring none), scheduling
            policy, and what concerns the prefix cache.
        queue_limit: how many may wait.
        grammars: those of structured outputs that are known.
    """

    def __init__(
        self,
        model: ModelCard,
        config: EngineConfig,
        queue_limit: QueueLimit,
        grammars: GrammarSource,
    ) -> None:
        self._model = model
        self._seeds = random.Random(config.seed)
        self._policy = config.scheduling_policy
        self._cached = config.enable_prefix_caching
        self._salted = config.salt_prefix_cache_by_session
        self._queue_limit = queue_limit
        self._grammars = grammars
        self._check = SamplingCheck(model, config.max_logprobs)

    def build(self, submit: Submit, handle: int, client: int, is_only: bool = False) -> Request:
        """Validate a SUBMIT and build its request, block keys included.

        Of several samples it is the first, which holds the others back; their handles follow on
        its own. If it `awaits_grammar` it cannot run before that is compiled, and knows the
        outputs that the request brings. These may have ended it: see `end_by_outputs`. is_only:
        its session has no other request.

        Raises:
            ContextLengthError: prompt, or prompt and outputs or max_tokens, exceed the model or
                the KV cache.
            InvalidRequestError: any other value out of range, or what cannot be compiled.
            EngineOverloadedError: the queue is full.
        """
        check_limits(submit)
        if submit.priority != 0 and self._policy != "priority":
            raise InvalidRequestError(
                f"priority={submit.priority}: this engine schedules first come, first served; "
                "leave priority at 0, or start the engine with --scheduling-policy priority"
            )
        prompt = self._prompt(submit.prompt_token_ids)
        outputs = self._token_ids("output_token_ids", submit.output_token_ids)
        sampling = submit.sampling or self._model.default_sampling
        eos_token_ids = () if sampling.ignore_eos else tuple(self._model.eos_token_ids)
        self._check.check(sampling, eos_token_ids)
        if sampling.prompt_logprobs == -1:  # by the number a step's share of them is computed
            sampling = replace(sampling, prompt_logprobs=self._model.vocab_size)
        check_outputs(outputs, sampling, eos_token_ids, len(prompt), self._model.max_model_len)
        max_num_tokens = self._max_num_tokens(len(prompt), sampling)
        if handle + sampling.n - 1 > MAX_HANDLE:
            raise EngineOverloadedError(
                f"this engine has numbered {handle - 1} requests, and its handles end at "
                f"{MAX_HANDLE}: start it anew"
            )
        grammar = self._find_grammar(sampling, client)
        num_bytes = held_bytes(submit, sampling, self._model.block_size)
        num_tokens = len(prompt) + len(outputs)
        self._queue_limit.enter(num_tokens, sampling.n, num_bytes, client, is_only)
        key_chain = KeyChain(self._model.block_size, self._extra_keys(submit, client))
        if self._cached:
            key_chain.extend(submit.prompt_token_ids + submit.output_token_ids)
        request = Request(
            handle=handle,
            request_id=submit.request_id,
            client=client,
            token_ids=np.concatenate((prompt, outputs)) if len(outputs) else prompt,
            max_num_tokens=max_num_tokens,
            sampling=sampling,
            seed=self._draw_seed() if sampling.seed is None else sampling.seed,
            eos_token_ids=eos_token_ids,
            key_chain=key_chain,
            priority=submit.priority,
            num_resumed_tokens=len(outputs),
            num_bytes=num_bytes,
        )
        if sampling.n > 1:
            request.add_siblings(sampling.n - 1)
        if grammar is not None and not len(outputs):  # else it is to follow them first
            request.follow(grammar)
        return request

    def _draw_seed(self) -> int:
        return self._seeds.getrandbits(MAX_EXACT_INT.bit_length())

    def _find_grammar(self, sampling: EngineSamplingParams, client: int) -> Grammar | None:
        """Of a structured output; None if there is none, or it is not known yet."""
        if sampling.structured_outputs is None:
            return None
        found = self._grammars.find(sampling.structured_outputs, client)
        if isinstance(found, Exception):
            # It may be kept and raised again: without what it took up the last time.
            raise found.with_traceback(None)
        return found

    def _extra_keys(self, submit: Submit, client: int) -> dict[str, str]:
        """What cached blocks depend on beside their tokens."""
        extra_keys = {} if submit.cache_salt is None else {"cache_salt": submit.cache_salt}
        if self._salted:
            extra_keys["session"] = str(client)
        return extra_keys

    def _prompt(self, column: bytes) -> np.ndarray:
        if not column:
            raise InvalidRequestError(
                "the prompt is empty: prompt_token_ids has 0 bytes, and must hold one or more "
                f"int32 values, little-endian, of {TOKEN_DTYPE.itemsize} bytes each"
            )
        return self._token_ids("prompt_token_ids", column)

    def _token_ids(self, field: str, column: bytes) -> np.ndarray:
        if len(column) % TOKEN_DTYPE.itemsize:
            raise InvalidRequestError(
                f"{field} has {len(column)} bytes: it must hold one or more int32 values, "
                f"little-endian, of {TOKEN_DTYPE.itemsize} bytes each"
            )
        token_ids = np.frombuffer(column, TOKEN_DTYPE)
        if len(token_ids) and not self._are_ids(token_ids):
            bad = int(((token_ids < 0) | (token_ids >= self._model.vocab_size)).argmax())
            swapped = self._are_ids(token_ids.byteswap())
            hint = "; its bytes are in big-endian order" if swapped else ""
            place = f"{field}[{bad}]"
            raise self._check.no_token_id(place, int(token_ids[bad]), hint)
        return token_ids

    def _are_ids(self, token_ids: np.ndarray) -> bool:
        """Whether all are valid; a negative one is a very large one here."""
        return bool(token_ids.view(np.uint32).max() < self._model.vocab_size)

    def _max_num_tokens(self, num_prompt: int, sampling: EngineSamplingParams) -> int:
        """Prompt and output tokens together, at most."""
        max_model_len, max_tokens = self._model.max_model_len, sampling.max_tokens
        if sampling.pooling is not None:  # it ends where its first token would be
            max_tokens = 1
        min_tokens = sampling.min_tokens
        if num_prompt + min_tokens > max_model_len and min_tokens and max_tokens is None:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and min_tokens is {min_tokens}, "
                f"together more than max_model_len={max_model_len}: shorten the prompt, lower "
                "min_tokens, or start the engine with a larger --max-model-len"
            )
        asked = "max_tokens is absent" if max_tokens is None else f"max_tokens is {max_tokens}"
        if sampling.pooling is not None:
            asked = f"pooling is {sampling.pooling!r}"
        if num_prompt + (max_tokens or 1) > longest(max_model_len, max_tokens):
            shorter = "" if sampling.pooling is not None else "lower max_tokens, "
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and {asked}, together "
                f"more than max_model_len={max_model_len}: shorten the prompt, {shorter}"
                "or start the engine with a larger --max-model-len"
            )
        total = max_model_len if max_tokens is None else num_prompt + max_tokens
        capacity = self._model.num_blocks * self._model.block_size
        if total - 1 > capacity:  # the last token is delivered, its KV is never needed
            raise ContextLengthError(
                f"the request may reach {total} tokens (the prompt has {num_prompt}, {asked}), but "
                f"the whole KV cache holds {capacity}: lower max_tokens, or start the engine with "
                "more KV memory (--kv-cache-memory-bytes)"
            )
        return total
