"""What is before a step's layers as the backend launches it, for the compiler."""

from __future__ import annotations

from nanocore.kernels.triton.begin_step import BLOCK, NUM_WARPS, begin_step_kernel
from tests.kernels.triton.compilation import Case

_TYPES = {
    "block_table": "*i32", "block_table_out": "*i32", "rows_b": "*i64", "seq_lens": "*i32",
    "block_rows": "*i64", "block_columns": "*i64", "block_ids": "*i32", "token_table": "*i32",
    "rows_t": "*i64", "positions_t": "*i64", "num_seqs": "i32", "num_appended": "i32",
    "num_columns": "i32", "token_stride": "i32", "first_token": "i32", "num_tokens": "i32",
    "factor": "fp32",
}  # fmt: skip


def cases() -> list[Case]:
    return [
        _case("begin a step", "*bf16"),
        _case("begin a step, float16", "*fp16", out="*fp16"),
        _case("begin a step, int8 embedding", "*i8", scale="*fp32"),
        _case("begin a step, odd size", "*bf16", size=2304),
        _case("begin a step of a later stage", None, size=1),
    ]


def _case(
    name: str, weight: str | None, scale: str | None = None, out: str = "*bf16", size: int = 4096
) -> Case:
    optional = {"weight": weight, "scale": scale, "out": out if weight else None}
    signature = _TYPES | {name: kind for name, kind in optional.items() if kind is not None}
    absent = {name: None for name, kind in optional.items() if kind is None}
    tables = ("block_table", "block_table_out", "token_table", *optional)
    return Case(
        name=name,
        kernel=begin_step_kernel,
        signature=signature,
        constexprs={"SIZE": size, "BLOCK_SIZE": 16, "BLOCK": BLOCK, **absent},
        num_warps=NUM_WARPS,
        aligned=tuple(name for name in tables if name in signature),
    )
