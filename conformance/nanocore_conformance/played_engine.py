"""An engine that is only played, to one client: a process that was started for one scenario.

What the client sends is judged by the strict decoder. Nothing is waited for longer than the
patience, and a client that exits early is noticed at once.
"""

from __future__ import annotations

import os
import queue
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from nanocore.protocol.codec import InvalidSubmitError, engine_decoder, pack_int32, unpack_int32
from nanocore.protocol.errors import ConfigError, ProtocolError
from nanocore.protocol.messages import Bye, Hello, Message, Op, Ping, Pong, Submit
from nanocore.protocol.sockets.engine_socket import EngineSocket
from nanocore.protocol.sockets.options import SendResult
from nanocore_conformance.report import BrokenError, require

Expected = TypeVar("Expected", bound=Message)
Body = dict[str, Any]
PROMPT = [1, 2, 3]
HANDLE = 7
_POLL_MS = 20
_START_S = 30.0  # a program may take long to start on a busy machine; that is no answer owed

WELCOME: Body = {
    "protocol": [1, 6],
    "session": "5c0e8c2f90d9aa41",
    "engine_instance": "00112233445566778899aabbccddeeff",
    "model": {
        "model": "/models/played",
        "architecture": "Played",
        "dtype": "float32",
        "vocab_size": 2**31 - 1,
        "max_model_len": 2**30,
        "eos_token_ids": [0],
        "block_size": 16,
        "num_blocks": 2**26,
        "default_sampling": {"temperature": 0.6},
        "files": [],
    },
    "limits": {
        "max_frame_bytes": 2**24,
        "max_num_seqs": 8,
        "max_request_id_chars": 256,
        "max_cache_salt_chars": 1024,
        "ping_interval_ms": 1000,
        "session_timeout_ms": 30_000,
        "max_num_queued_reqs": 100,
        "max_num_queued_tokens": None,
        "max_file_chunk_bytes": 65_536,
        "max_num_clients": 100,
        "max_logprobs": 20,
    },
    "capabilities": ["prefix_caching"],
}


def output_body(tokens: Mapping[int, Sequence[int]], *events: Body) -> Body:
    """OUTPUT with these tokens by handle; counts only where one is not one."""
    counts = [len(ids) for ids in tokens.values()]
    columns = {
        "handles": struct.pack(f"<{len(tokens)}I", *tokens),
        "tokens": pack_int32(token for ids in tokens.values() for token in ids),
    }
    body: Body = {name: column for name, column in columns.items() if column}
    if counts != [1] * len(counts):
        body["counts"] = struct.pack(f"<{len(counts)}I", *counts)
    return body | ({"events": list(events)} if events else {})


def logprobs_body(handle: int, tokens: Sequence[int]) -> Body:
    """A map of log probabilities in OUTPUT: of each token its own and that of token 1."""
    return {
        "handles": struct.pack(f"<{len(tokens)}I", *[handle] * len(tokens)),
        "ranks": struct.pack(f"<{len(tokens)}I", *[2] * len(tokens)),
        "counts": struct.pack(f"<{len(tokens)}I", *[2] * len(tokens)),
        "token_ids": pack_int32(part for token in tokens for part in (token, 1)),
        "logprobs": struct.pack(f"<{2 * len(tokens)}f", *[-1.5, -0.5] * len(tokens)),
    }


def end(reason: str = "length", **more: object) -> Body:
    """The event with which the client's request ends."""
    return {"handle": HANDLE, "finish_reason": reason} | more


