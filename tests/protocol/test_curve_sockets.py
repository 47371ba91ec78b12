"""TCP with CURVE over real sockets: who comes in, who does not, and what is left behind."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from zmq.auth.base import Authenticator
from zmq.utils.monitor import recv_monitor_message

from nanocore.protocol.errors import AddressInUseError, ConfigError
from nanocore.protocol.sockets.curve_router import CurveRouter
from nanocore.protocol.sockets.engine_socket import EngineSocket, bind_engine_socket
from nanocore.protocol.sockets.options import SendResult
from nanocore_conformance.peer_socket import PeerSocket
from tests.port_scanner import PROBES, scan
from tests.protocol.keys import KeyFolders, free_port, make_key_folders

PATIENCE_S = 10.0


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolders:
    return make_key_folders(tmp_path)


@pytest.fixture
def endpoint() -> str:
    """Hides the ipc endpoint of the other tests."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def engine(keys: KeyFolders, endpoint: str) -> Iterator[EngineSocket]:
    with closing(bind_engine_socket(endpoint, keys.engine_keys)) as bound:
        yield bound


def receive(engine: EngineSocket) -> tuple[bytes, list[bytes]]:
    """The next message, which must come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if (message := engine.receive()) is not None:
            return message
        engine.wait(100)
    raise AssertionError("no message came")


def chat(engine: EngineSocket, peer: PeerSocket, word: bytes) -> None:
    """A word to the engine, which must be the next it hears, and one back."""
    peer.send([word])
    routing_id, frames = receive(engine)
    assert frames == [word]
    assert engine.send(routing_id, [word, b"back"]) is SendResult.SENT
    assert peer.receive(PATIENCE_S) == [word, b"back"]


@contextmanager
def stranger(endpoint: str, options: dict[int, int | bytes]) -> Iterator[None]:
    """A DEALER that has sent "hello" to the endpoint; inside, its handshake has failed."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        for option, value in options.items():
            dealer.setsockopt(option, value)
        monitor = dealer.get_monitor_socket()
        dealer.connect(endpoint)
        dealer.send(b"hello")
        seen = []
        while zmq.Event.DISCONNECTED not in seen:
            assert monitor.poll(int(PATIENCE_S * 1e3)), f"nothing became of it: {seen}"
            seen.append(recv_monitor_message(monitor)["event"])
        assert zmq.Event.HANDSHAKE_SUCCEEDED not in seen
        yield
        dealer.disable_monitor()
        monitor.close()


def nobody_came(engine: EngineSocket, endpoint: str, keys: KeyFolders) -> None:
    """Assert that a friend's word is the first thing to reach the engine."""
    with closing(PeerSocket(endpoint, keys.client_keys("friend"))) as friend:
        chat(engine, friend, b"friend")
    assert engine.receive() is None


# -- who comes in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_clients_on_the_allow_list_are_served(keys: KeyFolders, host: str) -> None:
    try:
        port = free_port(host.strip("[]"))
    except OSError:
        pytest.skip("this machine has no IPv6")
    endpoint = f"tcp://{host}:{port}"
    with (
        closing(bind_engine_socket(endpoint, keys.engine_keys)) as engine,
        closing(PeerSocket(endpoint, keys.client_keys("one"))) as one,
        closing(PeerSocket(endpoint, keys.client_keys("other"))) as other,
    ):
        chat(engine, one, b"one")
        chat(engine, other, b"other")


def test_administrators_are_those_whose_keys_stand_in_their_folder(keys: KeyFolders) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with (
        closing(bind_engine_socket(endpoint, keys.engine_keys)) as engine,
        closing(PeerSocket(endpoint, keys.client_keys("user"))) as user,
    ):

        def is_admin(peer: PeerSocket) -> bool:
            peer.send([b"word"])
            engine.wait(int(PATIENCE_S * 1e3))
            received = engine.receive()
            assert received is not None
            return engine.is_admin(received[0])

        assert not is_admin(user)  # there is no such folder
        keys.client("admin", is_admin=True)
        with closing(PeerSocket(endpoint, keys.client_keys("admin"))) as admin:
            assert is_admin(admin)
            assert not is_admin(user)
            assert not engine.is_admin(b"nobody")
            (keys.engine / "admins").chmod(0)
            if os.getuid():
                assert not is_admin(admin)
            (keys.engine / "admins").chmod(0o700)


def test_a_key_that_is_added_counts_from_the_next_connection_on(
    engine: EngineSocket, endpoint: str, keys: KeyFolders
) -> None:
    new = keys.client_keys("new")
    listed = keys.engine / "clients" / "new.key"
    hidden = listed.rename(keys.root / "new.key")
    with stranger(endpoint, new.options):
        assert engine.receive() is None
    hidden.rename(listed)
    with closing(PeerSocket(endpoint, new)) as peer:
        chat(engine, peer, b"new")


