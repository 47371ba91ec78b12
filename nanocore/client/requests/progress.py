"""Progress of one request: its times, its running samples, and its waiters.

Shared by a stream and its samples, in one asyncio event loop. One reader waits for news or for the
end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Progress:
    """Progress of one request.

    start_s, first_token_s, end_s: by the monotonic clock; the last two None until then.
    num_running: samples that neither the engine nor a stop string has ended. num_unread: samples
    that were not read to their end. is_awaited: whether `token_came` must be called. is_behind: the
    last read left tokens for the next one, so that other tasks run first.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_running = self.num_unread = num_samples
        self.start_s = time.monotonic()
        self.first_token_s: float | None = None
        self.end_s: float | None = None
        self.is_awaited = True  # for first_token_s
        self.is_behind = False
        self._news: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._at_end: Callable[[], None] | None = None
        self._at_next: Callable[[], None] | None = None

    def news(self) -> asyncio.Future[None]:
        """Return a future that is done as soon as something new arrives."""
        self._news = asyncio.Future()
        self.is_awaited = True
        return self._news

    def listen(self, callback: Callable[[], None]) -> None:
        """Call this whenever something has arrived."""
        self._listener = callback
        self.is_awaited = True

    def on_end(self, callback: Callable[[], None]) -> None:
        """Register a callback for the end; called once."""
        self._at_end = callback

    def at_next(self, callback: Callable[[], None]) -> None:
        """Register a callback for the next token or the end; called once."""
        self._at_next = callback
        self.is_awaited = True

    def token_came(self) -> None:
        """Note a token; only called while `is_awaited`."""
        if self._at_next is not None:
            self._tell_next()
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        elif self._listener is not None:  # then no future waits
            self._listener()
            return
        self.wake()

    def wake(self) -> None:
        """Wake the reader, because something has arrived."""
        future, self._news = self._news, None
        if future is not None and not future.done():
            future.set_result(None)
        if self._listener is not None:
            self._listener()
        else:
            self.is_awaited = self.first_token_s is None

    def wake_all(self) -> None:
        """Wake all waiters at the end."""
        self._tell_next()
        self.wake()
        callback, self._at_end = self._at_end, None
        if callback is not None:
            callback()

    def _tell_next(self) -> None:
        callback, self._at_next = self._at_next, None
        if callback is not None:
            callback()

    def sample_ended(self) -> None:
        """Note that the engine, or a stop string, has ended a sample."""
        self.num_running -= 1
        if self.num_running:
            self.wake()
        else:
            self.end_s = time.monotonic()
            self.wake_all()
