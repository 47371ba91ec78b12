"""Log lines that nobody reads, and standard streams that are not there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nanocore.system import standard_streams
from nanocore.system.standard_streams import LogHandler, complain


@pytest.fixture
def unread_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """(read end, write end) of a pipe that is stderr."""
    read_end, write_end = os.pipe()
    monkeypatch.setattr(standard_streams, "STDERR_FD", write_end)
    yield read_end, write_end
    for fd in (read_end, write_end):
        os.close(fd)


def log(handler: LogHandler, text: str) -> None:
    handler.handle(logging.LogRecord("x", logging.INFO, "", 0, text, None, None))


def test_a_pipe_that_nobody_reads_stops_nobody(unread_stderr: tuple[int, int]) -> None:
    read_end, _ = unread_stderr
    handler = LogHandler()
    for _ in range(2000):  # more than any pipe holds
        log(handler, "x" * 999)
    taken = len(os.read(read_end, 2**21))
    assert 4096 <= taken < 2_000_000
    log(handler, "it is read again")
    assert os.read(read_end, 2**21).endswith(b"it is read again\n")


def test_a_line_longer_than_a_pipe_takes_at_once_arrives_whole(
    unread_stderr: tuple[int, int],
) -> None:
    log(LogHandler(), "y" * 10_000 + "\udcff")
    assert os.read(unread_stderr[0], 2**20) == b"y" * 10_000 + b"\\udcff\n"


def test_a_reader_that_is_gone_stops_nobody(unread_stderr: tuple[int, int]) -> None:
    read_end, _ = unread_stderr
    handler = LogHandler()
    gone = os.dup(read_end)
    os.close(gone)
    os.dup2(os.open(os.devnull, os.O_RDONLY), read_end)  # nobody holds the pipe's read end now
    log(handler, "to nobody")


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_complaints_of_two_processes_do_not_run_into_each_other(flags: tuple[str, ...]) -> None:
    program = "from nanocore.system.standard_streams import complain; complain('of one')"
    read_end, write_end = os.pipe2(os.O_DIRECT)  # a read takes what one write wrote
    subprocess.run([sys.executable, *flags, "-c", program], stderr=write_end, check=True)
    os.close(write_end)
    assert os.read(read_end, 100) == b"of one\n"
    os.close(read_end)


def test_what_a_peer_said_does_no_harm_in_a_complaint(capsys: pytest.CaptureFixture[str]) -> None:
    complain("it said \x1b[31m\r\n\tand \u202e")
    assert capsys.readouterr().err == "it said \\x1b[31m\n\tand \\u202e\n"


def test_closed_streams_are_the_null_device_and_no_file_takes_their_numbers() -> None:
    program = (
        "import os; from nanocore.system.standard_streams import *\n"
        "open_missing(); fd = os.open('/dev/zero', os.O_RDONLY)\n"
        "complain('nothing'); flush_or_drop()\n"
        "assert sys.stdin.read() == ''\n"
        "os._exit(0 if fd > 2 and os.readlink('/proc/self/fd/1') == os.devnull else 1)"
    )
    line = 'exec "$0" -c "$1" 0<&- 1>&- 2>&-'
    done = subprocess.run(["bash", "-c", line, sys.executable, program], check=False)
    assert done.returncode == 0
