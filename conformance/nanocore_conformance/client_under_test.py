"""The client that scenarios are played to: for each one its command is started anew.

Its command line is that of PROTOCOL.md's section 15: placeholders are replaced, then it must open a
session, stream one greedy request to stdout, and say BYE.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nanocore.protocol.sockets.engine_socket import EngineSocket
from nanocore_conformance.played_engine import PROMPT, PlayedEngine
from nanocore_conformance.report import Check, Checks, Result, run_check

SILENCE_S = 10.0
"""After so long a silence a client takes the engine for dead."""


class ClientUnderTest:
    """What a scenario needs of a client.

    endpoint: where `socket` is bound. command: with {endpoint}, {prompt} and {max_tokens} in it.
    patience_s: how long anything may take. silence_s: what the client takes for death. thorough:
    whether all malformed vectors are tried instead of a sample.
    """

    def __init__(
        self,
        socket: EngineSocket,
        endpoint: str,
        command: list[str],
        patience_s: float,
        *,
        silence_s: float = SILENCE_S,
        thorough: bool = False,
    ) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._command = command
        self._patience_s = patience_s
        self.silence_s = silence_s
        self.thorough = thorough
        self._foreign: set[bytes] = set()

    @contextmanager
    def client(self, max_tokens: int = 4) -> Iterator[PlayedEngine]:
        """The client's process, and the engine that is played to it."""
        values = {
            "{endpoint}": self._endpoint,
            "{prompt}": ",".join(map(str, PROMPT)),
            "{max_tokens}": str(max_tokens),
        }
        command = self._command
        for placeholder, value in values.items():
            command = [word.replace(placeholder, value) for word in command]
        played = PlayedEngine(self._socket, command, self._patience_s, self._foreign)
        try:
            yield played
        finally:
            played.close()

    def run(self, scenario: Check[ClientUnderTest]) -> Result:
        """Play one scenario."""
        return run_check(scenario, self)


CLIENT_SCENARIOS: Checks[ClientUnderTest] = Checks()
"""Every scenario for clients; the modules client_*.py add theirs."""
