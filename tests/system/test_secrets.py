"""Planted keys and a planted prompt appear in no log, metric, trace, page, status or process list, even at the most
detailed log level; and every line that the parts of a deployment log is JSON.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.deployment import Served, serve_parts, wait_for
from tests.system.otlp_collector import Collector, collecting

pytestmark = pytest.mark.timeout(600)
KEY, OTHER, ADMIN, FIGURES = (secrets.token_hex(20) for _ in range(4))
PROMPT = "xyzzy-moon-cheese-" + secrets.token_hex(8)
SALT = "salt-" + secrets.token_hex(8)
PLANTED = (KEY, OTHER, ADMIN, FIGURES, PROMPT, SALT)
PAGES = (
    "/",
    "/status",
    "/metrics",
    "/ready",
    "/health",
    "/docs",
    "/openapi.json",
    "/v1/models",
    "/version",
    "/none",
)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


@pytest.fixture(scope="module")
def served(collector: Collector, written: Path) -> Iterator[Served]:
    keys = written / "keys"
    keys.write_text(f"{KEY}\n{OTHER}\n")
    keys.chmod(0o600)
    with serve_parts(
        "--api-key-file", str(keys), "--admin-key", ADMIN, "--metrics-key", FIGURES, "--log-format", "json",
        "--log-level", "debug", "--request-log", str(written / "requests.jsonl"), "--step-log", str(written / "steps"),
        "--otlp-traces-endpoint", collector.url, fresh=True,
    ) as deployment:  # fmt: skip
        yield deployment


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask_everything(served: Served) -> list[httpx.Response]:
    """Requests that succeed and that fail in all ways that repeat something; returns what is not an answer."""
    with httpx.Client(base_url=served.url, timeout=600, trust_env=False) as http:
        chat = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": PROMPT}]}
        text = {"model": "tiny", "max_tokens": 4, "prompt": PROMPT, "cache_salt": SALT}
        for stream in (False, True):
            for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
                answer = http.post(path, json={**body, "stream": stream}, headers=bearer(KEY))
                assert answer.status_code == 200
        assert http.post("/tokenize", json={"prompt": PROMPT}, headers=bearer(OTHER)).status_code == 200
        failed = [
            http.post("/v1/completions", json={**text, "temperature": -1}, headers=bearer(KEY)),
            http.post("/v1/completions", json={**text, "prompt": {PROMPT: 1}}, headers=bearer(KEY)),
            http.post("/v1/completions", json={**text, "prompt": (PROMPT + " ") * 2000}, headers=bearer(KEY)),
            http.post("/v1/completions", content=f'{{"prompt": "{PROMPT}', headers=bearer(KEY)),
            http.post("/v1/completions", json=text, headers=bearer(ADMIN)),
            http.post("/v1/completions", json=text, headers=bearer(KEY) | {"x-request-timeout": "0.0001"}),
            http.post("/admin/workers/none/drain", json={}, headers=bearer(ADMIN)),
        ]  # fmt: skip
        assert all(answer.status_code >= 400 for answer in failed)
        return failed + [
            http.get(path, headers=bearer(key)) for path in PAGES for key in (KEY, FIGURES, ADMIN, "wrong")
        ]


def process_texts() -> dict[str, str]:
    """Arguments and environment of the gateway, the workers and all their processes, by process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        # It may end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            text = " ".join([*process.cmdline(), *process.environ().values()])
            found[f"process {process.pid}"] = text
    return found


def test_planted_secrets_appear_nowhere(served: Served, collector: Collector, written: Path) -> None:
    answers = ask_everything(served)
    wait_for(lambda: len(collector.traces()) >= 4)
    assert served.logs is not None
    found = {f"answer {answer.url.path} {answer.status_code}": answer.text for answer in answers}
    for path in [*served.logs.iterdir(), *written.rglob("*.jsonl*"), *(written / "steps").rglob("*")]:
        if path.is_file():
            found[path.name] = path.read_text(encoding="utf-8", errors="replace")
    assert any(name.startswith("gateway") for name in found) and any("decode-0" in name for name in found)
    found["traces"] = b"\n".join(collector.bodies).decode("latin-1")
    found |= process_texts()
    assert f"process {served.worker('decode-0').pid}" in found
    assert any("services.gateway" in text for name, text in found.items() if name.startswith("process "))
    assert sum(map(len, found.values())) > 10_000
    leaks = {
        (name, PLANTED.index(secret)) for name, text in found.items() for secret in PLANTED if secret in text
    }
    assert leaks == set()


def test_every_line_of_every_part_is_json(served: Served) -> None:
    """At the most detailed level, and with a worker that is killed and started again."""
    killed = served.worker("decode-0")
    killed.kill()
    wait_for(lambda: killed.pid not in {one["pid"] for one in served.status()["workers"]})
    wait_for(served.ready)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "temperature": -1}
    headers = {**bearer(KEY), "x-request-id": "mine-1"}
    answer = httpx.post(
        f"{served.url}/v1/completions", json=body, headers=headers, timeout=600, trust_env=False
    )
    assert served.logs is not None
    records = [
        json.loads(line)
        for path in served.logs.glob("*.log")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert all(record["part"] and record["time"].endswith("Z") and record["level"] for record in records)
    assert any("worker decode-0 is lost" in record["message"] for record in records)
    about = [record for record in records if record.get("request_id") == answer.headers["x-request-id"]]
    assert about and all(record["client_request_id"] == "mine-1" for record in about)
