"""Pictures of hand-made traces, event by event where it matters."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from nanocore.cli.trace import read_trace
from tests.tracing.pictures import Event, read_picture, slices
from tests.tracing.trace_lines import arrival, line, write


def draw(tmp_path: Path, *steps: dict[str, Any]) -> list[Event]:
    read_trace(write(tmp_path / "t", *steps), str(tmp_path / "p.json"))
    return read_picture(tmp_path / "p.json")


def shown(events: list[Event]) -> list[tuple[str, int, int]]:
    """(name, begin, duration), in ms."""
    return [(one["name"], one["ts"] // 1000, one["dur"] // 1000) for one in events]


def preempting() -> list[dict[str, Any]]:
    """a is computed in two chunks and preempted for b, which has hit what was computed for a."""
    return [
        line(1, {"a": 6}, {"a": 0}, new=["a"], arrived=[arrival("a", 10, 0.003, 0.007)]),
        line(2, {"a": 4}, {"a": 6}, first=["a"]),
        line(3, {"a": 1, "b": 4}, {"a": 10, "b": 4}, new=["b"], cached={"b": 4})
        | {"cached_from": {"b": ["a"]}, "arrived": [arrival("b", 8, 0.021, 0.022)]}
        | {"sent": {"a": 0.032}, "first": ["b"]},
        line(4, {"b": 1}, {"b": 8}, preempted=["a"], preempted_by={"a": "b"}),
        line(5, {"b": 1}, {"b": 9}, finished=["b"]),
        line(6, {"a": 11}, {"a": 0}, resumed=["a"]),
        line(7, {"a": 1}, {"a": 11}, finished=["a"]),
    ]


def test_a_requests_track_says_what_it_did(tmp_path: Path) -> None:
    events = draw(tmp_path, *preempting())
    assert shown(slices(events, "a")) == [
        ("a", 3, 77),
        ("handed over", 3, 4),
        ("queued", 7, 3),
        ("prefill", 10, 10),
        ("prefill", 20, 10),
        ("decode", 30, 10),
        ("preempted", 40, 20),
        ("prefill", 60, 10),
        ("decode", 70, 10),
    ]
    assert shown(slices(events, "b")) == [
        ("b", 21, 39),
        ("handed over", 21, 1),
        ("queued", 22, 8),
        ("prefill", 30, 10),
        ("decode", 40, 20),
    ]
    first, second = [one["args"] for one in slices(events, "a") if one["name"] == "prefill"][:2]
    assert first == {"tokens": 6, "computed": 0}
    assert second == {"tokens": 4, "computed": 6}
    (sent,) = [one for one in events if one["ph"] == "i"]
    assert (sent["name"], sent["ts"]) == ("first token sent", 32_000)


def test_arrows_go_from_who_preempted_and_from_whose_blocks_were_hit(tmp_path: Path) -> None:
    events = draw(tmp_path, *preempting())
    tracks = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in events
        if one["name"] == "thread_name"
    }
    arrows = [
        (one["name"], one["ph"], tracks[one["pid"], one["tid"]], one["ts"] // 1000)
        for one in events
        if one["ph"] in "sf"
    ]
    assert arrows == [
        ("preempts", "s", "b", 40), ("preempts", "f", "a", 40),
        ("hit", "s", "a", 10), ("hit", "f", "b", 30),
    ]  # fmt: skip


def test_steps_and_counters(tmp_path: Path) -> None:
    events = draw(tmp_path, *preempting())
    steps = slices(events, "steps")
    assert shown(steps) == [("step", 10 * i, 10) for i in range(1, 8)]
    assert [one["args"]["tokens"] for one in steps] == [6, 4, 5, 1, 1, 11, 1]
    counters: dict[str, list[tuple[int, int]]] = {}
    for one in events:
        if one["ph"] == "C":
            values = counters.setdefault(one["name"], [])
            values.append((one["ts"] // 1000, one["args"]["value"]))
    assert counters == {
        "scheduled tokens": [(10, 6), (20, 4), (30, 5), (40, 1), (60, 11), (70, 1)],
        "token budget": [(10, 64)],
        "running": [(20, 1), (40, 2), (50, 1)],
        "waiting": [(20, 0)],
        "KV blocks used": [(20, 2)],
    }


def test_steps_that_overlap_have_tracks_of_their_own(tmp_path: Path) -> None:
    events = draw(tmp_path, *(line(i, {"a": 1}, {"a": i}, duration_ms=15.0) for i in range(1, 6)))
    assert [begin for _, begin, _ in shown(slices(events, "steps"))] == [10, 30, 50]
    assert [begin for _, begin, _ in shown(slices(events, "steps (2)"))] == [20, 40]


def test_runs_follow_each_other_in_processes_of_their_own(tmp_path: Path) -> None:
    events = draw(tmp_path, *preempting(), *preempting())
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == ["engine, run 1", "requests, run 1", "engine, run 2", "requests, run 2"]
    timelines = [one for one in slices(events, "a") if one["name"] == "a"]
    assert [one["pid"] for one in timelines] == [2, 4]
    assert timelines[1]["ts"] > timelines[0]["ts"] + timelines[0]["dur"]


def test_ids_are_quoted(tmp_path: Path) -> None:
    name = 'a"\\\n\u2028é{}'
    events = draw(tmp_path, line(1, {name: 3}, new=[name], finished=[name]))
    assert [one["name"] for one in slices(events, name)] == [name, "prefill"]


def test_random_traces_are_drawn_well(tmp_path: Path) -> None:
    for seed in range(20):
        rng, steps = random.Random(seed), []
        names = [f"r0{i}" for i in range(5)]
        for i in range(1, 60):
            one = line(i, {n: rng.choice([1, 1, 7]) for n in names if rng.random() < 0.7})
            done_s = steps[-1]["t_s"] + steps[-1]["duration_ms"] / 1e3 if steps else 0.0
            took_ms = rng.choice([4.0, 9.0, 18.0])
            one["duration_ms"] = max(took_ms, (done_s - one["t_s"]) * 1e3)  # results come in order
            for key in ("new", "resumed", "preempted", "finished", "first"):
                one[key] = rng.sample(names, int(rng.random() * 1.3))
            one["preempted_by"] = {name: rng.choice(names) for name in one["preempted"]}
            steps.append(one)
            for name in one["finished"]:
                names[names.index(name)] = f"r{i}"
        draw(tmp_path, *steps)


def test_a_step_that_repeats_costs_one_event(tmp_path: Path) -> None:
    """10^5 steps are to be drawn in 2 s."""
    events = draw(tmp_path, *(line(i, {"a": 1}, {"a": i}) for i in range(1, 1001)))
    assert len(events) < 1000 + 20
