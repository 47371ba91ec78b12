"""Model folders without a tokenizer.json, as transformers knows them by their vocabulary."""

from __future__ import annotations

import io
import json
from pathlib import Path

from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer

CORPUS = [
    "the cat sat on the mat, and the dog sat there: 123 + 456",
    "don't you think so? I'm sure they've seen it; it's theirs.",
    "héllo wörld, été, 中文 文字, 日本語 テスト",
    "  two spaces\n\nlines\tand tabs",
]
TEXTS = [
    *CORPUS,
    "",
    " a leading space",
    "UPPER Lower",
    "emoji 👍🏽 👨‍👩‍👧 🇩🇪, שלום, e\u0301",
    "a<s>b</s>c<|end|>d<added>e",
]


def write_byte_level(folder: Path, tokenizer_class: str) -> None:
    """vocab.json and merges.txt, as GPT-2's and Qwen's."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        CORPUS * 9, vocab_size=300, special_tokens=["<|end|>"], show_progress=False
    )
    trained.save_model(str(folder))
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|end|>")
    write_config(folder, tokenizer_class=tokenizer_class, **ends)


def write_word_pieces(folder: Path) -> None:
    """vocab.txt, as BERT's."""
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(CORPUS * 9, vocab_size=150, show_progress=False)
    trained.save_model(str(folder))
    write_config(folder, tokenizer_class="BertTokenizer", do_lower_case=True)


def write_sentence_pieces(folder: Path, tokenizer_class: str) -> None:
    """tokenizer.model, as Llama 2's and Gemma's."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 9),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        pad_id=3,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<pad>"}
    write_config(folder, tokenizer_class=tokenizer_class, **names)


def write_config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
