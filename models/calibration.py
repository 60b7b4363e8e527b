"""The text that the embedded model's KV codecs are calibrated on, and the held-out text that they are measured on.

Calibration reads modules that the model was trained on (`data.split_held_out`), measurement the others: no token of the
one is a token of the other.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from models import data
from models.evaluate import HeldOutText
from models.tokenizer import END_OF_TEXT, encode_all, load_tokenizer, token_id


def calibration_modules() -> list[data.SourceModule]:
    """Modules of the training text, in an order that a seed gives; none of them is held out."""
    training, _ = data.split_held_out(data.read_modules())
    return random.Random(0).sample(training, len(training))


def calibration_sequences(folder: Path, count: int, tokens: int) -> list[torch.Tensor]:
    """Sequences of token ids of training text, `count` of [tokens].

    Raises:
        ValueError: there is less training text.
    """
    tokenizer = load_tokenizer(folder)
    end, stream = token_id(tokenizer, END_OF_TEXT), list[int]()
    for module in calibration_modules():
        stream += [end, *encode_all(tokenizer, [module.text])[0]]
        if len(stream) >= count * tokens:
            return list(torch.tensor(stream[: count * tokens]).reshape(count, tokens))
    raise ValueError(f"the training text has {len(stream)} tokens, not {count * tokens}")


def held_out_windows(folder: Path, count: int, tokens: int) -> list[torch.Tensor]:
    """Windows of token ids at equal distances in the held-out text, `count` of [tokens].

    Raises:
        ValueError: the held-out text is shorter than one window.
    """
    stream = HeldOutText(folder).stream
    if len(stream) < tokens:
        raise ValueError(f"the held-out text has {len(stream)} tokens, not {tokens}")
    starts = np.linspace(0, len(stream) - tokens, count).astype(int)
    return [torch.tensor(stream[start : start + tokens]) for start in starts]
