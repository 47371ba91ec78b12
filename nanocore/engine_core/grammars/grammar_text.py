"""Grammars in llguidance's JSON form, for each kind of structured output.

A JSON Schema's "x-guidance" could change what llguidance makes of it, up to output that is not
JSON; so it is replaced by the same options for every schema. Patterns are rewritten (`schema`);
what else llguidance would get wrong was refused before (`schema_checks`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from nanocore.engine_core.grammars.schema import with_safe_patterns
from nanocore.engine_core.grammars.schema_checks import check_regex, check_triggers
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import ReasoningMarks, StructuralTag, StructuredOutputs

_ESCAPES: Final = 'bfnrt"\\'
"""Escapes after a backslash in a string: each character can be written in one way alone.

So a name that a schema lists cannot come as \\u0061, as if it were another.
"""
_NAME: Final = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""Names of special tokens, Mistral's included."""
_ANY_TEXT: Final = r"/(?s:.*)/"
_OPENS_JSON: Final = '{["'
_JSON_PIECES: Final = re.compile(
    r'"(?:[^"\\]|\\.)*"?|[{}\[\]:,]|[ \t\r\n]+|[^"{}\[\]:, \t\r\n]+', re.DOTALL
)


_Grammars = list[dict[str, Any]]
"""The first one is where the output starts."""


def text_of(wanted: StructuredOutputs, schemas: list[Any], vocabulary: TokenTable) -> str:
    """Return the grammar of a structured output. schemas: its JSON Schemas, parsed.

    Raises:
        InvalidRequestError: a part of it that llguidance would get wrong, or half a surrogate pair.
    """
    grammars = _form(wanted, schemas, vocabulary)
    if wanted.free_prefixes:
        is_json = wanted.json is not None or wanted.json_object
        is_loose = is_json and not wanted.disable_any_whitespace
        grammars = _with_free_prefixes(grammars, wanted.free_prefixes, vocabulary, is_loose)
    if wanted.reasoning is not None:
        grammars = _after_reasoning(grammars, wanted.reasoning, vocabulary)
    text = _joined(grammars)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"structured_outputs.{wanted.kind} holds half a surrogate pair, "
            f"{text[error.start : error.end]!a}: no text has that; write the whole character"
        ) from None
    return text


def of_schema(schema: Any, compact: bool) -> str:
    """Grammar of a JSON Schema. A value that is no schema fails when it is compiled.

    compact: allow no white space.
    """
    return _joined([{"json_schema": _guided(schema, compact)}])


