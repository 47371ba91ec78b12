"""What is meant by a flag that there is not: another engine's name, or a misspelling."""

from __future__ import annotations

import pytest

from nanocore.system.flags import near_flag

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
    assert near_flag(written, OURS, 0.7) == meant
