"""Fakes that tests of every room share.

`FakeExecutor` is a worker whose "model" is a hash of the whole context. It keeps a simulated KV
memory and refuses to compute from slots that do not hold exactly the context's tokens, so a wrong
block, a stale row or a hit on the wrong prefix fails at once, and expected outputs are known
without any engine (`expected_tokens`).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.drafting.proposer import NUM_EVIDENCE, Proposals, Proposer
from nanocore.engine_core.grammars.token_matcher import Compiled
from nanocore.engine_core.io.admission import longest
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.columns import LogprobColumns, TokenColumns
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.kv_cache import FULL, CacheGroup, Capacity, KeyChain, KVCacheManager
from nanocore.kv_cache.block_key import DigestFunction
from nanocore.kv_cache.state_group import NO_STATE
from nanocore.protocol.codec import client_decoder
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.messages import Message
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.sockets.options import SendResult
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.worker.plan import (
    NO_TOKEN,
    ModelRunnerOutput,
    NewRow,
    RowLogprobs,
    SchedulerOutput,
    TokenMasks,
)

VOCAB_SIZE = 50
NUM_WORDS = -(-VOCAB_SIZE // 32)
"""Of a mask."""
LogprobEntry = tuple[int, list[tuple[int, float]]]
"""A token's rank, and (token id, log probability) of its candidates."""


def context_hash(token_ids: list[int]) -> int:
    """What the fake model knows of a context."""
    return zlib.crc32(np.array(token_ids, "<i4").tobytes())


def next_token(token_ids: list[int]) -> int:
    """The fake model's greedy choice after this context."""
    return context_hash(token_ids) % VOCAB_SIZE


def draft_token(token_ids: list[int]) -> int:
    """A guess at the next token, right three times out of four."""
    is_right = context_hash([*token_ids, VOCAB_SIZE]) % 4
    return next_token(token_ids) if is_right else (next_token(token_ids) + 1) % VOCAB_SIZE


def logprob_entry(context: list[int], token_id: int, num_logprobs: int) -> LogprobEntry:
    """What the fake worker says of a token after this context."""
    known = context_hash(context)
    most_likely = range(VOCAB_SIZE if num_logprobs == -1 else num_logprobs)
    candidates = [(token_id, -float(known % 97))]
    return 1 + known % 7, candidates + [((known + i) % VOCAB_SIZE, -float(i)) for i in most_likely]


def expected_logprobs(prompt: list[int], token_ids: list[int], num: int) -> list[LogprobEntry]:
    """What is to be said of these tokens after a prompt."""
    return [
        logprob_entry(prompt + token_ids[:i], one, num)
        for i, one in enumerate(token_ids)
        if one != NO_TOKEN
    ]


def expected_embedding(prompt: list[int]) -> bytes:
    """What the fake worker says of a prompt, four numbers."""
    return np.array([context_hash(prompt[i:]) % 997 for i in range(4)], "<f4").tobytes()


def allowed_tokens(output: list[int]) -> frozenset[int]:
    """What a FakeMatcher allows after this output: often a third, sometimes one, or all."""
    return _allowed_tokens(context_hash([*output, VOCAB_SIZE]) % 97)


@cache
def _allowed_tokens(known: int) -> frozenset[int]:
    if known % 5 == 0:
        return frozenset(range(VOCAB_SIZE))
    if known % 5 == 1:
        return frozenset([known % VOCAB_SIZE])
    return frozenset(range(known % 3, VOCAB_SIZE, 3))


@cache
def _words(allowed: frozenset[int]) -> NDArray[np.int32]:
    bits = np.isin(np.arange(NUM_WORDS * 32), list(allowed))
    return np.packbits(bits, bitorder="little").view("<i4")


@cache
def _tokens(words: bytes) -> frozenset[int]:
    bits = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
    return frozenset(bits.nonzero()[0].tolist())


