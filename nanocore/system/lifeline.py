"""Nothing survives its owner: what a process does so that the kernel ends it with its parent."""

from __future__ import annotations

import ctypes
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def signal_at_parent_death(number: int) -> None:
    """Have the kernel send this signal to us when the thread that started us is gone.

    Raises:
        OSError: the system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
