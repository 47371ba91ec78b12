"""FP8 as Qwen and DeepSeek publish it (quant_method "fp8"): E4M3, scaled by blocks or as a whole.

`weight_scale_inv` multiplies, in spite of its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanocore.worker.config.settings import Settings
from nanocore.worker.loading.formats.float8 import BLOCK, Float8Layout
from nanocore.worker.loading.formats.settings import refuse_if_set, refuse_unless
from nanocore.worker.loading.formats.stored import StoredTensors
from nanocore.worker.loading.weight_format import StoredProjection


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """A `WeightFormat`."""

    layout: Float8Layout
    stored: StoredTensors
    name: str = "fp8"

    @classmethod
    def read(cls, settings: Settings, stored: StoredTensors) -> Fp8Format:
        """From quantization_config. Raises ModelFileError: it says what is not served."""
        refuse_unless(settings, "fmt", str, ("e4m3", "float8_e4m3fn"))
        scheme = refuse_unless(settings, "activation_scheme", str, ("dynamic", "static"))
        refuse_if_set(settings, "kv_cache_scheme")
        block = settings.get("weight_block_size", list[int], [])
        if block not in ([], [BLOCK, BLOCK]):
            raise settings.error("weight_block_size", f"is not served: [{BLOCK}, {BLOCK}] is")
        layout = Float8Layout(
            "block" if block else "tensor",
            "weight_scale_inv" if block else "weight_scale",
            has_input_scale=scheme == "static",
        )
        return cls(layout, stored)

    def __str__(self) -> str:
        return f"FP8: {self.layout}"

    def projection(
        self, name: str, shape: tuple[int, int], rows: slice, columns: slice
    ) -> StoredProjection | None:
        """See `WeightFormat`."""
        if not self.stored.has(f"{name}.{self.layout.scale_name}"):
            return None
        return self.layout.projection(name, shape, rows, columns, self.stored)