def masked_token(context: list[int], allowed: Collection[int], choice: int) -> int:
    """The fake model's choice among allowed tokens, if it would have made this one among all."""
    if choice == NO_TOKEN or not allowed:
        return NO_TOKEN
    return min(allowed, key=lambda token: (token - choice) % VOCAB_SIZE)


def expected_structured_tokens(
    prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()
) -> list[int]:
    """What a request with a FakeMatcher must deliver, whatever else runs."""
    output: list[int] = []
    while len(output) < max_tokens:
        context = prompt + output
        output.append(masked_token(context, allowed_tokens(output), next_token(context)))
        if output[-1] in stop_ids:
            break
    return output


class FakeMatcher:
    """Stands for a `TokenMatcher`; what it allows is a function of all tokens that it was told.

    fails_at: it fails at the mask after so many tokens. breaks_at: filling that raises.
    output: the tokens that it was told. num_fills: masks after each number of tokens.
    """

    def __init__(self, fails_at: int = -1, breaks_at: int = -1) -> None:
        self.failure: str | None = None
        self.fails_at, self.breaks_at = fails_at, breaks_at
        self.output: list[int] = []
        self.num_fills: Counter[int] = Counter()
        self._is_filling = threading.Lock()

    def append(self, token_ids: Iterable[int]) -> None:
        assert not self._is_filling.locked(), "two threads use it"
        self.output += token_ids

    def fill(self, words_W: NDArray[np.int32]) -> bool:
        assert words_W.shape == (NUM_WORDS,)
        with self._is_filling:
            self.num_fills[len(self.output)] += 1
            words_W[:] = 0
            if len(self.output) == self.breaks_at:
                raise RuntimeError(f"a bug at {self.output}")
            if len(self.output) == self.fails_at:
                self.failure = "the fake grammar is too complex"
                return True
            allowed = allowed_tokens(self.output)
            words_W[:] = _words(allowed)
            return len(allowed) < VOCAB_SIZE

    def fill_behind(self, words_DW: NDArray[np.int32], drafts: Sequence[int]) -> bool:
        assert words_DW.shape == (len(drafts), NUM_WORDS)
        words_DW[:] = 0
        for i in range(len(drafts)):
            output = [*self.output, *drafts[: i + 1]]
            assert drafts[i] in allowed_tokens(output[:-1]), "it may not follow"
            if len(output) in (self.fails_at, self.breaks_at):
                break
            self.num_fills[len(output)] += 1
            words_DW[i] = _words(allowed_tokens(output))
        return True

    def draft(self, proposed: Sequence[int], most: int) -> Sequence[int]:
        assert not self._is_filling.locked(), "two threads use it"
        drafts = [*proposed]
        for i, token in enumerate(proposed):
            if token not in allowed_tokens([*self.output, *proposed[:i]]):
                drafts = [*proposed[:i]]
                break
        if len(drafts) < most and len(self.output) % 2:
            drafts.append(min(allowed_tokens([*self.output, *drafts]), default=0))
        return drafts


@dataclass
class FakeGrammar:
    """Stands for a `CompiledGrammar`. matchers: that it made. output: what these were told."""

    not_held: Sequence[str] = ()
    matchers: list[FakeMatcher] = field(default_factory=list)
    output: Sequence[int] = ()

    def matcher(self) -> FakeMatcher:
        self.matchers.append(FakeMatcher())
        self.matchers[-1].append(self.output)
        return self.matchers[-1]


