"""The load of http_server.py, a process of its own: many streams at once, or requests one by one.

    python benchmarks/http_load.py < job.json

job: `port` and `path` to ask, `bodies` of requests as objects, `pids` whose CPU time counts, and
`tokens` that each request is to be answered with. Then

- streams: all bodies at once, whose answers are server-sent events. `is_steady`: what counts is the
  time in which all of them are answered, not their beginnings and ends; `text`: what every answer
  is a part of, or null if answers are no JSON.
- requests: with `connections`, on so many at once, one body after the other, `num` in all.

Prints one JSON object: what came and how long it took, `cpu_s` of the pids, and `own_cpu_s`.
While it measures it keeps bytes and looks at them afterwards, so that it costs little itself. CPU
times are the kernel's, in nanoseconds. Standard library only; Linux.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from typing import Any, Final, NamedTuple

_END: Final = b"0\r\n\r\n"  # of an answer in chunks
_NUM_BEGUN: Final = 8
"""Reads after which a stream decodes: its first bytes are the head, a role, a first token."""
_PAUSE_S: Final = 0.001
"""Between looks at the sockets: to wake a sleeping reader would be part of a server's write, and
what it costs depends on the machine."""
_RECEIVE_BYTES: Final = 1 << 15


class _Moment(NamedTuple):
    """Seconds, on the wall and of the server's and of our own CPU time."""

    wall_s: float
    cpu_s: float
    own_cpu_s: float


def main() -> None:
    """Do the job."""
    job: dict[str, Any] = json.load(sys.stdin)
    print(json.dumps(_requests(job) if "connections" in job else _streams(job)))


def _streams(job: dict[str, Any]) -> dict[str, Any]:
    sockets = [_connect(job) for _ in job["bodies"]]
    poller, parts = select.epoll(), {one.fileno(): list[bytes]() for one in sockets}
    by_number = {one.fileno(): one for one in sockets}
    num_waiting, num_open = len(sockets), len(sockets)
    first = last = None
    first_counts: dict[int, int] = dict.fromkeys(parts, 0)
    start = _moment(job["pids"])
    for one, body in zip(sockets, job["bodies"], strict=True):
        one.sendall(_request(job["path"], body))
        poller.register(one.fileno(), select.EPOLLIN)
    while num_open:
        time.sleep(_PAUSE_S)
        for number, _ in poller.poll(0):
            data, own = by_number[number].recv(_RECEIVE_BYTES), parts[number]
            own.append(data)
            if len(own) == _NUM_BEGUN:
                num_waiting -= 1
                if num_waiting == 0:
                    first, first_counts = _moment(job["pids"]), _counts(parts)
            if data.endswith(_END) or not data:
                if last is None:
                    last, last_counts = _moment(job["pids"]), _counts(parts)
                poller.unregister(number)
                num_open -= 1
    end = _moment(job["pids"])
    assert last is not None
    answers = [num_text_events(b"".join(own), job) for own in parts.values()]
    num_chunks = sum(answers)
    num_tokens = job["tokens"] * len(sockets)
    if job["is_steady"]:
        assert first is not None, "an answer ended before all of them had begun"
        start, end = first, last
        num_chunks = sum(
            own[i].count(b"data: ")
            for number, own in parts.items()
            for i in range(first_counts[number], last_counts[number])
        )
        num_tokens = num_chunks * num_tokens / sum(answers)
    middle = parts[sockets[0].fileno()]
    return {
        "tokens": num_tokens,
        "chunks": num_chunks,
        "chunk": middle[len(middle) // 2].decode(errors="replace"),
        **_spent(start, end),
    }


def _counts(parts: dict[int, list[bytes]]) -> dict[int, int]:
    return {number: len(own) for number, own in parts.items()}


def num_text_events(answer: bytes, job: dict[str, Any]) -> int:
    """How many events brought text; checks the answer."""
    assert answer.startswith(b"HTTP/1.1 200"), answer[:1000].decode(errors="replace")
    if job["text"] is None:
        return answer.count(b"data: ")
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: ")]
    assert lines.pop() == b"data: [DONE]", answer[-1000:].decode(errors="replace")
    events = [json.loads(line[6:]) for line in lines]
    num_tokens = next(each["usage"] for each in reversed(events) if each.get("usage"))
    assert num_tokens["completion_tokens"] == job["tokens"], num_tokens
    choices = [choice for each in events for choice in each["choices"]]
    texts = [each["text"] if "text" in each else each["delta"].get("content") for each in choices]
    text = "".join(filter(None, texts))[1:-1].strip("\ufffd")  # its ends may be half characters
    assert text
    assert text in job["text"] * (2 + len(text) // len(job["text"])), text
    return sum(bool(text) for text in texts)


def _requests(job: dict[str, Any]) -> dict[str, Any]:
    requests = [_request(job["path"], body) for body in job["bodies"]]
    poller = select.epoll()
    by_number: dict[int, socket.socket] = {}
    received: dict[int, tuple[bytes, float]] = {}
    latencies: list[float] = []
    answers: list[bytes] = []
    num_sent = 0
    start = _moment(job["pids"])

    def send(number: int) -> None:
        nonlocal num_sent
        received[number] = (b"", time.perf_counter())
        by_number[number].sendall(requests[num_sent % len(requests)])
        num_sent += 1

    for _ in range(min(job["connections"], job["num"])):
        one = _connect(job)
        by_number[one.fileno()] = one
        poller.register(one.fileno(), select.EPOLLIN)
        send(one.fileno())
    while len(answers) < job["num"]:
        time.sleep(_PAUSE_S)
        for number, _ in poller.poll(0):
            data = by_number[number].recv(_RECEIVE_BYTES)
            assert data, "the server has closed the connection"
            answer, start_s = received[number]
            received[number] = (answer + data, start_s)
            if _is_whole(answer + data):
                latencies.append(time.perf_counter() - start_s)
                answers.append(answer + data)
                if num_sent < job["num"]:
                    send(number)
    end = _moment(job["pids"])
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200"), answer[:1000].decode(errors="replace")
        usage = json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]
        assert usage["completion_tokens"] == job["tokens"], usage
    return {
        "requests": len(answers),
        "prompt_tokens": usage["prompt_tokens"],
        "p50_ms": sorted(latencies)[len(latencies) // 2] * 1e3,
        **_spent(start, end),
    }


def _is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    return bool(length) and len(body) >= int(length)


def _connect(job: dict[str, Any]) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", job["port"]))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def _request(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


def _moment(pids: list[int]) -> _Moment:
    # The clock of another process, all its threads: its number as clock_getcpuclockid(3) makes it.
    cpu_s = sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)
    return _Moment(time.perf_counter(), cpu_s, time.process_time())


def _spent(start: _Moment, end: _Moment) -> dict[str, float]:
    pairs = zip(_Moment._fields, start, end, strict=True)
    return {name: after - before for name, before, after in pairs}


if __name__ == "__main__":
    main()
