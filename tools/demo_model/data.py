"""Training batches of the demo model: chats as token ids, with the positions to learn from.

Chats are drawn in pools; a pool is sorted by length and cut into right-padded batches of about
the same number of tokens, in random order. The loss is taken on what the assistant says alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.demo_model.json_sums import learned_characters
from tests.demo_model.tasks import Example, Mix, training_examples

Chat = tuple[list[int], list[bool]]
Batch = tuple[Tensor, Tensor]


class ChatEncoder:
    """Encodes chats as the chat template would, and marks the assistant's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start = tokenizer.token_to_id("<|im_start|>")
        self.end = tokenizer.token_to_id("<|im_end|>")
        self.newline = tokenizer.encode("\n").ids
        self.roles = {r: tokenizer.encode(r).ids for r in ("system", "user", "assistant")}

    def __call__(self, example: Example) -> Chat:
        """Of the chat with its answer: token ids, and whether each is to be learned.

        Learned are the assistant's words and their end; of JSON see `learned_characters`.
        """
        ids: list[int] = []
        learned: list[bool] = []
        question = ""
        for message in (*example.messages, {"role": "assistant", "content": example.answer}):
            head = [self.start, *self.roles[message["role"]], *self.newline]
            text = message["content"]
            encoded = self.tokenizer.encode(text)
            ids += [*head, *encoded.ids, self.end, *self.newline]
            spoken = message["role"] == "assistant"
            marks = learned_characters(question, text) if spoken else [False] * len(text)
            body = [marks[stop - 1] for _, stop in encoded.offsets]
            learned += [*([False] * len(head)), *body, spoken, *([False] * len(self.newline))]
            question = text
        return ids, learned


def collate(chats: Sequence[Chat]) -> Batch:
    """Right-padded ids, and the targets: the next token where it is learned, else -100."""
    width = max(len(ids) for ids, _ in chats)
    batch = torch.zeros(len(chats), width, dtype=torch.long)
    targets = torch.full((len(chats), width), -100, dtype=torch.long)
    for row, (ids, learned) in enumerate(chats):
        tokens = torch.tensor(ids)
        batch[row, : len(ids)] = tokens
        keep = torch.tensor(learned[1:])
        targets[row, : len(ids) - 1] = torch.where(keep, tokens[1:], -100)
    return batch, targets


def cut(chats: Sequence[Chat], batch_tokens: int) -> Iterator[Batch]:
    """Batches of chats of about one length, of at most `batch_tokens` with the padding."""
    group: list[Chat] = []
    for chat in sorted(chats, key=lambda c: len(c[0])):
        if group and len(chat[0]) * (len(group) + 1) > batch_tokens:
            yield collate(group)
            group = []
        group.append(chat)
    if group:
        yield collate(group)


def pool(encoder: ChatEncoder, seed: int, mix: Mix, batch_tokens: int) -> list[Batch]:
    """The batches of one pool of 1,500 chats; the same for the same arguments."""
    examples = islice(training_examples(seed, mix), 1500)
    batches = list(cut([encoder(example) for example in examples], batch_tokens))
    random.Random(seed).shuffle(batches)
    return batches