class FakeGrammars:
    """Stands for a `GrammarCompiler`: compiles when it is told to.

    A regex that begins with "bad" cannot be compiled, and one with "busy" not now. waiting: what
    was begun, in order.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, Compiled] = {}
        self.withdrawn: list[StructuredOutputs] = []
        self.waiting: deque[tuple[StructuredOutputs, Callable[[Compiled], None], Sequence[int]]] = (
            deque()
        )

    def find(self, wanted: StructuredOutputs, client: int = 0) -> Compiled | None:
        return self.known.get(msgspec.msgpack.encode(wanted))

    def compile(
        self,
        wanted: StructuredOutputs,
        done: Callable[[Compiled], None],
        client: int = 0,
        output: Sequence[int] = (),
    ) -> Callable[[], None]:
        self.waiting.append((wanted, done, output))
        return lambda: self.withdrawn.append(wanted)

    def finish(self) -> None:
        """The oldest compilation is done."""
        wanted, done, output = self.waiting.popleft()
        regex = wanted.regex or ""
        result: Compiled = FakeGrammar()
        if regex.startswith("busy"):
            done(EngineOverloadedError("too much is compiled", 3.0))
            return
        if regex.startswith("bad"):
            result = InvalidRequestError(f"structured_outputs.regex: {regex}")
        result = self.known.setdefault(msgspec.msgpack.encode(wanted), result)
        if output and isinstance(result, FakeGrammar):
            for i, token in enumerate(output):
                if token not in allowed_tokens(list(output[:i])):
                    done(InvalidRequestError(f"output_token_ids[{i}]={token}: not allowed"))
                    return
            result = FakeGrammar(output=output)
        done(result)

    def close(self) -> None:
        self.waiting.clear()


def withhold_some(token_ids: list[int], step: int) -> int:
    """Now and then a row keeps back one of its tokens, or all of them."""
    return (0, 0, 0, 1, 99)[(context_hash(token_ids) + step) % 5]


def expected_tokens(
    prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()
) -> list[int]:
    """What a request must deliver, whatever else runs."""
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(next_token(context))
        if context[-1] in stop_ids:
            break
    return context[len(prompt) :]


@dataclass
class _Row:
    """One tenancy of a row: a resumed request is another one."""

    token_ids: list[int]
    num_computed: int
    block_ids: list[list[int]]
    """By group of layers."""
    num_known: int
    """Tokens that a pipeline stage which does not sample has been told of."""
    new: NewRow
    num_prompt_logprobs: int
    drafts: list[int] = field(default_factory=list)
    """What the step computes after the known tokens."""
    first: int = 0
    """Computed tokens before the step."""
    stated: int = 0
    """Tokens that the row's states have; and `began`, had when the step began. Drafts that were
    right are computed again, behind them."""
    began: int = 0


@dataclass
class FakeExecutor:
    """Executes plans on a simulated KV memory, one Python object per row.

    block_size, num_slabs: the pools', to check what the plan refers to. cache_groups: of layers;
    their blocks lie in the same slabs, so writing one of a group destroys what other groups have
    there, and of a window nothing is read but what a token sees. checks_kv: False leaves
    out the simulated memory, whose cost grows with the square of the context. sample: the model's
    choice after a context. draft: what is computed after a row's known tokens, if a plan asks for
    more than these; some right, some wrong (`draft_token`). withhold: how many of the tokens that
    a row with drafts samples are not said, and computed again, of (context, step).
    """

    block_size: int
    num_slabs: int
    checks_kv: bool = True
    cache_groups: Sequence[CacheGroup] = FULL
    sample: Callable[[list[int]], int] = next_token
    draft: Callable[[list[int]], int] | None = None
    withhold: Callable[[list[int], int], int] = lambda context, step: 0
    rows: dict[int, _Row] = field(default_factory=dict)
    slabs: dict[int, tuple[int, dict[tuple[int, int], int]]] = field(default_factory=dict)
    """By slab: the group that wrote it last, and what its blocks hold by block and offset."""
    num_groups: int = 1
    num_tokens: int = 0
    written: dict[tuple[int, int], _Row] = field(default_factory=dict)
    """Groups and blocks that the last step wrote, and for whom."""
    allowed: dict[int, list[frozenset[int]]] = field(default_factory=dict)
    """By the masks of the step, by row."""

    def execute(self, plan: SchedulerOutput, masks: TokenMasks | None = None) -> ModelRunnerOutput:
        """Apply the plan's differences, write all KV, then read it and sample."""
        self._take_masks(plan, masks)
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=SchedulerOutput)
        self._apply(plan)
        self._take_drafts(plan)
        counts = {row: int(row % self.num_groups == plan.group) for row in self.rows}
        exceptions = dict(zip(_ints(plan.chunk_rows), _ints(plan.chunk_counts), strict=True))
        assert exceptions.keys() <= self.rows.keys(), "a chunk of a row nobody holds"
        counts |= exceptions
        assert sum(counts.values()) == plan.num_tokens
        self.written = {}
        of_prompts: list[tuple[int, LogprobEntry]] = []
        for row, count in counts.items():
            if count:
                self._write(self.rows[row], count)
                of_prompts += [(row, entry) for entry in self._prompt_logprobs(self.rows[row])]
        sampled: dict[int, list[int]] = {}
        of_tokens: list[tuple[int, LogprobEntry]] = []
        pooled: dict[int, bytes] = {}
        for index, count in counts.items():
            row = self.rows[index]
            num_known = len(row.token_ids)
            has_drafts = bool(row.drafts)
            tokens = self._sample(row, plan.step) if count else []
            if tokens or has_drafts:
                sampled[index] = tokens
                num_logprobs = row.new.sampling.logprobs
                if num_logprobs is not None:
                    entries = expected_logprobs(row.token_ids[:num_known], tokens, num_logprobs)
                    of_tokens += [(index, entry) for entry in entries]
                if row.new.sampling.pooling is not None:
                    assert row.new.sampling.pooling != "mean" or not row.new.num_computed_tokens
                    pooled[index] = expected_embedding(row.token_ids[:num_known])
        assert self.allowed.keys() <= sampled.keys(), "masks of rows that do not sample"
        self.num_tokens += plan.num_tokens
        all_counts = [len(tokens) for tokens in sampled.values()]
        return ModelRunnerOutput(
            rows=_column(sampled),
            token_ids=_column([token for tokens in sampled.values() for token in tokens]),
            counts=b"" if set(all_counts) <= {1} else _column(all_counts),
            logprobs=row_logprobs(of_tokens),
            prompt_logprobs=row_logprobs(of_prompts),
            pooled_rows=_column(pooled),
            pooled=b"".join(pooled.values()),
        )

    def _take_masks(self, plan: SchedulerOutput, masks: TokenMasks | None) -> None:
        assert plan.awaits_masks == (masks is not None), "masks without need, or too late"
        self.allowed = {}
        if masks is not None:
            assert masks.step == plan.step
            words = np.frombuffer(masks.words, "<i4").reshape(-1, NUM_WORDS)
            for row, own in zip(_ints(masks.rows), words, strict=True):
                self.allowed.setdefault(row, []).append(_tokens(own.tobytes()))

    def _take_drafts(self, plan: SchedulerOutput) -> None:
        planned = _ints(plan.draft_token_ids)
        assert not (planned and self.draft), "both the plan and the worker propose drafts"
        counts = zip(_ints(plan.chunk_rows), _ints(plan.chunk_counts), strict=True)
        for index, count in sorted(counts) if planned else ():
            row = self.rows[index]
            num_drafts = row.num_computed + count - len(row.token_ids)
            if count and num_drafts > 0:
                row.drafts, planned = planned[:num_drafts], planned[num_drafts:]
                assert len(row.drafts) == num_drafts
        assert not planned, "drafts of no row"

    def _apply(self, plan: SchedulerOutput) -> None:
        sampled = zip(_ints(plan.sampled_rows), _ints(plan.sampled_token_ids), strict=True)
        for index, token_id in sampled:
            row = self.rows[index]
            assert row.token_ids[row.num_known] == token_id
            row.num_known += 1
        for index in _ints(plan.removed_rows):
            del self.rows[index]
        for new in plan.added:
            assert new.row not in self.rows, f"row {new.row} is taken"
            self.rows[new.row] = _Row(
                _ints(new.token_ids),
                new.num_computed_tokens,
                self._by_group(_ints(new.block_ids)),
                num_known=len(_ints(new.token_ids)),
                stated=new.num_computed_tokens,
                new=new,
                num_prompt_logprobs=new.num_prompt_logprobs,
            )
        for group, block_ids in enumerate(self._by_group(_ints(plan.block_ids))):
            for index, block_id in zip(_ints(plan.block_rows), block_ids, strict=True):
                self.rows[index].block_ids[group].append(block_id)

    def _by_group(self, block_ids: list[int]) -> list[list[int]]:
        num_blocks, rest = divmod(len(block_ids), len(self.cache_groups))
        assert rest == 0, "each group has as many blocks"
        if not num_blocks:
            return [[] for _ in self.cache_groups]
        return [block_ids[i : i + num_blocks] for i in range(0, len(block_ids), num_blocks)]

    def _block_of(self, row: _Row, group: int, position: int) -> tuple[int, int]:
        """The block of a token in a group, and its slab."""
        block_id = row.block_ids[group][position // self.block_size]
        slab = block_id // self.cache_groups[group].per_slab
        assert block_id == NO_STATE or 0 <= slab < self.num_slabs
        return block_id, slab

    def _write(self, row: _Row, count: int) -> None:
        end = row.num_computed + count
        num_drafts = max(end - len(row.token_ids), 0)
        if num_drafts:
            assert row.num_computed == len(row.token_ids) - 1, "drafts are for decoding rows"
        for _ in range(num_drafts - len(row.drafts)):
            assert self.draft is not None, "computes a token nobody knows"
            row.drafts.append(self.draft(row.token_ids + row.drafts))
        if self.num_groups > 1:
            assert end - num_drafts <= row.num_known, "the first stage does not know it"
        context = row.token_ids + row.drafts
        for group, kind in enumerate(self.cache_groups):
            start, stop = row.num_computed, end
            if kind.spacing:
                start, stop = row.stated, end - num_drafts
            for position in range(start, stop) if self.checks_kv else ():
                block_id, slab = self._block_of(row, group, position)
                # A state is stored at a step's end, and at the ends of blocks that have memory.
                ends_block = (position + 1) % self.block_size == 0
                is_stored = position == stop - 1 or (ends_block and block_id != NO_STATE)
                if kind.spacing and not is_stored:
                    continue
                assert block_id != NO_STATE, "a state without a place"
                if slab not in self.slabs or self.slabs[slab][0] != group:
                    self.slabs[slab] = group, {}
                place = block_id, position % self.block_size
                self.slabs[slab][1][place] = context_hash(context[: position + 1])
                writer = self.written.setdefault((group, block_id), row)
                assert writer is row, "two rows write to one block"
        row.first, row.num_computed = row.num_computed, end
        row.began, row.stated = row.stated, end - num_drafts

    def _prompt_logprobs(self, row: _Row) -> list[LogprobEntry]:
        """Of prompt tokens after those that are computed now, which are not known yet."""
        num_logprobs = row.new.sampling.prompt_logprobs
        start, end = row.num_prompt_logprobs, min(row.num_computed, row.new.num_prompt_tokens - 1)
        if num_logprobs is None or start >= end:
            return []
        assert row.new.num_computed_tokens <= row.new.num_prompt_logprobs, (
            "what the prefix cache had was not computed, and nobody knows what it would have said"
        )
        row.num_prompt_logprobs = end
        prompt = row.token_ids
        return [logprob_entry(prompt[: i + 1], prompt[i + 1], num_logprobs)
                for i in range(start, end)]  # fmt: skip

    def _sample(self, row: _Row, step: int) -> list[int]:
        """The row's next tokens: the drafts that are what would have come anyway, and one more."""
        context = row.token_ids + row.drafts
        for group, kind in enumerate(self.cache_groups):
            first = max(row.first - kind.window + 1, 0) if kind.window else 0
            seen = range(first, row.num_computed * self.checks_kv)
            if kind.spacing:  # what it began with, and has come to
                seen = [one - 1 for one in (row.began, row.stated) if one and self.checks_kv]
            for position in seen:
                block_id, slab = self._block_of(row, group, position)
                writer, held = self.slabs.get(slab, (group, {}))
                place = block_id, position % self.block_size
                assert writer == group, "another group has written there"
                assert held.get(place) == context_hash(context[: position + 1]), (
                    f"KV of position {position} in group {group} is not this context's"
                )
        if row.num_computed < len(row.token_ids):
            return []
        drafts, row.drafts = row.drafts, []
        masks = self.allowed.get(row.new.row)
        assert masks is None or len(masks) == 1 + len(drafts), "a mask is for one token"
        tokens: list[int] = []
        while len(tokens) <= len(drafts):
            context = row.token_ids + tokens
            token = self.sample(context)
            if masks is not None:
                token = masked_token(context, masks[len(tokens)], token)
            if token == NO_TOKEN and tokens:
                break  # the next step begins with it
            tokens.append(token)
            if token == NO_TOKEN or [token] != drafts[len(tokens) - 1 : len(tokens)]:
                break
        if drafts:
            least = int(any(kind.spacing for kind in self.cache_groups))
            tokens = tokens[: max(len(tokens) - self.withhold(row.token_ids, step), least)]
        row.token_ids += tokens
        if drafts:
            row.num_computed = len(row.token_ids) - 1
        return tokens


class PipelinedExecutor:
    """A worker with several steps in flight, whose results come late, in order.

    A step in flight may write its blocks at any time until it is collected, so no other request may
    be given them meanwhile.
    """

    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor
        self._in_flight: deque[tuple[ModelRunnerOutput, dict[int, _Row]]] = deque()
        self._awaiting: SchedulerOutput | None = None

    def __len__(self) -> int:
        return len(self._in_flight) + (self._awaiting is not None)

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far."""
        return self._executor.num_tokens

    def submit(self, plan: SchedulerOutput) -> None:
        """Start a step, which may await its masks."""
        assert self._awaiting is None, "the step before has not sampled"
        if plan.awaits_masks:
            self._awaiting = plan
        else:
            self._run(plan, None)

    def sample(self, masks: TokenMasks) -> None:
        """Let the step that awaits masks sample."""
        plan, self._awaiting = self._awaiting, None
        assert plan is not None, "no step awaits masks"
        masks = msgspec.msgpack.decode(msgspec.msgpack.encode(masks), type=TokenMasks)
        self._run(plan, masks)

    def _run(self, plan: SchedulerOutput, masks: TokenMasks | None) -> None:
        result = self._executor.execute(plan, masks)
        for _, written in self._in_flight:
            for block_id, row in self._executor.written.items():
                assert written.get(block_id, row) is row, (
                    f"block {block_id} is written by two requests in steps that are in flight"
                )
        self._in_flight.append((result, self._executor.written))

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step."""
        assert self._in_flight, "it has not sampled"
        return self._in_flight.popleft()[0]


class FakeProposer:
    """Proposes some drafts of some rows, by `draft_token`."""

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        self._token_ids = token_ids

    def begin(self, row: int, salt: Hashable) -> None:
        """Do nothing."""

    def end(self, row: int, num_prompt: int, num_tokens: int, has_finished: bool) -> None:
        """Do nothing."""

    def propose(
        self, rows: NDArray[np.integer], num_tokens: NDArray[np.integer], most: NDArray[np.integer]
    ) -> Proposals:
        drafts: list[list[int]] = []
        for row, known, limit in np.stack((rows, num_tokens, most), axis=1).tolist():
            context: list[int] = self._token_ids[row, :known].tolist()
            own: list[int] = []
            for _ in range(context_hash(context) % 5 % (limit + 1)):
                own.append(draft_token(context + own))
            drafts.append(own)
        token_ids = np.zeros((len(rows), int(most.max(initial=0))), np.int32)
        for i, own in enumerate(drafts):
            token_ids[i, : len(own)] = own
        evidence = (token_ids % NUM_EVIDENCE).astype(np.uint8)
        return Proposals(np.array([len(own) for own in drafts], np.int64), token_ids, evidence)


class TalliedScheduler(Scheduler):
    """A scheduler that knows how many tokens its requests came with, of several samples once.

    Its requests wait for a step that computes a block for them.
    """

    num_added_tokens = 0
    worth_waiting_tokens = 1

    def add(self, request: Request) -> None:
        self.num_added_tokens += request.num_submitted_tokens
        super().add(request)


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    enable_prefix_caching: bool = True,
    clock: Callable[[], float] | None = None,
    cache_groups: Sequence[CacheGroup] = FULL,
    proposer: Callable[[NDArray[np.int32]], Proposer] | None = None,
    **settings: Any,
) -> tuple[TalliedScheduler, FakeExecutor]:
    """A scheduler and the fake worker that checks it. settings: more of SchedulerConfig's.

    num_blocks: slabs, if there are several groups. proposer: of drafts; None: the worker's. With
    drafts the clock stands still unless it is given, and they do not adapt unless it is asked for:
    no step's time decides how many there are.
    """
    settings.setdefault("adaptive_drafts", False)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **settings,
    )
    capacity = Capacity(num_blocks, block_size, cache_groups, config.max_chunk)
    kv_cache = KVCacheManager(capacity, enable_prefix_caching)
    executor = FakeExecutor(
        block_size, num_blocks, cache_groups=cache_groups, num_groups=config.num_groups
    )
    if config.num_speculative_tokens and proposer is None:
        executor.draft = draft_token
    if clock is None:
        clock = (lambda: 1.0) if config.num_speculative_tokens else time.monotonic
    return TalliedScheduler(config, kv_cache, clock, proposer), executor


