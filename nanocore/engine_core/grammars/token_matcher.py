"""Structured outputs as the scheduler and the step loop see them: a matcher for each sample.

It follows the delivered tokens and nothing else. So it stays with its request through preemption,
and a resumed sample has the same state after the same tokens. It never raises for what a grammar
does: it fails, once, with a text for the client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.grammars.token_table import TokenTable, tokens_of
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError, shorten

if TYPE_CHECKING:
    import llguidance

MASK_MS: Final = 2.0
"""CPU time per mask, in the long run."""
MASK_CREDIT_MS: Final = 50.0
"""CPU time beyond that for all masks of a sample together, so that noise does not decide."""


class CompiledGrammar(msgspec.Struct, eq=False):
    """A compiled structured output: the start of every sample of a request.

    Any thread may use it. beginning: is only copied. num_bytes: about what it takes. not_held: JSON
    pointers of what was left out of its lenient parts. on_too_slow: called with the reason when a
    matcher of it took too long. resumed: matcher of its one sample, if that has earlier output.
    """

    vocabulary: TokenTable
    beginning: llguidance.LLMatcher
    first_words_W: NDArray[np.int32]
    num_bytes: int
    not_held: Sequence[str] = ()
    on_too_slow: Callable[[str], None] = lambda reason: None
    resumed: TokenMatcher | None = None

    def matcher(self) -> TokenMatcher:
        return self.resumed or TokenMatcher(self)


Compiled: TypeAlias = CompiledGrammar | InvalidRequestError | EngineOverloadedError


class TokenMatcher:
    """One sample's state in its grammar, on top of llguidance's. One thread at a time uses it.

    llguidance's matcher is copied when the first token is there: the first mask is the grammar's.

    failure: why it cannot go on, for whoever reads the ERROR; None while it can.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.failure: str | None = None
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._matcher: llguidance.LLMatcher | None = None
        self._noted: list[int] = []
        self._is_ended = False
        self._credit_ms = MASK_CREDIT_MS

    def append(self, token_ids: Iterable[int]) -> None:
        """Note delivered output tokens, in order; takes almost no time."""
        self._noted.extend(token_ids)

    def fill(self, words_W: NDArray[np.int32]) -> bool:
        """Write the mask of tokens that may follow, in the layout of `TokenMask.words_MW`'s rows.

        Returns False if every token may: what is written then means nothing. EOS may follow where
        the output can end; where it must, and after a failure, nothing else may. May take
        milliseconds.
        """
        start = time.thread_time()
        if self.failure is None:
            self._fill(words_W)
            self._pay((time.thread_time() - start) * 1000)
        if self.failure is not None:
            words_W[:] = self._vocabulary.eos_words
        return words_W[0] != -1 or not np.array_equal(words_W, self._vocabulary.all_words)

    def fill_behind(self, words_DW: NDArray[np.int32], drafts: Sequence[int]) -> bool:
        """Write the masks behind these drafts, one behind each; after a `fill` that did not fail.

        They are masks of what may never be delivered, so nothing that goes wrong is a failure:
        no token may follow then, as the failure would have it if the output came there.
        """
        words_DW[:] = 0
        matcher = self.take_in().deep_copy()
        for words_W, token in zip(words_DW, drafts, strict=True):
            if not (matcher.consume_token(token) and self._write(matcher, words_W)):
                words_W[:] = 0
                break
        return not (words_DW == self._vocabulary.all_words).all()

    def draft(self, proposed: Sequence[int], most: int) -> Sequence[int]:
        """Return drafts, up to so many: of those proposed what may follow, then what must.

        Takes microseconds a token.
        """
        # Nothing if masks are slow: each draft costs one, and most are not delivered.
        if self._credit_ms < MASK_CREDIT_MS / 2:
            return ()
        matcher = self.take_in()
        if self.failure is not None or self._is_ended or matcher.is_stopped():
            return ()
        drafts = self._followed(matcher, proposed[:most])
        if len(drafts) < most:
            behind = matcher.deep_copy()
            if all(behind.consume_token(token) for token in drafts) and not behind.is_stopped():
                forced = behind.compute_ff_tokens()[: most - len(drafts)]
                drafts += self._followed(behind, forced)
        return drafts

    def _followed(self, matcher: llguidance.LLMatcher, token_ids: Sequence[int]) -> list[int]:
        """Return the first of these tokens that may follow and end nothing."""
        followed = list(token_ids[: matcher.validate_tokens(list(token_ids))])
        ends = [i for i, one in enumerate(followed) if one in self._vocabulary.eos_token_ids]
        return followed[: ends[0]] if ends else followed

    def _fill(self, words_W: NDArray[np.int32]) -> None:
        if not self._noted and self._matcher is None:
            words_W[:] = self._grammar.first_words_W
            return
        matcher = self.take_in()
        if self.failure is not None:
            return
        if self._is_ended:
            words_W[:] = self._vocabulary.eos_words
        elif not self._write(matcher, words_W):
            self.failure = _failure(matcher)

    def _write(self, matcher: llguidance.LLMatcher, words_W: NDArray[np.int32]) -> bool:
        """Write the mask of a matcher's state; False if it has none."""
        if not matcher.is_stopped():
            return write_mask(matcher, self._vocabulary, words_W) is None
        words_W[:] = self._vocabulary.eos_words
        return True

    def take_in(self) -> llguidance.LLMatcher:
        """Consume the noted tokens, however long it takes; return llguidance's matcher."""
        if self._matcher is None:
            self._matcher = self._grammar.beginning.deep_copy()
        tokens, self._noted = self._noted, []
        self._consume(self._matcher, tokens)
        return self._matcher

    def _consume(self, matcher: llguidance.LLMatcher, tokens: list[int]) -> None:
        """Consume tokens. After an EOS only EOS may follow, which llguidance need not know."""
        for token in tokens:
            if token in self._vocabulary.eos_token_ids:
                if not (self._is_ended or matcher.is_stopped() or matcher.consume_token(token)):
                    self.failure = _refused(token)
                    return
                self._is_ended = True
            elif self._is_ended:
                self.failure = _refused(token)
                return
            elif not matcher.consume_token(token):
                self.failure = _failure(matcher, token)
                return

    def _pay(self, cost_ms: float) -> None:
        self._credit_ms = min(MASK_CREDIT_MS, self._credit_ms + MASK_MS - cost_ms)
        if self._credit_ms < 0:
            self.failure = (
                f"structured_outputs is too complex: finding the tokens that may follow took "
                f"{cost_ms:.0f} ms, and {MASK_MS:.0f} ms are allowed in the long run; make it "
                "simpler"
            )
            self._grammar.on_too_slow(self.failure)


