"""What a request's sampling parameters must be for this model and engine, beyond their ranges.

Token ids are the model's, log probabilities no more than the engine gives, and every step has a
token left to choose. Costs nothing for what a request does not ask for.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.messages import ModelCard
from nanocore.protocol.sampling import EngineSamplingParams


class SamplingCheck:
    """Belongs to admission.

    Args:
        model: whose token ids they are. max_logprobs: of each token; -1: no limit.
    """

    def __init__(self, model: ModelCard, max_logprobs: int) -> None:
        self._vocab_size = model.vocab_size
        self._max_logprobs = max_logprobs

    def check(self, sampling: EngineSamplingParams, eos_token_ids: Sequence[int]) -> None:
        """Hold a request's parameters to the model and the engine.

        eos_token_ids: those that end this request.

        Raises:
            InvalidRequestError: the first that is wrong.
        """
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

    def no_token_id(self, place: str, token_id: int, hint: str = "") -> InvalidRequestError:
        """The error for one that is none. place: field and index."""
        return InvalidRequestError(
            f"{place}={token_id} is no token id of this model: valid ids are "
            f"0 to {self._vocab_size - 1}{hint}"
        )

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            for i, token_id in enumerate(ids):
                if not 0 <= token_id < self._vocab_size:
                    raise self.no_token_id(f"{name}[{i}]", token_id)

    def _check_logprobs(self, name: str, asked: int) -> None:
        limit, vocab_size = self._max_logprobs, self._vocab_size
        if asked == -1 and (limit == -1 or limit >= vocab_size):
            return
        if asked == -1:
            asked = vocab_size
            name = f"{name}=-1, all {vocab_size} tokens of the vocabulary,"
        else:
            name = f"{name}={asked}"
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
        """Some token can be chosen in every step."""
        allowed = sampling.allowed_token_ids
        forbidden = {words[0] for words in sampling.bad_words_token_ids if len(words) == 1}
        if sampling.min_tokens:
            forbidden.update(eos_token_ids, sampling.stop_token_ids)
        if allowed is None:
            num_forbidden = sum(token_id < self._vocab_size for token_id in forbidden)
            num_left, what = self._vocab_size - num_forbidden, "the vocabulary"
        else:
            num_left, what = len(set(allowed) - forbidden), "allowed_token_ids"
        if num_left == 0:
            ends = f", or an end before min_tokens={sampling.min_tokens}"
            raise InvalidRequestError(
                f"no token is left to choose: each of {what} is a bad word"
                f"{ends if sampling.min_tokens else ''}; allow more tokens"
            )
