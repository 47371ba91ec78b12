"""A model's chat template: messages to a prompt, as transformers' apply_chat_template makes it.

Models are trained on what that function makes, so templates see here what they see there: the
filters and globals, the names that are defined, and the messages, with values of None left out.
A template is foreign code: it runs in jinja2's immutable sandbox, on plain data that is a copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.utils import Namespace

from nanocore.protocol.errors import InvalidRequestError, shorten

MAX_TEMPLATE_CHARS: Final = 1 << 16
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
"""What clients and templates call a turn's reasoning; the first that is there is meant."""


class ChatTemplate:
    """One template.

    Args:
        text: in jinja2's language.
        special_tokens: the special tokens' texts by name, as templates know them ("bos_token").
        source: where the template comes from, for error messages.
        now: the clock that templates read the date from.

    Raises:
        InvalidRequestError: it is longer than MAX_TEMPLATE_CHARS.
    """

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        source: str,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(text) > MAX_TEMPLATE_CHARS:
            raise InvalidRequestError(
                f"the chat template of {source} has {len(text)} characters: at most "
                f"{MAX_TEMPLATE_CHARS}"
            )
        self._text = text
        self._special_tokens = special_tokens
        self._source = source
        self._now = now

    def render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation.

        Raises:
            InvalidRequestError: no messages, or not plain ones, or the template rejects them.
        """
        if not messages:
            raise InvalidRequestError("the conversation is empty: pass at least one message")
        try:
            turns = [_turn(message) for message in messages]
        except (TypeError, RecursionError) as error:
            raise InvalidRequestError(f"the messages of a chat: {error}") from None
        try:
            return self._compiled.render(
                **self._special_tokens,
                messages=turns,
                tools=None,  # templates ask for both, and take None for "not given"
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # it is its author's code: whatever it raises is its error
            raise InvalidRequestError(
                f"the chat template of {self._source} failed: {type(error).__name__}: "
                f"{shorten(str(error))}"
            ) from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        """Compiled on first use: a template that is wrong harms only those who chat."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: self._now().strftime(format),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        return environment.from_string(self._text)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks what the model wrote; here it is only text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """What is between the tags, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_text_of")
        return [jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)]

    def _text_of(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """dict, of which templates get the calls and not the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """dict.fromkeys."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """namespace, without the names that begin with an underscore: they lead to Python's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name, too
        self, *rest = args
        names = dict(*rest, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} in a namespace is unsafe")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a model reads it; jinja2's own filter writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _turn(message: object) -> dict[str, Any]:
    """A message as templates get it: a copy, without values of None, its reasoning by all names."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a dict with a role, not {type(message).__name__}")
    turn = {_plain(key): _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((turn[key] for key in _REASONING_KEYS if key in turn), None)
    if reasoning is not None:
        turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
    return turn


def _plain(value: object) -> Any:
    """A copy of plain types only: methods of richer ones would be the template's to call."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    raise TypeError(
        "a message holds what JSON can (strings, numbers, true, false, null, lists, objects), not "
        f"{type(value).__name__}"
    )