def write_mask(
    matcher: llguidance.LLMatcher, vocabulary: TokenTable, words_W: NDArray[np.int32]
) -> str | None:
    """Write the mask of the matcher's state; return None, or why there is no mask."""
    num_words = -(-vocabulary.tokenizer.vocab_size // 32)
    fits = num_words <= len(words_W)
    words = words_W if fits else np.empty(num_words, dtype=np.int32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, num_words * 4)
    if matcher.is_error():
        return why(matcher.get_error())
    if not fits:
        words_W[:] = words[: len(words_W)]
    words_W[num_words:] = 0
    words_W &= vocabulary.all_words
    if (words_W & vocabulary.special_words).any():
        _take_no_names(matcher, vocabulary, words_W)
    if (words_W & vocabulary.eos_words).any() and not matcher.is_accepting():
        words_W &= ~vocabulary.eos_words  # an EOS that is text, too: it would end the output here
    return None if words_W.any() else "no token of the model can follow"


def _take_no_names(
    matcher: llguidance.LLMatcher, vocabulary: TokenTable, words_W: NDArray[np.int32]
) -> None:
    """Clear special tokens that the matcher would not consume; the text of their name may follow.

    Where a text must follow that begins with a special token's name, llguidance's mask has that
    token, although it does not consume it there. An EOS would end the output.
    """
    for token in tokens_of(words_W & vocabulary.special_words).tolist():
        if matcher.validate_tokens([token]) == 0:
            words_W[token // 32] ^= np.int32(1) << np.int32(token % 32)
    if not words_W.any():
        text = matcher.compute_ff_bytes().decode("utf-8", "ignore")
        if text and (token := vocabulary.first_token(text)) < vocabulary.vocab_size:
            words_W[token // 32] = np.int32(1) << np.int32(token % 32)


def why(text: str) -> str:
    """Return llguidance's reason without its internal state."""
    for end in ("<non-verbose/>", "<state>", "<backtrace>"):
        text = text.partition(end)[0]
    return text.strip()


def _refused(token: int) -> str:
    return f"structured_outputs: token {token} cannot follow"


def _failure(matcher: llguidance.LLMatcher, token: int | None = None) -> str:
    """Explain why a matcher cannot go on: one of llguidance's limits, or the token."""
    reason = why(matcher.get_error()) or "no token of the model can follow"
    reason = shorten(reason.splitlines()[0])
    if token is not None and "fails parse" in reason:
        return _refused(token)
    if "forced bytes" in reason:
        return (
            "structured_outputs: the model's tokenizer cannot write the text that must follow: it "
            "normalizes it, or takes it for a special token; write it otherwise (as NFC, for one)"
        )
    if "NoExtensionBias" in reason:
        return "structured_outputs: nothing can follow: a part of it that must come matches nothing"
    return f"structured_outputs is too complex ({reason}): make it simpler"
