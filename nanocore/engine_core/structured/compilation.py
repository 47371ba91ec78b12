"""From what a request wants to a grammar that matchers start from, or to a refusal that says why.

Whatever is slow belongs here, beside the step loop: the first mask is found, too, and a few tokens
are followed, so that a grammar whose masks take too long is refused before it costs a step. No
input may end the process: depth is looked at before anything recursive is, and threads that compile
have a stack for what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.structured import grammar_text
from nanocore.engine_core.structured.complexity import (
    check_lark,
    check_regex,
    check_schema,
    check_triggers,
)
from nanocore.engine_core.structured.lenient import relax
from nanocore.engine_core.structured.refusals import refusal_of
from nanocore.engine_core.structured.schema_json import parse_schema
from nanocore.engine_core.structured.token_matcher import TokenMatcher, why, write_mask
from nanocore.engine_core.structured.vocabulary import Vocabulary
from nanocore.protocol.errors import InvalidRequestError, shorten
from nanocore.protocol.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    import llguidance

_WALK_TOKENS: Final = 16


class CompiledGrammar:
    """What every sample of a request begins with; see `Grammar`. Any thread may use it.

    on_too_slow: called with the reason when a matcher of it took too long. num_bytes: about what it
    takes. not_held: see `Grammar`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        beginning: llguidance.LLMatcher,
        words_W: NDArray[np.int32],
        num_bytes: int,
    ) -> None:
        self.num_bytes: Final = num_bytes
        self.not_held: Sequence[str] = ()
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


def try_grammar(vocabulary: Vocabulary, wanted: StructuredOutputs) -> tuple[str, list[str]]:
    """(llguidance's text for what a request wants, which `compile_text` compiles; what is not held)

    May take any time, memory and stack: `trials` has processes for it.

    Raises:
        InvalidRequestError: it cannot be compiled, or would take too long; it says where.
    """
    text, grammar = _tried(vocabulary, wanted)
    return text, [*grammar.not_held]


def compile_grammar(vocabulary: Vocabulary, wanted: StructuredOutputs) -> CompiledGrammar:
    """As `try_grammar`, but returns what it made."""
    return _tried(vocabulary, wanted)[1]


def compile_text(vocabulary: Vocabulary, text: str) -> CompiledGrammar:
    """Compile what `try_grammar` returned; about as quick as that was.

    Raises:
        InvalidRequestError: it cannot be compiled after all.
    """
    grammar, reason = _compiled(vocabulary, text)
    if reason is not None:
        raise InvalidRequestError(f"structured_outputs: llguidance cannot compile it: {reason}")
    return grammar


def _compiled(vocabulary: Vocabulary, text: str) -> tuple[CompiledGrammar, str | None]:
    """(a grammar with its first mask, why it has none)."""
    words_W = np.zeros(vocabulary.num_words, dtype=np.int32)
    start = time.thread_time()
    matcher = _begin(vocabulary, text)
    reason = write_mask(matcher, vocabulary, words_W)
    num_bytes = _estimated_bytes(text, words_W, (time.thread_time() - start) * 1000)
    return CompiledGrammar(vocabulary, matcher, words_W, num_bytes), reason


def _tried(vocabulary: Vocabulary, wanted: StructuredOutputs) -> tuple[str, CompiledGrammar]:
    schemas = _schemas(wanted)
    compact = wanted.disable_any_whitespace

    def refusal(schema: Any) -> str | None:
        beginning = _begin(vocabulary, grammar_text.of_schema(schema, compact))
        return write_mask(beginning, vocabulary, np.empty(vocabulary.num_words, np.int32))

    try:
        return _made(vocabulary, wanted, schemas, refusal)
    except InvalidRequestError:
        not_held = relax(schemas[0][1], wanted.lenient, refusal) if wanted.lenient else []
        if not not_held:
            raise
    text, grammar = _made(vocabulary, wanted, schemas, refusal)
    grammar.not_held = not_held
    return text, grammar


