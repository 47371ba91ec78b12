"""From what a request wants to a grammar that matchers start from, or to a refusal that says why.

Whatever is slow belongs here, beside the step loop: the first mask is found, too. No input may end
the process: depth is looked at before anything recursive is, and threads that compile have a
stack for what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import llguidance
import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.structured import grammar_text
from nanocore.engine_core.structured.schema_json import parse_schema
from nanocore.engine_core.structured.token_matcher import TokenMatcher, why, write_mask
from nanocore.engine_core.structured.vocabulary import Vocabulary
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs

LIMITS: Final = llguidance.LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    initial_lexer_fuel=1_000_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


class CompiledGrammar:
    """What every sample of a request begins with; see `Grammar`. Any thread may use it.

    on_too_slow: called with the reason when a matcher of it took too long. num_bytes: about what it
    takes.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        beginning: llguidance.LLMatcher,
        words_W: NDArray[np.int32],
        num_bytes: int,
    ) -> None:
        self.num_bytes: Final = num_bytes
        self.on_too_slow: Callable[[str], None] = lambda reason: None
        self._vocabulary = vocabulary
        self._beginning = beginning
        self._first_words_W = words_W

    def matcher(self) -> TokenMatcher:
        """A new one, at its beginning."""
        return TokenMatcher(
            self._vocabulary,
            self._beginning,
            self._first_words_W,
            lambda reason: self.on_too_slow(reason),
        )


def compile_grammar(vocabulary: Vocabulary, wanted: StructuredOutputs) -> CompiledGrammar:
    """Compile what a request wants. May take long, and much stack: `Grammars` has threads for it.

    Raises:
        InvalidRequestError: it cannot be compiled, or would take too long; it says where.
    """
    matcher = llguidance.LLMatcher(
        vocabulary.tokenizer, _text(vocabulary, wanted), limits=LIMITS, log_level=0
    )
    if matcher.is_error():
        raise InvalidRequestError(f"structured_outputs.{wanted.kind}: {why(matcher)}")
    words_W = np.zeros(vocabulary.num_words, dtype=np.int32)
    reason = write_mask(matcher, vocabulary, words_W)
    if reason is not None:
        raise InvalidRequestError(f"structured_outputs.{wanted.kind}: {reason}")
    return CompiledGrammar(vocabulary, matcher, words_W, 1_000_000)


def _text(vocabulary: Vocabulary, wanted: StructuredOutputs) -> str:
    compact = wanted.disable_any_whitespace
    if wanted.json is not None:
        return grammar_text.of_schema(parse_schema("json", wanted.json), compact)
    if wanted.regex is not None:
        return grammar_text.of_regex(wanted.regex)
    if wanted.choice is not None:
        return grammar_text.of_choice(wanted.choice)
    if wanted.grammar is not None:
        return grammar_text.of_lark(wanted.grammar)
    if wanted.structural_tag is not None:
        tag = wanted.structural_tag
        schemas = [
            parse_schema(f"structural_tag.structures[{i}].schema", one.schema)
            for i, one in enumerate(tag.structures)
        ]
        return grammar_text.of_structural_tag(tag, schemas, compact, vocabulary)
    return grammar_text.of_schema({"type": "object"}, compact)
