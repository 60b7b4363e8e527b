"""Control runs: whatever is broken on purpose must break a law. A simulation that sees nothing proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import msgspec
import pytest

from diptych.chunks import RAW_CLASS
from diptych.messages import Abort, Generate, Prefill, Step, ToGateway
from diptych.request import SamplingParams
from engine.sequence import Sequence
from engine.step_work import StepWork
from kvtransfer.digests import ChunkDigester
from prefill_worker.worker import PrefillWorker
from router.effects import FailRequest, FinishRequest, RelayEffect, RelayEvent, SendMessage
from router.requests.relay import Relay
from tests.simulation.channel import VirtualHub
from tests.simulation.faults import FAULTS, ClientLoad, ClientMix, FaultStorm
from tests.simulation.virtual_laws import InvariantBroken, InvariantChecker, settle_world
from tests.simulation.virtual_model import (
    CODED,
    VirtualMemory,
    VirtualRunner,
    VirtualSampler,
    VirtualSamplerRow,
)
from tests.simulation.world import VirtualWorld

TRIES = 12  # seeds; a law breaks within the first few
STORM_S = 6.0


class ForgetfulRelay(Relay):
    """Does not tell workers that a request is over."""

    def handle_event(self, event: RelayEvent, now_s: float) -> list[RelayEffect]:
        effects = super().handle_event(event, now_s)
        return [
            one for one in effects if not (isinstance(one, SendMessage) and isinstance(one.message, Abort))
        ]


class AmnesiacRelay(Relay):
    """Begins another attempt without the tokens that were delivered."""

    def handle_event(self, event: RelayEvent, now_s: float) -> list[RelayEffect]:
        return [self._blank(effect) for effect in super().handle_event(event, now_s)]

    def _blank(self, effect: RelayEffect) -> RelayEffect:
        if isinstance(effect, SendMessage) and isinstance(effect.message, Prefill | Generate):
            return replace(effect, message=msgspec.structs.replace(effect.message, output=[]))
        return effect


class SilentRelay(Relay):
    """Does not tell clients that their request has failed."""

    def handle_event(self, event: RelayEvent, now_s: float) -> list[RelayEffect]:
        return [
            effect for effect in super().handle_event(event, now_s) if not isinstance(effect, FailRequest)
        ]


class TalkativeRelay(Relay):
    """Says the end twice."""

    def handle_event(self, event: RelayEvent, now_s: float) -> list[RelayEffect]:
        effects = super().handle_event(event, now_s)
        return effects + [effect for effect in effects if isinstance(effect, FinishRequest)]


class ExactPrefillRunner(VirtualRunner):
    """Attends to exact KV within a step and to codes afterwards, as KVQuant's paper does it."""

    def attended_row(self, work: StepWork, layer: int, position: int, exact: bytes) -> bytes:
        return exact


class ExactHitRunner(VirtualRunner):
    """Keeps the exact rows that it computed, and continues a prompt from them if they are cached."""

    def __init__(self, memory: VirtualMemory, spend: Callable[[int], None] = lambda tokens: None) -> None:
        super().__init__(memory, spend)
        self._exact: dict[bytes, bytes] = {}

    def attended_row(self, work: StepWork, layer: int, position: int, exact: bytes) -> bytes:
        coded = super().attended_row(work, layer, position, exact)
        self._exact[coded] = exact
        return coded

    def _load_row(self, work: StepWork, layer: int, position: int) -> bytes:
        coded = super()._load_row(work, layer, position)
        continues = position < work.start and len(work.tokens) > 1
        return self._exact.get(coded, coded) if continues else coded


class FirstOfTheStepRunner(VirtualRunner):
    """Takes the first token of a step for that of the sequence."""

    def sink_row(self, work: StepWork, layer: int) -> bytes | None:
        return super().sink_row(replace(work, first_token=work.tokens[0]), layer)


class HoardingPrefillWorker(PrefillWorker):
    """Keeps what an aborted request has under lease."""

    def abort_attempts(self, request: str, epoch: int) -> None:
        """Let somebody else see to it."""


