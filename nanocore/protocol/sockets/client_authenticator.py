"""ClientAuthenticator: answers libzmq whether a client's key is on the allow-list.

Owned by an engine's socket, whose context it shares. A thread of zmq.auth asks `ClientAllowList`
at every handshake, so a key that is added or removed counts from the next handshake on, without a
restart; a connection that is open stays open. Nobody is admitted while the thread does not answer
(`EngineKeys.options`), and its death is an error of the socket (`check`), not silence.
"""

from __future__ import annotations

import logging
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from nanocore.protocol.errors import KeyFileError
from nanocore.protocol.sockets.curve import ZAP_DOMAIN, load_public_key

logger = logging.getLogger(__name__)


class ClientAllowList:
    """The clients of a folder: one NAME.key each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_refused = b""

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a client with this public key, Z85 text, is served. The name is zmq.auth's."""
        try:
            name = name_of(self._folder, key)
        except Exception:  # it would end the thread that asks; whatever it is, the answer is no
            logger.exception("the allow-list %s cannot be read: refusing a client", self._folder)
            return False
        if name is not None:
            logger.info("client %r is let in", name)
        elif key != self._last_refused:  # it tries again and again: say it once
            self._last_refused = key
            logger.warning(
                "a client is refused: no file in %s has its key %s", self._folder, key.decode()
            )
        return name is not None


def name_of(folder: Path, key: bytes) -> str | None:
    """The name of the file in a folder that holds this public key, Z85 text."""
    for path in sorted(folder.iterdir()):
        if path.suffix != ".key":
            continue
        try:
            if load_public_key(path) == key:
                return path.stem
        except KeyFileError as error:  # one bad file shuts out one client
            logger.warning("%s", error)
    return None


class ClientAuthenticator:
    """A running ZAP handler for the CURVE sockets of a context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Path) -> None:
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, ClientAllowList(clients))
        self._authenticator.start()

    def check(self) -> None:
        """Raise RuntimeError if the thread has died: no client can come in any more."""
        if not self._authenticator.is_alive():
            raise RuntimeError("the thread that checks clients' keys has died")

    def close(self) -> None:
        """End the thread. Idempotent; to be called after the sockets are closed."""
        if self._authenticator.pipe is not None and not self._authenticator.is_alive():
            self._authenticator.pipe.close()  # `stop` would wait for the dead thread to read it
            self._authenticator.pipe = None  # type: ignore[assignment]  # as zmq.auth does
        self._authenticator.stop()
