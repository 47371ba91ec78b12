"""ChatLoop: reads the user's input, streams responses and runs commands, until the end.

Every error becomes one line and the loop continues; `/retry` asks again. Internal errors are also
only logged, so that no conversation is lost to a bug.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, Protocol

from nanocore.cli.chat.commands import (
    SlashCommand,
    checked,
    help_text,
    parse_command,
    parse_setting,
    sampling_in_force,
    sampling_line,
    with_defaults,
    with_value,
)
from nanocore.cli.chat.conversation import Conversation, SavedChat, load, save
from nanocore.cli.chat.target import ChatTarget, ChatTurn, TurnStats, incompleteness, status_line
from nanocore.cli.chat.view import View
from nanocore.cli.interrupts import Interrupts
from nanocore.protocol.errors import (
    ContextLengthError,
    InvalidRequestError,
    NanocoreError,
    counted,
    shorten,
)

logger = logging.getLogger(__name__)

_LOST_POLL_S: Final = 1.0


class InputReader(Protocol):
    async def read(self) -> str:
        """Return the user's next text. Raises EOFError at the end."""
        ...


class ChatLoop:
    """sampling: parameters at the beginning."""

    def __init__(
        self,
        target: ChatTarget,
        conversation: Conversation,
        sampling: dict[str, Any],
        view: View,
        interrupts: Interrupts,
    ) -> None:
        self._target = target
        self._conversation = conversation
        self._sampling = sampling
        self._view = view
        self._interrupts = interrupts
        self._stats = TurnStats()
        self.models: list[str] = []

    async def run(self, prompt: InputReader) -> None:
        """Run until the end of the input, or `/exit`."""
        with self._interrupts.to(lambda: None):  # Ctrl-C between a question and its response
            try:
                await self._interrupts.stoppable(self._find_models())
            except NanocoreError:
                pass  # the list is only for completion, and servers may have none
            except Exception as error:
                self._report(error)
            while True:
                try:
                    text = await prompt.read()
                except EOFError:
                    return
                try:
                    if not await self._handle(text):
                        return
                except NanocoreError as error:
                    self._view.error(str(error))
                except Exception as error:
                    self._report(error)

    async def _handle(self, text: str) -> bool:
        """Handle an input; return whether to continue."""
        if not text.strip():
            return True
        command = parse_command(text)
        if command is not None:
            await self._execute(command)
            return command.name != "exit"
        self._conversation.say(text.strip("\n"))
        await self._ask()
        return True

    def _report(self, error: Exception) -> None:
        self._view.end_answer()
        what = f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"
        logger.error("internal error, the chat continues: %s", what, exc_info=error)

    def status(self, num_columns: int) -> str:
        target = self._target
        return status_line(target.model, self._stats, target.max_model_len, num_columns)

    def sampling_in_force(self) -> str:
        return sampling_in_force(self._sampling, self._target.default_sampling)

    async def _ask(self) -> None:
        turn = ChatTurn()
        self._view.begin_answer()
        try:
            has_ended = await self._interrupts.stoppable(self._stream(turn))
        except ContextLengthError:
            length = self._target.max_model_len
            tokens = "" if length is None else f" of {length:,} tokens"
            self._view.error(
                f"the conversation is longer than the context{tokens}: /undo takes back the last "
                "turn, /new starts afresh"
            )
            return
        except NanocoreError as error:
            self._view.error(f"{error}; /retry asks again")
            return
        finally:  # text that has arrived stays in the conversation
            self._stats = turn.stats()
            message = turn.message()
            if message is not None:
                self._conversation.answer(message)
        self._view.end_answer()
        if not has_ended:
            self._view.note("stopped")
        elif why := incompleteness(turn.answer, self._stats, self._target.max_model_len):
            self._view.note(why)

    async def _stream(self, turn: ChatTurn) -> None:
        watch = asyncio.create_task(self._watch_connection())
        try:
            params = with_defaults(self._sampling, self._target.default_sampling)
            events = self._target.ask(self._conversation.messages, params)
            async with aclosing(events):
                async for event in events:
                    turn.add(event)
                    self._view.show(event)
        finally:
            watch.cancel()

    async def _watch_connection(self) -> None:
        await asyncio.sleep(_LOST_POLL_S)
        while self._target.is_connected:
            await asyncio.sleep(_LOST_POLL_S)
        self._view.note("no engine is running; waiting for one, Ctrl-C stops")

    async def _execute(self, command: SlashCommand) -> None:
        argument, conversation, view = command.argument, self._conversation, self._view
        match command.name:
            case "help":
                view.say(help_text())
            case "system" if argument:
                conversation.system = "" if argument == "-" else argument
            case "system":
                view.say(conversation.system or "(no system prompt)")
            case "model" if argument:
                await self._switch_model(os.path.expanduser(argument))
            case "model":
                if await self._interrupts.stoppable(self._find_models()):
                    current = self._target.model
                    others = [f"  {model}" for model in self.models if model != current]
                    view.say("\n".join([f"* {current}", *others]))
            case "new":
                conversation.clear()
                self._stats = TurnStats()
            case "retry":
                conversation.pending = conversation.take_back()
                await self._ask()
            case "undo":
                view.note(f"removed: {conversation.take_back().get('content')}")
                self._stats = TurnStats()
            case "show":
                facts = {"model": self._target.model, **self._target.facts()}
                lines = [f"{name}: {value}" for name, value in facts.items()]
                view.say("\n".join([*lines, self.sampling_in_force()]))
            case "set" if argument.startswith("system "):
                conversation.system = argument.removeprefix("system ").strip()
            case "set" if argument:
                self._sampling = with_value(self._sampling, *parse_setting(argument))
                view.say(sampling_line(self._sampling) or self.sampling_in_force())
            case "set":
                view.say(self.sampling_in_force())
            case "save":
                self._save(Path(os.path.expanduser(argument)))
            case "load":
                self._load(Path(os.path.expanduser(argument)))

    async def _switch_model(self, name: str) -> None:
        async with self._view.waiting(self._target.news):
            is_done = await self._interrupts.stoppable(self._target.switch(name))
        if is_done:
            self._stats = TurnStats()
        stopped = "" if is_done else "stopped; "
        self._view.note(f"{stopped}model: {self._target.model or 'none'}")

    async def _find_models(self) -> None:
        self.models = await self._target.models()

    def _save(self, path: Path) -> None:
        messages = self._conversation.messages
        if not messages:
            raise InvalidRequestError("the conversation is empty")
        chat = SavedChat(model=self._target.model, sampling=self._sampling, messages=messages)
        save(path, chat)
        self._view.note(f"wrote {counted(len(messages), 'message')} to {path}")

    def _load(self, path: Path) -> None:
        chat = load(path)
        self._sampling = checked(chat.sampling)
        self._conversation.replace(chat.messages)
        self._stats = TurnStats()
        is_pending = self._conversation.pending is not None
        hint = "; /retry asks the last one" if is_pending else ""
        self._view.note(f"loaded {counted(len(chat.messages), 'message')}{hint}")
