"""Random walks along masks: what a grammar lets through, without an engine or a model.

A walk begins freely and then prefers tokens that come to an end, so that most of them finish.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.grammars.compilation import compile_grammar
from nanocore.engine_core.grammars.token_matcher import CompiledGrammar, TokenMatcher
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.structured_outputs import StructuredOutputsParams
from tests.engine_core.grammars.walks import load_table

DEMO_MODEL: Final = demo_model_folder()
VOCAB_SIZE: Final = 1030
EOS: Final = 2
RANKS: Final = ['}]"@', "0n1:", ",", "", " \n", "{["]
"""Tokens by how soon they come to an end; "" is all others."""


@dataclass(frozen=True)
class DemoTokens:
    """The demo model's vocabulary, as walks need it."""

    vocabulary: TokenTable
    tokenizer: Tokenizer

    @cached_property
    def ranks(self) -> NDArray[np.int32]:
        """How far each token is from an end; [VOCAB_SIZE]."""
        ranks = np.full(VOCAB_SIZE, RANKS.index(""), np.int32)
        for rank, texts in enumerate(RANKS):
            ranks[[self.tokenizer.encode(text).ids[0] for text in texts]] = rank
        ranks[EOS] = -1
        return ranks

    def compile(self, **wanted: Any) -> CompiledGrammar:
        """wanted: as users write it."""
        return compile_grammar(self.vocabulary, StructuredOutputsParams(**wanted).for_engine())[1]

    def text(self, token_ids: Iterable[int]) -> str:
        return self.tokenizer.decode([*token_ids], skip_special_tokens=False)


@cache
def demo_tokens() -> DemoTokens:
    return DemoTokens(
        load_table(DEMO_MODEL, VOCAB_SIZE, [EOS]),
        Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")),
    )


def allowed_tokens(matcher: TokenMatcher) -> NDArray[np.int64]:
    """Those that the mask lets through now, in ascending order."""
    words_W = np.zeros((VOCAB_SIZE + 31) // 32, np.int32)
    is_masked = matcher.fill(words_W)
    assert matcher.failure is None, matcher.failure
    if not is_masked:
        return np.arange(VOCAB_SIZE)
    tokens = np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little"))
    assert len(tokens), "a mask allows nothing"
    assert tokens[-1] < VOCAB_SIZE, "a mask allows padding"
    return tokens


def accepts(grammar: CompiledGrammar, token_ids: Iterable[int]) -> bool:
    """Whether these can be a whole output: each is in its mask, and EOS in the last one."""
    matcher = grammar.matcher()
    for token in [*token_ids, EOS]:
        if token not in allowed_tokens(matcher):
            return False
        matcher.append([token])
    return True


def walk(
    grammar: CompiledGrammar, rng: random.Random, free_tokens: int = 40, max_tokens: int = 400
) -> list[int] | None:
    """The tokens of a random output, without EOS; None if it did not end within max_tokens.

    free_tokens: after so many it prefers to come to an end.
    """
    matcher = grammar.matcher()
    ranks = demo_tokens().ranks
    output: list[int] = []
    while len(output) < max_tokens:
        tokens = allowed_tokens(matcher)
        if rng.random() < (0.3 if len(output) < free_tokens else 0.95):
            tokens = tokens[ranks[tokens] == ranks[tokens].min()]
        token = int(tokens[rng.randrange(len(tokens))])
        if token == EOS:
            return output
        output.append(token)
        matcher.append([token])
    return None
