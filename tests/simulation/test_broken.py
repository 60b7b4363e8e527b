"""Control runs: whatever is broken on purpose must break a law. A simulation that sees nothing proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import msgspec
import pytest

from diptych.messages import Abort, Generate, Prefill, Step, ToGateway
from diptych.request import Sampling
from engine.scheduler import Sequence
from kvtransfer.digests import Seal
from prefill_worker.worker import Prefiller
from router.effects import Effect, Event, Fail, Finish, Send
from router.relay import Relay
from tests.simulation.channel import Exchange
from tests.simulation.laws import Broken, Laws, settle
from tests.simulation.storm import BLOWS, Clients, Crowd, Storm
from tests.simulation.toy import ToyRow, ToySampler
from tests.simulation.world import World

TRIES = 12  # seeds; a law breaks within the first few
STORM_S = 6.0


class Forgetful(Relay):
    """Does not tell workers that a request is over."""

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        effects = super().handle(event, now_s)
        return [one for one in effects if not (isinstance(one, Send) and isinstance(one.message, Abort))]


class Amnesiac(Relay):
    """Begins another attempt without the tokens that were delivered."""

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        return [self._blank(effect) for effect in super().handle(event, now_s)]

    def _blank(self, effect: Effect) -> Effect:
        if isinstance(effect, Send) and isinstance(effect.message, Prefill | Generate):
            return replace(effect, message=msgspec.structs.replace(effect.message, output=[]))
        return effect


class Silent(Relay):
    """Does not tell clients that their request has failed."""

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        return [effect for effect in super().handle(event, now_s) if not isinstance(effect, Fail)]


class Talkative(Relay):
    """Says the end twice."""

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        effects = super().handle(event, now_s)
        return effects + [effect for effect in effects if isinstance(effect, Finish)]


class Hoarder(Prefiller):
    """Keeps what an aborted request has under lease."""

    def abort(self, request: str, epoch: int) -> None:
        """Let somebody else see to it."""


def storm(seed: int, kinds: list[str], crowd: Crowd | None = None, **parts: type) -> World:
    """As in test_storms, with broken `parts`. Raises Broken."""
    world = World(seed, num_slabs=12, **parts)  # type: ignore[arg-type]
    laws, rng = Laws(world), Random(seed)
    world.run(lambda: world.whole, 5.0, laws.hold)
    until_s = world.agenda.now_s + STORM_S
    Clients(world, rng, crowd or Crowd(), until_s)
    Storm(world, rng, 2.0, until_s, kinds)
    world.run(lambda: world.agenda.now_s >= until_s, 2 * STORM_S, laws.hold)
    settle(world, laws)
    return world


def must_break(run: Callable[[int], object], law: str) -> None:
    """One of the first seeds breaks a law, and says it in words that match `law`."""
    with pytest.raises((Broken, AssertionError), match=law):
        for seed in range(TRIES):
            run(seed)


@pytest.mark.parametrize(
    ("relay", "kinds", "law"),
    [
        (Forgetful, ["slow", "stall"], "at rest|still wait"),
        (Amnesiac, ["kill", "drain", "reset"], "has got"),
        (Silent, ["corrupt", "kill", "cut"], "nobody works on"),
        (Talkative, ["slow"], "has ended before"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_relay_is_seen(relay: type[Relay], kinds: list[str], law: str) -> None:
    must_break(lambda seed: storm(seed, kinds, relays=relay), law)


def test_kv_that_nobody_verifies_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With verification, the same altered bytes harm nobody."""
    altered = storm(0, ["corrupt"]).pipes.corrupted
    assert altered
    monkeypatch.setattr(Seal, "matches", lambda self, index, payload, promised: True)
    must_break(lambda seed: storm(seed, ["corrupt"]), "has got")


def test_a_frame_that_is_lost_unnoticed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    take, dice = Exchange.take, Random(0)

    def lossy(self: Exchange, name: str, session: int, payload: bytes) -> None:
        message = msgspec.msgpack.decode(payload, type=ToGateway)
        if not (isinstance(message, Step) and dice.random() < 0.01):
            take(self, name, session, payload)

    monkeypatch.setattr(Exchange, "take", lossy)
    must_break(lambda seed: storm(seed, ["slow"]), "has got|deadline|ended as")


def test_a_sampler_that_forgets_what_it_wrote_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """So answers do go on elsewhere, and penalties and grammars have to be replayed for that."""

    def blank(self: ToySampler, seq: Sequence) -> ToyRow:
        asked: Sampling = seq.sampling
        return ToyRow(asked, ())

    monkeypatch.setattr(ToySampler, "open", blank)
    must_break(lambda seed: storm(seed, ["kill", "drain"]), "has got|ended as")


def test_a_worker_that_keeps_what_is_over_is_seen() -> None:
    must_break(lambda seed: storm(seed, ["stall", "throttle"], readers=Hoarder), "at rest|still wait|is open")


def test_the_same_runs_break_nothing_when_nothing_is_broken() -> None:
    for kinds in (["slow", "stall"], ["kill", "drain", "reset"], ["corrupt", "kill", "cut"], sorted(BLOWS)):
        storm(1, kinds)
