"""Text to token ids and back, as in vLLM's server, and the tokenizer itself for benchmarks."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from nanocore.client.chat.chat_request import ChatOptions
from nanocore.client.special_tokens import STANDARD_NAMES
from nanocore.client.tokenizer import MAX_QUICK_TOKENS, Tokenizer
from nanocore.http.dialects.chat_options import (
    chat_token_ids,
    check_num_messages,
    chosen_tools,
    template_options,
)
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import bad_request
from nanocore.http.server_settings import AppSettings

MAX_CHARS: Final = 1 << 20
"""Limit for a text, which takes seconds to tokenize."""
MAX_TOKENS: Final = 1 << 20
_OMITTED: Final = frozenset({"name_or_path", "chat_template", "added_tokens_decoder"})
"""Keys of a tokenizer's configuration that /tokenizer_info leaves out."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text, or a conversation as in /v1/chat/completions.

    add_special_tokens: to a text; default true. A conversation has those of its template.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None

    def check(self) -> None:
        """Raise HttpError if fields contradict each other or are not supported."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either a prompt or messages", "prompt")
        if self.prompt is not None and len(self.prompt) > MAX_CHARS:
            raise bad_request(
                f"the prompt has {len(self.prompt)} characters, more than {MAX_CHARS}: shorten it",
                "prompt",
            )
        if self.messages is not None and self.add_special_tokens:
            raise bad_request(
                "a conversation has its template's special tokens: leave add_special_tokens out",
                "add_special_tokens",
            )

    def options(self, settings: AppSettings) -> ChatOptions:
        tools, tool_choice = chosen_tools(self.tools, self.tool_choice)
        return ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            **template_options(settings, self.chat_template_kwargs or {}, self.chat_template),
        )


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


async def tokenize(exchange: Exchange) -> None:
    request = await exchange.read(TokenizeRequest)
    exchange.check_model(request.model)
    request.check()
    client = exchange.client
    if request.prompt is not None:
        encoding = client.encode(request.prompt, request.add_special_tokens is not False)
        token_ids = await exchange.attended(encoding)
    else:
        messages, options = request.messages or [], request.options(exchange.settings)
        check_num_messages(exchange, messages)
        token_ids = await chat_token_ids(exchange, messages, options)
    token_strs = None
    if request.return_token_strs:
        token_strs = await client.with_tokenizer(
            lambda tokenizer: tokenizer.tokens(token_ids), is_long=len(token_ids) > MAX_QUICK_TOKENS
        )
    reply = {
        "count": len(token_ids),
        "max_model_len": client.model_card.max_model_len,
        "tokens": token_ids,
        "token_strs": token_strs,
    }
    await exchange.reply_json(reply)


async def detokenize(exchange: Exchange) -> None:
    request = await exchange.read(DetokenizeRequest)
    exchange.check_model(request.model)
    client, token_ids = exchange.client, request.tokens
    if len(token_ids) > MAX_TOKENS:
        raise bad_request(f"{len(token_ids)} tokens are more than {MAX_TOKENS}", "tokens")
    vocab_size = client.model_card.vocab_size
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(each for each in token_ids if not 0 <= each < vocab_size)
        raise bad_request(
            f"{wrong} is not a token id of this model: valid ids are 0 to {vocab_size - 1}",
            "tokens",
        )

    def decode(tokenizer: Tokenizer) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    if len(token_ids) <= MAX_QUICK_TOKENS:
        text = decode(await client.get_tokenizer())
    else:
        text = await exchange.attended(client.with_tokenizer(decode, is_long=True))
    await exchange.reply_json({"prompt": text})


async def tokenizer_file(exchange: Exchange) -> None:
    """Reply with the tokenizer in the format of tokenizer.json, whatever its files are."""
    client = exchange.client
    serializing = client.with_tokenizer(lambda tokenizer: tokenizer.backend.to_str(), is_long=True)
    await exchange.reply(200, (await exchange.attended(serializing)).encode())


async def tokenizer_info(exchange: Exchange) -> None:
    client = exchange.client
    tokenizer = await client.get_tokenizer()
    config = {name: value for name, value in tokenizer.config.items() if name not in _OMITTED}
    await exchange.reply_json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": client.model_card.max_model_len,
            **config,
            **dict.fromkeys(sorted(STANDARD_NAMES)),
            **tokenizer.named_tokens,
            "chat_template": tokenizer.templates(exchange.settings.chat_template).text,
        }
    )
