"""Our ZMTP server: what its peers may make it keep, who may stay, and libzmq as its peer."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from nanocore.protocol.errors import AddressInUseError, ConfigError
from nanocore.protocol.sockets import ipc_router as module
from nanocore.protocol.sockets.ipc_router import IpcRouter
from nanocore.protocol.sockets.options import (
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    PEER_HIGH_WATER_MARK,
    SendResult,
)
from nanocore.protocol.sockets.zmtp import (
    MAX_MESSAGE_BYTES,
    ROUTER,
    command_frame,
    pack_message,
)
from nanocore_conformance.peer_socket import PeerSocket
from tests.protocol.zmtp_peer import DEALER, PATIENCE_S, ZmtpPeer

T = TypeVar("T")
MB = 10**6


@pytest.fixture
def router(short_path: Path) -> Iterator[IpcRouter]:
    with closing(IpcRouter(short_path / "engine.sock")) as bound:
        yield bound


def until(router: IpcRouter, happened: Callable[[], T]) -> T:
    """Serve until this is true; what arrives meanwhile is answered with itself."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (result := happened()):
        assert time.monotonic() < deadline_s, "it does not happen"
        router.wait(10)
        while (received := router.receive()) is not None:
            assert router.send(*received) is not SendResult.FULL
    return result


def receive(router: IpcRouter) -> tuple[bytes, list[bytes]]:
    """The next message, which must come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (received := router.receive()) is None:
        assert time.monotonic() < deadline_s, "no message came"
        router.wait(100)
    return received


def serve(router: IpcRouter, work: Callable[[], T]) -> T:
    """What `work` returns, done by a thread while the router serves."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    until(router, lambda: not thread.is_alive())
    return results[0]


def chat(router: IpcRouter, peer: PeerSocket) -> None:
    def ask() -> list[bytes] | None:
        peer.send([b"how", b"are you"])
        return peer.receive(PATIENCE_S)

    assert serve(router, ask) == [b"how", b"are you"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- what a peer may make us keep -----------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 15 * MB])
def test_a_message_without_end_costs_its_sender_the_connection_and_us_little_memory(
    router: IpcRouter, endpoint: str, size: int
) -> None:
    frame = b"\3" + size.to_bytes(8, "big") + bytes(size)
    before = resident_bytes()
    with closing(PeerSocket(endpoint)) as bystander, ZmtpPeer(endpoint) as attacker:
        chat(router, bystander)
        attacker.greet()
        taken = serve(router, lambda: attacker.send_endless_message(frame))
        assert taken < 2 * MAX_MESSAGE_BYTES
        assert resident_bytes() - before < 100 * MB
        assert router.num_input_bytes == 0
        chat(router, bystander)


def test_sixty_frames_of_15_mb_from_a_dealer_are_not_gathered(
    router: IpcRouter, endpoint: str
) -> None:
    """The attack as pyzmq makes it."""
    before = resident_bytes()
    peaks: list[int] = []
    with closing(PeerSocket(endpoint)) as bystander, zmq.Context() as context:
        chat(router, bystander)
        with context.socket(zmq.DEALER) as attacker:
            attacker.linger = 0
            attacker.connect(endpoint)
            frame = bytes(15 * MB)
            attacker.send_multipart([frame] * 60, copy=False)
            until(
                router, lambda: peaks.append(resident_bytes()) or router.num_accepted >= 3
            )  # it was hung up on, and came again
            chat(router, bystander)
    # All 60 frames are one piece of memory on the sender's side, which is in this process, too.
    assert max(peaks) - before < 100 * MB