def test_a_revoked_key_opens_no_connection_and_keeps_the_one_it_has(
    engine: EngineSocket, endpoint: str, keys: KeyFolders
) -> None:
    with closing(PeerSocket(endpoint, keys.client_keys("leaver"))) as peer:
        chat(engine, peer, b"before")
        keys.revoke("leaver")
        with stranger(endpoint, keys.client_keys("leaver").options):
            chat(engine, peer, b"after")
    nobody_came(engine, endpoint, keys)


# -- who does not ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["unknown key", "wrong server key", "NULL", "PLAIN"])
def test_nothing_of_a_stranger_reaches_the_engine(
    engine: EngineSocket, endpoint: str, keys: KeyFolders, case: str
) -> None:
    known, unknown = keys.client_keys("known"), keys.client_keys("unknown")
    keys.revoke("unknown")
    options: dict[int, int | bytes] = {
        "unknown key": unknown.options,
        "wrong server key": replace(known, engine_public_key=unknown.public_key).options,
        "NULL": {},
        "PLAIN": {zmq.PLAIN_USERNAME: b"known", zmq.PLAIN_PASSWORD: b"secret"},
    }[case]
    with stranger(endpoint, options):
        nobody_came(engine, endpoint, keys)


def test_an_empty_allow_list_admits_nobody(
    engine: EngineSocket, endpoint: str, keys: KeyFolders
) -> None:
    client = keys.client_keys("client")
    keys.revoke("client")
    with stranger(endpoint, client.options):
        assert engine.receive() is None


def test_an_allow_list_that_is_gone_admits_nobody_and_is_served_again_when_back(
    engine: EngineSocket, endpoint: str, keys: KeyFolders, caplog: pytest.LogCaptureFixture
) -> None:
    client = keys.client_keys("client")
    away = (keys.engine / "clients").rename(keys.root / "away")
    with stranger(endpoint, client.options):
        assert "cannot be read: refusing a client" in caplog.text
    away.rename(keys.engine / "clients")
    nobody_came(engine, endpoint, keys)


