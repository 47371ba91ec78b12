"""A process's log on stderr: text, or one JSON object per line.

Logs never contain prompts or responses. Records about a request have its request_id in `extra`,
which becomes a JSON field.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

from nanocore.system import standard_streams

LogFormat: TypeAlias = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """Formats records as objects of time, level, process, pid, message, and maybe request_id and
    exception. process: its name."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "message": _plain(record.getMessage()),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            fields["request_id"] = _plain(request_id)
        if record.exc_info:
            fields["exception"] = _plain(self.formatException(record.exc_info))
        return msgspec.json.encode(fields).decode()


def start_log(process: str, log_format: LogFormat = "text") -> None:
    """Send this process's log to stderr. process: its name."""
    handler = standard_streams.LogHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter(f"({process} pid={os.getpid()}) %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def complain(text: str) -> None:
    """Report why the process ends, in the format of its log."""
    root = logging.getLogger()
    if any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers):
        root.error("%s", text)
    else:
        standard_streams.complain(text)


def _plain(text: str) -> str:
    # Half a surrogate pair has no UTF-8.
    return text.encode(errors="backslashreplace").decode()
