"""`--merge-lora`, from the flag or from Python, reaches every rank, and its errors the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanocore.client import LLM, EngineStartError
from tests.end_to_end import forked
from tests.model_families import BUILDERS
from tests.worker.lora_adapters import ALPHA, RANK, merge_files, modules_of, write_adapter

pytestmark = pytest.mark.usefixtures("forked_launches")

PROMPT = list(range(40, 90))
ENDS = ("q_proj", "o_proj", "up_proj")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS["llama"](tmp_path_factory.mktemp("llama"))


def test_what_is_served_is_the_merged_model(llama: Path, tmp_path: Path) -> None:
    pairs = write_adapter(tmp_path / "adapter", modules_of(llama, ENDS))
    merged = merge_files(llama, tmp_path / "merged", pairs, dict.fromkeys(pairs, ALPHA / RANK))
    plain, other = forked.ask(llama, lambda _: PROMPT)
    _, expected = forked.ask(merged, lambda _: PROMPT)
    lora = str(tmp_path / "adapter")
    card, tokens = forked.ask(llama, lambda _: PROMPT, merge_lora=lora, tensor_parallel_size=2)
    assert tokens == expected != other
    assert card.model == plain.model


def test_an_adapter_that_is_refused_ends_the_start_with_its_reason(
    llama: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path, modules_of(llama, ENDS), use_dora=True)
    result = forked.run_to_exit("--model", str(llama), "--check", "--merge-lora", str(tmp_path))
    assert result.returncode == 3
    assert "adapter_config.json: use_dora = true is not implemented" in result.stderr
    assert "Traceback" not in result.stderr
    with pytest.raises(EngineStartError, match="use_dora = true is not implemented"):
        LLM(llama, merge_lora=str(tmp_path))
