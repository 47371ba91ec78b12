"""`stream` in plain Python: ENDPOINT PROMPT MAX_TOKENS [SILENCE_S [DEFECT]], without the SDK.

Its defects are what checks of clients must find; each is named where it is.
"""

from __future__ import annotations

import sys
import time
from typing import Any, NoReturn

import msgspec

from nanocore.protocol.codec import client_decoder, pack_int32, unpack_output
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.messages import (
    Accepted,
    Bye,
    Error,
    Message,
    Op,
    Output,
    Ping,
    Refused,
    Welcome,
)
from nanocore_conformance.peer_socket import PeerSocket


class StreamClient:
    """One request, from HELLO to BYE."""

    def __init__(self, endpoint: str, silence_s: float, defect: str) -> None:
        self._socket = PeerSocket(endpoint)
        self._silence_s = silence_s
        self._defect = defect
        self._decoder = client_decoder()
        self._handle: int | None = None
        self._printed: list[int] = []

    def send(self, op: Op, body: dict[str, Any]) -> None:
        self._socket.send([bytes([op]), msgspec.msgpack.encode(body)])

    def receive(self) -> Message:
        """The next message that concerns the request."""
        deadline_s = time.monotonic() + self._silence_s
        while True:
            frames = self._socket.receive(deadline_s - time.monotonic())
            if frames is None:
                self.fail(f"the engine has been silent for {self._silence_s} s")
            if self._defect != "pings-do-not-count":
                deadline_s = time.monotonic() + self._silence_s
            if self._defect == "knows-1.4-only" and b"logprobs" in frames[1][:20]:
                self.fail("an unknown field")
            if self._defect == "strict" and b"new_in_9" in frames[1]:
                self.fail("an unknown field")
            try:
                message = self._decoder.decode(frames)
                if isinstance(message, Output):
                    unpack_output(message)
            except ProtocolError as error:
                if self._defect == "tolerant":
                    continue
                self.fail(str(error))
            match message:
                case Ping(nonce=nonce):
                    nonce = nonce % 2**32 if self._defect == "short-nonce" else nonce
                    if self._defect != "no-pong":
                        self.send(Op.PONG, {"nonce": nonce})
                case Error(code=code, message=text, retry_after_s=retry_after_s):
                    ours = message.request_id in (None, "r") or self._defect == "any-error"
                    text = "" if self._defect == "code-only" else text
                    if ours and self._defect != "ignores-errors":
                        self.fail(f"{code}: {text} {retry_after_s}")
                case Bye(reason=reason):
                    if self._defect != "ignores-bye":
                        self.fail(f"the engine says BYE: {reason}")
                case Refused(message=text):
                    self.fail("" if self._defect == "silent-refusal" else f"refused: {text}")
                case _:
                    return message

    def run(self, prompt: list[int], max_tokens: int) -> None:
        defect = self._defect
        if defect == "no-hello":
            self.send(Op.PING, {})
        extra = {"clientt": "x"} if defect == "unknown-field" else {}
        self.send(Op.HELLO, {"protocol": [1, 6]} | extra)
        welcome = self.receive()
        if not isinstance(welcome, Welcome) or welcome.protocol[0] != 1:
            self.fail(f"no WELCOME of 1.x, but {welcome}")
        if defect == "needs-1.3" and welcome.protocol < (1, 3):
            self.fail("too old")
        prompt = prompt[::-1] if defect == "wrong-prompt" else prompt
        column: Any = prompt if defect == "list-prompt" else pack_int32(prompt)
        sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens}
        if defect == "not-greedy":
            del sampling["temperature"]
        body = {"request_id": "r", "prompt_token_ids": column, "sampling": sampling}
        self.send(Op.SUBMIT, body)
        reason = None
        while reason is None:
            message = self.receive()
            if isinstance(message, Accepted):
                first = self._defect == "first-answer" and self._handle is None
                if not first and (message.request_id != "r" or defect == "first-answer"):
                    continue
                self._handle = message.handle or (None if defect == "no-zero" else 0)
            elif isinstance(message, Output):
                reason = self.take(message)
            elif defect == "replies-confuse":
                self.fail(f"unexpected {message}")
        self.leave(reason)

    def take(self, output: Output) -> str | None:
        handles, counts, tokens = unpack_output(output)
        reason = None
        for event in output.events:
            ours = event.handle == self._handle
            if self._defect == "all-samples" and event.handle > (self._handle or 0):
                ours = True
            if ours or self._defect == "all-handles":
                if self._defect == "one-thing-per-event" and event.num_cached_tokens is not None:
                    continue
                reason = event.finish_reason or reason
                if self._defect == "first-event-only":
                    break
        if reason and self._defect == "events-first":
            return reason
        if self._defect == "ignores-counts":
            counts = None
        start = 0
        for i, handle in enumerate(handles):
            stop = start + (1 if counts is None else counts[i])
            if stop == start and self._defect == "zero-is-one":
                stop += 1
            if handle == self._handle or self._defect == "all-handles":
                for token in tokens[start:stop]:
                    self.show(token)
            start = stop
        if reason and self._defect == "end-needs-tokens" and not tokens:
            return None
        return reason

    def show(self, token: int) -> None:
        self._printed.append(token)
        if self._defect == "small-memory" and len(self._printed) > 2000:
            return
        if self._defect != "late-print":
            print(token, flush=True)

    def leave(self, reason: str) -> NoReturn:
        reason = "length" if self._defect == "always-length" else reason
        if reason == "error" and self._defect == "errors-are-failures":
            self.fail("the request failed")
        if self._defect == "late-print":
            print(*self._printed, sep="\n")
        if self._defect != "no-reason":
            print(f"finish_reason: {reason}", flush=True)
        if self._defect != "no-bye":
            self.send(Op.BYE, {})
        if self._defect == "after-bye":
            self.send(Op.PING, {})
        self._socket.close()
        sys.exit(3 if self._defect == "wrong-exit" else 0)

    def fail(self, text: str) -> NoReturn:
        if self._defect != "silent":
            sys.stderr.write(text)
        self._socket.close()
        sys.exit(0 if self._defect == "fails-with-0" else 1)


def main() -> None:
    endpoint, prompt, max_tokens, *more = sys.argv[1:]
    silence_s = float(more[0]) if more else 10.0
    client = StreamClient(endpoint, silence_s, more[1] if len(more) > 1 else "")
    client.run([int(token) for token in prompt.split(",")], int(max_tokens))


if __name__ == "__main__":
    main()
