"""What says that there is no memory, in its many ways, is told in one: exit code 4 and a line."""

from __future__ import annotations

import errno
import logging
import os
from collections import deque

import pytest
import torch

from nanocore.engine_core.mailbox import AddRequest
from nanocore.engine_core.process.process import run_core
from nanocore.engine_core.process.start_parts import start_part
from nanocore.protocol.errors import CacheMemoryError, ConfigError
from nanocore.worker.plan import SchedulerOutput
from tests.engine_core.core_under_test import CoreUnderTest
from tests.fakes import make_request

NO_MEMORY = [
    MemoryError(),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    RuntimeError("can't start new thread"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the manual."),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_a_phase_without_memory_is_a_line_with_its_name_and_a_remedy(error: Exception) -> None:
    with pytest.raises(CacheMemoryError) as caught, start_part("load"):
        raise error
    message = str(caught.value)
    assert message.startswith(f"load: out of memory ({type(error).__name__}: ")
    assert "--max-num-batched-tokens" in message
    assert "\n" not in message


def test_what_torch_says_of_memory_on_a_cpu_is_understood() -> None:
    with (
        pytest.raises(CacheMemoryError, match="kv cache: out of memory"),
        start_part("kv cache"),
    ):
        torch.zeros(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ConfigError("out of memory")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, start_part("load"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "exit_code", "words"),
    [
        (MemoryError("2 GB"), 4, "out of memory in a step: 2 GB"),
        (ValueError("a bug"), 70, "internal error: ValueError: a bug"),
    ],
)
def test_a_step_that_fails_tells_clients_why_and_the_exit_code_of_what_kind(
    error: Exception, exit_code: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    core = CoreUnderTest()
    core.results = deque()

    def fail(plan: SchedulerOutput) -> None:
        raise error

    core.submit = fail  # type: ignore[method-assign]
    core.inbox.put(AddRequest(make_request(1, [1, 2], 5)))
    farewell, code = run_core(core.core)
    assert (farewell.reason, farewell.failure, code) == (words, True, exit_code)
    assert len(caplog.records) == 1
