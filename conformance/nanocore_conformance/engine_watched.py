"""Rules for engines: what they tell of themselves, in metrics and of their last steps."""

from __future__ import annotations

from nanocore.protocol.messages import Op
from nanocore.protocol.metrics import Metric, RecentSteps, RequestPhases
from nanocore_conformance.checked_streams import Stream
from nanocore_conformance.engine_sessions import longest
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import PROMPT, Peer
from nanocore_conformance.report import BrokenError, SkippedError, require

NUM_TOKENS = 5
MAX_STEPS, MAX_REQUESTS = 512, 256 + 64


def session_of(engine: EngineUnderTest, minor: int) -> Peer:
    """A session with an engine of this minor version or a later one."""
    peer = engine.session()
    if peer.welcome.protocol < (1, minor):
        raise SkippedError(f"the engine speaks {peer.welcome.protocol}, and this is of 1.{minor}")
    return peer


@ENGINE_RULES.add("Metric")
def metrics_say_what_they_are(engine: EngineUnderTest) -> None:
    """Metrics have names of their own, counters never fall, and some move with the work."""
    peer = session_of(engine, 10)
    before = _counters(metrics_of(peer))
    peer.complete("a", max_tokens=NUM_TOKENS)
    after = _counters(metrics_of(peer))
    fallen = [series for series, value in before.items() if after.get(series, -1.0) < value]
    require(not fallen, "counters that do not fall", fallen[:3])
    grown = [series for series, value in after.items() if value > before.get(series, 0.0)]
    require(bool(grown), "a counter that grows with a request", sorted(after)[:3])


def metrics_of(peer: Peer) -> list[Metric]:
    """The engine's metrics, which are whole."""
    reply = peer.call("metrics", 78)
    if not reply.ok or reply.metrics is None:
        raise BrokenError("REPLY ok with metrics", reply)
    names = [metric.name for metric in reply.metrics]
    require(len(set(names)) == len(names), "a name once", names)
    for metric in reply.metrics:
        is_histogram = metric.type == "histogram"
        num_counts = len(metric.bounds) + 1 if is_histogram else 0
        for sample in metric.samples:
            told = len(sample.counts)
            require(told == num_counts, f"{num_counts} counts of {metric.name}", told)
        ascending = sorted(set(metric.bounds)) == metric.bounds
        require(ascending, f"ascending bounds of {metric.name}", metric.bounds)
    return reply.metrics


def _counters(metrics: list[Metric]) -> dict[str, float]:
    """By name and labels; of histograms how often each bucket was met."""
    found = {}
    for metric in metrics:
        for sample in metric.samples:
            series = f"{metric.name}{sample.labels}"
            if metric.type == "counter":
                found[series] = sample.value
            elif metric.type == "histogram":
                found |= {f"{series}[{i}]": float(n) for i, n in enumerate(sample.counts)}
    return found


@ENGINE_RULES.add("Recent steps")
def steps_tell_what_was_computed(engine: EngineUnderTest) -> None:
    """Steps above `after` come in columns, and add up to what a request needed."""
    peer = session_of(engine, 11)
    peer.complete("before", max_tokens=1)
    engine.until_idle(peer)
    before = steps_of(peer).steps.number
    require(bool(before), "a step of a request that has ended", before)
    last = before[-1]
    peer.complete("a", max_tokens=NUM_TOKENS)
    engine.until_idle(peer)
    columns = steps_of(peer, after=last).steps
    require(all(number > last for number in columns.number), f"steps above {last}", columns.number)
    prefill, decode = sum(columns.num_prefill_tokens), sum(columns.num_decode_tokens)
    require(prefill >= 1, "tokens of the prompt in num_prefill_tokens", prefill)
    least = NUM_TOKENS - 1
    require(decode >= least, f"at least {least} in num_decode_tokens", decode)
    stats = peer.call("stats").stats
    most = stats.num_steps if stats else 0
    require(columns.number[-1] <= most, f"numbers up to num_steps={most}", columns.number[-1])
    nothing = steps_of(peer, after=2**53 - 1).steps.number
    require(not nothing, "no step above 2^53 - 1", nothing)


@ENGINE_RULES.add("Request way")
def ways_of_requests_are_told(engine: EngineUnderTest) -> None:
    """A request is told while it is open and when it has ended, with its phases in their order."""
    peer = session_of(engine, 11)
    stream = peer.submit("open", max_tokens=longest(peer))
    peer.first_token(stream)
    way = _way_of(steps_of(peer), stream)
    phases = [phase for phase, _ in way.way]
    require(phases[:1] == ["queued"], "'queued' as the first phase", phases)
    require("ended" not in phases, "no end of a request that runs", phases)
    require(way.finish_reason is None, "no finish_reason of a request that runs", way)
    peer.send(Op.ABORT, {"request_ids": ["open"]})
    peer.finish(stream)
    ended = peer.complete("ended", max_tokens=NUM_TOKENS)
    engine.until_idle(peer)
    recent = steps_of(peer)
    for one, tokens in ((stream, None), (ended, NUM_TOKENS)):
        way = _way_of(recent, one)
        require(way.request_id == one.request_id, f"request_id {one.request_id!r}", way)
        require(way.way[-1][0] == "ended", "'ended' as the last phase", way)
        told = (way.finish_reason, way.num_prompt_tokens)
        require(told == (one.finish_reason, len(PROMPT)), "its finish_reason and prompt", way)
        if tokens is not None:
            require(way.num_output_tokens == tokens, f"{tokens} output tokens", way)


@ENGINE_RULES.add("14. Security")
def foreign_requests_have_no_names(engine: EngineUnderTest) -> None:
    """Another session sees a request's numbers, and never its id."""
    owner, other = session_of(engine, 11), engine.session()
    stream = owner.submit("mine", max_tokens=longest(owner))
    owner.first_token(stream)
    for _ in range(2):  # while it is open, and when it has ended
        seen = _way_of(steps_of(other), stream)
        require(seen.request_id == "", "no request_id of another session's request", seen)
        owner.send(Op.ABORT, {"request_ids": ["mine"]})
        owner.finish(stream)
        engine.until_idle(other)


def steps_of(peer: Peer, **fields: object) -> RecentSteps:
    """What the engine tells of its steps and requests, which is whole."""
    reply = peer.call("steps", 79, **fields)
    if not reply.ok or reply.steps is None:
        raise BrokenError("REPLY ok with steps", reply)
    recent, columns = reply.steps, reply.steps.steps
    sizes = {name: len(getattr(columns, name)) for name in columns.__struct_fields__}
    require(len(set(sizes.values())) == 1, "columns of one length", sizes)
    require(len(columns.number) <= MAX_STEPS, f"at most {MAX_STEPS} steps", len(columns.number))
    for name in ("number", "ended_s"):
        told = getattr(columns, name)
        require(sorted(told) == told, f"{name} in ascending order", told)
    num_requests = len(recent.requests)
    require(num_requests <= MAX_REQUESTS, f"at most {MAX_REQUESTS} requests", num_requests)
    for request in recent.requests:
        times = [since_s for _, since_s in request.way]
        ascending = bool(times) and sorted(times) == times and times[-1] <= recent.now_s
        require(ascending, "a way through ascending times, up to now_s", request)
    return recent


def _way_of(recent: RecentSteps, stream: Stream) -> RequestPhases:
    ways = [one for one in recent.requests if one.handle == stream.handle]
    require(len(ways) == 1, f"one way of handle {stream.handle}", len(ways))
    return ways[0]
