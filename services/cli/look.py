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

from diptych.errors import ConfigError, DiptychError, ModelError
from engine.model.files import ModelFiles
from engine.model.memory import SPARE, Memory, available_memory, show
from services.cli.model import EMBEDDED, Answer, Model, Question
from services.cluster.supervisor import Told


def look(question: Question) -> Model:
    """Find the model, and share the memory of this machine among the workers that will load it.

    Raises:
        ConfigError: so many ranks are too many here.
        ModelError: not found, not complete, not supported, cannot be split so, or does not fit (with the arithmetic).
    """
    files = ModelFiles.resolve(_place(question.model), question.revision)
    for role, (tp, pp) in question.splits.items():
        try:
            files.split(tp, pp)
        except (ConfigError, ModelError) as error:
            fix = f"{error.fix} (--{role}-tp, --{role}-pp)"
            raise type(error)(error.what, error.why, fix) from None
    available = available_memory() // max(1, question.num_workers)
    memory = files.memory(
        max_model_len=question.max_model_len,
        kv_bytes=question.kv_bytes,
        available_bytes=available,
        tp=max((tp for tp, _ in question.splits.values()), default=1),
        step_tokens=question.step_tokens,
        step_rows=question.step_rows,
    )
    _check_swap(question, memory, available)
    shape = files.shape
    again = shape.vocab * shape.hidden if shape.tied else 0  # a tied table is held twice, and is one
    told = (
        f"{shape.architecture.removesuffix('ForCausalLM')}, {(shape.parameters - again) / 1e6:,.1f} M parameters, "
        f"context {memory.max_model_len:,}, KV {show(memory.kv_bytes)} of "
        f"{show(memory.total_bytes)} per worker"
    )
    chats = has_template(files.path)
    return Model(str(files.path), told, chats, memory.max_model_len, memory.kv_bytes, shape.layers)


def _check_swap(question: Question, memory: Memory, available: int) -> None:
    """Memory for parked requests is taken while they are parked; an amount that is not there is refused now."""
    rest = int(available * SPARE) - memory.weight_bytes - memory.kv_bytes
    if question.swap_bytes > max(0, rest):
        raise ConfigError(
            f"a swap space of {show(question.swap_bytes)} per worker does not fit in memory",
            f"beside weights {show(memory.weight_bytes)} and KV pool {show(memory.kv_bytes)}, "
            f"{show(max(0, rest))} of usable {show(int(available * SPARE))} are left",
            f"lower --swap-space to {max(0, rest) >> 20}MiB or less, or the KV pool (--kv-cache-memory-bytes)",
        )


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