class PlayedEngine:
    """Starts the client, and talks to it until it has gone.

    foreign: routing ids of earlier clients, whose last words may still arrive.
    """

    def __init__(
        self, socket: EngineSocket, command: list[str], patience_s: float, foreign: set[bytes]
    ) -> None:
        self._socket = socket
        self._patience_s = patience_s
        self._foreign = foreign
        self._routing_id: bytes | None = None
        self._said_bye = False
        self._is_over = False
        self._decoder = engine_decoder()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._stderr
            )
        except OSError as error:
            self._stderr.close()
            raise ConfigError(f"--client: {command[0]} cannot be run: {error.strerror}") from None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._printed: list[str] = []
        self._reader = threading.Thread(target=self._read_stdout, daemon=True)
        self._reader.start()

    def send(self, op: Op, body: Body) -> None:
        """Send a plain map."""
        self.send_frames([bytes([op]), msgspec.msgpack.encode(body)])

    def send_frames(self, frames: list[bytes]) -> None:
        """Send anything; a client that is gone takes nothing, which its exit will tell."""
        assert self._routing_id is not None, "the client speaks first"
        deadline_s = time.monotonic() + self._patience_s
        while self._socket.send(self._routing_id, frames) is SendResult.FULL:
            require(time.monotonic() < deadline_s, "the client to read", "a full queue")
            self._socket.wait(_POLL_MS)

    def expect(self, kind: type[Expected], what: str = "") -> Expected:
        """The client's next message, which must be of this kind; its PINGs are answered."""
        expected = f"{kind.op.name} {what}".strip()
        while True:
            message = self._receive(expected)
            if isinstance(message, kind):
                return message
            if isinstance(message, Ping):
                self.send(Op.PONG, {"nonce": message.nonce})
            else:
                require(isinstance(message, Pong), expected, message)

    def hello(self) -> None:
        """Wait for HELLO, which must be the first message."""
        hello = self._receive("HELLO as the first message", _START_S)
        ours = isinstance(hello, Hello) and hello.protocol[0] == 1
        require(ours, "HELLO of 1.x as the first message", hello)

    def submit(self, max_tokens: int) -> Submit:
        """Wait for the SUBMIT that the command line asks for."""
        submit = self.expect(Submit)
        ids = list(unpack_int32(submit.prompt_token_ids))
        require(ids == PROMPT, f"the prompt {PROMPT}", ids)
        sampling = submit.sampling
        if sampling is None or not sampling.greedy or sampling.max_tokens != max_tokens:
            expected = f"sampling with temperature 0 and max_tokens {max_tokens}"
            raise BrokenError(expected, sampling)
        require(1 <= len(submit.request_id) <= 256, "1 to 256 characters", submit.request_id)
        return submit

    def open(self, max_tokens: int, handle: int = HANDLE) -> None:
        """Play the engine up to a request that runs: from HELLO to ACCEPTED."""
        self.hello()
        self.send(Op.WELCOME, WELCOME)
        request_id = self.submit(max_tokens).request_id
        self.send(Op.ACCEPTED, {"request_id": request_id, "handle": handle, "seed": 0})

    def output(self, tokens: Sequence[int], *events: Body) -> None:
        """OUTPUT of the client's request."""
        self.send(Op.OUTPUT, output_body({HANDLE: tokens} if tokens else {}, *events))

    @contextmanager
    def held(self) -> Iterator[None]:
        """The client stands still meanwhile, and cannot leave before all is sent.

        What is sent to a client that has gone would cost its last words.
        """
        self._process.send_signal(signal.SIGSTOP)
        if self._process.poll() is None:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def ping_and_wait(self, wait_s: float) -> None:
        """PING and its PONG, and so long a pause that the next PING shows life, not haste."""
        self.send(Op.PING, {"nonce": 1})
        self.expect(Pong)
        deadline_s = time.monotonic() + wait_s
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            self._socket.wait(int(remaining_s * 1e3) + 1)
            if self._process.poll() is not None or self._take() is not None:
                break

    def prints(self, line: str) -> None:
        """Wait for the client's next line."""
        try:
            printed = self._lines.get(timeout=self._patience_s)
        except queue.Empty:
            raise BrokenError(f"a line {line!r} on stdout, at once", "none") from None
        self._printed.append(printed)
        require(printed == line, f"a line {line!r} on stdout", repr(printed))

    def leaves(self, tokens: Iterable[int], reason: str) -> None:
        """Wait for BYE as the last message, exit code 0, and these lines in all."""
        self.expect(Bye)
        self._said_bye = True
        code = self._exit_code()
        self._after_bye()
        require(code == 0, "exit code 0", f"{code}; {self.error_text()}")
        lines = [*map(str, tokens), f"finish_reason: {reason}"]
        printed = self._stdout()
        same = next(
            (i for i, pair in enumerate(zip(lines, printed, strict=False)) if pair[0] != pair[1]),
            min(len(lines), len(printed)),
        )
        wanted, got = lines[same : same + 3], printed[same : same + 3]
        require(lines == printed, f"from line {same + 1} on stdout: {wanted}", got)

    def gives_up(self, *words: str, timeout_s: float = 0.0) -> None:
        """Wait until the client exits with 1 and a line on stderr that has one of these words.

        It may connect anew meanwhile, to see what has become of the engine: nobody answers.
        """
        self._is_over = True
        code = self._exit_code(timeout_s)
        text = self.error_text()
        require(code == 1, "exit code 1", f"{code}; {text}")
        said = [line for line in text.splitlines() if line.strip()]
        require(bool(said), "a line on stderr that says so", "nothing")
        found = not words or any(word in text for word in words)
        require(found, f"a line on stderr with {' or '.join(map(repr, words))}", text)
        finished = [line for line in self._stdout() if line.startswith("finish_reason")]
        require(not finished, "no finish_reason on stdout", finished)

    def error_text(self) -> str:
        """What the client wrote to stderr."""
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace").strip()
        return text or "stderr is empty"

    def close(self) -> None:
        """End the client if it lives."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()
        if self._routing_id is not None:
            self._foreign.add(self._routing_id)
        self._socket.wait(0)
        while (received := self._socket.receive()) is not None:  # its last words, to nobody
            self._foreign.add(received[0])

    def _receive(self, expected: str, more_s: float = 0.0) -> Message:
        patience_s = self._patience_s + more_s
        deadline_s = time.monotonic() + patience_s
        while (frames := self._take()) is None:
            if self._process.poll() is not None:
                self._socket.wait(0)  # what it sent before it went is here, and may not be read
                if (frames := self._take()) is not None:
                    break
                got = f"its exit with {self._process.returncode}; {self.error_text()}"
                raise BrokenError(expected, got)
            waiting = time.monotonic() < deadline_s
            require(waiting, expected, f"nothing within {patience_s:g} s")
            self._socket.wait(_POLL_MS)
        try:
            return self._decoder.decode(frames)
        except (ProtocolError, InvalidSubmitError) as error:
            raise BrokenError(expected, error) from None

    def _take(self) -> list[bytes] | None:
        """The next message of this scenario's client."""
        while (received := self._socket.receive()) is not None:
            routing_id, frames = received
            if routing_id in self._foreign:
                continue
            if self._routing_id is None:
                self._routing_id = routing_id
            if self._is_over and routing_id != self._routing_id:
                self._foreign.add(routing_id)
                continue
            require(routing_id == self._routing_id, "one connection", "a second one")
            return frames
        return None

    def _exit_code(self, more_s: float = 0.0) -> int:
        """Wait for the client's end, taking its messages so that nothing holds it up."""
        deadline_s = time.monotonic() + self._patience_s + more_s
        while self._process.poll() is None:
            self._after_bye()
            text = f"none within {self._patience_s + more_s:g} s"
            require(time.monotonic() < deadline_s, "the client's exit", text)
            self._socket.wait(_POLL_MS)
        return self._process.returncode

    def _after_bye(self) -> None:
        while (frames := self._take()) is not None:
            shown = [frame[:20].hex() for frame in frames[:3]]
            require(not self._said_bye, "nothing after BYE", f"frames {shown}")

    def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.decode(errors="replace").rstrip("\r\n"))

    def _stdout(self) -> list[str]:
        """All lines of a client that has exited."""
        self._reader.join()
        while not self._lines.empty():
            self._printed.append(self._lines.get())
        return self._printed
