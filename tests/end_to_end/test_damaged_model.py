"""A model with a weight that is not a number: what the users of an engine see of it."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from nanocore.client import LLM, SamplingParams
from tests.tiny_models import make_tiny_qwen3

DAMAGED = 300


def test_a_prompt_that_touches_it_ends_with_words_and_others_are_answered(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model", tied=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][DAMAGED, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = [[1, 2, 3], [1, DAMAGED, 3], [4] * 20, [5] * 40 + [DAMAGED]]
    params = [
        SamplingParams(temperature=heat, top_p=top_p, seed=1, max_tokens=6, ignore_eos=True)
        for heat, top_p in ((0.0, 1.0), (0.0, 1.0), (1.0, 0.9), (1.0, 0.9))
    ]
    with LLM(model=folder) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
    for output in (outputs[1], outputs[3], again[1], again[3]):
        completion = output.outputs[0]
        assert (completion.finish_reason, list(completion.token_ids)) == ("error", [])
        assert completion.stop_reason is None
        assert "the logits of output token 1 are not finite" in str(completion.message)
    for i in (0, 2):
        assert outputs[i].outputs[0].finish_reason == "length"
        assert len(outputs[i].outputs[0].token_ids) == 6
        assert list(again[i].outputs[0].token_ids) == list(outputs[i].outputs[0].token_ids)
