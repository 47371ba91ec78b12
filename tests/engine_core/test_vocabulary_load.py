"""Structured outputs' vocabulary: loaded once, when it is needed, or why there is none."""

from __future__ import annotations

import logging
from pathlib import Path
from queue import SimpleQueue

import pytest

from nanocore.engine_core.grammars import grammar_compiler as module
from nanocore.engine_core.grammars.grammar_compiler import GrammarCompiler, NoGrammars, grammars_of
from nanocore.engine_core.grammars.token_matcher import CompiledGrammar
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.engine_core.grammars.walks import source_of
from tests.tiny_models import EOS, VOCAB_SIZE, write_byte_tokenizer

WANTED = StructuredOutputs(choice=["yes", "no"])


def test_the_first_request_that_needs_the_vocabulary_has_it_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_byte_tokenizer(tmp_path)
    grammars = grammars_of(source_of(tmp_path, VOCAB_SIZE, [EOS]))
    assert isinstance(grammars, GrammarCompiler)
    assert "vocabulary in" not in caplog.text, "nobody has asked for it"
    done: SimpleQueue[object] = SimpleQueue()
    for _ in range(2):
        grammars.compile(WANTED, done.put)
        assert isinstance(done.get(timeout=60), CompiledGrammar)
    grammars.close()
    assert caplog.text.count("vocabulary in") == 1


def test_a_model_without_one_says_why_to_whoever_asks(tmp_path: Path) -> None:
    grammars = grammars_of(source_of(tmp_path, VOCAB_SIZE, [EOS]))
    assert isinstance(grammars, NoGrammars)
    error = grammars.find(StructuredOutputs(json_object=True))
    assert isinstance(error, InvalidRequestError)
    assert "no tokenizer.json" in str(error)


def test_a_vocabulary_that_turns_out_to_be_none_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer.json").write_text("[]")
    grammars = grammars_of(source_of(tmp_path, VOCAB_SIZE, [EOS]))
    done: SimpleQueue[object] = SimpleQueue()
    grammars.compile(WANTED, done.put)
    error = done.get(timeout=60)
    assert isinstance(error, InvalidRequestError)
    assert "llguidance cannot read" in str(error)
    assert str(grammars.find(WANTED)) == str(error)
    grammars.close()


def test_a_bug_in_loading_reaches_the_request_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_tokenizer(tmp_path)
    monkeypatch.setattr(TokenTable, "load", lambda *_: 1 / 0)
    grammars = grammars_of(source_of(tmp_path, VOCAB_SIZE, [EOS]))
    done: SimpleQueue[object] = SimpleQueue()
    grammars.compile(WANTED, done.put)
    assert "please report it" in str(done.get(timeout=60))
    grammars.close()


def test_an_engine_that_ends_loads_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_tokenizer(tmp_path)
    monkeypatch.setattr(module.TokenTable, "load", lambda *_: 1 / 0)
    grammars = grammars_of(source_of(tmp_path, VOCAB_SIZE, [EOS]))
    done: SimpleQueue[object] = SimpleQueue()
    grammars.close()
    grammars.compile(WANTED, done.put)
    assert done.empty()
