"""lm-evaluation-harness on nanocore: its command line, with one more model.

    pip install lm_eval
    python examples/lm_eval_nanocore.py --model nanocore --tasks hellaswag,gsm8k \
        --model_args pretrained=path/to/folder,dtype=float32,max_model_len=4096

Without `pretrained` the demo model is evaluated; further arguments are flags of
`nanocore-engine`. `--apply_chat_template` takes the model's own. Batches are the engine's to make:
all requests of a task are given to it at once, and `--batch_size` has no meaning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanocore.client import LLM, SamplingParams

MAX_GEN_TOKS = 256
"""Output tokens of tasks that do not say how many; what `hf` takes."""
TokenRequest = tuple[Any, list[int], list[int]]
"""What a cache calls it, context, continuation."""


@register_model("nanocore")
class NanocoreLM(TemplateLM):
    """A model of lm-evaluation-harness that an engine of its own computes."""

    def __init__(
        self,
        pretrained: str | None = None,
        device: str | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        **engine_args: Any,
    ) -> None:
        super().__init__()
        # The harness says "cuda:0" where its user says nothing, even if there is none.
        self._llm = LLM(pretrained, device="cpu" if device == "cpu" else "auto", **engine_args)
        self._tokens = self._llm.get_tokenizer()
        self._card = self._llm.model_card
        self._prefix = self._tokens.token_text(self.prefix_token_id).text

    # -- text and tokens, with which TemplateLM tokenizes contexts and continuations --------------

    @property
    def eot_token_id(self) -> int:
        """A token that ends a text."""
        return self._card.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text whose first token is to be scored, too."""
        prefix = self._tokens.prefix_token_id
        return self.eot_token_id if prefix is None else prefix

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache of requests knows the tokenizer by."""
        return os.path.basename(self._card.model)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Token ids; of a text that begins with BOS, by default, without another one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._prefix)
        return self._tokens.encode(string, add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation; without a generation prompt its last message goes on."""
        messages: Any = chat_history
        continues = not add_generation_prompt
        return self._tokens.render_chat(messages, continue_final_message=continues)

    # -- what the harness asks --------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """Contexts that are too long lose their beginning."""
        pairs = []
        for _, context, continuation in requests:
            room = self._card.max_model_len - len(continuation)
            pairs.append((context[-max(room, 1) :], continuation))
        scores = self._llm.score(pairs, use_tqdm=not disable_tqdm)
        results = [(score.logprob, score.is_greedy) for score in scores]
        for (texts, _, _), result in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Of whole texts; long ones in windows, each token once."""
        windows: list[TokenRequest] = []
        texts = [request.args[0] for request in requests]
        for i, text in enumerate(texts):
            parts = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self._card.max_model_len - 1, 1
            )
            windows += [(i, *make_disjoint_window(part)) for part in parts]
        scores = self._llm.score([(a, b) for _, a, b in windows], use_tqdm=not disable_tqdm)
        sums = [0.0] * len(texts)
        for (i, _, _), score in zip(windows, scores, strict=True):
            sums[i] += score.logprob
        for text, result in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), result)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Contexts that leave no room for max_gen_toks lose their beginning."""
        prompts, params = [], []
        for context, asked in (request.args for request in requests):
            options: dict[str, Any] = {**normalize_gen_kwargs(asked, MAX_GEN_TOKS)}
            max_tokens = options.pop("max_gen_toks")
            stop = [text for text in options.pop("until") if text]
            if not options.pop("do_sample"):
                options["temperature"] = 0.0
            params.append(SamplingParams(max_tokens=max_tokens, stop=stop, **options))
            room = self._card.max_model_len - max_tokens
            prompts.append(self.tok_encode(context)[-max(room, 1) :])
        outputs = self._llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        answers = [output.outputs[0].text for output in outputs]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers


if __name__ == "__main__":
    cli_evaluate()
