"""A page for each command: its flags with their values, defaults and help, from its parser."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from nanocore.cli import main
from tools.reference.markdown import item, page, wrapped
from tools.reference.parsers import actions_of

DOCS = Path(__file__).parents[2] / "docs"
MORE = {
    "nanocore serve": "[Serving over HTTP](../http.md) is the guide.",
    "nanocore batch": "[Batch inference](../batch.md) is the guide.",
    "nanocore top": "[Observability](../observability.md#live) explains the view.",
    "nanocore metrics": "[Observability](../observability.md#metrics) explains them, "
    "and [metrics](metrics.md) lists them.",
    "nanocore trace": "[Observability](../observability.md#traces) explains the output.",
    "nanocore explain": "[Observability](../observability.md#traces) has an example.",
    "nanocore bench": "[Benchmarks](../bench.md) explains the measurements.",
    "nanocore-engine": "[Starting an engine](../engine.md#flags) explains which flags to use. "
    "`AsyncEngineClient.launch` and `LLM` take them as arguments: `--max-num-seqs 8` is "
    "`max_num_seqs=8`.",
    "nanocore-keygen": "[Endpoints and keys](../operations.md#endpoints-and-keys) has an example.",
    "nanocore-conformance": "[PROTOCOL.md](../../PROTOCOL.md) has the rules.",
}
"""Where more is said, by what a command's name begins with; of others by a page of its name."""
_USERS_ENDPOINT = re.compile(r"ipc://\S*/nanocore\S*/default/engine\.sock")
"""It is another one for each user."""


def file_name(command: str) -> str:
    """Of its page."""
    return command.replace(" ", "-") + ".md"


def command_page(name: str, parser: argparse.ArgumentParser) -> str:
    """The page."""
    parts = [_description(name, parser)]
    for group in parser._action_groups:
        if lines := [_line(parser, action) for action in actions_of(group)]:
            parts += [f"## {_heading(group)}", "\n".join(lines)]
    if codes := exit_codes(name, parser):
        parts += ["## Exit codes", "\n".join(map(item, codes))]
    return page(f"`{name}`", *parts)


def _description(name: str, parser: argparse.ArgumentParser) -> str:
    text = parser.description or ""
    own = f"{name.split()[-1]}.md"
    more = [words for start, words in MORE.items() if name.startswith(start)]
    if not more and (DOCS / own).exists():
        more.append(f"[Its page](../{own}) is the guide.")
    if "the engine's" in text or "nanocore-engine" in (parser.usage or ""):
        more.append("[nanocore-engine](nanocore-engine.md) lists the engine's flags.")
    return wrapped(" ".join([text, *more]))


def _heading(group: argparse._ArgumentGroup) -> str:
    title = {"options": "Flags", "positional arguments": "Arguments"}.get(group.title or "")
    return title or f"{(group.title or '')[0].upper()}{(group.title or '')[1:]}"


def _line(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = _value(parser, action)
    shown = f"{names} {value}".strip() if names else value
    help = parser._get_formatter()._expand_help(action) if action.help else ""
    help = _USERS_ENDPOINT.sub("the user's own one", help)
    notes = []
    if action.choices is not None and action.metavar is not None:
        notes.append("one of " + ", ".join(f"`{choice}`" for choice in action.choices))
    default = _default(action)
    if default is not None and "default" not in help:
        notes.append(f"default: {default}")
    if action.required and action.option_strings:
        notes.append("required")
    if isinstance(action, argparse._AppendAction | argparse._ExtendAction) and "repeat" not in help:
        notes.append("repeatable")
    help = _in_code(help)
    return item(f"{shown}: {help}" + (f" ({'; '.join(notes)})" if notes else ""))


def _value(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """How its value is called, if it takes one."""
    if action.nargs == 0:
        return ""
    default = action.dest if not action.option_strings else action.dest.upper()
    if action.choices is not None and action.metavar is None:
        return "`{" + ",".join(map(str, action.choices)) + "}`"
    if action.metavar is None and action.type in (int, float):
        default = "N"
    return f"`{parser._get_formatter()._format_args(action, default)}`"


def _default(action: argparse.Action) -> str | None:
    """What is in force if it is left out, where that says something."""
    value = action.default
    if value in (None, False, "", argparse.SUPPRESS) or value == [] or value == {}:
        return None
    return f"`{value}`" if not isinstance(value, tuple) else f"`{','.join(map(str, value))}`"


def _in_code(help: str) -> str:
    """Flags and commands within a help text, which has none of Markdown's marks."""
    if "`" in help:
        return help
    help = re.sub(r"(?<![\w`-])(--[a-z][a-z-]*)", r"`\1`", help)
    return help.replace("*", "\\*").replace("<", "&lt;").replace("[", "\\[")


def exit_codes(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """`code: meaning` of each, as its --help lists them; of benchmarks that of them all does."""
    epilog = main._BENCH_USAGE if name.startswith("nanocore bench ") else parser.epilog or ""
    _, found, codes = " ".join(epilog.split()).partition("exit codes: ")
    if not found:
        return []
    return [re.sub(r"^([\d, ]+) ", r"\1: ", code) for code in re.split(r", (?=\d)", codes)]
