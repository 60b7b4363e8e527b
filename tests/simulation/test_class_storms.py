"""Storms over workers that hold KV of two classes: every answer is right to the last token, in its own class.

And what is broken on purpose is seen: a pool, a step or a relay that takes one class for the other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from diptych.chunks import RAW_CLASS
from diptych.messages import Generate, Prefill
from engine.step_work import StepWork
from router.effects import RelayEffect, RelayEvent, SendMessage
from router.requests.relay import Relay
from tests.simulation.faults import FAULTS
from tests.simulation.storms import run_class_storm
from tests.simulation.virtual_laws import DONE, InvariantBroken
from tests.simulation.virtual_model import CODED, VirtualClassRunner, VirtualRunner

SEEDS = range(6)
# A law breaks within the first few.
TRIES = range(12)


def test_no_law_is_broken_with_two_classes_in_each_worker() -> None:
    """Answers stay with the class that was asked for; there are hits, preemptions and migrations in both."""
    migrated, cached = Counter[str](), Counter[str]()
    done, preempted = Counter[str](), 0
    for seed in SEEDS:
        try:
            world, _ = run_class_storm(seed, sorted(FAULTS))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for client in world.clients:
            assert client.asked_class in (None, client.kv_class) or not client.got
            done[client.kv_class] += client.end in DONE
            migrated[client.kv_class] += client.end in DONE and client.moved_on
        for process in world.living():
            preempted += sum(process.engine.stats.preemptions.values())
            for name in (RAW_CLASS, CODED):
                cached[name] += process.holdings.arena_of(name).prefix_hits
    assert preempted and all(seen[name] for seen in (done, migrated, cached) for name in (RAW_CLASS, CODED))


class MisreadingRunner(VirtualRunner):
    """Reads coded pages as the raw ones, once in a while."""

    def compute_layer(self, work: StepWork, layer: int, below: list[bytes]) -> list[bytes]:
        self._coded = bool(self._memory.layout.codec) and work.start % 7 != 5
        return super().compute_layer(work, layer, below)


class ForgetfulRelay(Relay):
    """Does not name the class of some requests, nor that of answers that go on elsewhere: they get the first one."""

    def handle_event(self, event: RelayEvent, now_s: float) -> list[RelayEffect]:
        return [self._blank(effect) for effect in super().handle_event(event, now_s)]

    def _blank(self, effect: RelayEffect) -> RelayEffect:
        message = effect.message if isinstance(effect, SendMessage) else None
        if (
            isinstance(effect, SendMessage)
            and isinstance(message, Prefill | Generate)
            and (message.output or message.request.endswith("7"))
        ):
            return replace(effect, message=msgspec.structs.replace(message, kv_class=""))
        return effect


@pytest.mark.parametrize(
    "parts", [{"runners": MisreadingRunner}, {"relays": ForgetfulRelay}], ids=["a runner", "a relay"]
)
def test_who_takes_one_class_for_the_other_is_seen(parts: dict[str, Any]) -> None:
    with pytest.raises(InvariantBroken, match="has got"):
        for seed in TRIES:
            run_class_storm(seed, ["kill", "drain", "slow"], **parts)


def test_a_step_that_mixes_up_its_pools_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a work is computed by the runner of another one, which may be of the other class."""
    own = VirtualClassRunner._runner_of
    chosen: list[VirtualRunner] = []

    def first_runner(self: VirtualClassRunner, work: StepWork) -> VirtualRunner:
        found = own(self, work)
        if len(chosen) % 50 == 49 and chosen[-1] in self._runners:
            found = chosen[-1]
        chosen.append(found)
        return found

    monkeypatch.setattr(VirtualClassRunner, "_runner_of", first_runner)
    with pytest.raises(InvariantBroken, match="has got"):
        for seed in TRIES:
            run_class_storm(seed, ["slow"])
