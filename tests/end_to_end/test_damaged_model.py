"""A model with a weight that is not a number: what the users of an engine see of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nanocore.client import LLM
from nanocore.protocol.errors import EngineStartError
from tests.tiny_models import make_tiny_qwen3


@pytest.mark.usefixtures("forked_launches")
def test_an_engine_does_not_start_and_names_the_tensor(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model", tied=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][300, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineStartError) as raised:
        LLM(model=folder)
    assert "tensor 'model.embed_tokens.weight' has NaN or infinity" in str(raised.value)
