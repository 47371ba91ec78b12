"""The demo model's distribution: found where it is installed, and said where it is not."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

import nanocore
from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.process.process import find_model
from nanocore.protocol.errors import ConfigError

ROOT = Path(__file__).parents[1]


def test_an_engine_without_a_model_serves_the_installed_demo_model() -> None:
    folder = find_model(EngineConfig())
    assert folder == demo_model_folder()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }


def test_looking_for_it_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nanocore_demo_model", raising=False)
    demo_model_folder()
    assert "nanocore_demo_model" not in sys.modules


def test_without_it_an_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nanocore_demo_model", None)
    with pytest.raises(ConfigError, match=r"no --model .* pip install \./demo_model$") as raised:
        find_model(EngineConfig())
    assert raised.value.exit_code == 2


def test_its_distribution_has_the_engines_version() -> None:
    project = tomllib.loads((ROOT / "demo_model" / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == nanocore.__version__
