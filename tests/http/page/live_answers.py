"""What /live answers, made up: steps and requests in which all happens that the page can show."""

from __future__ import annotations

from typing import Any

NOW_S = 100.0


def live_answer(engine: str = "one", num_steps: int = 20, **fields: Any) -> dict[str, Any]:
    """An answer. Each step has as many decode tokens as its number, each fifth a prefill, too."""
    steps = [
        {
            "step": number,
            "t_s": NOW_S - (num_steps - number) * 0.5,
            "duration_s": 0.0041,
            "decode_tokens": number,
            "prefill_tokens": 128 if number % 5 == 0 else 0,
            "running": 4,
            "waiting": 2,
            "used_blocks": 40 + number,
            "preempted": 1 if number == 10 else 0,
        }
        for number in range(1, num_steps + 1)
    ]
    stats = {
        "num_requests_running": 4,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.43,
        "prefix_cache_queries": 200,
        "prefix_cache_hits": 50,
        "prompt_tokens": 1000,
        "generation_tokens": 5000,
        "num_preemptions": 7,
        "num_steps": num_steps,
    }
    return {
        "engine": engine,
        "model": "scripted",
        "max_model_len": 2048,
        "num_blocks": 512,
        "now_s": NOW_S,
        "draining": False,
        "stats": stats,
        "steps": steps,
        "requests": REQUESTS,
    } | fields


def request(handle: int, way: list[tuple[str, float]], **fields: Any) -> dict[str, Any]:
    return {
        "handle": handle,
        "id": None,
        "prompt_tokens": 20,
        "cached_tokens": 0,
        "output_tokens": 7,
        "finish_reason": None,
        "way": way,
    } | fields


PREEMPTED = [
    ("queued", 94.0), ("prefill", 94.5), ("decode", 95.0), ("preempted", 96.0), ("prefill", 97.0),
    ("decode", 97.25),
]  # fmt: skip
REQUESTS = [
    request(1, [*PREEMPTED, ("ended", 98.0)], finish_reason="stop", cached_tokens=16),
    request(2, PREEMPTED[:4], id="chatcmpl-mine"),
    request(3, [("queued", 99.0)]),
    request(4, [("queued", 10.0), ("prefill", 11.0), ("decode", 12.0), ("ended", 20.0)]),
    request(5, [("queued", 99.5), ("a phase of tomorrow", 99.75)]),
]
