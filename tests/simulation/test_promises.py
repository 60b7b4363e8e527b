"""What docs/failures.md promises, in virtual time: with room to recover no client sees a fault at all."""

from __future__ import annotations

from random import Random

import pytest

from diptych.request import Grammar, Origin, Sampling
from engine.scheduler import Sequence
from kvtransfer.digests import Seal
from prefill_worker.worker import Prefiller
from tests.simulation.gateway import Client
from tests.simulation.laws import DONE, Broken, Laws, settle
from tests.simulation.storm import Clients, Crowd, Spell
from tests.simulation.toy import POISON
from tests.simulation.world import PATIENCE_S, World, sampling

CALM = Crowd(rate=12.0, hurried=0.0, leaving=0.0)
DAMAGES = ["kill", "drain", "command", "reset", "stop", "cut", "stall", "slow", "throttle"]
SPELL_S = 10.0


def ends(world: World) -> dict[str, str]:
    """Clients that did not get their whole answer, and why."""
    return {client.name: str(client.end) for client in world.clients if client.end not in DONE}


def spell(world: World, seed: int, crowd: Crowd, kinds: list[str], seconds: float = SPELL_S) -> Laws:
    """Clients ask, one blow falls at a time, then all comes to rest. Raises Broken."""
    laws, rng = Laws(world), Random(seed)
    assert world.run(lambda: world.whole, 5.0)
    until_s = world.agenda.now_s + seconds
    Clients(world, rng, crowd, until_s)
    if kinds:
        Spell(world, rng, 3.0, until_s, kinds)
    world.run(lambda: world.agenda.now_s >= until_s, 2 * seconds, laws.hold)
    settle(world, laws)
    return laws


def test_with_a_spare_no_client_sees_that_a_worker_is_lost() -> None:
    """One worker at a time is killed, stopped, cut off, drained: every answer is whole, and right."""
    retried: list[str] = []
    for seed in range(6):
        world = World(seed, *[(2, 2), (2, 2), (0, 2)][seed % 3], shared=seed % 2 == 0)
        spell(world, seed, CALM, DAMAGES)
        assert ends(world) == {}, f"seed {seed}"
        retried += [code for client in world.clients for code in client.retried]
    assert len(retried) > 10 and "worker_lost" in retried, "workers were lost in the middle of their work"


@pytest.mark.parametrize("seed", range(3))
def test_without_a_spare_requests_wait_for_the_worker_that_is_started_again(seed: int) -> None:
    world = World(seed, *[(1, 1), (0, 1)][seed % 2])
    spell(world, seed, CALM, ["kill", "drain", "reset"])
    assert ends(world) == {}
    assert any(client.moved_on for client in world.clients), "streams were cut in the middle"


def test_a_decode_worker_that_is_to_drain_waits_for_those_on_the_way_to_it() -> None:
    """There is no other; nothing is read twice."""
    for moment in range(20):
        world = World(moment, 1, 1)
        laws, rng = Laws(world), Random(moment)
        assert world.run(lambda world=world: world.whole, 5.0)  # type: ignore[misc]
        prompt = [rng.randrange(POISON) for _ in range(230)]
        client = world.ask(prompt, Sampling(max_tokens=20, seed=1), Origin(), PATIENCE_S)
        ordered_s = world.agenda.now_s + moment * 0.001
        world.agenda.at(ordered_s, lambda world=world: world.command("decode-0"), "blow")  # type: ignore[misc]
        settle(world, laws)
        assert (client.end, client.retried, world.faults["command"]) == ("length", [], 1), moment


@pytest.mark.parametrize("pools", [(2, 2), (0, 2), (1, 1)], ids=lambda pools: f"{pools[0]}P{pools[1]}D")
@pytest.mark.parametrize("grammar", [None, Grammar("lark", "1009")])
def test_an_answer_cut_anywhere_goes_on_exactly(pools: tuple[int, int], grammar: Grammar | None) -> None:
    """Its decode worker dies after each of these tokens: the first, those at the ends of chunks, the last but one."""
    for delivered in (1, 2, 33, 34, 35, 98, 99):
        client, wanted = cut(World(delivered, *pools), delivered, grammar)
        assert (client.got, client.end) == client.wanted
        early = (
            delivered == 1 or len(wanted) <= delivered
        )  # the decode worker may not have heard of it yet, or no more
        assert early or client.retried == ["worker_lost"]


def cut(world: World, delivered: int, grammar: Grammar | None) -> tuple[Client, list[int]]:
    """One request, whose decode worker dies when so many tokens were delivered, and what it should answer."""
    laws, rng = Laws(world), Random(delivered)
    assert world.run(lambda: world.whole, 5.0)
    prompt = [rng.randrange(POISON) for _ in range(94)]  # the 34th token fills a chunk
    asked = Sampling(max_tokens=100, seed=5, grammar=grammar)
    client = world.ask(prompt, asked, Origin(), PATIENCE_S)
    world.run(lambda: len(client.got) >= delivered or client.end is not None, 30.0, laws.hold)
    if client.end is None:
        choice = world.relay.live[client.name].choice
        assert choice is not None
        world.kill(choice.decode)
    settle(world, laws)
    return client, client.wanted[0]


