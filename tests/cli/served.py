"""`nanocore serve` for tests: asked over its sockets, and started as a user would, or forked."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nanocore.cli.main import main
from nanocore.demo_model import demo_model_folder
from tests.end_to_end import forked

EXIT_TIMEOUT_S = 60.0
DEMO = demo_model_folder()
MESSAGES = [{"role": "user", "content": "hi"}]
_URL = re.compile(r"listening at https?://(\S+):(\d+)|listening at unix:(\S+)")


class _UnixConnection(http.client.HTTPConnection):
    """To a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


class Served:
    """A server from its start to its end. log: the lines that were read of its stderr."""

    def __init__(self, process: subprocess.Popen[str] | forked.Program) -> None:
        self.process = process
        self.log: list[str] = []
        self.host, self.port, self.uds = _URL.search(self.line("listening at")).groups()  # type: ignore[union-attr]

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, text: str) -> str:
        """Wait for the next line of its log that has this text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in its log:\n{''.join(self.log)}")

    def wait_until_logged(self, text: str) -> None:
        """Wait until its log has this text, or has had it."""
        if not any(text in line for line in self.log):
            self.line(text)

    def engine_pids(self) -> list[int]:
        """The engines that its log has told of and that live, in the order of their start."""
        found = dict.fromkeys(re.findall(r"\(engine pid=(\d+)\)", "".join(self.log)))
        return [int(pid) for pid in found if Path(f"/proc/{pid}").exists()]

    def connect(self) -> http.client.HTTPConnection:
        """A new connection."""
        if self.uds is not None:
            return _UnixConnection(self.uds)
        return http.client.HTTPConnection(self.host, int(self.port))

    def get(self, path: str, key: str | None = None) -> tuple[int, Any]:
        """Status and JSON, over a connection of its own."""
        connection = self.connect()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        connection.close()
        return answer.status, body

    def ask(self, max_tokens: int = 4, **fields: Any) -> http.client.HTTPConnection:
        """Send a chat request; its answer is read from the connection."""
        connection = self.connect()
        body = {"messages": MESSAGES, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit(self) -> int:
        """Wait for its end; its exit code."""
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)
        return self.process.wait(EXIT_TIMEOUT_S)


def command(*arguments: str, port: str = "0") -> list[str]:
    """The command line of a server, by default at any port."""
    address = [] if "--uds" in arguments else ["--port", port]
    return [sys.executable, "-m", "nanocore", "serve", *arguments, *address]


@contextmanager
def serving(
    *arguments: str, python: str = sys.executable, cwd: Path | None = None
) -> Iterator[Served]:
    """Start a server, which listens then; ended with the block, whatever it does."""
    process = subprocess.Popen(
        [python, *command(*arguments)[1:]],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
    )
    with _ending(process):
        yield Served(process)


@contextmanager
def serving_forked(*arguments: str) -> Iterator[Served]:
    """The same with a server that is forked, as the engines that it launches are."""
    _, _, _, *words = command(*arguments)
    process = forked.Program(tuple(words), main)
    with _ending(process):
        yield Served(process)


@contextmanager
def _ending(process: subprocess.Popen[str] | forked.Program) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def run_to_exit(*arguments: str, port: str = "0") -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to exit by itself."""
    return subprocess.run(
        command(*arguments, port=port),
        capture_output=True,
        text=True,
        timeout=EXIT_TIMEOUT_S,
        check=False,
    )


def answered(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    """Status and JSON of the answer on this connection, which is closed then."""
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body


class Descendants:
    """The processes below a process, as they are now: held by descriptors, not by numbers."""

    def __init__(self, pid: int, *forks: int) -> None:
        self.pids = [*_below(pid), *forks]
        self._fds = [os.pidfd_open(pid) for pid in self.pids]

    def wait_until_all_end(self) -> None:
        for fd, pid in zip(self._fds, self.pids, strict=True):
            ended, _, _ = select.select([fd], [], [], EXIT_TIMEOUT_S)
            assert ended, f"process {pid} outlives its server"
            os.close(fd)


def children(pid: int) -> list[int]:
    """Of a process, in the order of their start."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _below(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _below(child)


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return caught.value.code
