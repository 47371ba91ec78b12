"""A worker with a draft model: drafts are right if it is the model itself; memory counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.errors import CacheMemoryError, ConfigError, ModelFileError
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.drafting.draft_model import DraftModel
from nanocore.worker.dry_run import dry_run
from nanocore.worker.layers.decoder import fill_and_pack
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from nanocore.worker.plan import ModelRunnerOutput
from nanocore.worker.rank_messages import WorkerConfig
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.worker import Worker
from tests.model_families import BUILDERS, rewrite_config
from tests.step_plans import make_plan, make_row
from tests.tiny_models import make_tiny_qwen3
from tests.worker.configs import make_worker_config
from tests.worker.device_engine import load_model
from tests.worker.ranks import run_ranks

MAX_DRAFTS = 3
NUM_STEPS = 4
SAMPLINGS = [
    EngineSamplingParams(temperature=0.0),
    EngineSamplingParams(temperature=0.9, top_k=40, presence_penalty=0.5),
]
Step = Callable[..., ModelRunnerOutput]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=16)


def config_of(folder: Path, draft: Path | None = None, **changes: Any) -> WorkerConfig:
    drafts = {"model": str(draft), "num_speculative_tokens": MAX_DRAFTS} if draft else {}
    usual: dict[str, Any] = {"load_format": "auto", "max_num_batched_tokens": 64}
    usual |= {"attention_backend": "cpu", "speculative_config": drafts}
    return make_worker_config(folder=str(folder), **{**usual, **changes})


def run(execute: Step, max_drafts: int, num_groups: int = 1) -> tuple[list[list[int]], set[int]]:
    """Tokens of two rows, and how many these got in a step after the first, which is the prompts'.

    Every row gets as many drafts in each step as there may be.
    """
    rows = []
    for row, sampling in enumerate(SAMPLINGS):
        prompt = [(7 * i + row) % 380 for i in range(20 + row)]
        blocks = range(2 + 3 * num_groups * row, 2 + 3 * num_groups * (row + 1))
        rows.append(make_row(row, prompt, sampling, blocks=blocks, seed=row))
    plan = make_plan(rows, {new.row: new.num_prompt_tokens for new in rows})
    tokens: list[list[int]] = [[], []]
    seen: set[int] = set()
    while len(tokens[0]) < NUM_STEPS * (1 + MAX_DRAFTS):
        output = execute(plan)
        own = np.frombuffer(output.counts, "<i4").tolist() or [1, 1]
        seen.update(own if tokens[0] else [])
        sampled = np.frombuffer(output.token_ids, "<i4").tolist()
        for row, count in zip(np.frombuffer(output.rows, "<i4").tolist(), own, strict=True):
            tokens[row] += sampled[:count]
            sampled = sampled[count:]
        plan = make_plan(chunks=dict.fromkeys((0, 1), 1 + max_drafts))
    return [row[: NUM_STEPS * (1 + MAX_DRAFTS)] for row in tokens], seen


def start(config: WorkerConfig, num_groups: int = 1) -> Worker:
    worker = Worker(config)
    worker.load_model()
    worker.allocate_kv_cache(20 * num_groups, config.max_model_len)
    return worker


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"enforce_eager": True},
        {"attention_backend": "torch"},
        {"load_format": "dummy"},
    ],
    ids=str,
)
def test_with_equal_weights_every_draft_is_right(folder: Path, changes: dict[str, Any]) -> None:
    plain, _ = run(start(config_of(folder, **changes)).runner.execute, 0)
    drafting = start(config_of(folder, folder, **changes))
    tokens, seen = run(drafting.runner.execute, MAX_DRAFTS)
    assert tokens == plain
    assert seen == {1 + MAX_DRAFTS}


@pytest.mark.parametrize(("family", "num_groups"), [("gemma3", 2), ("mistral", 1)])
def test_windows_of_either_model(family: str, num_groups: int, tmp_path: Path) -> None:
    """The draft model's layers keep what a window leaves, and so do the blocks of a full group."""
    folder = BUILDERS[family](tmp_path)
    changes = {"attention_backend": "torch"}
    served = start(config_of(folder, **changes), num_groups)
    plain, _ = run(served.runner.execute, 0, num_groups)
    drafting = start(config_of(folder, folder, **changes), 2)
    tokens, seen = run(drafting.runner.execute, MAX_DRAFTS, 2)
    assert tokens == plain
    assert seen == {1 + MAX_DRAFTS}


