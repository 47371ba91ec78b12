"""A process's log, on stderr: lines for people, or objects of JSON for programs, one a line.

What is logged never holds a prompt or an answer. Where a line is about a request, `extra` has its
request_id, which the objects have as a field of its own.
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
    """Each record as an object: time, level, process, pid, message; request_id, exception if there
    are. process: its name."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """In one line."""
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
    """Send this process's log to stderr, whatever becomes of that. process: its name."""
    handler = standard_streams.LogHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter(f"({process} pid={os.getpid()}) %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def complain(text: str) -> None:
    """Say why the process ends: a line by itself, or an object among the log's others."""
    root = logging.getLogger()
    if any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers):
        root.error("%s", text)
    else:
        standard_streams.complain(text)


def _plain(text: str) -> str:
    """What UTF-8 cannot say, escaped."""
    return text.encode(errors="backslashreplace").decode()
