"""A first start after an install: it loads what the install has compiled and nothing more, and who evicts waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest

from tests.support.deployment import Served, serve_parts
from tests.system.kept_answers import complete

pytestmark = pytest.mark.timeout(900)

PROMPT = list(range(300, 340))
WORKERS = ("prefill-0", "decode-0")


@dataclass(frozen=True, slots=True)
class FirstStart:
    """The deployment, the kernels that the install compiled, and those on disk when the deployment was ready."""

    served: Served
    installed: set[str]

    def kernels(self, verb: str) -> set[str]:
        """The kernels that a worker says it "loaded" or "compiled" in its own process."""
        assert self.served.logs is not None
        logs = "".join((self.served.logs / f"{worker}.log").read_text() for worker in WORKERS)
        lines = [line for line in logs.splitlines() if "kernels diptych.kernels.cache" not in line]
        return {found[1] for line in lines if (found := re.search(rf"{verb} (\S+\.py\d+)$", line))}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstStart]:
    folder = tmp_path_factory.mktemp("kernels")
    with mock.patch.dict(os.environ, {"NUMBA_CACHE_DIR": str(folder)}):
        subprocess.run([sys.executable, "-m", "worker.precompile"], check=True, timeout=600)
        installed = {path.name.removesuffix(".nbi") for path in folder.rglob("*.nbi")}
        with serve_parts("--log-level", "info", "--max-model-len", "512") as served:
            yield FirstStart(served, installed)


def test_a_start_loads_what_the_install_compiled(first: FirstStart) -> None:
    with first.served.client(timeout=300) as client:
        for temperature in (0.0, 1.0):
            client.completions.create(model="tiny", prompt=PROMPT, max_tokens=80, temperature=temperature)
    assert first.installed and first.kernels("loaded") == first.installed
    assert not first.kernels("compiled")


def test_a_request_that_evicts_waits_for_its_kernels_and_others_do_not(first: FirstStart) -> None:
    ended: list[float] = []

    def evict() -> None:
        answer = complete(first.served, PROMPT, 0.75, 20)
        assert answer.kv is not None and answer.keep
        ended.append(time.monotonic())

    waiting = threading.Thread(target=evict)
    waiting.start()
    answered = 0
    while waiting.is_alive():
        complete(first.served, PROMPT, None, 20)
        answered += not ended
    waiting.join()
    assert ended and answered >= 2
    assert not first.kernels("compiled"), "the engine's process has compiled nothing"
    assert first.kernels("loaded") > first.installed
