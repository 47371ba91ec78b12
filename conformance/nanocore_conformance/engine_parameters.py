"""Rules for engines: parameters that change which token is sampled.

The model is not known, so they are made to decide: with the largest bias and the largest penalties
some tokens win whatever the model's logits are, as long as these lie within a hundred of another.
"""

from __future__ import annotations

from typing import Any

from nanocore.protocol.messages import Op
from nanocore_conformance.engine_ends import UNIFORM
from nanocore_conformance.engine_samples import session_of_1_5
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import PROMPT, Peer, submit_body
from nanocore_conformance.report import SkippedError, require

FEW = [1, 2, 3, 4, 6, 7, 8, 9]
"""Tokens of every vocabulary; what is allowed is these, so that all of them come up."""
NUM_TOKENS = 16


def _few(peer: Peer) -> list[int]:
    eos = peer.welcome.model.eos_token_ids
    return [token for token in FEW if token not in eos]


@ENGINE_RULES.add("9. Sampling parameters")
def min_tokens_come_before_any_end(engine: EngineUnderTest) -> None:
    """Before min_tokens neither a stop token nor EOS is sampled; after it they end as ever."""
    peer = session_of_1_5(engine)
    few = _few(peer)[:2]
    eos = peer.welcome.model.eos_token_ids[:1]
    for name, allowed, ends in (
        ("stop_token_ids", few, {"stop_token_ids": few[:1]}),
        ("EOS", [*eos, few[1]], {"ignore_eos": False}),
    ):
        stop = allowed[0]
        if stop == few[1]:
            raise SkippedError("the model has no EOS")
        sampling: dict[str, Any] = {"allowed_token_ids": allowed, "logit_bias": [[stop, 100.0]]}
        sampling |= {"max_tokens": NUM_TOKENS} | ends
        for num_tokens in (0, 1, 5):
            stream = peer.complete("stopped", min_tokens=num_tokens, **sampling)
            expected = [few[1]] * num_tokens + [stop]
            got = (stream.token_ids, stream.finish_reason)
            what = f"{expected} and 'stop', with min_tokens={num_tokens} and {name}"
            require(got == (expected, "stop"), what, got)
    sampling = {"temperature": UNIFORM, "seed": 7, "max_tokens": 64, "min_tokens": 64}
    stream = peer.complete("random", ignore_eos=False, **sampling)
    require(len(stream.token_ids) == 64, "64 tokens, with min_tokens=64", len(stream.token_ids))


@ENGINE_RULES.add("9. Sampling parameters")
def biases_choose_and_forbid(engine: EngineUnderTest) -> None:
    """A bias of 100 makes a token the most likely one, one of -100 the least likely."""
    peer = session_of_1_5(engine)
    usual = peer.complete("usual", max_tokens=1).token_ids[0]
    chosen = next(token for token in FEW if token != usual)
    stream = peer.complete("chosen", logit_bias=[[chosen, 100.0]])
    require(set(stream.token_ids) == {chosen}, f"{chosen} alone", stream.token_ids)
    stream = peer.complete("forbidden", max_tokens=1, logit_bias=[[usual, -100.0]])
    require(usual not in stream.token_ids, f"another token than {usual}", stream.token_ids)
    both = [[chosen, 100.0], [usual, -100.0]]
    stream = peer.complete("both", logit_bias=both)
    require(set(stream.token_ids) == {chosen}, f"{chosen} alone", stream.token_ids)
    peer.still_streams()


@ENGINE_RULES.add("9. Sampling parameters")
def only_allowed_tokens_are_sampled(engine: EngineUnderTest) -> None:
    """allowed_token_ids hold for greedy and for random requests, and a bias does not break them."""
    peer = session_of_1_5(engine)
    random: dict[str, Any] = {"temperature": UNIFORM, "seed": 7, "max_tokens": 64}
    for allowed in ([3], [1, 2], [7, 7, 8], [*range(48)]):
        biased: dict[str, Any] = {"logit_bias": [[49, 100.0]]}
        for sampling in (random, biased):
            stream = peer.complete("allowed", allowed_token_ids=allowed, **sampling)
            others = {*stream.token_ids} - {*allowed}
            require(not others, f"no token but {allowed}", others)
    varied = {*peer.complete("varied", allowed_token_ids=[1, 2], **random).token_ids}
    require(varied == {1, 2}, "both allowed tokens, at random", varied)


