"""Structured outputs: constraints by a JSON Schema, regular expression, choices or grammar.

`StructuredOutputs` is what crosses the wire: schemas are JSON text there, so that any language can
send them as it has them. `StructuredOutputsParams` is what users write; names are vLLM's. Both hold
exactly one kind. What a text means is the engine's to find out: it compiles it, and says what it
cannot.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeAlias

import msgspec

from nanocore.protocol.errors import InvalidRequestError, shorten
from nanocore.protocol.fields import (
    MAX_CHOICES,
    MAX_FREE_PREFIXES,
    MAX_LENIENT_PARTS,
    MAX_STRUCTURED_OUTPUTS_BYTES,
    MAX_STRUCTURES,
    check_limits,
    check_types,
    limited,
    since,
)

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""One of these says what the output must be."""


class FormTooLargeError(InvalidRequestError):
    """The texts of a structured output exceed MAX_STRUCTURED_OUTPUTS_BYTES."""


class Structure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tagged part of free text: begin, a value of the JSON Schema, end.

    begin: starts with one of the triggers. schema: JSON text.
    """

    begin: str
    schema: str
    end: str


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Free text, in which a trigger begins one of the structures.

    triggers: none of these texts appears but as the beginning of a structure.
    """

    structures: Annotated[list[Structure], limited(minItems=1, maxItems=MAX_STRUCTURES)]
    triggers: Annotated[list[str], limited(minItems=1, maxItems=MAX_STRUCTURES)]

    def __post_init__(self) -> None:
        check_limits(self)
        if not all(self.triggers):
            raise InvalidRequestError("structural_tag has an empty trigger: leave it out")
        for i, structure in enumerate(self.structures):
            if not structure.begin.startswith(tuple(self.triggers)):
                raise InvalidRequestError(
                    f"structural_tag.structures[{i}].begin={structure.begin!r} does not begin with "
                    f"one of the triggers {self.triggers}: change it or add one"
                )


