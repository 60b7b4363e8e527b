"""Train the embedded model from nothing: `python -m models.train --out models/tiny --minutes 60 --threads 2
--seed 0`.

The schedule runs on time spent training (kept across `--resume`), what each step sees depends on seed and
step alone. Rows grow from 256 to 2,048 tokens: recall circuits form on short tables first and are then
stretched.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models import data, recall
from models.evaluate import recall_accuracy
from models.llama import Llama, LlamaConfig, save_model
from models.optim import Optimizer
from models.tokenizer import (
    END,
    END_OF_TEXT,
    PAD,
    encode_all,
    load_tokenizer,
    make_encoder,
    render_chat,
    save_tokenizer,
    token_id,
    train_tokenizer,
)

log = logging.getLogger("models.train")


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """Up to which share of the time; tokens a row, rows a step, and how many of them are recall or chat."""

    until: float
    tokens: int
    rows: int
    recall_share: float
    # Share of the recall rows that train the simplest circuits.
    easy: float
    chat_share: float = 0.05


PHASES = (
    TrainingPhase(0.20, 256, 16, 0.45, 0.60),
    TrainingPhase(0.43, 512, 8, 0.35, 0.15),
    TrainingPhase(0.68, 1024, 4, 0.30, 0.10),
    TrainingPhase(0.80, 2048, 2, 0.25, 0.05),
    TrainingPhase(1.01, 2048, 2, 0.40, 0.05),
)
WARM_UP_STEPS = 40
# The learning rates are constant until this share of the training, and then fall linearly to a fiftieth.
DECAY_FROM = 0.55


def phase_at(progress: float) -> TrainingPhase:
    return next(phase for phase in PHASES if progress < phase.until)


def learning_rate_scale(step: int, progress: float) -> float:
    falling = (1.0 - progress) / (1.0 - DECAY_FROM)
    return max(0.02, min(1.0, (step + 1) / WARM_UP_STEPS, falling))


class Corpus:
    """Tokenised text, and the rows cut from it."""

    def __init__(
        self, tokenizer: Tokenizer, modules: list[data.SourceModule], chats: list[data.ChatExchange]
    ) -> None:
        end = token_id(tokenizer, END_OF_TEXT)
        self.encode = lru_cache(maxsize=1 << 16)(make_encoder(tokenizer))
        sources = encode_all(tokenizer, [module.text for module in modules])
        self.text = [token for ids in sources for token in (end, *ids)]
        newline = token_id(tokenizer, "Ċ")
        self.newlines = [i for i, token in enumerate(self.text) if token == newline]
        turns = [render_chat([("user", one.user), ("assistant", one.assistant)]) for one in chats]
        self.chats = encode_all(tokenizer, turns)

    def filler(self, rng: random.Random, tokens: int) -> list[int]:
        """`tokens` tokens of source text of which the last ends a line."""
        stop = 1 + rng.choice(self.newlines[len(self.newlines) // 50 :])
        return self.text[stop - tokens : stop] if tokens else []

    def text_row(self, rng: random.Random, tokens: int) -> recall.TrainingRow:
        start = rng.randrange(len(self.text) - tokens)
        return recall.TrainingRow(self.text[start : start + tokens], [1.0] * tokens)

    def chat_row(self, rng: random.Random, tokens: int) -> recall.TrainingRow:
        ids: list[int] = []
        while len(ids) < tokens:
            ids += rng.choice(self.chats)
        return recall.TrainingRow(ids[:tokens], [1.0] * tokens)

    def batch(self, rng: random.Random, phase: TrainingPhase) -> tuple[Tensor, Tensor, list[str]]:
        """(ids, weights) of [rows, tokens + 1], and the kind of each row."""
        rows, kinds = [], []
        for _ in range(phase.rows):
            lot = rng.random()
            if lot < phase.recall_share:
                kinds.append("recall")
                rows.append(recall.recall_row(rng, self.encode, self.filler, phase.tokens + 1, phase.easy))
            elif lot < phase.recall_share + phase.chat_share:
                kinds.append("chat")
                rows.append(self.chat_row(rng, phase.tokens + 1))
            else:
                kinds.append("text")
                rows.append(self.text_row(rng, phase.tokens + 1))
        return torch.tensor([row.ids for row in rows]), torch.tensor([row.weights for row in rows]), kinds


@dataclass(slots=True)
class TrainingProgress:
    """What a checkpoint carries beside weights."""

    step: int = 0
    tokens: int = 0
    recall_tokens: int = 0
    elapsed_s: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    out: Path
    checkpoint: Path
    minutes: float
    seed: int
    save_every_s: float
    log_every: int


class Trainer:
    def __init__(
        self, options: TrainingOptions, shape: LlamaConfig, corpus: Corpus, end_ids: list[int], pad_id: int
    ) -> None:
        self.options, self.corpus, self.end_ids, self.pad_id = options, corpus, end_ids, pad_id
        self.model = Llama(shape, options.seed)
        self.optimizer = Optimizer(self.model)
        self.at = TrainingProgress()
        self.stopping = False
        self.losses: dict[str, list[float]] = {"text": [], "chat": [], "recall": []}

    def step(self, phase: TrainingPhase, scale: float) -> None:
        rng = random.Random(f"train/{self.options.seed}/{self.at.step}")
        ids, weights, kinds = self.corpus.batch(rng, phase)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, each = self.model.loss(ids, weights)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(scale)
        for kind, row, weight in zip(kinds, each, weights[:, 1:], strict=True):
            kept = weight >= 1.0
            self.losses[kind].append(row[kept].mean().item())
        self.at.step += 1
        self.at.tokens += phase.tokens * phase.rows
        self.at.recall_tokens += phase.tokens * kinds.count("recall")

    def stop(self, *_: object) -> None:
        """Finish the step under way, save, return; a signal handler."""
        self.stopping = True

    def run(self) -> None:
        budget_s = self.options.minutes * 60
        saved_s = logged_s = self.at.elapsed_s
        logged_tokens = self.at.tokens
        while self.at.elapsed_s < budget_s and not self.stopping:
            began = time.perf_counter()
            progress = self.at.elapsed_s / budget_s
            phase = phase_at(progress)
            self.step(phase, learning_rate_scale(self.at.step, progress))
            self.at.elapsed_s += time.perf_counter() - began
            if self.at.step % self.options.log_every == 0:
                speed = (self.at.tokens - logged_tokens) / (self.at.elapsed_s - logged_s)
                logged_s, logged_tokens = self.at.elapsed_s, self.at.tokens
                self.report(progress, phase, speed)
            if self.at.elapsed_s - saved_s > self.options.save_every_s:
                saved_s = self.at.elapsed_s
                self.save()
        self.save()

    def report(self, progress: float, phase: TrainingPhase, speed: float) -> None:
        means = {kind: sum(last[-200:]) / max(1, len(last[-200:])) for kind, last in self.losses.items()}
        self.losses = {kind: last[-200:] for kind, last in self.losses.items()}
        log.info(
            "step %d  %.0f%%  %d tokens a row  %.2f M tokens  %.0f tok/s  text %.3f  chat %.3f  answers %.3f",
            self.at.step,
            100 * progress,
            phase.tokens,
            self.at.tokens / 1e6,
            speed,
            means["text"],
            means["chat"],
            means["recall"],
        )

    def save(self) -> None:
        """Measure recall, then replace checkpoint and exported weights."""
        point: dict[str, float] = {"minutes": round(self.at.elapsed_s / 60, 1), "tokens": self.at.tokens}
        longest = phase_at(min(1.0, self.at.elapsed_s / self.options.minutes / 60)).tokens
        for distance in (128, 256, 512, 1024, 1900):
            for style in ("table", "needle") if distance < longest else ():
                done = recall_accuracy(
                    self.model, self.corpus.encode, self.corpus.filler, distance, style, 24, seed=1
                )
                point[f"{style}_{distance}"] = round(done, 3)
        self.at.curve.append(point)
        log.info("recall %s", json.dumps(point))
        self.options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.options.checkpoint.with_suffix(".partial")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state(),
                "progress": asdict(self.at),
            },
            partial,
        )
        os.replace(partial, self.options.checkpoint)
        save_model(self.model, self.options.out, self.end_ids, self.pad_id)
        record = asdict(self.at)
        (self.options.checkpoint.with_suffix(".json")).write_text(
            json.dumps(record, indent=1) + "\n", encoding="utf-8"
        )

    def resume(self) -> None:
        state: dict[str, Any] = torch.load(self.options.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.restore(state["optimizer"])
        self.at = TrainingProgress(**state["progress"])
        log.info("resumed at step %d, %.1f minutes", self.at.step, self.at.elapsed_s / 60)


def build_trainer(options: TrainingOptions, shape: LlamaConfig, modules: list[data.SourceModule]) -> Trainer:
    """Tokenizer (trained and written when `out` has none), corpus and trainer."""
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(module.text for module in modules), options.out, shape.context_tokens)
    tokenizer = load_tokenizer(options.out)
    corpus = Corpus(tokenizer, modules, data.chat_exchanges(modules))
    log.info("%d modules, %d tokens, %d chats", len(modules), len(corpus.text), len(corpus.chats))
    ends = [token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, END)]
    return Trainer(options, shape, corpus, ends, token_id(tokenizer, PAD))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/tiny"))
    parser.add_argument("--checkpoint", type=Path, default=Path("build/tiny.pt"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--save-every", type=float, default=300.0, help="seconds of training between checkpoints"
    )
    parser.add_argument("--log-every", type=int, default=20, help="steps between lines of progress")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(given.threads)
    options = TrainingOptions(
        given.out, given.checkpoint, given.minutes, given.seed, given.save_every, given.log_every
    )
    training, _ = data.split_held_out(data.read_modules())
    trainer = build_trainer(options, LlamaConfig(), training)
    if given.resume:
        trainer.resume()
    signal.signal(signal.SIGTERM, trainer.stop)
    trainer.run()


if __name__ == "__main__":
    main()
