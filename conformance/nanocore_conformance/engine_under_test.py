"""The engine that rules are held against: opens peers to it, and closes them after each rule.

Rules expect to have the engine to themselves: they read its statistics, pause it and empty its
prefix cache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from nanocore.protocol.messages import Op
from nanocore.protocol.metrics import Stats
from nanocore_conformance.peer import Peer
from nanocore_conformance.peer_socket import PeerSocket
from nanocore_conformance.report import BrokenError, Check, Checks, Result, run_check

IDLE_PATIENCES = 10
"""Time for an engine to finish what it was given, in units of the patience for an answer."""


class EngineUnderTest:
    """What a rule needs of an engine.

    connect: opens a connection to it. patience_s: how long any one answer may take.
    """

    def __init__(self, connect: Callable[[], PeerSocket], patience_s: float) -> None:
        self._connect = connect
        self.patience_s = patience_s
        self._handles: set[int] = set()
        self._peers: list[Peer] = []

    def answers(self) -> bool:
        """Whether anybody answers HELLO, with whatever it may be."""
        socket = self._connect()
        try:
            socket.send([bytes([Op.HELLO]), b"\x81\xa8protocol\x92\x01\x00"])
            return socket.receive(self.patience_s) is not None
        finally:
            socket.close()

    def peer(self) -> Peer:
        """A connection without a session."""
        peer = Peer(self._connect(), self.patience_s, self._handles)
        self._peers.append(peer)
        return peer

    def session(self) -> Peer:
        """A connection with an open session."""
        peer = self.peer()
        peer.hello()
        return peer

    def until(self, peer: Peer, what: str, reached: Callable[[Stats], bool]) -> Stats:
        """Ask for statistics until they are as they should become."""
        deadline_s = time.monotonic() + IDLE_PATIENCES * self.patience_s
        for call_id in itertools.count(1):
            stats = peer.call("stats", call_id).stats
            if stats is None:
                raise BrokenError("REPLY with stats", "none")
            if reached(stats):
                return stats
            if time.monotonic() > deadline_s:
                raise BrokenError(what, stats)
        raise AssertionError

    def until_idle(self, peer: Peer) -> Stats:
        """Wait until no request runs or waits."""

        def idle(stats: Stats) -> bool:
            return stats.num_requests_running == stats.num_requests_waiting == 0

        return self.until(peer, "an engine without requests to become idle", idle)

    def run(self, rule: Check[EngineUnderTest]) -> Result:
        """Run one rule; whatever came of it, its sessions end."""
        try:
            return run_check(rule, self)
        finally:
            for peer in self._peers:
                peer.send(Op.BYE, {})
                peer.close()
            self._peers.clear()


ENGINE_RULES: Checks[EngineUnderTest] = Checks()
"""Every rule for engines; the modules engine_*.py add theirs."""
