"""A worker that changes pool without reloading, and one that is asked to end: what it holds goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import msgspec
import pytest

from diptych.messages import (
    Admit,
    Drain,
    Failed,
    Fetch,
    Generate,
    Hello,
    Offer,
    Output,
    Pulled,
    Release,
    SwitchRole,
)
from diptych.process import EXIT_RETIRED
from diptych.request import SamplingParams
from tests.system.worker_driver import PATIENCE_S, ROOT, Driver

GREEDY = SamplingParams(max_tokens=12, seed=0, temperature=0.0)
SEEDED = SamplingParams(max_tokens=12, seed=77, temperature=1.0, top_p=0.95, frequency_penalty=0.4)
DRAIN_S = 1.0
NAMES = iter(f"t{number}" for number in range(100_000))
pytestmark = pytest.mark.timeout(600)


def text(length: int, salt: int = 0) -> list[int]:
    """Some prompt of `length` token ids, other than that of another salt from its first token on."""
    return [(41 * place + 103 * salt) % 4000 + 16 for place in range(length)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A decode worker, and one that begins as a prefill worker."""
    driver = Driver(tmp_path_factory.mktemp("switch"), ROOT / "models" / "tiny")
    try:
        driver.start("prefill-0", drain_s=DRAIN_S)
        driver.start("decode-0", drain_s=PATIENCE_S)
        driver.up("prefill-0", "decode-0")
        yield driver
    finally:
        driver.close()


def switch_role(driver: Driver, worker: str, role: str) -> Hello:
    """Let a worker change pool, and wait for its new life."""
    before = driver.members[worker].hello
    driver.send(worker, SwitchRole(role))
    return driver.wait(lambda: now if (now := driver.members[worker].hello) is not before else None)


def test_a_worker_changes_pool_and_back_without_reloading(driver: Driver) -> None:
    member, prompts = driver.members["decode-0"], [text(200, salt) for salt in range(4)]
    alone = [driver.alone("decode-0", next(NAMES), prompt, SEEDED) for prompt in prompts]
    first, lines = member.hello, len(member.lines)
    assert first is not None and not first.endpoints
    driver.rest("decode-0")
    cached = member.stats.slabs_cached
    assert cached >= 4 * 3

    second = switch_role(driver, "decode-0", "prefill")
    assert (second.role, second.pid, second.num_slabs) == ("prefill", first.pid, first.num_slabs)
    assert second.incarnation != first.incarnation and set(second.endpoints) == {"shm", "nixl"}
    driver.rest("decode-0")
    assert member.stats.slabs_cached == cached  # what it knew it still knows
    third = switch_role(driver, "prefill-0", "decode")
    assert third.role == "decode" and not third.endpoints
    hits = member.stats.prefix_hits
    assert driver.peer("prefill-0", "decode-0").transport == "shm"
    for prompt, answer in zip(prompts, alone, strict=True):  # each is now what the other was
        assert driver.handed("decode-0", "prefill-0", next(NAMES), prompt, SEEDED) == answer
    driver.rest("decode-0", "prefill-0")
    assert member.stats.prefix_hits - hits == 4 * 3 * 64

    assert switch_role(driver, "decode-0", "decode").role == "decode"
    assert switch_role(driver, "prefill-0", "prefill").role == "prefill"
    assert driver.peer("decode-0", "prefill-0").transport == "shm"
    for prompt, answer in zip(prompts, alone, strict=True):
        assert driver.handed("prefill-0", "decode-0", next(NAMES), prompt, SEEDED) == answer
    driver.rest("decode-0", "prefill-0")
    reported = [line for line in member.lines[lines:] if line.get("phase") not in ("link", "ready")]
    assert reported == [{"role": "prefill"}, {"role": "decode"}]  # nothing was loaded or warmed again
    assert member.process.poll() is None


