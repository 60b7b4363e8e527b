"""A whole deployment of the embedded model for a test: `diptych serve` on a free port, and what to ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import psutil

from services.cli.ports import claim
from tests import waiting
from tests.system.terminal import PATIENCE_S, Terminal

BOOKS = ("slabs_used", "leases", "staging_bytes", "running", "waiting")  # 0 in every worker at rest


@dataclass(frozen=True, slots=True)
class Served:
    """A deployment that is ready. `url` has no `/v1`."""

    terminal: Terminal
    url: str

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def status(self) -> dict[str, Any]:
        """`GET /status`."""
        told: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=60).raise_for_status().json()
        return told

    def ready(self) -> bool:
        """Whether `GET /ready` says so; a refused connection is a no."""
        try:
            return httpx.get(f"{self.url}/ready", timeout=60).status_code == 200
        except httpx.HTTPError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Sum of all samples of a metric whose labels contain `labels`; 0 when there is none."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def worker(self, name: str) -> psutil.Process:
        """The process of a worker, as its own introduction names it."""
        found = [one for one in self.status()["workers"] if one["worker"] == name]
        return psutil.Process(found[0]["pid"])

    def held(self) -> dict[str, float]:
        """Whatever is not 0 in the books, by worker and book; empty at rest."""
        state = self.status()
        kept = {f"{w['worker']}.{b}": w["stats"][b] for w in state["workers"] for b in BOOKS if w["stats"][b]}
        return kept | {name: state[name] for name in ("open_requests", "sequences") if state[name]}


@contextmanager
def serve(*arguments: str) -> Iterator[Served]:
    """`diptych serve ARGUMENTS` until the block ends; then Ctrl-C, and nothing may be left of it."""
    port = str(claim("127.0.0.1", 0))
    with Terminal("serve", "--port", port, *arguments) as terminal:
        terminal.expect("stop with Ctrl-C")
        yield Served(terminal, f"http://127.0.0.1:{port}")
        terminal.interrupt()
        assert not terminal.left()


def wait_for(condition: Callable[[], bool], timeout_s: float = PATIENCE_S, pause_s: float = 0.05) -> float:
    """Seconds until `condition` held.

    Raises:
        AssertionError: it did not hold in time.
    """
    return waiting.wait_for(condition, timeout_s, pause_s)
