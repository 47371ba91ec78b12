"""Summaries and explanations in words, as operators read them."""

from __future__ import annotations

from nanocore.tracing.explanation import Explanation, Pause
from nanocore.tracing.summary import Percentiles, RunSummary
from nanocore.tracing.ttft import PARTS
from nanocore.tracing.waiting import REASONS, Wait


def summary_text(summary: RunSummary) -> str:
    """Of one run, in lines."""
    one = summary
    per_s = one.num_tokens / one.seconds if one.seconds > 0 else 0.0
    lines = [
        f"run {one.run}: {one.seconds:.3f} s, {one.num_steps} steps ({one.busy_s:.3f} s in steps), "
        f"{one.num_tokens} tokens computed ({per_s:.0f}/s)",
        f"  requests     {one.num_requests}, of which {one.num_finished} ended; at once at most "
        f"{one.max_running} running, {one.max_waiting} waiting",
        f"  KV blocks    at most {one.max_kv_usage:.1%} in use, "
        f"{_num(one.num_preemptions, 'preemption')}",
        f"  prefix cache {one.cached_tokens} of {one.prompt_tokens} prompt tokens found, by "
        f"{one.num_hits} requests",
    ]
    for name, values in (("step", one.step), ("waiting", one.waiting), ("TTFT", one.ttft)):
        if values is not None:
            lines.append(f"  {name:<12} {_percentiles(values)}")
    if one.blocked_s:
        lines.append("  who was first in line waited because")
        lines += [
            f"    {_seconds(s * 1e3):>10}  {REASONS.get(by, by)}" for by, s in one.blocked_s.items()
        ]
    if one.slowest:
        lines.append("  the slowest first tokens (nanocore explain REQUEST says more)")
        lines += [
            f"    {_seconds(slow.ttft_ms):>10}  {_shown(slow.request)}" for slow in one.slowest
        ]
    return "\n".join(lines)


def explanation_text(explanation: Explanation) -> str:
    """One request, in lines."""
    one = explanation
    lines = [_head(one)]
    if one.num_same_id > 1:
        lines.append(f"  {one.num_same_id} requests bore this id; this is the last of them.")
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
        known += [f"{one.prompt_tokens} prompt tokens", f"session {one.session}"]
    if one.priority:
        known.append(f"priority {one.priority}")
    return f"request {_shown(one.request)}: {', '.join(known)}"


def _waits(verb: str, waits: list[Wait], indent: str = "  ") -> list[str]:
    total_ms = sum(wait.ms for wait in waits)
    if not waits:
        return [f"{indent}{verb}: not at all"]
    lines = [f"{indent}{verb} {_seconds(total_ms)}:"]
    for wait in waits:
        steps = f" ({_num(wait.num_steps, 'step')})" if wait.num_steps else ""
        lines.append(
            f"{indent}  {_seconds(wait.ms):>10}  {REASONS.get(wait.reason, wait.reason)}{steps}"
        )
    return lines


def _hits(one: Explanation) -> str:
    if not one.cached_tokens:
        return "  prefix cache: nothing found"
    of = "" if one.prompt_tokens is None else f" of {one.prompt_tokens}"
    whose = f", computed for {', '.join(map(_shown, one.cached_from))}" if one.cached_from else ""
    return f"  prefix cache: {one.cached_tokens}{of} tokens found{whose}"


def _pause(one: Explanation, pause: Pause) -> list[str]:
    by = "" if pause.by is None else f" for {_shown(pause.by)}"
    if pause.by == one.request:
        by = ": it needed a block itself, and was the last in line"
    text = f"preempted at {pause.at_s:.6f} s{by}"
    if pause.ms is None:
        return [f"  {text}; it did not run again"]
    return [f"  {text}", *_waits("did not run for", pause.waits, "    ")]


def _ttft(one: Explanation) -> list[str]:
    if one.ttft_ms is None:
        return ["  no first token in the trace"]
    until = "" if one.sent_s is not None else " (when it was sent is not in the trace)"
    lines = [f"  time to first token {_seconds(one.ttft_ms)}{until}:"]
    lines += [
        f"    {_seconds(part.ms):>10}  {part.share:>6.1%}  {PARTS[part.name]}"
        for part in one.ttft_parts
    ]
    chunks, decodes = _num(one.num_chunks, "step"), _num(one.num_decode_steps, "decode step")
    return [*lines, f"  prompt computed in {chunks}, {decodes}"]


def _percentiles(values: Percentiles) -> str:
    return (
        f"p50 {_seconds(values.p50_ms)}, p90 {_seconds(values.p90_ms)}, p99 "
        f"{_seconds(values.p99_ms)}, longest {_seconds(values.max_ms)} (of {values.num})"
    )


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _seconds(ms: float) -> str:
    return f"{ms:.3f} ms" if ms < 1e3 else f"{ms / 1e3:.3f} s"


def _shown(request_id: str) -> str:
    """As it is, or as Python writes it: a client may have put a terminal's commands into it."""
    return request_id if request_id.isprintable() else repr(request_id)
