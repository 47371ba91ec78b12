"""Admission's limits, at their edges."""

from __future__ import annotations

import numpy as np
import pytest

from nanocore.engine_core.admission import Admission
from nanocore.protocol.errors import ContextLengthError
from nanocore.protocol.messages import ModelCard, Submit
from nanocore.protocol.sampling import EngineSamplingParams

MAX_MODEL_LEN = 64


def admission(num_blocks: int = 16) -> Admission:
    card = ModelCard(
        model="fake",
        architecture="Fake",
        dtype="float32",
        vocab_size=50,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[3, 4],
        block_size=4,
        num_blocks=num_blocks,
    )
    return Admission(card, seed=0)


def submit(num_prompt: int, max_tokens: int | None, **sampling: object) -> Submit:
    params = EngineSamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    prompt = np.arange(num_prompt, dtype="<i4") % 50
    return Submit(request_id="r", prompt_token_ids=prompt.tobytes(), sampling=params)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(63, 1), (1, 63), (32, 32), (63, None)])
def test_prompt_and_output_may_fill_the_models_length(
    num_prompt: int, max_tokens: int | None
) -> None:
    request = admission().build(submit(num_prompt, max_tokens), handle=1, client=1)
    assert request.max_num_tokens == MAX_MODEL_LEN
    assert len(request.key_chain.keys) == num_prompt // 4


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(64, 1), (1, 64), (32, 33), (64, None)])
def test_one_token_more_is_refused(num_prompt: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextLengthError, match=f"{num_prompt} tokens.*max_model_len=64"):
        admission().build(submit(num_prompt, max_tokens), handle=1, client=1)


def test_what_could_never_fit_an_empty_pool_is_refused() -> None:
    small = admission(num_blocks=5)  # 20 tokens; the 21st needs no KV
    assert small.build(submit(10, 11), handle=1, client=1).max_num_tokens == 21
    with pytest.raises(ContextLengthError, match=r"22 tokens.*holds 20.*--kv-cache-memory-bytes"):
        small.build(submit(10, 12), handle=1, client=1)


def test_eos_ids_are_the_models_unless_ignored() -> None:
    build = admission().build
    assert build(submit(1, 1), 1, 1).eos_token_ids == (3, 4)
    assert build(submit(1, 1, ignore_eos=True), 1, 1).eos_token_ids == ()
