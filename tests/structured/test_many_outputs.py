"""Three hundred outputs of the demo model at temperature 1: each that finishes is valid.

A small share of what `many_outputs` makes.
"""

from __future__ import annotations

import pytest

from nanocore.client.requests.request_outputs import CompletionOutput
from tests.structured.corpus import SCHEMAS
from tests.structured.many_outputs import generate, judge


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_all_that_the_demo_model_finishes_is_valid() -> None:
    """Half of them in a cache that is too small, so that requests are preempted and resumed.

    About four of five finish; far fewer would show little.
    """
    roomy = generate(150)
    narrow = generate(150, num_gpu_blocks_override=160, max_num_seqs=32)
    for totals in (roomy, narrow):
        assert totals.wrong == totals.errors == []
        assert totals.num_valid == totals.num_finished >= 0.75 * totals.num_outputs
    assert roomy.num_preemptions == 0 < narrow.num_preemptions
    assert narrow.by_finish_reason == roomy.by_finish_reason
    assert narrow.output_tokens == roomy.output_tokens


def test_an_output_that_is_not_valid_is_found() -> None:
    name = "call-add-integers"
    texts = ['{"a":1,"b":2}', '{"a":1}', '{"a":1,"b":2', '{"a":1,"b":NaN}']
    outputs = [finished(text) for text in texts]
    cut = CompletionOutput(["{"], 1, [1], 1, "", finish_reason="length")
    failed = CompletionOutput([], 0, [], 0, "", finish_reason="error", message="too complex")
    totals = judge([name] * 6, [*outputs, cut, failed], 1.0, 0)
    assert (totals.num_finished, totals.num_valid) == (4, 1)
    assert [text for _, text, _ in totals.wrong] == texts[1:]
    assert totals.errors == [(name, "too complex")]
    assert totals.by_finish_reason == {"stop": 4, "length": 1, "error": 1}
    assert name in SCHEMAS


def finished(text: str) -> CompletionOutput:
    return CompletionOutput([text], 1, [1, 2], 2, "", finish_reason="stop")