def _made(
    vocabulary: Vocabulary,
    wanted: StructuredOutputs,
    schemas: list[tuple[str, Any]],
    refusal: Callable[[Any], str | None],
) -> tuple[str, CompiledGrammar]:
    for field, schema in schemas:
        check_schema(field, schema)
    text = _text(vocabulary, wanted, [schema for _, schema in schemas])
    if wanted.free_prefixes:
        is_json = wanted.json is not None or wanted.json_object
        is_loose = is_json and not wanted.disable_any_whitespace
        text = grammar_text.with_free_prefixes(text, wanted.free_prefixes, vocabulary, is_loose)
    if wanted.reasoning is not None:
        text = grammar_text.after_reasoning(text, wanted.reasoning, vocabulary)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"structured_outputs.{wanted.kind} holds half a surrogate pair, "
            f"{text[error.start : error.end]!a}: no text has that; write the whole character"
        ) from None
    grammar, reason = _compiled(vocabulary, text)
    if reason is not None:
        raise refusal_of(wanted, reason, schemas, refusal)
    _walk(grammar, vocabulary)
    return text, grammar


def _schemas(wanted: StructuredOutputs) -> list[tuple[str, Any]]:
    """(name of the field within structured_outputs, JSON value) of all its schemas."""
    if wanted.json is not None:
        texts = [("json", wanted.json)]
    elif wanted.structural_tag is not None:
        texts = [
            (f"structural_tag.structures[{i}].schema", one.schema)
            for i, one in enumerate(wanted.structural_tag.structures)
        ]
    else:
        texts = []
    return [(field, parse_schema(field, text)) for field, text in texts]


def _text(vocabulary: Vocabulary, wanted: StructuredOutputs, schemas: list[Any]) -> str:
    compact = wanted.disable_any_whitespace
    if wanted.json is not None:
        return grammar_text.of_schema(schemas[0], compact)
    if wanted.regex is not None:
        check_regex("regex", wanted.regex)
        return grammar_text.of_regex(wanted.regex)
    if wanted.choice is not None:
        return grammar_text.of_choice(wanted.choice)
    if wanted.grammar is not None:
        check_lark(wanted.grammar)
        return grammar_text.of_lark(wanted.grammar)
    if wanted.structural_tag is not None:
        check_triggers(wanted.structural_tag)
        return grammar_text.of_structural_tag(wanted.structural_tag, schemas, compact, vocabulary)
    return grammar_text.of_schema({"type": "object"}, compact)


@cache
def _limits() -> llguidance.LLParserLimits:
    """What llguidance may work on; `complexity` and `trials` see to what these do not cover."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=40_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _begin(vocabulary: Vocabulary, text: str) -> llguidance.LLMatcher:
    """A matcher at its beginning; it may be in error."""
    import llguidance

    try:
        return llguidance.LLMatcher(vocabulary.tokenizer, text, limits=_limits(), log_level=0)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is not an Exception
        raise InvalidRequestError(
            f"structured_outputs: llguidance cannot compile it: {shorten(why(str(error)))}"
        ) from None


def _walk(grammar: CompiledGrammar, vocabulary: Vocabulary) -> None:
    """Follow the same tokens whenever it is compiled, which shows whether masks are quick."""
    matcher = grammar.matcher()
    words_W = np.empty(vocabulary.num_words, dtype=np.int32)
    for step in range(_WALK_TOKENS):
        matcher.fill(words_W)
        if matcher.failure is not None:
            raise InvalidRequestError(matcher.failure)
        words_W &= ~vocabulary.eos_words
        filled = np.flatnonzero(words_W)
        if len(filled) == 0:  # it can only end
            return
        place = int(filled[step * 7919 % len(filled)])
        word = int(words_W[place]) & 0xFFFFFFFF
        matcher.append([place * 32 + (word & -word).bit_length() - 1])


def _estimated_bytes(text: str, words_W: NDArray[np.int32], cpu_ms: float) -> int:
    """From measurements: what is parsed, and what was made of it in that time, a mask included."""
    return 100_000 + words_W.nbytes + 600 * len(text) + round(250_000 * cpu_ms)
