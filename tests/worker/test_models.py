"""Every family says what transformers says, token for token, however it is run and split.

Each script of plans is of mixed batches with chunks, a shared prefix and a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanocore.engine_core.process.cache_size import cache_groups
from nanocore.kernels.grouped_weight import CheckpointWeight
from nanocore.kernels.linear_weight import LinearWeight
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kv_cache import FULL, Capacity
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.layers.decoder import fill_and_pack
from nanocore.worker.loading.dummy_weights import fill_dummy_weights
from nanocore.worker.memory.kv_groups import KVGroup
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from nanocore.worker.rank_messages import Quantization
from tests.campaign import in_campaign
from tests.model_families import (
    BUILDERS,
    ONE_OF_EACH,
    Continuation,
    greedy_continuations,
    reference_model,
)
from tests.worker.running import (
    BLOCK_SIZE,
    MAX_NUM_BATCHED_TOKENS,
    NUM_BLOCKS,
    Sample,
    Script,
    make_runner,
    model_groups,
    run_runner,
    run_script,
    write_script,
)

CPU = torch.device("cpu")
NUM_TOKENS = 6
LENGTHS = [1, 2, 16, 17, 40, 63, 127, 191, 31, 95]
MAX_DIFFERENCE = 3e-4
"""Of float32 logits with a standard deviation of 3; ten times what is seen."""
MAX_OF_RECURRENCES = 1e-3
"""Likewise; transformers computes them in chunks of 64 tokens, and this alone differs by 1.3e-4."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Ranks are threads here: with a pool for each, the pools would fight for the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts[5][:40] = prompts[4]
    return prompts


PROMPTS = make_prompts()


@dataclass(frozen=True)
class Family:
    """A model, and what it should say after each of PROMPTS."""

    folder: Path
    expected: list[Continuation]
    kv_groups: Sequence[KVGroup] = ()
    most: float = MAX_DIFFERENCE

    def script(self, num_groups: int = 1) -> Script:
        outputs = [said.token_ids for said in self.expected]
        # So many blocks, and who comes first, that somebody is preempted; windows need few blocks.
        counts = NUM_BLOCKS, *range(num_needed(self.kv_groups), NUM_BLOCKS)
        for first, num_slabs in product(range(len(PROMPTS)), counts):
            script = write_script(
                PROMPTS, outputs, num_groups, None, self.kv_groups, num_slabs, first
            )
            if script.num_preemptions:
                break
        assert script.num_preemptions > 0
        assert script.num_cached_tokens > 0
        return script


def num_needed(kv_groups: Sequence[KVGroup]) -> int:
    """Slabs of the longest request."""
    groups = cache_groups(kv_groups, BLOCK_SIZE) or FULL
    memory = Capacity(1, BLOCK_SIZE, groups, MAX_NUM_BATCHED_TOKENS)
    return memory.slabs_of(max(LENGTHS) + NUM_TOKENS)


Families = Callable[[str], Family]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Families:

    @cache
    def make(name: str) -> Family:
        folder = BUILDERS[name](tmp_path_factory.mktemp(name))
        expected = greedy_continuations(folder, PROMPTS, NUM_TOKENS)
        most = MAX_OF_RECURRENCES if name.startswith(("qwen35", "qwen3_next")) else MAX_DIFFERENCE
        for said in expected:
            best = said.logits_TV.topk(2).values
            assert (best[:, 0] - best[:, 1]).min() > most, "the token is decided"
        return Family(folder, expected, model_groups(folder), most)

    return make


def check(samples: list[Sample], family: Family) -> None:
    expected = family.expected
    said = {(sample.request, sample.index) for sample in samples}
    assert said == {(i, t) for i in range(len(expected)) for t in range(NUM_TOKENS)}
    for sample in samples:
        reference = expected[sample.request]
        where = f"request {sample.request}, token {sample.index}"
        assert sample.token_id == reference.token_ids[sample.index], where
        difference = (sample.logits_V - reference.logits_TV[sample.index]).abs().max()
        assert difference < family.most, where


def first_logits(samples: list[Sample]) -> Tensor:
    first = {sample.request: sample.logits_V for sample in samples if sample.index == 0}
    return torch.stack([first[request] for request in range(len(PROMPTS))])


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def median_rms(x_RV: Tensor) -> float:
    return float(x_RV.square().mean(1).sqrt().median())


