"""The embedded model with thoughts: two of its tokens are called `<think>` and `</think>`; its prompts begin one."""

from __future__ import annotations

import shutil
from pathlib import Path

TINY = Path(__file__).parents[2] / "models" / "tiny"
# What its prompts have no need of, and what it is called then.
RENAMED = {"<|system|>": "<think>", "<|pad|>": "</think>"}
SYSTEM, ANSWER = "{{- '<|system|>\\n' -}}", "{{- '<|assistant|>\\n' -}}"
# Its answers are read so.
FLAGS = ("--reasoning-parser", "qwen3")


def write_thinking_model(folder: Path) -> None:
    """Write the model into an empty folder. Answers begin within a thought."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in RENAMED.items():
            assert f'"{old}"' in text, (name, old)
            text = text.replace(f'"{old}"', f'"{new}"')
        (folder / name).write_text(text, encoding="utf-8")
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    assert SYSTEM in template and ANSWER in template
    template = template.replace(SYSTEM, SYSTEM.replace("system", "user"))
    template = template.replace(ANSWER, ANSWER.replace("\\n", "\\n<think>\\n"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