class ReasoningMarks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Marks that enclose free reasoning before the form.

    begin: the output reasons only if it starts with this; "" if the prompt has begun it already,
    so that the output must end it. end: the first time that it appears, the form follows.
    """

    begin: str = ""
    end: str

    def __post_init__(self) -> None:
        check_types(self, "structured_outputs.reasoning.")
        if not self.end:
            raise InvalidRequestError(
                "structured_outputs.reasoning.end is empty: name the text that ends it"
            )


class StructuredOutputs(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Constraint of the output, as the engine gets it; exactly one of the first six fields.

    json: a JSON Schema, as JSON text. regex: an expression that the whole output matches.
    choice: texts, one of which is the output. grammar: in Lark's notation, as llguidance has it.
    json_object: any JSON object. structural_tag: free text with structures in it.
    disable_any_whitespace: JSON without white space outside of strings; else a space may follow a
    colon or a comma. reasoning: free text that comes before. free_prefixes: texts; an output
    that begins with one, after white space perhaps, may go on as it likes. lenient: JSON pointers
    of parts of json; what the grammar lacks for them is left out, and ACCEPTED's not_held names it.
    """

    json: str | None = None
    regex: str | None = None
    choice: Annotated[list[str], limited(minItems=1, maxItems=MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: StructuralTag | None = None
    disable_any_whitespace: bool = False
    reasoning: Annotated[ReasoningMarks | None, since(7)] = None
    free_prefixes: Annotated[list[str], since(8), limited(maxItems=MAX_FREE_PREFIXES)] = []
    lenient: Annotated[list[str], since(12), limited(maxItems=MAX_LENIENT_PARTS)] = []

    def __post_init__(self) -> None:
        check_limits(self)
        kind = self.kind
        if self.lenient and self.json is None:
            raise InvalidRequestError(
                f"structured_outputs.lenient is for json, and this is {kind}: leave it out"
            )
        for pointer in self.lenient:
            if pointer and pointer[0] != "/":
                raise InvalidRequestError(
                    f"structured_outputs.lenient: {shorten(pointer)!r} is not a JSON pointer: "
                    'begin with a slash, or name all of json by ""'
                )
        if not all(self.free_prefixes):
            raise InvalidRequestError(
                "structured_outputs.free_prefixes has an empty text: leave it out, or leave out "
                f"{kind}, because any output begins with it"
            )
        if self.choice is not None and "" in self.choice:
            raise InvalidRequestError(
                "structured_outputs.choice has an empty text: leave it out, because an output "
                "cannot be empty"
            )
        try:
            num_bytes = sum(len(text.encode()) for text in self._texts())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"structured_outputs.{kind} is not valid Unicode: {error}; leave surrogates out"
            ) from None
        if num_bytes > MAX_STRUCTURED_OUTPUTS_BYTES:
            both = "" if self.reasoning is None else " with its reasoning's marks"
            both += " and free_prefixes" if both and self.free_prefixes else ""
            raise FormTooLargeError(
                f"structured_outputs.{kind}{both} has {num_bytes} bytes of UTF-8: at most "
                f"{MAX_STRUCTURED_OUTPUTS_BYTES} are allowed; shorten it, or split the request"
            )

    @property
    def kind(self) -> str:
        """The one of KINDS that is given.

        Raises:
            InvalidRequestError: none is, or several are.
        """
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = " and ".join(given) or "none of them"
            raise InvalidRequestError(
                f"structured_outputs has {what}: give exactly one of {', '.join(KINDS)}"
            )
        return given[0]

    def _texts(self) -> list[str]:
        texts = [text for text in (self.json, self.regex, self.grammar) if text is not None]
        if self.choice is not None:
            texts += self.choice
        if self.structural_tag is not None:
            texts += self.structural_tag.triggers
            for one in self.structural_tag.structures:
                texts += [one.begin, one.schema, one.end]
        if self.reasoning is not None:
            texts += [self.reasoning.begin, self.reasoning.end]
        return texts + self.free_prefixes + self.lenient


class SchemaClass(Protocol):
    """A class that knows the JSON Schema of its instances."""

    def model_json_schema(self) -> dict[str, Any]: ...


if TYPE_CHECKING:
    JsonSchema: TypeAlias = dict[str, Any] | bool | str | SchemaClass
else:
    JsonSchema = dict[str, Any] | bool | str  # what a class was replaced by is held to it


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Constraint that users write: `StructuredOutputs`, whose schemas may be Python objects.

    json: a JSON Schema, as a dict (or bool), as JSON text, or as a class that has
    `model_json_schema()`, as pydantic's models have it.
    structural_tag: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, as a dict or as
    JSON text. reasoning: a ReasoningMarks, or a dict of its fields.
    free_prefixes: marks of tool calls, if the model may call tools in place of an answer.
    lenient: JSON pointers of parts of json ("" is all of it) that are held as far as they can be.
    """

    json: JsonSchema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    reasoning: ReasoningMarks | None = None
    free_prefixes: list[str] = []
    lenient: list[str] = []

    def __post_init__(self) -> None:
        if isinstance(self.json, type) and hasattr(self.json, "model_json_schema"):
            msgspec.structs.force_setattr(self, "json", self.json.model_json_schema())
        if isinstance(self.reasoning, dict):
            msgspec.structs.force_setattr(self, "reasoning", _reasoning(self.reasoning))
        check_types(self, "structured_outputs.")
        self.for_engine()

    def for_engine(self) -> StructuredOutputs:
        """Return what SUBMIT holds.

        Raises:
            InvalidRequestError: it is no kind or several, too large, or cannot be JSON.
        """
        fields = msgspec.structs.asdict(self)
        if self.json is not None:
            fields["json"] = _json_text("json", self.json)
        if self.structural_tag is not None:
            fields["structural_tag"] = _structural_tag(self.structural_tag)
        return StructuredOutputs(**fields)


def _json_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"structured_outputs.{name} is not JSON: {error}") from None


def _reasoning(value: dict[str, Any]) -> ReasoningMarks:
    try:
        return msgspec.convert(value, ReasoningMarks)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(
            f"structured_outputs.reasoning must be ReasoningMarks(begin=str, end=str): {error}"
        ) from None


def _structural_tag(value: dict[str, Any] | str) -> StructuralTag:
    """Read vLLM's form, whose schemas are objects."""
    try:
        tag = {**(msgspec.json.decode(value) if isinstance(value, str) else value)}
        if tag.get("type") == "structural_tag":  # as OpenAI's response_format has it
            del tag["type"]
        structures = [
            {**one, "schema": _json_text("structural_tag", one["schema"])}
            for one in tag["structures"]
        ]
        return msgspec.convert({**tag, "structures": structures}, StructuralTag)
    except (msgspec.MsgspecError, TypeError, KeyError) as error:
        problem = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise InvalidRequestError(
            "structured_outputs.structural_tag must be {'structures': [{'begin': str, 'schema': "
            f"dict, 'end': str}}, ...], 'triggers': [str, ...]}}: {problem}"
        ) from None
