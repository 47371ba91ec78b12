"""HttpServer: its end, with what runs; and TLS."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nanocore.http.server.http_server import HttpServer
from nanocore.http.server_settings import ServerSettings
from nanocore.protocol.errors import ConfigError
from tests.client.running import in_uvloop
from tests.http.server.loopback import GET, Client, RecordingApp, serving

HOLD = GET.replace(b"/ ", b"/hold ")


@in_uvloop
async def test_a_drain_waits_for_what_runs_and_answers_others_meanwhile() -> None:
    app = RecordingApp()
    async with serving(app) as loopback:
        idle, running = await loopback.connect(), await loopback.connect()
        assert (await idle.ask(GET))[0] == 200
        running.writer.write(HOLD)
        await app.began.wait()
        draining = asyncio.create_task(loopback.server.drain(60.0))
        assert await idle.rest() == b""
        late = await loopback.connect()
        assert (await late.ask(GET))[0] == 200
        assert await late.rest() == b"", "a connection outlives the server's last response"
        assert not draining.done()
        app.release.set()
        assert (await running.answer())[0] == 200
        assert await running.rest() == b""
        assert await draining
        with pytest.raises(ConnectionRefusedError):
            await loopback.connect()


@in_uvloop
async def test_a_drain_ends_when_its_time_is_over_and_what_is_left_hears_of_it() -> None:
    app = RecordingApp()
    async with serving(app) as loopback:
        client = await loopback.connect()
        client.writer.write(HOLD)
        await app.began.wait()
        assert not await loopback.server.drain(0.0)
        await loopback.server.close()
        assert app.disconnected.is_set()
        assert await client.rest() == b""
        assert not loopback.server.state.tasks


@in_uvloop
async def test_an_answer_that_is_read_slowly_is_part_of_a_drain() -> None:
    answer = bytes(8 * 2**20)

    async def app(scope: object, receive: object, send: Any) -> None:
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async with serving(app) as loopback:
        client = await loopback.connect()
        client.writer.write(GET)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        draining = asyncio.create_task(loopback.server.drain(60.0))
        assert len(await client.rest()) == len(answer)
        assert await draining


@in_uvloop
async def test_a_refusal_during_a_drain_reaches_a_client_that_is_still_sending() -> None:
    async def refuse(scope: object, receive: object, send: Any) -> None:
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async with serving(refuse) as loopback:
        client = await loopback.connect()
        client.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\nabc")
        assert (await client.answer())[0] == 503
        draining = asyncio.create_task(loopback.server.drain(60.0))
        with suppress(ConnectionRefusedError):
            while True:
                (await loopback.connect()).writer.close()
        assert not draining.done()
        client.writer.write(b"def")
        assert await client.rest() == b""
        assert await draining


@in_uvloop
async def test_answers_have_a_date_and_do_not_name_a_server() -> None:
    async with serving(RecordingApp()) as loopback:
        client = await loopback.connect()
        client.writer.write(GET)
        head = (await client.reader.readuntil(b"\r\n\r\n")).lower()
        assert b"\r\ndate: " in head
        assert b"server:" not in head


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, signed by itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def tls(certificate: tuple[Path, Path], **settings: object) -> ServerSettings:
    return ServerSettings(
        ssl_certfile=str(certificate[0]),
        ssl_keyfile=str(certificate[1]),
        **settings,  # type: ignore[arg-type]
    )


@in_uvloop
async def test_tls_is_served_and_what_is_none_is_cut(certificate: tuple[Path, Path]) -> None:
    app = RecordingApp()
    settings = tls(certificate)
    assert settings.scheme == "https"
    server = HttpServer(app, settings)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    await server.start([listening])
    plain = Client(*await asyncio.open_connection("127.0.0.1", port))
    plain.writer.write(GET)
    assert b"HTTP" not in await plain.rest()
    trust = ssl.create_default_context(cafile=certificate[0])
    streams = await asyncio.open_connection(
        "127.0.0.1", port, ssl=trust, server_hostname="localhost"
    )
    client = Client(*streams)
    assert (await client.ask(GET))[0] == 200
    status, _ = await client.ask(b"no request\r\n\r\n")
    assert status == 400
    assert await client.rest() == b""
    assert app.scopes[0]["scheme"] == "https"
    await server.close()


@in_uvloop
async def test_clients_without_a_certificate_are_refused_where_one_is_needed(
    certificate: tuple[Path, Path],
) -> None:
    app = RecordingApp()
    server = HttpServer(
        app,
        tls(certificate, ssl_ca_certs=str(certificate[0]), ssl_cert_reqs=ssl.CERT_REQUIRED),
    )
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    await server.start([listening])
    trust = ssl.create_default_context(cafile=certificate[0])
    name = {"server_hostname": "localhost"}
    with suppress(ssl.SSLError, ConnectionError):
        stranger = Client(*await asyncio.open_connection("127.0.0.1", port, ssl=trust, **name))  # type: ignore[arg-type]
        stranger.writer.write(GET)
        assert await stranger.reader.read() == b""
    assert not app.scopes
    trust.load_cert_chain(*certificate)
    client = Client(*await asyncio.open_connection("127.0.0.1", port, ssl=trust, **name))  # type: ignore[arg-type]
    assert (await client.ask(GET))[0] == 200
    client.writer.close()
    await server.close()


def test_files_that_tls_cannot_use_are_named(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    other = tmp_path / "none.pem"
    for flag, files in (
        ("certfile", (other, certificate[1])),
        ("keyfile", (certificate[0], other)),
    ):
        with pytest.raises(ConfigError) as caught:
            HttpServer(RecordingApp(), tls(files))
        assert str(caught.value) == f"--ssl-{flag} {other}: No such file or directory"
    other.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"^--ssl-certfile \S*: .*TLS needs PEM files"):
        HttpServer(RecordingApp(), ServerSettings(ssl_certfile=str(other)))
