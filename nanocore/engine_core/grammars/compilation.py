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

import msgspec
import numpy as np

from nanocore.engine_core.grammars import grammar_text
from nanocore.engine_core.grammars.lenient import find_fault, relax
from nanocore.engine_core.grammars.schema import escaped, parse_schema
from nanocore.engine_core.grammars.schema_checks import check_forms, check_schema
from nanocore.engine_core.grammars.token_matcher import (
    CompiledGrammar,
    why,
    write_mask,
)
from nanocore.engine_core.grammars.token_table import TokenTable, tokens_of
from nanocore.protocol.errors import InvalidRequestError, shorten
from nanocore.protocol.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    import llguidance

FOLLOW_S: Final = 5.0
"""CPU time that an output may take to follow."""
_TOKENS_PER_LOOK: Final = 256


def followed(
    grammar: CompiledGrammar, output: Sequence[int]
) -> CompiledGrammar | InvalidRequestError:
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
    return msgspec.structs.replace(grammar, resumed=matcher)


def _refusal(i: int, token: int, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"output_token_ids[{i}]={token} is not what structured_outputs allows there: {reason}; "
        "send what an earlier run with these parameters has produced"
    )


_WALK_TOKENS: Final = 16


def compile_grammar(
    vocabulary: TokenTable, wanted: StructuredOutputs
) -> tuple[str, CompiledGrammar]:
    """Compile a structured output; return llguidance's text of it, and the grammar.

    May take any time, memory and stack: run it in a compile process.

    Raises:
        InvalidRequestError: it cannot be compiled, or would take too long; it says where.
    """
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


def compile_text(vocabulary: TokenTable, text: str) -> CompiledGrammar:
    """Compile the text that `compile_grammar` returned; takes about as long.

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
    cpu_ms = (time.thread_time() - start) * 1000
    # As measured: of the parsed text, and of what is built in this time.
    num_bytes = 100_000 + words_W.nbytes + 600 * len(text) + round(250_000 * cpu_ms)
    return CompiledGrammar(vocabulary, matcher, words_W, num_bytes), reason


def _made(
    vocabulary: TokenTable,
    wanted: StructuredOutputs,
    schemas: list[tuple[str, Any]],
    refusal: Callable[[Any], str | None],
) -> tuple[str, CompiledGrammar]:
    for field, schema in schemas:
        check_schema(field, schema)
    text = grammar_text.text_of(wanted, [schema for _, schema in schemas], vocabulary)
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
    if reason.startswith("Unable to determine if regex is empty"):
        return "whether anything matches it is too hard to find out: make it simpler"
    place, *_ = re.split("invalid regex|regex parse error", reason.partition("\n")[0])
    error = re.search(r"\nerror: ([^\n]*)", reason)
    return shorten(f"{place}invalid regex: {error[1]}" if error else reason.partition("\n")[0])


def _schemas(wanted: StructuredOutputs) -> list[tuple[str, Any]]:
    """Return (name of the field within structured_outputs, JSON value) of all schemas, parsed."""
    texts = [] if wanted.json is None else [("json", wanted.json)]
    if wanted.structural_tag is not None:
        texts = [
            (f"structural_tag.structures[{i}].schema", one.schema)
            for i, one in enumerate(wanted.structural_tag.structures)
        ]
    schemas = [(field, parse_schema(field, text)) for field, text in texts]
    for field, schema in schemas:
        check_forms(field, schema)
    return schemas


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
        tokens = tokens_of(words_W & ~vocabulary.eos_words)
        if len(tokens) == 0:  # it can only end
            return
        matcher.append([int(tokens[step * 7919 % len(tokens)])])
