"""The same world as a rule-based machine: Hypothesis chooses what breaks and when."""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diptych.chunks import RAW_CLASS
from diptych.request import BULK_PRIORITY, Tenancy
from tests.simulation.virtual_laws import InvariantChecker, settle_world
from tests.simulation.virtual_model import CODED, POISON
from tests.simulation.world import PATIENCE_S, VirtualWorld, random_sampling

STEPS: list[int] = []  # of each example
MIN_STEPS = 15_000  # in all
PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
workers = st.sampled_from(PREFILL + DECODE)
short = st.sampled_from([0.2, 1.0, 2.5, 5.0])


class DeploymentMachine(RuleBasedStateMachine):
    """Two prefill and two decode workers, and whoever asks: some for bulk work."""

    world: VirtualWorld

    @initialize(
        seed=st.integers(0, 1 << 16), shared=st.booleans(), kv_class=st.sampled_from([RAW_CLASS, CODED])
    )
    def begin(self, seed: int, shared: bool, kv_class: str) -> None:
        self.world = VirtualWorld(seed, shared=shared, kv_class=kv_class)
        self.laws, self.rng = InvariantChecker(self.world), Random(seed)
        assert self.world.run(lambda: self.world.whole, 5.0)
        self.family = [self.rng.randrange(POISON) for _ in range(300)]
        for _ in range(4):
            self.ask(100, 64, 30, PATIENCE_S, 0)

    @rule(
        length=st.sampled_from([3, 63, 64, 65, 128, 190, 230]),
        common=st.sampled_from([0, 64, 128]),
        tokens=st.sampled_from([1, 2, 20, 60, 90]),
        patience_s=st.sampled_from([PATIENCE_S, PATIENCE_S, PATIENCE_S, 0.2]),
        priority=st.sampled_from([-1, 0, 1, BULK_PRIORITY]),
    )
    def ask(self, length: int, common: int, tokens: int, patience_s: float, priority: int) -> None:
        prompt = self.family[: min(length, common)]
        prompt += [self.rng.randrange(POISON) for _ in range(length - len(prompt))]
        self.world.ask(
            prompt, random_sampling(self.rng, tokens), Tenancy("ab"[length % 2], "", priority), patience_s
        )

    @rule(which=st.integers(0, 1 << 16))
    def leave(self, which: int) -> None:
        waiting = [client for client in self.world.clients if client.end is None]
        if waiting:
            self.world.leave(waiting[which % len(waiting)])

    @rule(name=workers)
    def kill(self, name: str) -> None:
        self.world.kill(name)

    @rule(name=workers, for_s=short)
    def stop(self, name: str, for_s: float) -> None:
        self.world.stop(name, for_s)

    @rule(name=workers, for_s=short)
    def cut(self, name: str, for_s: float) -> None:
        self.world.cut(name, for_s)

    @rule(name=workers, what=st.sampled_from(["reset", "drain", "command", "switch_role"]))
    def disturb(self, name: str, what: str) -> None:
        getattr(self.world, what)(name)

    @rule(source=st.sampled_from(PREFILL), sink=st.sampled_from(DECODE), for_s=short)
    def stall(self, source: str, sink: str, for_s: float) -> None:
        self.world.stall(source, sink, for_s)

    @rule(source=st.sampled_from(PREFILL), sink=st.sampled_from(DECODE), chance=st.sampled_from([0.1, 1.0]))
    def corrupt(self, source: str, sink: str, chance: float) -> None:
        self.world.corrupt(source, sink, chance, 1.0)

    @rule(for_s=st.sampled_from([0.1, 2.0]))
    @precondition(lambda self: self.world.gate is not None)
    def restart_the_gateway(self, for_s: float) -> None:
        self.world.kill_gateway(for_s)

    @rule(for_s=st.sampled_from([0.005, 0.02, 0.1, 0.5, 2.0]))
    def go_on(self, for_s: float) -> None:
        until_s = self.world.agenda.now_s + for_s
        self.world.run(lambda: self.world.agenda.now_s >= until_s, for_s + 1.0, self.laws.check_running)

    @invariant()
    def no_law_is_broken(self) -> None:
        if hasattr(self, "world"):
            self.laws.check_running()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            settle_world(self.world, self.laws)
            STEPS.append(self.world.agenda.steps)


def test_whatever_hypothesis_thinks_of() -> None:
    STEPS.clear()
    chosen = settings(
        max_examples=80,
        stateful_step_count=30,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes; the seed is printed
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(DeploymentMachine, settings=chosen)
    print(f"{sum(STEPS)} steps in {len(STEPS)} examples")
    assert sum(STEPS) >= MIN_STEPS
