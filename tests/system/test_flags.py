"""What is meant by a flag that there is not: another engine's name, or a misspelling."""

from __future__ import annotations

import pytest

from nanocore.system.flags import WholeFlagParser, near_flag, unknown_flags
from nanocore.system.other_engines import in_our_words

ELSEWHERE = "docs/coming-from.md has flags of other engines"
OURS = [
    "-tp", "--block-size", "--disable-log-stats", "--kv-events-topic", "--max-model-len",
    "--max-num-seqs", "--no-enable-prefix-caching",
]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--ctx-size", "--max-model-len"),
        ("--ctx-size=4096", "--max-model-len"),
        ("--context-length", "--max-model-len"),
        ("--disable-radix-cache", "--no-enable-prefix-caching"),
        ("-np", "--max-num-seqs"),
        ("--max_model_len", "--max-model-len"),
        ("--max-num-sequences", "--max-num-seqs"),
        ("--block", "--block-size"),
        ("--max", None),  # of several
        ("--disable-log-requests", None),  # of the server, which is not asked here
        ("--kv-events-config", None),
        ("--nothing-of-the-kind", None),
        ("4096", None),
        ("block-size", None),
    ],
)
def test_another_engines_name_goes_before_the_nearest_spelling(
    written: str, meant: str | None
) -> None:
    assert near_flag(written, OURS) == meant


@pytest.mark.parametrize(
    ("given", "ours", "notices"),
    [
        (["-c", "8", "--seed", "1"], ["--max-model-len", "8", "--seed", "1"],
         ["-c is --max-model-len here"]),
        (["--ctx-size=8"], ["--max-model-len=8"], ["--ctx-size is --max-model-len here"]),
        (["--max_num_seqs", "8"], ["--max-num-seqs", "8"], []),
        (["-fa", "--seed", "1"], ["--seed", "1"], ["-fa is ignored: it is chosen automatically"]),
        (["-fa", "model.gguf"], ["model.gguf"], ["-fa is ignored: it is chosen automatically"]),
        (["-ngl", "org/name"], ["org/name"], ["-ngl is ignored: all layers are on --device"]),
        (["-fa", "on"], [], ["-fa on is ignored: it is chosen automatically"]),
        (["-ngl", "-1"], [], ["-ngl -1 is ignored: all layers are on --device"]),
        (["-ngl=-1", "x"], ["x"], ["-ngl=-1 is ignored: all layers are on --device"]),
        (["--trust-remote-code"], [],
         ["--trust-remote-code is ignored: code of a model is never run"]),
        (["-ctk", "q8_0", "x"], ["--kv-cache-dtype", "int8", "x"],
         ["-ctk q8_0 is --kv-cache-dtype int8 here"]),
        (["--cache-type-v=f16"], ["--kv-cache-dtype", "auto"],
         ["--cache-type-v=f16 is --kv-cache-dtype auto here"]),
        (["-ctk", "q8_0", "-ctv", "f16"], ["--kv-cache-dtype", "int8", "-ctv f16"],
         ["-ctk q8_0 is --kv-cache-dtype int8 here"]),  # one alone cannot be had: it is refused
        (["-ctk", "q4_0"], ["-ctk", "q4_0"], []),  # nor can that
        (["-ngl", "0"], ["--device", "cpu"], ["-ngl 0 is --device cpu here"]),
        (["-c", "0", "x"], ["x"], ["-c 0 is ignored: it is the default"]),
        (["--ctx-size=0"], [], ["--ctx-size=0 is ignored: it is the default"]),
        (["-np", "-1"], [], ["-np -1 is ignored: it is the default"]),
        (["--tokenizer-mode", "slow"], ["--tokenizer-mode", "slow"], []),
        (["--swap-space", "4"], [],
         ["--swap-space 4 is ignored: preempted requests are recomputed"]),
        (["-s", "1"], ["-s", "1"], []),  # the program's own
        (["--hf-overrides", '{"a_b": 1}'], ["--hf-overrides", '{"a_b": 1}'], []),
    ],
)  # fmt: skip
def test_flags_of_other_engines_are_renamed_or_left_out(
    given: list[str], ours: list[str], notices: list[str]
) -> None:
    assert in_our_words(given, ["-s", "--max-num-seqs"]) == (ours, tuple(notices))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--verbos", "Why is it?"], f"unknown: --verbos; {ELSEWHERE}"),
        (["--hf_token=secret"], f"unknown: --hf-token; {ELSEWHERE}"),
        (["--config", "a", "--typo", "-1"], f"unknown: --config, --typo; {ELSEWHERE}"),
        (["--blok-size", "1"], "unknown: --blok-size; did you mean --block-size?"),
        (["4096"], f"unknown: 4096; {ELSEWHERE}"),
    ],
)
def test_unknown_flags_are_named_without_values(arguments: list[str], said: str) -> None:
    assert unknown_flags(arguments, OURS) == said


@pytest.mark.parametrize("typed", ["-mli", "-md", "-p", "-hft", "--mod"])
def test_no_flag_is_taken_for_another_and_its_value(typed: str) -> None:
    parser = WholeFlagParser(allow_abbrev=False)
    parser.add_argument("-m", "--model")
    parser.add_argument("-pp")
    given, unknown = parser.parse_known_args([typed, "x"])
    assert (given.model, given.pp, unknown) == (None, None, [typed, "x"])
