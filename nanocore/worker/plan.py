"""The messages of a step: the engine's plan, and the workers' output.

A step is described by its differences: every row that is held takes one token unless the plan says
otherwise. With pipeline stages, rows are dealt out to as many groups (row modulo their number), and
"every row" is every row of the plan's group, so that several steps can be in flight. A preempted
request's row is removed; when it resumes it is added as new. Columns are `bin` of little-endian
integers, so the same structs serve in-process and over a pipe, and neither holds text.
"""

from __future__ import annotations

import msgspec

from nanocore.protocol.sampling import EngineSamplingParams

NO_TOKEN = -1
"""In place of a sampled token id."""


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that takes a row, with everything a worker keeps of it.

    token_ids: int32 column of all tokens known so far; the first num_prompt_tokens are the prompt,
    the others outputs of a request that resumes.
    block_ids: int32 column. num_computed_tokens: tokens whose KV is in those blocks already.
    seed: the request's noise is a function of it and the position.
    stop_token_ids: EOS, unless it is ignored, and stop ids: not sampled before min_tokens.
    num_prompt_logprobs: number of prompt tokens whose log probabilities the client has already.
    """

    row: int
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: bytes
    sampling: EngineSamplingParams
    seed: int
    stop_token_ids: list[int] = []
    num_prompt_logprobs: int = 0


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """One step's plan, to be applied in this order.

    step: counts from 1. group: whose rows take one token each.
    sampled_rows, sampled_token_ids: int32 columns; what was sampled since the last plan, for
    pipeline stages that do not sample; empty where there is one stage. A row stands there once for
    each of its tokens, which are in their order.
    removed_rows: int32 column. added: rows taken (again) by requests.
    block_rows, block_ids: int32 columns; the block is appended to the row's table.
    chunk_rows, chunk_counts: int32 columns; the rows whose token count is not one, with that count
    (0: the row is held but takes no part in this step); prompts may be of other groups. Tokens
    beyond a row's known ones are drafts, which the worker verifies.
    draft_token_ids: int32 column of all drafts, by ascending rows; empty if the worker is to
    propose them.
    num_tokens: tokens of the step, over all rows.
    awaits_masks: `TokenMasks` of the step follow, without which it does not sample.
    """

    step: int
    group: int = 0
    sampled_rows: bytes = b""
    sampled_token_ids: bytes = b""
    removed_rows: bytes
    added: list[NewRow]
    block_rows: bytes
    block_ids: bytes
    chunk_rows: bytes
    chunk_counts: bytes
    draft_token_ids: bytes = b""
    num_tokens: int
    awaits_masks: bool = False


class TokenMasks(msgspec.Struct, frozen=True, kw_only=True, tag="sample"):
    """Token masks of a step that awaits them.

    step: of the plan. rows: int32 column of the rows that may not sample every token; they are
    among those that the step samples, in any order, and there may be none. A row with drafts stands
    there once for each token that it samples, in their order. words: their masks, row by row, as
    `kernels.logit_edits.TokenMask` has them, for the whole vocabulary.
    """

    step: int
    rows: bytes
    words: bytes


class RowLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities in columns, as the wire's `TokenLogprobs` has them, by row.

    rows: int32, whose token it is. ranks, counts: int32 for each token. token_ids: int32, logprobs:
    float32, of their candidates: the token itself, then the k most likely ones, of equally likely
    ones the smaller id first. k is what the row asks for, or the vocabulary's size if that is less.
    """

    rows: bytes
    ranks: bytes
    counts: bytes
    token_ids: bytes
    logprobs: bytes


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="out"):
    """One step's result. rows: int32 column of the rows that sampled.

    token_ids: int32 column, row by row. counts: int32 column, how many tokens each of the rows has;
    empty: one each. A row that computed drafts may have none, and at most one more than these; what
    it computed from its last token on is then computed again. logprobs: of the tokens of rows that
    ask for them, in the order of rows. prompt_logprobs: of the prompt tokens after those that the
    step computed, each row's in the order of their positions; their rows need not sample.
    pooled_rows: int32 column of the rows of which the step computed the last token that they pool,
    and which sample. pooled: their embeddings, float32 columns, row by row.

    A row whose logits are not finite has NO_TOKEN, and no log probabilities of it. Until it is
    removed it may be computed on, with a token that has no embedding.
    """

    rows: bytes
    token_ids: bytes
    counts: bytes = b""
    logprobs: RowLogprobs | None = None
    prompt_logprobs: RowLogprobs | None = None
    pooled_rows: bytes = b""
    pooled: bytes = b""
