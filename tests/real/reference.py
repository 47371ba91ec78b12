"""What transformers says with the dequantized weights of a GGUF file, which it reads by itself.

In float64 it is the truth. In float32, and with activations rounded to bfloat16, it shows how far a
right implementation in that dtype may be from the truth: that is where tolerances come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

Continuation = tuple[list[int], list[int]]
"""A prompt and what an engine has said, as token ids."""


def write_dequantized(path: Path, folder: Path) -> Path:
    """Write a GGUF file's weights in float32, and its settings, as a folder of safetensors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    del model.config.quantization_config  # it is a model of floats, which may be saved
    model.hf_quantizer = None
    model.save_pretrained(folder)
    return folder


class Reference:
    """A folder's model. rounds: outputs of its modules are rounded to bfloat16, as activations are
    in an engine of that dtype; weights are not, for a file's quantized ones are not either."""

    def __init__(self, folder: Path, dtype: torch.dtype, rounds: bool = False) -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=dtype, attn_implementation="eager").eval()
        for name, module in self._model.named_modules():
            if rounds and not name.endswith("rotary_emb"):
                module.register_forward_hook(_rounded)

    def log_probabilities(self, said: Sequence[Continuation]) -> list[Tensor]:
        """Each continuation's, given all tokens before: [tokens, vocabulary] in float64."""
        found = []
        with torch.no_grad():
            for prompt, output in said:
                ids = torch.tensor([prompt + output[:-1]])
                logits = self._model(ids, logits_to_keep=len(output)).logits[0]
                found.append(torch.log_softmax(logits.double(), dim=-1))
        return found


def _rounded(module: Any, arguments: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.bfloat16().to(output.dtype)
    return output
