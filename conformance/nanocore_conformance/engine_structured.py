"""Rules for engines: structured outputs, judged by the texts that the tokens come to.

A text has several tokenizations, so tokens are made text by the tokenizer.json that the engine
itself serves. What a model would say does not matter: everything here has few texts, of which noise
takes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from nanocore.protocol.messages import Accepted, Error, Op, Output
from nanocore_conformance.checked_streams import Stream
from nanocore_conformance.engine_control import read_file
from nanocore_conformance.engine_ends import UNIFORM
from nanocore_conformance.engine_sessions import longest
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import Body, Peer, submit_body
from nanocore_conformance.report import BrokenError, SkippedError, require

CAPABILITY = "structured_outputs"
MAX_TOKENS = 64
NUM_SAMPLES = 4
YES_OR_NO: Body = {"choice": ["yes", "no", "no, never"]}
OBJECT = (
    '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],'
    ' "additionalProperties": false}'
)
FEW_TEXTS: tuple[tuple[Body, Callable[[str], bool]], ...] = (
    (YES_OR_NO, lambda text: text in YES_OR_NO["choice"]),
    ({"choice": ["abc"]}, lambda text: text == "abc"),
    ({"regex": "[ab]{3}"}, lambda text: re.fullmatch("[ab]{3}", text) is not None),
    ({"json": '{"enum": ["red", 5]}'}, lambda text: json.loads(text) in ("red", 5)),
    ({"json": OBJECT}, lambda text: json.loads(text) in ({"n": 1}, {"n": 2})),
    (
        {"json": OBJECT, "disable_any_whitespace": True},
        lambda text: text in ('{"n":1}', '{"n":2}'),
    ),
    ({"grammar": 'start: "a" b\nb: "x" | "y"'}, lambda text: text in ("ax", "ay")),
)
"""What is wanted, and whether a text is that."""
UNCOMPILABLE: tuple[tuple[Body, str], ...] = (
    ({"json": '{"type":\n"integer",,}'}, r"\b2\b"),
    ({"json": '{"properties": {"age": {"type": "integr"}}}'}, "/properties/age"),
    ({"regex": "a(b"}, ""),
    ({"grammar": 'start: "a"\n  | ('}, r"\b2\b"),
)
"""What cannot be compiled, and the place of it in an ERROR's message: a line, or a JSON pointer."""


def capable_session(engine: EngineUnderTest) -> Peer:
    """A session with an engine that has structured outputs."""
    peer = engine.session()
    if CAPABILITY not in peer.welcome.capabilities:
        raise SkippedError(f"the engine has no capability {CAPABILITY}")
    return peer


def text_of(peer: Peer) -> Callable[[Stream], str]:
    """What makes a stream's text, without the EOS at its end."""
    from tokenizers import Tokenizer  # only here: the program stays light for what needs no text

    served = [file for file in peer.welcome.model.files if file.name == "tokenizer.json"]
    if not served:
        raise SkippedError("the engine serves no tokenizer.json, so its texts are not known")
    tokenizer = Tokenizer.from_str(read_file(peer, served[0]).decode())
    eos = peer.welcome.model.eos_token_ids

    def text(stream: Stream) -> str:
        token_ids = list(stream.token_ids)
        while token_ids and token_ids[-1] in eos:
            token_ids.pop()
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    return text


def wanted(what: Body, **sampling: object) -> Body:
    """Sampling parameters: at random, until EOS."""
    usual: dict[str, Any] = {"temperature": UNIFORM, "seed": 7, "max_tokens": MAX_TOKENS}
    return usual | {"ignore_eos": False, "structured_outputs": what} | sampling


