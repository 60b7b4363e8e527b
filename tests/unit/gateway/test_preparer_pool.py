"""The event loop stays free while bodies are prepared, and every body comes to an end that its client receives."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.errors import RequestError
from diptych.failure_statuses import RequestFailure
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.preparation import preparation_job, preparer_pool
from services.gateway.preparation.preparation_job import (
    PreparationJob,
    PreparedReply,
    PreparedRequest,
)
from services.gateway.preparation.preparer_pool import MAX_INLINE_BYTES, PreparerPool
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import make_folder
from tests.unit.gateway.preparing import PATIENCE_S, TICK_S, Gaps, completion, job, within
from tests.unit.gateway.thinking_model import thinking_rules

GAP_S = 0.25  # that streams are promised not to be held up longer


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> RequestRules:
    """A model with a context that long texts fit."""
    folder = make_folder(tmp_path_factory.mktemp("wide"), context=2_000_000)
    tokens = GatewayTokenizer.load(str(folder))
    return RequestRules(tokens, ("toy",), tokens.context_tokens, RequestLimits())


def structured(schema: dict[str, Any]) -> PreparationJob:
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": "x"}]
    return job("chat", {"model": "toy", "messages": messages, "response_format": asked})


async def refusal(pool: PreparerPool, sent: PreparationJob) -> RequestFailure:
    with pytest.raises(RequestError) as caught:
        await pool.prepare_body(sent)
    return caught.value.failure


def hang_on(monkeypatch: pytest.MonkeyPatch, word: str, hang: Callable[[], None]) -> None:
    """Have `GatewayTokenizer.encode` do `hang` when it is given `word`."""
    encode = GatewayTokenizer.encode

    def instead(self: GatewayTokenizer, text: str, special: bool) -> list[int]:
        if word in text:
            hang()
        return encode(self, text, special)

    monkeypatch.setattr(GatewayTokenizer, "encode", instead)


def test_small_and_large_bodies_are_resolved_alike(rules: RequestRules) -> None:
    body = {
        "model": "toy",
        "prompt": ["größer", "kleiner"],
        "logit_bias": {"7": 2.0},
        "seed": 3,
        "echo": True,
    }
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        small = await pool.prepare_body(job("completion", body, "a"))
        large = await pool.prepare_body(job("completion", body, "a", size=MAX_INLINE_BYTES + 1))
        assert isinstance(small, PreparedRequest) and small == large
        assert small.ask.prompts[0].text == "größer" and small.ask.origin.tenant == "a"

    within(pool, work)


def test_refusals_come_back_as_they_were(rules: RequestRules) -> None:
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        for size in (0, MAX_INLINE_BYTES + 1):
            failure = await refusal(pool, job("chat", {"model": "toy", "messages": [], "n": 1}, size=size))
            assert (failure.status, failure.code, failure.param) == (400, "invalid_value", "messages")

    within(pool, work)


def test_a_schema_full_of_brackets_does_not_stop_the_loop(rules: RequestRules, own_garbage: None) -> None:
    """Counting them once took a minute, with the interpreter held."""
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        sent = structured({"type": "object", "description": "[)" * 16_000})
        try:
            assert isinstance(await pool.prepare_body(sent), PreparedRequest)
        except RequestError as error:  # too slow for this machine is fine, too
            assert error.failure.code == "invalid_schema"
        assert await gaps.longest() < GAP_S

    within(pool, work)


def test_long_texts_are_tokenised_beside_the_loop(wide: RequestRules, own_garbage: None) -> None:
    pool = PreparerPool(wide)

    async def work(gaps: Gaps) -> None:
        asked = {"prompt": "größer " * 60_000, "return_token_strs": True}
        reply = await pool.prepare_body(job("tokenize", asked))
        assert isinstance(reply, PreparedReply)
        content = json.loads(reply.body)
        assert len(content["token_strs"]) == content["count"] > 60_000
        assert await gaps.longest() < GAP_S

    within(pool, work)


def test_tokenize_and_detokenize_have_bounds(rules: RequestRules) -> None:
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        for sent in (
            job("tokenize", {"prompt": "a b " * 200_000}),
            job("tokenize", {"prompt": "a b " * rules.context_tokens}),
            job("detokenize", {"tokens": [1] * (rules.context_tokens + 1)}),
        ):
            assert (await refusal(pool, sent)).code == "context_length_exceeded"

    within(pool, work)


@pytest.mark.parametrize(
    "body", [b'"",' * 2_700_000, b"[" * 4_000_000, b'{"a":' * 1_500_000, b"[[]," * 2_000_000]
)
def test_hostile_json_does_not_stop_the_loop(rules: RequestRules, own_garbage: None, body: bytes) -> None:
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        failure = await refusal(pool, PreparationJob("chat", body, Caller(0.0)))
        assert failure.code in ("invalid_json", "invalid_value", "request_too_complex")
        assert await gaps.longest() < GAP_S

    within(pool, work)


def test_a_preparer_that_hangs_is_killed_and_its_client_gets_an_error(
    rules: RequestRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang_on(monkeypatch, "HANG", lambda: time.sleep(600))
    pool = PreparerPool(rules)
    pool.job_s = 0.5

    async def work(gaps: Gaps) -> None:
        failures = await asyncio.gather(*(refusal(pool, completion("HANG")) for _ in range(pool.num)))
        assert {(one.status, one.code, one.client_may_retry) for one in failures} == {
            (503, "overloaded", False)
        }
        pool.job_s = PATIENCE_S
        assert isinstance(await pool.prepare_body(completion("and the next one")), PreparedRequest)

    within(pool, work)


def spin() -> None:
    """Use the processor until somebody ends this process."""
    while True:
        pass


def test_a_job_has_so_much_cpu_time_and_no_more(rules: RequestRules, monkeypatch: pytest.MonkeyPatch) -> None:
    hang_on(monkeypatch, "SPIN", spin)
    monkeypatch.setattr(preparation_job, "JOB_CPU_S", 0.3)
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        failure = await refusal(pool, completion("SPIN"))
        assert (failure.status, failure.code, failure.client_may_retry) == (400, "request_too_complex", False)
        assert isinstance(await pool.prepare_body(completion("and the next one")), PreparedRequest)

    within(pool, work)


def test_a_grammar_that_cannot_be_checked_in_time_is_remembered(
    rules: RequestRules, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = tmp_path / "checks"

    def check(grammar: object, tokenizer: object) -> None:
        with checks.open("a") as file:
            file.write("x")
        spin()

    monkeypatch.setattr("services.gateway.preparation.grammar_check.check_grammar", check)
    monkeypatch.setattr(preparation_job, "GRAMMAR_CPU_S", 0.3)
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        for _ in range(3):
            failure = await refusal(pool, structured({"type": "object"}))
            assert (failure.status, failure.code, failure.client_may_retry) == (400, "invalid_schema", False)
        assert checks.read_text() == "x"

    within(pool, work)


ASKED = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
OBJECT = {"type": "object", "description": "of the route"}
TEXT_FORMAT = {"type": "json_schema", "name": "a", "schema": OBJECT}
TOOL = {"name": "f", "input_schema": OBJECT}


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("chat", ASKED | {"structured_outputs": {"json": OBJECT}}, "structured_outputs"),
        ("completion", {"model": "toy", "prompt": "x", "structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ("responses", {"model": "toy", "input": "x", "text": {"format": TEXT_FORMAT}}, "text.format"),
        (
            "messages",
            ASKED | {"output_config": {"format": {"type": "json_schema", "schema": OBJECT}}},
            "output_config.format",
        ),
        ("messages", ASKED | {"tools": [TOOL], "tool_choice": {"type": "any"}}, "tools"),
    ],
)  # fmt: skip
def test_a_grammar_that_takes_too_long_is_named_by_the_client_s_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, fields: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(
        "services.gateway.preparation.grammar_check.check_grammar", lambda grammar, tokenizer: spin()
    )
    monkeypatch.setattr(preparation_job, "GRAMMAR_CPU_S", 0.3)
    pool = PreparerPool(thinking_rules(tmp_path))

    async def work(gaps: Gaps) -> None:
        # The second one is told what the first one has found.
        for _ in range(2):
            failure = await refusal(pool, job(route, fields))
            assert (failure.code, failure.param) == ("invalid_schema", param)
            assert failure.message.startswith(f"'{param}' cannot be served")

    within(pool, work)


def test_what_is_known_about_a_grammar_is_known_to_all_preparers(
    rules: RequestRules, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = tmp_path / "checks"

    def check(grammar: object, tokenizer: object) -> None:
        with checks.open("a") as file:
            file.write("x")

    monkeypatch.setattr("services.gateway.preparation.grammar_check.check_grammar", check)
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        await pool.prepare_body(structured({"type": "object"}))
        many = (pool.prepare_body(structured({"type": "object", "description": ""})) for _ in range(2))
        await asyncio.gather(*many)
        large = structured({"type": "object"})
        await asyncio.gather(
            *(pool.prepare_body(PreparationJob("chat", large.body + b" " * 4096, Caller(0.0))) for _ in "abc")
        )
        assert checks.read_text()[:1] == "x" and len(checks.read_text()) <= 3

    within(pool, work)


def test_a_job_whose_preparer_is_killed_is_given_to_another(
    rules: RequestRules, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker = tmp_path / "came"

    def once() -> None:
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    hang_on(monkeypatch, "DIE-ONCE", once)
    hang_on(monkeypatch, "DIE-ALWAYS", lambda: os.kill(os.getpid(), signal.SIGKILL))
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        assert isinstance(await pool.prepare_body(completion("DIE-ONCE")), PreparedRequest)
        assert marker.exists()
        with pytest.raises(RuntimeError, match="status -9"):
            await pool.prepare_body(completion("DIE-ALWAYS"))
        assert isinstance(await pool.prepare_body(completion("and the next one")), PreparedRequest)

    within(pool, work)


def test_one_tenants_slow_bodies_do_not_keep_others_out(
    rules: RequestRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang_on(monkeypatch, "HANG", lambda: time.sleep(600))
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        flood = [asyncio.create_task(pool.prepare_body(completion("HANG", "a"))) for _ in range(20)]
        await asyncio.sleep(0.2)
        for _ in range(5):
            assert isinstance(await pool.prepare_body(completion("quick", "b")), PreparedRequest)
        assert not any(one.done() for one in flood)
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    within(pool, work)


def test_the_queue_is_bounded_per_tenant(
    rules: RequestRules, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hang() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    hang_on(monkeypatch, "HANG", hang)
    monkeypatch.setattr(preparer_pool, "MAX_WAITING_JOBS", 3)
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        for _ in range(pool.num):  # all have begun
            assert isinstance(await pool.prepare_body(completion("quick", "a")), PreparedRequest)
        flood = [asyncio.create_task(pool.prepare_body(completion("HANG", "a"))) for _ in range(pool.num - 1)]
        while len(list(tmp_path.iterdir())) < len(flood):
            await asyncio.sleep(TICK_S)
        pool.wait_s = 2.0
        flood += [asyncio.create_task(pool.prepare_body(completion("HANG", "a"))) for _ in range(3)]
        await asyncio.sleep(0)
        full = await refusal(pool, completion("one more", "a"))
        assert (full.status, full.code) == (429, "overloaded")
        assert isinstance(await pool.prepare_body(completion("quick", "b")), PreparedRequest)
        waited = list((await asyncio.wait(flood, timeout=4.0))[0])
        assert len(waited) == 3  # those in the queue: for too long
        assert {one.exception().failure.status for one in waited} == {503}  # type: ignore[union-attr]
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    within(pool, work)


def grow() -> None:
    bytearray(4 << 30)


def test_a_body_may_not_take_all_memory(rules: RequestRules, monkeypatch: pytest.MonkeyPatch) -> None:
    hang_on(monkeypatch, "GROW", grow)
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        failure = await refusal(pool, completion("GROW"))
        assert (failure.status, failure.code) == (413, "request_too_complex")

    within(pool, work)


def test_nothing_is_left_of_a_pool(rules: RequestRules) -> None:
    # Other tests in this process may have children that live on, for example a resource tracker.
    before = set(psutil.Process().children(recursive=True))
    pool = PreparerPool(rules)
    seen: list[psutil.Process] = []

    async def work(gaps: Gaps) -> None:
        await pool.prepare_body(completion("any"))
        seen.extend(child for child in psutil.Process().children(recursive=True) if child not in before)

    within(pool, work)
    assert len(seen) >= 2  # the fork server and a preparer; others may still be forked
    assert not psutil.wait_procs(seen, timeout=10)[1]


def test_the_end_of_the_fork_server_is_reported(rules: RequestRules) -> None:
    before = set(psutil.Process().children())
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        assert isinstance(await pool.prepare_body(completion("any")), PreparedRequest)
        [server] = [child for child in psutil.Process().children() if child not in before]
        server.kill()
        with pytest.raises(OSError):
            await pool.wait_for_failure()

    within(pool, work)
