"""`nanocore serve` that joins an engine: its start and ends, its workers, the end of the engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.paused_engine import paused
from tests.cli.served import DEMO, answered, children, run_to_exit, serving
from tests.end_to_end import forked


@pytest.fixture(scope="module")
def engine() -> Iterator[forked.Engine]:
    with forked.engine(DEMO) as running:
        yield running


@pytest.mark.parametrize(
    ("number", "exit_code", "num_workers"),
    [
        (signal.SIGTERM, 0, 1),
        (signal.SIGINT, 130, 2),
        pytest.param(signal.SIGTERM, 0, 2, marks=pytest.mark.campaign),
        pytest.param(signal.SIGINT, 130, 1, marks=pytest.mark.campaign),
    ],
)
def test_a_signal_lets_responses_end_and_leaves_the_engine_alone(
    engine: forked.Engine, number: signal.Signals, exit_code: int, num_workers: int
) -> None:
    with serving("--endpoint", engine.endpoint, "--http-workers", str(num_workers)) as server:
        server.line("ready: ")
        with paused(engine.endpoint) as held:
            running = server.ask()
            held.wait_for(1)
            server.signal(number)
            server.line("waiting up to 25 s for running responses")
            if num_workers == 1:
                assert server.get("/livez")[0] == 200
                assert server.get("/readyz")[0] == 503
                assert answered(server.ask())[0] == 503
            held.resume()
            status, answer = answered(running)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        assert server.exit() == exit_code
        assert "Traceback" not in "".join(server.log)
    os.kill(engine.pid, 0)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_second_signal_ends_at_once(engine: forked.Engine, num_workers: int) -> None:
    with serving("--endpoint", engine.endpoint, "--http-workers", str(num_workers)) as server:
        server.line("ready: ")
        with paused(engine.endpoint) as held:
            running = server.ask()
            held.wait_for(1)
            server.signal(signal.SIGTERM)
            server.line("another signal exits at once")
            server.signal(signal.SIGTERM)
            assert server.exit() == 130
            with pytest.raises(ConnectionError):
                running.getresponse()
            running.close()
            held.wait_for(0)


@pytest.mark.campaign
def test_responses_that_take_too_long_end_with_an_error(engine: forked.Engine) -> None:
    with serving("--endpoint", engine.endpoint, "--shutdown-timeout", "0.1") as server:
        server.line("ready: ")
        with paused(engine.endpoint) as held:
            running = server.ask()
            held.wait_for(1)
            server.signal(signal.SIGTERM)
            server.line("were cut")
            assert server.exit() == 0
            status, body = answered(running)
            assert (status, body["error"]["code"]) == (503, "unavailable")
            held.wait_for(0)


def test_a_worker_that_dies_is_replaced_and_its_callers_wait(engine: forked.Engine) -> None:
    with serving("--endpoint", engine.endpoint, "--http-workers", "2") as server:
        server.line("ready: ")
        first, second = children(server.pid)
        os.kill(first, signal.SIGKILL)
        waiting = [server.connect() for _ in range(32)]
        for connection in waiting:
            connection.request("GET", "/livez")
        assert f"pid {first}" in server.line("restarting in")
        for connection in waiting:
            assert answered(connection)[0] == 200
        assert second in children(server.pid)
        assert first not in children(server.pid)
        server.signal(signal.SIGTERM)
        assert server.exit() == 0


@pytest.mark.campaign
def test_a_server_that_joined_an_engine_outlives_it(short_path: Path) -> None:
    endpoint = f"ipc://{short_path}/e/engine.sock"
    with ExitStack() as stack:
        with forked.engine(DEMO, endpoint=endpoint) as first:
            server = stack.enter_context(serving("--endpoint", endpoint))
            server.line("ready: ")
            assert answered(server.ask())[0] == 200
            os.kill(first.pid, signal.SIGKILL)
            waiting = server.ask()
            while server.get("/readyz")[0] == 200:
                pass
        assert server.get("/livez")[0] == 200
        with forked.engine(DEMO, endpoint=endpoint):
            assert answered(waiting)[0] == 200
            assert answered(server.ask())[0] == 200


def test_a_server_is_ready_again_when_its_engine_is_back(short_path: Path) -> None:
    """Probes alone find it: whoever is not ready gets no other requests."""
    endpoint = f"ipc://{short_path}/e/engine.sock"
    with ExitStack() as engines:
        first = engines.enter_context(forked.engine(DEMO, endpoint=endpoint))
        with serving("--endpoint", endpoint) as server:
            server.line("ready: ")
            assert server.get("/readyz")[0] == 200
            os.kill(first.pid, signal.SIGKILL)
            while server.get("/readyz")[0] == 200:
                pass
            assert server.get("/health")[0] == 503
            engines.enter_context(forked.engine(DEMO, endpoint=endpoint))
            while server.get("/readyz")[0] == 503:
                pass
            assert server.get("/health")[0] == 200


def test_a_unix_socket_and_a_key(engine: forked.Engine, short_path: Path) -> None:
    path, keys = short_path / "http.sock", short_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    joining = ("--endpoint", engine.endpoint)
    with serving(*joining, "--uds", str(path), "--api-key-file", str(keys)) as server:
        server.line("ready: ")
        assert server.get("/livez")[0] == 200
        assert server.get("/v1/models")[0] == 401
        assert server.get("/v1/models", key="secret")[0] == 200
        assert "secret" not in "".join(server.log)
        server.signal(signal.SIGTERM)
        assert server.exit() == 0
    assert not path.exists()


def test_an_address_that_is_in_use_is_told_before_an_engine_is_launched(
    engine: forked.Engine,
) -> None:
    with serving("--endpoint", engine.endpoint) as server:
        done = run_to_exit(port=server.port)
    assert done.returncode == 5
    assert done.stderr.startswith(f"nanocore serve: 127.0.0.1, port {server.port} is in use")
    assert done.stderr.count("\n") == 1


def test_an_engine_that_nobody_runs_is_named(short_path: Path) -> None:
    endpoint = f"ipc://{short_path}/e/engine.sock"
    done = run_to_exit("--endpoint", endpoint, "--start-timeout", "0.2")
    assert done.returncode == 70
    assert endpoint in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.campaign
def test_the_access_log_is_off_unless_asked_for(engine: forked.Engine) -> None:
    for flags, num_lines in (((), 0), (("--enable-access-log",), 1)):
        with serving("--endpoint", engine.endpoint, *flags) as server:
            server.line("ready: ")
            server.get("/version")
            server.signal(signal.SIGTERM)
            server.exit()
            assert sum('"GET /version HTTP/1.1" 200' in line for line in server.log) == num_lines
