"""The image's health check, behind the entry point, asks our HTTP server wherever it listens."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from nanocore.cli.serve.flags import DEFAULT_PORT, build_parser
from nanocore.http.server.http_server import HttpServer, ServerSettings
from tests.deploy.manifests import DEPLOY

Start = Callable[..., "subprocess.Popen[str]"]
UP: Final = ("sh", "-c", "echo up; read line", "nanocore", "serve", "/model")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck", DEPLOY / "healthcheck.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK: Final = load()


class App:
    """Answers with what a test sets, by path."""

    def __init__(self) -> None:
        self.status = {"/readyz": 503, "/livez": 200}
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        status = self.status[scope["path"]]
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the entry point with a command, in a container's stead; the health check finds it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # as a Docker client may be told to set
    started = []

    def start(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["sh", str(DEPLOY / "entrypoint.sh"), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.communicate("", timeout=60)


def checked(app: App, flags: Callable[[int], list[str]], start: Start, **settings: Any) -> None:
    """Not ready, ready, and from then on alive or not: what the check says, and what it asks."""

    async def scenario() -> None:
        server = HttpServer(app, ServerSettings(**settings))
        listening = socket.create_server(("127.0.0.1", 0))
        await server.start([listening])
        start(*UP, *flags(listening.getsockname()[1]))
        found = [await asyncio.to_thread(CHECK.main)]
        app.status["/readyz"] = 200
        found.append(await asyncio.to_thread(CHECK.main))
        app.status["/readyz"] = 503  # its engine is replaced, or it drains
        found.append(await asyncio.to_thread(CHECK.main))
        app.status["/livez"] = 500
        found.append(await asyncio.to_thread(CHECK.main))
        await server.close()
        found.append(await asyncio.to_thread(CHECK.main))
        assert found == [1, 0, 0, 1, 1]
        assert app.asked == ["/readyz", "/readyz", "/livez", "/livez"]

    asyncio.run(scenario())


@pytest.mark.parametrize("flags", [["--host=0.0.0.0", "--port={}"], ["--port", "{}"]], ids=str)
def test_who_was_ready_once_is_healthy_as_long_as_it_lives(flags: list[str], start: Start) -> None:
    checked(App(), lambda port: [flag.format(port) for flag in flags], start)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of a name that nobody asks for, signed by itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    make = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    make += ["-nodes", "-subj", "/CN=models.example", "-keyout", key, "-out", certificate]
    subprocess.run(make, check=True, capture_output=True)
    return certificate, key


def test_a_server_with_tls_is_asked_over_tls(certificate: tuple[str, str], start: Start) -> None:
    settings = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=True))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    checked(App(), lambda port: [*flags, f"--port={port}"], start, **settings)


def test_who_wants_certificates_of_clients_is_healthy_if_it_shakes_hands(
    certificate: tuple[str, str], start: Start
) -> None:
    async def scenario() -> None:
        settings = ServerSettings(
            ssl_certfile=certificate[0], ssl_keyfile=certificate[1],
            ssl_ca_certs=certificate[0], ssl_cert_reqs=ssl.CERT_REQUIRED,
        )  # fmt: skip
        server = HttpServer(App(), settings)
        listening = socket.create_server(("127.0.0.1", 0))
        await server.start([listening])
        flags = [f"--ssl-certfile={certificate[0]}", f"--ssl-ca-certs={certificate[0]}"]
        start(*UP, *flags, f"--port={listening.getsockname()[1]}")
        assert await asyncio.to_thread(CHECK.main) == 0
        await server.close()
        assert await asyncio.to_thread(CHECK.main) == 1

    asyncio.run(scenario())


def test_a_container_that_is_started_again_has_to_be_ready_again(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / f"nanocore-{os.getuid()}"
    start(*UP)
    (folder / "was-ready").touch()
    start(*UP)
    assert not (folder / "was-ready").exists()


def test_who_has_ended_is_not_healthy(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(*UP).communicate("")
    assert CHECK.main() == 1
    assert "the server is not there" in capsys.readouterr().err


def test_a_container_with_another_command_is_not_asked(start: Start) -> None:
    start("sh", "-c", "echo up; read line", "nanocore", "metrics", "--metrics-port=9400")
    assert CHECK.main() == 0


def test_what_it_knows_of_flags_is_what_the_server_knows() -> None:
    given = CHECK.read_flags(["--max-num-seqs=4", "--served-model-name", "port"])
    assert (given.host, given.port) == ("127.0.0.1", DEFAULT_PORT)
    ours = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert {f"--{name.replace('_', '-')}" for name in vars(given)} <= ours


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For temporary files, as in a container: the address of an engine below it has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="nc-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_a_server_at_a_unix_socket_is_healthy_when_it_is_ready(short_folder: Path) -> None:
    """The real server: from its start, through its engine's death, to its end."""
    program = Path(sys.executable).with_name("nanocore")
    server = subprocess.Popen(
        ["sh", str(DEPLOY / "entrypoint.sh"), str(program), "serve",
         f"--uds={short_folder / 'http.sock'}"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def wait_for(text: str) -> None:
        assert server.stderr is not None
        seen = [server.stderr.readline()]
        while text not in seen[-1]:
            assert seen[-1], seen
            seen.append(server.stderr.readline())

    try:
        wait_for("listening at")
        assert CHECK.main() == 1, "it loads"
        wait_for("ready: ")
        assert CHECK.main() == 0
        (engine,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(engine), signal.SIGKILL)
        assert CHECK.main() == 0, "its engine is replaced"
        wait_for("serving again")
        assert CHECK.main() == 0
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0