@pytest.mark.parametrize(
    ("name", "backend", "tp_size"),
    [
        *((name, "cpu", 1) for name in BUILDERS),
        *((name, "cpu", 2) for name in ONE_OF_EACH),
        *in_campaign(*((name, "cpu", 2) for name in BUILDERS if name not in ONE_OF_EACH)),
        *in_campaign(*((name, "torch", 1) for name in BUILDERS)),
    ],
)
def test_it_says_what_transformers_says(
    name: str, backend: str, tp_size: int, family: Families
) -> None:
    model = family(name)
    check(run_script(model.folder, model.script(), tp_size, backend=backend), model)


@pytest.mark.parametrize(
    "name", ["llama_biased", "phi3", *in_campaign("llama", "qwen3_moe", "gemma3", "olmo2")]
)
def test_four_ranks_share_two_kv_heads(name: str, family: Families) -> None:
    model = family(name)
    check(run_script(model.folder, model.script(), 4), model)


@pytest.mark.parametrize("tp_size", [*in_campaign(1), 2])
@pytest.mark.parametrize("name", ["qwen2_moe", "gpt2", *in_campaign("qwen2", "mistral", "gemma3")])
def test_two_stages_say_the_same(name: str, tp_size: int, family: Families) -> None:
    model = family(name)
    check(run_script(model.folder, model.script(num_groups=2), tp_size), model)


def test_stages_of_one_layer_say_the_same(family: Families) -> None:
    model = family("gemma2")
    check(run_script(model.folder, model.script(num_groups=3)), model)


@pytest.mark.parametrize("backend", ["cpu", *in_campaign("torch")])
@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "qwen2_moe",
        "gpt2",
        *in_campaign("lfm2_moe", "qwen35", "gemma2", "qwen3", "granite", "olmo2"),
    ],
)
def test_bfloat16_rounds_no_worse_than_transformers_does(
    name: str, backend: str, family: Families
) -> None:
    folder, exact = family(name).folder, family(name).expected
    rounded = greedy_continuations(folder, PROMPTS, 1, dtype=torch.bfloat16)
    outputs = [said.token_ids[:1] for said in exact]
    script = write_script(PROMPTS, outputs, kv_groups=family(name).kv_groups)
    ours = first_logits(run_script(folder, script, dtype=torch.bfloat16, backend=backend))
    exact_RV = torch.stack([said.logits_TV[0] for said in exact])
    rounded_RV = torch.stack([said.logits_TV[0] for said in rounded])
    # Medians of prompts: a router that is undecided may round to other experts, in either.
    rounding = median_rms(rounded_RV - exact_RV)
    assert 0 < median_rms(ours - exact_RV) < 1.4 * rounding
    assert 0 < median_rms(ours - rounded_RV) < 1.4 * rounding


@pytest.mark.parametrize("tp_size", [*in_campaign(1), 2])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", *in_campaign("llama_biased", "gemma2")])
def test_an_int8_kv_cache_changes_logits_by_little(
    name: str, tp_size: int, family: Families
) -> None:
    model = family(name)
    samples = run_script(model.folder, model.script(), tp_size, kv_cache_dtype="int8")
    exact_RV = torch.stack([said.logits_TV[0] for said in model.expected])
    assert 0 < rms(first_logits(samples) - exact_RV) < 0.05 * rms(exact_RV)
    equal = [s.token_id == model.expected[s.request].token_ids[s.index] for s in samples]
    assert sum(equal) > 0.6 * len(equal)  # random models are close to ties


