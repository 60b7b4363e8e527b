"""A running `python -m services.gateway` for tests, and what its workers (puppets) need to find it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import msgspec
import openai

from diptych.channel.keys import make_keys
from diptych.specs import GatewaySpec
from services.host.ports import claim_port
from tests.support.fake_workers import Puppet
from tests.support.model_folder import make_folder
from tests.support.waiting import wait_for
from tests.support.warm_process import WarmProcess

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 90.0  # far beyond what anything takes


def until(true: Callable[[], Any]) -> None:
    wait_for(true, WAIT_S)


class Gateway:
    """A running `python -m services.gateway` and a client for it."""

    def __init__(self, spec: GatewaySpec, process: subprocess.Popen[bytes]) -> None:
        self.spec, self.process = spec, process
        self.url = f"http://127.0.0.1:{spec.port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=WAIT_S)

    def puppet(self, role: str, number: int = 0, **fields: str) -> Puppet:
        return Puppet(role, number, self.spec.channel, Path(self.spec.keys_dir), **fields)

    def ready(self) -> Any:
        return self.http.get("/ready").json()

    def status(self) -> Any:
        return self.http.get("/status").json()

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def printed_lines(out: IO[bytes]) -> list[Any]:
    return [json.loads(line) for line in out]


def start(spec: GatewaySpec, log: Path | None = None) -> subprocess.Popen[bytes]:
    """The process; what it logs goes to the file `log`."""
    with open(log or os.devnull, "ab") as stderr:
        process = WarmProcess(
            [sys.executable, "-m", "services.gateway"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(msgspec.json.encode(spec) + b"\n")
    return process


def specification(folder: Path, **changes: Any) -> GatewaySpec:
    make_keys(folder / "keys")
    fields: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": claim_port("127.0.0.1", 0),
        "channel": f"tcp://127.0.0.1:{claim_port('127.0.0.1', 0)}",
        "keys_dir": str(folder / "keys"),
        "model": str(make_folder(folder / "model")),
        "served_names": ("toy",),
        "num_prefill": 1,
        "num_decode": 1,
        "drain_s": 0.5,
        "slo_ttft_ms": 60_000.0,
    }
    return GatewaySpec(**(fields | changes))


@contextmanager
def serving(folder: Path, log: Path | None = None, **changes: Any) -> Iterator[Gateway]:
    spec = specification(folder, **changes)
    process = start(spec, log)
    gateway = Gateway(spec, process)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or json.loads(lines[-1]).get("phase") != "ready":
            lines.append(process.stdout.readline().decode())
            assert lines[-1], f"the gateway ended before it was ready: {lines}"
        yield gateway
    finally:
        gateway.http.close()
        process.terminate()
        process.wait(WAIT_S)
        if process.stdout is not None:
            process.stdout.close()
        assert process.returncode == 0
