"""A conversation at a terminal: what is typed, and what is shown."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from prompt_toolkit.history import History, InMemoryHistory
from rich.console import Console

from nanocore.cli.chat.conversation import Conversation
from nanocore.cli.chat.files import ErrorLog, state_directory
from nanocore.cli.chat.flags import ChatOptions
from nanocore.cli.chat.history import InputHistory
from nanocore.cli.chat.loop import ChatLoop
from nanocore.cli.chat.prompt import Prompt
from nanocore.cli.chat.session import handled_by, logged_to, opened
from nanocore.cli.chat.target import ChatTarget
from nanocore.cli.chat.terminal import Interrupts, LinePrompt, is_dumb, quiet_keyboard
from nanocore.cli.chat.view import View
from nanocore.protocol.errors import ConfigError


def converse(options: ChatOptions) -> int:
    """A conversation; the exit code.

    Raises:
        NanocoreError: nobody can be asked.
    """
    interrupts = Interrupts()
    return asyncio.run(interrupts.run(_converse(options, interrupts)))


async def _converse(options: ChatOptions, interrupts: Interrupts) -> None:
    """From the first line to the last."""
    view, keyboard = View(Console(), options.is_plain), sys.stdin.fileno()
    prompt: LinePrompt | Prompt
    if is_dumb(dict(os.environ)):
        async with opened(options, view) as target:
            quiet = partial(quiet_keyboard, keyboard, in_lines=True)
            loop = _loop(options, target, view, interrupts, quiet)
            prompt = LinePrompt(keyboard, _write, interrupts)
            await _run(loop, prompt, view, tells_figures=True)
        return
    # All the time: a terminal that changes its manner between two keys may lose one.
    with quiet_keyboard(keyboard, in_lines=False):
        async with opened(options, view) as target:
            loop = _loop(options, target, view, interrupts, nullcontext)
            prompt = Prompt(_history(view), loop.status, lambda: loop.models, interrupts)
            await _run(loop, prompt, view, tells_figures=False)


def _loop(
    options: ChatOptions,
    target: ChatTarget,
    view: View,
    interrupts: Interrupts,
    quiet: Callable[[], AbstractContextManager[None]],
) -> ChatLoop:
    conversation = Conversation(options.system)
    return ChatLoop(target, conversation, dict(options.sampling), view, interrupts, quiet)


async def _run(
    loop: ChatLoop, prompt: LinePrompt | Prompt, view: View, tells_figures: bool
) -> None:
    view.note(f"{loop.status(sys.maxsize)}; /help lists commands, Ctrl-D ends")
    with handled_by(ErrorLog()), logged_to(lambda text: prompt.above(partial(view.note, text))):
        await loop.run(prompt, tells_figures)


def _history(view: View) -> History:
    """Of what was typed, also at other times."""
    try:
        return InputHistory(state_directory() / "chat-history", view.note)
    except ConfigError as error:
        view.note(f"{error}: what is typed is not kept")
        return InMemoryHistory()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