def make_request(
    handle: int,
    prompt: list[int],
    max_tokens: int,
    *,
    block_size: int = 4,
    client: int = 1,
    cache_salt: str | None = None,
    eos: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    max_model_len: int = 128,
    priority: int = 0,
    digest: DigestFunction = xxhash.xxh3_128_digest,
    outputs: Sequence[int] = (),
    **sampling: Any,
) -> Request:
    """A request as admission would build it; its id is "r" and the handle.

    outputs: of an earlier run. sampling: more of its parameters. With n it holds its further
    samples back.
    """
    key_chain = KeyChain(block_size, {"cache_salt": cache_salt}, digest)
    token_ids = np.array([*prompt, *outputs], "<i4")
    key_chain.extend(token_ids.tobytes())
    request = Request(
        handle=handle,
        request_id=f"r{handle}",
        client=client,
        token_ids=token_ids,
        max_num_tokens=min(len(prompt) + max_tokens, longest(max_model_len, max_tokens)),
        sampling=EngineSamplingParams(
            max_tokens=max_tokens, stop_token_ids=list(stop_token_ids), **sampling
        ),
        seed=handle,
        eos_token_ids=eos,
        key_chain=key_chain,
        priority=priority,
        num_resumed_tokens=len(outputs),
    )
    request.add_siblings(request.sampling.n - 1)
    return request


