"""Summaries and explanations as text."""

from __future__ import annotations

from nanocore.tracing.explanation import PARTS, REASONS, Explanation, Pause, Wait
from nanocore.tracing.summary import Percentiles, RunSummary


def summary_text(one: RunSummary) -> str:
    per_s = one.num_tokens / one.seconds if one.seconds > 0 else 0.0
    lines = [
        f"run {one.run}: {one.seconds:.3f} s, {_num(one.num_steps, 'step')} "
        f"({one.busy_s:.3f} s in steps), "
        f"{_num(one.num_tokens, 'token')} computed ({per_s:.0f}/s)",
        f"  requests     {one.num_requests}, of which {one.num_finished} finished; at most "
        f"{one.max_running} running and {one.max_waiting} waiting at once",
        f"  KV blocks    at most {one.max_kv_usage:.1%} in use, "
        f"{_num(one.num_preemptions, 'preemption')}",
        f"  prefix cache {one.cached_tokens} of {one.prompt_tokens} prompt tokens cached, in "
        f"{_num(one.num_hits, 'request')}",
    ]
    if one.num_draft_tokens:
        lines.append(f"  drafts       {_drafts(one)}")
    for name, values in (("step", one.step), ("waiting", one.waiting), ("TTFT", one.ttft)):
        if values is not None:
            lines.append(f"  {name:<12} {_percentiles(values)}")
    if one.blocked_s:
        lines.append("  reasons of waiting of the first in line")
        lines += [
            f"    {_seconds(s * 1e3):>10}  {REASONS.get(by, by)}" for by, s in one.blocked_s.items()
        ]
    if one.slowest:
        lines.append("  slowest first tokens (see nanocore explain REQUEST)")
        lines += [
            f"    {_seconds(slow.ttft_ms):>10}  {_shown(slow.request)}" for slow in one.slowest
        ]
    return "\n".join(lines)


def explanation_text(one: Explanation) -> str:
    lines = [_head(one)]
    if one.num_same_id > 1:
        lines.append(f"  {one.num_same_id} requests had this id; this is the last one.")
    if one.is_shared:
        lines.append("  Two sessions used this id at once, and the trace cannot tell them apart.")
    lines += _waits("waited", one.waits)
    lines.append(_hits(one))
    for pause in one.preemptions:
        lines += _pause(one, pause)
    lines += _ttft(one)
    return "\n".join(lines)


def _head(one: Explanation) -> str:
    known = [f"run {one.run}", one.state]
    if one.prompt_tokens is not None:
        known += [_num(one.prompt_tokens, "prompt token"), f"session {one.session}"]
    if one.priority:
        known.append(f"priority {one.priority}")
    return f"request {_shown(one.request)}: {', '.join(known)}"


def _waits(verb: str, waits: list[Wait], indent: str = "  ") -> list[str]:
    total_ms = sum(wait.ms for wait in waits)
    if not waits:
        return [f"{indent}{verb} 0 ms"]
    lines = [f"{indent}{verb} {_seconds(total_ms)}:"]
    for wait in waits:
        steps = f" ({_num(wait.num_steps, 'step')})" if wait.num_steps else ""
        lines.append(
            f"{indent}  {_seconds(wait.ms):>10}  {REASONS.get(wait.reason, wait.reason)}{steps}"
        )
    return lines


def _hits(one: Explanation) -> str:
    lost = ""
    if one.lost:
        lost = f"; {one.lost.group} had let go of what {one.lost.tokens} more need"
    if not one.cached_tokens:
        return f"  prefix cache: no hit{lost}"
    of = "" if one.prompt_tokens is None else f" of {one.prompt_tokens}"
    return f"  prefix cache: {one.cached_tokens}{of} tokens cached{lost}"


def _pause(one: Explanation, pause: Pause) -> list[str]:
    by = "" if pause.by is None else f" for {_shown(pause.by)}"
    if pause.by == one.request:
        by = ": it needed a block itself, and was last in line"
    text = f"preempted at {pause.at_s:.6f} s{by}"
    if pause.ms is None:
        return [f"  {text}; it never ran again"]
    return [f"  {text}", *_waits("paused for", pause.waits, "    ")]


def _ttft(one: Explanation) -> list[str]:
    if one.ttft_ms is None:
        return ["  no first token in the trace"]
    until = (
        ""
        if one.sent_s is not None
        else " (until sampled; the trace does not have when it was sent)"
    )
    lines = [f"  time to first token {_seconds(one.ttft_ms)}{until}:"]
    lines += [
        f"    {_seconds(part.ms):>10}  {part.share:>6.1%}  {PARTS[part.name]}"
        for part in one.ttft_parts
    ]
    chunks, decodes = _num(one.num_chunks, "step"), _num(one.num_decode_steps, "decode step")
    drafts = f", {_drafts(one)}" if one.num_draft_tokens else ""
    return [*lines, f"  prompt computed in {chunks}, {decodes}{drafts}"]


def _drafts(one: RunSummary | Explanation) -> str:
    num_right, share = one.num_accepted_tokens, one.num_accepted_tokens / one.num_draft_tokens
    return f"{_num(one.num_draft_tokens, 'draft')} computed, {num_right} accepted ({share:.1%})"


def _percentiles(values: Percentiles) -> str:
    return (
        f"p50 {_seconds(values.p50_ms)}, p90 {_seconds(values.p90_ms)}, p99 "
        f"{_seconds(values.p99_ms)}, max {_seconds(values.max_ms)} (of {values.num})"
    )


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _seconds(ms: float) -> str:
    return f"{ms:.3f} ms" if ms < 1e3 else f"{ms / 1e3:.3f} s"


def _shown(request_id: str) -> str:
    """Return an id that is safe in a terminal: clients choose ids."""
    return request_id if request_id.isprintable() else repr(request_id)
