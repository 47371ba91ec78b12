"""Prompts of OpenAI's APIs: a text, a list of texts, token ids, or a list of lists of them."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, cast

from nanocore.client.chat.chat_messages import is_long
from nanocore.client.requests.submission import SubmitTicket
from nanocore.client.tokenizer import MAX_QUICK_CHARS, Tokenizer
from nanocore.http.exchange import Exchange, Result
from nanocore.http.http_errors import bad_request
from nanocore.protocol.errors import ContextLengthError

MAX_PROMPTS: Final = 1024
PromptInput: TypeAlias = "str | list[str | int | list[int]]"
OnePrompt: TypeAlias = "str | list[int]"


def read_prompts(given: PromptInput, field: str) -> list[OnePrompt]:
    """Return the prompts of a request. field: its name, for errors.

    Raises:
        HttpError: there are none, too many, or they are of several kinds.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request(f"{field} is empty: give a text, or token ids", field)
    kinds = set(map(type, given))
    if len(kinds) > 1:
        raise bad_request(
            f"{field} mixes kinds: give a text, a list of texts, a list of token ids, or a list of "
            "such lists",
            field,
        )
    if kinds == {int}:
        return [cast("list[int]", given)]
    prompts = cast("list[OnePrompt]", given)
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(
            f"{field} has {len(prompts)} prompts, more than {MAX_PROMPTS}: send several requests",
            field,
        )
    return prompts


async def tokenize_prompts(
    exchange: Exchange,
    tickets: Sequence[SubmitTicket],
    prompts: Sequence[OnePrompt],
    add_special_tokens: bool,
    field: str,
    num_kept: int | None,
) -> list[list[int]]:
    """Return the token ids of each prompt; much text is tokenized without delaying other requests.

    tickets: of the prompts in the order of submission, which long ones give up. field: name of the
    prompts, for errors. num_kept: keep this many last tokens of each.

    Raises:
        HttpError: a prompt has no tokens.
        ContextLengthError: a prompt has more tokens than the model takes.
        Disconnected: the client has gone.
    """
    client = exchange.client
    max_model_len = client.model_card.max_model_len

    def encode(number: int, tokenizer: Tokenizer) -> list[int]:
        prompt = prompts[number]
        if isinstance(prompt, str):
            if num_kept is None:
                prompt = tokenizer.encode(prompt, add_special_tokens, max_model_len)
            else:
                text = tokenizer.cut_beginning(prompt, min(num_kept, max_model_len))
                prompt = tokenizer.encode(text, add_special_tokens)
        ids = prompt if num_kept is None else prompt[-num_kept:]
        name = f"{field}[{number}]" if len(prompts) > 1 else field
        if not ids:
            raise bad_request(f"{name} has no tokens: give at least one", field)
        if len(ids) > max_model_len:
            raise ContextLengthError(
                f"{name}: the prompt has {len(ids)} tokens, more than max_model_len="
                f"{max_model_len}: shorten it"
            )
        return ids

    # The longest first, so that one that does not fit is found early.
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))

    async def encode_all() -> dict[int, list[int]]:
        return {
            number: await client.with_tokenizer(partial(encode, number), are_long)
            for number in order
        }

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    are_long = is_long(*texts)
    if sum(map(len, texts)) <= MAX_QUICK_CHARS:
        tokenizer = await client.get_tokenizer()
        token_ids = {number: encode(number, tokenizer) for number in order}
    elif not are_long:
        token_ids = await encode_all()
    else:
        token_ids = await attended_aside(exchange, tickets, encode_all())
    return [token_ids[number] for number in range(len(prompts))]


async def attended_aside(
    exchange: Exchange, tickets: Sequence[SubmitTicket], work: Coroutine[Any, Any, Result]
) -> Result:
    """Do long work as `Exchange.attended` does; other requests may overtake waiting ones."""
    for ticket in tickets:
        ticket.give_way()
    return await exchange.attended(work)


def num_kept_tokens(num_tokens: int | None, room: int) -> int | None:
    """Return how many last tokens of each prompt to keep, for vLLM's truncate_prompt_tokens.

    Args:
        num_tokens: as requested; None keeps all, -1 as many as fit.
        room: tokens that fit.

    Raises:
        HttpError: it is another number below 1.
    """
    if num_tokens is None or num_tokens >= 1:
        return num_tokens
    if num_tokens != -1:
        raise bad_request(
            f"truncate_prompt_tokens={num_tokens}: at least 1, or -1 for as many as fit",
            "truncate_prompt_tokens",
        )
    return max(room, 1)
