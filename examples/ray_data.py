"""Answers to the rows of a data set, by Ray Data: each actor has an engine, and batches go to all.

    pip install '.[engine]' 'ray[data]'
    python examples/ray_data.py questions.jsonl answers --model path/to/folder --concurrency 2 \
        --engine max_num_seqs=64

Reads a file or folder of JSON lines or Parquet with a column of prompts, and writes a folder of the
same kind: all columns, "answer", and "error" where a prompt was refused. Rows keep their order.
`RAY_ADDRESS` joins a cluster that runs; without it Ray is started on this machine.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray

from nanocore.client import LLM, InvalidRequestError, SamplingParams

Batch = dict[str, Any]


class Answers:
    """An actor: its engine answers batch after batch, and ends with it."""

    def __init__(
        self, model: str | None, column: str, params: dict[str, Any], engine_args: dict[str, str]
    ) -> None:
        self._llm = LLM(model, **engine_args)
        self._column, self._params = column, SamplingParams(**params)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its answers."""
        answers = self._answer([str(prompt) for prompt in batch[self._column]])
        texts, errors = zip(*answers, strict=True)
        return batch | {"answer": list(texts), "error": list(errors)}

    def _answer(self, prompts: list[str]) -> list[tuple[str, str]]:
        """(text, error) of each. A batch with a bad prompt is asked again, each for itself."""
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        try:
            outputs = self._llm.chat(chats, self._params, use_tqdm=False)
        except InvalidRequestError as error:
            if len(prompts) == 1:
                return [("", str(error))]
            return [answer for prompt in prompts for answer in self._answer([prompt])]
        return [(output.outputs[0].text, "") for output in outputs]


def main(arguments: list[str] | None = None) -> None:
    """Read, answer, write."""
    given = parse(arguments)
    is_json = ".json" in given.source
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    rows = (ray.data.read_json if is_json else ray.data.read_parquet)(given.source)
    # As many blocks as keep all actors at work, if there are so many batches.
    rows = rows.repartition(4 * given.concurrency) if given.repartition else rows
    params = {"temperature": given.temperature, "max_tokens": given.max_tokens}
    answers = rows.map_batches(
        Answers,
        fn_constructor_kwargs={
            "model": given.model,
            "column": given.column,
            "params": params,
            "engine_args": dict(one.split("=", 1) for one in given.engine),
        },
        batch_size=given.batch_size,
        compute=ray.data.ActorPoolStrategy(size=given.concurrency),
        num_gpus=given.num_gpus,
    )
    (answers.write_json if is_json else answers.write_parquet)(given.target)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("source", help="of JSON lines, if its name says .json, or of Parquet")
    add("target", help="a folder, which is made")
    add("--model", help="a folder, or an id on the hub (default: the demo model)")
    add("--column", default="prompt")
    add("--concurrency", type=int, default=1, help="actors, each with an engine")
    add("--batch-size", type=int, default=256)
    add("--repartition", action=argparse.BooleanOptionalAction, default=True)
    add("--num-gpus", type=float, default=0, help="of an actor")
    add("--max-tokens", type=int, default=256)
    add("--temperature", type=float, default=0.0)
    add("--engine", action="append", default=[], metavar="FLAG=VALUE", help="as LLM takes it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
