"""Models in GGUF files: logits, ranks and tokens, against transformers and the original tokenizers.

The files are llama.cpp's own; transformers reads them by code of its own, dequantized to float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

from nanocore.client.tokenizer import Tokenizer
from nanocore.kernels.cpu.library import find_library
from nanocore.protocol.errors import ConfigError
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.dry_run import dry_run
from nanocore.worker.loading.checkpoint import stored_tensors
from nanocore.worker.loading.gguf.gguf_format import GgufFormat
from nanocore.worker.loading.gguf.model_files import gguf_model_files
from nanocore.worker.loading.weights import Projection
from nanocore.worker.models import load_model_config
from nanocore.worker.worker import Worker
from tests.fixtures.checkpoints.make_gguf import CASES, TEMPLATE, TEXTS, original_model
from tests.worker.configs import make_worker_config
from tests.worker.running import run_script, write_script

CHECKPOINTS = Path("tests/fixtures/checkpoints").resolve()
NAMES = ("llama-q4_k_m", "qwen3-q8_0", "gemma2-q5_k_m", "phi3-q4_0")


def original(name: str) -> Any:
    kind = name.partition("-")[0]
    (case,) = [case for case in CASES if case[0] == kind]
    return original_model(kind, case[3], case[4])


def weights(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    stored_format = GgufFormat(path, config.attention.head_dim, torch.float32)
    content = path.read_bytes()
    found = {}
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
    for tensor in stored_tensors(path, lambda _: True):
        data = bytearray(content[tensor.offset : tensor.offset + tensor.num_bytes])
        values = torch.frombuffer(data, dtype=dtypes[tensor.dtype]).view(tensor.shape)
        module, _, kind = tensor.name.rpartition(".")
        if kind == "blocks":
            kinds = stored_format._tensors[module].type
            shape = len(values), tensor.shape[1] // kinds.block_bytes * kinds.block_numel
            whole = Projection(module, shape, slice(0, shape[0]), slice(0, shape[1]))
            stored = stored_format.projection(whole)
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
    for key, ours in weights(CHECKPOINTS / f"{name}.gguf", config).items():
        expected = theirs.pop(key)
        if key.endswith("norm.weight") and getattr(config, "norms_are_whole", False):
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
    found = weights(path, config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            less = (
                1
                if key.endswith("norm.weight") and getattr(config, "norms_are_whole", False)
                else 0
            )
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


@pytest.mark.skipif(find_library() is None, reason="no library was compiled")
@pytest.mark.parametrize("name", NAMES)
def test_a_check_reckons_with_the_memory_that_a_start_takes(name: str) -> None:
    path = str(CHECKPOINTS / f"{name}.gguf")
    config = make_worker_config(folder=path, load_format="auto", attention_backend="cpu")
    (checked,) = dry_run(config)
    worker = Worker(config)
    worker.load_model()
    assert checked.weight_bytes == pytest.approx(worker.profile().weight_bytes, rel=0.03)


INSIDE = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_llama(path: Path, model: Any, left_out: str) -> None:
    """A Llama's weights as llama.cpp's converter writes them: pairs that rotate side by side."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "context_length": 128,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if name.endswith(left_out):
            continue
        theirs = ENDS.get(module)
        if theirs is None:
            layer, _, rest = module.removeprefix("model.layers.").partition(".")
            theirs = f"blk.{layer}.{INSIDE[rest]}"
            if rest.endswith(("q_proj", "k_proj")):
                halves = tensor.unflatten(0, (-1, 2, config.head_dim // 2))
                tensor = halves.transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{theirs}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("left_out", ["(nothing)", "o_proj.bias"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_llama_with_biases_says_what_it_says_in_transformers(
    tmp_path: Path, left_out: str, tp_size: int
) -> None:
    """llama.cpp takes each bias for itself; those of Q and K are in its order of rows, too."""
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_bias=True,
        mlp_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_() if not name.endswith(left_out) else parameter.zero_()
    write_llama(tmp_path / "model.gguf", model, left_out)
    prompt = [5, 80, 33, 7, 7, 61]
    output = greedy(model, prompt)
    script = write_script([prompt], [output])
    with torch.no_grad():
        expected = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    for backend in ("torch", "cpu"):
        samples = run_script(tmp_path / "model.gguf", script, tp_size, backend=backend)
        for sample, logits in zip(samples, expected, strict=True):
            torch.testing.assert_close(sample.logits_V, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [slice(0, 128), slice(128, 256)])
def test_ranks_cut_between_blocks_or_are_told_what_fits(columns: slice) -> None:
    name = "model.layers.0.mlp.down_proj"
    q8 = GgufFormat(CHECKPOINTS / "qwen3-q8_0.gguf", 64, torch.float32)
    kept = Projection(name, (256, 256), slice(0, 256), columns)
    stored = q8.projection(kept)
    assert stored is not None
    start = columns.start // 32 * 34
    assert stored.slots["blocks"].index == (slice(0, 256), slice(start, start + 4 * 34))
    k = GgufFormat(CHECKPOINTS / "llama-q4_k_m.gguf", 64, torch.float32)
    with pytest.raises(ConfigError, match=r"in blocks of 256 inputs \(Q.*this layer: 1$"):
        k.projection(kept)
