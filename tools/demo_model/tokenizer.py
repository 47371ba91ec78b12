"""The tokenizer of the demo model: whole words of its word lists, and bytes for all the rest.

It is a byte-level BPE with no merges: a pre-token that is in the vocabulary is one token
(`ignore_merges`), and any other falls apart into its bytes, of which all 256 are tokens. So any
UTF-8 text can be read and written. Words of the lists are tokens only with a space before them:
in quotes ("apple") they are spelled in letters, which the letter tasks rely on.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.demo_model import tasks
from tests.demo_model.words import CONTENT_WORDS, COUNTABLE, NAMES

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MAX_POSITIONS = 2048
# Words with the space before them; digits, other signs and white space one by one.
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s"

CHAT_TEMPLATE = (
    "{# The model knows no tools, and is not shown any. #}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def vocabulary() -> list[str]:
    """The tokens in the order of their ids, in the byte-level alphabet of BPE."""
    fixed = [t for p in tasks.phrases() for t in _pieces(re.sub(r"\{\w+\}", "", p))]
    fixed += [" " + piece.strip() for piece in fixed]  # a sentence may also follow another one
    names = [form for name in NAMES for form in (name, " " + name)]
    words = [" " + word for word in CONTENT_WORDS]
    plurals = [f" {word}s" for word in COUNTABLE]
    signs = [" " + sign for sign in "+-=(\"'"]
    roles = ["system", "user", "assistant"]
    texts = [*roles, *sorted(set(fixed)), *signs, *words, *plurals, *names]
    spelled = [t.replace(" ", "Ġ") for t in texts]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return list(dict.fromkeys([*SPECIAL_TOKENS, *alphabet, *spelled]))


def _pieces(text: str) -> list[str]:
    """The words of a fixed text, with the space before them where there is one."""
    return [piece for piece in re.findall(r" ?[A-Za-z]+", text) if len(piece.strip()) > 1]


def build() -> Tokenizer:
    """The tokenizer itself."""
    vocab = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def save(folder: Path) -> Tokenizer:
    """Write tokenizer.json and tokenizer_config.json, as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return tokenizer