class FakePeers:
    """The peers of a message handler. Sends come to what `state` says; what was sent is in
    `sent`.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Message]] = []
        self.state: dict[bytes, SendResult] = {}
        self.admitted: set[bytes] = set()
        self.users: set[bytes] = set()

    def send(self, routing_id: bytes, frames: Sequence[bytes]) -> SendResult:
        result = self.state.get(routing_id, SendResult.SENT)
        if result is SendResult.SENT:
            self.sent.append((routing_id, client_decoder().decode(frames)))
        return result

    def is_admin(self, routing_id: bytes) -> bool:
        return routing_id not in self.users

    def admit(self, routing_id: bytes) -> None:
        assert routing_id not in self.admitted
        self.admitted.add(routing_id)

    def dismiss(self, routing_id: bytes) -> None:
        self.admitted.remove(routing_id)


class Deliveries:
    """Collects what clients would receive from `Scheduler.update`."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finish_reasons: dict[int, str] = {}
        self.messages: dict[int, str] = {}
        self.num_cached: dict[int, int] = {}
        self.logprobs: dict[int, list[LogprobEntry]] = {}
        self.prompt_logprobs: dict[int, list[LogprobEntry]] = {}
        self.embeddings: dict[int, bytes] = {}

    def step(self, scheduler: Scheduler, executor: FakeExecutor) -> SchedulerOutput:
        """Run one whole step and take in its output; returns the plan."""
        plan = scheduler.schedule()
        self.take(scheduler, executor.execute(plan))
        return plan

    def take(self, scheduler: Scheduler, result: ModelRunnerOutput) -> None:
        """Take in a step's result."""
        for output in scheduler.update(result):
            handles = output.tokens.owners.tolist()
            assert len(set(handles)) == len(handles), "a handle twice"
            for handle, tokens in tokens_by_handle(output.tokens).items():
                assert handle not in self.finish_reasons, "a token after the end"
                self.tokens.setdefault(handle, []).extend(tokens)
            assert output.tokens.counts is None or (output.tokens.counts > 0).all()
            _add_entries(self.logprobs, output.tokens.logprobs)
            _add_entries(self.prompt_logprobs, output.prompt_logprobs)
            if output.prompt_logprobs is not None:
                started = {h for h in self.tokens if h not in handles}
                assert not started.intersection(output.prompt_logprobs.owners.tolist()), "too late"
            for event in output.events:
                if event.num_cached_tokens is not None:
                    assert event.handle not in self.num_cached, "a request starts once"
                    self.num_cached[event.handle] = event.num_cached_tokens
                if event.finish_reason is not None:
                    assert event.handle not in self.finish_reasons, "a request ends once"
                    self.finish_reasons[event.handle] = event.finish_reason
                if event.embedding is not None:
                    assert event.finish_reason == "stop"
                    self.embeddings[event.handle] = event.embedding
                if event.message is not None:
                    self.messages[event.handle] = event.message


