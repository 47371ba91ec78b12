"""`--hf-overrides`, from the flag or from Python, reach every place that reads config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import LLM, EngineStartError
from tests.end_to_end import forked
from tests.model_families import BUILDERS, rewrite_config

STRETCHED: dict[str, Any] = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
pytestmark = pytest.mark.usefixtures("forked_launches")

PROMPT = list(range(40, 90))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS["llama"](tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def stretched(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose file says what the overrides say."""
    folder = shutil.copytree(llama, tmp_path_factory.mktemp("stretched") / "model")
    return rewrite_config(
        folder, lambda config: config["rope_parameters"].update(STRETCHED["rope_scaling"])
    )


def test_what_is_served_is_the_model_whose_file_says_so(llama: Path, stretched: Path) -> None:
    """The engine process takes the longer context, and every rank the stretched positions."""
    plain, other = forked.ask(llama, lambda _: PROMPT)
    rewritten, expected = forked.ask(stretched, lambda _: PROMPT)
    for tp_size in (1, 2):
        card, tokens = forked.ask(
            llama, lambda _: PROMPT, hf_overrides=STRETCHED, tensor_parallel_size=tp_size
        )
        assert card.max_model_len == rewritten.max_model_len == 2 * plain.max_model_len
        assert tokens == expected != other


def test_check_reads_the_overridden_model(llama: Path) -> None:
    plain = forked.run_to_exit("--model", str(llama), "--check")
    length = int(plain.stderr.split("requests of ")[1].split()[0])
    result = forked.run_to_exit(
        "--model", str(llama), "--check", "--tp", "2", "--hf-overrides", json.dumps(STRETCHED)
    )
    assert result.returncode == 0
    assert f"requests of {2 * length} tokens at most: an engine would start" in result.stderr


@pytest.mark.parametrize(
    ("overrides", "code", "word"),
    [
        ("{rope", 2, "--hf-overrides {rope: must be a JSON object such as {"),
        ('{"max_position_embedings": 9}', 2, "the nearest is max_position_embeddings"),
        (
            '{"rope_scaling": {"rope_type": "linear", "factor": 0.5}}',
            3,
            "rope_scaling.factor = 0.5",
        ),
    ],
)
def test_a_wrong_override_is_an_error_that_names_the_flag(
    llama: Path, overrides: str, code: int, word: str
) -> None:
    result = forked.run_to_exit("--model", str(llama), "--check", "--hf-overrides", overrides)
    assert result.returncode == code
    assert "--hf-overrides" in result.stderr
    assert word in result.stderr
    assert "Traceback" not in result.stderr


def test_a_launching_client_hears_of_a_wrong_override(llama: Path) -> None:
    with pytest.raises(EngineStartError, match=r"--hf-overrides: .*factor = 0.5 must be"):
        LLM(llama, hf_overrides={"rope_scaling": {"rope_type": "linear", "factor": 0.5}})
