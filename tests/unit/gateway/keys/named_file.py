"""Files of named keys for tests, and what hands sequences to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from diptych.failure_statuses import RequestFailure
from diptych.messages import Output
from diptych.request import Request, SamplingParams, Tenancy
from services.gateway.generation.generation import SequenceSink


def write_keys(file: Path, entries: Sequence[dict[str, Any]]) -> Path:
    """Replace the file as a whole, as `mv` does."""
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump({"keys": [*entries]}), encoding="utf-8")
    new.chmod(0o600)
    new.replace(file)
    return file


class Sink:
    """A `SequenceSink` that keeps what it gets."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.failures: list[RequestFailure] = []
        self.finished = ""

    def deliver_output(self, output: Output, now_s: float) -> None:
        self.outputs.append(output)

    def record_effect(self, effect: Any, now_s: float) -> None: ...

    def record_kv_class(self, kv_class: str, reason: str, details: Any) -> None: ...

    def finish_sequence(self, reason: str, now_s: float) -> None:
        self.finished = reason

    def fail_sequence(self, failure: RequestFailure) -> None:
        self.failures.append(failure)


class Backend:
    """A `GenerationBackend` that keeps what is submitted."""

    def __init__(self) -> None:
        self.submitted: list[Sequence[tuple[Request, SequenceSink]]] = []

    def submit_requests(self, asked: Sequence[tuple[Request, SequenceSink]]) -> None:
        self.submitted.append(asked)

    def cancel_request(self, request: str, *others: str) -> None: ...

    def stop_request(self, request: str) -> None: ...

    def find_refusal(self, num_requests: int, tenant: str) -> RequestFailure | None:
        return None


def request(tenant: str, prompt: Sequence[int] = (1, 2, 3), priority: int = 0, name: str = "r") -> Request:
    return Request(
        name, prompt, SamplingParams(max_tokens=8, seed=1), 1e9, tenancy=Tenancy(tenant, "", priority)
    )
