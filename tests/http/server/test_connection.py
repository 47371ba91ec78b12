"""HttpConnection over loopback: limits, deadlines, what is no HTTP, and who is told of an end."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from nanocore.http.exchange import CHUNK_WRITER
from nanocore.http.server.http_connection import MAX_PIPELINED, MAX_URL_BYTES
from tests.client.running import in_uvloop
from tests.http.server.loopback import GET, RecordingApp, connected, serving

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
CLOSING_GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def error_of(body: bytes) -> dict[str, object]:
    error = json.loads(body)["error"]
    assert isinstance(error, dict)
    return error


def post(path: str, body: bytes, *headers: str) -> bytes:
    head = "\r\n".join(
        [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    )
    return head.encode() + b"\r\n\r\n" + body


@in_uvloop
async def test_requests_follow_one_another_on_a_connection() -> None:
    app = RecordingApp()
    async with connected(app) as (_, client):
        for body in (b"", b"abc", bytes(300_000)):
            status, answer = await client.ask(post("/a%20b?c=d", body))
            assert (status, json.loads(answer)) == (200, {"path": "/a b", "bytes": len(body)})
        assert app.scopes[0]["query_string"] == b"c=d"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET http:// HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", 400),
        (b"GET http://y/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET http://x:81/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET http://x@y/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET http://[/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET http://x/ HTTP/1.0\r\n\r\n", 400),
        (b"GET ftp://x/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET http://x:443/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (CHUNKED.replace(b"chunked", b"gzip, chunked"), 400),
        (CHUNKED.replace(b"chunked", b"gzip\r\ntransfer-encoding: chunked"), 400),
        (CHUNKED.replace(b"chunked", b"gzip"), 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", 400),
        (CHUNKED[:-2] + b"content-length: 1\r\n\r\n", 400),
        (CHUNKED + b"zz\r\n", 400),
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"GET /" + b"a" * MAX_URL_BYTES + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\na: " + b"a" * 3000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n", 431),
    ],
)
@in_uvloop
async def test_what_is_no_request_is_answered_in_json_and_closed(
    request_bytes: bytes, status: int
) -> None:
    """At once, and the same where it comes byte by byte."""
    app = RecordingApp()
    async with serving(app, max_header_bytes=2000 if status == 431 else 65536) as server:
        for pieces in ([request_bytes], [bytes([byte]) for byte in request_bytes]):
            client = await server.connect()
            for piece in pieces:
                if client.writer.is_closing():
                    break
                client.writer.write(piece)
                await asyncio.sleep(0)
            answered, body = await client.answer()
            assert answered == status
            assert error_of(body)["type"] == "invalid_request_error"
            assert await client.rest() == b""
    assert app.bodies == []


def endless(kind: str) -> Iterator[bytes]:
    """A beginning, and then more of one field or line than anybody may send."""
    yield {
        "url": b"GET /",
        "name": b"GET / HTTP/1.1\r\nhost: x\r\nx",
        "value": b"GET / HTTP/1.1\r\nhost: x\r\nx: ",
        "fields": b"GET / HTTP/1.1\r\nhost: x\r\n",
        "empty lines": b"\r\n",
        "trailer": CHUNKED + b"1\r\na\r\n0\r\nx: ",
        "trailers": CHUNKED + b"1\r\na\r\n0\r\n",
        "extension": CHUNKED + b"1;a=",
    }[kind]
    piece = {"fields": b"a: b\r\n", "trailers": b"a: b\r\n", "empty lines": b"\r\n"}.get(
        kind, b"aaaa"
    )
    while True:
        yield piece * 50


@pytest.mark.parametrize(
    "kind",
    ["url", "name", "value", "fields", "empty lines", "trailer", "trailers", "extension"],
)
@in_uvloop
async def test_headers_that_do_not_end_are_refused_over_many_small_reads(kind: str) -> None:
    async with connected(RecordingApp(), max_header_bytes=2000) as (server, client):
        num_bytes = 0
        for piece in endless(kind):
            client.writer.write(piece)
            num_bytes += len(piece)
            await asyncio.sleep(0)
            if client.reader.at_eof() or client.reader._buffer:  # type: ignore[attr-defined]
                break
            assert num_bytes < 100 * 2**20
        status, _ = await client.answer()
        assert status in (414, 431)
        assert await client.rest() == b""
        await server.all_gone()


@in_uvloop
async def test_trailers_are_not_taken_for_headers() -> None:
    app = RecordingApp()
    async with connected(app) as (_, client):
        status, _ = await client.ask(
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
            b"authorization: Bearer x\r\n\r\n"
        )
        assert (status, app.bodies) == (200, [b"abc"])
        assert [name for name, _ in app.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]
        assert (await client.ask(GET))[0] == 200


@pytest.mark.parametrize(
    ("beginning", "status"),
    [
        (b"", None),
        (b"GET / HT", 408),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", 408),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc", 408),
        (CHUNKED + b"3\r\nabc\r\n", 408),
        (GET + b"GET", 408),
    ],
)
@in_uvloop
async def test_what_does_not_come_to_its_end_is_ended(beginning: bytes, status: int | None) -> None:
    app = RecordingApp()
    async with connected(app, header_timeout_s=0.2, body_timeout_s=0.2) as (server, client):
        client.writer.write(beginning)
        if beginning.startswith(GET):
            assert (await client.answer())[0] == 200
        if status is not None:
            answered, body = await client.answer()
            assert answered == status
            assert "did not arrive within 0.2 s" in str(error_of(body)["message"])
        assert await client.rest() == b""
        await server.all_gone()
    assert app.num_disconnects == (1 if beginning.startswith(b"POST") else 0)


@in_uvloop
async def test_a_connection_that_asks_nothing_more_is_closed() -> None:
    async with connected(RecordingApp(), keep_alive_timeout_s=0.1) as (_, client):
        assert (await client.ask(GET))[0] == 200
        assert await client.rest() == b""


def refusing(*headers: tuple[bytes, bytes]) -> Any:
    """An app that answers 413 before it reads."""

    async def refuse(scope: object, receive: object, send: Any) -> None:
        start = [(b"content-length", b"0"), *headers]
        await send({"type": "http.response.start", "status": 413, "headers": start})
        await send({"type": "http.response.body", "body": b""})

    return refuse


@in_uvloop
async def test_a_body_that_comes_after_its_answer_is_read_and_the_connection_goes_on() -> None:
    """And is closed in the end."""
    async with connected(refusing(), keep_alive_timeout_s=0.3) as (_, client):
        message = post("/", bytes(1_000_000))
        client.writer.write(message[:1000])
        assert (await client.answer())[0] == 413
        client.writer.write(message[1000:])
        assert (await client.ask(GET))[0] == 413
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET http://x:80/a HTTP/1.1\r\nhost: X\r\n\r\n",
        b"GET http://x/a?b HTTP/1.1\r\nhost: x:80\r\n\r\n",
        b"GET HTTPS://x:443/a HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://X:8000/a?b HTTP/1.1\r\nhost: x:8000\r\n\r\n",
        b"GET http://[::1]:8000/a HTTP/1.1\r\nhost: [::1]:8000\r\n\r\n",
        b"GET /a HTTP/1.0\r\n\r\n",
    ],
)
@in_uvloop
async def test_a_target_may_name_the_host_and_http_1_0_needs_none(request_bytes: bytes) -> None:
    async with connected(RecordingApp()) as (_, client):
        status, answer = await client.ask(request_bytes)
        assert (status, json.loads(answer)["path"]) == (200, "/a")


@pytest.mark.parametrize("target", [b"http://x", b"http://x:80", b"http://x?b=c"])
@in_uvloop
async def test_a_target_that_is_a_host_alone_asks_for_the_root(target: bytes) -> None:
    app = RecordingApp()
    async with connected(app) as (_, client):
        status, answer = await client.ask(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
        assert (status, json.loads(answer)["path"]) == (200, "/")
        assert app.scopes[0]["query_string"] == target.partition(b"?")[2]


@pytest.mark.parametrize("behind", [b"", GET])
@in_uvloop
async def test_the_last_answer_of_a_connection_reaches_a_client_that_is_still_sending(
    behind: bytes,
) -> None:
    """Of several megabytes, which are more than sockets hold: the client reads when it has sent."""
    async with connected(refusing((b"connection", b"close"))) as (_, client):
        client.writer.write(post("/", bytes(20_000_000)) + behind)
        await client.writer.drain()
        assert (await client.answer())[0] == 413
        assert await client.rest() == b"", "what is behind it is not served"


@pytest.mark.parametrize(("headers", "later"), [([(b"connection", b"close")], []), ([], [408])])
@in_uvloop
async def test_a_body_that_never_ends_after_its_answer_is_cut(headers: Any, later: Any) -> None:
    async with connected(refusing(*headers), body_timeout_s=0.2) as (_, client):
        client.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        for status in [413, *later]:
            assert (await client.answer())[0] == status
        assert await client.rest() == b""


@in_uvloop
async def test_nonsense_behind_a_request_does_not_disturb_its_response() -> None:
    app = RecordingApp()
    async with connected(app) as (server, client):
        client.writer.write(post("/hold", b""))
        await app.began.wait()
        client.writer.write(b"\x00\x01\x02 no request\r\n\r\n")
        (connection,) = server.server.state.connections
        while not connection._is_deaf:  # type: ignore[union-attr]
            await asyncio.sleep(0)
        app.release.set()
        assert (await client.answer())[0] == 200
        status, body = await client.answer()
        assert (status, error_of(body)["message"]) == (400, "invalid HTTP/1.1 request")
        assert await client.rest() == b""


@in_uvloop
async def test_requests_that_wait_for_a_response_are_answered_in_order() -> None:
    app = RecordingApp()
    async with connected(app) as (_, client):
        client.writer.write(b"".join(post(f"/{number}", b"x") for number in range(MAX_PIPELINED)))
        for number in range(MAX_PIPELINED):
            assert json.loads((await client.answer())[1])["path"] == f"/{number}"


@in_uvloop
async def test_too_many_requests_that_wait_cost_the_connection_and_not_the_responses() -> None:
    app = RecordingApp()
    async with connected(app) as (_, client):
        client.writer.write(post("/hold", b"") + GET * 1000)
        await app.began.wait()
        app.release.set()
        answers = [await client.answer() for _ in range(MAX_PIPELINED + 2)]
        assert [status for status, _ in answers] == [200] * (MAX_PIPELINED + 1) + [400]
        assert await client.rest() == b""
        assert len(app.scopes) == MAX_PIPELINED + 1


@pytest.mark.parametrize(
    "behind",
    [b"\x00nonsense\r\n\r\n", GET[:-2] + b"\x00\r\n\r\n", post("/bad", b"x", "a: b", "host: y")],
)
@in_uvloop
async def test_whole_requests_before_a_bad_one_are_answered(behind: bytes) -> None:
    app = RecordingApp()
    async with connected(app) as (_, client):
        client.writer.write(post("/hold", b"") + post("/1", b"x") + GET + behind + GET)
        await app.began.wait()
        app.release.set()
        answers = [await client.answer() for _ in range(4)]
        assert [status for status, _ in answers] == [200, 200, 200, 400]
        assert await client.rest() == b""
        assert [scope["path"] for scope in app.scopes] == ["/hold", "/1", "/"]


@pytest.mark.parametrize("behind", [b"", GET, GET[:10], b"\x00nonsense\r\n\r\n"])
@in_uvloop
async def test_a_request_hears_that_its_connection_is_lost_whatever_came_behind_it(
    behind: bytes,
) -> None:
    app = RecordingApp()
    async with connected(app) as (server, client):
        client.writer.write(post("/hold", b"") + behind)
        await app.began.wait()
        client.writer.close()
        await app.disconnected.wait()
        await server.all_gone()
        assert len(app.scopes) == 1


@pytest.mark.parametrize("body", [b"", b'{"a": 1}', bytes(200_000)])
@in_uvloop
async def test_an_offer_of_http2_is_ignored_and_costs_no_body(body: bytes) -> None:
    app = RecordingApp()
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABk")
    async with connected(app) as (_, client):
        for _ in range(2):
            assert (await client.ask(post("/x", body, *offer)))[0] == 200
    assert app.bodies == [body, body]


@in_uvloop
async def test_one_connection_too_many_is_told_so() -> None:
    async with serving(RecordingApp(), max_connections=1) as server:
        first = await server.connect()
        assert (await first.ask(GET))[0] == 200
        second = await server.connect()
        status, body = await second.answer()
        assert (status, error_of(body)["type"]) == (503, "server_error")
        assert await second.rest() == b""
        assert (await first.ask(GET))[0] == 200


@in_uvloop
async def test_chunks_written_without_send_are_those_of_the_response() -> None:
    refused = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        write = scope["extensions"][CHUNK_WRITER]
        refused.append(write(b"too early"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert write(b"one")
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        refused.append(write(b"too late"))

    async with connected(app) as (_, client):
        client.writer.write(CLOSING_GET)
        assert (await client.rest()).endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    assert refused == [False] * 2


@in_uvloop
async def test_answers_to_head_and_those_of_a_known_length_have_no_chunks() -> None:
    async def app(scope: dict[str, dict[str, Any]], receive: object, send: Any) -> None:
        headers = [(b"content-length", b"3")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        write = scope["extensions"][CHUNK_WRITER]
        assert not write(b"one")
        await send({"type": "http.response.body", "body": b"two"})

    async with serving(app) as server:
        for method, body in ((b"GET", b"two"), (b"HEAD", b"")):
            client = await server.connect()
            client.writer.write(CLOSING_GET.replace(b"GET", method))
            assert (await client.rest()).partition(b"\r\n\r\n")[2] == body


@in_uvloop
async def test_a_client_that_does_not_read_gets_no_chunk_until_it_does() -> None:
    written = []
    is_full = asyncio.Event()

    async def app(scope: dict[str, dict[str, Any]], receive: object, send: Any) -> None:
        write = scope["extensions"][CHUNK_WRITER]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while write(bytes(65536)):
            written.append(65536)
        is_full.set()
        await send({"type": "http.response.body", "body": b"end"})

    async with connected(app) as (_, client):
        client.writer.write(CLOSING_GET)
        await is_full.wait()
        assert sum(written) < 32 * 2**20
        body = await client.rest()
        assert body.count(bytes(65536)) == len(written)
        assert body.endswith(b"3\r\nend\r\n0\r\n\r\n")


@in_uvloop
async def test_a_client_that_takes_nothing_for_too_long_is_cut() -> None:
    disconnected = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):  # more than sockets and buffers hold
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        disconnected.set()

    async with connected(app, send_timeout_s=0.05) as (server, client):
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(GET)
        await disconnected.wait()
        client.writer.transport.abort()
        await server.all_gone()


@in_uvloop
async def test_no_bytes_at_all_break_or_leak_anything() -> None:
    """Parts of messages in any order, cut and altered anywhere, and dropped at a random byte."""
    rng = random.Random(1)
    parts = [
        GET, post("/", b"abc"), post("/", b"abc", "expect: 100-continue"),
        CHUNKED + b"3\r\nabc\r\n0\r\nx: y\r\n\r\n",
        post("/", b"a", "connection: upgrade", "upgrade: websocket"), b"\r\n", b"\x00", b"a: b\r\n",
        b"GET / HTTP/1.0\r\n\r\n", b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ]  # fmt: skip

    def message() -> bytearray:
        data = bytearray(b"".join(rng.choices(parts, k=rng.randint(1, 5))))
        for _ in range(rng.choice([0, 0, 1, 3])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return data[: rng.randint(1, len(data))]

    async with serving(RecordingApp(), header_timeout_s=0.1, body_timeout_s=0.1) as server:
        for _ in range(500):
            client = await server.connect()
            for piece in (message(), message()):
                client.writer.write(piece)
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                client.writer.transport.abort()
            else:
                client.writer.close()
        client = await server.connect()
        assert (await client.ask(GET))[0] == 200
        client.writer.close()
        await server.all_gone()