def test_unfinished_messages_of_many_peers_are_bounded_together_and_the_largest_goes(
    router: IpcRouter, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_INPUT_BYTES", 10 * MB)
    with ExitStack() as stack:
        modest, *greedy = [stack.enter_context(ZmtpPeer(endpoint)) for _ in range(5)]
        for peer in (modest, *greedy):
            peer.greet()
            serve(router, peer.await_handshake)
        head = b"\2" + (2 * MB).to_bytes(8, "big")
        serve(router, lambda: modest.socket.sendall(head + bytes(MB)))
        head = b"\2" + MAX_FRAME_BYTES.to_bytes(8, "big")
        for peer in greedy:
            serve(router, lambda peer=peer: peer.socket.sendall(head + bytes(4 * MB)))  # type: ignore[misc]
        until(router, lambda: len(router.connections) == 3)
        assert router.num_input_bytes <= 10 * MB
        serve(router, lambda: modest.socket.sendall(bytes(MB)))
        until(router, lambda: router.num_input_bytes <= 8 * MB)
        assert len(router.connections) == 3, "the modest one has finished its message"


def test_what_waits_for_all_peers_is_bounded_together_and_the_largest_goes(
    router: IpcRouter, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUT_BYTES", 10 * MB)
    with ExitStack() as stack:
        peers = [stack.enter_context(ZmtpPeer(endpoint)) for _ in range(5)]
        ids = []
        for peer in peers:
            peer.greet()
            serve(router, peer.await_handshake)
            peer.send(b"hello")
            ids.append(receive(router)[0])
        modest, *greedy = ids
        assert router.send(modest, [bytes(MB)]) is SendResult.SENT
        for _ in range(4):
            for routing_id in greedy:
                router.send(routing_id, [bytes(MB)])
        assert router.num_output_bytes <= 10 * MB
        assert modest in router.connections
        assert 0 < len(router.connections) < 5
        for routing_id in list(router.connections):
            router.drop(router.connections[routing_id])
        assert router.num_output_bytes == 0


def test_a_flood_of_frames_leaves_others_their_turn(router: IpcRouter, endpoint: str) -> None:
    with ZmtpPeer(endpoint) as flooder, ZmtpPeer(endpoint) as other:
        for peer in (flooder, other):
            peer.greet()
            serve(router, peer.await_handshake)
        flooder.socket.sendall(b"\1\0" * 60_000)
        other.send(b"x")
        router.wait(0)
        num_calls = 1
        while (received := router.receive()) is None:
            num_calls += 1
            assert router.is_busy
        assert received[1] == [b"x"]
        assert num_calls <= 3


def test_a_flood_of_messages_keeps_nobody_from_coming_in(router: IpcRouter, endpoint: str) -> None:
    """Though the router is only asked for messages, and always has one."""
    with ZmtpPeer(endpoint) as flooder, ZmtpPeer(endpoint) as other:
        flooder.greet()
        serve(router, flooder.await_handshake)
        flooder.send_all([[b"y"]] * 20_000)
        assert receive(router)[1] == [b"y"]
        other.greet()
        other.send(b"x")
        words = [(router.receive() or (b"", [b""]))[1] for _ in range(100)]
        assert [b"y"] in words
        assert [b"x"] in words


def test_messages_of_two_peers_are_taken_in_turn(router: IpcRouter, endpoint: str) -> None:
    with ZmtpPeer(endpoint) as one, ZmtpPeer(endpoint) as other:
        for peer in (one, other):
            peer.greet()
            serve(router, peer.await_handshake)
        one.send_all([[b"one"]] * 100)
        other.send_all([[b"other"]] * 100)
        router.wait(0)
        words = [receive(router)[1][0] for _ in range(200)]
        assert words[:10] in ([b"one", b"other"] * 5, [b"other", b"one"] * 5)


def test_what_waits_for_a_peer_that_pings_and_never_reads_is_bounded(
    router: IpcRouter, endpoint: str
) -> None:
    with ZmtpPeer(endpoint) as peer:
        peer.greet()
        peer.send(b"x")
        routing_id, _ = receive(router)
        while router.send(routing_id, [bytes(4096)]) is SendResult.SENT:
            pass
        pings = command_frame(b"\4PING\0\1") * 10_000
        serve(router, lambda: peer.socket.sendall(pings))
        until(router, lambda: router.connections[routing_id].reader.is_drained)
        assert len(router.connections[routing_id].unsent) <= PEER_HIGH_WATER_MARK


# -- who may stay ---------------------------------------------------------------------------------


def test_of_300_silent_connections_the_latest_stay_and_a_client_comes_in(
    router: IpcRouter, endpoint: str
) -> None:
    router.max_connections = 50
    with ExitStack() as stack, closing(PeerSocket(endpoint)) as early:
        chat(router, early)
        router.admit(next(iter(router.connections)))
        silent: list[ZmtpPeer] = []

        def crowd() -> None:
            for i in range(300):
                silent.append(stack.enter_context(ZmtpPeer(endpoint)))
                with suppress(ConnectionError):  # it may have been hung up on
                    if i % 2:
                        silent[-1].greet()

        serve(router, crowd)
        until(router, lambda: router.num_accepted == 301)
        assert len(router.connections) <= 50
        serve(router, silent[0].await_end)
        chat(router, early)
        with closing(PeerSocket(endpoint)) as late:
            chat(router, late)
        assert len(router.connections) <= 50


def test_who_does_not_finish_the_handshake_is_hung_up_on(
    router: IpcRouter, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ZmtpPeer(endpoint) as silent, closing(PeerSocket(endpoint)) as friend:
        chat(router, friend)
        monkeypatch.setattr(module, "HANDSHAKE_S", 0.0)
        serve(router, silent.await_end)
        chat(router, friend)
        assert router.num_accepted == 2


def test_a_guest_is_hung_up_on_in_time_and_who_was_admitted_is_not(
    router: IpcRouter, endpoint: str
) -> None:
    with ZmtpPeer(endpoint) as admitted, ZmtpPeer(endpoint) as guest:
        admitted.greet()
        admitted.send(b"x")
        routing_id, _ = receive(router)
        router.admit(routing_id)
        guest.greet()
        guest.send(b"y")
        receive(router)
        router.unadmitted_timeout_s = 0.0
        serve(router, guest.await_end)
        assert router.send(routing_id, [b"still"]) is SendResult.SENT
        router.dismiss(routing_id)
        serve(router, admitted.await_end)
        assert router.send(routing_id, [b"gone"]) is SendResult.GONE


def test_an_admitted_peers_disappearance_is_told_at_once_and_a_guests_is_not(
    router: IpcRouter, endpoint: str
) -> None:
    with ZmtpPeer(endpoint) as admitted, ZmtpPeer(endpoint) as guest:
        ids = []
        for peer in (admitted, guest):
            peer.greet()
            peer.send(b"x")
            ids.append(receive(router)[0])
        router.admit(ids[0])
    until(router, lambda: not router.connections)
    assert router.take_gone() == ids[:1]
    assert router.take_gone() == []


def test_a_peer_that_leaves_with_much_unread_and_unsaid_takes_nobody_with_it(
    router: IpcRouter, endpoint: str
) -> None:
    with closing(PeerSocket(endpoint)) as friend:
        for _ in range(20):
            with ZmtpPeer(endpoint) as leaver:
                leaver.greet()
                leaver.send(b"x")
                routing_id, _ = receive(router)
                while router.send(routing_id, [bytes(4096)]) is SendResult.SENT:
                    pass
                leaver.send_all([[b"y"]] * 10)
        chat(router, friend)
        assert len(router.connections) == 1


def test_what_a_peer_said_before_it_left_arrives(router: IpcRouter, endpoint: str) -> None:
    with ZmtpPeer(endpoint) as peer:
        peer.greet()
        serve(router, peer.await_handshake)
        peer.send_all([[b"%d" % i] for i in range(100)])
    assert [receive(router)[1] for _ in range(100)] == [[b"%d" % i] for i in range(100)]


FEW_DESCRIPTORS = """
import resource, sys
from pathlib import Path
from nanocore.protocol.sockets.ipc_router import IpcRouter
router = IpcRouter(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print("ready", flush=True)
word = b""
while word != b"stop":
    router.wait(100)
    while (received := router.receive()) is not None:
        word = received[1][0]
        if word == b"admit me":
            router.admit(received[0])
        router.send(*received)
router.close()
"""


@pytest.mark.parametrize("word", [b"hello", b"admit me"])
def test_a_process_without_descriptors_lives_and_serves(
    short_path: Path, endpoint: str, word: bytes
) -> None:
    """Whether it may hang up on those who came, or none of them."""
    process = subprocess.Popen(
        [sys.executable, "-c", FEW_DESCRIPTORS, str(short_path / "engine.sock")],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process, closing(PeerSocket(endpoint)) as friend:
        assert process.stdout.readline() == b"ready\n"
        friend.send([b"admit me"])
        assert friend.receive(PATIENCE_S) == [b"admit me"]
        with ExitStack() as crowd:
            for _ in range(200):
                one = crowd.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                try:
                    one.connect(str(short_path / "engine.sock"))
                    one.sendall(ROUTER.greeting + DEALER + b"".join(pack_message([word])))
                except OSError:
                    break  # the backlog is full, as of any server
            friend.send([b"still there?"])
            assert friend.receive(PATIENCE_S) == [b"still there?"]
        friend.send([b"stop"])
        assert friend.receive(PATIENCE_S) == [b"stop"]
    assert process.returncode == 0


# -- libzmq's peers -------------------------------------------------------------------------------


def test_two_peers_with_the_same_routing_id_are_two(router: IpcRouter, endpoint: str) -> None:
    with zmq.Context() as context, ExitStack() as stack:
        dealers = [stack.enter_context(context.socket(zmq.DEALER)) for _ in range(2)]
        for i, dealer in enumerate(dealers):
            dealer.linger = 0
            dealer.routing_id = b"the same"
            dealer.connect(endpoint)
            dealer.send(b"%d" % i)
        received = dict(receive(router) for _ in range(2))
        assert len(received) == 2
        for routing_id, (word,) in received.items():
            assert router.send(routing_id, [b"for", word]) is SendResult.SENT
        for i, dealer in enumerate(dealers):
            assert dealer.poll(PATIENCE_S * 1e3)
            assert dealer.recv_multipart() == [b"for", b"%d" % i]


def test_zmtp_heartbeats_of_a_peer_are_answered(router: IpcRouter, endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.heartbeat_ivl = 20
        dealer.heartbeat_timeout = int(PATIENCE_S * 1e3)
        dealer.connect(endpoint)
        dealer.send(b"x")
        routing_id, _ = receive(router)
        num_answers = 0
        answer = router._answer

        def counted(connection: module.IpcConnection) -> bool:
            nonlocal num_answers
            num_answers += 1
            return answer(connection)

        router._answer = counted  # type: ignore[method-assign]
        until(router, lambda: num_answers >= 5)
        assert router.send(routing_id, [b"y"]) is SendResult.SENT
        assert dealer.poll(PATIENCE_S * 1e3)
        assert dealer.recv() == b"y"


def test_a_req_peer_is_heard_with_the_empty_frame_it_puts_in_front(
    router: IpcRouter, endpoint: str
) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as req:
        req.linger = 0
        req.connect(endpoint)
        req.send_multipart([b"op", b"body"])
        routing_id, frames = receive(router)
        assert frames == [b"", b"op", b"body"]
        assert router.send(routing_id, [b"", b"answer"]) is SendResult.SENT
        assert req.poll(PATIENCE_S * 1e3)
        assert req.recv_multipart() == [b"answer"]


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.PUSH, zmq.PAIR, zmq.REP])
def test_a_peer_of_another_kind_is_turned_away(
    router: IpcRouter, endpoint: str, kind: zmq.SocketType
) -> None:
    with zmq.Context() as context, context.socket(kind) as peer:
        peer.linger = 0
        monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        peer.connect(endpoint)
        until(router, lambda: monitor.poll(0))
        peer.disable_monitor()
        monitor.close()
    until(router, lambda: not router.connections)


# -- its own end ----------------------------------------------------------------------------------


def test_closing_sends_what_is_queued_to_a_peer_that_reads_late(
    router: IpcRouter, endpoint: str
) -> None:
    with ZmtpPeer(endpoint) as peer:
        peer.greet()
        peer.send(b"x")
        routing_id, _ = receive(router)
        serve(router, peer.await_handshake)
        for i in range(20):
            assert router.send(routing_id, [b"%02d" % i + bytes(50_000)]) is SendResult.SENT
        assert router.connections[routing_id].unsent, "more than the kernel keeps"
        thread = threading.Thread(target=router.close)
        thread.start()
        words = [peer.read(9 + 50_002)[9:11] for _ in range(20)]
        thread.join()
        assert words == [b"%02d" % i for i in range(20)]
        peer.await_end()


def test_closing_waits_for_nobody_for_long_and_leaves_nothing(
    router: IpcRouter, endpoint: str, short_path: Path
) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with ZmtpPeer(endpoint) as peer:
        peer.greet()
        peer.send(b"x")
        routing_id, _ = receive(router)
        while router.send(routing_id, [bytes(4096)]) is SendResult.SENT:
            pass
        router.close()
        router.close()
        assert not (short_path / "engine.sock").exists()
    assert len(os.listdir("/proc/self/fd")) == num_open - 2


def test_a_socket_that_is_there_already_is_not_taken_over(
    router: IpcRouter, endpoint: str, short_path: Path
) -> None:
    with pytest.raises(AddressInUseError, match=endpoint):
        IpcRouter(short_path / "engine.sock")
    with closing(PeerSocket(endpoint)) as peer:
        chat(router, peer)


def test_what_cannot_be_bound_is_a_config_error(short_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        IpcRouter(short_path / "nowhere" / "engine.sock")


def test_its_descriptor_tells_a_poller_that_something_has_arrived(
    router: IpcRouter, endpoint: str
) -> None:
    with ZmtpPeer(endpoint) as peer:
        peer.greet()
        serve(router, peer.await_handshake)
        assert select.select([router], [], [], 0)[0] == []
        peer.send(b"x" * MAX_FRAMES)
        assert select.select([router], [], [], PATIENCE_S)[0] == [router]
        assert receive(router)[1] == [b"x" * MAX_FRAMES]
        assert select.select([router], [], [], 0)[0] == []


def test_the_handshake_is_answered_in_full(router: IpcRouter, endpoint: str) -> None:
    with ZmtpPeer(endpoint) as peer:
        peer.greet()
        serve(router, peer.await_handshake)
        peer.socket.sendall(command_frame(b"\4PING\0\1abc"))
        pong = command_frame(b"\4PONGabc")
        assert serve(router, lambda: peer.read(len(pong))) == pong
        assert ROUTER.ready.endswith(b"Identity\0\0\0\0")
