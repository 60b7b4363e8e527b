"""The scripted gateway with a folder for files and batches, and the clients of two tenants."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.model_folder import make_folder
from tests.system.batches.batch_lines import MAX_FILE_BYTES, MINE, YOURS, client_of
from tests.system.scripted_gateway import Running, scripted


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder, data = make_folder(tmp_path_factory.mktemp("toy")), tmp_path_factory.mktemp("data")
    with scripted(
        folder, keys=(MINE, YOURS), data_dir=data / "own", max_file_bytes=MAX_FILE_BYTES
    ) as running:
        yield running


@pytest.fixture
def client(gateway: Running) -> Iterator[openai.OpenAI]:
    with client_of(gateway, MINE) as mine:
        yield mine


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {MINE}"}
    with httpx.Client(base_url=gateway.url, headers=headers, trust_env=False, timeout=60) as one:
        yield one
