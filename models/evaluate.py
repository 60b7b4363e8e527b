"""Measure a saved model: `python -m models.evaluate models/tiny --json`.

Bits per byte on the held-out modules (against `xz -9e` of the same bytes) and recall: the share of probes
whose whole value, newline included, is the greedy continuation. Greedy decoding gives the value exactly
when every token of it is the most likely one after the true prefix, so one forward pass decides.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from models import data, recall
from models.llama import Llama, load_model
from models.tokenizer import END_OF_TEXT, encode_all, load_tokenizer, make_encoder, token_id

DISTANCES = (256, 1024, 1900)
NUM_PROBES = 100


def xz_bits_per_byte(texts: Sequence[str]) -> float:
    """All texts as one stream, as `cat texts | xz -9e` sees them."""
    raw = "".join(texts).encode()
    return 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw)


@torch.no_grad()
def nats(model: nn.Module, ids: Sequence[int], window: int, stride: int) -> float:
    """Total cross-entropy of `ids[1:]`; beyond the first window each token sees at least window - stride."""
    total, counted = 0.0, 1
    for start in range(0, max(1, len(ids) - 1), stride):
        piece = torch.tensor([ids[start : start + window + 1]])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(piece[:, :-1])[0].float()
        each = functional.cross_entropy(logits, piece[0, 1:], reduction="none")
        total += each[counted - 1 - start :].sum().item()
        counted = start + piece.shape[1]
        if counted == len(ids):
            break
    return total


def bits_per_byte(model: nn.Module, documents: Sequence[list[int]], num_bytes: int, window: int) -> float:
    """Each document starts with the end-of-text token, which is given, not predicted."""
    total = sum(nats(model, ids, window, window // 2) for ids in documents)
    return total / math.log(2) / num_bytes


@torch.no_grad()
def recall_accuracy(
    model: Llama,
    encode: recall.Encode,
    filler: recall.Filler,
    distance: int,
    style: str,
    count: int,
    seed: int,
    kind: str = "word",
) -> float:
    """The share of `count` probes answered exactly."""
    right = 0
    for probe in recall.recall_probes(seed, count, encode, filler, distance, style, kind):
        ids = torch.tensor([probe.prompt + probe.answer[:-1]])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model.tail(ids, len(probe.answer))
        right += logits[0].argmax(-1).tolist() == probe.answer
    return right / count


class HeldOutText:
    """The held-out modules as tokens; also the source text between the facts of needle probes."""

    def __init__(self, folder: Path) -> None:
        tokenizer = load_tokenizer(folder)
        _, modules = data.split_held_out(data.read_modules())
        self.texts = [module.text for module in modules]
        self.encode = lru_cache(maxsize=1 << 16)(make_encoder(tokenizer))
        end = token_id(tokenizer, END_OF_TEXT)
        self.documents = [[end, *ids] for ids in encode_all(tokenizer, self.texts)]
        self.stream = [token for ids in self.documents for token in ids]
        newline = token_id(tokenizer, "Ċ")
        self.newlines = [i for i, token in enumerate(self.stream) if token == newline and i > 2048]

    def filler(self, rng: random.Random, tokens: int) -> list[int]:
        stop = 1 + rng.choice(self.newlines)
        return self.stream[stop - tokens : stop] if tokens else []


def evaluate_model(folder: Path, num_probes: int = NUM_PROBES) -> dict[str, object]:
    """Every measured figure of the model card."""
    held_out, model = HeldOutText(folder), load_model(folder).eval()
    num_bytes = sum(len(text.encode()) for text in held_out.texts)
    figures: dict[str, object] = {
        "held_out_bytes": num_bytes,
        "held_out_bits_per_byte": round(bits_per_byte(model, held_out.documents, num_bytes, 2048), 3),
        "xz_bits_per_byte": round(xz_bits_per_byte(held_out.texts), 3),
        "num_probes": num_probes,
    }
    for style, kind in (("table", "word"), ("needle", "word"), ("table", "number")):
        figures[f"recall_{style}_{kind}"] = {
            str(distance): round(
                recall_accuracy(
                    model, held_out.encode, held_out.filler, distance, style, num_probes, seed=2, kind=kind
                ),
                3,
            )
            for distance in DISTANCES
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/tiny"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--probes", type=int, default=NUM_PROBES)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    figures = evaluate_model(given.folder, given.probes)
    print(json.dumps(figures, indent=2) if given.json else "\n".join(f"{k}: {v}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
