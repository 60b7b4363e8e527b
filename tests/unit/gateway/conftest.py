from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.limits import Limits
from services.gateway.tokens import Tokens
from services.gateway.validate import Rules
from tests.unit.gateway.folder import make_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def tokens(folder: Path) -> Tokens:
    return Tokens.load(str(folder))


@pytest.fixture(scope="session")
def rules(tokens: Tokens) -> Rules:
    return Rules(tokens, ("toy", "org/toy"), tokens.context_tokens, Limits())
