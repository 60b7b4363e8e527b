"""Whole deployments on the emulated device: tokens are those of a CPU worker, whatever happens, and no KV is left.

A token may differ where the CPU worker's two best log-probabilities lie within `NEAR_TIE`: sums round differently.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from services.cli.client import admin
from tests.support.deployment import Launched, Served, call_at_once, serve, serve_parts, wait_for
from tests.system.failing_device import fail_file
from tests.system.transformers_oracle import read_text

NEAR_TIE = 1e-3
NEW_TOKENS, LONG_ANSWER, LONGEST_ANSWER = 12, 80, 240
ADMIN = "the key of the admin"
EMULATED = ("tiny", "--device", "emulated", "--dtype", "float32", "--data-dir", "none")
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200, 400, 511, 512, 513, 800, 1025, 1900)
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "filtered": {"temperature": 1.2, "seed": 8, "top_p": 0.8, "extra_body": {"top_k": 40, "min_p": 0.02}},
    "penalised": {"temperature": 0.9, "seed": 9, "presence_penalty": 0.3, "frequency_penalty": 0.2},
}
pytestmark = pytest.mark.timeout(600)


class Reference(NamedTuple):
    """An answer of a CPU worker: its tokens, and how far its two best log-probabilities lie apart at each."""

    tokens: list[str]
    gaps: list[float]

    def explains(self, text: str) -> bool:
        """Whether `text` is this answer, or leaves it where two tokens are nearly as likely."""
        at = 0
        for token, gap in zip(self.tokens, self.gaps, strict=True):
            if not text.startswith(token, at):
                return gap <= NEAR_TIE
            at += len(token)
        return at == len(text)


def decode_stats(served: Served) -> list[dict[str, Any]]:
    """The statistics of the decode workers."""
    return [one["stats"] for one in served.status()["workers"] if one["role"] == "decode"]


def ask(
    served: Served,
    prompt: list[int],
    kind: str,
    num_tokens: int = NEW_TOKENS,
    priority: int = 0,
    **more: Any,
) -> Any:
    """The choice that answers a prompt."""
    sampling, fixed = SAMPLING[kind], {"ignore_eos": True, "skip_special_tokens": False}
    body = fixed | {"priority": priority} | sampling.get("extra_body", {})
    with served.client() as client:
        done = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=num_tokens, **{**sampling, **more, "extra_body": body}
        )
    return done.choices[0]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    text, rng = read_text(), random.Random(3)
    starts = [rng.randrange(len(text) - n) for n in LENGTHS]
    return [text[start : start + n] for start, n in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> dict[str, list[Reference]]:
    """What one CPU worker answers; of "greedy" long answers too, and longer ones to a few prompts."""

    def refer(served: Served, prompt: list[int], kind: str, num_tokens: int) -> Reference:
        shown = ask(served, prompt, kind, num_tokens, logprobs=2).logprobs
        best = [sorted(top.values(), reverse=True)[:2] for top in shown.top_logprobs]
        return Reference(list(shown.tokens), [first - second for first, second in best])

    found: dict[str, list[Reference]] = {}
    with serve_parts("tiny", "--colocated", "1", "--data-dir", "none") as served:
        for kind in SAMPLING:
            found[kind] = call_at_once([partial(refer, served, one, kind, NEW_TOKENS) for one in prompts])
        found["long"] = call_at_once(
            [partial(refer, served, one, "greedy", LONG_ANSWER) for one in prompts[:8]]
        )
        found["longest"] = call_at_once(
            [partial(refer, served, one, "greedy", LONGEST_ANSWER) for one in prompts[2:8]]
        )
    return found


@pytest.fixture(scope="module")
def pools() -> Iterator[Launched]:
    """Two pools of two workers each, by `diptych serve`."""
    with serve(*EMULATED, "--prefill", "2", "--decode", "2", "--admin-key", ADMIN) as served:
        yield served


def unexplained(served: Served, prompts: list[list[int]], kind: str, wanted: list[Reference]) -> list[int]:
    """The lengths of prompts whose answers, all asked for at once, are not those that are wanted."""
    answers = call_at_once([partial(ask, served, one, kind) for one in prompts])
    pairs = zip(prompts, answers, wanted, strict=True)
    return [len(prompt) for prompt, answer, one in pairs if not one.explains(answer.text)]


def answer_beside(served: Served, prompts: list[list[int]], order: Callable[[], None]) -> list[str]:
    """Long answers to the first prompts, during which an order is given, once most of them are being answered."""

    def give_order() -> str:
        wait_for(lambda: served.status()["open_requests"] >= 6, pause_s=0.01)
        order()
        return ""

    def answer(prompt: list[int]) -> str:
        return str(ask(served, prompt, "greedy", LONG_ANSWER).text)

    calls: list[Callable[[], str]] = [give_order, *(partial(answer, one) for one in prompts[:8])]
    return call_at_once(calls)[1:]


def all_up(served: Served) -> bool:
    """Whether all workers are there and linked."""
    state = served.status()
    there = {one["worker"] for one in state["workers"] if one["state"] == "up"}
    return bool(state["ready"] and not state["reasons"]) and there == set(WORKERS)


def rests(served: Served) -> None:
    """Wait until no KV is held on devices or in buffers."""
    wait_for(lambda: not served.held(), explain=served.held)


@pytest.mark.parametrize("kind", SAMPLING)
def test_answers_are_those_of_a_cpu_worker(
    pools: Launched, prompts: list[list[int]], expected: dict[str, list[Reference]], kind: str
) -> None:
    assert unexplained(pools, prompts, kind, expected[kind]) == []
    rests(pools)


def test_kv_went_through_the_buffers(pools: Launched) -> None:
    state = pools.status()
    assert {one["kv_classes"]["raw"]["slabs"] for one in state["workers"]} == {512}
    assert all(one["stats"]["buffer_slabs"] == 128 for one in state["workers"])
    prefill = [one for one in state["workers"] if one["role"] == "prefill"]
    assert any(one["stats"]["buffer_cached"] for one in prefill)
    assert pools.metric("diptych:transfer_bytes_total") > 0


@pytest.mark.parametrize("killed", WORKERS)
def test_a_killed_worker_loses_no_request(
    pools: Launched, prompts: list[list[int]], expected: dict[str, list[Reference]], killed: str
) -> None:
    wait_for(lambda: all_up(pools))
    process = pools.worker(killed)

    texts = answer_beside(pools, prompts, lambda: os.kill(process.pid, signal.SIGKILL))
    wrong = [text for text, one in zip(texts, expected["long"], strict=True) if not one.explains(text)]
    assert not wrong
    wait_for(lambda: all_up(pools) and pools.worker(killed).pid != process.pid)
    rests(pools)


def test_a_worker_that_changes_pool_reloads_nothing(
    pools: Launched, prompts: list[list[int]], expected: dict[str, list[Reference]]
) -> None:
    wait_for(lambda: all_up(pools))
    before = pools.worker("decode-1").pid

    def has_role(role: str) -> bool:
        # The worker leaves the list for a moment between its roles.
        roles = {one["worker"]: one["role"] for one in pools.status()["workers"]}
        return roles.get("decode-1") == role and all_up(pools)

    for role in ("prefill", "decode"):
        admin.switch_role(pools.url, ADMIN, "decode-1", role, False)
        wait_for(partial(has_role, role))
        assert unexplained(pools, prompts, "greedy", expected["greedy"]) == []
        assert pools.worker("decode-1").pid == before
        rests(pools)


def test_a_drained_worker_finishes_what_it_has(
    pools: Launched, prompts: list[list[int]], expected: dict[str, list[Reference]]
) -> None:
    wait_for(lambda: all_up(pools))

    def drain() -> None:
        for worker in ("prefill-1", "decode-1"):
            admin.drain_worker(pools.url, ADMIN, worker, False)

    texts = answer_beside(pools, prompts, drain)
    assert all(one.explains(text) for text, one in zip(texts, expected["long"], strict=True))
    wait_for(lambda: {one["worker"] for one in pools.status()["workers"]} == {"prefill-0", "decode-0"})
    rests(pools)


def test_a_buffer_for_one_request_makes_others_wait(
    prompts: list[list[int]], expected: dict[str, list[Reference]]
) -> None:
    """12 MiB hold a request of 2,048 tokens: 32 chunks of 384 KiB."""
    sizes = ("--transfer-buffer-bytes", "12MiB", "--kv-cache-memory-bytes", "48MiB")
    with serve_parts(*EMULATED, *sizes) as served:
        assert all(one["stats"]["buffer_slabs"] == 32 for one in served.status()["workers"])
        for kind in ("greedy", "seeded"):
            assert unexplained(served, prompts, kind, expected[kind]) == []
        rests(served)


def test_preempted_kv_waits_in_host_memory(
    prompts: list[list[int]], expected: dict[str, list[Reference]]
) -> None:
    """An urgent request with 13 of the 16 chunks of a pool of 6 MiB takes the room of six that are being answered."""
    sizes = ("--kv-cache-memory-bytes", "6MiB", "--max-model-len", "1024", "--swap-space", "32MiB")
    with serve_parts(*EMULATED, *sizes) as served:
        others = [partial(ask, served, one, "greedy", LONGEST_ANSWER, priority=5) for one in prompts[2:8]]
        place = LENGTHS.index(800)

        def ask_urgently() -> Any:
            wait_for(lambda: sum(stats["slabs_used"] for stats in decode_stats(served)) > 8, pause_s=0.01)
            return ask(served, prompts[place], "greedy", priority=-5)

        calls: list[Callable[[], Any]] = [ask_urgently, *others]
        urgent, *answers = call_at_once(calls)
        assert expected["greedy"][place].explains(urgent.text)
        assert all(one.explains(two.text) for one, two in zip(expected["longest"], answers, strict=True))
        rests(served)
        (stats,) = decode_stats(served)
        assert stats["preemptions"].get("park", 0) >= 1


@pytest.fixture(scope="module")
def failing() -> Iterator[Served]:
    """One pair, whose devices fail when a test asks for it."""
    module = "tests.system.failing_device"
    with serve_parts(*EMULATED, "--local-prefill", "never", worker_module=module) as served:
        yield served


@pytest.mark.parametrize(
    ("part", "worker", "length"),
    [
        ("runner", "prefill-0", 400),
        ("runner", "decode-0", 511),
        ("sampler", "decode-0", 512),
        ("download", "prefill-0", 513),
        ("upload", "decode-0", 800),
    ],
)
def test_a_device_that_fails_again_and_again_is_no_request_s_fault(
    failing: Served,
    prompts: list[list[int]],
    expected: dict[str, list[Reference]],
    part: str,
    worker: str,
    length: int,
) -> None:
    """A request that is alone at two crashes of a worker, without a token between them, would be quarantined."""
    before, place = failing.worker(worker).pid, LENGTHS.index(length)
    assert failing.logs is not None
    asked = fail_file(failing.logs.parent, part, worker)
    asked.write_text("2")
    assert expected["greedy"][place].explains(ask(failing, prompts[place], "greedy").text)
    assert asked.read_text() == "0" and failing.worker(worker).pid != before
    assert failing.status()["quarantined"] == 0
    rests(failing)
