"""lm-evaluation-harness over both of its models of OpenAI-compatible servers: scores of given answers, and answers."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

URL, MODEL, FOLDER = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"], os.environ["COMPAT_FOLDER"]
QUESTIONS = [{"question": f"Is {i} even?", "choices": ["yes", "no"], "answer": i % 2} for i in range(4)]
SHARED: dict[str, Any] = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
TASKS: dict[str, dict[str, Any]] = {
    "compat_scored": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
    },
    "compat_said": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def main() -> None:
    """Run both tasks on completions, and the answers on chats."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        data.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
        for name, task in TASKS.items():
            files = {"data_files": {"test": str(data)}}
            config = {"task": name, **SHARED, **task, "dataset_kwargs": files}
            # JSON is YAML, too.
            (Path(folder) / f"{name}.yaml").write_text(json.dumps(config), encoding="utf-8")
        manager = TaskManager(include_path=folder, include_defaults=False)
        for kind, path, names in (
            ("local-completions", "completions", [*TASKS]),
            ("local-chat-completions", "chat/completions", ["compat_said"]),
        ):
            is_chat = kind == "local-chat-completions"
            options = (
                f"model={MODEL},base_url={URL}/v1/{path},tokenizer={FOLDER},tokenizer_backend=huggingface,"
                "max_retries=1,num_concurrent=1"
            )
            found = lm_eval.simple_evaluate(
                model=kind, model_args=options, tasks=names, task_manager=manager, apply_chat_template=is_chat,
                bootstrap_iters=0,
            )  # fmt: skip
            assert found is not None and set(found["results"]) == set(names)


if __name__ == "__main__":
    main()
