"""Prompts as OpenAI's APIs take them: a text, a list of texts, token ids, or a list of those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from nanocore.client import AsyncEngineClient
from nanocore.client.tokenizer import MAX_QUICK_CHARS, Tokenizer
from nanocore.http.errors import bad_request

MAX_PROMPTS: Final = 1024
PromptInput: TypeAlias = "str | list[str | int | list[int]]"
OnePrompt: TypeAlias = "str | list[int]"


def read_prompts(given: PromptInput, field: str) -> list[OnePrompt]:
    """One prompt or several. field: what the request calls them.

    Raises:
        HttpError: there are none, too many, or they are of several kinds.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request(f"{field} is empty: give a text, or token ids", field)
    ids = [one for one in given if isinstance(one, int)]
    if len(ids) == len(given):
        return [ids]
    texts: list[OnePrompt] = [one for one in given if isinstance(one, str)]
    prompts = texts or [one for one in given if isinstance(one, list)]
    if len(prompts) != len(given):
        raise bad_request(
            f"{field} is a text, a list of texts, a list of token ids or a list of lists of those, "
            "and nothing mixed",
            field,
        )
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(
            f"{field} has {len(prompts)} prompts: at most {MAX_PROMPTS} are taken; send several "
            "requests",
            field,
        )
    return prompts


async def tokenize_prompts(
    client: AsyncEngineClient, prompts: Sequence[OnePrompt], add_special_tokens: bool, field: str
) -> list[list[int]]:
    """The token ids of each; many texts, like long ones, hold up nobody else.

    Raises:
        HttpError: one of them has none.
    """

    def encode_all(tokenizer: Tokenizer) -> list[list[int]]:
        return [
            tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    if num_chars <= MAX_QUICK_CHARS:
        token_ids = encode_all(await client.get_tokenizer())
    else:
        token_ids = await client.with_tokenizer(encode_all)
    if [] in token_ids:
        number = token_ids.index([])
        name = f"{field}[{number}]" if len(prompts) > 1 else field
        raise bad_request(f"{name} has no tokens: give at least one", field)
    return token_ids


def check_truncation(num_tokens: int | None) -> None:
    """Of vLLM's truncate_prompt_tokens.

    Raises:
        HttpError: it is no number of tokens.
    """
    if num_tokens is not None and num_tokens < 1 and num_tokens != -1:
        raise bad_request(
            f"truncate_prompt_tokens={num_tokens}: at least 1, or -1 for as many as fit",
            "truncate_prompt_tokens",
        )


def truncated(
    prompts: Sequence[list[int]], num_tokens: int | None, room: int
) -> Sequence[list[int]]:
    """The last so many tokens of each; None: all; -1: as many as there is room for."""
    if num_tokens is None:
        return prompts
    num_kept = max(room, 1) if num_tokens == -1 else num_tokens
    return [prompt[-num_kept:] for prompt in prompts]
