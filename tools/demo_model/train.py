"""Train the demo model from scratch: python tools/demo_model/train.py --out DIR --work DIR.

Seeded and resumable: the text is generated as training goes on (see `tasks.py`), and a
checkpoint in the work folder carries on where a stopped run left off. The length of the facts
grows in phases, and the learning rate follows the share of `--minutes` that is used up. Every
few minutes the model is exported; `tests/demo_model/accuracy.py` tells what it knows.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.report import write_report
from tests.demo_model.tasks import Mix
from tools.demo_model import tokenizer
from tools.demo_model.data import Batch, ChatEncoder, pool
from tools.demo_model.model import batch_loss, export, make_model

SEED = 1
WARM_UP_STEPS = 150
EXPORT_MINUTES = 5.0
CHECKPOINT_MINUTES = 2.0


@dataclass(frozen=True)
class Phase:
    """A part of the training: from which share of the time on, and what the batches are like."""

    start: float
    batch_tokens: int
    mix: Mix


# The third and fourth phases step back to short lists of facts: recall had not taken off by then.
# The later ones put weight on what was learned last.
LATE = ("count", "count", "sort_words", "sort_numbers")
LATER = ("count", "count", "count", "sort_words", "sort_numbers")
LAST = ("count", "count", "sort_words", "sort_words", "sort_numbers")
PHASES = (
    Phase(0.00, 4096, Mix(128, 0.40)),
    Phase(0.15, 4096, Mix(256, 0.40)),
    Phase(0.29, 2048, Mix(112, 0.45)),
    Phase(0.39, 2048, Mix(160, 0.50, word_share=0.4, least_power=0.5, focus=("sum", "count"))),
    Phase(0.51, 2048, Mix(256, 0.40, least_power=0.3, focus=("sum", "count", "count"))),
    Phase(0.58, 4096, Mix(512, 0.35, least_power=0.3, focus=("sum", "count", "count"))),
    Phase(0.63, 2048, Mix(512, 0.20, least_power=0.3, focus=LATE)),
    Phase(0.72, 2048, Mix(512, 0.15, least_power=0.3, focus=LATER)),
    Phase(0.78, 3072, Mix(1024, 0.15, least_power=0.3, focus=LATER)),
    Phase(0.85, 3072, Mix(1024, 0.12, least_power=0.3, focus=LAST)),
    Phase(0.91, 4096, Mix(1024, 0.10, least_power=0.3, focus=LATER)),
)


@dataclass
class Progress:
    """Where the training stands, and the losses so far."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    pools: int = 0
    losses: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """The model, its optimizers and its progress, with what is needed to stop and resume."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(SEED)
        self.args = args
        self.encoder = ChatEncoder(tokenizer.build())
        self.model = make_model(self.encoder.tokenizer.get_vocab_size())
        self.optimizers = make_optimizers(self.model)
        self.progress = Progress()
        self.checkpoint = args.work / "checkpoint.pt"
        if self.checkpoint.exists():
            self.resume()

    def resume(self) -> None:
        """Load the checkpoint; the pool that was cut short is left out."""
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def save(self) -> None:
        """Write the checkpoint in one move, so that a kill never leaves half of one."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "progress": asdict(self.progress),
        }
        partial = self.checkpoint.with_suffix(".part")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    @property
    def share(self) -> float:
        """The share of the training time that is used up."""
        return min(1.0, self.progress.seconds / (60 * self.args.minutes))

    def phase(self) -> Phase:
        """The phase of now."""
        return [p for p in PHASES if p.start <= self.share][-1]

    def next_pool(self) -> list[Batch]:
        """Fresh batches for the phase of now."""
        self.progress.pools += 1
        phase = self.phase()
        seed = SEED * 1_000_000 + self.progress.pools
        return pool(self.encoder, seed, phase.mix, phase.batch_tokens)

    def step(self, batch: Batch) -> float:
        """One optimizer step; returns the loss."""
        # Linear warm-up, then a cosine down to two hundredths.
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.share))
        scale = min(1.0, (self.progress.step + 1) / WARM_UP_STEPS) * decay
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * scale
        loss = batch_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += batch[0].numel()
        return loss.item()


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embeddings and the norms."""
    inner, others = [], []
    for name, weight in model.named_parameters():
        (inner if weight.dim() == 2 and "embed" not in name else others).append(weight)
    return [
        torch.optim.AdamW(
            [{"params": others, "peak": 2e-3, "weight_decay": 0.0}], betas=(0.9, 0.98), fused=True
        ),
        torch.optim.Muon(
            [{"params": inner, "peak": 4e-3, "weight_decay": 0.05}],
            adjust_lr_fn="match_rms_adamw",
        ),
    ]


def publish(trainer: Trainer) -> None:
    """Write the model as it is now, and the losses until now."""
    export(trainer.model, trainer.args.out)
    write_report(trainer.args.work / "history.json", asdict(trainer.progress))


def train(trainer: Trainer) -> None:
    """Train until the time is used up."""
    progress = trainer.progress
    bar = tqdm(total=trainer.args.minutes, unit="min", bar_format="{l_bar}{bar}| {postfix}")
    saved = exported = progress.seconds
    smooth = 0.0
    while trainer.share < 1.0:
        for batch in trainer.next_pool():
            started = time.monotonic()
            loss = trainer.step(batch)
            progress.seconds += time.monotonic() - started
            smooth = loss if smooth == 0.0 else 0.98 * smooth + 0.02 * loss
            if progress.step % 50 == 0:
                progress.losses.append({"tokens": progress.tokens, "loss": round(smooth, 4)})
                bar.n = round(progress.seconds / 60, 2)
                rate = progress.tokens / progress.seconds
                text = f"step {progress.step} loss {smooth:.3f} {rate:.0f} tokens/s"
                bar.set_postfix_str(text)
            if progress.seconds - exported > 60 * EXPORT_MINUTES:
                exported = progress.seconds
                publish(trainer)
            if progress.seconds - saved > 60 * CHECKPOINT_MINUTES:
                saved = progress.seconds
                trainer.save()
            if trainer.share >= 1.0:
                break
    trainer.save()
    publish(trainer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--work", type=Path, required=True, help="folder of checkpoint and logs")
    parser.add_argument("--minutes", type=float, default=64.0, help="training time")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(args.out)
    train(Trainer(args))


if __name__ == "__main__":
    main()
