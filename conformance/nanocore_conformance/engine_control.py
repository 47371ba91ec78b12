"""Rules for engines: PING, the operations of CONTROL, and the model's files."""

from __future__ import annotations

import hashlib
import time

from nanocore.protocol.messages import MAX_FILE_BYTES, ModelFile, Op, Pong, Reply
from nanocore.protocol.metrics import Stats
from nanocore_conformance.engine_sessions import longest
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import Peer
from nanocore_conformance.report import BrokenError, SkippedError, require

NUM_CALLS_UNDER_WAY = 8
NOT_SERVED = (
    "config.json", "model.safetensors", "../config.json", "./tokenizer.json", "/etc/passwd",
    "../../../../../etc/passwd", "tokenizer.json/", "TOKENIZER.JSON", "tokenizer.json\0", "", "*",
)  # fmt: skip


def stats_of(peer: Peer) -> Stats:
    """The engine's statistics."""
    reply = peer.call("stats", 77)
    if not reply.ok or reply.stats is None:
        raise BrokenError("REPLY ok with stats", reply)
    return reply.stats


@ENGINE_RULES.add("PING")
def ping_gets_its_nonce_back(engine: EngineUnderTest) -> None:
    """PONG has the PING's nonce, also while a request runs."""
    peer = engine.session()
    stream = peer.submit("a", max_tokens=32)
    for nonce in (7, 0, 1, 2**32, 2**53 - 1, 7):
        peer.send(Op.PING, {"nonce": nonce})
        pong = peer.expect(Pong)
        require(pong.nonce == nonce, f"PONG with nonce {nonce}", pong)
    peer.finish(stream)


@ENGINE_RULES.add("PONG")
def pong_tells_of_the_step_loop(engine: EngineUnderTest) -> None:
    """num_steps, where it is told, never falls and grows with tokens; an idle step has no age."""
    peer = engine.session()
    before = _pong(peer, 1).num_steps or 0
    peer.complete("a", max_tokens=5)
    after = _pong(peer, 2)
    told = after.num_steps
    grown = told is None or told >= before + 5
    require(grown, f"num_steps of at least {before + 5} after 5 tokens", after)
    engine.until_idle(peer)
    deadline_s = time.monotonic() + engine.patience_s
    while _pong(peer, 3).step_age_ms:  # the last step may just be ending
        waiting = time.monotonic() < deadline_s
        require(waiting, "step_age_ms of 0 in an engine without requests", "more")


def _pong(peer: Peer, nonce: int) -> Pong:
    peer.send(Op.PING, {"nonce": nonce})
    return peer.expect(Pong)


@ENGINE_RULES.add("CONTROL")
def stats_are_told(engine: EngineUnderTest) -> None:
    """CONTROL stats is answered with all counters, which move with the work."""
    peer = engine.session()
    before = stats_of(peer)
    peer.complete("a", max_tokens=5)
    after = stats_of(peer)
    require(after.num_clients >= 1, "num_clients of at least 1", after)
    require(
        after.generation_tokens >= before.generation_tokens + 5 and after.num_steps >= 5,
        f"generation_tokens of at least {before.generation_tokens + 5}, and steps",
        after,
    )
    require(after.num_free_blocks <= after.num_blocks, "no more free blocks than blocks", after)
    errors = after.num_protocol_errors
    peer.send_frames([b"\xff", b"\x80"])
    peer.refused("unknown_op")
    counted = stats_of(peer).num_protocol_errors
    require(counted > errors, f"num_protocol_errors above {errors}", counted)


@ENGINE_RULES.add("CONTROL")
def unknown_operations_are_answered(engine: EngineUnderTest) -> None:
    """An operation that does not exist gets a REPLY that is not ok, with its call_id."""
    peer = engine.session()
    for call_id, operation in enumerate(("no_such_operation", "", "__class__", "STATS", "stats ")):
        reply = peer.call(operation, call_id)
        require(not reply.ok and bool(reply.message), "ok false and a message", reply)
    peer.still_streams()


@ENGINE_RULES.add("CONTROL")
def pause_keeps_requests_until_resume(engine: EngineUnderTest) -> None:
    """While paused, requests are accepted and get no tokens; after resume they run."""
    peer = engine.session()
    started_s = time.monotonic()
    peer.complete("before", max_tokens=3)
    usual_s = time.monotonic() - started_s
    require(peer.call("pause", 1).ok, "pause to be done", "ok false")
    try:
        require(stats_of(peer).paused, "stats with paused true", "paused false")
        stream = peer.submit("kept", max_tokens=3)
        # Twice as long as the same request took when nothing was paused.
        until_s = time.monotonic() + 2 * usual_s
        num_looks = 0
        while num_looks < 5 or time.monotonic() < until_s:
            stats_of(peer)
            num_looks += 1
        require(not stream.token_ids, "no tokens while paused", stream)
        require(peer.call("pause", 2).ok, "a second pause to be done", "ok false")
    finally:
        resumed = peer.call("resume", 3)
    require(resumed.ok, "resume to be done", resumed)
    peer.finish(stream)
    require(len(stream.token_ids) == 3, "3 tokens after resume", stream)
    require(not stats_of(peer).paused, "stats with paused false", "paused true")