@ENGINE_RULES.add("9. Sampling parameters")
def bad_words_do_not_come(engine: EngineUnderTest) -> None:
    """A bad token never comes; of a sequence the last one does not, after the others in the output.

    The prompt does not count, nor does the beginning of a sequence alone.
    """
    peer = session_of_1_5(engine)
    first, second = _few(peer)[:2]
    usual: dict[str, Any] = {
        "allowed_token_ids": [first, second], "logit_bias": [[first, 100.0]], "max_tokens": 6,
    }  # fmt: skip
    for bad, expected in (
        ([], [first] * 6),
        ([[first]], [second] * 6),
        ([[first, first]], [first, second] * 3),
        ([[first, first, first]], [first, first, second] * 2),
        ([[first, second]], [first] * 6),
        ([[first, first], [second, first]], [first] + [second] * 5),
        ([[PROMPT[-1], first]], [first] * 6 if PROMPT[-1] not in (first, second) else None),
    ):
        if expected is not None:
            stream = peer.complete("words", bad_words_token_ids=bad, **usual)
            require(stream.token_ids == expected, f"{expected}, without {bad}", stream.token_ids)
    # A second one would make the bad word; that none is left for a first token could be refused.
    nothing = peer.complete(
        "nothing",
        allowed_token_ids=[first],
        bad_words_token_ids=[[first, first]],
        max_tokens=6,
        logprobs=1,
    )
    reason = nothing.finish_reason
    require(reason == "error", "'error' of a request to which no token is left", reason)
    peer.still_streams()


@ENGINE_RULES.add("9. Sampling parameters")
def penalties_keep_their_order(engine: EngineUnderTest) -> None:
    """Biases come before the repetition penalty, and that before those for frequency and presence.

    Logits far below 0 are multiplied by a repetition penalty: no token comes again. Those far above
    0 are divided, for tokens of the prompt, until the other two penalties weigh more than they.
    """
    peer = session_of_1_5(engine)
    few = _few(peer)
    below: dict[str, Any] = {"logit_bias": [[token, -100.0] for token in few]}
    above: dict[str, Any] = {"logit_bias": [[token, 100.0] for token in few]}
    strong = {"repetition_penalty": 100.0, "allowed_token_ids": few}
    stream = peer.complete("repetition", [0], max_tokens=len(few), **below | strong)
    expected = f"each of {few} once, with repetition_penalty=100"
    require(sorted(stream.token_ids) == few, expected, stream.token_ids)
    stream = peer.complete("prompt", few[:2], max_tokens=len(few) - 2, **below | strong)
    expected = f"each of {few[2:]} once: the prompt holds the others"
    require(sorted(stream.token_ids) == few[2:], expected, stream.token_ids)
    for name, num_rounds in (("presence_penalty", 1), ("frequency_penalty", 2)):
        length = num_rounds * len(few)
        sampling = above | strong | {"max_tokens": length, name: 2.0}
        stream = peer.complete(name, few, **sampling)
        expected = f"each of {few} {num_rounds} times, with {name}=2"
        require(sorted(stream.token_ids) == sorted(few * num_rounds), expected, stream.token_ids)
        stream = peer.complete(name, few, **sampling | {name: -2.0})
        expected = f"one token again and again, with {name}=-2"
        require(len({*stream.token_ids}) == 1, expected, stream.token_ids)


@ENGINE_RULES.add("9. Sampling parameters")
def parameters_name_tokens_of_the_vocabulary(engine: EngineUnderTest) -> None:
    """The last id of the vocabulary is taken, the next is refused, wherever ids are sent."""
    peer = session_of_1_5(engine)
    size = peer.welcome.model.vocab_size
    for token in (size - 1, size):
        ids: dict[str, Any] = {
            "allowed_token_ids": [0, token],
            "logit_bias": [[0, 1.0], [token, 1.0]],
            "bad_words_token_ids": [[0], [1, token]],
        }
        for name, value in ids.items():
            peer.send(Op.SUBMIT, submit_body("last", max_tokens=1, **{name: value}))
            if token < size:
                peer.finish(peer.accepted("last"))
            else:
                peer.refused("invalid_request", "last", naming=str(size))
    peer.still_streams()