@pytest.mark.parametrize(
    ("tp_size", "num_stages", "kv_cache_dtype"),
    [(2, 1, "int8"), *in_campaign((2, 1, "auto"), (1, 2, "auto"), (2, 2, "int8"))],
)
@pytest.mark.parametrize("name", ["qwen3_moe", *in_campaign("mixtral_window", "gemma3")])
@pytest.mark.parametrize("quantization", ["int8", *in_campaign("int4")])
def test_integer_weights_say_what_one_rank_says_of_them_however_they_are_split(
    quantization: Quantization,
    name: str,
    tp_size: int,
    num_stages: int,
    kv_cache_dtype: str,
    family: Families,
) -> None:
    """Ranks round parts of rows, so they differ a little; and so does an int8 KV cache."""
    model = family(name)
    whole_RV = first_logits(run_script(model.folder, model.script(), quantization=quantization))
    exact_RV = torch.stack([said.logits_TV[0] for said in model.expected])
    error = rms(whole_RV - exact_RV)
    # Where a router's choice is close, a token takes other experts.
    factor = 2.0 if "moe" in name else 1.0
    least, most = {"int8": (0.05, 0.2 * factor), "int4": (0.3, 0.9)}[quantization or ""]
    assert least < error / rms(exact_RV) < most
    samples = run_script(
        model.folder,
        model.script(num_stages),
        tp_size,
        kv_cache_dtype=kv_cache_dtype,
        quantization=quantization,
    )
    # Torch's attention depends on the batch in the last bit, which may be the eighth of another.
    is_alike = (tp_size, kv_cache_dtype) == (1, "auto")
    assert rms(first_logits(samples) - whole_RV) < (0.05 if is_alike else 0.9) * error


@pytest.mark.parametrize("name", ["gemma3", *in_campaign("qwen3", "phi3")])
def test_int4_weights_are_the_rounded_ones_and_eight_bits_of_activations_change_little(
    name: str, family: Families
) -> None:
    model = family(name)

    def said(backend: str, *, keeps_activations: bool) -> Tensor:
        samples = run_script(
            model.folder, model.script(), backend=backend, quantization="int4",
            keeps_activations=keeps_activations,
        )  # fmt: skip
        return first_logits(samples)

    exact_RV = torch.stack([said.logits_TV[0] for said in model.expected])
    rounded_RV = said("torch", keeps_activations=True)
    rounding = rms(rounded_RV - exact_RV)
    assert 0.05 < rounding / rms(exact_RV) < 1.0
    assert rms(said("cpu", keeps_activations=True) - rounded_RV) < 1e-4 * rounding
    assert 0 < rms(said("cpu", keeps_activations=False) - rounded_RV) < 0.5 * rounding


def test_with_int4_weights_ends_keys_and_values_are_int8_and_routers_as_they_are(
    family: Families,
) -> None:
    model = build_model(
        load_model_config(family("qwen3_moe").folder), Placement(torch.float32, CPU)
    )
    asked: list[tuple[str | None, tuple[int, ...]]] = []

    class Kernels(TorchKernels):
        def pack_linear(
            self,
            weight: CheckpointWeight,
            quantization: str | None = None,
            dtype: torch.dtype | None = None,
        ) -> LinearWeight:
            assert isinstance(weight, Tensor)
            asked.append((quantization, tuple(weight.shape)))
            return super().pack_linear(weight, quantization, dtype)

    fill_and_pack(model, Kernels(), lambda entries: fill_dummy_weights(entries, 0), "int4")
    config, moe = model.config, model.config.moe
    assert moe is not None
    end = config.vocab_size, config.hidden_size
    assert [kind for kind, shape in asked if shape == end] == ["int8", "int8"]
    router = moe.num_experts, config.hidden_size
    routers = [kind for kind, shape in asked if shape == router]
    assert routers == [None] * len(moe.sparse_layers)
    num_kv_rows = 2 * config.attention.num_kv_heads * config.attention.head_dim
    keys_and_values = num_kv_rows, config.hidden_size
    of_eight_bits = [shape for kind, shape in asked if kind == "int8" and shape != end]
    assert of_eight_bits == [keys_and_values] * config.num_layers
    assert {kind for kind, shape in asked if shape not in (end, router)} == {"int8", "int4", None}


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3", "phi3"])
def test_weights_may_be_loaded_and_run_in_inference_mode(name: str, family: Families) -> None:
    saved, placement = family(name), Placement(torch.float32, CPU)
    model = build_model(load_model_config(saved.folder), placement)
    with torch.inference_mode():
        runner = make_runner(saved.folder, placement, model=model, kv_groups=saved.kv_groups)
        check(run_runner(runner, saved.script()), saved)


