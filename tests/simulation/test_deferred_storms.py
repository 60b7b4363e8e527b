"""Storms over workers that cannot continue what others have begun: they draw first tokens themselves, and answers that
have begun stay with them.

The toy sampler of such workers really cannot: it takes the tokens of an answer for a part of the prompt, so whoever is
continued wrongly is seen at once.
"""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec import structs

from diptych.messages import Prefill
from diptych.request import GRAMMAR, PENALTIES, SEED
from router.effects import RelayEffect, RelayEvent, SendMessage
from router.requests.continuable import can_continue
from router.requests.relay import Relay
from tests.simulation.faults import FAULTS, ClientMix
from tests.simulation.storms import CALM_CLIENTS, SPELL_S, failed_ends, run_spell, run_storm
from tests.simulation.virtual_laws import DONE, InvariantBroken
from tests.simulation.world import VirtualWorld

LIMITED: list[tuple[str, ...]] = [(), (SEED,), (GRAMMAR, PENALTIES)]
SEEDS = range(6)


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(6, 60), marks=pytest.mark.slow)])
def test_no_law_is_broken_by_workers_that_cannot_continue_each_others_answers(seeds: range) -> None:
    seen = Counter[str]()
    for seed in seeds:
        traits = LIMITED[seed % len(LIMITED)]
        crowd = ClientMix(bulk=0.2 * (seed % 2))
        try:
            world, _ = run_storm(seed, sorted(FAULTS), crowd, traits)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for client in world.clients:
            free = can_continue(client.sampling, traits)
            seen["free done" if free else "bound done"] += client.end in DONE
            seen["cut"] += client.end == "not_continuable"
            seen["moved on"] += free and client.moved_on and client.end in DONE
            seen["began again"] += not free and bool(client.retried) and client.end in DONE
            seen["deferred"] += client.deferred
            assert free or not client.moved_on, f"seed {seed}: {client.name} began twice"
            assert not (free and client.deferred), f"seed {seed}: {client.name} had to wait"
    wanted = ("free done", "bound done", "cut", "moved on", "began again", "deferred")
    assert all(seen[what] for what in wanted), seen


@pytest.mark.parametrize("traits", [(), pytest.param((SEED,), marks=pytest.mark.slow)])
def test_with_a_spare_only_those_are_cut_who_cannot_go_on(traits: tuple[str, ...]) -> None:
    """One worker at a time is lost; who is cut gets one error, and all others their whole answer."""
    cut = 0
    for seed in range(3):
        world = VirtualWorld(seed, *[(2, 2), (0, 2)][seed % 2], traits=traits)
        run_spell(world, seed, CALM_CLIENTS, ["kill", "reset", "stop"], 2 * SPELL_S)
        failed = failed_ends(world)
        assert set(failed.values()) <= {"not_continuable"}, f"seed {seed}: {failed}"
        cut += len(failed)
    assert cut, "workers were lost in the middle of such answers"


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
def test_orders_to_drain_and_to_change_pools_cut_nobody(seed: int) -> None:
    """Answers that no other worker could continue end where they are, and the order waits for them."""
    world = VirtualWorld(seed, 2, 2, traits=())
    run_spell(world, seed, CALM_CLIENTS, ["command", "switch_role"])
    assert failed_ends(world) == {}
    assert (
        world.faults["command"] and world.faults["switch_role"] and any(one.deferred for one in world.clients)
    )


def test_where_nothing_is_wrong_nothing_is_late_and_every_prompt_is_computed_once() -> None:
    world = VirtualWorld(2, 2, 2, traits=())
    run_spell(world, 2, CALM_CLIENTS, [])
    assert failed_ends(world) == {} and not world.relay.late_messages
    assert not any(client.retried for client in world.clients)
    assert {client.deferred for client in world.clients} == {0, 1}
    for process in world.living("prefill"):
        assert process.ledger.num_expired == process.ledger.late_messages == 0


class HastyRelay(Relay):
    """Lets prefill workers draw first tokens that nobody can continue."""

    def handle_event(self, event: RelayEvent, now_s: float) -> list[RelayEffect]:
        effects = super().handle_event(event, now_s)
        for effect in effects:
            if isinstance(effect, SendMessage) and isinstance(effect.message, Prefill):
                self.live[effect.message.request].deferred = False
        return [
            SendMessage(one.worker, structs.replace(one.message, defer_first=False))
            if isinstance(one, SendMessage) and isinstance(one.message, Prefill)
            else one
            for one in effects
        ]


class StubbornRelay(Relay):
    """Starts every answer again elsewhere, whether or not it can be continued."""

    def handle_event(self, event: RelayEvent, now_s: float) -> list[RelayEffect]:
        for state in self.live.values():
            state.continuable = True
        return super().handle_event(event, now_s)


@pytest.mark.parametrize("relays", [HastyRelay, StubbornRelay])
def test_a_relay_that_continues_what_it_cannot_is_seen(
    relays: type[Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It also believes that any worker will do for what has begun.
    monkeypatch.setattr("router.requests.request_state.traits_to_continue", lambda sampling: frozenset())
    with pytest.raises(InvariantBroken, match="has got"):
        for seed in SEEDS:
            run_storm(seed, ["kill", "slow"], CALM_CLIENTS, (), relays)
