"""A grammar whose one sample has produced some of its output before, in an earlier run.

Its matcher is made and takes that output in where grammars are compiled, and neither in the io
thread nor beside a step: it takes a millisecond for a thousand tokens, and may take much longer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from nanocore.engine_core.structured.compilation import CompiledGrammar
from nanocore.engine_core.structured.token_matcher import TokenMatcher
from nanocore.protocol.errors import InvalidRequestError, shorten

FOLLOW_S: Final = 5.0
"""CPU time that an output may take to follow."""
_TOKENS_PER_LOOK: Final = 256


class FollowedGrammar:
    """Implements `Grammar` for one sample. matcher: has taken its output in."""

    def __init__(self, matcher: TokenMatcher, not_held: Sequence[str]) -> None:
        self._matcher = matcher
        self.not_held = not_held

    def matcher(self) -> TokenMatcher:
        """The one there is."""
        return self._matcher


def followed(
    grammar: CompiledGrammar, output: Sequence[int]
) -> FollowedGrammar | InvalidRequestError:
    """What a sample goes on with that has produced this output; or why none can have."""
    matcher = grammar.matcher()
    start_s = time.thread_time()
    for i, token in enumerate(output):
        matcher.append((token,))
        try:
            matcher.take_in()
        except BaseException as error:  # a panic of Rust is not an Exception
            return _refusal(i, token, shorten(f"{type(error).__name__}: {error}"))
        if matcher.failure is not None:
            return _refusal(i, token, matcher.failure)
        if i % _TOKENS_PER_LOOK == 0 and time.thread_time() - start_s > FOLLOW_S:
            return _refusal(i, token, f"to get there takes more than {FOLLOW_S:g} s")
    return FollowedGrammar(matcher, grammar.not_held)


def _refusal(i: int, token: int, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"output_token_ids[{i}]={token} is not what structured_outputs allows there: {reason}; "
        "send what an earlier run with these parameters has produced"
    )