@ENGINE_RULES.add("6. Versions and capabilities")
def structured_outputs_need_their_capability(engine: EngineUnderTest) -> None:
    """Without the capability each kind is refused, by name; with it, taken."""
    peer = engine.session()
    if peer.welcome.protocol < (1, 6):
        raise SkippedError(f"the engine speaks {peer.welcome.protocol}, and this is of 1.6")
    structure = {"begin": "<f>", "schema": "true", "end": "</f>"}
    tag = {"structures": [structure], "triggers": ["<f"]}
    kinds = [what for what, _ in FEW_TEXTS] + [{"json_object": True}, {"structural_tag": tag}]
    for what in kinds:
        peer.send(Op.SUBMIT, submit_body("a", **wanted(what)))
        if CAPABILITY in peer.welcome.capabilities:
            peer.finish(peer.accepted("a"))
        else:
            peer.refused("invalid_request", "a", naming=CAPABILITY)
    peer.still_streams()


@ENGINE_RULES.add("Structured outputs")
def outputs_are_what_was_wanted(engine: EngineUnderTest) -> None:
    """Sampled texts of each kind of constraint are allowed ones, and they end."""
    peer = capable_session(engine)
    text = text_of(peer)
    for what, is_right in FEW_TEXTS:
        samples = peer.submit("several", **wanted(what, n=NUM_SAMPLES)).samples
        peer.finish(*samples)
        for stream in samples:
            _require_complete(peer, stream, what)
            try:
                right = is_right(text(stream))
            except ValueError:
                right = False
            require(right, f"a text of {what}", repr(text(stream)))
    peer.still_streams()


def _require_complete(peer: Peer, stream: Stream, what: Body) -> None:
    last = stream.token_ids[-1:]
    ended = stream.finish_reason == "stop" and last[0] in peer.welcome.model.eos_token_ids
    require(ended, f"'stop' by EOS, where an output of {what} is complete", stream)


@ENGINE_RULES.add("Structured outputs")
def free_prefixes_free_what_begins_with_them(engine: EngineUnderTest) -> None:
    """At random a text is of the form, or begins with a prefix; and then it may go on for ever."""
    peer = capable_session(engine)
    if peer.welcome.protocol < (1, 8):
        raise SkippedError(f"the engine speaks {peer.welcome.protocol}, and this is of 1.8")
    text = text_of(peer)
    what: Body = {"choice": ["abc"], "free_prefixes": ["xy", "z"]}
    samples = peer.submit("several", **wanted(what, n=2 * NUM_SAMPLES)).samples
    peer.finish(*samples)
    for stream in samples:
        got = text(stream)
        begun = got.lstrip()
        cut = stream.finish_reason == "length" and any(p.startswith(begun) for p in ("xy", "z"))
        right = got == "abc" or begun.startswith(("xy", "z")) or cut
        require(right, f"a text of {what}", repr(got))
    what = {"choice": ["abc"], "free_prefixes": ["abc"]}
    free = peer.complete("free", **wanted(what, min_tokens=MAX_TOKENS))
    require(free.finish_reason == "length", f"'length' where {what} may go on", free)
    require(text(free).lstrip().startswith("abc"), "the prefix first", repr(text(free)))
    peer.still_streams()


@ENGINE_RULES.add("Structured outputs")
def eos_comes_only_where_the_output_can_end(engine: EngineUnderTest) -> None:
    """A bias cannot end it early; max_tokens may cut it; with ignore_eos it ends all the same."""
    peer = capable_session(engine)
    text, eos = text_of(peer), peer.welcome.model.eos_token_ids
    early = [[token_id, 100.0] for token_id in eos]
    one = {"choice": ["abcabcabc"]}
    stream = peer.complete("biased", **wanted(one, temperature=0.0, logit_bias=early))
    _require_complete(peer, stream, one)
    require(text(stream) == one["choice"][0], f"{one} as a whole", repr(text(stream)))
    cut = peer.complete("cut", **wanted({"regex": "[ab]{100}"}, max_tokens=1))
    got = (len(cut.token_ids), cut.finish_reason)
    require(got == (1, "length"), "one token, then 'length'", got)
    require(re.fullmatch("[ab]+", text(cut)) is not None, "a beginning of it", repr(text(cut)))
    on = peer.complete("on", **wanted(one, ignore_eos=True))
    expected = f"{one}, then EOS until 'length', with ignore_eos"
    goes_on = (len(on.token_ids), on.finish_reason) == (MAX_TOKENS, "length")
    require(goes_on and text(on) == one["choice"][0], expected, (text(on), on))
    nothing = peer.complete("nothing", **wanted(one, min_tokens=MAX_TOKENS))
    reason = nothing.finish_reason
    require(reason == "error", "'error' where min_tokens forbid the only token left, EOS", reason)
    peer.still_streams()


