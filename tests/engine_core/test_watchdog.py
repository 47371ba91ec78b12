"""The watchdog's thread: what it watches for is tested with real processes; here, its own end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from nanocore.engine_core.mailbox import Outbox
from nanocore.engine_core.process.watchdog import Watchdog
from nanocore.engine_core.step_clock import StepClock


def test_a_watchdog_that_was_stopped_is_over() -> None:
    """It holds the core: what it drops last it would free while the interpreter ends."""
    core = cast("Any", SimpleNamespace(clock=StepClock()))
    watchdog = Watchdog(core, 1000.0, Outbox(), threading.current_thread())
    watchdog.start()
    assert watchdog.is_alive()
    watchdog.stop()
    assert not watchdog.is_alive()
