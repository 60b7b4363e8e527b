"""`diptych serve` over HTTPS: official clients, its own commands, a certificate that is renewed, one that is wrong."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from services.gateway.tls.trust import trust_certificate
from services.host.ports import claim_port
from tests.support.certificates import CertificateFiles, write_certificate
from tests.support.terminal import Terminal, run
from tests.support.waiting import wait_for
from tests.unit.gateway.keys.named_file import write_keys

KEY, WAIT_S = "a-key-of-the-tests", 90.0
pytestmark = pytest.mark.timeout(600)


class Secure:
    """A deployment that speaks HTTPS."""

    def __init__(self, url: str, files: CertificateFiles) -> None:
        self.url, self.files = url, files

    def http(self) -> httpx.Client:
        """A client that trusts the certificate of now."""
        headers = {"Authorization": f"Bearer {KEY}"}
        verify = trust_certificate(str(self.files.certfile))
        return httpx.Client(
            base_url=self.url, trust_env=False, timeout=WAIT_S, verify=verify, headers=headers
        )

    def status(self) -> dict[str, object]:
        with self.http() as http:
            found: dict[str, object] = http.get("/status").raise_for_status().json()
            return found

    def is_trusted(self) -> bool:
        """Whether a new connection gets the certificate of now."""
        try:
            with self.http() as http:
                return http.get("/health").status_code == 200
        except httpx.ConnectError:
            return False


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("tls")
    files = write_certificate(folder)
    keys = write_keys(folder / "keys.yaml", [{"name": "team", "key": KEY}])
    flags = ("--ssl-certfile", str(files.certfile), "--ssl-keyfile", str(files.keyfile), "--keys", str(keys))
    port = str(claim_port("127.0.0.1", 0))
    with Terminal("serve", "--port", port, "--colocated", "1", "--root-path", "/llm", *flags) as terminal:
        terminal.expect("stop with Ctrl-C")
        url = terminal.expect(lambda line: line.startswith("http")).removesuffix("/v1")
        assert url == f"https://127.0.0.1:{port}"
        yield Secure(url, files)


def test_an_official_client_streams(secure: Secure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.files.certfile))
    with (
        secure.http() as http,
        openai.OpenAI(base_url=f"{secure.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        parts = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=8, stream=True
        )
        # Tokens that come while one is written share a part.
        *before, last = list(parts)
        assert before and last.choices[0].finish_reason in ("length", "stop")
        description = http.get("/openapi.json").json()
    assert description["servers"] == [{"url": "/llm"}]
    with secure.http() as http:
        assert 'data-root="/llm"' in http.get("/").text


def test_the_commands_know_https(secure: Secure) -> None:
    trusted = {"SSL_CERT_FILE": str(secure.files.certfile), "DIPTYCH_API_KEY": KEY}
    shown = run("status", "--url", secure.url, "--json", **trusted)
    assert shown.returncode == 0 and json.loads(shown.stdout)["ready"] is True, shown.stderr
    assert run("chat", "Hi", "--url", secure.url, "--max-tokens", "4", **trusted).returncode == 0
    bench = run("bench", "--url", secure.url, "--num-requests", "3", "--rate", "4", **trusted)
    assert bench.returncode == 0, bench.stderr + bench.stdout
    refused = run("status", "--url", secure.url, DIPTYCH_API_KEY=KEY)
    assert (
        refused.returncode != 0 and "is not trusted" in refused.stderr and "SSL_CERT_FILE" in refused.stderr
    )


def test_a_renewed_certificate_is_served_while_a_stream_goes_on(secure: Secure) -> None:
    num_chunks, ended = 0, threading.Event()

    def stream() -> None:
        nonlocal num_chunks
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with secure.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                num_chunks += line.startswith("data: ")
                if line == "data: [DONE]":
                    ended.set()

    before = secure.status()["certificate"]
    reader = threading.Thread(target=stream)
    reader.start()
    wait_for(lambda: num_chunks, WAIT_S)
    write_certificate(secure.files.certfile.parent, valid_days=(-1, 60))
    wait_for(secure.is_trusted, WAIT_S)
    assert secure.status()["certificate"] != before
    reader.join()
    assert ended.is_set() and num_chunks > 100


def test_a_wrong_certificate_changes_nothing_and_is_refused_at_the_start(
    secure: Secure, tmp_path: Path
) -> None:
    folder = secure.files.certfile.parent
    kept = secure.files.certfile.read_bytes(), secure.files.keyfile.read_bytes()
    trusted = trust_certificate(str(secure.files.certfile))
    expired = write_certificate(folder, valid_days=(-9, -1))

    def problem() -> str:
        with httpx.Client(base_url=secure.url, trust_env=False, verify=trusted) as http:
            state = http.get("/status", headers={"x-api-key": KEY}).raise_for_status().json()
            return state["certificate"]["problem"] or ""

    wait_for(problem, WAIT_S)
    assert "has expired" in problem()
    flags = ("--ssl-certfile", str(expired.certfile), "--ssl-keyfile", str(expired.keyfile))
    for arguments, expected in (
        (flags, "has expired"),
        (flags[:2], "needs --ssl-keyfile"),
        (("--keys", str(tmp_path / "none")), "cannot be read"),
        (("--root-path", "llm/"), "is not a path such as /llm"),
    ):
        shown = run("serve", "--port", "0", *arguments)
        assert shown.returncode == 2 and expected in shown.stderr, shown.stderr
        assert len(shown.stderr.splitlines()) <= 6
    for file, content in zip((expired.certfile, expired.keyfile), kept, strict=True):
        file.write_bytes(content)
    wait_for(lambda: not problem(), WAIT_S)
    assert isinstance(trusted, ssl.SSLContext)