def test_a_worker_that_switches_waits_for_what_it_holds_and_says_so(driver: Driver) -> None:
    """One answer is being written, and for another one its ticket comes only when new work has been refused."""
    driver.peer("decode-0", "prefill-0")
    member, held, prompt = driver.members["decode-0"], [next(NAMES), next(NAMES)], text(150, 9)
    sampling = msgspec.structs.replace(GREEDY, max_tokens=400)
    alone = driver.alone("decode-0", next(NAMES), prompt, sampling)
    tickets = []
    for name in held:
        driver.prefill("prefill-0", name, prompt, sampling)
        tickets.append(driver.until(name, Offer).ticket)
    driver.admit("decode-0", held[0], prompt, sampling, tickets[0])
    driver.send("decode-0", Admit(held[1], 0, prompt, [], sampling, b"", PATIENCE_S))
    driver.until(held[0], Pulled)
    before, late = member.hello, next(NAMES)
    driver.send("decode-0", SwitchRole("prefill"))
    driver.send("decode-0", Generate(late, 0, prompt, [], GREEDY, PATIENCE_S))
    ending = driver.over(late)
    assert isinstance(ending, Failed) and ending.code == "draining"
    assert member.hello is before
    driver.send("decode-0", Fetch(held[1], 0, driver.tokens(held[1]), tickets[1], PATIENCE_S))
    for name in held:
        ending = driver.over(name)
        assert isinstance(ending, Output), ending
        assert driver.tokens(name) == alone
        driver.send("prefill-0", Release(name, 0))
    driver.wait(lambda: member.hello is not before)
    assert switch_role(driver, "decode-0", "decode").role == "decode"


def test_what_is_not_over_in_time_fails_as_draining_and_its_memory_is_free(driver: Driver) -> None:
    held = [next(NAMES) for _ in range(6)]
    for number, name in enumerate(held):
        driver.prefill("prefill-0", name, text(130, 20 + number), GREEDY)
    for name in held:
        driver.until(name, Offer)  # and nobody fetches it
    assert switch_role(driver, "prefill-0", "decode").role == "decode"
    for name in held:
        ending = driver.over(name)
        assert isinstance(ending, Failed) and ending.code == "draining"
    name = next(NAMES)
    driver.send("prefill-0", Admit(name, 0, text(50), [], GREEDY, b"", PATIENCE_S))  # its ticket never comes
    assert switch_role(driver, "prefill-0", "prefill").role == "prefill"
    ending = driver.over(name)
    assert isinstance(ending, Failed) and ending.code == "draining"
    driver.rest("prefill-0")


def test_a_prefill_worker_that_is_asked_to_end_waits_for_its_leases(driver: Driver) -> None:
    """Many offers under lease: all are pulled, none is computed again."""
    member = driver.start("prefill-1", drain_s=PATIENCE_S)
    driver.up("prefill-1")
    assert driver.peer("decode-0", "prefill-1").transport == "shm"
    prompts = {next(NAMES): text(100 + number, 100 + number) for number in range(30)}
    for name, prompt in prompts.items():
        driver.prefill("prefill-1", name, prompt, GREEDY)
    tickets = {name: driver.until(name, Offer).ticket for name in prompts}
    member.process.send_signal(signal.SIGTERM)
    driver.wait(lambda: member.stats.draining and member.stats.leases == len(prompts))
    for name, prompt in prompts.items():
        driver.admit("decode-0", name, prompt, GREEDY, tickets[name])
    for name in prompts:
        driver.until(name, Pulled)
        ending = driver.over(name)
        assert isinstance(ending, Output) and len(driver.tokens(name)) == GREEDY.max_tokens
    assert member.process.poll() is None
    for name in prompts:
        driver.send("prefill-1", Release(name, 0))
    assert member.process.wait(PATIENCE_S) == 0
    del driver.members["prefill-1"]


def test_one_that_the_gateway_does_not_want_any_more_says_so_with_its_exit_status(driver: Driver) -> None:
    """It comes last: it ends one of this module's workers."""
    member = driver.members["prefill-0"]
    driver.send("prefill-0", Drain())
    assert member.process.wait(PATIENCE_S) == EXIT_RETIRED
    del driver.members["prefill-0"]
