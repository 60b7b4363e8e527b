"""`diptych serve --engine vllm`: one prefill and one decode worker over HTTP give the answers of one vLLM alone."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.cli.client import admin
from services.host.vllm.interpreter import vllm_environment
from tests.support.deployment import Launched, call_at_once, serve, wait_for
from tests.support.terminal import clean_environ
from tests.vllm.conftest import MAX_RUN_S
from tests.vllm.results import REPOSITORY

ADMIN = "the key of the admin"
NEW_TOKENS = 16
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["one", "two"]}},
    "required": ["a"],
    "additionalProperties": False,
}
# By name: what the API gets, and vLLM. Grammars and penalties are drawn by the decode worker from the first token on.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {"temperature": 0.0}),
    "seeded": ({"temperature": 0.9, "seed": 7, "top_p": 0.9}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}),
    "penalised": (
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    ),
    "biased": (
        {"temperature": 0, "logit_bias": {"300": 5}},
        {"temperature": 0.0, "logit_bias": {"300": 5.0}},
    ),
    "schema": (
        {
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        },
        {"temperature": 0.0, "grammar": {"kind": "json_schema", "text": json.dumps(SCHEMA)}},
    ),
}
LENGTHS = (1, 63, 64, 65, 300, 1000)
pytestmark = pytest.mark.timeout(1800)


def made_up(length: int) -> list[int]:
    """A prompt."""
    chance = random.Random(length)
    return [chance.randrange(300, 4000) for _ in range(length)]


@pytest.fixture(scope="module")
def expected(vllm_python: str, embedded_model: str) -> dict[tuple[str, int], str]:
    """The text that one vLLM alone answers, by kind and length of the prompt."""
    cases = [(kind, length) for kind in KINDS for length in LENGTHS]
    asked = [
        (made_up(length), {"max_tokens": NEW_TOKENS, "top_k": 0, **KINDS[kind][1]}) for kind, length in cases
    ]
    environ = vllm_environment(1, clean_environ()) | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [vllm_python, "-m", "tests.vllm.reference", embedded_model],
        input=json.dumps(asked).encode(), stdout=subprocess.PIPE, env=environ, timeout=MAX_RUN_S, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    tokenizer = Tokenizer.from_file(f"{embedded_model}/tokenizer.json")
    return {case: tokenizer.decode(line["tokens"]) for case, line in zip(cases, lines, strict=True)}


@pytest.fixture(scope="module")
def served(vllm_python: str, expected: dict[tuple[str, int], str]) -> Iterator[Launched]:
    """One prefill and one decode worker, started after the reference has ended."""
    options = ("--engine", "vllm", "--vllm-python", vllm_python, "--vllm-args", "--enforce-eager")
    # A new worker loads for longer than requests wait for one by default.
    waits = ("--recovery-s", "300")
    more = ("--dtype", "float32", "--data-dir", "none", "--generation-config", "none", "--admin-key", ADMIN)
    with serve("tiny", *options, *waits, *more) as launched:
        yield Launched(launched.url, ADMIN, terminal=launched.terminal)


def complete(served: Launched, kind: str, length: int, **more: Any) -> str:
    """The text of an answer."""
    fields = dict(KINDS[kind][0])
    # OpenAI's library does not know it of completions.
    shape = fields.pop("response_format", None)
    extra = {"ignore_eos": True} if shape is None else {"response_format": shape}
    with served.client() as client:
        answer = client.completions.create(
            model="tiny", prompt=made_up(length), max_tokens=NEW_TOKENS, extra_body=extra, **fields | more
        )
    return str(answer.choices[0].text)


def switch(served: Launched, worker: str, role: str) -> None:
    admin.switch_role(served.url, ADMIN, worker, role, force=True)
    wait_for(lambda: role_of(served, worker) == role, explain=served.status)


def role_of(served: Launched, worker: str) -> str:
    [found] = [one["role"] for one in served.status()["workers"] if one["worker"] == worker]
    return str(found)


def process_ids(served: Launched) -> dict[str, int]:
    return {one["worker"]: one["pid"] for one in served.status()["workers"]}


def assert_all_right(served: Launched, expected: dict[tuple[str, int], str]) -> None:
    """All kinds, eight at a time; then nothing is held."""
    cases = list(expected)
    for first in range(0, len(cases), 8):
        some = cases[first : first + 8]
        texts = call_at_once([partial(complete, served, *case) for case in some])
        assert dict(zip(some, texts, strict=True)) == {case: expected[case] for case in some}
    wait_for(lambda: not served.held(), explain=served.held)


def test_answers_are_those_of_one_vllm(served: Launched, expected: dict[tuple[str, int], str]) -> None:
    assert all(expected.values())
    assert_all_right(served, expected)
    assert served.metric("diptych:transfer_bytes_total") > 0


def test_status_says_what_computes(served: Launched) -> None:
    engines = {one["engine"] for one in served.status()["workers"]}
    assert len(engines) == 1 and engines.pop().startswith("vllm ")
    for one in served.status()["workers"]:
        assert (
            one["stats"]["slabs_total"] > 100 and one["stats"]["buffer_slabs"] >= 32 and one["stats"]["steps"]
        )


def test_log_probabilities_and_cached_tokens(served: Launched) -> None:
    with served.client() as client:
        ask = partial(
            client.completions.create, model="tiny", prompt=made_up(200), max_tokens=3, temperature=0
        )
        first, again = ask(logprobs=2), ask(logprobs=2)
    scored: Any = first.choices[0].logprobs
    assert len(scored.token_logprobs) == 3 and all(len(top) >= 2 for top in scored.top_logprobs)
    assert again.choices[0].text == first.choices[0].text
    usage: Any = again.usage
    assert usage.prompt_tokens_details.cached_tokens >= 128


def test_roles_change_without_a_new_process(served: Launched, expected: dict[tuple[str, int], str]) -> None:
    before = process_ids(served)
    switch(served, "prefill-0", "decode")
    assert complete(served, "greedy", 300) == expected["greedy", 300]
    switch(served, "decode-0", "prefill")
    wait_for(served.ready)
    assert_all_right(served, expected)
    assert process_ids(served) == before


def test_clients_that_leave_leave_nothing(served: Launched) -> None:
    with served.client() as client:
        for length in (1, 100, 900):
            stream = client.completions.create(
                model="tiny",
                prompt=made_up(length),
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in zip(range(3), stream, strict=False):
                pass
            stream.close()
    wait_for(lambda: not served.held(), explain=served.held)


def test_a_killed_decode_worker_costs_no_greedy_answer(
    served: Launched, expected: dict[tuple[str, int], str]
) -> None:
    [decode] = [one["worker"] for one in served.status()["workers"] if one["role"] == "decode"]
    before = process_ids(served)
    with served.client(timeout=600) as client:
        stream = client.completions.create(
            model="tiny", prompt=made_up(300), max_tokens=200, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        texts = []
        for part in stream:
            texts.append(part.choices[0].text if part.choices else "")
            if len(texts) == 5:
                served.worker(decode).send_signal(signal.SIGKILL)
    assert "".join(texts).startswith(expected["greedy", 300])
    wait_for(lambda: served.ready() and process_ids(served)[decode] != before[decode], explain=served.status)
    assert_all_right(served, expected)
