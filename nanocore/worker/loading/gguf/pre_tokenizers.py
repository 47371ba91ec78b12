"""How byte-level vocabularies split text before they look for tokens, by llama.cpp's names.

A GGUF file has no regular expression, only such a name. Splits are those of the models' own
tokenizer.json files. A name that is not here is refused: another split gives text that looks right
and tokens that the model was not trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
)
_CASED_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA_3: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_SEED: Final = (
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = _CASED.replace("{0}", "")
_GPT_4O: Final = _CASED.replace("{0}", f"{_CONTRACTIONS}?")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """pattern: what is cut out; None: GPT-2's, which is built in. has_digits: digits stand alone
    before that. is_composed: text is brought to NFC. ignores_merges: a piece that is a token is
    taken as it is. adds_bos: where the file does not say."""

    pattern: str | None
    has_digits: bool = False
    is_composed: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def settings(self) -> dict[str, Any]:
        """As tokenizer.json has it."""
        steps: list[dict[str, Any]] = []
        if self.has_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            pattern = {"Regex": self.pattern}
            steps.append(
                {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            )
        bytes_step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
        steps.append(bytes_step | {"use_regex": self.pattern is None})
        return {"type": "Sequence", "pretokenizers": steps}


_LLAMA_BPE: Final = PreTokenizer(_LLAMA_3, ignores_merges=True, adds_bos=True)
_WITH_DIGITS: Final = PreTokenizer(None, has_digits=True)

PRE_TOKENIZERS: Final = {
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "dbrx": PreTokenizer(_LLAMA_3),
    "smaug-bpe": PreTokenizer(_LLAMA_3),
    "qwen2": PreTokenizer(_QWEN_2, is_composed=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN_2),
    "gpt-2": PreTokenizer(None),
    "smollm": _WITH_DIGITS,
    "starcoder": _WITH_DIGITS,
    "refact": _WITH_DIGITS,
    "seed-coder": PreTokenizer(_SEED),
    "tekken": PreTokenizer(rf"{_TEKKEN}|\p{{N}}|{_CASED_REST}", ignores_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(rf"{_GPT_4O}|\p{{N}}{{1,3}}|{_CASED_REST}"),
}
