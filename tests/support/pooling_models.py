"""Small random models that say how they pool, as sentence-transformers saves them, and what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support.factories import make_oracle, save_model

MODULES = "sentence_transformers"
YES, NO = 92, 81
SHAPE = {"vocab_size": 320, "max_position_embeddings": 512, "tie_word_embeddings": True, "head_dim": 12}


def write_modules(folder: Path, *modules: tuple[str, dict[str, Any]]) -> None:
    """Write `modules.json`, a transformer and these modules behind it, each with its configuration."""
    chain = [{"idx": 0, "name": "0", "path": "", "type": f"{MODULES}.models.Transformer"}]
    for number, (kind, settings) in enumerate(modules, 1):
        path = f"{number}_{kind}"
        chain.append({"idx": number, "name": str(number), "path": path, "type": f"{MODULES}.models.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "modules.json").write_text(json.dumps(chain), encoding="utf-8")


def make_embedder(folder: Path, mode: str = "lasttoken", normalize: bool = True, **changes: Any) -> Any:
    """Write a Qwen3 model that embeds; returns transformers' model."""
    oracle = make_oracle("qwen3", **(SHAPE | changes))
    save_model(folder, oracle)
    pooling = (
        "Pooling",
        {"word_embedding_dimension": oracle.config.hidden_size, f"pooling_mode_{mode}": True},
    )
    write_modules(folder, pooling, *([("Normalize", {})] if normalize else []))
    return oracle


def make_reranker(folder: Path, **changes: Any) -> Any:
    """Write a Qwen3 model that scores by two tokens; returns transformers' model."""
    oracle = make_oracle("qwen3", **(SHAPE | changes))
    save_model(folder, oracle)
    write_modules(folder, ("LogitScore", {"true_token_id": YES, "false_token_id": NO}))
    return oracle


def embed_tokens(oracle: Any, tokens: list[int], dimensions: int | None = None) -> NDArray[np.float32]:
    """The vector of a model that embeds by its last token."""
    with torch.no_grad():
        hidden = oracle.model(torch.tensor([tokens])).last_hidden_state[0, -1, :dimensions]
    vector: NDArray[np.float32] = torch.nn.functional.normalize(hidden, dim=0).numpy()
    return vector


def score_tokens(oracle: Any, tokens: list[int]) -> float:
    """The score of a prompt: how likely "yes" follows, and not "no"."""
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens])).logits[0, -1]
    return float(torch.softmax(logits[[NO, YES]], dim=0)[1])
