"""Checks a Chrome trace's structure, as a viewer relies on it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read_picture(path: Path) -> list[Event]:
    """Its events, after what always holds of them was checked."""
    picture = json.loads(path.read_text())
    assert picture.keys() == {"displayTimeUnit", "traceEvents"}
    events: list[Event] = picture["traceEvents"]
    assert {event["ph"] for event in events} <= set("XCMisf")
    for event in events:
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
    _check_slices(events)
    _check_counters(events)
    _check_arrows(events)
    _check_names(events)
    return events


def slices(events: list[Event], track: str) -> list[Event]:
    """Of the tracks of that name, in the file's order."""
    named = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == track
    }
    found = [event for event in events if event["ph"] == "X"]
    return [event for event in found if (event["pid"], event["tid"]) in named]


def _check_slices(events: list[Event]) -> None:
    """On a track each slice is within the one that is open, or begins when none is."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        open_until: list[int] = []
        last = 0
        for event in track:
            begin, end = event["ts"], event["ts"] + event["dur"]
            assert last <= begin <= end, event
            last = begin
            while open_until and open_until[-1] <= begin and len(open_until) > 1:
                open_until.pop()
            if open_until and open_until[-1] <= begin and event["dur"] > 0:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def _check_counters(events: list[Event]) -> None:
    last: dict[tuple[int, str], int] = {}
    for event in events:
        if event["ph"] == "C":
            name = event["pid"], event["name"]
            assert last.get(name, 0) <= event["ts"], event
            assert all(value >= 0 for value in event["args"].values())
            last[name] = event["ts"]


def _check_arrows(events: list[Event]) -> None:
    """Each begins and ends once, in this order of time, within a slice of its track."""
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
            assert any(
                one["ts"] <= event["ts"] <= one["ts"] + one["dur"]
                for one in events
                if one["ph"] == "X" and (one["pid"], one["tid"]) == (event["pid"], event["tid"])
            ), event
    for begin, end in arrows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert begin["ts"] <= end["ts"]
        assert begin["name"] == end["name"]


def _check_names(events: list[Event]) -> None:
    tracks = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    named = [
        (event["pid"], event["tid"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    ]
    assert len(named) == len(set(named))
    assert tracks <= set(named)