def test_without_leave_to_read_locally_a_client_is_told_when_to_come_back() -> None:
    """With leave, the same request is answered by a decode worker."""
    for allowed, end in (("never", "no_workers"), ("fallback", "length")):
        world = World(1, 1, 1, local_prefill=allowed)
        laws = Laws(world)
        assert world.run(lambda world=world: world.whole, 5.0)  # type: ignore[misc]
        world.stop("prefill-0", 30.0)
        world.run(lambda world=world: "prefill-0" not in world.relay.fleet.members, 5.0)  # type: ignore[misc]
        client = world.ask([1, 2, 3], Sampling(max_tokens=5, seed=1), Origin(), PATIENCE_S)
        settle(world, laws)
        assert client.end == end
        assert allowed == "fallback" or (client.retry and client.retry_after_s)


def test_kv_of_the_prompt_that_survives_is_not_computed_again() -> None:
    world = World(1, 1, 2)
    laws, rng = Laws(world), Random(1)
    assert world.run(lambda: world.whole, 5.0)
    prompt = [rng.randrange(POISON) for _ in range(230)]
    client = world.ask(prompt, Sampling(max_tokens=60, seed=1), Origin(), PATIENCE_S)
    world.run(lambda: len(client.got) >= 20, 30.0, laws.hold)
    choice = world.relay.live[client.name].choice
    assert choice is not None
    world.kill(choice.decode)
    settle(world, laws)
    (reader,) = world.living("prefill")
    assert client.moved_on and client.end == "length"
    assert reader.holdings.hits == 192, "the three full chunks of the prompt were still there"


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_late_or_lost_where_nothing_is_wrong(seed: int) -> None:
    world = World(seed, *[(1, 2), (2, 1), (2, 2), (0, 1)][seed])
    spell(world, seed, CALM, [])
    assert ends(world) == {} and not any(client.retried for client in world.clients)
    assert not world.relay.late, "every message came when it was expected"
    for process in world.living("prefill"):
        assert process.ledger.expired == process.ledger.late == 0


@pytest.mark.parametrize("num_slabs", [5, 7])
def test_pools_that_are_too_small_for_the_load_never_wait_for_each_other(num_slabs: int) -> None:
    """A prompt takes up to 4 slabs at both ends: whoever holds what another needs is fetched, and ends."""
    world = World(num_slabs, 1, 1, num_slabs=num_slabs)
    laws, rng = Laws(world), Random(num_slabs)
    assert world.run(lambda: world.whole, 5.0)
    for _ in range(60):
        prompt = [rng.randrange(POISON) for _ in range(rng.choice([60, 128, 200, 240]))]
        world.ask(prompt, sampling(rng, rng.choice([1, 8, 40])), Origin(rng.choice("ab")), PATIENCE_S)
    settle(world, laws)
    assert ends(world) == {}


@pytest.mark.parametrize("seed", range(2))
def test_poison_is_quarantined_and_harms_nobody_beside_it(seed: int) -> None:
    world = World(seed, 2, 2)
    spell(world, seed, Crowd(rate=8.0, hurried=0.0, leaving=0.0, poisonous=0.02), [], 20.0)
    poisonous = {client.name for client in world.clients if POISON in client.prompt}
    failed = ends(world)
    assert poisonous and set(failed) == poisonous
    assert set(failed.values()) == {"request_quarantined"}
    assert len(world.crashes) <= 2 * len(poisonous)
    assert not any(client.retry for client in world.clients if client.name in poisonous)


def test_a_poisonous_question_is_refused_when_it_comes_again() -> None:
    world = World(3, 2, 2)
    laws, rng = Laws(world), Random(3)
    assert world.run(lambda: world.whole, 5.0)
    prompt, asked = [1, 2, POISON, 4], sampling(rng, 8)
    first = world.ask(prompt, asked, Origin(), PATIENCE_S)
    settle(world, laws)
    crashes = len(world.crashes)
    again = world.ask(prompt, asked, Origin(), PATIENCE_S)
    assert first.end == again.end == "request_quarantined"
    settle(world, laws)
    assert len(world.crashes) == crashes


class Hasty(Prefiller):
    """Its leases are far shorter than any pull: what it has offered is given to the next prompt."""

    def let_go(self, seq: Sequence, now_s: float) -> None:
        self.ledger.lease_s = 0.05
        super().let_go(seq, now_s)


def race(seed: int) -> World:
    """Pulls take far longer than leases, and slabs are scarce."""
    world = World(seed, 1, 1, num_slabs=10, readers=Hasty)
    laws, rng = Laws(world), Random(seed)
    assert world.run(lambda: world.whole, 5.0)
    world.throttle("prefill-0", "decode-0", 1e4, 12.0)
    until_s = world.agenda.now_s + 12.0
    Clients(world, rng, Crowd(rate=6.0, hurried=0.0, leaving=0.0), until_s)
    world.run(lambda: world.agenda.now_s >= until_s, 60.0, laws.hold)
    settle(world, laws)
    return world


def test_slabs_that_are_given_away_while_they_are_read_are_never_decoded() -> None:
    world = race(1)
    assert any("kv_transfer_failed" in client.retried for client in world.clients)


def test_the_race_is_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run, with nobody who verifies."""
    monkeypatch.setattr(Seal, "matches", lambda self, index, payload, promised: True)
    with pytest.raises(Broken, match="has got"):
        race(1)
