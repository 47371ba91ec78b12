"""The format of a checkpoint, from what its JSON files say of quantization; or why there is none.

That is `quantization_config` of config.json, `compression_config` in older files, or a file of its
own, quantize_config.json, that AutoGPTQ and AutoAWQ once wrote beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.checkpoint import CheckpointTensor, all_tensors
from nanocore.worker.loading.weights import TensorNames, WeightFormat

logger = logging.getLogger(__name__)

OLD_FILE: Final = "quantize_config.json"
SERVED: Final = (
    "awq (gemm, 4 bits), gptq (4 and 8 bits), compressed-tensors (pack-quantized, int-quantized, "
    "float-quantized) and fp8"
)
_NAMES: Final = ("quantization_config", "compression_config")


def folder_format(folder: Path, names: TensorNames, *, log: bool = False) -> WeightFormat | None:
    """Choose the weight format of a model folder; None for floats.

    Args:
        names: from the files' names of tensors to the model's.
        log: say how weights are stored.

    Raises:
        ModelFileError: a file is missing or malformed, or asks for what is not served.
    """
    said = folder_settings(folder)
    if said is None:
        return None
    stored = {name: one for one in all_tensors(folder) if (name := names(one.name))}
    found = read_weight_format(said, stored)
    if log:
        logger.info("%s: %s", said.source, found)
    return found


def folder_settings(folder: Path) -> Settings | None:
    """Quantization settings of a model folder; None if there are none. Raises ModelFileError."""
    return quantization_settings(Settings.read(folder / "config.json"), folder)


def quantization_settings(settings: Settings, folder: Path | None) -> Settings | None:
    """Quantization settings; None if there are none.

    settings: config.json. folder: where it lies.

    Raises ModelFileError: the old file is there and malformed.
    """
    for name in _NAMES:
        if settings.has(name):
            return settings.section(name)
    text = settings.section("text_config")  # of models that also see images
    if text.has(_NAMES[0]):
        return text.section(_NAMES[0])
    if folder is None or not (folder / OLD_FILE).exists():
        return None
    old = Settings.read(folder / OLD_FILE)
    # AutoGPTQ named no method; AutoAWQ's file of this name has w_bit.
    method = old.get("quant_method", str, "awq" if old.has("w_bit") else "gptq")
    return old.with_values({"quant_method": method} | old.values, OLD_FILE)


def format_digest(folder: Path) -> bytes:
    """Digest of the quantization settings: equal bytes may be other weights."""
    said = folder_settings(folder)
    values = None if said is None else said.values
    return xxhash.xxh3_128_digest(msgspec.json.encode(values, order="deterministic"))


def read_weight_format(settings: Settings, stored: Mapping[str, CheckpointTensor]) -> WeightFormat:
    """Choose a checkpoint's weight format.

    Args:
        settings: see `quantization_settings`.
        stored: what the files hold, by the names that models have for it.

    Raises:
        ModelFileError: it is quantized in a way that is not served.
    """
    # Imported here: a checkpoint of floats, or a GGUF file, needs none of them.
    from nanocore.worker.loading.formats.awq import AwqFormat
    from nanocore.worker.loading.formats.compressed_tensors import CompressedTensorsFormat
    from nanocore.worker.loading.formats.fp8 import Fp8Format
    from nanocore.worker.loading.formats.gptq import GptqFormat
    from nanocore.worker.loading.formats.quantization_config import CheckpointTensors

    readers: dict[str, Callable[[Settings, CheckpointTensors], WeightFormat]] = {
        "awq": AwqFormat.read,
        "gptq": GptqFormat.read,
        "compressed-tensors": CompressedTensorsFormat.read,
        "fp8": Fp8Format.read,
    }
    method = settings.get("quant_method", str, "")
    try:
        if method not in readers:
            raise settings.error("quant_method", "is not served")
        return readers[method](settings, CheckpointTensors(stored))
    except ModelFileError as error:
        raise ModelFileError(
            f"{error}; quantized checkpoints that are served: {SERVED}. Or use the model's "
            "unquantized checkpoint with --quantization int4"
        ) from None
