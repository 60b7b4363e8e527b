"""Batches whose work ends the gateway again and again: each ends after three attempts, and the gateway serves."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai.types import Batch

from services.gateway.batches.file_checks import MAX_CHECKS
from services.gateway.batches.line_attempts import MAX_LINE_CRASHES
from services.gateway.preparation.fork_server import LOWEST_NICE
from tests.support.deployment import Served, serve_parts, wait_for
from tests.system.batches.batch_lines import COMPLETION, ENDED, input_file, results, start
from tests.system.batches.gateway_process import gateway_pid

# A line that is nested as deeply as its size allows costs most to check.
LINE_BYTES, LINES = 7 << 20, 24
MANY = 30_000
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("data")
    with serve_parts("--prefill", "1", "--decode", "1", "--data-dir", str(folder / "batches")) as running:
        yield running


def kill_gateway(served: Served, when: Callable[[psutil.Process], bool]) -> None:
    """End the gateway with kill -9 as soon as `when` says so, and wait until another one serves."""
    wait_for(lambda: gateway_pid(served) is not None)
    pid = gateway_pid(served)
    assert pid is not None
    process = psutil.Process(pid)
    wait_for(lambda: when(process), 120)
    process.send_signal(signal.SIGKILL)
    wait_for(lambda: gateway_pid(served) not in (None, pid) and served.ready(), 120)


def checks_file(gateway: psutil.Process) -> bool:
    """Whether the process runs that reads files."""
    with contextlib.suppress(psutil.Error):
        return any(child.nice() == LOWEST_NICE for child in gateway.children(recursive=True))
    return False


def ended(client: openai.OpenAI, batch: str) -> Batch:
    wait_for(lambda: client.batches.retrieve(batch).status in ENDED, 300)
    return client.batches.retrieve(batch)


def check_served(served: Served, client: openai.OpenAI) -> None:
    """Another batch ends as usual, and so does a request."""
    other = start(client, input_file([("a", TEXT)], COMPLETION), COMPLETION)
    done = ended(client, other.id)
    assert done.status == "completed" and set(results(client, done.output_file_id)) == {"a"}
    assert client.completions.create(**TEXT).usage is not None


def test_a_file_whose_check_ends_the_gateway_fails_its_batch(served: Served) -> None:
    nested = b"[" + b"[[]]," * (LINE_BYTES // 5) + b"[]]"
    line = b'{"custom_id":"%d","method":"POST","url":"%s","body":{"model":%s}}\n'
    content = b"".join(line % (number, COMPLETION.encode(), nested) for number in range(LINES))
    with served.client(timeout=120) as client:
        batch = start(client, content, COMPLETION)
        for _ in range(MAX_CHECKS):
            kill_gateway(served, checks_file)
        done = ended(client, batch.id)
        assert done.status == "failed" and done.errors is not None and done.errors.data is not None
        assert [one.code for one in done.errors.data] == ["check_failed"]
        check_served(served, client)


def test_a_line_that_runs_when_the_gateway_ends_fails(served: Served) -> None:
    body = TEXT | {"max_tokens": 1500, "min_tokens": 1500, "n": 8, "ignore_eos": True}
    with served.client(timeout=60) as client:
        batch = start(client, input_file([("long", body)], COMPLETION), COMPLETION)
        for _ in range(MAX_LINE_CRASHES):
            kill_gateway(served, lambda _: served.status()["batches"]["lines"]["running"] == 1)
        done = ended(client, batch.id)
        assert done.status == "completed", done
        (lost,) = results(client, done.error_file_id).values()
        assert lost["response"]["status_code"] == 500
        assert lost["response"]["body"]["error"]["code"] == "internal_error"
        check_served(served, client)


def test_a_batch_that_is_completed_when_the_gateway_ends_is_completed_by_the_next(served: Served) -> None:
    """Its lines have one result each, whenever the gateway ended."""
    bodies = ((str(number), TEXT) for number in range(MANY))
    with served.client(timeout=120) as client:
        batch = start(client, input_file(bodies, COMPLETION), COMPLETION)
        wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress", 120)
        client.batches.cancel(batch.id)
        for _ in range(3):
            counts = client.batches.retrieve(batch.id).request_counts
            assert counts is not None
            if counts.failed < MANY // 2:
                kill_gateway(served, lambda _: client.batches.retrieve(batch.id).status == "cancelling")
        done = ended(client, batch.id)
        good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
        assert done.status == "cancelled" and len(good) + len(bad) == MANY and not set(good) & set(bad)
        check_served(served, client)
