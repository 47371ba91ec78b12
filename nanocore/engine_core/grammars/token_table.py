"""The model's tokens for llguidance: their bytes, and which of them end an output.

Read once from tokenizer.json, which takes a second or more for 262,144 tokens with the GIL held
(see `grammar_compiler`). It is immutable; any number of threads use it. llguidance is imported when
a vocabulary is loaded: an engine without it serves all else.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanocore.protocol.errors import InvalidRequestError, shorten
from nanocore.worker.config.json_settings import note_oddity

if TYPE_CHECKING:
    import llguidance

_WHY: Final = "this model has no structured_outputs: "
_NAMES: Final = ("LLMatcher", "LLParserLimits", "LLTokenizer")
"""Names of llguidance that are used."""


class VocabularySource(msgspec.Struct, frozen=True):
    """What a vocabulary is loaded from.

    tokenizer: content of tokenizer.json as the engine serves it, or None. name: of it, for errors.
    vocab_size: number of the model's logits.
    """

    tokenizer: bytes | None
    name: str
    vocab_size: int
    eos_token_ids: Collection[int]

    def check(self) -> list[int]:
        """Check what can be checked without loading anything; return the model's EOS tokens.

        Raises:
            InvalidRequestError: see `TokenTable.load`.
        """
        eos = sorted(token for token in self.eos_token_ids if token < self.vocab_size)
        if not eos:
            raise InvalidRequestError(
                f"{_WHY}it has no EOS token, so an output could not end; give its "
                "generation_config.json an eos_token_id"
            )
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{_WHY}it has no tokenizer.json, which defines the text of its tokens; add "
                f"{self.name!r}"
            )
        if not _is_installed():
            _require_llguidance()
        return eos


def tokens_of(words_W: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the tokens that a mask allows."""
    return np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little"))


class TokenTable:
    """The model's tokens for llguidance and masks: bit t of a mask is token t.

    tokenizer: llguidance's; it may know fewer tokens than the model has, or more.
    num_words: of a mask, ceil(vocab_size / 32). Tokens that only pad the model's vocabulary are
    not the tokenizer's, and no mask has them.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, vocab_size: int) -> None:
        self.tokenizer: Final = tokenizer
        self.vocab_size: Final = vocab_size
        self.num_words: Final = -(-vocab_size // 32)
        self.eos_token_ids: Final = frozenset(tokenizer.eos_tokens)
        self.all_words: Final = self._words(range(vocab_size))
        self.eos_words: Final = self._words(self.eos_token_ids)
        known = range(min(vocab_size, tokenizer.vocab_size))
        self.special_words: Final = self._words([*filter(tokenizer.is_special_token, known)])

    @classmethod
    def load(cls, source: VocabularySource) -> TokenTable:
        """Load a model's vocabulary.

        Raises:
            InvalidRequestError: there is none, and why; each request for a structured output is to
                hear it.
        """
        eos = source.check()
        _require_llguidance()
        assert source.tokenizer is not None, "it was checked"
        try:
            if source.tokenizer.startswith(BOM_UTF8):
                note_oddity(f"{source.name} begins with a byte order mark, which is skipped")
            text = source.tokenizer.decode("utf-8-sig").lstrip()
            if not text.startswith("{"):  # llguidance would take it for a path
                raise ValueError("it is not a JSON object")
            return cls(_tokenizer(_without_merges(text), eos), source.vocab_size)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is not an Exception
            raise InvalidRequestError(
                f"{_WHY}llguidance cannot read {source.name!r} ({shorten(str(error))}): it needs a "
                "byte-level tokenizer, or one with a token for each byte"
            ) from None

    def special_token(self, text: str) -> int | None:
        """Return the special token of this name, or None."""
        tokens = self.tokenizer.tokenize_str(text, parse_special=True)
        if len(tokens) == 1 and self.tokenizer.is_special_token(tokens[0]):
            return tokens[0]
        return None

    def special_ranges(self) -> str:
        """Special tokens except EOS, in Lark's form: "3,7-9"."""
        others = tokens_of(self.special_words & ~self.eos_words)
        runs = np.split(others, np.flatnonzero(np.diff(others) != 1) + 1)
        return ",".join(f"{run[0]}-{run[-1]}" for run in runs if len(run))

    def first_token(self, text: str) -> int:
        """Return the first token of the text's first character."""
        return self.tokenizer.greedy_tokenize(text[0])[0]

    def _words(self, tokens: Collection[int]) -> NDArray[np.int32]:
        """Return the mask that allows these tokens."""
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def _is_installed() -> bool:
    """Whether llguidance can be found; what it does when it is imported is seen later."""
    try:
        return find_spec("llguidance") is not None
    except ValueError:  # hidden by None in sys.modules
        return False


def _require_llguidance() -> None:
    """Raise InvalidRequestError if llguidance cannot be imported, or is another release."""
    try:
        import llguidance
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a damaged package may raise anything, even SystemExit
        lacks = f"cannot import the package llguidance ({type(error).__name__}: {error})"
    else:
        if not (missing := [name for name in _NAMES if not hasattr(llguidance, name)]):
            return
        lacks = f"has a release of llguidance without {', '.join(missing)}"
    raise InvalidRequestError(
        f"this engine has no structured_outputs: it {shorten(lacks)}; leave them out, or "
        "pip install 'llguidance>=1.9,<2' where the engine runs, and start it again"
    )


def _without_merges(tokenizer: str) -> str:
    """Leave out a BPE model's merges, of which masks know nothing: a third of the time."""
    content = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
    if "model" not in content:
        return tokenizer
    model = msgspec.json.decode(content["model"], type=dict[str, msgspec.Raw])
    if "merges" in model:
        model["merges"] = msgspec.Raw(b"[]")
    content["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(content).decode()


def _tokenizer(tokenizer: str, eos: list[int]) -> llguidance.LLTokenizer:
    """Make llguidance's tokenizer; drop EOS tokens that it has no text for, which it refuses."""
    import llguidance

    try:
        return llguidance.LLTokenizer(tokenizer, eos_token=eos)
    except ValueError:
        num_tokens = llguidance.LLTokenizer(tokenizer, slices=[]).vocab_size
        known = [token for token in eos if token < num_tokens]
        if known in ([], eos):
            raise
        return llguidance.LLTokenizer(tokenizer, eos_token=known)
