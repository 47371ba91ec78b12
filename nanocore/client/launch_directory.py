"""LaunchDirectory: the private directory of an engine that a client launched.

It goes with its client, however that ends: the client removes it, or the engine as it ends, or, if
both were killed, the next launch. An flock on the directory, held for the client's life, says that
it is in use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_PREFIX: Final = "nanocore-launch-"


class LaunchDirectory:
    """A new directory of mode 0700 below the user's directory for temporary files.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.fstat(self._fd).st_nlink:
                break
            os.close(self._fd)  # another launch came before the lock, and took it for left over
        self._remove_left_over()

    def remove(self) -> None:
        """Remove it with everything in it. Idempotent."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1

    def _remove_left_over(self) -> None:
        """Remove the directories whose clients are gone."""
        for path in self.path.parent.glob(f"{_PREFIX}*"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue  # gone by now, or another user's
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                pass  # in use
            finally:
                os.close(fd)