@pytest.mark.parametrize("content", ["", "no key\n", 'curve\n    public-key = "short"\n'])
def test_a_malformed_file_on_the_allow_list_shuts_out_nobody_else(
    engine: EngineSocket,
    endpoint: str,
    keys: KeyFolders,
    content: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = keys.engine / "clients" / "a.key"
    bad.write_text(content)
    nobody_came(engine, endpoint, keys)
    assert str(bad) in caplog.text


def test_a_file_on_the_allow_list_that_others_can_change_admits_nobody(
    engine: EngineSocket, endpoint: str, keys: KeyFolders, caplog: pytest.LogCaptureFixture
) -> None:
    options = keys.client_keys("client").options
    (keys.engine / "clients" / "client.key").chmod(0o666)
    with stranger(endpoint, options):
        assert "client.key has mode 0666" in caplog.text
    nobody_came(engine, endpoint, keys)


def test_every_probe_of_a_port_scanner_is_hung_up_on_and_delivers_nothing(
    engine: EngineSocket, endpoint: str, keys: KeyFolders
) -> None:
    with closing(PeerSocket(endpoint, keys.client_keys("bystander"))) as bystander:
        chat(engine, bystander, b"before")
        result = scan("127.0.0.1", int(endpoint.rsplit(":", 1)[1]), 2 * len(PROBES))
        assert (result.still_open, result.num_refused) == ({}, 0)
        assert result.num_closed == result.num_connections == 2 * len(PROBES)
        chat(engine, bystander, b"after")
    assert engine.receive() is None


# -- what a client with a key may not do ----------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve_until_disconnected(engine: EngineSocket, peer: zmq.Socket[bytes]) -> list[int]:
    """Let the engine wait and receive until the peer has been hung up on; our memory meanwhile."""
    monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    sizes = [resident_bytes()]
    deadline_s = time.monotonic() + PATIENCE_S
    while not monitor.poll(0):
        assert time.monotonic() < deadline_s, "nobody hangs up"
        engine.wait(10)
        assert engine.receive() is None
        sizes.append(resident_bytes())
    peer.disable_monitor()
    monitor.close()
    return sizes


@contextmanager
def dealer(endpoint: str, keys: KeyFolders, name: str) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER of plain pyzmq whose key is on the allow-list."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.linger = 0
        for option, value in keys.client_keys(name).options.items():
            made.setsockopt(option, value)
        made.connect(endpoint)
        yield made


def test_a_client_with_a_key_that_sends_a_message_without_end_is_hung_up_on(
    engine: EngineSocket, endpoint: str, keys: KeyFolders
) -> None:
    with (
        closing(PeerSocket(endpoint, keys.client_keys("bystander"))) as bystander,
        dealer(endpoint, keys, "attacker") as attacker,
    ):
        chat(engine, bystander, b"before")
        attacker.send_multipart([bytes(15 * 10**6)] * 60, copy=False)
        sizes = serve_until_disconnected(engine, attacker)
        assert max(sizes) - sizes[0] < 400 * 10**6, "the attack is 900 MB"
        chat(engine, bystander, b"after")


def test_a_client_with_a_key_that_is_not_admitted_in_time_is_hung_up_on(
    engine: EngineSocket, endpoint: str, keys: KeyFolders
) -> None:
    with closing(PeerSocket(endpoint, keys.client_keys("friend"))) as friend:
        friend.send([b"hello"])
        routing_id, _ = receive(engine)
        engine.admit(routing_id)
        with dealer(endpoint, keys, "silent") as silent:
            engine.limit(max_connections=10, unadmitted_timeout_s=0.0)
            serve_until_disconnected(engine, silent)
            chat(engine, friend, b"still here")
    deadline_s = time.monotonic() + PATIENCE_S
    while not (gone := engine.take_gone()):
        assert time.monotonic() < deadline_s, "it is not told"
        engine.wait(10)
    assert gone == [routing_id]


def test_of_too_many_clients_with_keys_the_oldest_guest_goes(
    engine: EngineSocket, endpoint: str, keys: KeyFolders
) -> None:
    engine.limit(max_connections=2, unadmitted_timeout_s=PATIENCE_S)
    with (
        closing(PeerSocket(endpoint, keys.client_keys("friend"))) as friend,
        dealer(endpoint, keys, "oldest") as oldest,
    ):
        chat(engine, friend, b"friend")
        friend.send([b"let me stay"])
        engine.admit(receive(engine)[0])
        oldest.send(b"me, too")
        receive(engine)
        with closing(PeerSocket(endpoint, keys.client_keys("newest"))) as newest:
            newest.send([b"newest"])
            assert receive(engine)[1] == [b"newest"]
            engine.wait(0)
            serve_until_disconnected(engine, oldest)
            chat(engine, friend, b"friend")


# -- no TCP without keys --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [bind_engine_socket, PeerSocket])
def test_a_tcp_socket_without_keys_is_refused(make: Callable[[str], object], endpoint: str) -> None:
    with pytest.raises(ConfigError, match="needs CURVE keys"):
        make(endpoint)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(endpoint.rsplit(":", 1)[1])))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_second_engine_at_a_port_is_refused(
    engine: EngineSocket, endpoint: str, keys: KeyFolders, host: str
) -> None:
    second = endpoint.replace("127.0.0.1", host)
    with pytest.raises(AddressInUseError, match=second):
        bind_engine_socket(second, keys.engine_keys)
    nobody_came(engine, endpoint, keys)


# -- what is left behind --------------------------------------------------------------------------


def test_closing_leaves_no_thread_no_descriptor_and_a_free_port(
    keys: KeyFolders, endpoint: str
) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    threads = threading.enumerate()
    engine_keys = keys.engine_keys
    with closing(bind_engine_socket(endpoint, engine_keys)) as engine:
        nobody_came(engine, endpoint, keys)
    num_open = open_files()  # what the libraries keep open from their first use on is in it
    for _ in range(3):
        with closing(bind_engine_socket(endpoint, engine_keys)) as engine:
            nobody_came(engine, endpoint, keys)
        engine.close()
        assert (threading.enumerate(), open_files()) == (threads, num_open)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_doorkeeper_has_died_admits_nobody_says_so_and_closes(
    keys: KeyFolders, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(_self: Authenticator, _message: list[bytes]) -> None:
        raise OSError("no more")

    monkeypatch.setattr(Authenticator, "handle_zap_message", die)
    engine = bind_engine_socket(endpoint, keys.engine_keys)
    client = keys.client_keys("client")
    with stranger(endpoint, client.options):  # hung up on when the handshake's time is over
        with pytest.raises(RuntimeError, match="has died"):
            engine.wait(0)
        assert engine.receive() is None
    engine.close()


def test_nobody_is_admitted_while_no_doorkeeper_answers(
    engine: EngineSocket, endpoint: str, keys: KeyFolders
) -> None:
    """Left to its defaults, libzmq admits everybody then."""
    assert isinstance(engine, CurveRouter)
    engine.authenticator.close()
    with stranger(endpoint, keys.client_keys("client").options):
        assert engine.receive() is None
