"""Compiles structured outputs to grammars, or refuses them with a reason.

Whatever is slow happens here, outside the step loop: the first mask is computed, and a few tokens
are followed, so that a grammar with slow masks is refused before it costs a step. No input may end
the process: depth is checked before anything recursive runs, and compiling threads have a large
stack.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.grammars import grammar_text
from nanocore.engine_core.grammars.lenient import find_fault, relax
from nanocore.engine_core.grammars.schema import escaped, parse_schema
from nanocore.engine_core.grammars.schema_checks import (
    check_forms,
    check_lark,
    check_regex,
    check_schema,
    check_triggers,
)
from nanocore.engine_core.grammars.token_matcher import TokenMatcher, why, write_mask
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError, shorten
from nanocore.protocol.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    import llguidance

FOLLOW_S: Final = 5.0
"""CPU time that an output may take to follow."""
_TOKENS_PER_LOOK: Final = 256


class FollowedGrammar:
    """Implements `Grammar` for one resumed sample, whose matcher has consumed its earlier
    output.
    """

    def __init__(self, matcher: TokenMatcher, not_held: Sequence[str]) -> None:
        self._matcher = matcher
        self.not_held = not_held

    def matcher(self) -> TokenMatcher:
        return self._matcher


def followed(
    grammar: CompiledGrammar, output: Sequence[int]
) -> FollowedGrammar | InvalidRequestError:
    """Return a grammar whose matcher has consumed these output tokens, or why they do not match."""
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


_WALK_TOKENS: Final = 16


class CompiledGrammar:
    """Implements `Grammar`: the start of every sample of a request. Any thread may use it.

    on_too_slow: called with the reason when a matcher of it took too long. num_bytes: about what it
    takes. not_held: see `Grammar`.
    """

    def __init__(
        self,
        vocabulary: TokenTable,
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
        return TokenMatcher(
            self._vocabulary,
            self._beginning,
            self._first_words_W,
            lambda reason: self.on_too_slow(reason),
        )


def try_grammar(vocabulary: TokenTable, wanted: StructuredOutputs) -> tuple[str, list[str]]:
    """Return llguidance's text of a structured output, and the pointers that are not enforced.

    Raises:
        InvalidRequestError: see `compile_grammar`.
    """
    text, grammar = compile_grammar(vocabulary, wanted)
    return text, [*grammar.not_held]


def compile_grammar(
    vocabulary: TokenTable, wanted: StructuredOutputs
) -> tuple[str, CompiledGrammar]:
    """Compile a structured output; return llguidance's text of it, and the grammar.

    May take any time, memory and stack: run it in a compile process.

    Raises:
        InvalidRequestError: it cannot be compiled, or would take too long; it says where.
    """
    schemas = _schemas(wanted)
    for field, schema in schemas:
        check_forms(field, schema)
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


def compile_text(vocabulary: TokenTable, text: str) -> CompiledGrammar:
    """Compile the text that `try_grammar` returned; takes about as long.

    Raises:
        InvalidRequestError: it cannot be compiled after all.
    """
    grammar, reason = _compiled(vocabulary, text)
    if reason is not None:
        raise InvalidRequestError(f"structured_outputs: llguidance cannot compile it: {reason}")
    return grammar


def _compiled(vocabulary: TokenTable, text: str) -> tuple[CompiledGrammar, str | None]:
    """Return a grammar with its first mask, and why there is no mask or None."""
    words_W = np.zeros(vocabulary.num_words, dtype=np.int32)
    start = time.thread_time()
    matcher = _begin(vocabulary, text)
    reason = write_mask(matcher, vocabulary, words_W)
    num_bytes = _estimated_bytes(text, words_W, (time.thread_time() - start) * 1000)
    return CompiledGrammar(vocabulary, matcher, words_W, num_bytes), reason


def _made(
    vocabulary: TokenTable,
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
        raise _error(wanted, reason, schemas, refusal)
    _walk(grammar, vocabulary)
    return text, grammar


_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
"""How llguidance names a line and a column."""


def _error(
    wanted: StructuredOutputs,
    reason: str,
    schemas: list[tuple[str, Any]],
    refusal: Callable[[Any], str | None],
) -> InvalidRequestError:
    """Return llguidance's reason with the field, and the part of a schema, that it is about."""
    for field, schema in schemas:
        own = reason if wanted.json is not None else refusal(schema)
        if own is not None:
            pointer, key = find_fault(schema, own, refusal)
            pointer += f"/{escaped(key)}" if key else ""
            at = f" at {pointer!r}" if pointer else ""
            return InvalidRequestError(f"structured_outputs.{field}{at}: {_first_line(own)}")
    if wanted.regex is not None:  # the place is one in the grammar around it
        reason = _PLACE.sub("", reason)
        # A regex that needs escapes in a grammar is quoted with them: its carets are elsewhere.
        quoted = re.search(r"regex parse error:\n    ([^\n]*)\n    ( *)\^", reason)
        if quoted and quoted[1] == wanted.regex:
            reason = f"at character {len(quoted[2])}: {reason}"
    reason = _first_line(_PLACE.sub(r"at line \1, column \2: ", reason))
    if "::=" in (wanted.grammar or ""):
        reason += """; grammars here are Lark's, not GBNF: start: "a" | "b\""""
    return InvalidRequestError(f"structured_outputs.{wanted.kind}: {reason}")


def _first_line(reason: str) -> str:
    """Shorten a reason to one line, without the regular expression that llguidance quotes."""
    if reason.startswith("NoExtension"):
        return "nothing matches it"
    place, *_ = re.split("invalid regex|regex parse error", reason.partition("\n")[0])
    error = re.search(r"\nerror: ([^\n]*)", reason)
    return shorten(f"{place}invalid regex: {error[1]}" if error else reason.partition("\n")[0])


def _schemas(wanted: StructuredOutputs) -> list[tuple[str, Any]]:
    """Parse all schemas: (name of the field within structured_outputs, JSON value)."""
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


def _text(vocabulary: TokenTable, wanted: StructuredOutputs, schemas: list[Any]) -> str:
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
    """Limits of llguidance; `schema_checks` and the compile process cover what these do not."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=40_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _begin(vocabulary: TokenTable, text: str) -> llguidance.LLMatcher:
    """Return a matcher at its beginning; it may be in error."""
    import llguidance

    try:
        return llguidance.LLMatcher(vocabulary.tokenizer, text, limits=_limits(), log_level=0)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is not an Exception
        raise InvalidRequestError(
            f"structured_outputs: llguidance cannot compile it: {shorten(why(str(error)))}"
        ) from None


def _walk(grammar: CompiledGrammar, vocabulary: TokenTable) -> None:
    """Follow the same 16 tokens at every compilation, which shows whether masks are quick."""
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
    """Estimate a grammar's memory from measurements: parsed text, and what was built in this
    time.
    """
    return 100_000 + words_W.nbytes + 600 * len(text) + round(250_000 * cpu_ms)
