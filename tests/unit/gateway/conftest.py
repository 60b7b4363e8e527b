from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.validate import RequestRules
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.unit.gateway.model_folder import make_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def tokens(folder: Path) -> GatewayTokenizer:
    return GatewayTokenizer.load(str(folder))


@pytest.fixture(scope="session")
def rules(tokens: GatewayTokenizer) -> RequestRules:
    return RequestRules(tokens, ("toy", "org/toy"), tokens.context_tokens, RequestLimits())