def test_ranks_take_the_first_ones_drafts(folder: Path, tmp_path: Path) -> None:
    """Guesses of the others do not matter: they could differ in a bit."""
    other = make_tiny_qwen3(tmp_path, head_dim=24)

    def of_rank(tp: Communicator) -> tuple[list[list[int]], set[int]]:
        model = build_model(
            load_model_config(folder), Placement(torch.float32, torch.device("cpu"), tp)
        )
        kernels = TorchKernels()
        fill_and_pack(model, kernels, lambda e: load_weights(folder, e, model.entry_name))
        draft = load_model(folder if tp.rank == 0 else other)
        proposer = DraftModel(draft, kernels, tp)
        runner = ModelRunner(model, kernels, max_drafts=MAX_DRAFTS, proposer=proposer)
        runner.allocate(kv_cache_format("auto", torch.float32), 20, 16, 2, 64)
        runner.capture(64)
        return run(runner.execute, MAX_DRAFTS)

    first, second = run_ranks(2, of_rank)
    assert first == second
    assert first[1] == {1 + MAX_DRAFTS}


def test_its_memory_counts_and_bits_do_not_change(folder: Path) -> None:
    plain, drafting = config_of(folder), config_of(folder, folder)
    (without,), (outlined,) = dry_run(plain), dry_run(drafting)
    assert outlined.weight_bytes == 2 * without.weight_bytes
    assert outlined.kv_groups[0].block_bytes >= 2 * without.kv_groups[0].block_bytes
    assert outlined.activation_bytes > 2 * without.activation_bytes
    assert without.table_bytes < outlined.table_bytes < 2 * without.table_bytes
    assert outlined.cost == without.cost
    ranks = []
    for config in (plain, drafting):
        worker = Worker(config)
        worker.load_model()
        ranks.append(worker.profile())
    assert ranks[1].weight_bytes == 2 * ranks[0].weight_bytes
    assert ranks[1].kv_groups == outlined.kv_groups
    assert ranks[1].numerics == ranks[0].numerics is not None


def test_weights_that_do_not_fit_are_told_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (info,) = dry_run(config_of(folder))
    name = "nanocore.worker.loading.checked_model.cpu_memory_bytes"
    monkeypatch.setattr(name, lambda *_: info.weight_bytes)
    Worker(config_of(folder))
    with pytest.raises(CacheMemoryError):
        Worker(config_of(folder, folder))


def refuse(config: WorkerConfig, kind: type[Exception], match: str) -> None:
    for begin in (Worker, dry_run):
        with pytest.raises(kind, match=match):
            begin(config)


def test_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(folder, tmp_path / "draft")
    rewrite_config(draft, lambda config: config.update(vocab_size=385))
    refuse(
        config_of(folder, draft),
        ConfigError,
        r"--speculative-config: .*draft has 385 tokens, and the model 384: .* is served$",
    )


def test_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(folder, tmp_path / "draft")
    path = draft / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    path.write_text(json.dumps(tokenizer, indent=1))
    dry_run(config_of(folder, draft))
    vocab = tokenizer["model"]["vocab"]
    names = {token_id: name for name, token_id in vocab.items()}
    vocab["other"] = vocab.pop(names[17])
    path.write_text(json.dumps(tokenizer))
    match = r"tokenizer.json has 384 tokens and .*384, and only one .* 17 as .*: .* is served$"
    refuse(config_of(folder, draft), ConfigError, match)
    path.write_text("{")
    refuse(config_of(folder, draft), ModelFileError, r"draft/tokenizer.json: ")
    path.unlink()
    dry_run(config_of(folder, draft))


def test_fewer_positions_are_refused(folder: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(folder, tmp_path / "draft")
    rewrite_config(draft, lambda config: config.update(max_position_embeddings=63))
    match = r"draft has 63 positions, and requests 64: lower --max-model-len"
    refuse(config_of(folder, draft), ConfigError, match)


def test_models_whose_layers_keep_states_take_drafts_of_a_block_and_make_none(
    folder: Path, tmp_path: Path
) -> None:
    lfm2 = BUILDERS["lfm2_indexed"](tmp_path / "lfm2")
    match = "^--speculative-config: layers 0, 2 of the draft model .*/lfm2 keep states, .*: take"
    refuse(config_of(folder, lfm2), ConfigError, match)
    for drafts in ({"method": "ngram"}, {"method": "suffix"}, {"model": str(folder)}):
        dry_run(config_of(lfm2, speculative_config={**drafts, "num_speculative_tokens": 16}))
        match = "num_speculative_tokens is 17, .* at most --block-size, 16, are served: lower num"
        drafts["num_speculative_tokens"] = 17
        refuse(config_of(lfm2, speculative_config=drafts), ConfigError, match)


def test_a_folder_that_is_not_there_is_said_to_be_the_draft_models(folder: Path) -> None:
    match = r'^--speculative-config, "model": .*/nowhere'
    refuse(config_of(folder, Path("/nowhere")), ModelFileError, match)
