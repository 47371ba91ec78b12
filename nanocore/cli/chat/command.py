"""`nanocore chat`: checks packages, and starts a conversation or asks one question."""

from __future__ import annotations

import os
from functools import partial
from typing import Final

from nanocore.cli.chat.flags import ChatSettings, parse
from nanocore.cli.command import require, require_engine, run_engine_command
from nanocore.system.logs import complain

_REMEDY: Final = "pip install '.[chat]'"


def run(arguments: list[str]) -> int:
    return run_engine_command("nanocore chat", partial(parse, arguments, os.environ), _chat)


def _chat(options: ChatSettings) -> int:
    if options.is_prompted:
        require(("prompt_toolkit", "rich"), "a chat needs", _REMEDY)
    if options.url is None:
        require_engine(options.engine)
    else:
        require(("aiohttp",), "--url needs", _REMEDY)
    for notice in options.engine.notices:
        complain(f"nanocore chat: {notice}")
    if options.is_prompted:
        from nanocore.cli.chat.interactive import converse

        return converse(options)
    from nanocore.cli.chat.session import ask

    return ask(options)
