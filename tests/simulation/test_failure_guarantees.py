"""What docs/failures.md promises, in virtual time: with room to recover no client sees a fault at all."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from diptych.chunks import RAW_CLASS
from diptych.request import Grammar, SamplingParams, Tenancy
from engine.sequence import Sequence
from kvtransfer.digests import ChunkDigester
from prefill_worker.worker import PrefillWorker
from tests.simulation.faults import ClientLoad, ClientMix
from tests.simulation.gateway import VirtualClient
from tests.simulation.storms import CALM_CLIENTS, SPELL_S, failed_ends, run_spell
from tests.simulation.virtual_laws import InvariantBroken, InvariantChecker, settle_world
from tests.simulation.virtual_model import CODED, POISON
from tests.simulation.world import PATIENCE_S, VirtualWorld, random_sampling

DAMAGES = ["kill", "drain", "command", "reset", "stop", "cut", "stall", "slow", "throttle"]


def _is_over(world: VirtualWorld, until_s: float) -> bool:
    return world.agenda.now_s >= until_s


def test_with_a_spare_no_client_sees_that_a_worker_is_lost() -> None:
    """One worker at a time is killed, stopped, cut off, drained: every answer is whole, and right."""
    retried: list[str] = []
    for seed in range(3):
        kv_class = CODED if seed == 1 else RAW_CLASS
        world = VirtualWorld(
            seed, *[(2, 2), (2, 2), (0, 2)][seed % 3], shared=seed % 2 == 0, kv_class=kv_class
        )
        run_spell(world, seed, CALM_CLIENTS, DAMAGES, 2 * SPELL_S)
        assert failed_ends(world) == {}, f"seed {seed}"
        retried += [code for client in world.clients for code in client.retried]
    assert len(retried) > 10 and "worker_lost" in retried, "workers were lost in the middle of their work"


@pytest.mark.parametrize("seed", range(3))
def test_without_a_spare_requests_wait_for_the_worker_that_is_started_again(seed: int) -> None:
    world = VirtualWorld(seed, *[(1, 1), (0, 1)][seed % 2])
    run_spell(world, seed, CALM_CLIENTS, ["kill", "drain", "reset"])
    assert failed_ends(world) == {}
    assert any(client.moved_on for client in world.clients), "streams were cut in the middle"


def test_a_decode_worker_that_is_to_drain_waits_for_those_on_the_way_to_it() -> None:
    """There is no other; nothing is read twice."""
    for moment in range(20):
        world = VirtualWorld(moment, 1, 1)
        laws, rng = InvariantChecker(world), Random(moment)
        assert world.run(lambda world=world: world.whole, 5.0)  # type: ignore[misc]
        prompt = [rng.randrange(POISON) for _ in range(230)]
        client = world.ask(prompt, SamplingParams(max_tokens=20, seed=1), Tenancy(), PATIENCE_S)
        ordered_s = world.agenda.now_s + moment * 0.001
        world.agenda.schedule_at(ordered_s, lambda world=world: world.command("decode-0"), "blow")  # type: ignore[misc]
        settle_world(world, laws)
        assert (client.end, client.retried, world.faults["command"]) == ("length", [], 1), moment


@pytest.mark.parametrize("pools", [(2, 2), (0, 2), (1, 1)], ids=lambda pools: f"{pools[0]}P{pools[1]}D")
@pytest.mark.parametrize("grammar", [None, Grammar("lark", "1009")])
@pytest.mark.parametrize("kv_class", [RAW_CLASS, CODED])
def test_an_answer_cut_anywhere_goes_on_exactly(
    pools: tuple[int, int], grammar: Grammar | None, kv_class: str
) -> None:
    """Its decode worker dies after each of these tokens: the first, those at the ends of chunks, the last but one."""
    for delivered in (1, 2, 33, 34, 35, 98, 99):
        client, wanted = cut_and_continue(
            VirtualWorld(delivered, *pools, kv_class=kv_class), delivered, grammar
        )
        assert (client.got, client.end) == client.wanted
        early = (
            delivered == 1 or len(wanted) <= delivered
        )  # the decode worker may not have received it yet, or no more
        assert early or client.retried == ["worker_lost"]


def cut_and_continue(
    world: VirtualWorld, delivered: int, grammar: Grammar | None
) -> tuple[VirtualClient, list[int]]:
    """One request, whose decode worker dies when so many tokens were delivered, and what it should answer."""
    laws, rng = InvariantChecker(world), Random(delivered)
    assert world.run(lambda: world.whole, 5.0)
    prompt = [rng.randrange(POISON) for _ in range(94)]  # the 34th token fills a chunk
    asked = SamplingParams(max_tokens=100, seed=5, grammar=grammar, frequency_penalty=0.5)
    client = world.ask(prompt, asked, Tenancy(), PATIENCE_S)
    world.run(lambda: len(client.got) >= delivered or client.end is not None, 30.0, laws.check_running)
    if client.end is None:
        choice = world.relay.live[client.name].pair
        assert choice is not None
        world.kill(choice.decode)
    settle_world(world, laws)
    return client, client.wanted[0]


def test_without_leave_to_read_locally_a_client_learns_when_to_come_back() -> None:
    """With leave, the same request is answered by a decode worker."""
    for allowed, end in (("never", "no_workers"), ("fallback", "length")):
        world = VirtualWorld(1, 1, 1, local_prefill=allowed)
        laws = InvariantChecker(world)
        assert world.run(lambda world=world: world.whole, 5.0)  # type: ignore[misc]
        world.stop("prefill-0", 45.0)
        world.run(lambda world=world: "prefill-0" not in world.relay.fleet.workers, 15.0)  # type: ignore[misc]
        client = world.ask([1, 2, 3], SamplingParams(max_tokens=5, seed=1), Tenancy(), PATIENCE_S)
        settle_world(world, laws)
        assert client.end == end
        assert allowed == "fallback" or (client.retry and client.retry_after_s)


def test_kv_of_the_prompt_that_survives_is_not_computed_again() -> None:
    world = VirtualWorld(1, 1, 2)
    laws, rng = InvariantChecker(world), Random(1)
    assert world.run(lambda: world.whole, 5.0)
    prompt = [rng.randrange(POISON) for _ in range(230)]
    client = world.ask(prompt, SamplingParams(max_tokens=60, seed=1), Tenancy(), PATIENCE_S)
    world.run(lambda: len(client.got) >= 20, 30.0, laws.check_running)
    choice = world.relay.live[client.name].pair
    assert choice is not None
    world.kill(choice.decode)
    settle_world(world, laws)
    (reader,) = world.living("prefill")
    assert client.moved_on and client.end == "length"
    assert reader.holdings.prefix_hits == 192, "the three full chunks of the prompt were still there"


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_late_or_lost_where_nothing_is_wrong(seed: int) -> None:
    world = VirtualWorld(seed, *[(1, 2), (2, 1), (2, 2), (0, 1)][seed])
    run_spell(world, seed, CALM_CLIENTS, [])
    assert failed_ends(world) == {} and not any(client.retried for client in world.clients)
    assert not world.relay.late_messages, "every message came when it was expected"
    for process in world.living("prefill"):
        assert process.ledger.num_expired == process.ledger.late_messages == 0


@pytest.mark.parametrize("num_slabs", [5, 7])
def test_pools_that_are_too_small_for_the_load_never_wait_for_each_other(num_slabs: int) -> None:
    """A prompt takes up to 4 slabs at both ends: whoever holds what another needs is fetched, and ends."""
    world = VirtualWorld(num_slabs, 1, 1, num_slabs=num_slabs)
    laws, rng = InvariantChecker(world), Random(num_slabs)
    assert world.run(lambda: world.whole, 5.0)
    for _ in range(60):
        prompt = [rng.randrange(POISON) for _ in range(rng.choice([60, 128, 200, 240]))]
        world.ask(prompt, random_sampling(rng, rng.choice([1, 8, 40])), Tenancy(rng.choice("ab")), PATIENCE_S)
    settle_world(world, laws)
    assert failed_ends(world) == {}


@pytest.mark.parametrize("seed", range(2))
def test_poison_is_quarantined_and_harms_nobody_beside_it(seed: int) -> None:
    world = VirtualWorld(seed, 2, 2)
    run_spell(world, seed, ClientMix(rate=8.0, hurried=0.0, leaving=0.0, poisonous=0.02), [], 20.0)
    poisonous = {client.name for client in world.clients if POISON in client.prompt}
    failed = failed_ends(world)
    assert poisonous and set(failed) == poisonous
    assert set(failed.values()) == {"request_quarantined"}
    assert len(world.crashes) <= 2 * len(poisonous)
    assert not any(client.retry for client in world.clients if client.name in poisonous)


def test_a_poisonous_question_is_refused_when_it_comes_again() -> None:
    world = VirtualWorld(3, 2, 2)
    laws, rng = InvariantChecker(world), Random(3)
    assert world.run(lambda: world.whole, 5.0)
    prompt, asked = [1, 2, POISON, 4], random_sampling(rng, 8)
    first = world.ask(prompt, asked, Tenancy(), PATIENCE_S)
    settle_world(world, laws)
    crashes = len(world.crashes)
    again = world.ask(prompt, asked, Tenancy(), PATIENCE_S)
    assert first.end == again.end == "request_quarantined"
    settle_world(world, laws)
    assert len(world.crashes) == crashes


class ShortLeasePrefillWorker(PrefillWorker):
    """Its leases are far shorter than any pull: what it has offered is given to the next prompt."""

    def take_over(self, seq: Sequence, now_s: float) -> None:
        self.ledger.lease_s = 0.05
        super().take_over(seq, now_s)


def run_race(seed: int) -> VirtualWorld:
    """Pulls take far longer than leases, and slabs are scarce."""
    world = VirtualWorld(seed, 1, 1, num_slabs=10, readers=ShortLeasePrefillWorker)
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: world.whole, 5.0)
    world.throttle("prefill-0", "decode-0", 1e4, 12.0)
    until_s = world.agenda.now_s + 12.0
    ClientLoad(world, rng, ClientMix(rate=6.0, hurried=0.0, leaving=0.0), until_s)
    world.run(lambda: world.agenda.now_s >= until_s, 60.0, laws.check_running)
    settle_world(world, laws)
    return world


def test_slabs_that_are_given_away_while_they_are_read_are_never_decoded() -> None:
    world = run_race(1)
    assert any("kv_transfer_failed" in client.retried for client in world.clients)


def test_the_race_is_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run, with nobody who verifies."""
    monkeypatch.setattr(ChunkDigester, "matches_chunk", lambda self, index, payload, promised: True)
    with pytest.raises(InvariantBroken, match="has got"):
        run_race(1)


