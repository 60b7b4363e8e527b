"""Runs under vLLM's interpreter: what is refused before weights are read, in our words; a line of JSON per case.

python -m tests.vllm.refusals MODEL
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from diptych.errors import DiptychError
from tests.vllm.program import options_for
from vllm_worker.setup.engine_args import EngineOptions
from vllm_worker.setup.vllm_config import create_config

MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 64,
    "state_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
HYBRID = {
    "architectures": ["Zamba2ForCausalLM"],
    "model_type": "zamba2",
    "vocab_size": 256,
}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}


def model_folder(base: str, config: dict[str, Any]) -> str:
    """A folder with the tokenizer of `base` and another configuration; it has no weights."""
    folder = Path(tempfile.mkdtemp())
    for path in Path(base).glob("token*"):
        (folder / path.name).symlink_to(path.resolve())
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def cases(model: str) -> dict[str, EngineOptions]:
    """What is asked for, by name."""
    good = replace(options_for(model), kv_bytes=None)
    return {
        "good": good,
        "no model": replace(good, model="/no/such/folder"),
        "unknown flag": replace(good, vllm_args=("--no-such-flag", "1")),
        "unknown value": replace(good, vllm_args=("--quantization", "none-such")),
        "too long": replace(good, max_model_len=1_000_000),
        "block size": replace(good, vllm_args=("--block-size", "16")),
        "data parallel": replace(good, vllm_args=("--data-parallel-size", "2")),
        "state": replace(good, model=model_folder(model, MAMBA), max_model_len=None),
        "hybrid": replace(good, model=model_folder(model, HYBRID), max_model_len=None),
        "no text": replace(good, model=model_folder(model, BERT), max_model_len=None),
    }


def main(model: str) -> None:
    """Try each case."""
    for name, options in cases(model).items():
        lines: list[str] = []
        try:
            create_config(options)
        except DiptychError as error:
            lines = [f"{type(error).__name__}", *error.lines()]
        print(json.dumps({"name": name, "lines": lines}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
