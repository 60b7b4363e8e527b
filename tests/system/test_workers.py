"""Real worker processes: the same tokens as one undisturbed worker, and nothing left behind, whatever happens."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from diptych.messages import (
    Admit,
    Failed,
    Generate,
    Offer,
    Output,
    Peer,
    Prefill,
    Pulled,
    Release,
    Renew,
    Unpeer,
)
from diptych.request import SamplingParams
from tests.system.worker_driver import PATIENCE_S, ROOT, Driver, Member, at_rest

GREEDY = SamplingParams(max_tokens=12, seed=0, temperature=0.0)
SEEDED = SamplingParams(
    max_tokens=12, seed=77, temperature=1.0, top_p=0.95, frequency_penalty=0.4, logprobs=2
)
LONG = SamplingParams(max_tokens=400, seed=5, temperature=1.0)
PARTS = {"reserve", "transfer", "verify", "hidden", "exposed"}
NAMES = iter(f"r{number}" for number in range(100_000))
pytestmark = pytest.mark.timeout(600)  # a dozen processes that import torch, on two cores


def text(length: int, salt: int = 0) -> list[int]:
    """Some prompt of `length` token ids, other than that of another salt from its first token on."""
    return [(37 * place + 101 * salt) % 4000 + 16 for place in range(length)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One prefill worker, a decode worker over shared memory and one over NIXL."""
    folder = tmp_path_factory.mktemp("workers")
    model = folder / "tiny"
    shutil.copytree(ROOT / "models" / "tiny", model)
    driver = Driver(folder, model)
    try:
        driver.start("prefill-0")
        driver.start("decode-0")
        driver.start("decode-1", transports=("nixl",))
        driver.up("prefill-0", "decode-0", "decode-1")
        yield driver
    finally:
        driver.close()


