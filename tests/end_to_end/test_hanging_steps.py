"""A step that never returns: clients are told why, the log says where, and the process ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from nanocore.protocol.messages import Bye, Error, Op, Pong
from nanocore_conformance.peer import Peer
from nanocore_conformance.peer_socket import PeerSocket
from tests.end_to_end import forked, hanging_engine

PATIENCE_S = 60.0
HANG = {
    "request_id": "hangs",
    "prompt_token_ids": hanging_engine.HANG.to_bytes(4, "little"),
}


@contextmanager
def hanging(
    how: str, folder: Path, *flags: str, stderr: Path | None = None
) -> Iterator[tuple[BaseProcess, Peer]]:
    """An engine that hangs on request, and a client in session with it; its log is in `folder`."""
    endpoint = f"ipc://{folder}/engine.sock"
    arguments = (how, "--listen", endpoint, *flags, "--max-num-seqs", "1")
    process = forked.start(stderr or folder / "log", arguments, hanging_engine.main)
    peer = Peer(PeerSocket(endpoint), PATIENCE_S, set())
    try:
        peer.hello()
        yield process, peer
    finally:
        peer.close()
        process.kill()
        process.join(PATIENCE_S)


def log_of(process: BaseProcess, folder: Path) -> str:
    """What an engine that ends by itself has said."""
    process.join(PATIENCE_S)
    return (folder / "log").read_text()


def step_and_age_ms(peer: Peer) -> tuple[int, int]:
    """The step counter, and for how long the step that is running has been."""
    peer.send(Op.PING, {"nonce": 1})
    pong = peer.expect(Pong)
    assert pong.num_steps is not None
    assert pong.step_age_ms is not None
    return pong.num_steps, pong.step_age_ms


def test_a_step_that_hangs_ends_the_engine_with_its_cause(short_path: Path) -> None:
    with hanging("waiting", short_path, "--step-timeout-s", "1") as (process, peer):
        peer.complete("before", [1, 2, 3], max_tokens=4)
        peer.send(Op.SUBMIT, HANG)
        peer.accepted("hangs")
        seen = [step_and_age_ms(peer)]
        while seen[-1][1] < 200:
            seen.append(step_and_age_ms(peer))
        # the step before ends behind its tokens: its age may be among what was seen
        ages = [age_ms for num_steps, age_ms in seen if num_steps == seen[-1][0]]
        assert ages == sorted(ages)
        error = peer.expect(Error)
        assert error.code == "engine_dead"
        assert "was not done after 1 s: the executor of this test hangs" in error.message
        assert "--step-timeout-s" in error.message
        assert peer.expect(Bye).reason == error.message
        log = log_of(process, short_path)
        assert process.exitcode == 70
    assert "in _hang" in log, "not where it hangs"
    assert "in _end_process" in log, "not all threads"  # the io thread's may be over by then
    assert log.count(error.message) == 1


def test_a_step_that_hangs_with_the_interpreters_lock_ends_the_engine_all_the_same(
    short_path: Path,
) -> None:
    with hanging("holding-the-lock", short_path, "--step-timeout-s", "1") as (process, peer):
        peer.send(Op.SUBMIT, HANG)
        log = log_of(process, short_path)
        assert process.exitcode == 70
    assert "in _hang" in log, "not where it hangs"
    assert "in _serve" in log, "not all threads"


def test_clients_are_told_of_a_hanging_step_although_nobody_reads_the_log(
    short_path: Path, full_pipe: int
) -> None:
    flags = ("--step-timeout-s", "1")
    stderr = Path(f"/proc/{os.getpid()}/fd/{full_pipe}")
    with hanging("waiting", short_path, *flags, stderr=stderr) as (process, peer):
        peer.send(Op.SUBMIT, HANG)
        peer.accepted("hangs")
        assert peer.expect(Error).code == "engine_dead"
        peer.expect(Bye)
        process.join(PATIENCE_S)
        assert process.exitcode == 70


def test_an_engine_that_is_idle_or_paused_is_not_taken_for_one_that_hangs(
    short_path: Path,
) -> None:
    with hanging("waiting", short_path, "--step-timeout-s", "1") as (process, peer):
        peer.complete("before", [1, 2, 3], max_tokens=4)
        assert peer.call("pause").ok
        peer.send(Op.SUBMIT, {"request_id": "kept", "prompt_token_ids": b"\1\0\0\0"})
        stream = peer.accepted("kept")
        for _ in range(3):
            peer.wait_for_ping()  # a second each
        while step_and_age_ms(peer)[1] > 0:
            pass
        assert peer.call("resume").ok
        peer.finish(stream)
        assert process.exitcode is None
