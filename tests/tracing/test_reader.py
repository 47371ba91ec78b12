"""Files as engines leave them: cut, appended to, still written, newer, or no trace at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanocore.tracing.reader import TraceError, TraceReader
from tests.tracing.trace_lines import line, text, write


def steps_of(path: Path) -> tuple[list[tuple[int, int]], int]:
    """((run, step) of each, unfinished lines)."""
    reader = TraceReader(str(path))
    return [(run, step.step) for run, step in reader], reader.num_cut_lines


def test_steps_come_with_their_runs(tmp_path: Path) -> None:
    write(tmp_path / "t", line(1), line(2), line(1), line(2), line(3))
    assert steps_of(tmp_path / "t") == ([(1, 1), (1, 2), (2, 1), (2, 2), (2, 3)], 0)


@pytest.mark.parametrize("num_chars", [1, 5, 9, 40, 200])
def test_the_last_line_of_a_file_that_is_written_may_be_cut(tmp_path: Path, num_chars: int) -> None:
    whole = text([line(1), line(2)])
    (tmp_path / "t").write_text(whole + text([line(3)])[:num_chars])
    assert steps_of(tmp_path / "t") == ([(1, 1), (1, 2)], 1)


def test_blank_lines_are_nothing_and_a_last_line_needs_no_end(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text([line(1), line(2)])[:-1])
    assert steps_of(tmp_path / "t") == ([(1, 1), (1, 2)], 0)

    (tmp_path / "t").write_text("\n" + text([line(1)]) + "\n")
    assert steps_of(tmp_path / "t") == ([(1, 1)], 0)


@pytest.mark.parametrize("num_chars", [9, 40, 200])
def test_a_run_may_begin_behind_a_line_that_was_cut(tmp_path: Path, num_chars: int) -> None:
    cut = text([line(8)])[:num_chars]
    (tmp_path / "t").write_text(text([line(7)]) + cut + text([line(1), line(2)]))
    assert steps_of(tmp_path / "t") == ([(1, 7), (2, 1), (2, 2)], 1)


def test_unknown_keys_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "t", line(1, {"a": 3}) | {"later": [{"x": 1}], "y": None})
    ((_, step),) = TraceReader(str(tmp_path / "t"))
    assert (step.first, step.sent, step.blocked, step.token_budget) == ([], {}, None, 64)


@pytest.mark.parametrize(
    ("bad", "number"),
    [
        ("# Read me\n", 1),
        ('{"steps":1}\n', 1),
        ("[1,2]\n", 1),
        (text([line(1)]) + '{"step":2,"t_s":0}\n', 2),
        (text([line(1)]) + text([line(2, t_s="soon")]), 2),
        ("\x00\x01\n", 1),
        ("no end of line", 1),
        ('{"a":' * 100_000 + "\n", 1),
    ],
)
def test_what_is_no_step_is_told_with_its_line(tmp_path: Path, bad: str, number: int) -> None:
    (tmp_path / "t").write_text(bad)
    with pytest.raises(TraceError, match=rf"t is not a step trace: line {number} \(") as caught:
        steps_of(tmp_path / "t")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_no_step(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b'{"step":1,"\xff\xfe":0}\n')
    with pytest.raises(TraceError, match="line 1"):
        steps_of(tmp_path / "t")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file or directory; name the FILE"):
        steps_of(tmp_path / "none")
    with pytest.raises(TraceError, match="Is a directory"):
        steps_of(tmp_path)