@pytest.fixture(autouse=True)
def clean(driver: Driver) -> Iterator[None]:
    """Every test begins with both workers linked, and has to leave nothing behind."""
    assert driver.peer("decode-0", "prefill-0").transport == "shm"
    assert driver.peer("decode-1", "prefill-0").transport == "nixl"
    yield
    driver.rest("prefill-0", "decode-0", "decode-1")


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 700, 1900])
def test_two_workers_write_what_one_writes_alone(driver: Driver, length: int) -> None:
    for sampling in (GREEDY, SEEDED):
        prompt, name = text(length, 1000 + length), next(NAMES)
        alone = driver.alone("decode-0", f"{name}-alone", prompt, sampling)
        assert len(alone) == sampling.max_tokens
        assert driver.handed("prefill-0", "decode-0", f"{name}-shm", prompt, sampling) == alone
        assert driver.handed("prefill-0", "decode-1", f"{name}-nixl", prompt, sampling) == alone
        there = {"shm": length // 64, "nixl": 0 if sampling is GREEDY else length // 64}  # full chunks
        moved = {road: driver.until(f"{name}-{road}", Pulled).num_bytes for road in there}
        assert moved == {road: (-(-length // 64) - there[road]) * 64 * 6144 for road in there}


def test_a_pool_has_its_pages_soon_after_the_start(driver: Driver) -> None:
    driver.wait(
        lambda: all(_pages_bytes(member) >= 0.95 * member.spec.kv_bytes for member in driver.members.values())
    )


def _pages_bytes(member: Member) -> int:
    """Shared memory that a worker's process has mapped and that exists."""
    lines = Path(f"/proc/{member.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem"))


def test_company_changes_no_token(driver: Driver) -> None:
    prompts = {next(NAMES): text(40 + 90 * place, place) for place in range(12)}
    alone = {
        name: driver.alone("decode-1", f"{name}-alone", prompt, SEEDED) for name, prompt in prompts.items()
    }
    for name, prompt in prompts.items():
        driver.prefill("prefill-0", name, prompt, SEEDED)
    for name, prompt in prompts.items():
        driver.admit("decode-0", name, prompt, SEEDED, driver.until(name, Offer).ticket)
    for name in prompts:
        driver.until(name, Pulled)
        driver.send("prefill-0", Release(name, 0))
    for name in prompts:
        driver.over(name)
    assert {name: driver.tokens(name) for name in prompts} == alone


def test_the_first_token_comes_before_the_offer_and_the_pull_before_the_second(driver: Driver) -> None:
    name, prompt = next(NAMES), text(300)
    driver.handed("prefill-0", "decode-0", name, prompt, GREEDY)
    kinds = [type(word) for _, word in driver.words[name]]
    assert kinds == [Output, Offer, Pulled] + [Output] * (GREEDY.max_tokens - 1)
    first, second = driver.word(name, 0)[1], driver.word(name, 3)[1]
    assert isinstance(first, Output) and set(first.seconds) == {"queue", "prefill"}
    assert isinstance(second, Output) and set(second.seconds) == {"decode_queue", "decode_first"}
    assert set(driver.until(name, Pulled).seconds) == PARTS


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_nothing_moves_when_the_first_token_is_the_last(driver: Driver, max_tokens: int) -> None:
    name = next(NAMES)
    driver.prefill("prefill-0", name, text(100), msgspec.structs.replace(GREEDY, max_tokens=max_tokens))
    ending = driver.over(name)
    assert isinstance(ending, Output) and (ending.finish, len(ending.tokens)) == ("length", max_tokens)
    driver.rest("prefill-0")
    assert len(driver.words[name]) == 1


def test_a_later_attempt_goes_on_where_the_first_one_ended(driver: Driver) -> None:
    name, prompt = next(NAMES), text(130)
    alone = driver.alone("decode-0", f"{name}-alone", prompt, SEEDED)
    driver.words[name] = [("before", Output(name, 0, alone[:5]))]
    driver.prefill("prefill-0", name, prompt, SEEDED, epoch=1, output=alone[:5])
    ticket = driver.until(name, Offer).ticket
    driver.admit("decode-0", name, prompt, SEEDED, ticket, epoch=1)
    driver.over(name)
    driver.send("prefill-0", Release(name, 1))
    assert driver.tokens(name) == alone


# ---- endings that nobody planned


def test_aborts_at_random_moments_leave_nothing_and_disturb_nobody(driver: Driver) -> None:
    dice = random.Random(7)
    witness, prompt = next(NAMES), text(200, 3)
    alone = driver.alone("decode-0", f"{witness}-alone", prompt, LONG)
    driver.prefill("prefill-0", witness, prompt, LONG)
    driver.admit("decode-0", witness, prompt, LONG, driver.until(witness, Offer).ticket)
    for _ in range(60):
        name, target = next(NAMES), dice.choice(["decode-0", "decode-1"])
        long_prompt = text(dice.choice([30, 200, 1500]), dice.randrange(100))
        driver.prefill("prefill-0", name, long_prompt, LONG)
        if dice.random() < 0.7:
            driver.admit(target, name, long_prompt, LONG, driver.until(name, Offer).ticket)
        time.sleep(dice.choice([0, 0, 0.0005, 0.002, 0.01, 0.05]))
        driver.abort(name, "prefill-0", target)
    driver.until(witness, Pulled)
    driver.send("prefill-0", Release(witness, 0))
    driver.over(witness)
    assert driver.tokens(witness) == alone


def test_nothing_is_said_about_a_request_after_its_abort(driver: Driver) -> None:
    name = next(NAMES)
    driver.send("decode-0", Generate(name, 0, text(50), [], LONG, PATIENCE_S))
    driver.word(name)
    driver.abort(name, "decode-0")
    driver.alone("decode-0", next(NAMES), text(50), GREEDY)  # messages keep their order: it has been obeyed
    words = list(driver.words[name])
    driver.alone("decode-0", next(NAMES), text(50), GREEDY)
    assert driver.words[name] == words and not any(isinstance(word, Failed) for _, word in words)


@pytest.mark.parametrize("target", ["decode-0", "decode-1"])
def test_no_byte_of_a_damaged_ticket_is_believed(driver: Driver, target: str) -> None:
    name, prompt = next(NAMES), text(200)
    driver.prefill("prefill-0", name, prompt, GREEDY)
    ticket = driver.until(name, Offer).ticket
    damaged = [ticket[:-1], ticket[:1], ticket + b"\0"]
    damaged += [ticket[:at] + bytes([ticket[at] ^ 1]) + ticket[at + 1 :] for at in range(0, len(ticket), 7)]
    for raw in damaged:
        copy = next(NAMES)
        driver.words[copy] = list(driver.words[name][:1])
        driver.admit(target, copy, prompt, GREEDY, raw)
        ending = driver.over(copy)
        assert isinstance(ending, Failed) and ending.code == "transfer_failed"
    driver.abort(name, "prefill-0")


def test_a_ticket_serves_only_what_it_was_made_for(driver: Driver) -> None:
    name, foreign, prompt = next(NAMES), next(NAMES), text(200)
    driver.prefill("prefill-0", name, prompt, GREEDY)
    ticket, first = driver.until(name, Offer).ticket, driver.tokens(name)
    orders = {
        "request": Admit(foreign, 0, prompt, first, GREEDY, ticket, PATIENCE_S),
        "epoch": Admit(name, 1, prompt, first, GREEDY, ticket, PATIENCE_S),
        "num_tokens": Admit(name, 2, prompt[:-1], first, GREEDY, ticket, PATIENCE_S),
    }
    for field, order in orders.items():
        driver.words[order.request] = []
        driver.send("decode-0", order)
        ending = driver.over(order.request)
        assert isinstance(ending, Failed) and ending.code == "stale_ticket", (field, ending)
    driver.abort(name, "prefill-0")


def test_an_older_attempt_is_fenced_off(driver: Driver) -> None:
    name, prompt = next(NAMES), text(150)
    alone = driver.alone("decode-0", f"{name}-alone", prompt, GREEDY)
    before = {worker: driver.members[worker].stats.late_messages for worker in ("prefill-0", "decode-0")}
    driver.prefill("prefill-0", name, prompt, GREEDY)
    old = driver.until(name, Offer).ticket
    driver.words[name] = []
    driver.prefill("prefill-0", name, prompt, GREEDY, epoch=1)
    new = driver.until(name, Offer).ticket
    driver.send("prefill-0", Release(name, 0))  # late: it must not free what the second attempt holds
    driver.abort(name, "prefill-0")
    driver.prefill("prefill-0", name, prompt, GREEDY)  # late as well
    driver.admit("decode-0", name, prompt, GREEDY, new, epoch=1)
    driver.admit("decode-0", name, prompt, GREEDY, old)  # late: the first attempt is over
    driver.over(name)
    assert driver.tokens(name) == alone
    driver.send("prefill-0", Release(name, 1))
    driver.rest("prefill-0", "decode-0")
    late = {worker: driver.members[worker].stats.late_messages - before[worker] for worker in before}
    assert late == {"prefill-0": 3, "decode-0": 1}


def test_what_the_engine_refuses_fails_alone(driver: Driver) -> None:
    bad = SamplingParams(max_tokens=5, seed=0, logit_bias={10**6: 1.0}, temperature=0.0)
    orders: list[Generate | Prefill] = [
        Generate(next(NAMES), 0, [5, 10**7, 5], [], GREEDY, PATIENCE_S),  # no such token
        Generate(next(NAMES), 0, [], [], GREEDY, PATIENCE_S),
        Generate(next(NAMES), 0, text(5000), [], GREEDY, PATIENCE_S),
        Generate(next(NAMES), 0, text(5), [], bad, PATIENCE_S),
        Prefill(next(NAMES), 0, text(5), [], GREEDY, PATIENCE_S),  # not this role's work
    ]
    name, prompt = next(NAMES), text(80)
    alone = driver.alone("decode-1", f"{name}-alone", prompt, LONG)
    driver.send("decode-0", Generate(name, 0, prompt, [], LONG, PATIENCE_S))
    for order in orders:
        driver.send("decode-0", order)
        ending = driver.over(order.request)
        assert isinstance(ending, Failed) and ending.code == "internal_error", ending
    driver.over(name)
    assert driver.tokens(name) == alone


def test_time_that_is_up_ends_a_request(driver: Driver) -> None:
    name, prompt = next(NAMES), text(1000)
    driver.prefill("prefill-0", name, prompt, GREEDY, remaining_s=0.0)
    ending = driver.over(name)
    assert isinstance(ending, Failed) and ending.code == "deadline_exceeded"
    late = next(NAMES)
    driver.send(
        "decode-0", Generate(late, 0, prompt, [], msgspec.structs.replace(LONG, max_tokens=1000), 0.3)
    )
    ending = driver.over(late)
    assert isinstance(ending, Failed) and ending.code == "deadline_exceeded"


def test_a_link_that_is_dropped_fails_and_can_be_made_again(driver: Driver) -> None:
    (hello,) = driver.up("prefill-0")
    driver.send("decode-0", Unpeer("prefill-0", "some other life"))
    name, prompt = next(NAMES), text(100)
    alone = driver.handed("prefill-0", "decode-0", name, prompt, GREEDY)
    driver.send("decode-0", Unpeer("prefill-0", hello.incarnation))
    again = next(NAMES)
    driver.prefill("prefill-0", again, prompt, GREEDY)
    driver.admit("decode-0", again, prompt, GREEDY, driver.until(again, Offer).ticket)
    ending = driver.over(again)
    assert isinstance(ending, Failed) and ending.code == "stale_ticket"
    driver.abort(again, "prefill-0")
    driver.links.clear()
    driver.send("decode-0", Peer("prefill-0", hello.incarnation, {"shm": b"nonsense"}))
    linked = driver.wait(lambda: driver.links.get(("decode-0", "prefill-0")))
    assert (linked.transport, "shm" in linked.error) == ("", True)
    assert driver.peer("decode-0", "prefill-0").transport == "shm"
    assert driver.handed("prefill-0", "decode-0", next(NAMES), prompt, GREEDY) == alone


# ---- processes that vanish


def test_a_gateway_that_vanishes_leaves_no_orphans(driver: Driver) -> None:
    workers = ("prefill-0", "decode-0", "decode-1")
    kept, moved, young = next(NAMES), next(NAMES), next(NAMES)
    endless = msgspec.structs.replace(LONG, max_tokens=1500)
    driver.prefill("prefill-0", kept, text(300), LONG)
    driver.prefill("prefill-0", moved, text(400), endless)
    driver.until(kept, Offer)
    driver.admit("decode-0", moved, text(400), endless, driver.until(moved, Offer).ticket)
    driver.send("decode-1", Generate(young, 0, text(300), [], endless, PATIENCE_S))
    driver.word(young)
    driver.until(moved, Pulled)
    began = {name: driver.members[name].process.pid for name in workers}
    driver.lose()
    driver.open("another gateway")
    driver.up(*workers)
    driver.rest(*workers)
    assert {name: driver.members[name].process.pid for name in workers} == began
    assert driver.peer("decode-0", "prefill-0").transport == "shm"
    driver.handed("prefill-0", "decode-0", next(NAMES), text(100), GREEDY)


def test_a_killed_prefill_worker_fails_what_it_held(driver: Driver) -> None:
    targets = ("decode-0", "decode-1")
    driver.start("prefill-1")
    (hello,) = driver.up("prefill-1")
    prompts = {target: text(500, 500 + number) for number, target in enumerate(targets)}
    names, alone, tickets = {}, {}, {}
    for target, prompt in prompts.items():
        assert driver.peer(target, "prefill-1").transport
        name = names[target] = next(NAMES)
        alone[target] = driver.alone("decode-0", f"{name}-alone", prompt, GREEDY)
        driver.prefill("prefill-1", name, prompt, GREEDY)
        tickets[target] = driver.until(name, Offer).ticket
    driver.kill("prefill-1")
    for target, name in names.items():
        driver.admit(target, name, prompts[target], GREEDY, tickets[target])
        ending = driver.over(name)
        if target == "decode-0":  # shared memory outlives its owner for as long as it is mapped
            assert isinstance(ending, Output) and driver.tokens(name) == alone[target]
        else:
            assert isinstance(ending, Failed) and ending.code == "transfer_failed"
        driver.rest(target)
    driver.start("prefill-1")
    (second,) = driver.up("prefill-1")
    assert second.incarnation != hello.incarnation
    for target, prompt in prompts.items():
        assert driver.peer(target, "prefill-1").transport
        assert driver.handed("prefill-1", target, next(NAMES), prompt, GREEDY) == alone[target]
    driver.kill("prefill-1")
    for target, prompt in prompts.items():
        driver.send(target, Unpeer("prefill-1", second.incarnation))
        assert driver.handed("prefill-0", target, next(NAMES), prompt, GREEDY) == alone[target]


def test_a_lease_that_nobody_renews_ends_and_its_memory_is_safe_to_reuse(driver: Driver) -> None:
    driver.start("prefill-2", lease_s=6.0)
    driver.up("prefill-2")
    assert driver.peer("decode-0", "prefill-2").transport == "shm"
    name, prompt = next(NAMES), text(200, 1)
    driver.prefill("prefill-2", name, prompt, GREEDY)
    ticket = driver.until(name, Offer).ticket
    for _ in range(14):  # for longer than a lease
        driver.send("prefill-2", Renew([(name, 0)]))
        time.sleep(0.5)
    member = driver.members["prefill-2"]
    assert (member.stats.leases, member.stats.leases_expired) == (1, 0)
    driver.rest("prefill-2")
    assert member.stats.leases_expired == 1
    other = next(NAMES)
    driver.prefill("prefill-2", other, text(200, 2), GREEDY)  # takes the same slabs
    driver.until(other, Offer)
    before = driver.members["decode-0"].stats.integrity_failures
    driver.admit("decode-0", name, prompt, GREEDY, ticket)
    ending = driver.over(name)
    assert isinstance(ending, Failed) and ending.code == "kv_corrupt"
    driver.rest("decode-0", "prefill-2")
    assert driver.members["decode-0"].stats.integrity_failures == before + 1
    driver.members["prefill-2"].process.send_signal(signal.SIGTERM)
    assert driver.members["prefill-2"].process.wait(PATIENCE_S) == 0


def test_a_full_decode_pool_makes_requests_wait_and_a_killed_one_starts_anew(driver: Driver) -> None:
    room = 8 * 64 * 6144  # 8 slabs: one request of 512 tokens
    driver.start("decode-2", kv_bytes=room, max_model_len=512)
    driver.up("decode-2")
    assert driver.peer("decode-2", "prefill-0").transport == "shm"
    sampling = msgspec.structs.replace(GREEDY, max_tokens=200)
    prompts = {next(NAMES): text(250, 3000 + number) for number in range(4)}  # 8 slabs each at the end
    alone = {}
    for name, prompt in prompts.items():
        alone[name] = driver.alone("decode-0", next(NAMES), prompt, sampling)
        driver.prefill("prefill-0", name, prompt, sampling)
    for name, prompt in prompts.items():
        driver.admit("decode-2", name, prompt, sampling, driver.until(name, Offer).ticket)
    left = list(prompts)
    driver.abort(left.pop(2), "decode-2", "prefill-0")  # while it waits for room
    for name in left:
        driver.over(name)
        driver.send("prefill-0", Release(name, 0))
        assert driver.tokens(name) == alone[name]
    first_s, *others_s = (driver.until(name, Pulled).seconds["reserve"] for name in left)
    assert first_s < min(others_s)
    (first,) = driver.up("decode-2")
    driver.send("decode-2", Generate(next(NAMES), 0, text(400), [], sampling, PATIENCE_S))
    driver.kill("decode-2")  # at work
    driver.start("decode-2", kv_bytes=room, max_model_len=512)
    (second,) = driver.up("decode-2")
    assert second.incarnation != first.incarnation
    assert driver.peer("decode-2", "prefill-0").transport == "shm"
    assert driver.handed("prefill-0", "decode-2", next(NAMES), prompts[left[0]], sampling) == alone[left[0]]
    driver.rest("decode-2")


def test_a_full_prefill_pool_makes_prompts_wait_and_a_full_queue_refuses(driver: Driver) -> None:
    driver.start("prefill-3", kv_bytes=8 * 64 * 6144, max_model_len=512)
    driver.up("prefill-3")
    held, waits = next(NAMES), next(NAMES)
    driver.prefill("prefill-3", held, text(500), GREEDY)
    driver.until(held, Offer)
    crowd = [next(NAMES) for _ in range(1030)]
    for name in (waits, *crowd):
        driver.prefill("prefill-3", name, text(70), GREEDY)
    refused = [driver.over(name) for name in crowd[-7:]]
    assert all(isinstance(ending, Failed) and ending.code == "overloaded" for ending in refused)
    assert waits not in driver.words
    driver.abort(held, "prefill-3")
    driver.until(waits, Offer)
    for name in (waits, *crowd):
        driver.abort(name, "prefill-3")
    driver.rest("prefill-3")


def test_a_worker_that_is_asked_to_end_drains(driver: Driver) -> None:
    member = driver.start("prefill-4", drain_s=PATIENCE_S)
    driver.up("prefill-4")
    assert driver.peer("decode-0", "prefill-4").transport == "shm"
    name, prompt, refused = next(NAMES), text(300), next(NAMES)
    alone = driver.alone("decode-0", f"{name}-alone", prompt, GREEDY)
    driver.prefill("prefill-4", name, prompt, GREEDY)
    ticket = driver.until(name, Offer).ticket
    member.process.send_signal(signal.SIGTERM)
    while True:  # the signal and the message take different ways
        driver.prefill("prefill-4", refused, prompt, GREEDY)
        ending = driver.word(refused)[1]
        if isinstance(ending, Failed):
            break
        driver.abort(refused, "prefill-4")
        refused = next(NAMES)
    assert ending.code == "draining"
    driver.admit("decode-0", name, prompt, GREEDY, ticket)
    driver.over(name)
    assert driver.tokens(name) == alone
    assert member.process.poll() is None
    driver.send("prefill-4", Release(name, 0))
    assert member.process.wait(PATIENCE_S) == 0


def test_stats_add_up(driver: Driver) -> None:
    before = driver.members["decode-1"].stats
    prompt = text(100, 2000)
    for _ in range(2):
        driver.alone("decode-1", next(NAMES), prompt, GREEDY)
    driver.rest("decode-1")
    after = driver.members["decode-1"].stats
    assert at_rest(after)
    grown = {book: getattr(after, book) - getattr(before, book) for book in ("steps", "step_tokens")}
    assert grown == {"steps": 24, "step_tokens": 100 + 36 + 2 * 11}  # of 12 tokens each
    assert after.prefix_queries - before.prefix_queries == 2 * (after.prefix_hits - before.prefix_hits) == 128
    assert sum(after.step_parts.values()) == pytest.approx(after.step_seconds)
    assert after.step_seconds > before.step_seconds
