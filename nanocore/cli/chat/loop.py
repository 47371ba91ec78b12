"""ChatLoop: reads what the user sends, has it answered, and obeys commands, until the end.

Whatever goes wrong with a question is a line, and the loop goes on; `/retry` asks it again. So does
a defect of ours: no conversation ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from pathlib import Path
from typing import Any, Final, Protocol

from nanocore.cli.chat import sampling as sampling_values
from nanocore.cli.chat.commands import Given, help_text, parse
from nanocore.cli.chat.conversation import Conversation, SavedChat, load, save
from nanocore.cli.chat.target import ChatTarget
from nanocore.cli.chat.terminal import Interrupts
from nanocore.cli.chat.turn import Figures, Turn, ending
from nanocore.cli.chat.view import View, status
from nanocore.protocol.errors import InvalidRequestError, NanocoreError, shorten

logger = logging.getLogger(__name__)

_LOST_POLL_S: Final = 1.0
_RETRY: Final = "; /retry asks again"


class Reader(Protocol):
    """Where the user types: `Prompt`, or `LinePrompt`."""

    async def read(self) -> str:
        """The next text. Raises EOFError at the end."""
        ...


class ChatLoop:
    """Args:
    sampling: what is set at the beginning. quiet: entered while an answer comes.
    """

    def __init__(
        self,
        target: ChatTarget,
        conversation: Conversation,
        sampling: dict[str, Any],
        view: View,
        interrupts: Interrupts,
        quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._target, self._conversation = target, conversation
        self._sampling, self._view = sampling, view
        self._interrupts, self._quiet = interrupts, quiet
        self._figures = Figures()
        self.models: list[str] = []

    async def run(self, prompt: Reader, tells_figures: bool = False) -> None:
        """Until the end of the input, or `/exit`. tells_figures: in a line after each answer."""
        with self._interrupts.to(_nothing):  # between a question and its answer, say
            try:
                await self._interrupts.stoppable(self._find_models())
            except NanocoreError:
                pass  # a server may list none: they are for completion
            except Exception as error:
                self._report(error)
            while True:
                try:
                    text = await prompt.read()
                except EOFError:
                    return
                try:
                    if not await self._turn(text, tells_figures):
                        return
                except NanocoreError as error:
                    self._view.error(str(error))
                except Exception as error:
                    self._report(error)

    async def _turn(self, text: str, tells_figures: bool) -> bool:
        """Whether there is to be another one."""
        given = parse(text) if text.strip() else None
        if given is not None:
            await self._obey(given)
        elif text.strip():
            self._conversation.say(text.strip("\n"))
            await self._ask()
            if tells_figures:
                self._view.note(self.status(sys.maxsize))
        return given is None or given.name != "exit"

    def _report(self, error: Exception) -> None:
        """A defect of ours. The log tells it in a line, and where it comes from in a file."""
        self._view.end_answer()
        what = f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"
        logger.error("internal error, the chat goes on: %s", what, exc_info=error)

    def status(self, num_columns: int) -> str:
        """What is known, in a line."""
        target = self._target
        return status(target.model, self._figures, target.max_model_len, num_columns)

    async def _ask(self) -> None:
        """Have what is pending answered."""
        turn = Turn()
        self._view.begin_answer()
        try:
            with self._quiet():
                has_ended = await self._interrupts.stoppable(self._stream(turn))
        except NanocoreError as error:
            self._keep(turn)
            self._view.error(f"{error}{_RETRY}")
            return
        except Exception:
            self._keep(turn)
            raise
        self._keep(turn)
        self._view.end_answer()
        if not has_ended:
            self._view.note("stopped")
        elif why := ending(turn.answer, self._figures, self._target.max_model_len):
            self._view.note(why)

    async def _stream(self, turn: Turn) -> None:
        watch = asyncio.create_task(self._watch())
        try:
            events = self._target.ask(self._conversation.messages, self._sampling)
            async with aclosing(events):
                async for event in events:
                    turn.add(event)
                    self._view.show(event)
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """Say that nobody is there, if so, and that one waits."""
        await asyncio.sleep(_LOST_POLL_S)
        while self._target.is_connected:
            await asyncio.sleep(_LOST_POLL_S)
        self._view.note("there is no engine now; the answer waits for one, or for Ctrl-C")

    def _keep(self, turn: Turn) -> None:
        self._figures = turn.figures()
        message = turn.message()
        if message is not None:
            self._conversation.answer(message)

    async def _obey(self, given: Given) -> None:
        argument, conversation, view = given.argument, self._conversation, self._view
        match given.name:
            case "help":
                view.say(help_text())
            case "system" if argument:
                conversation.system = "" if argument == "-" else argument
            case "system":
                view.say(conversation.system or "(nothing)")
            case "model":
                await self._model(argument)
            case "new":
                conversation.clear()
                self._figures = Figures()
            case "retry":
                conversation.pending = conversation.take_back()
                await self._ask()
            case "undo":
                view.note(f"taken back: {conversation.take_back().get('content')}")
                self._figures = Figures()
            case "set":
                self._set(argument)
            case "save":
                self._save(Path(os.path.expanduser(argument)))
            case "load":
                self._load(Path(os.path.expanduser(argument)))

    async def _model(self, name: str) -> None:
        if not name:
            if not await self._interrupts.stoppable(self._find_models()):
                return
            others = [model for model in self.models if model != self._target.model]
            self._view.say("\n".join([f"* {self._target.model}", *[f"  {one}" for one in others]]))
            return
        name = os.path.expanduser(name)
        async with self._view.waiting(self._target.news):
            is_done = await self._interrupts.stoppable(self._target.switch(name))
        if not is_done:
            self._view.note(f"stopped: {self._target.model or 'no model'} answers")
            return
        self._figures = Figures()
        self._view.note(f"{self._target.model} answers")

    async def _find_models(self) -> None:
        self.models = await self._target.models()

    def _set(self, argument: str) -> None:
        if argument:
            name, _, text = argument.partition(" ")
            self._sampling = sampling_values.with_value(self._sampling, name, text.strip())
        self._view.say(sampling_values.words(self._sampling) or "(as the model has it)")

    def _save(self, path: Path) -> None:
        messages = self._conversation.messages
        if not messages:
            raise InvalidRequestError("nothing has been said yet")
        chat = SavedChat(model=self._target.model, sampling=self._sampling, messages=messages)
        save(path, chat)
        self._view.note(f"{len(messages)} messages are in {path}")

    def _load(self, path: Path) -> None:
        chat = load(path)
        self._sampling = sampling_values.checked(chat.sampling)
        self._conversation.replace(chat.messages)
        self._figures = Figures()
        is_asked = self._conversation.pending is not None
        how = "/retry asks the last one" if is_asked else "the conversation goes on behind them"
        self._view.note(f"{len(chat.messages)} messages; {how}")


def _nothing() -> None: ...
