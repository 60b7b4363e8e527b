"""Whether each API key gets its rate, neither more nor less, while the file of keys is replaced under load.

    python -m benchmarks.rates [--json] [--short] [--keys 20] [--seconds 120] [--colocated N]

One deployment of the embedded model with `--keys`. Half of the keys have requests per minute, half tokens per minute,
and each asks at twice its rate, at even intervals, whatever becomes of its requests. A key without limits asks once a
second. Meanwhile the file is replaced ten times, each time with a new key, and once with one that is wrong.

    rate_error      the worst key: |requests or tokens that it got / those of its rate - 1|
    failed          answers that are neither whole nor a 429 `rate_limit_exceeded`, and 429 of the key without limits
    late_retries    of a client that comes again when `retry-after` says: how often it was refused a second time
    accepted_s      the longest time until a new key was accepted, in seconds

A request counts for the time at which it was sent. Requests and tokens are those that clients saw in whole answers.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop
import yaml

import benchmarks.script_path  # noqa: F401
from benchmarks.load.command_line import figure_parser, print_figures
from benchmarks.load.deployment import ANSWER_S, pool_flags, serving_deployment
from benchmarks.load.short_form import add_short_form

MODEL = "tiny"
REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE = 30, 300
PROMPT = [400, 401, 402, 403, 404, 405, 406, 407]
NEW_TOKENS = 2
NUM_REPLACED, MAX_ACCEPT_S = 10, 20.0


@dataclass(slots=True)
class AskingKey:
    """A key, its limits, and what it got."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    key: str = field(default_factory=lambda: secrets.token_hex(24))
    requests: int = 0
    tokens: int = 0
    refused: int = 0

    @property
    def entry(self) -> dict[str, Any]:
        """Its entry in the file."""
        limits = {
            "requests_per_minute": self.requests_per_minute,
            "tokens_per_minute": self.tokens_per_minute,
        }
        return {"name": self.name, "key": self.key} | {name: one for name, one in limits.items() if one}

    @property
    def interval_s(self) -> float:
        """Seconds between its requests: at twice its rate."""
        if self.requests_per_minute is not None:
            return 30.0 / self.requests_per_minute
        if self.tokens_per_minute is not None:
            return 30.0 * (len(PROMPT) + NEW_TOKENS) / self.tokens_per_minute
        return 1.0

    def error(self, seconds: float) -> float:
        """How far it was from its rate."""
        if self.requests_per_minute is not None:
            return abs(self.requests * 60.0 / seconds / self.requests_per_minute - 1)
        assert self.tokens_per_minute is not None
        return abs(self.tokens * 60.0 / seconds / self.tokens_per_minute - 1)


