"""The compose project under trial: its commands, and what clients of it see."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.containers.engine import Engine

URL, PROMETHEUS, ALERTMANAGER = "http://127.0.0.1:8000", "http://127.0.0.1:9090", "http://127.0.0.1:9093"
UP_S = 600
KEY_FILES = {
    "api": "/keys/clients/api-key", "metrics": "/keys/metrics/metrics-key", "admin": "/keys/admin/admin-key",
}  # fmt: skip
# Of two workers, so that the trial leaves memory to others.
NAMES = {"DIPTYCH_KV_CACHE_MEMORY_BYTES": "512MiB"}
SLOS = {"DIPTYCH_SLO_TTFT_MS": "500", "DIPTYCH_SLO_TPOT_MS": "50"}


@dataclass(slots=True)
class Stream:
    """A streamed answer: its text, the seconds at which its parts came, why it ended, and an error, if any."""

    text: str = ""
    times_s: list[float] = field(default_factory=list)
    finish: str | None = None
    error: str = ""

    @property
    def max_gap_s(self) -> float:
        return max(
            (after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)),
            default=0.0,
        )


class Project:
    """docker-compose.yml as it stands, with the image of this trial."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.keys: dict[str, str] = {}
        self.names = dict(NAMES)

    def compose(self, *words: str, timeout_s: float = UP_S + 60.0) -> str:
        """`docker compose WORDS`. Raises AssertionError."""
        return self.engine.run("docker", "compose", *words, timeout_s=timeout_s, **self.names)

    def up(self, *words: str, files: Sequence[str] = (), profile: str = "") -> float:
        """`docker compose up -d --wait WORDS`; seconds that it took. `files` are flags that name other files."""
        began_s = time.monotonic()
        named = ["--profile", profile] if profile else []
        try:
            self.compose(*files, *named, "up", "-d", "--wait", "--wait-timeout", str(UP_S), *words)
        except AssertionError as error:
            said = self.compose("logs", "--no-color", "--tail", "6", "gateway", "prefill", "decode")
            raise AssertionError(f"{error}; logs: {' / '.join(said.strip().splitlines())}") from None
        took_s = time.monotonic() - began_s
        self.keys = {
            name: self.compose("exec", "-T", "gateway", "cat", file).strip()
            for name, file in KEY_FILES.items()
        }
        return took_s

    def ask(
        self, method: str, path: str, key: str | None = "api", base: str = URL, **more: Any
    ) -> httpx.Response:
        """One request; `key` is the name of a key, or None."""
        with httpx.Client(timeout=120, trust_env=False) as client:
            return client.request(method, base + path, headers=self.headers(key), **more)

    def headers(self, key: str | None) -> dict[str, str]:
        return {} if key is None else {"Authorization": f"Bearer {self.keys[key]}"}

    def chat(self, tokens: int, prompt: str = "Tell me a story.") -> Stream:
        """A streamed greedy answer of `tokens` tokens, to its end."""
        stream = Stream()
        for _ in self.follow_chat(stream, tokens, prompt):
            pass
        return stream

    def follow_chat(self, stream: Stream, tokens: int, prompt: str = "Tell me a story.") -> Iterator[None]:
        """The same answer into `stream`, with a stop after each part."""
        body = {
            "model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with (
            httpx.Client(timeout=120, trust_env=False) as client,
            client.stream(
                "POST", f"{URL}/v1/chat/completions", headers=self.headers("api"), json=body
            ) as answer,
        ):
            if answer.status_code != 200:
                stream.error = answer.read().decode()
                return
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                said = json.loads(line.removeprefix("data: "))
                if "error" in said:
                    stream.error = json.dumps(said["error"])
                    return
                for choice in said["choices"]:
                    stream.text += choice["delta"].get("content") or ""
                    stream.finish = choice.get("finish_reason") or stream.finish
                    stream.times_s.append(time.monotonic())
                yield

    def find_worker(self, service: str) -> int:
        """The process that computes in a worker's container, by its number outside."""
        listing = self.engine.run("docker", "top", f"diptych-{service}-1", "-eo", "pid,args")
        found = [line.split()[0] for line in listing.splitlines() if "-m services.worker" in line]
        assert len(found) == 1, listing
        return int(found[0])
