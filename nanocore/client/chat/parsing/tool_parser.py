"""ToolParser: text around calls, call ids, and calls written as JSON objects.

Text that is found not to be a call before its name is known remains text, unchanged. Once a call
has begun, everything in its block belongs to its arguments until the block or the text ends; text
after a complete call is text again. White space between text and a call, and after a call, is
dropped. An incomplete call at the end remains incomplete.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, TypeAlias

from nanocore.client.chat.events import Text, ToolArguments, ToolBegin
from nanocore.client.chat.parsing.json_reader import JsonReader
from nanocore.client.chat.parsing.stream_reader import SPACE, Marks, Steps, ignore
from nanocore.client.chat.tools import Tool

NewId: TypeAlias = Callable[[], str]
ARGUMENT_KEYS: Final = ("arguments", "parameters")
_CALL_KEYS: Final = frozenset({"name", "id", "type", "function", *ARGUMENT_KEYS})


def make_call_id() -> str:
    """Return an id for a call, in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


class ToolParser(JsonReader):
    """A parser of text and tool calls.

    Args:
        tools: those of the request. index: the sample's. new_id: makes ids for calls without one.

    marks: all marks of the format; special tokens among them must stay in the text. openers: marks
    that may begin a block of calls. is_bare: the text may begin with a call without a mark.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    openers: ClassVar[Marks] = Marks(())
    is_bare: ClassVar[bool] = False
    default_id = staticmethod(make_call_id)

    def __init__(
        self, tools: Sequence[Tool] = (), index: int = 0, new_id: NewId | None = None
    ) -> None:
        super().__init__(index)
        self._tools = {tool.name: tool for tool in tools}
        self._new_id = new_id or self.default_id

    @classmethod
    def beginnings(cls, tools: Sequence[Tool]) -> list[str]:
        """Return the texts with which a response that calls a tool may begin."""
        return list(cls.openers.texts)

    @abstractmethod
    def block(self, opener: str) -> Steps[None]:
        """Read a block of calls after an opener, or at the text's beginning if is_bare.

        `begin` starts a call. If it was not called when this returns, everything since `hold` is
        text.
        """

    def run(self) -> Steps[None]:
        opener = "" if self.is_bare else (yield from self.until(self.openers, self.say, Text))
        while opener is not None:
            self.hold(opener)
            yield from self.block(opener)
            if not self._release():
                yield from self.space()
            opener = yield from self.until(self.openers, self.say, Text)
        self.emit(Text, "".join(self._trailing))

    def say(self, text: str) -> None:
        """Emit text; white space at its end waits, because it may precede a call."""
        self.emit(Text, self.without_trailing(text, SPACE))

    def hold(self, opener: str = "") -> None:
        """Hold everything that is read from here on: it is text unless `begin` is called."""
        self._held = [opener]

    def _release(self) -> bool:
        text = "".join(self._held or ())
        self._held = None
        if text:
            self.say(text)
        return bool(text)

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call; text that was held belongs to it."""
        self._held = None
        self._trailing.clear()
        self.flush()
        call_id = call_id or self._new_id()
        self._out.append(ToolBegin(self._num_calls, call_id, name, self._index))
        self._num_calls += 1

    def add(self, arguments: str) -> None:
        """Emit arguments of the call that has begun."""
        self.emit(ToolArguments, arguments)

    def call_array(self) -> Steps[None]:
        """Read calls up to the end of a JSON array whose bracket was read."""
        while (yield from self.call_object()):
            yield from self.space()
            if not (yield from self.accept(",")):
                yield from self.accept("]")
                return
            yield from self.space()
            if (yield from self.accept("]")):
                return
            self.hold(",")

    def call_object(self, must_be_known: bool = False, is_open: bool = False) -> Steps[bool]:
        """Read {"name": ..., "arguments" or "parameters": ...}; return whether it was a call.

        Arguments before the name wait for it; an "id" is used if it precedes the arguments. A
        string as arguments is unwrapped; null means no arguments. must_be_known: it is a call only
        if it has a call's keys and no others, has arguments, and names a tool of the request.
        is_open: its bracket was read already.
        """
        yield from self.space()
        if not is_open and not (yield from self.accept("{")):
            return False
        words: dict[str, str] = {}
        early: list[str] | None = None
        is_begun = False
        separator: str | None = ","
        while separator == ",":
            key = yield from self._key()
            if key is None or (must_be_known and not is_begun and key not in _CALL_KEYS):
                return is_begun
            if key in ("name", "id") and (yield from self.sees('"')):
                word = yield from self.word()
                if word is None or (
                    must_be_known and not is_begun and key == "name" and word not in self._tools
                ):
                    return is_begun
                words.setdefault(key, word)
            elif key not in ARGUMENT_KEYS or is_begun or early is not None:
                yield from self.json_value(ignore)
            elif words.get("name"):
                self.begin(words["name"], words.get("id"))
                is_begun = True
                yield from self._arguments(self.add)
            else:
                early = []
                yield from self._arguments(early.append)
            yield from self.space()
            separator = yield from self.accept(",", "}")
        if separator is None or is_begun:
            return is_begun
        if not words.get("name") or (must_be_known and early is None):
            return False
        self.begin(words["name"], words.get("id"))
        self.add("".join(early or ()))
        return True

    def _key(self) -> Steps[str | None]:
        yield from self.space()
        key = yield from self.word()
        yield from self.space()
        if key is None or not (yield from self.accept(":")):
            return None
        yield from self.space()
        return key

    def _arguments(self, sink: Callable[[str], object]) -> Steps[None]:
        if (yield from self.sees('"')):
            yield from self.json_text(sink)
        elif (yield from self.sees("n")):
            yield from self.json_value(ignore)
        else:
            yield from self.json_value(sink)