def _add_entries(said: dict[int, list[LogprobEntry]], columns: LogprobColumns | None) -> None:
    if columns is not None:
        for handle, entry in entries_of(columns):
            said.setdefault(handle, []).append(entry)


def entries_of(columns: LogprobColumns) -> list[tuple[int, LogprobEntry]]:
    """(owner, entry) of each token."""
    candidates = iter(zip(columns.token_ids.tolist(), columns.logprobs.tolist(), strict=True))
    heads = zip(columns.owners.tolist(), columns.ranks.tolist(), columns.counts.tolist(),
                strict=True)  # fmt: skip
    entries = [(owner, (rank, list(islice(candidates, num)))) for owner, rank, num in heads]
    assert not list(candidates)
    return entries


def row_logprobs(entries: list[tuple[int, LogprobEntry]]) -> RowLogprobs | None:
    """Entries by row as a worker says them; None if there is none."""
    if not entries:
        return None
    candidates = [one for _, (_, own) in entries for one in own]
    return RowLogprobs(
        rows=_column(row for row, _ in entries),
        ranks=_column(rank for _, (rank, _) in entries),
        counts=_column(len(own) for _, (_, own) in entries),
        token_ids=_column(token_id for token_id, _ in candidates),
        logprobs=_column([logprob for _, logprob in candidates], "<f4"),
    )


def tokens_by_handle(tokens: TokenColumns) -> dict[int, list[int]]:
    """The tokens of each request."""
    parts: dict[int, list[int]] = {}
    for handle, token_id in zip(tokens.owner_of_each().tolist(), tokens.token_ids, strict=True):
        parts.setdefault(handle, []).append(int(token_id))
    return parts


def _column(values: Iterable[float], dtype: str = "<i4") -> bytes:
    return np.array(list(values), dtype).tobytes()


def _ints(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()
