"""The vocabulary at an engine's start: what is there to compile for, or why nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanocore.engine_core.grammars.grammar_compiler import GrammarCompiler, VocabularyLoad
from nanocore.engine_core.grammars.matcher import NoGrammars
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.tiny_models import EOS, VOCAB_SIZE, write_byte_tokenizer


def test_a_models_tokenizer_is_what_grammars_are_compiled_for(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    notes: list[str] = []
    grammars = VocabularyLoad(tmp_path, VOCAB_SIZE, [EOS]).wait(notes)
    assert isinstance(grammars, GrammarCompiler)
    grammars.close()
    assert "vocabulary made in" in notes[0]


def test_a_model_without_one_says_why_to_whoever_asks(tmp_path: Path) -> None:
    notes: list[str] = []
    grammars = VocabularyLoad(tmp_path, VOCAB_SIZE, [EOS]).wait(notes)
    assert isinstance(grammars, NoGrammars)
    error = grammars.find(StructuredOutputs(json_object=True))
    assert isinstance(error, InvalidRequestError)
    assert "no tokenizer.json" in str(error)
    assert notes == [str(error)]


def test_a_bug_is_no_reason_to_serve_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenTable, "load", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        VocabularyLoad(tmp_path, VOCAB_SIZE, [EOS]).wait([])
