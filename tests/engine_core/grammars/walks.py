"""Vocabularies of several kinds, and walks along masks, as of a model without any sense."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.grammars.compilation import compile_grammar
from nanocore.engine_core.grammars.token_matcher import CompiledGrammar, TokenMatcher
from nanocore.engine_core.grammars.token_table import TokenTable, VocabularySource
from nanocore.protocol.structured_outputs import StructuredOutputs

BYTE_LEVEL_TOKENS = 260
BYTE_LEVEL_EOS = 259
DEMO_MODEL = demo_model_folder()


def source_of(folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> VocabularySource:
    """What the engine would load the vocabulary of this folder from."""
    path = folder / "tokenizer.json"
    content = path.read_bytes() if path.is_file() else None
    return VocabularySource(content, str(path), vocab_size, eos_token_ids)


def load_table(folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> TokenTable:
    return TokenTable.load(source_of(folder, vocab_size, eos_token_ids))


def demo_vocabulary() -> TokenTable:
    return load_table(DEMO_MODEL, 1030, [2])


def byte_level_vocabulary(folder: Path) -> TokenTable:
    """A token for each byte, three pieces, and EOS; the model's vocabulary is padded."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), '":', "true", "Ġa"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    assert tokenizer.get_vocab_size() == BYTE_LEVEL_TOKENS
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_table(folder, BYTE_LEVEL_TOKENS + 77, [BYTE_LEVEL_EOS])


def byte_fallback_vocabulary(folder: Path) -> TokenTable:
    """As sentencepiece's: pieces with a mark for spaces, and a token for each other byte.

    Tokens 1 and 2 are special; 2 and 3 are EOS, and 4 is <tool>, which is special, too.
    """
    pieces = ["<unk>", "<s>", "</s>", "<end>", "<tool>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [*'▁abcdefghij0123456789{}[]:,"', '":', '{"', "▁a", "ab", "tr", "true", "né", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in pieces[:5]])
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_table(folder, len(vocab), [2, 3])


def compiled(vocabulary: TokenTable, **wanted: object) -> CompiledGrammar:
    return compile_grammar(vocabulary, StructuredOutputs(**wanted))[1]  # type: ignore[arg-type]


def allowed(vocabulary: TokenTable, matcher: TokenMatcher) -> list[int]:
    """The tokens of the next mask."""
    words_W = np.full(vocabulary.num_words, 0x55555555, dtype=np.int32)
    if not matcher.fill(words_W):
        return list(range(vocabulary.vocab_size))
    bits = np.unpackbits(words_W.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def follow(vocabulary: TokenTable, matcher: TokenMatcher, text: str) -> bool:
    """Append tokens of this text as far as masks allow; whether it is there to its end."""
    rest = text.encode()
    while rest:
        fitting = {
            token: vocabulary.tokenizer.decode_bytes([token])
            for token in allowed(vocabulary, matcher)
            if not vocabulary.tokenizer.is_special_token(token)
        }
        token = max(
            (one for one, its in fitting.items() if its and rest.startswith(its)),
            key=lambda one: len(fitting[one]),
            default=None,
        )
        if token is None:
            return False
        matcher.append([token])
        rest = rest[len(fitting[token]) :]
    return True


def walk(
    vocabulary: TokenTable,
    grammar: CompiledGrammar,
    rng: random.Random,
    max_tokens: int = 200,
) -> str | None:
    """What a walk of random tokens writes; None if max_tokens cut it.

    EOS comes as soon as it may, sometimes.
    """
    matcher = grammar.matcher()
    tokens: list[int] = []
    for _ in range(max_tokens):
        choices = allowed(vocabulary, matcher)
        assert matcher.failure is None
        ends = vocabulary.eos_token_ids.intersection(choices)
        token = rng.choice(sorted(ends) if ends and rng.random() < 0.3 else choices)
        if token in vocabulary.eos_token_ids:
            return vocabulary.tokenizer.decode_bytes(tokens).decode()
        tokens.append(token)
        matcher.append([token])
    return None
