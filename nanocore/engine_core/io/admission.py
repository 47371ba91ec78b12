"""Admission: turns a SUBMIT into a Request, or into a typed error that says what would have worked.

Runs on the io thread, so that bad requests never reach the step loop, and hashing a long prompt
delays no step. Clients in other languages skip the SDK's checks; every check is made here.

A SUBMIT may bring output tokens of an earlier run. The request is queued with them behind its
prompt, like a preempted one. If they have ended it already, it is accepted and ends at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.grammars.grammar_compiler import GrammarSource
from nanocore.engine_core.grammars.token_matcher import CompiledGrammar
from nanocore.engine_core.io.limits import QueueLimit, held_bytes
from nanocore.engine_core.requests.readiness import GRAMMAR
from nanocore.engine_core.requests.request import TOKEN_DTYPE, Request
from nanocore.kv_cache import Capacity, KeyChain
from nanocore.protocol.errors import (
    ContextLengthError,
    EngineOverloadedError,
    InvalidRequestError,
    counted,
)
from nanocore.protocol.fields import MAX_EXACT_INT, check_limits
from nanocore.protocol.messages import ModelCard, Submit
from nanocore.protocol.sampling import EngineSamplingParams


def longest(max_model_len: int, max_tokens: int | None) -> int:
    """Limit of prompt and output tokens of one request.

    A prompt alone may fill max_model_len: a single token that is sampled after it is delivered
    and never computed. So a text of that length can be scored, and embedded.
    """
    return max_model_len + (max_tokens == 1)


MAX_HANDLE: Final = 2**32 - 1
_HOLD_IDS: Final = (
    f"hold one or more int32 values, little-endian, of {TOKEN_DTYPE.itemsize} bytes each"
)
_SEED_BITS: Final = MAX_EXACT_INT.bit_length()


class Admission:
    """Validates SUBMITs and builds requests of them.

    grammars: of structured outputs. capacity: of the KV cache; None if
    all layers keep every token.
    """

    def __init__(
        self,
        model: ModelCard,
        config: EngineConfig,
        queue_limit: QueueLimit,
        grammars: GrammarSource,
        capacity: Capacity | None = None,
    ) -> None:
        self._model = model
        self._capacity = capacity or Capacity(model.num_blocks, model.block_size)
        self._most_tokens = self._capacity.most_tokens
        self._seeds = random.Random(config.seed)
        self._config = config
        self._queue_limit = queue_limit
        self.grammars = grammars

    def build(self, submit: Submit, handle: int, client: int, is_only: bool = False) -> Request:
        """Validate a SUBMIT and build its request, block keys included.

        Of sibling samples it returns the first, whose handle the others' follow. It may have to
        wait for its grammar. Resumed outputs may have ended it: see `end_by_outputs`. is_only: its
        session has no other request.

        Raises:
            ContextLengthError: prompt, outputs and max_tokens exceed the model or the KV cache.
            InvalidRequestError: any other value is out of range, or the grammar cannot be compiled.
            EngineOverloadedError: the queue is full.
        """
        check_limits(submit)
        if submit.priority != 0 and self._config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority={submit.priority}: this engine schedules first come, first served; "
                "leave priority at 0, or start the engine with --scheduling-policy priority"
            )
        prompt = self._prompt(submit.prompt_token_ids)
        outputs = self._token_ids("output_token_ids", submit.output_token_ids)
        sampling = submit.sampling or self._model.default_sampling
        eos_token_ids = () if sampling.ignore_eos else tuple(self._model.eos_token_ids)
        self._check_sampling(sampling, eos_token_ids)
        if sampling.prompt_logprobs == -1:  # by the number a step's share of them is computed
            sampling = replace(sampling, prompt_logprobs=self._model.vocab_size)
        self._check_outputs(outputs, sampling, eos_token_ids, len(prompt))
        max_num_tokens = self._max_num_tokens(len(prompt), sampling)
        if handle + sampling.n - 1 > MAX_HANDLE:
            raise EngineOverloadedError(
                f"this engine has numbered {handle - 1} requests, and its handles end at "
                f"{MAX_HANDLE}: restart it"
            )
        grammar = self._find_grammar(sampling, client)
        num_bytes = held_bytes(submit, sampling, self._model.block_size)
        num_tokens = len(prompt) + len(outputs)
        self._queue_limit.enter(num_tokens, sampling.n, num_bytes, is_only)
        key_chain = KeyChain(self._model.block_size, self._extra_keys(submit, client))
        if self._config.enable_prefix_caching:
            key_chain.extend(submit.prompt_token_ids + submit.output_token_ids)
        request = Request(
            handle=handle,
            request_id=submit.request_id,
            client=client,
            token_ids=np.concatenate((prompt, outputs)) if len(outputs) else prompt,
            max_num_tokens=max_num_tokens,
            sampling=sampling,
            seed=self._seeds.getrandbits(_SEED_BITS) if sampling.seed is None else sampling.seed,
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
        elif sampling.structured_outputs is not None:
            request.wait_for(GRAMMAR)
        return request

    def _check_sampling(self, sampling: EngineSamplingParams, eos_token_ids: Sequence[int]) -> None:
        """Check token ids, logprobs, and that every step has a token left to choose."""
        allowed, bad_words = sampling.allowed_token_ids, sampling.bad_words_token_ids
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("allowed_token_ids", allowed or ())
        self._check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
        for i, words in enumerate(bad_words):
            self._check_ids(f"bad_words_token_ids[{i}]", words)
        if sampling.logprobs is not None:
            self._check_logprobs("logprobs", sampling.logprobs)
        if sampling.prompt_logprobs is not None:
            self._check_logprobs("prompt_logprobs", sampling.prompt_logprobs)
        if allowed is not None or sampling.min_tokens or bad_words:
            self._check_choice(sampling, eos_token_ids)

    def _no_token_id(self, place: str, token_id: int, hint: str = "") -> InvalidRequestError:
        """Error for an invalid token id. place: field and index."""
        return InvalidRequestError(
            f"{place}={token_id} is not a token id of this model: valid ids are "
            f"0 to {self._model.vocab_size - 1}{hint}"
        )

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._model.vocab_size:
            for i, token_id in enumerate(ids):
                if not 0 <= token_id < self._model.vocab_size:
                    raise self._no_token_id(f"{name}[{i}]", token_id)

    def _check_logprobs(self, name: str, asked: int) -> None:
        limit, vocab_size = self._config.max_logprobs, self._model.vocab_size
        name = f"{name}={asked}"
        if asked == -1:
            asked, name = vocab_size, f"{name}, all {vocab_size} tokens of the vocabulary,"
        if limit != -1 and asked > limit:
            raise InvalidRequestError(
                f"{name} is out of range: this engine gives at most {limit}; ask for fewer, or "
                "start it with a higher --max-logprobs (-1: no limit)"
            )
        if asked > vocab_size:
            raise InvalidRequestError(
                f"{name} is out of range: the vocabulary has {vocab_size} tokens; -1 is for all"
            )

    def _check_choice(self, sampling: EngineSamplingParams, eos_token_ids: Sequence[int]) -> None:
        allowed = sampling.allowed_token_ids
        forbidden = {words[0] for words in sampling.bad_words_token_ids if len(words) == 1}
        if sampling.min_tokens:
            forbidden.update(eos_token_ids, sampling.stop_token_ids)
        if allowed is None:
            num_forbidden = sum(token_id < self._model.vocab_size for token_id in forbidden)
            num_left, what = self._model.vocab_size - num_forbidden, "the vocabulary"
        else:
            num_left, what = len(set(allowed) - forbidden), "allowed_token_ids"
        if num_left == 0:
            ends = f", or an end before min_tokens={sampling.min_tokens}"
            raise InvalidRequestError(
                f"no token is left to choose: each of {what} is a bad word"
                f"{ends if sampling.min_tokens else ''}; allow more tokens"
            )

    def _check_outputs(
        self,
        outputs: np.ndarray,
        sampling: EngineSamplingParams,
        eos_token_ids: Sequence[int],
        num_prompt: int,
    ) -> None:
        """Check that a run with these parameters may have produced the outputs."""
        num_outputs, num_free = len(outputs), sampling.min_tokens
        max_model_len = self._model.max_model_len
        if not num_outputs:
            return
        if sampling.pooling is not None:
            raise InvalidRequestError(
                f"output_token_ids with pooling={sampling.pooling!r}: an embedding has no output "
                "tokens; leave output_token_ids out"
            )
        if sampling.n != 1:
            raise InvalidRequestError(
                f"output_token_ids with n={sampling.n}: it belongs to one sample; resume each "
                "sample as a separate request, with n=1 and, for sample i, seed + i"
            )
        if sampling.max_tokens is not None and num_outputs > sampling.max_tokens:
            raise InvalidRequestError(
                f"output_token_ids has {counted(num_outputs, 'token')}, more than max_tokens="
                f"{sampling.max_tokens}, which counts what was produced already, too"
            )
        if num_prompt + num_outputs > longest(max_model_len, sampling.max_tokens):
            raise ContextLengthError(
                f"the prompt has {counted(num_prompt, 'token')} and output_token_ids {num_outputs}"
                f", together more than max_model_len={max_model_len}: start the engine with a "
                "larger --max-model-len"
            )
        is_stop = np.isin(outputs[num_free:-1], [*eos_token_ids, *sampling.stop_token_ids])
        if is_stop.any():
            i = num_free + int(is_stop.argmax())
            raise InvalidRequestError(
                f"output_token_ids[{i}]={outputs[i]} is EOS or a stop id: the request ended there, "
                f"and output_token_ids goes on after it; leave the rest out"
            )

    def _find_grammar(self, sampling: EngineSamplingParams, client: int) -> CompiledGrammar | None:
        """Return the request's grammar; None if it has none, or it is not compiled yet."""
        if sampling.structured_outputs is None:
            return None
        found = self.grammars.find(sampling.structured_outputs, client)
        if isinstance(found, Exception):
            # It may be kept and raised again: without what it took up the last time.
            raise found.with_traceback(None)
        return found

    def _extra_keys(self, submit: Submit, client: int) -> dict[str, str]:
        """Return what cached blocks depend on in addition to their tokens."""
        extra_keys = {} if submit.cache_salt is None else {"cache_salt": submit.cache_salt}
        if self._config.salt_prefix_cache_by_session:
            extra_keys["session"] = str(client)
        return extra_keys

    def _prompt(self, column: bytes) -> np.ndarray:
        if not column:
            raise InvalidRequestError(
                f"the prompt is empty: prompt_token_ids has 0 bytes, and must {_HOLD_IDS}"
            )
        return self._token_ids("prompt_token_ids", column)

    def _token_ids(self, field: str, column: bytes) -> np.ndarray:
        if len(column) % TOKEN_DTYPE.itemsize:
            raise InvalidRequestError(f"{field} has {len(column)} bytes: it must {_HOLD_IDS}")
        token_ids = np.frombuffer(column, TOKEN_DTYPE)
        if len(token_ids) and not self._are_ids(token_ids):
            bad = int(((token_ids < 0) | (token_ids >= self._model.vocab_size)).argmax())
            swapped = self._are_ids(token_ids.byteswap())
            hint = "; its bytes are in big-endian order" if swapped else ""
            place = f"{field}[{bad}]"
            raise self._no_token_id(place, int(token_ids[bad]), hint)
        return token_ids

    def _are_ids(self, token_ids: np.ndarray) -> bool:
        """Whether all ids are valid; as uint32, negative ones are very large."""
        return bool(token_ids.view(np.uint32).max() < self._model.vocab_size)

    def _max_num_tokens(self, num_prompt: int, sampling: EngineSamplingParams) -> int:
        """Return the limit of prompt and output tokens together."""
        max_model_len, max_tokens = self._model.max_model_len, sampling.max_tokens
        if sampling.pooling is not None:  # it ends where its first token would be
            max_tokens = 1
        min_tokens = sampling.min_tokens
        if num_prompt + min_tokens > max_model_len and min_tokens and max_tokens is None:
            raise ContextLengthError(
                f"the prompt has {counted(num_prompt, 'token')} and min_tokens is {min_tokens}, "
                f"together more than max_model_len={max_model_len}: shorten the prompt, lower "
                "min_tokens, or start the engine with a larger --max-model-len"
            )
        asked = "max_tokens is absent" if max_tokens is None else f"max_tokens is {max_tokens}"
        if sampling.pooling is not None:
            asked = f"pooling is {sampling.pooling!r}"
        if num_prompt + (max_tokens or 1) > longest(max_model_len, max_tokens):
            shorter = "" if sampling.pooling is not None else "lower max_tokens, "
            raise ContextLengthError(
                f"the prompt has {counted(num_prompt, 'token')} and {asked}, together "
                f"more than max_model_len={max_model_len}: shorten the prompt, {shorter}"
                "or start the engine with a larger --max-model-len"
            )
        total = max_model_len if max_tokens is None else num_prompt + max_tokens
        most = self._most_tokens
        if total - 1 > most:  # the last token is delivered, its KV is never needed
            raise ContextLengthError(
                f"the request may reach {total} tokens (the prompt has {num_prompt}, {asked})"
                f"{self._capacity.described(total)}, but the whole KV cache holds {most}: lower "
                "max_tokens, or start the engine with more KV memory (--kv-cache-memory-bytes)"
            )
        return total