def run_storm(
    seed: int, kinds: list[str], crowd: ClientMix | None = None, **parts: type | str
) -> VirtualWorld:
    """As in test_storms, with broken `parts`. Raises Broken."""
    world = VirtualWorld(seed, num_slabs=12, **parts)  # type: ignore[arg-type]
    laws, rng = InvariantChecker(world), Random(seed)
    world.run(lambda: world.whole, 5.0, laws.check_running)
    until_s = world.agenda.now_s + STORM_S
    ClientLoad(world, rng, crowd or ClientMix(), until_s)
    FaultStorm(world, rng, 2.0, until_s, kinds)
    world.run(lambda: world.agenda.now_s >= until_s, 2 * STORM_S, laws.check_running)
    settle_world(world, laws)
    return world


def find_broken(run: Callable[[int], object], law: str) -> None:
    """One of the first seeds breaks a law, and says it in words that match `law`."""
    with pytest.raises((InvariantBroken, AssertionError), match=law):
        for seed in range(TRIES):
            run(seed)


@pytest.mark.parametrize(
    ("relay", "kinds", "law"),
    [
        (ForgetfulRelay, ["slow", "stall"], "at rest|still wait"),
        (AmnesiacRelay, ["kill", "drain", "reset"], "has got"),
        (SilentRelay, ["corrupt", "kill", "cut"], "nobody works on"),
        (TalkativeRelay, ["slow"], "has ended before"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_relay_is_seen(relay: type[Relay], kinds: list[str], law: str) -> None:
    find_broken(lambda seed: run_storm(seed, kinds, relays=relay), law)


@pytest.mark.parametrize("runner", [ExactPrefillRunner, ExactHitRunner, FirstOfTheStepRunner])
def test_a_reader_that_does_not_read_the_codes_is_seen(runner: type[VirtualRunner]) -> None:
    """Without any fault: prompts are read in chunks and from the cache. Raw KV is read the same way by all of them."""
    run_storm(0, ["slow"], runners=runner)
    find_broken(lambda seed: run_storm(seed, ["slow"], kv_class=CODED, runners=runner), "has got")


@pytest.mark.parametrize("kv_class", [RAW_CLASS, CODED])
def test_kv_that_nobody_verifies_is_seen(kv_class: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With verification, the same altered bytes harm nobody."""
    altered = run_storm(0, ["corrupt"], kv_class=kv_class).pipes.corrupted
    assert altered
    monkeypatch.setattr(ChunkDigester, "matches_chunk", lambda self, index, payload, promised: True)
    find_broken(lambda seed: run_storm(seed, ["corrupt"], kv_class=kv_class), "has got")


def test_a_frame_that_is_lost_unnoticed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    take, dice = VirtualHub.take, Random(0)

    def lossy(self: VirtualHub, name: str, session: int, payload: bytes) -> None:
        message = msgspec.msgpack.decode(payload, type=ToGateway)
        if not (isinstance(message, Step) and dice.random() < 0.01):
            take(self, name, session, payload)

    monkeypatch.setattr(VirtualHub, "take", lossy)
    find_broken(lambda seed: run_storm(seed, ["slow"]), "has got|deadline|ended as")


def test_a_sampler_that_forgets_what_it_wrote_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """So answers do go on elsewhere, and penalties and grammars have to be replayed for that."""

    def blank(self: VirtualSampler, seq: Sequence) -> VirtualSamplerRow:
        asked: SamplingParams = seq.sampling
        return VirtualSamplerRow(asked, ())

    monkeypatch.setattr(VirtualSampler, "open", blank)
    find_broken(lambda seed: run_storm(seed, ["kill", "drain"]), "has got|ended as")


def test_a_worker_that_keeps_what_is_over_is_seen() -> None:
    find_broken(
        lambda seed: run_storm(seed, ["stall", "throttle"], readers=HoardingPrefillWorker),
        "at rest|still wait|is open",
    )


def test_the_same_runs_break_nothing_when_nothing_is_broken() -> None:
    for kinds in (["slow", "stall"], ["kill", "drain", "reset"], ["corrupt", "kill", "cut"], sorted(FAULTS)):
        run_storm(1, kinds)