@pytest.mark.parametrize("how", ["stop gateway", "block gateway"])
@pytest.mark.parametrize("seconds", [2.0, 8.0])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_gateway_that_stands_still_for_less_than_the_silence_limit_loses_nothing(
    how: str, seconds: float, seed: int
) -> None:
    world = VirtualWorld(seed, 2, 2)
    blow = VirtualWorld.stop_gateway if how == "stop gateway" else VirtualWorld.block_gateway
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: world.whole, 5.0)
    until_s = world.agenda.now_s + 12.0
    ClientLoad(world, rng, CALM_CLIENTS, until_s)
    world.agenda.schedule_after(0.5, lambda: blow(world, seconds), "blow")
    world.run(partial(_is_over, world, until_s), 30.0, laws.check_running)
    settle_world(world, laws)
    assert world.faults[how] == 1 and len(world.clients) > 50
    assert failed_ends(world) == {} and not [name for name in world.clients if name.retried]
    assert not [process.name for process in world.living() if process.line.breaks]


def test_after_thirty_seconds_without_the_gateway_requests_go_on_or_end_in_one_way() -> None:
    world = VirtualWorld(1, 2, 2)
    laws, rng = InvariantChecker(world), Random(1)
    assert world.run(lambda: world.whole, 5.0)
    until_s = world.agenda.now_s + 32.0
    ClientLoad(
        world, rng, ClientMix(rate=4.0, hurried=0.0, leaving=0.0), until_s
    )  # not more than it takes in at once
    world.agenda.schedule_after(0.5, lambda: world.stop_gateway(30.0), "blow")
    world.run(lambda: world.agenda.now_s >= until_s, 60.0, laws.check_running)
    settle_world(world, laws)
    assert all(process.line.breaks == 1 for process in world.living()), (
        "the workers gave it up, and freed all"
    )
    assert failed_ends(world) == {} and len(world.clients) > 50
