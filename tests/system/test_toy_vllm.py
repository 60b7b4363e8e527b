"""A deployment of vLLM workers with a toy in vLLM's place: gateway, roles, books and changes of role as served."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer

from diptych.request import SamplingParams
from services.cli.client import admin
from tests.support.deployment import Served, call_at_once, serve_parts, wait_for
from tests.support.terminal import ROOT
from tests.support.toy_port import answer_alone

ADMIN = "the key of the admin"
NEW_TOKENS, LENGTHS = 20, (1, 63, 64, 65, 300, 1000)
# The toy ignores penalties; what they change is who draws the first token.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "penalised": {"temperature": 0, "presence_penalty": 1.5},
}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    arguments = ("tiny", "--data-dir", "none", "--generation-config", "none", "--admin-key", ADMIN)
    with serve_parts(*arguments, worker_module="tests.support.toy_vllm_process") as deployment:
        yield Served(deployment.url, ADMIN, deployment.logs)


def made_up(length: int) -> list[int]:
    chance = random.Random(length)
    return [chance.randrange(300, 4000) for _ in range(length)]


def expected(kind: str, length: int) -> str:
    fields = KINDS[kind]
    sampling = SamplingParams(NEW_TOKENS, fields.get("seed", 0), temperature=float(fields["temperature"]))
    tokens = answer_alone(made_up(length), sampling, 2048)
    return str(Tokenizer.from_file(str(ROOT / "models/tiny/tokenizer.json")).decode(tokens))


def complete(served: Served, kind: str, length: int) -> str:
    with served.client() as client:
        answer = client.completions.create(
            model="tiny", prompt=made_up(length), max_tokens=NEW_TOKENS, extra_body={"ignore_eos": True},
            **KINDS[kind],
        )  # fmt: skip
    return str(answer.choices[0].text)


def assert_all_right(served: Served) -> None:
    cases = [(kind, length) for kind in KINDS for length in LENGTHS]
    texts = call_at_once([partial(complete, served, *case) for case in cases])
    assert dict(zip(cases, texts, strict=True)) == {case: expected(*case) for case in cases}
    wait_for(lambda: not served.held(), explain=served.held)


def roles(served: Served) -> dict[str, str]:
    return {one["worker"]: one["role"] for one in served.status()["workers"]}


def switch(served: Served, worker: str, role: str) -> None:
    admin.switch_role(served.url, ADMIN, worker, role, force=True)
    wait_for(lambda: roles(served)[worker] == role, explain=served.status)


def test_answers_are_those_of_one_engine(served: Served) -> None:
    assert_all_right(served)
    assert served.metric("diptych:transfer_bytes_total") > 0
    for one in served.status()["workers"]:
        assert one["engine"] == "vllm toy, HASHES" and one["stats"]["buffer_slabs"] == 256


def test_roles_change_without_a_new_process(served: Served) -> None:
    before = {one["worker"]: one["pid"] for one in served.status()["workers"]}
    switch(served, "prefill-0", "decode")
    assert complete(served, "greedy", 300) == expected("greedy", 300)
    switch(served, "decode-0", "prefill")
    wait_for(served.ready)
    assert_all_right(served)
    assert before == {one["worker"]: one["pid"] for one in served.status()["workers"]}


def test_clients_that_leave_leave_nothing(served: Served) -> None:
    with served.client() as client:
        for length in (1, 100, 900):
            stream = client.completions.create(
                model="tiny",
                prompt=made_up(length),
                max_tokens=900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in zip(range(3), stream, strict=False):
                pass
            stream.close()
    wait_for(lambda: not served.held(), explain=served.held)
