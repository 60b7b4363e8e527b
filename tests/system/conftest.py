"""The scripted gateway over a toy model, and its clients, for the tests of the API that want nothing special."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.system.scripted_gateway import Running, scripted
from tests.unit.gateway.model_folder import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[Running]:
    with scripted(folder) as running:
        yield running


@pytest.fixture
def client(gateway: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=60) as opened:
        yield opened