@ENGINE_RULES.add("Structured outputs")
def what_cannot_be_compiled_is_refused_with_its_place(engine: EngineUnderTest) -> None:
    """ERROR invalid_request says where; a request that waits or runs meanwhile loses nothing."""
    peer = capable_session(engine)
    for what, place in UNCOMPILABLE:
        peer.send(Op.SUBMIT, submit_body("bad", **wanted(what)))
        peer.send(Op.SUBMIT, submit_body("good", max_tokens=2))
        answers = _answers(peer, 2)
        refused, accepted = answers.get("bad"), answers.get("good")
        if not isinstance(refused, Error) or refused.code != "invalid_request":
            raise BrokenError(f"ERROR invalid_request of {what}", refused)
        found = re.search(place, refused.message) is not None
        require(found, f"a message that says where, of {what}", refused.message)
        require(isinstance(accepted, Accepted), "ACCEPTED of the next request", accepted)
        good = peer.stream("good")
        peer.finish(good)
        require(len(good.token_ids) == 2, "2 tokens of the next request", good)
    peer.still_streams()


@ENGINE_RULES.add("ABORT")
def abort_reaches_what_is_compiled(engine: EngineUnderTest) -> None:
    """A request whose ABORT follows its SUBMIT at once is accepted, if it can be, and ends."""
    peer = capable_session(engine)
    one = wanted({"regex": "[ab]{1,7}c{0,5}"}, ignore_eos=True, max_tokens=longest(peer), n=2)
    peer.send(Op.SUBMIT, submit_body("aborted", **one))
    peer.send(Op.ABORT, {"request_ids": ["aborted"]})
    samples = peer.accepted("aborted").samples
    peer.finish(*samples)
    reasons = [sample.finish_reason for sample in samples]
    require(reasons == ["abort"] * 2, "'abort' of both samples", reasons)
    peer.still_streams()


@ENGINE_RULES.add("10. Ordering and delivery")
def every_request_is_answered_whatever_is_compiled(engine: EngineUnderTest) -> None:
    """Among structured requests the others are answered in order, and all of them once."""
    peer = capable_session(engine)
    text = text_of(peer)
    choices = {f"structured-{i}": f"{i}{i + 1}{i + 2}" for i in range(6)}
    plain = [f"plain-{i}" for i in range(6)]
    for name, (structured, choice) in zip(plain, choices.items(), strict=True):
        peer.send(Op.SUBMIT, submit_body(structured, **wanted({"choice": [choice]})))
        peer.send(Op.SUBMIT, submit_body(name, max_tokens=2))
    answers = _answers(peer, len(plain) + len(choices))
    refused = [answer for answer in answers.values() if not isinstance(answer, Accepted)]
    require(not refused, "ACCEPTED of all requests", refused)
    order = [name for name in answers if name in plain]
    require(order == plain, f"answers in the order {plain}", order)
    peer.finish(*map(peer.stream, answers))
    for name, choice in choices.items():
        got = text(peer.stream(name))
        require(got == choice, f"{choice!r} of {name}", repr(got))


def _answers(peer: Peer, count: int) -> dict[str, Accepted | Error]:
    """The next answers to SUBMITs, by request_id, in the order in which they came."""
    answers: dict[str, Accepted | Error] = {}
    while len(answers) < count:
        expected = "ACCEPTED or ERROR, of each SUBMIT"
        message = peer.receive(expected)
        if isinstance(message, Output):
            continue
        if not isinstance(message, (Accepted, Error)) or message.request_id is None:
            raise BrokenError(expected, message)
        require(message.request_id not in answers, "one answer", message)
        answers[message.request_id] = message
    return answers
