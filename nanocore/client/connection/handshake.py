"""Handshake: HELLO, and the WELCOME that opens a session.

HELLO is the first message on a new connection. Errors say what was found at the endpoint: nothing
listens, something listens but does not reply, or an engine refuses.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Final

from nanocore import __version__
from nanocore.protocol.codec import client_decoder, encode
from nanocore.protocol.errors import EngineDeadError, EngineOverloadedError, ProtocolError
from nanocore.protocol.messages import PROTOCOL_VERSION, Hello, Message, Refused, Welcome
from nanocore.protocol.sockets.client_socket import ClientSocket, ConnectionLostError
from nanocore.protocol.sockets.curve import ClientKeys

_RETRY_S: Final = 0.05
"""Pause before another attempt, if the connection closed before a reply."""
_START_ONE: Final = "start an engine with `nanocore-engine --listen {}`"
_NOBODY: Final = f"nothing listens there; {_START_ONE}"
_SILENCE: Final = (
    "something listens there and is silent, as an engine that still loads its model; try again "
    "with a longer timeout_s"
)
_CHECK_KEYS: Final = (
    "if one runs there, check the keys: engine.key here must be the engine's own, and "
    "clients/NAME.key in the engine's --curve-dir must be this client.key"
)


async def say_hello(
    endpoint: str, timeout_s: float, keys: ClientKeys | None, *, wait_for_listener: bool
) -> tuple[ClientSocket, Welcome]:
    """Open a session.

    Args:
        wait_for_listener: wait until something listens, because an engine may be starting.

    Raises:
        EngineDeadError: no reply within timeout_s, or nothing listens and it may not wait.
        EngineOverloadedError: the engine has as many clients as it serves.
        ProtocolError: the engine refuses.
    """
    seen = _NOBODY
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                with ExitStack() as failing:
                    socket = ClientSocket(endpoint, keys, patient=wait_for_listener)
                    failing.callback(socket.close)
                    try:
                        welcome = _welcome(await _ask(socket))
                        failing.pop_all()
                        return socket, welcome
                    except ConnectionLostError as lost:
                        if lost.refused:
                            remedy = _START_ONE.format(endpoint)
                            text = f"nothing listens at {endpoint}: {remedy}"
                            raise EngineDeadError(text) from None
                    finally:
                        seen = _seen(socket, keys)
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise EngineDeadError(
            f"no engine answered at {endpoint} within {timeout_s} s: {seen.format(endpoint)}"
        ) from None


async def _ask(socket: ClientSocket) -> Message:
    hello = Hello(protocol=PROTOCOL_VERSION, client=f"nanocore-python/{__version__}")
    await socket.send(encode(hello))
    return client_decoder().decode(await socket.receive())


def _welcome(answer: Message) -> Welcome:
    if isinstance(answer, Welcome):
        if answer.protocol[0] != PROTOCOL_VERSION[0]:
            raise ProtocolError(f"the engine speaks protocol {answer.protocol} to us, of 1.x")
        return answer
    if not isinstance(answer, Refused):
        raise ProtocolError(f"the engine answered HELLO with {answer.op.name}")
    if answer.retry_after_s is not None:
        raise EngineOverloadedError(answer.message, answer.retry_after_s)
    raise ProtocolError(answer.message)


def _seen(socket: ClientSocket, keys: ClientKeys | None) -> str:
    """Describe what was found at the endpoint, for the timeout's error."""
    if socket.is_connected or (socket.is_accepted and keys is None):
        return _SILENCE
    return _NOBODY if keys is None else _CHECK_KEYS
