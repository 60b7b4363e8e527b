"""What the gateway reads of a model, and how it says that it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.errors import ModelError, RequestError
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import make_folder


@pytest.mark.parametrize(
    ("source", "why"),
    [(None, "No such file"), ("{% if %}", "line 1: Expected an expression"), ("{{ 1", "line 1: ")],
)
def test_an_unusable_chat_template_is_refused_at_start(
    folder: Path, tmp_path: Path, source: str | None, why: str
) -> None:
    path = tmp_path / "template.jinja"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ModelError) as caught:
        GatewayTokenizer.load(str(folder), chat_template=str(path))
    assert caught.value.what == f"the chat template {path} cannot be used"
    assert why in caught.value.why and "--chat-template" in caught.value.fix


def test_a_template_of_the_model_that_cannot_be_used_is_reported_at_start(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError) as caught:
        GatewayTokenizer.load(str(folder))
    assert caught.value.what == f"the chat template of {folder} cannot be used"
    replaced = tmp_path / "other.jinja"
    replaced.write_text("{{ messages[0].content }}")
    assert GatewayTokenizer.load(str(folder), chat_template=str(replaced)).can_chat


def test_text_with_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    size = GatewayTokenizer.load(str(folder)).backend.get_vocab_size()
    for name, more in (
        ("tokenizer_config.json", {"pad_token": "<|late|>"}),
        ("config.json", {"vocab_size": size}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    tokens = GatewayTokenizer.load(str(folder))
    assert tokens.encode("late", True)
    with pytest.raises(RequestError, match=f"token {size}; this model's are below {size}"):
        tokens.encode("<|late|>", True)


def test_a_gateway_loads_neither_transformers_nor_torch(folder: Path) -> None:
    code = (
        "import sys, services.gateway.__main__\n"
        "from services.gateway.preparation.grammar_check import GrammarChecker\n"
        "from services.gateway.tokenization.tokenizer import GatewayTokenizer\n"
        f"tokens = GatewayTokenizer.load({str(folder)!r})\n"
        "tokens.warm_up()\n"
        "GrammarChecker(tokens)\n"
        "print(*sorted({'torch', 'transformers', 'ray', 'scipy', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=150
    )
    assert done.stdout.split() == []
