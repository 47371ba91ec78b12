"""Lines of a log: for people, and for programs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

from nanocore.system.logs import JsonFormatter


def record(text: str, *values: object, level: int = logging.INFO, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("x", level, "", 0, text, values, more.pop("exc_info", None))
    made.__dict__ |= {"created": 1_800_000_000.1234, **more}
    return made


def as_object(of: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter("engine").format(of)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_is_an_object_with_its_time_its_process_and_its_text() -> None:
    assert as_object(record("%d sessions closed: %s", 3, 'the "client"\nis gone')) == {
        "time": "2027-01-15T08:00:00.123Z",
        "level": "info",
        "process": "engine",
        "pid": os.getpid(),
        "message": '3 sessions closed: the "client"\nis gone',
    }


def test_what_is_about_a_request_names_it() -> None:
    found = as_object(record("it ends", level=logging.ERROR, request_id="r\udc80"))
    assert (found["level"], found["request_id"]) == ("error", "r\\udc80")


def test_a_traceback_is_a_field() -> None:
    try:
        raise ValueError("no \udc80")
    except ValueError:
        found = as_object(record("it failed", level=logging.ERROR, exc_info=sys.exc_info()))
    assert found["message"] == "it failed"
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: no \\udc80")


def logged(script: str) -> tuple[int, str]:
    """(process id, what it has logged)."""
    begin = "import logging\nfrom nanocore.system.logs import complain, start_log\n"
    with subprocess.Popen(
        [sys.executable, "-c", begin + script], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        return process.pid, process.stderr.read()


def test_a_log_for_people_says_who_writes() -> None:
    pid, text = logged(
        "start_log('rank 1 of 2')\n"
        "logging.getLogger('any').info('loaded %s', 'it')\n"
        "complain('nanocore serve: no')\n"
    )
    assert text == f"(rank 1 of 2 pid={pid}) loaded it\nnanocore serve: no\n"


def test_a_log_for_programs_has_objects_alone_to_the_last_word() -> None:
    pid, text = logged(
        "start_log('serve', 'json')\n"
        "logging.getLogger('any').info('100% %s')\n"
        "complain('nanocore serve: 100% no')\n"
    )
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["pid"], line["level"], line["message"]) for line in lines] == [
        (pid, "info", "100% %s"), (pid, "error", "nanocore serve: 100% no")
    ]  # fmt: skip
