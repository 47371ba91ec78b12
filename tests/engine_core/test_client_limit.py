"""How many clients a process's descriptors allow."""

from __future__ import annotations

import os
import resource

import pytest

from nanocore.engine_core.io.limits import (
    DEFAULT_MAX_NUM_CLIENTS,
    MAX_UNADMITTED,
    MIN_UNADMITTED,
    ClientLimit,
)
from nanocore.protocol.errors import ConfigError


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(os, "listdir", lambda _: ["fd"] * 10)
    return monkeypatch


def limit_to(descriptors: pytest.MonkeyPatch, soft: int) -> None:
    descriptors.setattr(resource, "getrlimit", lambda _: (soft, soft))


@pytest.mark.parametrize("soft", [4096, 2**20, resource.RLIM_INFINITY])
def test_many_descriptors_allow_what_is_asked_for_and_some_without_a_session(
    descriptors: pytest.MonkeyPatch, soft: int
) -> None:
    limit_to(descriptors, soft)
    default = DEFAULT_MAX_NUM_CLIENTS
    assert ClientLimit.of_this_process(None) == ClientLimit(default, default + MAX_UNADMITTED)
    assert ClientLimit.of_this_process(2) == ClientLimit(2, 2 + MAX_UNADMITTED)


def test_few_descriptors_lower_the_default_and_leave_guests_a_place(
    descriptors: pytest.MonkeyPatch,
) -> None:
    limit_to(descriptors, 64)
    limit = ClientLimit.of_this_process(None)
    assert 1 <= limit.max_num_clients == limit.max_connections - MIN_UNADMITTED
    assert limit.max_connections + 10 < 64


@pytest.mark.parametrize(("soft", "asked"), [(64, 60), (64, 2000), (20, None), (20, 1)])
def test_more_than_the_descriptors_allow_is_a_config_error(
    descriptors: pytest.MonkeyPatch, soft: int, asked: int | None
) -> None:
    limit_to(descriptors, soft)
    with pytest.raises(ConfigError, match=f"--max-num-clients .* {soft} descriptors.*ulimit"):
        ClientLimit.of_this_process(asked)
