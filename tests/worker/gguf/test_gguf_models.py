"""Models in GGUF files: logits, ranks and tokens, against transformers and the original tokenizers.

The files are llama.cpp's own; transformers reads them by code of its own, dequantized to float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.packing import Projection
from nanocore.worker.loading.checkpoint import stored_tensors
from nanocore.worker.loading.gguf.format import GgufFormat
from nanocore.worker.loading.gguf.model_files import gguf_model_files
from nanocore.worker.models import load_model_config
from tests.fixtures.checkpoints.make_gguf import CASES, TEMPLATE, TEXTS, original_model
from tests.worker.running import run_script, write_script

CHECKPOINTS = Path("tests/fixtures/checkpoints").resolve()
NAMES = ("llama-q4_k_m", "qwen3-q8_0", "gemma2-q5_k_m", "phi3-q4_0")


def original(name: str) -> Any:
    kind = name.partition("-")[0]
    (case,) = [case for case in CASES if case[0] == kind]
    return original_model(kind, case[3], case[4])


def weights(name: str, config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor that our reader gives, in float32."""
    path = CHECKPOINTS / f"{name}.gguf"
    stored_format = GgufFormat(path, config.head_dim, torch.float32)
    content = path.read_bytes()
    found = {}
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
    for tensor in stored_tensors(path, lambda _: True):
        data = bytearray(content[tensor.offset : tensor.offset + tensor.num_bytes])
        values = torch.frombuffer(data, dtype=dtypes[tensor.dtype]).view(tensor.shape)
        module, _, kind = tensor.name.rpartition(".")
        if kind == "blocks":
            kinds = stored_format._tensors[module].type
            columns = tensor.shape[1] // kinds.block_bytes * kinds.block_numel
            whole = Projection.whole(module, tensor.shape[0], columns)
            stored = stored_format.projection(module, whole.shape, whole.rows, whole.columns)
            assert stored is not None
            weight = stored.unpack({"blocks": values})
            assert not isinstance(weight, Tensor)
            found[f"{module}.weight"] = weight.dequantize()
        else:
            found[tensor.name] = values.float()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_original_ones_but_for_their_rounding(name: str) -> None:
    config = load_model_config(CHECKPOINTS / f"{name}.gguf")
    theirs = dict(original(name).state_dict())
    for key, ours in weights(name, config).items():
        expected = theirs.pop(key)
        if key.endswith("norm.weight") and config.norms_are_whole:
            ours = ours - 1
        error = (ours - expected).norm() / expected.norm()
        assert error < (1e-6 if "norm" in key else 0.12), key  # unrelated ones differ by 1.4
    assert set(theirs) <= {"lm_head.weight"}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_dequantized_model(name: str) -> None:
    """transformers' model of the original settings, with weights that llama.cpp rounded."""
    path = CHECKPOINTS / f"{name}.gguf"
    config = load_model_config(path)
    model = original(name)
    found = weights(name, config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            less = 1 if key.endswith("norm.weight") and config.norms_are_whole else 0
            parameter.copy_(found[key] - less)
    prompts = [[3 + 7 * i % 300 for i in range(40)], [200 - i for i in range(9)]]
    outputs = [greedy(model, prompt) for prompt in prompts]
    script = write_script(prompts, outputs)
    alone = split = run_script(path, script, backend="torch")
    if "_k_" not in name:  # whose rows here are one block
        split = run_script(path, script, 2, backend="torch")
    assert [sample.token_id for sample in alone] == [s.token_id for s in split]
    for one, other in zip(alone, split, strict=True):
        context = prompts[one.request] + outputs[one.request][: one.index]
        with torch.no_grad():
            expected = model(torch.tensor([context])).logits[0, -1]
        assert one.token_id == outputs[one.request][one.index]
        torch.testing.assert_close(one.logits_V, expected, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(other.logits_V, expected, rtol=1e-4, atol=1e-3)


def greedy(model: Any, prompt: list[int], num_tokens: int = 6) -> list[int]:
    token_ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_the_tokens_of_the_original_tokenizer(name: str) -> None:
    files = gguf_model_files(CHECKPOINTS / f"{name}.gguf")
    made = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    expected = json.loads((CHECKPOINTS / f"{name}.tokens.json").read_text())
    for text, ids in zip(TEXTS, expected, strict=True):
        assert made.encode(text, add_special_tokens=False).ids == ids, repr(text)
        if "\u0301" not in text and "\x00" not in text:  # NFC, which Qwen's text is brought to
            assert made.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", NAMES)
def test_the_chat_template_and_the_names_of_special_tokens_are_there(name: str) -> None:
    files = gguf_model_files(CHECKPOINTS / f"{name}.gguf")
    made = Tokenizer(files, name)
    try:
        assert made.config["chat_template"] == TEMPLATE
        has_bos = name != "qwen3-q8_0"
        assert (made.num_added_tokens == (1, 0)) is has_bos
        end = "</s>" if name.startswith(("gemma", "phi")) else "<|im_end|>"
        assert made.named_tokens["eos_token"] == end
        generation = json.loads(files["generation_config.json"])
        assert made.backend.token_to_id(end) in generation["eos_token_id"]
    finally:
        made.close()


@pytest.mark.parametrize("columns", [slice(0, 128), slice(128, 256)])
def test_ranks_cut_between_blocks_or_are_told_what_fits(columns: slice) -> None:
    name = "model.layers.0.mlp.down_proj"
    q8 = GgufFormat(CHECKPOINTS / "qwen3-q8_0.gguf", 64, torch.float32)
    stored = q8.projection(name, (256, 256), slice(0, 256), columns)
    assert stored is not None
    start = columns.start // 32 * 34
    assert stored.slots["blocks"].index == (slice(0, 256), slice(start, start + 4 * 34))
    k = GgufFormat(CHECKPOINTS / "llama-q4_k_m.gguf", 64, torch.float32)
    with pytest.raises(ConfigError, match=r"1 blocks of 256 inputs \(Q.*sizes that can: 1$"):
        k.projection(name, (256, 256), slice(0, 256), columns)
