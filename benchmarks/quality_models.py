"""The models of quality.py: a checkpoint's weights as floats, and llama.cpp's forms of them.

    models = QualityModels(checkpoint, folder, moved=True, quantizer=path)
    models.floats, models.quantized("q4_k_m")

A published file that is quantized already has its weights on few levels, which a four-bit format
may meet again without any error. `move_off_levels` scales inner channels: the same function, by
other weights, whose groups are about as uneven as before.
"""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from peer_process import PeerError

from nanocore.worker.loading.gguf.header import read_header

Tensors = dict[str, NDArray[np.float32]]
_SPREAD: Final = 0.4
"""Channels are multiplied by 2 ** x, with x even between minus and plus this."""
_READERS: Final = {
    "attn_norm": ("attn_q", "attn_k", "attn_v"),
    "ffn_norm": ("ffn_gate", "ffn_up"),
}
"""What multiplies a norm's output, by names of a layer's tensors."""
_CARRIED: Final = frozenset(("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"))
"""Fields that a reader makes up; the architecture's name is written by the writer."""


class QualityModels:
    """One checkpoint's forms, each made on first use.

    Args:
        checkpoint: A GGUF file of any type.
        folder: Where the forms are kept.
        moved: Whether weights are moved off the checkpoint's levels.
        quantizer: The path of llama-quantize.
    """

    def __init__(
        self, checkpoint: Path, folder: Path, *, moved: bool, quantizer: Path | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self._folder = folder / f"{checkpoint.stem}{'-moved' if moved else ''}"
        self._moved = moved
        self._quantizer = quantizer

    @property
    def floats(self) -> Path:
        """The weights in bfloat16, as models are published."""
        made = self._folder / "bf16.gguf"
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            write_floats(self.checkpoint, made, moved=self._moved)
        return made

    def quantized(self, kind: str) -> Path:
        """What llama-quantize makes of `floats`. kind: such as q4_k_m.

        Raises:
            PeerError: it cannot be made; says why.
        """
        made = self._folder / f"{kind}.gguf"
        if made.exists():
            return made
        if self._quantizer is None:
            raise PeerError(f"{kind}: --llama-quantize PATH is missing")
        command = [str(self._quantizer), str(self.floats), str(made), kind.upper()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            made.unlink(missing_ok=True)
            raise PeerError(f"{kind}: llama-quantize: {(done.stdout + done.stderr)[-2000:]}")
        return made


def bits_per_weight(path: Path) -> float:
    """Bits of a GGUF file's matrices for each of their values."""
    matrices = [tensor for tensor in read_header(path).tensors if len(tensor.shape) > 1]
    return 8 * sum(tensor.num_bytes for tensor in matrices) / num_weights(path)


def num_weights(path: Path) -> int:
    """Values of a GGUF file's matrices."""
    tensors = read_header(path).tensors
    return sum(math.prod(tensor.shape) for tensor in tensors if len(tensor.shape) > 1)


def write_floats(checkpoint: Path, out: Path, *, moved: bool) -> None:
    """Write a GGUF file with the same fields and bfloat16 weights; vectors stay float32."""
    reader = gguf.GGUFReader(checkpoint)
    architecture = reader.fields["general.architecture"].contents()
    tensors: Tensors = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in reader.tensors
    }
    if moved:
        heads = reader.fields[f"{architecture}.attention.head_count"].contents()
        move_off_levels(tensors, heads)
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name not in _CARRIED and name != "general.architecture":
            is_list = field.types[0] == gguf.GGUFValueType.ARRAY
            element = field.types[-1] if is_list else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    types = gguf.GGMLQuantizationType
    for name, values in tensors.items():
        kind = types.BF16 if values.ndim > 1 else types.F32
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def move_off_levels(tensors: Tensors, num_heads: int) -> None:
    """Change weights such that the model computes what it did; for the names of Llama's tensors.

    Rows of `ffn_up` and `attn_v`, and the norms before projections, are multiplied by random
    factors, and the columns that read them are divided by these. num_heads: of queries.
    """
    generator = np.random.default_rng(0)
    layer = 0
    while f"blk.{layer}.attn_norm.weight" in tensors:
        prefix = f"blk.{layer}."
        for norm, readers in _READERS.items():
            factors_I = _factors(generator, len(tensors[f"{prefix}{norm}.weight"]))
            tensors[f"{prefix}{norm}.weight"] *= factors_I
            for reader in readers:
                tensors[f"{prefix}{reader}.weight"] /= factors_I
        values_OI = tensors[f"{prefix}attn_v.weight"]
        head_dim = tensors[f"{prefix}attn_q.weight"].shape[0] // num_heads
        factors_KD = _factors(generator, len(values_OI)).reshape(-1, head_dim)
        of_heads_HD = factors_KD.repeat(num_heads // len(factors_KD), axis=0)
        values_OI *= factors_KD.reshape(-1, 1)
        tensors[f"{prefix}attn_output.weight"] /= of_heads_HD.reshape(-1)
        inner_I = _factors(generator, len(tensors[f"{prefix}ffn_up.weight"]))
        tensors[f"{prefix}ffn_up.weight"] *= inner_I[:, None]
        tensors[f"{prefix}ffn_down.weight"] /= inner_I
        layer += 1


def _factors(generator: np.random.Generator, number: int) -> NDArray[np.float32]:
    return np.exp2(generator.uniform(-_SPREAD, _SPREAD, number)).astype(np.float32)
