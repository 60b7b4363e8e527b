"""What the gateway reads of a model, and how it says that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.errors import ModelError
from services.gateway.tokens import Tokens


@pytest.mark.parametrize(
    ("source", "why"),
    [(None, "No such file"), ("{% if %}", "line 1: Expected an expression"), ("{{ 1", "line 1: ")],
)
def test_an_unusable_chat_template_is_told_at_start(
    folder: Path, tmp_path: Path, source: str | None, why: str
) -> None:
    path = tmp_path / "template.jinja"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ModelError) as caught:
        Tokens.load(str(folder), chat_template=str(path))
    assert caught.value.what == f"the chat template {path} cannot be used"
    assert why in caught.value.why and "--chat-template" in caught.value.fix
