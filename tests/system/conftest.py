"""The scripted gateway over a toy model, and its clients, for the tests of the API that want nothing special."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.deployment import Served
from tests.support.model_folder import make_folder
from tests.system.scripted_gateway import Running, scripted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of the deployments that a failed test used; they are gone when its module is done."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for name, value in item.funcargs.items():
            if isinstance(value, Served) and (tails := value.log_tails()):
                report.sections.append((f"logs of {name}", tails))
    return report


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
