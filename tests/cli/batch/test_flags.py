"""The command line of `nanocore batch`."""

from __future__ import annotations

import pytest

from nanocore.cli.batch.flags import parse
from nanocore.protocol.errors import ConfigError


@pytest.mark.parametrize(
    "arguments",
    [
        ["in", "-", "--model", "m", "--max-num-seqs", "8"],
        ["-i", "in", "-o", "-", "--model=m", "--max-num-seqs", "8"],
        ["--max-num-seqs", "8", "--input-file", "in", "--output-file=-", "--model", "m"],
    ],
)
def test_files_come_first_or_have_flags_and_the_rest_is_the_engines(arguments: list[str]) -> None:
    options = parse(arguments)
    assert (options.input, options.output) == ("in", "-")
    assert options.engine.flags == ("--model=m", "--max-num-seqs", "8")


def test_answers_are_as_a_server_gives_them() -> None:
    options = parse(["in", "out", "--served-model-name", "a", "b", "--reasoning-parser", "none"])
    assert options.app.served_model_names == ("a", "b")
    assert (options.app.tool_parser, options.app.reasoning_parser) == ("auto", None)
    assert options.app.stored_responses_bytes == 0
    assert options.app.api_keys == ()
    assert options.app.allowed_hosts is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "nanocore batch IN OUT"),
        (["in"], "nanocore batch IN OUT"),
        (["--tp", "2", "in", "out"], "an input and an output first"),
        (["-i", "in"], "an input and an output first"),
        (["in", "out", "-i", "in"], "either IN OUT, or -i"),
        (["in", "out", "--max-concurrency", "0"], "not an integer >= 1"),
        (["in", "out", "--endpoint", "ipc:///e", "--max-concurency", "1"],
         "did you mean --max-concurrency?"),
        (["in", "out", "--endpoint", "ipc:///e", "--model", "m"], "leave m out"),
        (["in", "out", "--listen", "ipc:///e"], "not a flag of nanocore batch"),
        (["in", "out", "--tool-call-parser", "x"], "choose auto, none"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert text in str(caught.value)
