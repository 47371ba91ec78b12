"""The benchmarks' models in the quantized forms that people own, for other engines and for ours.

    checkpoints = Checkpoints(model, folder, quantizer)
    checkpoints.path("awq"), checkpoints.path("q4_k_m")

Each is made on first use, in the given folder. AWQ has groups of 128 and zero points, as AutoAWQ
writes them (its GEMM version), by rounding alone: speed does not depend on what values are. GGUF
files are written in bf16 and quantized by llama.cpp's own llama-quantize.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

import torch
from peer_process import PeerError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

KINDS: Final = ("awq", "bf16", "q4_0", "q4_k_m")
_GROUP_SIZE: Final = 128
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns is in each four bits of a word, the lowest first."""
_AWQ_CONFIG: Final = {
    "quant_method": "awq",
    "version": "gemm",
    "bits": 4,
    "group_size": _GROUP_SIZE,
    "zero_point": True,
    "modules_to_not_convert": None,
}


class Checkpoints:
    """Forms of one model. quantizer: the path of llama-quantize, for Q4_0 and Q4_K_M."""

    def __init__(self, model: Path, folder: Path, quantizer: Path | None = None) -> None:
        self.model = model
        self._folder = folder
        self._quantizer = quantizer

    def path(self, kind: str) -> Path:
        """The folder or the file of one of KINDS.

        Raises:
            PeerError: it cannot be made; says what is missing.
        """
        if kind == "awq":
            made = self._folder / f"{self.model.name}-awq"
            if not made.exists():
                write_awq(self.model, made)
            return made
        made = self._folder / f"{self.model.name}-{kind}.gguf"
        if not made.exists() and kind == "bf16":
            _write_gguf(self.model, made)
        elif not made.exists():
            _quantize(self._quantizer, self.path("bf16"), made, kind)
        return made


def _write_gguf(model: Path, out: Path) -> None:
    try:
        from gguf_file import write_gguf
    except ModuleNotFoundError as error:
        raise PeerError(f"GGUF files need `pip install gguf` beside nanocore ({error})") from error
    write_gguf(model, out)


def _quantize(quantizer: Path | None, source: Path, out: Path, kind: str) -> None:
    if quantizer is None or not quantizer.exists():
        raise PeerError(f"{kind}: no llama-quantize beside llama-server; build that target, too")
    command = [str(quantizer), str(source), str(out), kind.upper()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{kind}: llama-quantize failed: {(done.stdout + done.stderr)[-2000:]}")


def write_awq(model: Path, out: Path) -> None:
    """A folder with the projections of all layers in AWQ's packing, and all else as it was."""
    weights: dict[str, Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                weight = tensors.get_tensor(name)
                if name.endswith("_proj.weight"):
                    module = name.removesuffix("weight")
                    parts = zip(("qweight", "qzeros", "scales"), awq_tensors(weight), strict=True)
                    weights |= {module + part: values for part, values in parts}
                else:
                    weights[name] = weight
    out.mkdir(parents=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = _AWQ_CONFIG
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def awq_tensors(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(qweight int32 [I, O / 8], qzeros int32 [G, O / 8], scales float16 [G, O])."""
    num_outputs, num_inputs = weight_OI.shape
    groups_OGI = weight_OI.float().reshape(num_outputs, -1, _GROUP_SIZE)
    low_OG = groups_OGI.amin(-1).clamp(max=0)
    high_OG = groups_OGI.amax(-1).clamp(min=0)
    scale_OG = ((high_OG - low_OG) / 15).clamp(min=1e-6).half()
    zero_OG = (-low_OG / scale_OG.float()).round().clamp(0, 15)
    values_OGI = (groups_OGI / scale_OG.float()[..., None]).round() + zero_OG[..., None]
    values_IO = values_OGI.clamp(0, 15).reshape(num_outputs, num_inputs).t()
    return _packed(values_IO), _packed(zero_OG.t()), scale_OG.t().contiguous()


def _packed(values_RO: Tensor) -> Tensor:
    """Eight columns in each int32."""
    columns = values_RO.to(torch.int64).reshape(values_RO.shape[0], -1, 8)[..., list(_AWQ_ORDER)]
    words = (columns << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
