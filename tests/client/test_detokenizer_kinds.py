"""Detokenizers of every kind: piece by piece the same text as decoding at once, at every cut."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from nanocore.client.detokenizer import MAX_HELD_TOKENS, IncrementalDetokenizer
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.messages import FinishReason
from tests.campaign import examples
from tests.client.byte_tokens import ids_of
from tests.client.driven_stream import DrivenStream
from tests.client.tokenizer_kinds import FALLBACK, KINDS, WORDS, expected_text, has_decoder, make
from tests.client.trained_tokenizers import CORPUS, SPECIAL, TRAINED, trained

PROPERTY = settings(max_examples=examples(30), deadline=None, derandomize=True)
REPLACEMENT = "\ufffd"
IN_CHARACTERS = [*"é中👍\u07ff\U0010ffff".encode(), 0xFF]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def any_tokenizer(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(kind)
    tokenizer = make(kind, folder)
    assert has_decoder(folder) == (kind != "none")
    return tokenizer


def _ids(data: st.DataObject, tokenizer: Tokenizer, max_size: int = MAX_HELD_TOKENS) -> list[int]:
    """Any tokens: often bytes of characters, at times an id that no token has."""
    vocab = tokenizer.backend.get_vocab()
    byte_ids = [vocab[f"<0x{b:02X}>"] for b in IN_CHARACTERS if f"<0x{b:02X}>" in vocab]
    last = tokenizer.backend.get_vocab_size()
    some = st.one_of(
        st.integers(0, last + 2),
        st.integers(last - len(WORDS) - 4, last - 1),
        st.sampled_from(byte_ids or [*IN_CHARACTERS]),
    )
    return data.draw(st.lists(some, max_size=max_size))


def _prompt(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """None, or tokens up to a whole character, which is what prompts end with."""
    vocab = tokenizer.backend.get_vocab()
    whole = [vocab[token] for token in ("b", "!", ".", "▁a", "<s>", "<|end|>") if token in vocab]
    if data.draw(st.booleans()):
        return []
    return [*_ids(data, tokenizer, 4), vocab["!"], data.draw(st.sampled_from(whole))]


def _text(tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]], skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return "".join(map(detokenizer.append, pieces)) + detokenizer.flush()


@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_wherever_the_output_ends_its_text_is_that_of_decoding_at_once(
    kind: str, any_tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    prompt, output = _prompt(data, any_tokenizer), _ids(data, any_tokenizer)
    for end in range(len(output) + 1):
        text = _text(any_tokenizer, prompt, [[i] for i in output[:end]], skip)
        whole = expected_text(kind, any_tokenizer, prompt, output[:end], skip)
        assert text in (whole, whole.removesuffix(REPLACEMENT)), output[:end]


@PROPERTY
@given(data=st.data(), cuts=st.sets(st.integers(0, MAX_HELD_TOKENS)))
def test_how_the_output_is_cut_makes_no_difference(
    any_tokenizer: Tokenizer, data: st.DataObject, cuts: set[int]
) -> None:
    prompt, output = _prompt(data, any_tokenizer), _ids(data, any_tokenizer)
    edges = [0, *sorted(cut for cut in cuts if cut < len(output)), len(output)]
    pieces = [output[start:end] for start, end in itertools.pairwise(edges)]
    singles = [[token_id] for token_id in output]
    assert _text(any_tokenizer, prompt, pieces, True) == _text(any_tokenizer, prompt, singles, True)


@PROPERTY
@given(
    data=st.data(),
    stop=st.sampled_from(
        ["a", "b", " ", "é", "中", "ab", "bb", "a b", "!", " the", "<", REPLACEMENT]
    ),
    reason=st.sampled_from(["length", "abort"]),
)
def test_stop_strings_end_the_text_of_decoding_at_once_whenever_the_stream_is_read(
    kind: str, any_tokenizer: Tokenizer, data: st.DataObject, stop: str, reason: FinishReason
) -> None:
    prompt, output = _prompt(data, any_tokenizer), _ids(data, any_tokenizer)
    driven = DrivenStream(any_tokenizer, prompt, stop=[stop])
    deltas = ""
    for token_id in output:
        driven.stream.samples[0].push_tokens([token_id])
        if data.draw(st.booleans()) and (read := driven.stream.read()) is not None:
            deltas += read.outputs[0].delta
    driven.end(reason)
    if (last := driven.stream.read()) is not None:
        deltas += last.outputs[0].delta
    texts = [_text(any_tokenizer, prompt, [output[:end]], True) for end in range(len(output) + 1)]
    assert deltas == next((text for text in texts if stop in text), texts[-1]).partition(stop)[0]


@pytest.mark.parametrize("read_early", [False, True])
@pytest.mark.parametrize("stop", [None, ["never"]])
def test_whole_characters_in_the_token_of_a_half_one_are_not_lost_at_the_end(
    tmp_path: Path, read_early: bool, stop: list[str] | None
) -> None:
    """Vocabularies have such tokens: " ", and the first two bytes of a Chinese character."""
    tokenizer = make("byte-level", tmp_path)
    output = [tokenizer.backend.token_to_id("abä")]  # a, b, and the first byte of 中
    assert tokenizer.decode(output) == f"ab{REPLACEMENT}"
    driven = DrivenStream(tokenizer, stop=stop)
    driven.stream.samples[0].push_tokens(output)
    if read_early:
        assert driven.next().outputs[0].text == "ab"
    driven.end("length")
    assert driven.final().outputs[0].text == "ab"


def test_a_long_run_of_bytes_that_are_no_text_costs_the_next_character_nothing(
    tmp_path: Path,
) -> None:
    tokenizer = make("byte-level", tmp_path)
    vocab = tokenizer.backend.get_vocab()
    ids = [vocab["ÿ"]] * (MAX_HELD_TOKENS - 1) + ids_of(tokenizer, "中")
    assert _text(tokenizer, [], [ids], True) == REPLACEMENT * (MAX_HELD_TOKENS - 1) + "中"


def test_bytes_held_without_need_are_shown_at_the_end(tmp_path: Path) -> None:
    """Python takes the beginning of an encoded surrogate for half a character; none can follow."""
    tokenizer = make("byte-level", tmp_path)
    ids = [tokenizer.backend.token_to_id(symbol) for symbol in ("í", "°")]
    assert _text(tokenizer, [], [ids], True) == tokenizer.decode(ids) == REPLACEMENT * 2


@pytest.fixture(params=sorted(FALLBACK))
def fallback(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return make(request.param, tmp_path)


def _named(tokenizer: Tokenizer, *tokens: str | bytes) -> list[int]:
    names = [[f"<0x{byte:02X}>" for byte in t] if isinstance(t, bytes) else [t] for t in tokens]
    return [tokenizer.backend.token_to_id(name) for name in itertools.chain(*names)]


def _pieces(tokenizer: Tokenizer, output: list[int], prompt: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, True)
    return [detokenizer.append([token_id]) for token_id in output]


def test_spaces_before_words_and_characters_of_bytes_come_out_whole(fallback: Tokenizer) -> None:
    prompt = _named(fallback, "b")
    for context in (prompt, [*prompt, *_named(fallback, *["<s>"] * 20)]):
        assert _pieces(fallback, _named(fallback, "▁a", "b"), context) == [" a", "b"]

    output = _named(fallback, "b", "中".encode(), "▁a")
    assert _pieces(fallback, output, _named(fallback, "b")) == ["b", "", "", "中", " a"]


@pytest.mark.parametrize("prompt", [[], ["<s>"]])
def test_after_a_prompt_without_text_the_first_piece_begins_as_the_decoder_begins(
    fallback: Tokenizer, prompt: list[str]
) -> None:
    output = _named(fallback, "<s>", "▁a", "▁a")
    assert "".join(_pieces(fallback, output, _named(fallback, *prompt))) == fallback.decode(output)


def test_an_invalid_byte_spoils_no_character_before_it_and_no_space_after_it(
    fallback: Tokenizer,
) -> None:
    """At once, these decoders take back the whole run of bytes when one is invalid."""
    output = _named(fallback, "中".encode() + b"\x80", "▁a", "b")
    pieces = _pieces(fallback, output, _named(fallback, "b"))
    assert pieces == ["", "", "中", REPLACEMENT, " a", "b"]
    assert fallback.decode(output).endswith(REPLACEMENT * 4 + " ab")


@pytest.mark.parametrize("token_id", [10**6, 2**31 - 1, -1, -(2**31)])
def test_ids_that_no_token_has_add_nothing_and_harm_nothing(
    any_tokenizer: Tokenizer, token_id: int
) -> None:
    """Models have more rows than tokenizers have tokens, and engines may be wrong."""
    b = any_tokenizer.backend.token_to_id("b")
    driven = DrivenStream(any_tokenizer, [b])
    driven.stream.samples[0].push_tokens([b, token_id, b])
    driven.end("length")
    expected = expected_text("", any_tokenizer, [b], [b, b], True)
    assert driven.final().outputs[0].text == expected


@pytest.mark.parametrize("skipped", ["</s>", None])
def test_tokens_that_are_left_out_push_no_others_out_of_the_window(
    tmp_path: Path, skipped: str | None
) -> None:
    """A repetition is one, whatever no decode shows in between."""
    tokenizer = make("ctc", tmp_path)
    a, b = (tokenizer.backend.token_to_id(letter) for letter in "ab")
    between = [10**6 if skipped is None else tokenizer.backend.token_to_id(skipped)] * 40
    assert tokenizer.decode([b, a, *between, a, b]) == "bab"
    assert _text(tokenizer, [], [[b, a, *between, a, b]], True) == "bab"
    assert _text(tokenizer, [b, a, *between], [[a, b]], True) == "b"


def test_a_context_that_begins_inside_a_character_spoils_none() -> None:
    """Of decoders that see the whole text: of a run of byte tokens cut in two nothing is left."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {"<unk>": 256, "a": 257}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]
    )
    tokenizer = Tokenizer({"tokenizer.json": backend.to_str().encode()}, "x")
    assert not tokenizer.token_texts(True).are_exact, "the decoder is to be one of those"
    text = "a日本語テスト日本語é🙂日本語"
    output = [257, *text[1:].encode()]
    assert tokenizer.decode(output) == text
    assert "".join(_pieces(tokenizer, output, [257])) == text


