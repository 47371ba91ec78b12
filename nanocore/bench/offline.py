"""What `throughput`, `latency` and `startup` share: an engine of their own, and a JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nanocore.bench.engine_arguments import engine_arguments
from nanocore.bench.parser import BenchParser
from nanocore.bench.statistics import Distribution
from nanocore.client import LLM
from nanocore.protocol.errors import ConfigError

PERCENTILES: Final = (10, 25, 50, 75, 90, 99)
DEMO_MODEL_ID: Final = "demo model"


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """model: None is the demo model. arguments: of the engine."""

    model: str | None
    tokenizer: str | None
    arguments: Mapping[str, str | bool]

    def launch(self) -> LLM:
        """An engine that is ready; ends with `close`, or with the `with` block.

        Raises:
            EngineStartError: with the engine's own reason.
        """
        arguments: dict[str, Any] = dict(self.arguments)
        return LLM(self.model, tokenizer=self.tokenizer, **arguments)

    @property
    def model_id(self) -> str:
        """As results name it."""
        return self.model or DEMO_MODEL_ID


def build_parser(name: str, description: str) -> BenchParser:
    """With the flags that all three have."""
    parser = BenchParser(
        prog=f"nanocore bench {name}",
        description=f"{description} Flags that are not listed here are the engine's.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="folder, or id on the hub (default: the demo model)")
    parser.add_argument(
        "--output-json", metavar="FILE", help="write the figures as JSON into this file"
    )
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, OwnEngine]:
    """What is ours, and the engine.

    Raises:
        ConfigError: a flag or a value that cannot be, or --output-json in no folder.
        SystemExit: --help.
    """
    given, others = parser.parse_known_args(arguments)
    if given.output_json is not None and not Path(given.output_json).parent.is_dir():
        raise ConfigError(f"--output-json {given.output_json}: there is no such folder")
    engine = OwnEngine(given.model, getattr(given, "tokenizer", None), engine_arguments(others))
    return given, engine


def percentiles_of(values: Sequence[float]) -> Distribution:
    """With vLLM's percentiles."""
    return Distribution.of(values, PERCENTILES)


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    """Write it, if a path was given.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(result, indent=4) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json {path}: {error.strerror}") from None
