"""Which engines and servers tools find: what is registered, by whom, and for how long."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from nanocore.protocol.errors import ConfigError
from nanocore.system.running import Running, all_running, find_one, registered


@pytest.fixture(autouse=True)
def directory(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    return short_path / "nanocore" / "running"


def an_engine(name: str = "a", launched_by: int | None = None) -> Running:
    endpoint = f"ipc:///run/{name}/engine.sock"
    return Running(
        kind="engine", pid=os.getpid(), address=endpoint, model=f"org/{name}",
        endpoints=(endpoint,), launched_by=launched_by,
    )  # fmt: skip


def a_server(address: str, engine: Running) -> Running:
    return Running(
        kind="server", pid=7, address=address, model=engine.model, endpoints=engine.endpoints
    )


@pytest.fixture
def register() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_what_is_registered_is_found_until_its_end(directory: Path) -> None:
    assert all_running() == []
    assert not directory.exists()  # reading makes nothing
    first, second = an_engine("a"), an_engine("b")
    with registered(first), registered(second):
        assert all_running() == [first, second]
        assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
        assert directory.stat().st_mode & 0o777 == 0o700
    assert [*directory.iterdir()] == []


_REGISTER = """
import sys, time
from nanocore.system.running import Running, registered
entry = Running(kind="engine", pid=1, address="ipc:///x", model="m", endpoints=("ipc:///x",))
with registered(entry):
    print("registered", flush=True)
    sys.stdin.read()
"""


def test_a_process_that_was_killed_is_forgotten(directory: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _REGISTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [one.address for one in all_running()] == ["ipc:///x"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len([*directory.iterdir()]) == 1
    assert all_running() == []
    assert [*directory.iterdir()] == []


def test_what_another_version_wrote_is_ignored_and_kept(directory: Path) -> None:
    with registered(an_engine()):
        (path,) = directory.iterdir()
        path.write_text('{"kind": "cluster"}')
        assert all_running() == []
        assert path.exists()


def test_what_is_no_file_is_ignored(directory: Path) -> None:
    """A pipe nobody writes to would hold up whoever opens it."""
    directory.mkdir(mode=0o700, parents=True)
    os.mkfifo(directory / "server-1-pipe.json")
    (directory / "server-2-link.json").symlink_to("/dev/zero")
    (directory / "server-3-folder.json").mkdir()
    assert all_running() == []


def test_others_cannot_register_anything(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="has mode 0755, open to other users"):
        all_running()


def test_an_engine_that_cannot_be_registered_serves_all_the_same(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o755)
    with caplog.at_level(logging.INFO), registered(an_engine()):
        pass
    assert "tools find this engine by its address only: " in caplog.text
    assert [*directory.iterdir()] == []


def test_a_server_stands_for_its_engine(register: ExitStack) -> None:
    engine = an_engine("a", launched_by=7)
    server = a_server("http://127.0.0.1:8000", engine)
    register.enter_context(registered(engine))
    register.enter_context(registered(server))
    assert find_one() == find_one(with_private=True) == server


def test_an_engine_of_another_program_is_observed_only(register: ExitStack) -> None:
    engine = an_engine("a", launched_by=7)
    register.enter_context(registered(engine))
    assert find_one() is None
    assert find_one(with_private=True) == engine


def test_several_are_listed_with_the_flags_that_choose(register: ExitStack) -> None:
    shared, private = an_engine("a"), an_engine("b", launched_by=7)
    servers = [a_server(address, private) for address in ("http://[::1]:1", "unix:/run/http.sock")]
    for one in (shared, private, *servers):
        register.enter_context(registered(one))
    with pytest.raises(ConfigError) as caught:
        find_one(endpoint_flag="--engine-endpoint")
    assert str(caught.value).splitlines() == [
        "3 of your programs serve; choose one:",
        f"  --engine-endpoint ipc:///run/a/engine.sock  (engine, org/a, pid {os.getpid()})",
        "  --url http://[::1]:1  (server, org/b, pid 7)",
        "  --engine-endpoint ipc:///run/b/engine.sock  (server, org/b, pid 7)",
    ]


def test_a_model_is_found_by_its_name(register: ExitStack) -> None:
    wanted = an_engine("b")
    for one in (an_engine("a"), wanted):
        register.enter_context(registered(one))
    assert find_one("org/b") == wanted
    assert find_one("org/c") is None


def test_a_model_is_found_by_any_name_that_its_server_gives_it(register: ExitStack) -> None:
    engine = an_engine("a")
    server = msgspec.structs.replace(
        a_server("http://[::1]:1", engine), model="first", served_model_names=("first", "second")
    )
    for one in (engine, server):
        register.enter_context(registered(one))
    assert find_one("first") == find_one("second") == server
    assert find_one("org/a") is None