TEXT_PROPERTY = settings(max_examples=25, deadline=None, derandomize=True)
PARTS = [
    *CORPUS,
    "a", " ", "  ", "\n", "don't", "!", ".", " ,", "<s>", " added ", "文字",
    "中", "é", "e\u0301", "\u0301", "한", "\u1100\u1161", "שלום", "\u202e",
    "👍", "👍🏿", "👩‍💻", "👨‍👩‍👧‍👦", "\u200d", "🇩🇪", "🇩", "❤️", "\ufe0f", "🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    REPLACEMENT, "\U0010ffff", "\x00", "▁", "##", "|",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=8).map("".join)


def _cut(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """The same tokens in calls of any lengths, some of them empty."""
    edges = data.draw(st.lists(st.integers(0, len(ids)), max_size=6).map(sorted))
    starts, ends = [0, *edges], [*edges, len(ids)]
    return [ids[start:end] for start, end in zip(starts, ends, strict=True)]


def _spoiled(data: st.DataObject, tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """With tokens missing, twice, or put in between: special ones, and some that do not exist."""
    others = [tokenizer.backend.token_to_id(token) for token in SPECIAL]
    others += [tokenizer.backend.get_vocab_size() + 7]
    spoiled: list[int] = []
    for token_id in ids:
        change = data.draw(st.sampled_from(["", "", "", "", "missing", "twice", "another"]))
        spoiled += [] if change == "missing" else [token_id]
        spoiled += [token_id] if change == "twice" else []
        spoiled += [data.draw(st.sampled_from(others))] if change == "another" else []
    return spoiled


@pytest.mark.parametrize("kind", TRAINED)
@TEXT_PROPERTY
@given(data=st.data(), prompt_text=TEXTS, text=TEXTS, skip=st.booleans(), spoil=st.booleans())
def test_however_a_text_is_cut_its_pieces_make_what_decoding_at_once_makes(
    kind: str, data: st.DataObject, prompt_text: str, text: str, skip: bool, spoil: bool
) -> None:
    tokenizer = trained(kind)
    ids = tokenizer.encode(text)
    prompt = tokenizer.encode(prompt_text) if data.draw(st.booleans()) else []
    if spoil:
        ids = _spoiled(data, tokenizer, ids)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    shown = "".join(map(detokenizer.append, _cut(data, ids))) + detokenizer.flush()
    whole = expected_text(kind, tokenizer, prompt, ids, skip)
    assert shown in (whole, whole.removesuffix(REPLACEMENT))
    if kind.startswith("byte-level") and not spoil and not skip:
        assert whole == text


@pytest.mark.parametrize("kind", TRAINED)
def test_every_character_comes_out_by_the_token_that_completes_it(kind: str) -> None:
    tokenizer = trained(kind)
    for text in CORPUS:
        ids = tokenizer.encode(text)
        detokenizer = IncrementalDetokenizer(tokenizer, [], False)
        shown = ""
        for end, token_id in enumerate(ids, start=1):
            shown += detokenizer.append([token_id])
            whole = expected_text(kind, tokenizer, [], ids[:end], False)
            assert shown in (whole, whole.rstrip(REPLACEMENT))
