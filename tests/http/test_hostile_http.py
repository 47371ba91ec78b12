"""Whatever bytes come: no 5xx, no error in the log, nothing that hangs, nothing that is left."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any, Final

import pytest
import uvloop

from nanocore.http.routes import ROUTES
from tests.campaign import examples, in_campaign
from tests.client.running import in_uvloop, run
from tests.http.hostile_bodies import GOOD, mutated, no_bodies
from tests.http.raw_http import RawServer, get, post, raw_server

CHAT: Final = "/v1/chat/completions"
SMALL: Final = json.dumps(
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
).encode()
AT_ONCE: Final = 64
SHORT: Final = {"header_timeout_s": 0.1, "body_timeout_s": 0.1, "keep_alive_timeout_s": 0.1}
"""For a server whose clients do not close: how long nothing takes is of no interest."""


async def no_server_error(server: RawServer, requests: list[bytes]) -> list[int]:
    """Send each on a connection of its own, some at once; all statuses that came."""
    found: list[int] = []
    turns = iter(requests)

    async def sender() -> None:
        for request in turns:
            statuses = await server.statuses(request)
            assert all(200 <= status < 500 for status in statuses), request[:300]
            found.extend(statuses)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(sender())
    return found


def valid_requests() -> list[bytes]:
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (SMALL[:9], SMALL[9:]))
    stream = SMALL[:-1] + b', "stream": true}'
    return [
        get("/"),
        get("/v1/models/demo?a=b&c", "accept: */*"),
        get("/health", method="HEAD"),
        get("/metrics"),
        post(CHAT, SMALL),
        post(CHAT, stream),
        post(CHAT, SMALL) + get("/version") + post(CHAT, stream),
        b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%b0\r\n\r\n"
        % (CHAT.encode(), chunked),
    ]


@in_uvloop
async def test_requests_cut_at_every_byte(demo_endpoint: str) -> None:
    async with raw_server(demo_endpoint, **SHORT) as server:
        for request in (post(CHAT, SMALL), valid_requests()[-1]):
            cut = [request[:end] for end in range(len(request))]
            found = await no_server_error(server, cut)
            assert set(found) == {408}
        assert await server.statuses(post(CHAT, SMALL)) == [200]


@in_uvloop
async def test_requests_damaged_at_random(demo_endpoint: str) -> None:
    rng = random.Random(20)
    valid = valid_requests()
    words = [b"\r\n", b"\n", b"\x00", b":", b" ", b"\xff", b"HTTP/1.1", b"chunked", b"-1", b"\t"]

    def damaged() -> bytes:
        data = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 4)):
            start, end = sorted(rng.choices(range(len(data) + 1), k=2))
            end = min(end, start + rng.choice((0, 1, 8, 64)))
            data[start:end] = rng.choice(
                (b"", rng.randbytes(rng.randint(1, 8)), rng.choice(words), data[start:end] * 3)
            )
        return bytes(data)

    async with raw_server(demo_endpoint, **SHORT) as server:
        requests = [damaged() for _ in range(examples(3000))]
        requests += [rng.randbytes(rng.randint(0, 2000)) for _ in range(examples(500))]
        found = await no_server_error(server, requests)
        assert {200, 400, 404, 408} <= set(found)
        assert await server.statuses(post(CHAT, SMALL)) == [200]


ODD: Final[dict[str, tuple[bytes, set[int]]]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), {400}),
    "HTTP/1.0": (b"GET /version HTTP/1.0\r\n\r\n", {200}),
    "HTTP/0.9": (b"GET /\r\n", {400, 408}),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", {400}),
    "TRACE": (get("/version", method="TRACE"), {405}),
    "OPTIONS": (get(CHAT, "origin: http://x", method="OPTIONS"), {200, 204, 405}),
    "OPTIONS *": (get("*", method="OPTIONS"), {200, 204, 404, 405}),
    "CONNECT": (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", {400, 405}),
    "HEAD of a POST": (get(CHAT, method="HEAD"), {405}),
    "PUT": (get(CHAT, method="PUT"), {405}),
    "unknown method": (get("/", method="BREW"), {400, 405}),
    "websocket": (
        get("/v1/responses", "connection: upgrade", "upgrade: websocket",
            "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==", "sec-websocket-version: 13"),
        {404, 405},
    ),
    "encoded path": (get("/v1%2Fchat/completions"), {404, 405}),
    "encoded NUL": (get("/v1/models/%00%ff%0d%0a"), {404}),
    "broken escapes": (get("/v1/models/%zz%"), {404}),
    "dots": (get("/v1/models/../../../etc/passwd"), {404}),
    "slashes": (get("//v1//models"), {404}),
    "empty id": (get("/v1/models/"), {404}),
    "path of bytes": (b"GET /\xc3\xa9\xff HTTP/1.1\r\nhost: x\r\n\r\n", {400, 404}),
    "NUL in the path": (b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n", {400}),
    "whole URL": (get("http://x/version"), {200, 404}),
    "length twice": (post(CHAT, SMALL, f"content-length: {len(SMALL)}"), {400}),
    "two lengths": (post(CHAT, SMALL, "content-length: 1"), {400}),
    "length and chunked": (post(CHAT, SMALL, "transfer-encoding: chunked"), {400}),
    "length of words": (b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", {400}),
    "length of digits": (b"POST / HTTP/1.1\r\ncontent-length: 1%b\r\n\r\n" % (b"0" * 99), {400}),
    "chunk of words": (
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", {400, 405}
    ),
    "chunk too long": (
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd\r\n0\r\n\r\n", {400, 405}
    ),
    "chunk of all there is": (
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n%b\r\n" % (b"f" * 40), {400, 405}
    ),
    "compressed": (post(CHAT, SMALL, "content-encoding: gzip"), {415}),
    "many headers": (get("/", *(f"h{i}: {i}" for i in range(3000))), {200}),
    "too many headers": (get("/", *(f"h{i}: {i}" for i in range(20_000))), {431}),
    "long header": (get("/", "h: " + "x" * 200_000), {431}),
    "long path": (get("/" + "x" * 200_000), {414}),
    "folded header": (get("/version", "a: b\r\n c"), {200, 400}),
    "space before a colon": (get("/version", "a : b"), {400}),
    "request id of bytes": (get("/version", "x-request-id: \x7f\xe9"), {400}),
    "request id twice": (get("/version", "x-request-id: a", "x-request-id: b"), {200}),
    "origin of bytes": (get("/version", "origin: \xff\xfe"), {200}),
    "authorization of bytes": (get("/v1/models", "authorization: Bearer \xff"), {200}),
}  # fmt: skip


@in_uvloop
async def test_odd_requests_get_an_answer_that_fits(demo_endpoint: str) -> None:
    async with raw_server(demo_endpoint, **SHORT) as server:
        for name, (request, fitting) in ODD.items():
            found = await server.statuses(request)
            assert found, name
            assert set(found) <= fitting, (name, found)


@in_uvloop
async def test_a_client_that_waits_to_be_told_to_continue_is_told(demo_endpoint: str) -> None:
    async with raw_server(demo_endpoint) as server:
        client = await server.connect()
        head, _, body = post(CHAT, SMALL, "expect: 100-continue").partition(b"\r\n\r\n")
        client.writer.write(head + b"\r\n\r\n")
        assert (await client.answer()).status == 100
        assert (await client.ask(body)).status == 200
        client.leave()


@in_uvloop
async def test_pipelined_requests_are_answered_in_order(demo_endpoint: str) -> None:
    async with raw_server(demo_endpoint) as server:
        client = await server.connect()
        client.writer.write(
            get("/version") + post(CHAT, SMALL) + get("/nothing") + get("/", method="HEAD")
        )
        statuses = [(await client.answer(has_body)).status for has_body in (1, 1, 1, 0)]
        assert statuses == [200, 200, 404, 200]
        client.leave()


def test_every_endpoint_that_reads_a_body_is_attacked() -> None:
    assert set(GOOD) == {route.path for route in ROUTES if route.body is not None}


@pytest.mark.parametrize("path", [CHAT, *in_campaign(*(path for path in GOOD if path != CHAT))])
@in_uvloop
async def test_bodies_that_are_none_are_refused_and_cost_nothing(
    demo_endpoint: str, path: str
) -> None:
    served = {"keys twice", "small float", "less deep field", "long string", "escapes", "long key"}
    served |= {"keys", "too large a float", "digits"}

    async with raw_server(demo_endpoint) as server:
        client = await server.connect()
        for name, body in no_bodies(GOOD[path]).items():
            answer = await client.ask(post(path, body))
            assert answer.status in ({200, 400} if name in served else {400, 413}), name
            if answer.status != 200:
                assert json.loads(answer.body)["error"]["message"], name
            if answer.headers.get("connection") == "close":
                client.leave()
                client = await server.connect()
        assert (await client.ask(post(path, json.dumps(GOOD[path]).encode()))).status == 200
        client.leave()


def short(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """With few tokens to generate: more of them show no more."""
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    given = body.get(name)
    return {**body, name: 2} if name not in body or (type(given) is int and given > 2) else body


@pytest.mark.parametrize("path", GOOD)
def test_wrong_values_anywhere_are_refused_in_words(demo_endpoint: str, path: str) -> None:
    rng = random.Random(path)
    bodies = [mutated(rng, GOOD[path]) for _ in range(examples(600))]
    statuses: list[int] = []

    async def sender(server: RawServer, turns: Iterator[dict[str, Any]]) -> None:
        client = await server.connect()
        for body in turns:
            answer = await client.ask(post(path, json.dumps(short(path, body)).encode()))
            assert 200 <= answer.status < 500, (body, answer.body)
            if answer.status != 200:
                assert len(json.loads(answer.body)["error"]["message"]) > 10, body
            statuses.append(answer.status)
        client.leave()

    async def scenario() -> None:
        async with raw_server(demo_endpoint) as server:
            turns = iter(bodies)
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(sender(server, turns))

    run(scenario(), 60, uvloop.new_event_loop)
    assert {200, 400} <= set(statuses)
