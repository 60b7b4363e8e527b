"""Bulk workers: batches alone, in less memory than the model has, with the answers of any other deployment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from diptych.errors import ConfigError
from services.cli.main import app
from tests.support.deployment import Served, serve_parts, wait_for
from tests.system.batches.batch_lines import (
    CHAT,
    COMPLETION,
    answers_of,
    finished,
    input_file,
    results,
    start,
)
from tests.system.bulk_lines import completion_lines

MEMORY = 24 << 20
BULK = ("--bulk", "1", "--prefill", "0", "--decode", "0")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("data") / "batches"
    options = ("--data-dir", str(data), "--bulk-memory-bytes", str(MEMORY), "--max-model-len", "1024")
    with serve_parts(*BULK, *options) as running:
        yield running


def test_answers_are_those_of_other_deployments(served: Served) -> None:
    lines = completion_lines(25)
    expected = {}
    with serve_parts("--colocated", "1") as usual, usual.client() as client:
        for name, body in lines.items():
            expected[name] = answers_of(client.completions.create(**body).model_dump(exclude_unset=True))
    with served.client() as client:
        ended = finished(client, start(client, input_file(lines.items(), COMPLETION), COMPLETION).id)
        found = results(client, ended.output_file_id)
    assert ended.request_counts is not None and ended.request_counts.completed == len(lines)
    for name, answer in expected.items():
        choices, usage = answers_of(found[name]["response"]["body"])
        assert usage == answer[1]
        assert [one["text"] for one in choices] == [one["text"] for one in answer[0]], name
        assert [one["finish_reason"] for one in choices] == [one["finish_reason"] for one in answer[0]]
        for mine, other in zip(choices, answer[0], strict=True):
            if other.get("logprobs"):
                scores, wanted = (one["logprobs"]["token_logprobs"][1:] for one in (mine, other))
                assert scores == pytest.approx(wanted, abs=2e-3)


def test_requests_over_http_are_refused(served: Served) -> None:
    with served.client() as client:
        with pytest.raises(openai.NotFoundError, match="this deployment serves batches only") as caught:
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert caught.value.code == "only_batches"
    assert served.ready()


def test_lines_run_again_when_the_worker_is_killed(served: Served) -> None:
    lines = completion_lines(12, max_tokens=60, min_tokens=60, stop=None)
    with served.client() as client:
        batch = start(client, input_file(lines.items(), COMPLETION), COMPLETION)
        wait_for(lambda: served.status()["workers"][0]["stats"]["bulk_running"] == 12)
        served.worker("decode-0").send_signal(signal.SIGKILL)
        ended = finished(client, batch.id)
        found = results(client, ended.output_file_id)
    assert found.keys() == lines.keys()
    assert all(
        len(one["response"]["body"]["choices"]) == 1
        and one["response"]["body"]["usage"]["completion_tokens"] == 60
        for one in found.values()
    )
    wait_for(lambda: served.status()["pools"]["decode"]["bulk_running"] == 0)


def test_chats_are_lines_too(served: Served) -> None:
    question = [{"role": "user", "content": "What is a list?"}]
    body = {"model": "tiny", "messages": question, "max_tokens": 8, "temperature": 0}
    with served.client() as client:
        ended = finished(client, start(client, input_file([("a", body), ("b", body)]), CHAT).id)
        found = results(client, ended.output_file_id)
    one, other = (answers_of(row["response"]["body"]) for row in found.values())
    assert one == other


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--bulk", "1"), "bulk workers serve batches alone"),
        ((*BULK, "--data-dir", "none"), "bulk workers need a data directory"),
        ((*BULK, "--data-dir", "d", "--kv-cache-codec", "int4"), "has no effect on bulk workers"),
        ((*BULK, "--data-dir", "d", "--dtype", "bfloat16"), "has no effect on bulk workers"),
        ((*BULK, "--data-dir", "d", "--no-enable-prefix-caching"), "has no effect on bulk workers"),
        (("--bulk-policy", "rows=2"), "has no effect"),
        (("--bulk-memory-bytes", "1GiB"), "has no effect"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    flags: tuple[str, ...], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["serve", *flags])
    assert isinstance(done.exception, ConfigError)
    assert what in done.exception.what
    assert done.exception.why and done.exception.fix
