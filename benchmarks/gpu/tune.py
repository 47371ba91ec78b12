"""Which shapes of tiles are fastest for attention.

What the modules of nanocore/kernels/triton choose is measured beside all others; a measurement
names the best one and what the module's own choice loses to it. Shapes that need more registers or
shared memory than there is fail to launch, which counts as being slow. A shape is compiled when it
is first tried, a second or so each: the time limit cuts off the last ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, Final

import torch

from benchmarks.gpu.attention_cases import Heads, Step, groups, make_step
from benchmarks.gpu.results import Measurements, Results, Session
from benchmarks.gpu.timing import time_call

DECODE_GRID: Final = list(product((32, 64, 128), (4, 8), (3, 5)))
"""Keys, warps, stages."""
PREFILL_GRID: Final = list(product((64, 128), (32, 64, 128), (4, 8), (2, 3)))
"""Rows, keys, warps, stages."""
_COMPILE_THREADS: Final = 12
Run = Callable[[Step], None]


def measure(results: Results, _part: str) -> None:
    """Case by case, the attention of decodes first."""
    with torch.inference_mode():
        results.run(measurements(results.session), needs_s=15 if results.session.on_gpu else 1)


def measurements(session: Session) -> Measurements:
    """By name."""
    decodes = [(2, 40)] if session.small else [(b, c) for c in (1024, 8192) for b in (32, 256, 1)]
    prompts = [(2, 33)] if session.small else [(16, 1024), (4, 4096)]
    return {
        f"tune/decode/{group}/b{batch}/ctx{context}": partial(
            _try_all, session, heads, [(context, 1)] * batch, _decode_runs
        )
        for (group, heads), (batch, context) in product(groups(session).items(), decodes)
    } | {
        f"tune/prefill/{group}/{batch}x{length}": partial(
            _try_all, session, heads, [(length, length)] * batch, _prefill_runs
        )
        for (group, heads), (batch, length) in product(groups(session).items(), prompts)
    }


def _try_all(
    session: Session,
    heads: Heads,
    seqs: list[tuple[int, int]],
    runs: Callable[[Session, Heads, Step], tuple[str, dict[str, Run]]],
) -> dict[str, Any]:
    """Microseconds by what was tried; the best, and what ours takes beside it."""
    step = make_step(session, heads, seqs)
    ours, candidates = runs(session, heads, step)
    if session.on_gpu:  # the compiler leaves the interpreter alone
        with ThreadPoolExecutor(_COMPILE_THREADS) as pool:
            list(pool.map(partial(_call_once, step), candidates.values()))
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, run in candidates.items():
        if session.remaining_s < 5 and ours in found:
            failed[name] = "time limit"
            continue
        try:
            found[name] = time_call(partial(run, step), session.device)["us"]["median"]
        except Exception as error:  # out of resources, or it does not compile
            failed[name] = f"{type(error).__name__}: {str(error)[:120]}"
    if not found:
        raise RuntimeError(f"nothing runs: {failed}")
    by_time = dict(sorted(found.items(), key=lambda item: item[1]))
    best, best_us = next(iter(by_time.items()))
    ratio = round(found[ours] / best_us, 4) if ours in found else None
    return {"best": best, "ours": ours, "ours_over_best": ratio, "us": by_time, "failed": failed}


def _call_once(step: Step, run: Run) -> None:
    with suppress(Exception), torch.inference_mode():  # what fails here fails again, and is said
        run(step)


def _decode_runs(session: Session, heads: Heads, step: Step) -> tuple[str, dict[str, Run]]:
    """Our own name, and calls by name, ours first."""
    from nanocore.kernels.triton import attention
    from nanocore.kernels.triton.decode_attention import DecodeTiles, decode_attention

    own = attention.decode_tiles(heads.size, step.q_THD.itemsize, _capability(session))
    own_shares = attention.choose_num_shares(heads.num_kv, _num_sms(session))
    grid = [(16, 4, 2)] if session.small else DECODE_GRID
    all_tiles = dict.fromkeys([own, *(DecodeTiles(*values) for values in grid)])
    # Also twice as many programs, if contexts are long enough; and one for each context.
    all_shares = dict.fromkeys([own_shares, 2 * own_shares, 1])

    def run(tiles: DecodeTiles, num_shares: int, step: Step) -> None:
        decode_attention(*step.operands(), torch.empty_like(step.q_THD), tiles, num_shares)

    runs: dict[str, Run] = {
        f"keys {t.keys}, warps {t.num_warps}, stages {t.num_stages}, shares {n}": partial(run, t, n)
        for t, n in product(all_tiles, all_shares)
    }
    return next(iter(runs)), runs


def _prefill_runs(session: Session, heads: Heads, step: Step) -> tuple[str, dict[str, Run]]:
    from nanocore.kernels.triton import attention
    from nanocore.kernels.triton.prefill_attention import PrefillTiles, prefill_attention

    own = attention.prefill_tiles(heads.size, step.q_THD.itemsize, _capability(session))
    num_shares = attention.choose_num_shares(heads.num_kv, _num_sms(session))
    grid = [(16, 16, 4, 2)] if session.small else PREFILL_GRID
    all_tiles = dict.fromkeys([own, *(PrefillTiles(*values) for values in grid)])

    def run(tiles: PrefillTiles, step: Step) -> None:
        prefill_attention(
            *step.operands(), torch.empty_like(step.q_THD), tiles, num_shares,
            max_tokens=len(step.q_THD), max_seqs=len(step.metadata.seq_lens), has_decodes=False,
        )  # fmt: skip

    runs: dict[str, Run] = {
        f"rows {t.rows}, keys {t.keys}, warps {t.num_warps}, stages {t.num_stages}": partial(run, t)
        for t in all_tiles
    }
    return next(iter(runs)), runs


def _capability(session: Session) -> tuple[int, int]:
    return torch.cuda.get_device_capability(session.device) if session.on_gpu else (9, 0)


def _num_sms(session: Session) -> int:
    if not session.on_gpu:
        return 4
    return int(torch.cuda.get_device_properties(session.device).multi_processor_count)
