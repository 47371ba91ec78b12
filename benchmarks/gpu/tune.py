"""Which shapes of tiles are fastest for attention.

What the modules of nanocore/kernels/triton choose is measured beside all others; the table names
the best one of each case and what the module's own choice loses to it. Shapes that need more
registers or shared memory than there is fail to launch, which counts as being slow. A shape is
compiled when it is first tried, a second or so each: the time limit cuts off the last cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu.attention_cases import Heads, Step, make_step
from benchmarks.gpu.session import Results, Session, say
from benchmarks.gpu.timing import num_sets, time_calls

_COMPILE_THREADS: Final = 12
_HEADS: Final = {"g2": Heads(16, 8, 128), "g4": Heads(32, 8, 128)}

PREFILL_GRID: Final = list(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)))
"""Rows, keys, warps, stages."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice, and the calls to time. is_ours: what the module would choose.

    may_compile_beside: its first call may be made in a thread, beside others'.
    """

    name: str
    is_ours: bool
    calls: Callable[[], list[Callable[[], Any]]]
    may_compile_beside: bool = True


def measure(session: Session) -> None:
    """Case by case, the attention of decodes first."""
    results = Results(session, "tune", needs_s=15.0 if session.on_gpu else 1.0)
    cases = itertools.chain(_decode_cases(session), _prefill_cases(session))
    with torch.inference_mode():
        results.run({name: partial(_try_all, session, candidates) for name, candidates in cases})
    say(table(results.measurements))


def _try_all(session: Session, make: Callable[[], list[Candidate]]) -> dict[str, Any]:
    """Microseconds by candidate; the best one, and what ours takes beside it."""
    candidates = make()
    if session.on_gpu:
        _compile_all(candidates)
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    ours = None
    for candidate in candidates:
        if session.remaining_s < 5 and found:
            failed[candidate.name] = "time limit"
            continue
        try:
            figures = time_calls(candidate.calls(), session.device)
        except Exception as error:  # out of resources, or it does not compile
            failed[candidate.name] = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        found[candidate.name] = figures["us"]["median"]
        ours = candidate.name if candidate.is_ours else ours
    if not found:
        raise RuntimeError(f"nothing runs: {failed}")
    best = min(found, key=lambda name: found[name])
    return {
        "best": best,
        "best_us": found[best],
        "ours": ours,
        "ours_over_best": round(found[ours] / found[best], 4) if ours else None,
        "us": dict(sorted(found.items(), key=lambda item: item[1])),
        "failed": failed,
    }


def _compile_all(candidates: list[Candidate]) -> None:
    """Call each candidate once, in threads: the compiler leaves the interpreter alone."""

    def call_once(candidate: Candidate) -> None:
        with (
            suppress(Exception),
            torch.inference_mode(),
        ):  # what fails here fails again, and is said
            candidate.calls()[0]()

    with ThreadPoolExecutor(_COMPILE_THREADS) as pool:
        list(pool.map(call_once, [c for c in candidates if c.may_compile_beside]))


Cases = Iterator[tuple[str, Callable[[], list[Candidate]]]]


def _decode_cases(session: Session) -> Cases:
    shapes = [(b, c) for c in (1024, 8192) for b in (32, 256, 1)]
    grid = list(itertools.product((32, 64, 128), (4, 8), (3, 5)))
    heads, dtype = _HEADS, torch.bfloat16
    if session.small:
        shapes, grid, heads, dtype = [(2, 40)], [(16, 4, 2)], {"g2": Heads(4, 2, 32)}, torch.float32
    for group, (batch, context) in itertools.product(heads, shapes):
        yield (
            f"decode/{group}/b{batch}/ctx{context}",
            partial(_decode, session, heads[group], batch, context, grid, dtype),
        )


def _decode(
    session: Session, heads: Heads, batch: int, context: int, grid: list[Any], dtype: torch.dtype
) -> list[Candidate]:
    from nanocore.kernels.triton import attention
    from nanocore.kernels.triton.decode_attention import DecodeTiles, decode_attention

    steps = _steps(session, heads, [(context, 1)] * batch, dtype)
    own_tiles = attention.decode_tiles(heads.size, dtype.itemsize, _capability(session))
    num_sms = _num_sms(session)
    own_shares = attention.choose_num_shares(heads.num_kv, num_sms)
    # Programs for each multiprocessor, if contexts are long enough; and without parts.
    shares = sorted({own_shares, 1, 4 * num_sms // heads.num_kv})
    all_tiles = {own_tiles, *(DecodeTiles(*values) for values in grid)}
    if session.small:
        shares = [own_shares]
    candidates = []
    for tiles, num_shares in itertools.product(sorted(all_tiles, key=str), shares):

        def run(step: Step, tiles: DecodeTiles = tiles, num_shares: int = num_shares) -> None:
            step.metadata.scratch.clear()  # the plan is a part of the choice
            out = torch.empty_like(step.q_THD)
            decode_attention(
                step.q_THD, step.cache, step.metadata, step.spec, out, tiles, num_shares
            )

        name = f"keys {tiles.keys}, {_depth(tiles)}, shares {num_shares}"
        is_ours = tiles == own_tiles and num_shares == own_shares
        candidates.append(Candidate(name, is_ours, partial(_calls, run, steps)))
    return candidates


def _prefill_cases(session: Session) -> Cases:
    shapes = [(16, 1024), (4, 4096), (2, 8192)]
    grid = PREFILL_GRID
    heads, dtype = _HEADS, torch.bfloat16
    if session.small:
        shapes, grid, heads, dtype = (
            [(2, 33)],
            [(16, 16, 4, 2)],
            {"g2": Heads(4, 2, 32)},
            torch.float32,
        )
    for group, (batch, length) in itertools.product(heads, shapes):
        yield (
            f"prefill/{group}/{batch}x{length}",
            partial(_prefill, session, heads[group], batch, length, grid, dtype),
        )


def _prefill(
    session: Session, heads: Heads, batch: int, length: int, grid: list[Any], dtype: torch.dtype
) -> list[Candidate]:
    from nanocore.kernels.triton import attention
    from nanocore.kernels.triton.prefill_attention import PrefillTiles, prefill_attention

    steps = _steps(session, heads, [(length, length)] * batch, dtype)
    own = attention.prefill_tiles(heads.size, dtype.itemsize, _capability(session))
    num_shares = attention.choose_num_shares(heads.num_kv, _num_sms(session))
    candidates = []
    for tiles in sorted({own, *(PrefillTiles(*values) for values in grid)}, key=str):

        def run(step: Step, tiles: PrefillTiles = tiles) -> None:
            step.metadata.scratch.clear()  # the plan is a part of the choice
            out = torch.empty_like(step.q_THD)
            prefill_attention(
                step.q_THD, step.cache, step.metadata, step.spec, out, tiles, num_shares,
                max_tokens=batch * length, max_seqs=batch, has_decodes=False,
            )  # fmt: skip

        name = f"rows {tiles.rows}, keys {tiles.keys}, {_depth(tiles)}"
        candidates.append(Candidate(name, tiles == own, partial(_calls, run, steps)))
    return candidates


def table(measurements: dict[str, Any]) -> str:
    """A line for each case."""
    lines = [f"{'':32}{'best us':>10}{'ours/best':>10}  best; ours"]
    for name, found in measurements.items():
        ratio = f"{found['ours_over_best']:.2f}" if found["ours_over_best"] else "?"
        lines.append(
            f"{name:32}{found['best_us']:>10.1f}{ratio:>10}  {found['best']}; {found['ours']}"
        )
    return "\n".join(lines)


def _steps(
    session: Session, heads: Heads, seqs: list[tuple[int, int]], dtype: torch.dtype
) -> list[Step]:
    num_tokens = sum(context for context, _ in seqs)
    num_bytes = 2 * num_tokens * heads.num_kv * heads.size * dtype.itemsize
    count = num_sets(num_bytes, session.device)
    return [make_step(session, heads, seqs, number, dtype) for number in range(count)]


def _calls(run: Callable[[Any], Any], sets: list[Any]) -> list[Callable[[], Any]]:
    return [partial(run, s) for s in sets]


def _depth(tile: Any) -> str:
    return f"warps {tile.num_warps}, stages {tile.num_stages}"


def _capability(session: Session) -> tuple[int, int]:
    return torch.cuda.get_device_capability(session.device) if session.on_gpu else (9, 0)


def _num_sms(session: Session) -> int:
    if not session.on_gpu:
        return 4
    return int(torch.cuda.get_device_properties(session.device).multi_processor_count)
