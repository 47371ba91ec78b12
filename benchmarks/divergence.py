"""How far quantization moves the demo model's answers: of weights, and then of activations.

    python benchmarks/divergence.py [--chats 50]

Teacher-forced over the right answers of held-out chats, all linear layers by the native kernels as
the engine packs them (the head and the embedding of int8). KL divergences are means over answer
tokens, in nats, from a model whose float32 activations meet bfloat16 weights: `weights` is to the
one with quantized weights, and `activations` from that to the one that quantizes activations, too.
`exact` is the share of chats whose whole answer would be right. Writes results/divergence.json.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any, Final

import torch
from report import describe_run, table, write_report
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests/

from nanocore.demo_model import demo_model_folder
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import find_library
from nanocore.kernels.linear_weight import TokenEmbedding
from tests.demo_model.tasks import TASKS, Example, held_out

RESULTS: Final = Path(__file__).parent / "results" / "divergence.json"
QUANTIZATIONS: Final = ("int4", "int8")
_BATCH: Final = 32
Answers = list[tuple[list[int], list[int]]]
"""Prompts, and what is to follow, as token ids."""


class NativeLinear(nn.Module):
    """A linear layer by the native kernels."""

    def __init__(self, kernels: CpuKernels, weight_OI: Tensor, quantization: str | None) -> None:
        super().__init__()
        self._kernels = kernels
        self._weight = kernels.pack_linear(weight_OI.bfloat16(), quantization)

    def forward(self, x: Tensor) -> Tensor:
        """As torch's, on any number of leading dimensions."""
        rows_TI = x.reshape(-1, x.shape[-1]).contiguous()
        return self._kernels.linear(rows_TI, self._weight).view(*x.shape[:-1], -1)


class NativeEmbedding(nn.Module):
    """An embedding of int8 by the native kernels."""

    def __init__(self, kernels: CpuKernels, weight_VE: Tensor) -> None:
        super().__init__()
        packed = kernels.pack_linear(weight_VE.bfloat16(), "int8")
        self._kernels, self._of = kernels, TokenEmbedding(packed, 0, 1.0, torch.float32)

    def forward(self, token_ids: Tensor) -> Tensor:
        """As torch's."""
        rows_TE = self._kernels.embedding(token_ids.reshape(-1), self._of)
        return rows_TE.view(*token_ids.shape, -1)


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chats", type=int, default=50, help="of each task")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if find_library() is None:
        sys.exit("divergence.py: no compiled kernels run on this machine")
    answers = tokenized([e for task in TASKS for e in held_out(task, arguments.chats, seed=7)])
    report = {**describe_run(), "chats_per_task": arguments.chats, **measure(answers)}
    print(markdown(report))
    write_report(arguments.out, report)


def tokenized(examples: list[Example]) -> Answers:
    """By the model's template; an answer ends with the end of its turn."""
    from transformers import AutoTokenizer  # takes long

    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder())
    answers = []
    for example in examples:
        text = tokenizer.apply_chat_template(
            example.messages, add_generation_prompt=True, tokenize=False
        )
        end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids = tokenizer.encode(text), [*tokenizer.encode(example.answer), end]
        answers.append(ids)
    return answers


def measure(answers: Answers) -> dict[str, Any]:
    """Figures of every quantization, and the share of exact answers without any."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model_folder(), dtype=torch.float32).eval()
    plain = logits_of(model, answers)
    figures: dict[str, Any] = {"exact": exact(plain, answers), "quantizations": {}}
    for quantization in QUANTIZATIONS:
        kept, quantized = (
            logits_of(native(model, quantization, keeps_activations=keeps), answers)
            for keeps in (True, False)
        )
        of_weights, of_activations = divergence(plain, kept), divergence(kept, quantized)
        figures["quantizations"][quantization] = {
            "weights": of_weights,
            "activations": of_activations,
            "activations_of_weights": of_activations / of_weights,
            "exact": exact(quantized, answers),
            "exact_activations_kept": exact(kept, answers),
        }
    return figures


def native(model: nn.Module, quantization: str, *, keeps_activations: bool) -> nn.Module:
    """A copy whose linear layers and embedding are quantized as the engine does it."""
    library = find_library()
    assert library is not None
    kernels = CpuKernels(library, keeps_activations=keeps_activations)
    changed = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            how = "int8" if name == "lm_head" else quantization
            changed.set_submodule(name, NativeLinear(kernels, module.weight.data, how))
        elif isinstance(module, nn.Embedding):
            changed.set_submodule(name, NativeEmbedding(kernels, module.weight.data))
    return changed


@torch.inference_mode()
def logits_of(model: nn.Module, answers: Answers) -> list[Tensor]:
    """Of each answer, where its tokens are chosen: [tokens, vocabulary]."""
    order = sorted(range(len(answers)), key=lambda i: len(answers[i][0]))
    logits = [torch.empty(0)] * len(answers)
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        rows = [torch.tensor(prompt + answer) for prompt, answer in (answers[i] for i in batch)]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # on the right: causal
        every = model(padded).logits
        for row, i in enumerate(batch):
            prompt, answer = answers[i]
            first = len(prompt) - 1
            logits[i] = every[row, first : first + len(answer)].float()
    return logits


def divergence(of: list[Tensor], to: list[Tensor]) -> float:
    """KL(of || to), the mean over tokens, in nats."""
    p = torch.cat(of).double().log_softmax(-1)
    q = torch.cat(to).double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def exact(logits: list[Tensor], answers: Answers) -> float:
    """Share of answers that greedy decoding would give whole."""
    marks = [
        bool((own.argmax(-1) == torch.tensor(answer)).all())
        for own, (_, answer) in zip(logits, answers, strict=True)
    ]
    return sum(marks) / len(marks)


def markdown(report: dict[str, Any]) -> str:
    """A row for each quantization."""
    rows = [["", "KL, weights", "KL, activations", "of weights", "exact", "activations kept"]]
    rows.append(["none", "", "", "", f"{report['exact']:.1%}", ""])
    for name, figures in report["quantizations"].items():
        divergences = [f"{figures[key]:.1e}" for key in ("weights", "activations")]
        share = f"{figures['activations_of_weights']:.1%}"
        marks = [f"{figures[key]:.1%}" for key in ("exact", "exact_activations_kept")]
        rows.append([name, *divergences, share, *marks])
    return table(rows)


if __name__ == "__main__":
    main()
