"""When the guard of TCP connections takes a peer's machine for gone, and when it does not."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from nanocore.protocol.sockets import curve_router as guard
from nanocore.protocol.sockets.engine_socket import bind_engine_socket
from nanocore.protocol.sockets.options import SendResult
from tests.protocol.keys import free_port, make_key_folders
from tests.protocol.test_curve_sockets import receive

SWEEP_S = guard.SWEEP_INTERVAL_S
SLOW_READER = """
import sys
from pathlib import Path
from nanocore.protocol.sockets.curve import ClientKeys
from nanocore_conformance.peer_socket import PeerSocket
peer = PeerSocket(sys.argv[1], ClientKeys.load(Path(sys.argv[2])))
peer.send([b"hello"])
peer.receive(60)
"""


def unanswered_s(*sweeps: tuple[bool, float], since_s: float = SWEEP_S) -> float:
    """For how long, after sweeps that saw (whether something is owed, the last acknowledgement)."""
    connection = guard._Connection(fd=3, peer=None)
    for is_owed, last_ack_s in sweeps:
        connection.note(guard._Received(0, is_owed, last_ack_s), since_s)
    return connection.unanswered_s


def test_what_is_sent_and_never_acknowledged_adds_up() -> None:
    sweeps = [(True, 5.0 + i * SWEEP_S) for i in range(18)]
    assert unanswered_s(*sweeps) == pytest.approx(guard.MAX_UNANSWERED_S)


def test_nothing_sent_is_nothing_owed_however_long_ago_the_last_word_was() -> None:
    assert unanswered_s(*[(False, 1000.0)] * 100) == 0


def test_an_acknowledgement_between_two_sweeps_begins_anew() -> None:
    """There is always something under way to one that is sent much."""
    assert unanswered_s(*[(True, 5.0)] * 10, (True, SWEEP_S / 2)) == 0
    assert unanswered_s(*[(True, SWEEP_S / 2)] * 100) == 0


def test_a_process_that_stood_still_misses_nobody_for_it() -> None:
    assert unanswered_s((True, 60.0), since_s=60.0) <= 2 * SWEEP_S


def test_a_peer_that_does_not_read_answers_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel does. TCP_USER_TIMEOUT would end its connection."""
    monkeypatch.setattr(guard, "MAX_UNANSWERED_S", 3 * SWEEP_S)
    keys = make_key_folders(tmp_path)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    folder = str(keys.client("slow"))
    with (
        closing(bind_engine_socket(endpoint, keys.engine_keys)) as engine,
        subprocess.Popen([sys.executable, "-c", SLOW_READER, endpoint, folder]) as reader,
    ):
        try:
            routing_id, _ = receive(engine)
            engine.admit(routing_id)
            reader.send_signal(signal.SIGSTOP)
            num_full = 0
            while num_full < 20:
                assert engine.take_gone() == []
                if engine.send(routing_id, [bytes(2**16)]) is SendResult.FULL:
                    num_full += 1
                    engine.wait(int(SWEEP_S * 1e3))
        finally:
            reader.kill()
