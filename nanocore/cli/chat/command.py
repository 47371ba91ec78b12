"""`nanocore chat` and `nanocore run`: check packages, start a conversation, or ask one question."""

from __future__ import annotations

import os
from typing import Final

from nanocore.cli.chat.flags import ChatSettings, parse, parse_run
from nanocore.cli.command import require, require_engine
from nanocore.system.logs import complain

DEMO_SKILLS: Final = "it adds, sorts, counts, reverses words"
_REMEDY: Final = "pip install '.[chat]'"


def run(arguments: list[str]) -> int:
    return _chat(parse(arguments, os.environ))


def run_model(arguments: list[str]) -> int:
    """Run `nanocore run`, which is Ollama's name for a chat."""
    return _chat(parse_run(arguments, os.environ))


def _chat(options: ChatSettings) -> int:
    if options.is_prompted:
        require(("prompt_toolkit", "rich"), "a chat needs", _REMEDY)
    if options.url is None:
        _require_engine(options)
    else:
        require(("aiohttp",), "--url needs", _REMEDY)
    for notice in options.engine.notices:
        complain(notice)
    if options.is_prompted:
        from nanocore.cli.chat.interactive import converse

        return converse(options)
    from nanocore.cli.chat.session import ask

    return ask(options)


def _require_engine(options: ChatSettings) -> None:
    """Check what is needed, and say what is launched that the user may not expect."""
    engine = options.engine
    require_engine(engine)
    if engine.endpoints:
        return
    if engine.model is None:
        complain(f"no model named: the demo model answers ({DEMO_SKILLS})")
