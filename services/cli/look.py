"""`python -m services.cli.look`: reads a model's files and says what it needs; question and answer are JSON lines.

A process of its own, since reading a config takes transformers and torch: `diptych serve` starts Ray meanwhile, and has
the memory back afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import msgspec

from diptych.errors import DiptychError, ModelError
from engine.model.files import ModelFiles
from engine.model.memory import available_memory, show
from services.cli.model import EMBEDDED, Answer, Model, Question
from services.cluster.supervisor import Told


def look(question: Question) -> Model:
    """Find the model, and share the memory of this machine among the workers that will load it.

    Raises:
        ConfigError: so many ranks are too many here.
        ModelError: not found, not complete, not supported, cannot be split so, or does not fit (with the arithmetic).
    """
    files = ModelFiles.resolve(_place(question.model), question.revision)
    for tp, pp in question.splits:
        files.split(tp, pp)
    memory = files.memory(
        max_model_len=question.max_model_len,
        kv_bytes=question.kv_bytes,
        available_bytes=available_memory() // max(1, question.num_workers),
        tp=max(tp for tp, _ in question.splits),
    )
    told = (
        f"{files.shape.architecture.removesuffix('ForCausalLM')}, {files.shape.parameters / 1e6:,.1f} M parameters, "
        f"context {memory.max_model_len:,}, KV {show(memory.kv_bytes)} per worker"
    )
    return Model(str(files.path), told, has_template(files.path), memory.max_model_len, memory.kv_bytes)


def _place(name: str) -> str:
    if name != EMBEDDED:
        return name
    found = importlib.util.find_spec("models")
    folders = list(found.submodule_search_locations or []) if found else []
    path = Path(folders[0]) / EMBEDDED if folders else Path("models") / EMBEDDED
    if not (path / "config.json").is_file():
        fix = "name another model: diptych serve OWNER/NAME"
        raise ModelError("the embedded model is not installed", f"looked in {path}", fix)
    return str(path)


def has_template(path: Path) -> bool:
    """Whether a model folder brings a chat template."""
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return True
    try:
        return "chat_template" in json.loads((path / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False


def main() -> None:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    try:
        answer = Answer(model=look(question))
    except DiptychError as error:
        answer = Answer(error=Told(error.what, error.why, error.fix))
    # The last line: transformers may have printed something before.
    print("\n" + msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    main()
