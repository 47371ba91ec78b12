"""`--check`, and what flags about model files and memory do, through real processes."""

from __future__ import annotations

import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from nanocore.client import LLM, SamplingParams
from nanocore.kernels.cpu.library import find_library
from tests.campaign import in_campaign
from tests.end_to_end import forked
from tests.end_to_end.engine_process import command
from tests.end_to_end.forked import run_to_exit
from tests.end_to_end.rank_processes import write_wide_model

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


def test_check_says_what_an_engine_would_have_and_starts_none(
    tiny_model: Path, short_path: Path
) -> None:
    listen = f"ipc://{short_path}/e/engine.sock"
    flags = ("--model", str(tiny_model), "--check", "--tp", "2", "--listen", listen)
    result = run_to_exit(*flags)
    assert result.returncode == 0
    library = find_library()
    kernels = f"cpu ({library.instruction_set}" if library else "torch\n"
    assert f"dtype float32, kernels {kernels}" in result.stderr
    assert "rank 0: " in result.stderr
    assert "rank 1: " in result.stderr
    assert "requests of 1024 tokens at most: an engine would start" in result.stderr
    assert not (short_path / "e").exists()


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        (["--tp", "3"], 2, "num_attention_heads"),
        (["--max-model-len", "5000"], 2, "--max-model-len 5000"),
        (["--kv-cache-dtype", "fp8"], 2, "--kv-cache-dtype fp8 needs CUDA"),
        (["--quantization", "awq"], 2, "how a checkpoint is quantized is found without this flag"),
        (["--quantization", "fp8"], 2, "--quantization fp8 needs CUDA; on a CPU int8 needs as"),
        (["--quantization", "fp8", "--batch-invariant"], 2, "leave --batch-invariant out, or use"),
        (
            ["--quantization", "fp8", "--activation-quantization", "none"],
            2,
            "leave --activation-quantization none out",
        ),
        (["--kv-cache-memory-bytes", "1000"], 4, "--kv-cache-memory-bytes"),
        (["--model", "/nowhere"], 3, "/nowhere"),
    ],
)
def test_check_finds_what_would_keep_an_engine_from_starting(
    tiny_model: Path, flags: list[str], code: int, word: str
) -> None:
    result = run_to_exit("--model", str(tiny_model), "--device", "cpu", "--check", *flags)
    assert result.returncode == code
    assert word in result.stderr
    assert "Traceback" not in result.stderr


def test_check_reads_the_headers_of_weight_files(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run_to_exit("--model", str(folder), "--check")
    assert result.returncode == 3
    assert str(weights) in result.stderr


def test_check_makes_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    content = Path("tests/fixtures/checkpoints/qwen3-q8_0.gguf").read_bytes()
    path.write_bytes(content.replace(b"\x05\0\0\0\0\0\0\0qwen2", b"\x05\0\0\0\0\0\0\0qwenZ"))
    assert run_to_exit("--model", str(path), "--check").returncode == 3
    path.write_bytes(content)
    assert run_to_exit("--model", str(path), "--check").returncode == 0


def test_weights_that_the_memory_does_not_hold_are_found_before_loading(tmp_path: Path) -> None:
    model = write_wide_model(tmp_path / "wide", intermediate_size=2**30)
    result = run_to_exit("--model", str(model), "--check", "--load-format", "dummy")
    assert result.returncode == 4
    assert "the weights need" in result.stderr


@pytest.mark.parametrize("megabytes", [400, *in_campaign(1000)])
def test_an_engine_without_room_to_start_says_so(
    tiny_model: Path, short_path: Path, megabytes: int
) -> None:
    def limit() -> None:  # as `ulimit -v` does
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * 10**6, megabytes * 10**6))

    listen = f"ipc://{short_path}/e/engine.sock"
    flags = ("--model", str(tiny_model), "--listen", listen, "--kv-cache-memory-bytes", "600000000")
    result = subprocess.run(
        command(*flags), capture_output=True, text=True, check=False, preexec_fn=limit
    )
    assert result.returncode == 4, result.stderr
    assert "Traceback" not in result.stderr
    error = result.stderr.splitlines()[-1]
    assert error.startswith("nanocore-engine: ")
    assert "out of memory" in error or "at most" in error


@pytest.mark.parametrize("stderr", ["full", "closed"])
def test_an_error_that_nobody_can_read_has_its_exit_code_all_the_same(stderr: str) -> None:
    redirection = {"full": "2>/dev/full", "closed": ">&- 2>&-"}[stderr]
    line = " ".join([*command("--block-size", "7"), redirection])
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""


def test_auto_length_is_what_fits_the_memory(tiny_model: Path) -> None:
    card, tokens = forked.ask(
        tiny_model,
        lambda card: [1] * (card.max_model_len - 4),
        max_model_len="auto",
        kv_cache_memory_bytes=500_000,
    )
    assert card.max_model_len == card.num_blocks * 16 < 1024
    assert len(tokens) == 4


def test_int8_holds_almost_twice_the_tokens_of_bf16(bf16_model: Path) -> None:
    num_blocks = {}
    for dtype in ("auto", "int8"):
        card, tokens = forked.ask(
            bf16_model, lambda _: [1, 2, 3], kv_cache_dtype=dtype, kv_cache_memory_bytes=2_000_000
        )
        num_blocks[dtype] = card.num_blocks
        assert len(tokens) == 4
    # head_dim 24: 48 bytes against 24 and a scale of 2.
    assert num_blocks["int8"] / num_blocks["auto"] == pytest.approx(48 / 26, rel=0.02)


@pytest.mark.campaign
def test_dummy_weights_are_the_same_model_at_any_number_of_ranks(tmp_path: Path) -> None:
    model = write_wide_model(tmp_path / "dummy", intermediate_size=256)
    results = []
    for tp_size in (1, 2):
        with LLM(model, load_format="dummy", tensor_parallel_size=tp_size, seed=3) as llm:
            (output,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
            results.append(output.outputs[0].token_ids)
    assert results[0] == results[1]


def test_a_check_tells_what_takes_memory(tiny_model: Path) -> None:
    result = run_to_exit("--model", str(tiny_model), "--check", "--device", "cpu", "--tp", "2")
    assert result.returncode == 0
    for words in ("memory, the most of 2 ranks", "room for "):
        assert words in result.stdout