class RateLoad:
    """All clients. `failures` counts answers that are neither whole nor refused by a rate, by what they were."""

    def __init__(self, url: str, file: Path, keys: list[AskingKey], seconds: float) -> None:
        self._url, self._file, self.keys, self._seconds = url, file, keys, seconds
        self.free, self.patient = AskingKey("free"), AskingKey("patient", requests_per_minute=6)
        self.failures = Counter[str]()
        self.accepted_s = 0.0
        self.late_retries = self.num_retries = 0

    def write_keys(self, *more: dict[str, Any]) -> None:
        """Put a new file in place of the one before."""
        entries = [one.entry for one in (*self.keys, self.free, self.patient)] + list(more)
        new = self._file.with_suffix(".new")
        new.touch(0o600)
        new.write_text(yaml.safe_dump({"keys": entries}), encoding="utf-8")
        new.replace(self._file)

    async def run(self) -> None:
        """Ask with all keys, and replace the file meanwhile."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
        async with (
            httpx.AsyncClient(
                base_url=self._url, trust_env=False, timeout=ANSWER_S, limits=limits
            ) as self._http,
            asyncio.TaskGroup() as tasks,
        ):
            begun_s = time.monotonic()
            for number, key in enumerate((*self.keys, self.free)):
                # They do not all ask at the same moment.
                tasks.create_task(self._ask_evenly(key, begun_s + number * 0.037))
            tasks.create_task(self._ask_patiently(begun_s))
            tasks.create_task(self._replace_file(begun_s))

    async def _ask_evenly(self, key: AskingKey, begun_s: float) -> None:
        """Send requests of a key at even intervals, whether those before are answered or not."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(self._seconds / key.interval_s)):
                await asyncio.sleep(max(0.0, begun_s + number * key.interval_s - time.monotonic()))
                tasks.create_task(self._ask_once(key))

    async def _ask_patiently(self, begun_s: float) -> None:
        """Come again when the refusal says."""
        waited = False
        while time.monotonic() < begun_s + self._seconds:
            wait_s = await self._ask_once(self.patient)
            self.late_retries += waited and wait_s > 0
            self.num_retries += waited
            waited = wait_s > 0
            await asyncio.sleep(wait_s)

    async def _ask_once(self, key: AskingKey) -> float:
        """Send a request. Returns after how many seconds to come again; 0 if it was answered."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        try:
            answer = await self._http.post(
                "/v1/completions", json=body, headers={"authorization": f"Bearer {key.key}"}
            )
        except httpx.HTTPError as error:
            self.failures[type(error).__name__] += 1
            return 0.0
        if answer.status_code == 200:
            usage = answer.json()["usage"]
            key.requests += 1
            key.tokens += usage["total_tokens"]
            return 0.0
        code = answer.json()["error"]["code"]
        if code != "rate_limit_exceeded" or key is self.free:
            self.failures[f"{answer.status_code} {code}"] += 1
        key.refused += 1
        return float(answer.headers.get("retry-after-ms", 0)) / 1e3

    async def _replace_file(self, begun_s: float) -> None:
        """Replace the file, each time with a new key, and once with one that is wrong."""
        for number in range(NUM_REPLACED):
            await asyncio.sleep(
                max(0.0, begun_s + (number + 0.5) * self._seconds / NUM_REPLACED - time.monotonic())
            )
            if number == NUM_REPLACED // 2:
                self.write_keys({"name": "wrong", "key": "short"})
                await asyncio.sleep(1.5)
            fresh, written_s = AskingKey(f"fresh-{number}"), time.monotonic()
            self.write_keys(fresh.entry)
            shown = {"authorization": f"Bearer {fresh.key}"}
            while (await self._http.get("/v1/models", headers=shown)).status_code != 200:
                if time.monotonic() > written_s + MAX_ACCEPT_S:
                    self.failures["not accepted"] += 1
                    break
                await asyncio.sleep(0.05)
            self.accepted_s = max(self.accepted_s, time.monotonic() - written_s)


def measure_rates(num_keys: int, seconds: float, colocated: int) -> dict[str, Any]:
    """Start a deployment, and compare what each key got with its rate."""
    keys = [
        AskingKey(f"requests-{number}", requests_per_minute=REQUESTS_PER_MINUTE)
        if number % 2
        else AskingKey(f"tokens-{number}", tokens_per_minute=TOKENS_PER_MINUTE)
        for number in range(num_keys)
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "keys.yaml")
        load = RateLoad("", file, keys, seconds)
        load.write_keys()
        flags = (*pool_flags(colocated), "--kv-cache-memory-bytes", "256MiB", "--keys", str(file))
        with serving_deployment(*flags) as deployment:
            deployment.wait_ready()
            load = RateLoad(deployment.url, file, keys, seconds)
            load.write_keys()
            # Until the keys of this load are accepted.
            shown = {"authorization": f"Bearer {load.free.key}"}
            while httpx.get(f"{deployment.url}/v1/models", headers=shown).status_code != 200:
                time.sleep(0.1)
            uvloop.run(load.run())
    return {
        "rate_error": round(max(one.error(seconds) for one in keys), 4),
        "failed": load.failures.total(),
        "late_retries": load.late_retries,
        "num_retries": load.num_retries,
        "accepted_s": round(load.accepted_s, 2),
        "failures": dict(load.failures),
        "answered": sum(one.requests for one in keys),
        "refused": sum(one.refused for one in keys),
        "errors": {one.name: round(one.error(seconds), 4) for one in keys},
    }


def main() -> None:
    """Measure and print."""
    parser = figure_parser(__doc__)
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=120, help="a whole number of minutes")
    parser.add_argument("--colocated", type=int, default=0, help="workers that do both; 0: one of each kind")
    add_short_form(parser, seconds=60)
    options = parser.parse_args()
    print_figures(measure_rates(options.keys, options.seconds, options.colocated), options, "keys", "seconds")


if __name__ == "__main__":
    main()
