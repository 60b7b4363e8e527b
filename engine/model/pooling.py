"""Reads from a model's folder how its prompts are pooled, or why they cannot be.

sentence-transformers' `modules.json` says it: a transformer, a pooling, and perhaps a normalisation give a vector; a
transformer and a `LogitScore` a score. vLLM's field `classifier_from_token` of `config.json` gives a score, too. The
first checkpoints of Qwen3-Reranker say nothing but their name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.errors import ModelError
from diptych.model_config import load_model_config
from diptych.request import Pooling
from engine.model.tokenizer import ModelTokenizer

MODULES_FILE = "modules.json"
# How sentence-transformers names kinds of pooling, in its older and its newer files.
KINDS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last", "cls": "cls", "mean": "mean"}
OLDER_FIELD = "pooling_mode_"
QWEN3_RERANKER, QWEN3_ANSWERS = "qwen3-reranker", ("no", "yes")


@dataclass(frozen=True, slots=True)
class ModelPooler:
    """How a model's prompts are pooled: `pooling`, or None, and then `why` not. Vectors have `size` numbers.

    `sizes` are the lengths to which a vector may be cut; None: any.
    """

    pooling: Pooling | None = None
    why: str = "its folder does not say how"
    size: int = 0
    sizes: tuple[int, ...] | None = None

    @property
    def embeds(self) -> bool:
        """Whether a prompt gives a vector."""
        return self.pooling is not None and self.pooling.kind != "score"

    @property
    def scores(self) -> bool:
        """Whether a prompt gives a score."""
        return self.pooling is not None and not self.embeds


def read_pooler(folder: Path, tokenizer: ModelTokenizer) -> ModelPooler:
    """How the prompts of the model in `folder` are pooled.

    Raises:
        ModelError: a file that says it cannot be read.
    """
    try:
        config = load_model_config(folder, missing_ok=True)
        found = _read_modules(folder, config) or _read_answers(folder, config, tokenizer)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(
            f"{MODULES_FILE} of {folder}, or a file that it names, cannot be read",
            why,
            "save the model with sentence-transformers again, or remove the file to serve without pooling",
        ) from error
    if found is None:
        return ModelPooler(why=f"its folder has no {MODULES_FILE}, which would say how it pools")
    if found.pooling is not None and config.get("is_causal") is False:
        return ModelPooler(why="its tokens see those behind them, which is not computed here")
    return found


def _read_modules(folder: Path, config: dict[str, Any]) -> ModelPooler | None:
    """What `modules.json` says; None if there is none."""
    file = folder / MODULES_FILE
    if not file.is_file():
        return None
    modules = sorted(json.loads(file.read_bytes()), key=lambda module: int(module["idx"]))
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    chain, names = tuple(kinds[1:]), [str(module["path"]) for module in modules]
    if any(Path(name).name != name for name in names):
        raise ValueError(f"a module is not in a folder beside {MODULES_FILE}: {' '.join(names)}")
    if kinds[:1] != ["Transformer"] or chain not in (("Pooling",), ("Pooling", "Normalize"), ("LogitScore",)):
        return ModelPooler(why=f"its {MODULES_FILE} asks for {', '.join(kinds)}")
    settings = load_model_config(folder / names[1])  # without a family, so as it is written
    if chain == ("LogitScore",):
        tokens = [settings.get("false_token_id"), settings["true_token_id"]]
        return _score_by(tuple(int(token) for token in tokens if token is not None))
    modes = [
        name.removeprefix(OLDER_FIELD)
        for name, value in settings.items()
        if name.startswith(OLDER_FIELD) and value is True
    ] or [settings.get("pooling_mode", "nothing")]
    if len(modes) != 1 or modes[0] not in KINDS:
        return ModelPooler(why=f"its pooling is {' and '.join(map(str, modes))}")
    if config.get("is_matryoshka") is False:
        sizes: tuple[int, ...] | None = (int(config["hidden_size"]),)
    else:
        listed = config.get("matryoshka_dimensions")
        sizes = None if listed is None else tuple(sorted(int(size) for size in listed))
    pooling = Pooling(KINDS[modes[0]], normalize=len(chain) == 2)
    return ModelPooler(pooling, size=int(config["hidden_size"]), sizes=sizes)


def _read_answers(folder: Path, config: dict[str, Any], tokenizer: ModelTokenizer) -> ModelPooler | None:
    """A model that scores by the words with which it would answer, as its config or its name says; else None."""
    words = config.get("classifier_from_token")
    if words is None and QWEN3_RERANKER in str(folder).lower():
        words = QWEN3_ANSWERS
    if words is None:
        return None
    found = [tokenizer.backend.token_to_id(str(word)) for word in words]
    ids = tuple(token for token in found if token is not None)
    if len(ids) != 2 or len(words) != 2:
        return ModelPooler(why=f"it answers with {' and '.join(map(str, words))}, which are not two tokens")
    return _score_by(ids)


def _score_by(tokens: tuple[int, ...]) -> ModelPooler:
    return ModelPooler(Pooling("score", tokens=tokens), size=1)