@pytest.mark.parametrize("name", ["gemma3_image_text", "mistral3"])
def test_the_text_parts_tensors_may_have_their_new_names(
    name: str, family: Families, tmp_path: Path
) -> None:
    saved = family(name)
    tensors = load_file(saved.folder / "model.safetensors")
    assert any(stored.startswith("vision_tower.") for stored in tensors)
    renamed = {new_name(stored): tensor for stored, tensor in tensors.items()}
    assert not renamed.keys() & tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((saved.folder / "config.json").read_text())
    check(run_script(tmp_path, saved.script()), saved)


def new_name(stored: str) -> str:
    if stored == "language_model.lm_head.weight":
        return "lm_head.weight"
    return "model." + stored.replace("language_model.model.", "language_model.")


def test_up_to_its_original_length_longrope_says_what_transformers_says(family: Families) -> None:
    folder = family("phi3_longrope").folder
    original = load_model_config(folder).max_model_len
    assert original > max(LENGTHS) + NUM_TOKENS
    short = Family(folder, greedy_continuations(folder, PROMPTS, NUM_TOKENS, original))
    said = [text.token_ids for text in short.expected]
    assert said != [text.token_ids for text in family("phi3_longrope").expected]
    runner = make_runner(folder, Placement(torch.float32, CPU), max_model_len=original)
    check(run_runner(runner, short.script()), short)


def test_static_ntk_by_an_override_says_what_transformers_says_at_its_frequencies(
    family: Families,
) -> None:
    plain, factor = family("llama"), 4.0
    config = load_model_config(plain.folder, {"rope_scaling": {"type": "ntk", "factor": factor}})
    num_pairs = config.attention.head_dim // 2
    slower = torch.tensor([1e4 ** -(m / num_pairs) for m in range(num_pairs)])
    slower /= torch.tensor([factor ** ((m + 1) / num_pairs) for m in range(num_pairs)])
    stretched = Family(
        plain.folder, greedy_continuations(plain.folder, PROMPTS, NUM_TOKENS, frequencies=slower)
    )
    assert stretched.expected[7].token_ids != plain.expected[7].token_ids
    placement = Placement(torch.float32, CPU)
    runner = make_runner(plain.folder, placement, model=build_model(config, placement))
    check(run_runner(runner, stretched.script()), stretched)


def test_a_files_own_rotation_table_is_ignored(family: Families, tmp_path: Path) -> None:
    folder = family("llama").folder
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.rotary_emb.inv_freq"] = torch.ones(12)
    save_file(tensors, tmp_path / "model.safetensors")
    check(run_script(tmp_path, family("llama").script()), family("llama"))


def test_gpt2s_files_of_2019_have_no_prefix_and_hold_causal_masks(
    family: Families, tmp_path: Path
) -> None:
    folder = family("gpt2").folder
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    assert not stored.keys() & tensors.keys()
    tensors["h.1.attn.bias"] = torch.ones(1, 1, 8, 8)
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    check(run_script(tmp_path, family("gpt2").script()), family("gpt2"))


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_a_model_saved_without_its_head_has_the_embedding_for_one(
    name: str, family: Families, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = reference_model(family(name).folder)
    whole.model.save_pretrained(tmp_path / "base")
    whole.lm_head.weight = whole.model.embed_tokens.weight
    whole.config.tie_word_embeddings = True
    whole.save_pretrained(tmp_path / "tied")
    expected = greedy_continuations(tmp_path / "tied", PROMPTS, NUM_TOKENS)
    tied = Family(tmp_path / "tied", expected)
    check(run_script(tmp_path / "base", tied.script()), tied)
    assert "ForCausalLM without its head: the embedding is used for one" in caplog.text


class _CountingRank(SingleRank):
    """Counts sums over ranks."""

    def __init__(self) -> None:
        self.num_sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return x


@pytest.mark.parametrize("name", ["llama_biased", "qwen2_moe", "qwen3_moe", "gemma2"])
def test_a_layer_sums_over_ranks_twice(name: str, family: Families) -> None:
    model, rank = family(name), _CountingRank()
    placement = Placement(torch.float32, CPU, rank)
    runner = make_runner(model.folder, placement, backend="torch")  # a replay would call nobody
    script = model.script()
    run_runner(runner, script)
    assert rank.num_sums == 2 * 3 * len(script.plans)
