from __future__ import annotations

import gc
from pathlib import Path

import pytest

from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.validate import RequestRules
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import make_folder


@pytest.fixture
def own_garbage() -> None:
    """What exists by now is left alone by the garbage collector, as in the gateway's process.

    A test process holds much more, and would be measured looking through it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def tokens(folder: Path) -> GatewayTokenizer:
    return GatewayTokenizer.load(str(folder))


@pytest.fixture(scope="session")
def rules(tokens: GatewayTokenizer) -> RequestRules:
    return RequestRules(tokens, ("toy", "org/toy"), tokens.context_tokens, RequestLimits())
