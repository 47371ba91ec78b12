"""The demo model's answers through every feature are what they were."""

from __future__ import annotations

import asyncio
import json

from nanocore.client import SamplingParams
from tests.end_to_end.forked import engine
from tests.end_to_end.golden_transcripts import DEMO_MODEL, FILE, FLAGS, TURNS, transcripts

_BY_OTHER_MEANS = {
    "detokenize", "skip_special_tokens", "skip_reading_prefix_cache", "pooling",
    "repetition_detection",
}  # fmt: skip
"""Parameters that change no answer, or that have tests of their own."""


def test_the_demo_model_answers_as_it_did() -> None:
    expected = json.loads(FILE.read_text())
    with engine(DEMO_MODEL, *FLAGS) as running:
        found = asyncio.run(transcripts(running.endpoint))
    assert found == expected


def test_every_parameter_has_its_turn() -> None:
    used = {name for given in TURNS.values() for name in given} | {"max_tokens"}
    assert used | _BY_OTHER_MEANS == set(SamplingParams.__struct_fields__)
