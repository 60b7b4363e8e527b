"""A rolling upgrade under load: two versions side by side, no pair across them, no request lost.

The parts are started as `diptych gateway` and `diptych worker` start them, each under a supervisor, without Ray. The
new version is a copy of the model whose tokenizer file differs in a blank, so that its tokens are the same.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from diptych.channel.keys import make_keys
from diptych.specs import GatewaySpec, WorkerSpec
from services.cli.client import admin
from services.host.child_environment import child_environment, ucx_on_loopback
from services.host.ports import claim_port
from services.host.supervision.supervisor import ChildStatus, Supervisor
from tests.support.deployment import wait_for
from tests.support.terminal import PATIENCE_S, ROOT

OLD, NEW = ("prefill-old", "decode-old"), ("prefill-new", "decode-new")
ADMIN = "the admin's key"
PROMPTS = [f"class {name}:\n" + "    def read(self, size=-1):\n" * 20 for name in ("A", "B", "C", "D")]
TOKENS = 120
pytestmark = pytest.mark.timeout(900)


class Parts:
    """A gateway, and workers that come and go."""

    def __init__(self, folder: Path) -> None:
        self.keys, self.logs = folder / "keys", folder / "logs"
        make_keys(self.keys)
        self.channel, port = f"tcp://127.0.0.1:{claim_port('127.0.0.1', 0)}", claim_port("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{port}"
        self.started: dict[str, Supervisor] = {}
        spec = GatewaySpec(
            host="127.0.0.1",
            port=port,
            channel=self.channel,
            keys_dir=str(self.keys),
            model=str(ROOT / "models" / "tiny"),
            served_names=("tiny",),
            num_prefill=1,
            num_decode=1,
            admin_key=ADMIN,
            recovery_s=300.0,
            max_queue_wait_s=300.0,
        )
        self._start("gateway", "services.gateway", msgspec.json.encode(spec))

    def worker(self, name: str, model: Path) -> None:
        """Start a worker of this model; its role is in its name."""
        spec = WorkerSpec(
            worker=name,
            role=name.split("-")[0],
            gateway=self.channel,
            keys_dir=str(self.keys),
            model=str(model),
            kv_bytes=64 << 20,
            drain_s=300.0,
        )
        self._start(name, "services.worker", msgspec.json.encode(spec))

    def _start(self, name: str, module: str, spec: bytes) -> None:
        environ = ucx_on_loopback(child_environment(1, os.environ))
        command = [sys.executable, "-m", module]
        one = self.started[name] = Supervisor(name, command, spec, self.logs / f"{name}.log", environ)
        one.start()

    def until(self, name: str, state: str) -> ChildStatus:
        """Wait for a part's state; every change is looked at."""
        seen = self.started[name].status()
        while seen.state != state:
            newer = self.started[name].wait_status(seen.version, PATIENCE_S)
            assert newer.version != seen.version and newer.state != "failed", (seen, newer.error)
            seen = newer
        return seen

    def status(self) -> dict[str, object]:
        body: dict[str, object] = httpx.get(f"{self.url}/status", timeout=60).raise_for_status().json()
        return body

    def links(self) -> set[tuple[str, str]]:
        links = self.status()["links"]
        assert isinstance(links, list)
        return {(link["source"], link["target"]) for link in links}

    def stop(self) -> None:
        for one in self.started.values():
            one.stop(0.5)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path)
    try:
        parts.until("gateway", "ready")
        yield parts
    finally:
        parts.stop()


class Clients:
    """Some clients that ask again and again, and what they were answered."""

    def __init__(self, url: str) -> None:
        self._url, self._over = url, threading.Event()
        self.answers: list[tuple[str, str]] = []
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(prompt,)) for prompt in PROMPTS]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int) -> None:
        """Wait until so many more were answered."""
        enough = len(self.answers) + count
        wait_for(lambda: len(self.answers) >= enough or bool(self.errors))

    def _ask(self, prompt: str) -> None:
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=600) as client:
            while not self._over.is_set():
                try:
                    done = client.completions.create(
                        model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0
                    )
                    self.answers.append((prompt, done.choices[0].text))
                except openai.APIError as error:
                    self.errors.append(f"{type(error).__name__}: {error}")


def newer(folder: Path) -> Path:
    """The same model with another fingerprint, and the gateway's tokenizer."""
    copy = folder / "newer"
    shutil.copytree(ROOT / "models" / "tiny", copy)
    config = copy / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    return copy


def ready(parts: Parts) -> bool:
    return httpx.get(f"{parts.url}/ready", timeout=60).status_code == 200


def test_a_rolling_upgrade_pairs_equals_only_and_loses_no_request(parts: Parts, tmp_path: Path) -> None:
    for name in OLD:
        parts.worker(name, ROOT / "models" / "tiny")
    wait_for(lambda: ready(parts))
    seen: set[tuple[str, str]] = set()

    def linked(*pairs: tuple[str, str]) -> Callable[[], bool]:
        def now() -> bool:
            links = parts.links()
            seen.update(links)
            return links == set(pairs)

        return now

    with Clients(parts.url) as clients:
        clients.more(8)
        folder = newer(tmp_path)
        for name in NEW:
            parts.worker(name, folder)
        wait_for(linked(OLD, NEW))
        clients.more(8)  # both versions serve
        for name in OLD:
            assert admin.drain_worker(parts.url, ADMIN, name, force=False) == 0
        for name in OLD:
            assert parts.until(name, "retired").restarts == 0
        wait_for(linked(NEW))
        clients.more(8)  # and the new one alone
    assert clients.errors == []
    assert len(set(clients.answers)) == len(PROMPTS)  # one answer to each, whoever gave it
    assert seen == {OLD, NEW}
