"""The page of errors: codes on the wire, their exceptions in Python, statuses, and exit codes."""

from __future__ import annotations

import inspect
from typing import get_args
from unittest.mock import patch

from nanocore.http import http_errors
from nanocore.http.http_errors import http_error
from nanocore.protocol.errors import ErrorCode, NanocoreError, StartError, exception_for
from tools.reference.markdown import item, page, table, wrapped

_ABOUT = (
    "Codes on the wire ([PROTOCOL.md](../../PROTOCOL.md#12-errors) says how a client handles "
    "them), the Python client's exceptions, and statuses and codes of [nanocore serve]"
    "(nanocore-serve.md)."
)
_START = "Errors that stop a command or an engine from starting, with their exit codes."


def errors_page() -> str:
    """The page."""
    exceptions = [one for one in _all(NanocoreError) if not issubclass(one, StartError)]
    parts = [
        wrapped(_ABOUT),
        table(("code", "exception", "HTTP status", "HTTP code"), map(_row, get_args(ErrorCode))),
        "## Exceptions",
        "\n".join(map(_exception, exceptions)),
        "## Exit codes",
        wrapped(_START),
        "\n".join(map(_start_error, _all(StartError))),
    ]
    parts.append("All exit codes of a command are on [its page](README.md).")
    return page("Errors and exit codes", *parts)


def _row(code: str) -> list[str]:
    error = exception_for(code, "")
    with patch.object(http_errors.logger, "disabled", True):
        answer = http_error(error)
    http_code = f"`{answer.code}`" if answer.code else ""
    return [f"`{code}`", f"`{type(error).__name__}`", str(answer.status), http_code]


def _all(kind: type[NanocoreError]) -> list[type[NanocoreError]]:
    """It and all below it, in the order of the source."""
    found = [kind]
    for one in kind.__subclasses__():
        if one.__module__ == NanocoreError.__module__:
            found += _all(one)
    return found


def _first_line(kind: type[NanocoreError]) -> str:
    return (inspect.getdoc(kind) or "").partition("\n\n")[0]


def _exception(kind: type[NanocoreError]) -> str:
    (base, *_) = kind.__bases__
    of = "" if base is Exception else f", a `{base.__name__}`"
    return item(f"`{kind.__name__}`{of}: {_first_line(kind)}")


def _start_error(kind: type[NanocoreError]) -> str:
    assert issubclass(kind, StartError)
    return item(f"{kind.exit_code}, `{kind.__name__}`: {_first_line(kind)}")
