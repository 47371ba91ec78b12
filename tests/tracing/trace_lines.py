"""Hand-made traces: steps of 10 ms, one each 10 ms, unless they say otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from nanocore.tracing.reader import Step
from nanocore.tracing.timeline import RunTimeline


def line(
    step: int,
    scheduled: dict[str, int] | None = None,
    computed: dict[str, int] | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """A step that begins at step * 10 ms and takes 10."""
    return {
        "step": step,
        "t_s": step / 100,
        "duration_ms": 10.0,
        "scheduled": scheduled or {},
        "computed": computed or dict.fromkeys(scheduled or {}, 0),
        "new": [],
        "resumed": [],
        "preempted": [],
        "finished": [],
        "cached": {},
        "num_running": len(scheduled or {}),
        "num_waiting": 0,
        "free_blocks": 6,
        "total_blocks": 8,
        "token_budget": 64,
        "arrived": [],
        "first": [],
        "sent": {},
        "preempted_by": {},
        "blocked": None,
    } | keys


def arrival(
    request_id: str, prompt_tokens: int, received_s: float, arrived_s: float, **keys: Any
) -> dict[str, Any]:
    """As a step's `arrived` has it."""
    return {
        "id": request_id,
        "session": 1,
        "priority": 0,
        "prompt_tokens": prompt_tokens,
        "received_s": received_s,
        "arrived_s": arrived_s,
    } | keys


def blocked(request_id: str, by: str) -> dict[str, str]:
    """As a step has it."""
    return {"id": request_id, "by": by}


def text(steps: Iterable[dict[str, Any]]) -> str:
    """A file's."""
    return "".join(json.dumps(step, separators=(",", ":")) + "\n" for step in steps)


def write(path: Path, *steps: dict[str, Any]) -> str:
    """The file's name."""
    path.write_text(text(steps))
    return str(path)


def run_of(*steps: dict[str, Any]) -> RunTimeline:
    """Read to its end."""
    run = RunTimeline(1)
    for step in steps:
        run.add(msgspec.json.decode(json.dumps(step), type=Step))
    run.settle()
    return run