@ENGINE_RULES.add("CONTROL")
def pause_belongs_to_its_session(engine: EngineUnderTest) -> None:
    """Nobody's resume, and nobody's end, takes back another session's pause; its own end does."""
    one, two, watcher = engine.session(), engine.session(), engine.session()
    require(not stats_of(watcher).paused, "stats with paused false at first", "paused true")
    for peer in (one, two):
        require(peer.call("pause").ok, "pause to be done", "ok false")
    require(watcher.call("resume").ok, "resume without a pause to be done", "ok false")
    require(stats_of(watcher).paused, "paused after another session's resume", "paused false")
    require(one.call("resume").ok, "resume to be done", "ok false")
    require(stats_of(watcher).paused, "paused while one session holds a pause", "paused false")
    two.bye()
    engine.until(watcher, "a pause to end with its session", lambda stats: not stats.paused)
    watcher.still_streams()


@ENGINE_RULES.add("CONTROL")
def prefix_cache_is_reset_when_idle(engine: EngineUnderTest) -> None:
    """reset_prefix_cache is refused while a request holds blocks, and afterwards forgets all."""
    peer = engine.session()
    stream = peer.submit("long", max_tokens=longest(peer))
    peer.first_token(stream)
    reply = peer.call("reset_prefix_cache", 1)
    require(not reply.ok and bool(reply.message), "ok false and a message", reply)
    peer.send(Op.ABORT, {"request_ids": ["long"]})
    peer.finish(stream)
    engine.until_idle(peer)
    num_prompt = min(4 * peer.welcome.model.block_size, longest(peer) - 1)
    prompt = [i % 3 for i in range(num_prompt)]
    peer.complete("fill", prompt, max_tokens=1)
    engine.until_idle(peer)
    require(peer.call("reset_prefix_cache", 2).ok, "the reset to be done", "ok false")
    cached = peer.complete("after", prompt, max_tokens=1).num_cached_tokens
    require(cached in (0, None), "no cached tokens after the reset", cached)


@ENGINE_RULES.add("Model file")
def files_are_what_the_card_says(engine: EngineUnderTest) -> None:
    """Each file, read in chunks with several calls under way, has its size and digest."""
    peer = engine.session()
    for file in _files(peer):
        content = read_file(peer, file)
        size = len(content)
        require(size == file.num_bytes, f"{file.name} of {file.num_bytes} bytes", size)
        digest = hashlib.sha256(content).hexdigest()
        require(digest == file.sha256, f"{file.name} with sha256 {file.sha256}", digest)


@ENGINE_RULES.add("CONTROL")
def files_can_be_read_from_anywhere(engine: EngineUnderTest) -> None:
    """read_file starts where it is told, is empty at and behind the end, and works when paused."""
    peer = engine.session()
    file = min(_files(peer), key=lambda f: f.num_bytes or MAX_FILE_BYTES)
    content = read_file(peer, file)
    peer.call("pause")
    try:
        for offset in {1, len(content) // 2, max(0, len(content) - 1)}:
            data = _chunk(peer, file, offset)
            expected = content[offset : offset + len(data)]
            require(bool(data) or offset >= len(content), "data before the end", "none")
            require(data == expected, f"{file.name} from byte {offset} on", data[:20])
        for offset in (len(content), len(content) + 1, 2**53 - 1):
            data = _chunk(peer, file, offset)
            require(data == b"", f"no data at offset {offset}, behind the end", data[:20])
    finally:
        peer.call("resume")
    peer.still_streams()


@ENGINE_RULES.add("14. Security")
def no_other_file_is_served(engine: EngineUnderTest) -> None:
    """Names that are not in the model card get ok false and no data, wherever they point."""
    peer = engine.session()
    served = {file.name for file in peer.welcome.model.files}
    for call_id, name in enumerate((*NOT_SERVED, None)):
        reply = peer.call("read_file", call_id, file=name)
        assert name not in served
        refused = not reply.ok and bool(reply.message) and reply.data is None
        require(refused, f"ok false, a message and no data for file {name!r}", reply)
    peer.still_streams()


def _files(peer: Peer) -> list[ModelFile]:
    if not peer.welcome.model.files:
        raise SkippedError("the model card names no files")
    return peer.welcome.model.files


def _chunk(peer: Peer, file: ModelFile, offset: int) -> bytes:
    reply = peer.call("read_file", file=file.name, offset=offset)
    return _data(peer, reply)


def _data(peer: Peer, reply: Reply) -> bytes:
    most = peer.welcome.limits.max_file_chunk_bytes
    if not reply.ok or reply.data is None:
        raise BrokenError("REPLY ok with data", reply)
    require(len(reply.data) <= most, f"at most {most} bytes of data", len(reply.data))
    return reply.data


def read_file(peer: Peer, file: ModelFile) -> bytes:
    """Read a file with several calls under way; their replies may come in any order."""
    chunk_bytes = peer.welcome.limits.max_file_chunk_bytes
    offsets = range(0, file.num_bytes + 1, chunk_bytes)  # the end, too, which is empty
    chunks: dict[int, bytes] = {}
    for first in range(0, len(offsets), NUM_CALLS_UNDER_WAY):
        some = offsets[first : first + NUM_CALLS_UNDER_WAY]
        for offset in some:
            body = {"operation": "read_file", "file": file.name, "offset": offset}
            peer.send(Op.CONTROL, {"call_id": offset} | body)
        for _ in some:
            reply = peer.expect(Reply, f"to read_file of {file.name}")
            known = reply.call_id in some and reply.call_id not in chunks
            require(known, f"a call_id out of {list(some)}, once", reply.call_id)
            chunks[reply.call_id] = _data(peer, reply)
    return b"".join(chunks[offset] for offset in offsets)