def _form(wanted: StructuredOutputs, schemas: list[Any], vocabulary: TokenTable) -> _Grammars:
    compact = wanted.disable_any_whitespace
    if wanted.structural_tag is not None:
        check_triggers(wanted.structural_tag)
        return _of_structural_tag(wanted.structural_tag, schemas, compact, vocabulary)
    if wanted.regex is not None:
        check_regex(wanted.regex)
        return [{"lark_grammar": f"start: /{_in_slashes(wanted.regex)}/"}]
    if wanted.choice is not None:  # one expression, so that llguidance shares their prefixes
        texts = " | ".join(map(_literal, wanted.choice))
        return [{"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}]
    if wanted.grammar is not None:
        return [{"lark_grammar": wanted.grammar}]
    schema = schemas[0] if schemas else {"type": "object"}
    return [{"json_schema": _guided(schema, compact)}]


def _of_structural_tag(
    tag: StructuralTag, schemas: list[Any], compact: bool, vocabulary: TokenTable
) -> _Grammars:
    """Grammar of free text with tagged structures. schemas: one for each structure.

    A trigger ends the free text where it appears first, as text; or it is a special token, or
    begins with one. So the structures of a trigger begin after it, and of several triggers that a
    structure begins with the shortest counts.
    """
    triggers = [min(filter(one.begin.startswith, tag.triggers), key=len) for one in tag.structures]
    lark = [f"start: part* TEXT\nTEXT: {_text_without(_unused(tag.triggers, triggers))}"]
    parts = []
    for i, trigger in enumerate(dict.fromkeys(triggers)):
        bodies = [
            f"{_sequence(one.begin[len(trigger) :], vocabulary)} @schema_{k} "
            f"{_sequence(one.end, vocabulary)}"
            for k, one in enumerate(tag.structures)
            if triggers[k] == trigger
        ]
        lark.append(f"trigger_{i}[lazy]: TEXT {_literal(trigger)}")
        head = f"trigger_{i}"
        special = _special_prefix(trigger, vocabulary)
        if special is not None:
            token, rest = special
            head = f"({head} | TEXT <[{token}]> {_literal(rest) if rest else ''})"
        lark.append(f"part_{i}: {head} ({' | '.join(bodies)})")
        parts.append(f"part_{i}")
    lark.append(f"part: {' | '.join(parts)}")
    of_schemas = [
        {"name": f"schema_{k}", "json_schema": _guided(schema, compact)}
        for k, schema in enumerate(schemas)
    ]
    return [{"name": "tag", "lark_grammar": "\n".join(lark)}, *of_schemas]


def _after_reasoning(
    grammars: _Grammars, marks: ReasoningMarks, vocabulary: TokenTable
) -> _Grammars:
    """Put free reasoning, enclosed in marks, before grammars.

    Models write new lines between the two. Without a beginning of its own the reasoning must come.
    """
    grammars[0]["name"] = "form"
    thoughts = "ended"
    special = _special_prefix(marks.end, vocabulary)
    if special is not None:
        token, rest = special
        thoughts = f"(ended | TEXT <[{token}]> {_sequence(rest, vocabulary)})"
    lark = [
        f"start: {_sequence(marks.begin, vocabulary)} {thoughts} LINES? @form"
        + (" | @form" if marks.begin else ""),
        f"ended[lazy]: TEXT {_literal(marks.end)}",
        f"TEXT: {_ANY_TEXT}",
        r"LINES: /\n{1,2}/",
    ]
    return [{"name": "reasoning", "lark_grammar": "\n".join(lark)}, *grammars]


def _with_free_prefixes(
    grammars: _Grammars, prefixes: list[str], vocabulary: TokenTable, may_be_indented: bool
) -> _Grammars:
    """Allow, in place of a grammar's form, one of the prefixes and any text after it.

    may_be_indented: white space may come before the form, too, as before a prefix. A model that
    begins with some would else have to go on with a prefix. What follows a prefix may hold special
    tokens, as calls of tools do.
    """
    grammars[0]["name"] = "bound"
    beginnings = (
        _told_apart(prefix, vocabulary, " ?" if may_be_indented else "")
        for prefix in dict.fromkeys(prefixes)
    )
    special = vocabulary.special_ranges()
    lark = [
        f"start: {'SPACE? ' if may_be_indented else ''}@bound | SPACE? beginning rest",
        f"beginning: {' | '.join(beginnings)}",
        f"rest: (TEXT <[{special}]>)* TEXT" if special else "rest: TEXT",
        f"TEXT: {_ANY_TEXT}",
        r"SPACE: /[\x20\t\r\n]{1,4}/",
    ]
    return [{"name": "free", "lark_grammar": "\n".join(lark)}, *grammars]


def _told_apart(prefix: str, vocabulary: TokenTable, space: str) -> str:
    """Like `_sequence`, but cut into JSON's tokens what may begin JSON.

    A lexer that has begun one long literal does not come back for what a form begins likewise.
    White space between two parts may lack: it is the form's to read, if that may have some. space:
    an expression of what the form has after a colon or a comma.
    """
    if prefix[0] not in _OPENS_JSON:
        return _sequence(prefix, vocabulary)

    def terminal(piece: str) -> str:
        if piece in (":", ","):
            return f"/{piece}{space}/"
        return _literal(piece) + ("?" if piece.isspace() else "")

    cut = []
    for part, token in _split(prefix, vocabulary):
        text = " ".join(map(terminal, _JSON_PIECES.findall(part)))
        cut.append(text if token is None else f"({text} | <[{token}]>)")
    return " ".join(cut)


def _unused(triggers: list[str], used: list[str]) -> list[str]:
    """Return triggers that no structure begins with; free text must not contain them.

    A trigger that contains another one cannot appear anyway.
    """
    rest = dict.fromkeys(one for one in triggers if one not in used)
    return [one for one in rest if not any(other in one for other in triggers if other != one)]


def _text_without(texts: list[str]) -> str:
    """Terminal for any text that contains none of these."""
    escaped = (re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", r"\\\g<0>", text) for text in texts)
    return " & ".join([_ANY_TEXT, *(f"~/(?s:.*){_in_slashes(one)}(?s:.*)/" for one in escaped)])


def _guided(schema: Any, compact: bool) -> Any:
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}
    if not isinstance(schema, dict):
        return schema
    # Small models fall into white space where it may come before a colon or a comma. llguidance
    # allows line breaks after these only together with such.
    space = "" if compact else " ?"
    options = {
        "whitespace_flexible": False,
        "item_separator": f",{space}",
        "key_separator": f":{space}",
        "json_allowed_escapes": _ESCAPES,
    }
    return {**with_safe_patterns(schema), "x-guidance": options}


def _joined(grammars: _Grammars) -> str:
    return json.dumps({"grammars": grammars}, allow_nan=False, ensure_ascii=False)


def _literal(text: str) -> str:
    """String literal of Lark that matches the text itself."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _in_slashes(regex: str) -> str:
    """Escape a regular expression for Lark's slashes."""
    escapes = {"/": "\\/", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    pattern = re.compile(r"\\.|[/\n\r\t]", re.DOTALL)
    return pattern.sub(lambda match: escapes.get(match[0][-1], match[0]), regex)


def _sequence(text: str, vocabulary: TokenTable) -> str:
    """Match a text, in which a special token may stand for its name."""
    parts = (
        _literal(part) if token is None else f"({_literal(part)} | <[{token}]>)"
        for part, token in _split(text, vocabulary)
    )
    return " ".join(parts)


def _special_prefix(text: str, vocabulary: TokenTable) -> tuple[int, str] | None:
    """Return the special token that the text begins with, and the rest; None if there is none."""
    part, token = next(_split(text, vocabulary))
    return None if token is None else (token, text[len(part) :])


def _split(text: str, vocabulary: TokenTable) -> Iterator[tuple[str, int | None]]:
    """Split a text into names of special tokens, with their ids, and the text between them."""
    known = {
        name: token
        for name in set(_NAME.findall(text))
        if (token := vocabulary.special_token(name)) is not None
    }
    if not known:
        yield from [(text, None)] if text else []
        return
    names = "|".join(map(re.escape, known))
    for part in re.split(f"({names})", text):
        if part:
            yield part, known.get(part)
