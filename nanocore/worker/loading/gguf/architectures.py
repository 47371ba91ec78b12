"""The architectures that are served from GGUF files, by llama.cpp's names for them.

What llama.cpp's converter does to a family's weights is told here, and undone in `format`: rows of
Q and K that are in another order, and norms that are stored whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nanocore.protocol.errors import ModelFileError, shorten
from nanocore.worker.loading.gguf.header import Header, read_header


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """A family.

    class_name: as config.json has it. sparse_class: likewise where there are experts, None where
    the family has none. has_pairs: heads of Q and K have the values that rotate together side by
    side, and not half a head apart. has_whole_norms: norms have the one added that Gemma's
    checkpoints leave out.
    """

    class_name: str
    sparse_class: str | None = None
    has_pairs: bool = False
    has_whole_norms: bool = False


ARCHITECTURES: Final = {
    "llama": GgufArchitecture("LlamaForCausalLM", "MixtralForCausalLM", has_pairs=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen2moe": GgufArchitecture("", "Qwen2MoeForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture("", "Qwen3MoeForCausalLM"),
    "gemma": GgufArchitecture("GemmaForCausalLM", has_whole_norms=True),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", has_whole_norms=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", has_whole_norms=True),
    "phi3": GgufArchitecture("Phi3ForCausalLM"),
    "granite": GgufArchitecture("GraniteForCausalLM", has_pairs=True),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", has_pairs=True),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM"),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM"),
}


def architecture_name(header: Header) -> str:
    """One of `ARCHITECTURES`. Raises ModelFileError for another, or none."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelFileError(
            f"{header.path}: general.architecture = {shorten(repr(name))} is not served as GGUF; "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    return name


def has_whole_norms(first: Path) -> bool:
    """See `GgufArchitecture`."""
    return ARCHITECTURES[architecture_name(read_header(first))].has_whole_norms
